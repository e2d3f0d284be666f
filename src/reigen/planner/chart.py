"""Charts as SVG: columns in groups, and lines over them. No library is needed to draw or to show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

#: Colours that people with colour blindness can tell from each other: Okabe and Ito, "Color Universal Design", 2008.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#7F7F7F")
_WIDTH, _HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 64, 56, 96
_LEGEND_ROW = 18
#: Names of more groups than these are turned, to find their places.
_MOST_LEVEL = 8


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """Columns of one kind, one in each group, and a line over them.

    Attributes:
        name: for the legend.
        columns: heights on the left axis; None leaves one out.
        line: values on the right axis, 0 to 1; empty: no line.
        is_outlined: columns are drawn as outlines: figures that others have published.
    """

    name: str
    columns: tuple[float | None, ...]
    line: tuple[float | None, ...] = ()
    is_outlined: bool = False


def draw_chart(title: str, groups: Sequence[str], series: Sequence[ChartSeries], left: str, right: str = "") -> str:
    """Return an SVG document.

    Args:
        title: on top.
        groups: names below the groups of columns.
        series: each with a column for every group.
        left: name of the left axis.
        right: name of the right axis, for lines; empty: there is none.
    """
    legend = _legend(series)
    height = _HEIGHT + len(legend) * _LEGEND_ROW
    top = max((each for one in series for each in one.columns if each is not None), default=1.0)
    scale = _nice(top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_WIDTH / 2, 24, title, size=15),
        *_axes(scale, left, right),
        *_groups(groups, series, scale),
    ]
    for row, items in enumerate(legend):
        x = float(_LEFT)
        for index, name in items:
            y = _HEIGHT + row * _LEGEND_ROW - 4
            parts.append(_rectangle(x, y - 9, 12, 10, _COLOURS[index % len(_COLOURS)], series[index].is_outlined))
            parts.append(_text(x + 18, y, name, anchor="start"))
            x += _legend_width(name)
    return "\n".join([*parts, "</svg>", ""])


def _legend(series: Sequence[ChartSeries]) -> list[list[tuple[int, str]]]:
    rows: list[list[tuple[int, str]]] = [[]]
    used = 0.0
    for index, one in enumerate(series):
        width = _legend_width(one.name)
        if rows[-1] and used + width > _WIDTH - _LEFT - _RIGHT:
            rows.append([])
            used = 0.0
        rows[-1].append((index, one.name))
        used += width
    return rows


def _legend_width(name: str) -> float:
    return 36 + 6.6 * len(name)


def _nice(value: float) -> float:
    """Return a round number that is not below a value."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.999)


def _axes(scale: float, left: str, right: str) -> list[str]:
    bottom, width = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for step in range(6):
        y = _y(step / 5)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{scale * step / 5:,.6g}", anchor="end"))
        if right:
            parts.append(_text(width + 8, y + 4, f"{step * 20} %", anchor="start"))
    parts.append(f'<line x1="{_LEFT}" y1="{bottom}" x2="{width}" y2="{bottom}" stroke="black"/>')
    parts.append(_text(16, _HEIGHT / 2 - 10, left, turn=-90))
    if right:
        parts.append(_text(_WIDTH - 10, _HEIGHT / 2 - 10, right, turn=-90))
    return parts


def _y(part: float) -> float:
    return _HEIGHT - _BOTTOM - part * (_HEIGHT - _BOTTOM - _TOP)


def _groups(groups: Sequence[str], series: Sequence[ChartSeries], scale: float) -> list[str]:
    parts, lines = [], list[str]()
    span = (_WIDTH - _LEFT - _RIGHT) / max(1, len(groups))
    width = span * 0.8 / max(1, len(series))
    for index, one in enumerate(series):
        colour = _COLOURS[index % len(_COLOURS)]
        points = []
        for group in range(len(groups)):
            x = _LEFT + span * (group + 0.1) + width * index
            value = one.columns[group]
            if value is not None:
                part = value / scale
                parts.append(_rectangle(x, _y(part), width * 0.92, _y(0) - _y(part), colour, one.is_outlined))
            if one.line and (height := one.line[group]) is not None:
                points.append((x + width * 0.46, _y(min(1.0, height))))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if points:
            lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="white" stroke="{colour}"/>' for x, y in points]
    for group, name in enumerate(groups):
        x, y = _LEFT + span * (group + 0.5), _HEIGHT - _BOTTOM + 18
        if len(groups) <= _MOST_LEVEL:
            parts.append(_text(x, y, name))
        else:
            parts.append(_text(x + 4, y - 4, name, anchor="end", size=10, turn=-40))
    return parts + lines


def _rectangle(x: float, y: float, width: float, height: float, colour: str, is_outlined: bool) -> str:
    style = f'fill="none" stroke="{colour}" stroke-width="2"' if is_outlined else f'fill="{colour}" fill-opacity="0.75"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(0.0, height):.1f}" {style}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, turn: int = 0) -> str:
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{turned}>{escape(text)}</text>'
