"""Every wrong input is answered by a message for people, and docs/bad-inputs.md says the same."""

from pathlib import Path

import pytest

from integration.bad_inputs import CASES, PAGE, Place, make_place, page


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("bad"))


def test_the_page_says_what_every_wrong_input_gets(place: Place) -> None:
    found, written = page(place), PAGE.read_text(encoding="utf-8")
    assert len(CASES) >= 40
    assert found == written, "write it again: PYTHONPATH=src:tests .venv/bin/python -m integration.bad_inputs"


def test_messages_name_no_path_of_this_machine(place: Place) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert str(Path.home()) not in text
    assert "/tmp/" not in text
