"""Look and script of a report's page; nothing is loaded from anywhere."""

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #1d2026; --soft: #5d6470; --rule: #e2e3e6; --grid: #ebecef;
  --c0: #1f6fb2; --c1: #c8500a; --c2: #1b8a5a; --c3: #8a4fb0; --c4: #b0730a; --c5: #0f8a98; --c6: #b03a5b;
  --c7: #5b6472; --wait: #d9dce1; --alert: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --card: #1c1f25; --ink: #e8eaee; --soft: #a2aab6; --rule: #2e333b; --grid: #2a2e36;
    --c0: #6db3f2; --c1: #ff9a5c; --c2: #5fd0a0; --c3: #c99bf0; --c4: #e8b84a; --c5: #5ccfdc; --c6: #f083a2;
    --c7: #a9b1bd; --wait: #363c46; --alert: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1240px; padding: 28px 22px 60px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
}
h1 { font-size: 24px; margin: 0 0 2px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; }
h3 { font-size: 15px; margin: 0 0 2px; }
header { margin-bottom: 18px; }
.under { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
.note { margin: 4px 0 0; color: var(--soft); font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; }
.tile, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 12px 14px; }
.tile b { display: block; font-size: 21px; font-weight: 620; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile span { color: var(--soft); font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px; }
.card { padding: 14px 16px 12px; min-width: 0; }
.card > p { margin: 0 0 8px; color: var(--soft); font-size: 13px; }
.empty { padding: 26px 10px; text-align: center; border: 1px dashed var(--rule); border-radius: 8px; }
.alert { color: var(--alert); }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .title { font-size: 12.5px; }
svg .lane { fill: var(--ink); font-size: 13px; }
.cell { shape-rendering: crispEdges; }
.grid { stroke: var(--grid); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1; opacity: 0.6; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.faint { stroke-width: 1; opacity: 0.38; }
.band { fill: var(--c); opacity: 0.16; stroke: none; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1.2; }
.cursor { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; visibility: hidden; }
.plot-box { position: relative; }
.readout {
  position: absolute; top: 10px; padding: 5px 9px; border-radius: 6px; font-size: 12px; line-height: 1.45;
  background: var(--card); border: 1px solid var(--rule); pointer-events: none; visibility: hidden; white-space: nowrap;
  font-variant-numeric: tabular-nums;
}
.legend { display: flex; flex-wrap: wrap; gap: 3px 16px; list-style: none; margin: 6px 0 0; padding: 0; }
.legend li { display: flex; align-items: center; gap: 6px; color: var(--soft); font-size: 13px; }
.legend svg { width: 20px; flex: none; }
.scroll { overflow-x: auto; }
.timeline { min-width: 900px; }
.span { stroke: none; }
.pack { fill: var(--c7); } .fill { fill: var(--c0); opacity: 0.45; } .forward { fill: var(--c0); }
.copy { fill: var(--c5); } .micro { fill: var(--c1); } .sum { fill: var(--c3); } .update { fill: var(--c2); }
.save { fill: var(--c6); } .write { fill: var(--c6); opacity: 0.6; } .evaluate { fill: var(--c4); }
.log { fill: var(--c5); } .other { fill: var(--c7); opacity: 0.6; } .wait { fill: var(--wait); }
.shares td { vertical-align: middle; }
.bar { display: flex; height: 14px; min-width: 220px; border-radius: 3px; overflow: hidden; background: var(--grid); }
.bar i { display: block; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-top: 1px solid var(--rule); overflow-wrap: anywhere; }
tr:first-child > th, tr:first-child > td { border-top: none; }
th { font-weight: 500; color: var(--soft); width: 46%; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; width: auto; white-space: nowrap; }
.columns { columns: 2 420px; column-gap: 14px; }
.columns .card { break-inside: avoid; margin-bottom: 14px; }
@media (max-width: 560px) { body { padding: 16px 12px 40px; } .tile b { font-size: 18px; } }
"""

SCRIPT: Final = """
window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
});
for (const plot of document.querySelectorAll("svg[data-plot]")) {
  const { x, frame, unit, lines } = JSON.parse(plot.dataset.plot);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", frame[1]);
  cursor.setAttribute("y2", frame[3]);
  plot.append(cursor);
  const readout = document.createElement("div");
  readout.className = "readout";
  plot.parentElement.append(readout);
  const steps = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  const hide = () => {
    cursor.style.visibility = readout.style.visibility = "hidden";
  };
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const scale = plot.viewBox.baseVal.width / box.width;
    const share = ((event.clientX - box.left) * scale - frame[0]) / (frame[2] - frame[0]);
    if (share < -0.02 || share > 1.02) return hide();
    const wanted = x[0] + share * (x[1] - x[0]);
    const step = steps.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
    const at = frame[0] + ((step - x[0]) / Math.max(1e-9, x[1] - x[0])) * (frame[2] - frame[0]);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    const rows = lines.flatMap((line) => {
      const point = line.points.find((one) => one[0] === step);
      return point ? [`${line.name}: ${point[1].toLocaleString("en")}`] : [];
    });
    readout.replaceChildren();
    for (const text of [`step ${step.toLocaleString("en")} (${unit})`, ...rows]) {
      const row = document.createElement("div");
      row.textContent = text;
      readout.append(row);
    }
    const isRight = at > (frame[0] + frame[2]) / 2;
    readout.style.left = isRight ? "auto" : `${at / scale + 10}px`;
    readout.style.right = isRight ? `${box.width - at / scale + 10}px` : "auto";
    cursor.style.visibility = readout.style.visibility = "visible";
  });
}
document.documentElement.dataset.ready = "yes";
"""
