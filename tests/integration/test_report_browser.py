"""The report of a real run, opened in headless Chromium: no script error, no empty plot, in light and in dark."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from blockdraft.commands.report import read_run
from blockdraft.commands.report_page import page
from blockdraft.data.conversations import write_conversations
from integration.tiny_run import make_files, run_control, tiny_config
from tiny_chat import chat

BROWSERS = ("chromium", "chromium-browser", "chrome-headless-shell", "google-chrome", "google-chrome-stable")
WIDTH = 1280
MEASURE = """
<script>
const plots = [...document.querySelectorAll("svg.plot, svg.timeline")].map((plot) => {
  const card = plot.closest(".card");
  const { x, y, width, height } = plot.getBoundingClientRect();
  return { title: card.querySelector("h3").textContent, box: [x, y, width, height] };
});
const wide = document.documentElement.scrollWidth;
document.documentElement.dataset.measured = JSON.stringify({ plots, wide, tall: document.body.scrollHeight });
</script>
"""


class Plot(NamedTuple):
    """Where a plot lies on the page."""

    title: str
    left: int
    top: int
    right: int
    bottom: int


class Opened(NamedTuple):
    """What a browser made of a page."""

    error: str
    is_ready: bool
    plots: list[Plot]
    wide: int
    picture_HWC: np.ndarray


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no Chromium here (looked for {', '.join(BROWSERS)}); on Debian: apt-get install chromium")
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """The page of a run of two targets and two drafters with held-out prompts."""
    root = tmp_path_factory.mktemp("report")
    write_conversations(root / "words.jsonl", [chat("Say ab."), chat("Count.")])
    runtime = {"targets": ("cpu", "cpu"), "drafters": ("cpu", "cpu")}
    evaluation = {"prompts": (str(root / "words.jsonl"),), "every": 8, "num_prompts": 2, "max_new_tokens": 12}
    config = tiny_config(
        make_files(root / "files"), root / "run", steps=24, optim={"accumulation": 4}, runtime=runtime, eval=evaluation
    )
    return page(read_run(run_control(config).run_dir))


def run_browser(browser: str, directory: Path, *flags: str) -> str:
    # The sandbox needs rights that a container lacks; the page is our own.
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
               "--no-first-run", f"--user-data-dir={directory / 'profile'}", *flags]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=40, check=True).stdout


def open_page(browser: str, text: str, directory: Path, *, is_dark: bool = False, width: int = WIDTH) -> Opened:
    """Loads the page twice: once for what its script says, once for a picture of its whole height."""
    from matplotlib import image

    directory.mkdir(exist_ok=True)
    path = directory / "page.html"
    path.write_text(text.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    dom = run_browser(browser, directory, scheme, f"--window-size={width},900", "--dump-dom", path.as_uri())
    attributes = dict(re.findall(r'data-(\w+)="([^"]*)"', dom[: dom.index("<head")]))
    measured = json.loads(html.unescape(attributes["measured"]))
    picture = directory / "page.png"
    size = f"--window-size={width},{measured['tall'] + 60}"
    run_browser(browser, directory, scheme, size, f"--screenshot={picture}", path.as_uri())
    plots = [
        Plot(one["title"], *(round(value) for value in (x, y, x + across, y + down)))
        for one in measured["plots"]
        for x, y, across, down in [one["box"]]
    ]
    return Opened(
        attributes.get("error", ""), "ready" in attributes, plots, measured["wide"], image.imread(picture)[..., :3]
    )


def colourful(picture_HWC: np.ndarray, plot: Plot) -> float:
    """Share of a plot's pixels that are neither background, grid nor text: those have hardly any colour."""
    region_HWC = picture_HWC[plot.top : plot.bottom, plot.left : plot.right]
    return float(((region_HWC.max(-1) - region_HWC.min(-1)) > 0.15).mean())


def empty_plots(opened: Opened) -> Iterator[str]:
    for plot in opened.plots:
        if colourful(opened.picture_HWC, plot) < 0.0008:
            yield plot.title


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_page_is_drawn_without_errors(browser, text, tmp_path, is_dark):
    opened = open_page(browser, text, tmp_path, is_dark=is_dark)
    assert opened.error == ""
    assert opened.is_ready
    titles = [plot.title for plot in opened.plots]
    assert titles == [
        "Loss", "Acceptance length", "Draft tokens that are right, by slot", "Gradient norm",
        "Acceptance by slot, held out: words", "Throughput", "Busy", "Channel", "Memory", "Timeline of the last steps",
    ]  # fmt: skip
    assert list(empty_plots(opened)) == []
    brightness = opened.picture_HWC[:20, :20].mean()
    assert brightness < 0.2 if is_dark else brightness > 0.9
    assert opened.wide <= WIDTH, "the page scrolls sideways"
    for plot in opened.plots:
        assert 250 < plot.right - plot.left <= WIDTH and 80 < plot.bottom - plot.top < 700, plot


def test_on_a_narrow_screen_nothing_but_the_timeline_is_wider(browser, text, tmp_path):
    opened = open_page(browser, text, tmp_path, width=520)
    assert opened.wide <= 520
    assert all(plot.right <= 520 for plot in opened.plots if not plot.title.startswith("Timeline"))


def test_a_script_error_and_an_empty_plot_are_found(browser, text, tmp_path):
    start = text.index("<h3>Loss")
    broken = text[:start] + re.sub(r"<polyline[^>]*>", "", text[start:], count=1)
    broken = broken.replace("const { x, frame", "missing(); const { x, frame")
    opened = open_page(browser, broken, tmp_path)
    assert "missing is not defined" in opened.error
    assert not opened.is_ready
    assert list(empty_plots(opened)) == ["Loss"]
