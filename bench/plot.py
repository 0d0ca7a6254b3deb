"""Plots what `paceline bench MODEL --json speed.json` measured: speed by draft length, one panel for each number of
requests.

    .venv/bin/python -m bench.plot speed.json speed.svg
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from app.serving.sweep.grid import GOVERNOR, MAIN, PLAIN
from app.serving.sweep.report import CellReport, Figures, Report, report_of

PANEL_WIDTH, PANEL_HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 46
HEADER, LEGEND_ROW = 44, 22
TICKS = 5
STYLE = """
.paceline-plot { --back: #ffffff; --ink: #1f2328; --faint: #d8dee4; --soft: #59636e;
  --line-0: #0072b2; --line-1: #c2410c; --line-2: #067a57; --line-3: #9d4a8c; --line-4: #7a5d00; }
@media (prefers-color-scheme: dark) { .paceline-plot { --back: #0d1117; --ink: #e6edf3; --faint: #30363d;
  --soft: #9198a1; --line-0: #58b4f0; --line-1: #ff9b57; --line-2: #3fd0a0; --line-3: #e39bd2; --line-4: #d9b94a; } }
.paceline-plot text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.paceline-plot .title { font-size: 16px; font-weight: 600; } .paceline-plot .panel { font-weight: 600; }
.paceline-plot .tick { fill: var(--soft); } .paceline-plot .back { fill: var(--back); }
.paceline-plot .grid { stroke: var(--faint); } .paceline-plot .line { fill: none; stroke-width: 2; }
.paceline-plot .plain { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 7 4; }
.paceline-plot .governor { stroke: var(--soft); stroke-width: 2; stroke-dasharray: 2 4; }
"""
COLOURS = 5


@dataclass(frozen=True, slots=True)
class Scale:
    """Positions of draft lengths and rates inside a panel."""

    lengths: tuple[int, ...]
    top: float

    def x(self, length: int) -> float:
        """Return the position of a length; lengths are evenly spaced, since they grow by factors."""
        width = PANEL_WIDTH - LEFT - RIGHT
        return LEFT + width * (self.lengths.index(length) + 0.5) / len(self.lengths)

    def y(self, rate: float) -> float:
        return TOP + (PANEL_HEIGHT - TOP - BOTTOM) * (1 - rate / self.top)


def as_svg(report: Report, title: str) -> str:
    """Draw the plot, with the range of each speed; cells with longer contexts, or without drafting, are left out."""
    cells = [
        candidate
        for candidate in report.cells
        if candidate.context == MAIN.context and any(map(_drafts, candidate.settings))
    ]
    cells.sort(key=lambda cell: cell.rows)
    methods = sorted({figures.method for cell in cells for figures in cell.settings if _drafts(figures)})
    columns = 1 if len(cells) < 2 else 2
    width = PANEL_WIDTH * columns
    legend = list(_legend(methods, width))
    header = HEADER + LEGEND_ROW * len(legend)
    height = header + PANEL_HEIGHT * max(1, math.ceil(len(cells) / columns))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'class="paceline-plot" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
        f'<text class="title" x="{LEFT}" y="28">{escape(_shortened(title, width - LEFT))}</text>',
    ]
    parts += [f'<g transform="translate(0 {HEADER + LEGEND_ROW * row})">{line}</g>' for row, line in enumerate(legend)]
    for number, cell in enumerate(cells):
        at = f"{PANEL_WIDTH * (number % columns)} {header + PANEL_HEIGHT * (number // columns)}"
        parts += [f'<g transform="translate({at})">', *_panel(cell, methods), "</g>"]
    if not cells:
        parts.append(f'<text x="{LEFT}" y="{header + 24}">No drafting method was measured.</text>')
    return "\n".join([*parts, "</svg>", ""])


def _drafts(figures: Figures) -> int:
    return figures.num_draft_tokens


def _panel(cell: CellReport, methods: Sequence[str]) -> Iterator[str]:
    lengths = tuple(sorted({figures.num_draft_tokens for figures in cell.settings if _drafts(figures)}))
    highest = max(figures.fastest for figures in cell.settings)
    step = _nice_step(highest)
    scale = Scale(lengths, step * math.ceil(highest / step))
    yield f'<text class="panel" x="{LEFT}" y="20">{cell.rows} {"request" if cell.rows == 1 else "requests"}</text>'
    yield from _axes(scale, step)
    for setting, kind in ((PLAIN, "plain"), (GOVERNOR, "governor")):
        if (measured := cell.find(setting.name)) is not None:
            yield f'<path class="{kind}" d="M{LEFT} {scale.y(measured.tokens_per_second):.1f}H{PANEL_WIDTH - RIGHT}"/>'
    for number, method in enumerate(methods):
        yield from _line(
            sorted((figures for figures in cell.settings if figures.method == method), key=_drafts), scale, number
        )


def _axes(scale: Scale, step: float) -> Iterator[str]:
    bottom = PANEL_HEIGHT - BOTTOM
    for count in range(round(scale.top / step) + 1):
        y = scale.y(count * step)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{PANEL_WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{count * step:g}</text>'
    for length in scale.lengths:
        x = scale.x(length)
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{length}</text>'
    middle = (LEFT + PANEL_WIDTH - RIGHT) / 2
    yield f'<text x="{middle:.1f}" y="{bottom + 36}" text-anchor="middle">Draft length (tokens)</text>'
    turned = (TOP + bottom) / 2
    yield f'<text transform="translate(14 {turned:.1f}) rotate(-90)" text-anchor="middle">Speed (tokens/s)</text>'


def _line(line: Sequence[Figures], scale: Scale, number: int) -> Iterator[str]:
    if not line:
        return
    colour = f"var(--line-{number % COLOURS})"
    places = [(scale.x(figures.num_draft_tokens), scale.y(figures.tokens_per_second)) for figures in line]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline class="line" stroke="{colour}" points="{path}"/>'
    for measured, (x, y) in zip(line, places, strict=True):
        yield f'<path stroke="{colour}" d="M{x:.1f} {scale.y(measured.slowest):.1f}V{scale.y(measured.fastest):.1f}"/>'
        yield _mark(x, y, number, colour)


def _mark(x: float, y: float, number: int, colour: str) -> str:
    """Draw a circle, square, triangle, diamond or cross, by method."""
    shapes = (
        "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
        "M-4-4h8v8h-8z",
        "M0-5l5 9h-10z",
        "M0-5l5 5l-5 5l-5-5z",
        "M-5-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z",
    )
    return f'<path d="{shapes[number % len(shapes)]}" transform="translate({x:.1f} {y:.1f})" fill="{colour}"/>'


def _legend(methods: Sequence[str], width: int) -> Iterator[str]:
    """Yield rows of entries that fit the width."""
    entries = [
        ('<path class="plain" d="M0 0H28"/>', "no drafting"),
        ('<path class="governor" d="M0 0H28"/>', "governor"),
    ]
    for number, method in enumerate(methods):
        colour = f"var(--line-{number % COLOURS})"
        line = f'<path class="line" stroke="{colour}" d="M0 0H28"/>{_mark(14, 0, number, colour)}'
        entries.append((line, method))
    row, x = "", LEFT
    for drawing, name in entries:
        size = 34 + 7 * len(name) + 20
        if row and x + size > width:
            yield row
            row, x = "", LEFT
        row += f'<g transform="translate({x} 0)">{drawing}<text x="34" y="4">{escape(name)}</text></g>'
        x += size
    yield row


def _shortened(title: str, width: int) -> str:
    """Shorten a title to the width, at nine points a letter; the SVG's own title is whole."""
    room = width // 9
    return title if len(title) <= room else f"{title[: room - 1]}…"


def _nice_step(highest: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that about five ticks reach the highest value."""
    rough = max(highest, 1e-9) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


def main() -> None:
    """Read the results and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("results", type=Path, help="file of `paceline bench MODEL --json FILE`")
    parser.add_argument("plot", type=Path, help="SVG file to write")
    given = parser.parse_args()
    results = json.loads(given.results.read_text(encoding="utf-8"))
    title = " + ".join([results["model"], *results["drafts"]])
    given.plot.write_text(as_svg(report_of(results), f"Speed by draft length: {title}"), encoding="utf-8")


if __name__ == "__main__":
    main()
