"""Draws the results of benchmarks: ``python -m tools.docs.charts RESULTS [DIRECTORY]``.

RESULTS is a directory of files that ``make bench`` has written, or docs/data; a picture goes beside them, or into
DIRECTORY. A result of which there is no file has no picture. Needs matplotlib.

Pictures are parts of pages (`tools.docs.links.inline_drawings`): text and axes have the colour of the page's text,
light or dark, letters stay letters, and the label for screen readers holds every figure that is drawn.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.report import format_seconds
from benchmarks.harness.sizes import format_size
from tools.docs.results import Figure as Measured
from tools.docs.results import Results, ResultsError, read_results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
#: The figures that docs/benchmarks.md states, and the pictures that are made of them.
DATA, PICTURES = ROOT / "docs" / "data", ROOT / "docs" / "images" / "benchmarks"
TEAL, BLUE, ORANGE, PURPLE, GREY = "#12a594", "#3e8ede", "#e5793b", "#a077d6", "#8b949e"
#: Drawn in this colour is what has the page's.
_INK = "#010203"
_WIDTH, _FONT_SIZE = 440.0, 12.5
_MARKERS = "osD^v"
_STYLE = (
    "<style>svg.drawing{color:#24292f}@media(prefers-color-scheme:dark){svg.drawing{color:#d1d7e0}}"
    ".chart *{stroke-linejoin:round}</style>"
)


class NothingToDrawError(ResultsError):
    """Results have no row, or no mode, of a picture; the message says what it wants."""


@dataclass(frozen=True)
class Series:
    """A mode: its label, its colour, its names in files; the fastest counts where a row has several of them."""

    label: str
    color: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Chart:
    """A picture.

    Attributes:
        name: of the picture.
        title: what it shows, in a sentence; which direction is better.
        series: what is compared.
        rows: titles of the file's rows and what they are called; empty: sizes, which make lines.
        file: of the results, without .json, if its name is not that of the picture.
        suffix: what follows the size in the titles of rows that are sizes.
        alone: the mode that the others are held against, if what they reach of its speed is drawn, in per cent.
        is_overhead: whether overheads are drawn.
    """

    name: str
    title: str
    series: tuple[Series, ...]
    rows: Mapping[str, str]
    file: str = ""
    suffix: str = ""
    alone: str = ""
    is_overhead: bool = False

    @property
    def data(self) -> str:
        """Name of the file of results."""
        return f"{self.file or self.name}.json"


_GRADIENTS = "ResNet-50, 161 gradients"
_MODELS = {"mlp": "mlp: 25 M parameters", "deep": "deep: 80 layers of 256 x 256", "cnn": "cnn: 1.2 M parameters"}
CHARTS = (
    Chart(
        "allreduce",
        "Time of an allreduce by bytes on each rank; lower is better",
        (
            Series("Reigen, registered memory", TEAL, ("reigen registered",)),
            Series("Reigen, ordinary tensor", BLUE, ("reigen ordinary",)),
            Series("Gloo", ORANGE, ("gloo",)),
            Series("MPI", PURPLE, ("mpi",)),
            Series("copy of as many bytes", GREY, ("copy of as many bytes",)),
        ),
        {},
    ),
    Chart(
        "gradients",
        "Time of the sum of ResNet-50's gradients; lower is better",
        (
            Series("Reigen, buckets", TEAL, ("reigen buckets",)),
            Series("Gloo, buckets", ORANGE, ("gloo 25 MiB buckets",)),
            Series("Reigen, 161 calls", BLUE, ("reigen separate",)),
            Series("MPI, 161 calls", PURPLE, ("mpi one by one",)),
            Series("Gloo, 161 calls", ORANGE, ("gloo separate",)),
        ),
        {_GRADIENTS: "161 gradients, 25.6 M elements"},
        file="allreduce",
    ),
    Chart(
        "calls",
        "Time of many calls; lower is better; each group has its own scale",
        (
            Series("Reigen, calls", TEAL, ("reigen separate",)),
            Series("Reigen, one group", BLUE, ("reigen one group",)),
            Series("Gloo, calls", ORANGE, ("gloo separate",)),
            Series("Gloo, buckets", GREY, ("gloo 25 MiB buckets",)),
        ),
        {_GRADIENTS: "ResNet-50's 161 gradients", "1000 tensors of 4 KiB": "1,000 tensors of 4 KiB"},
    ),
    Chart(
        "train-step",
        "Time of a training step; lower is better; each group has its own scale",
        (
            Series("one rank alone", GREY, ("one rank alone",)),
            Series("Reigen", TEAL, ("reigen",)),
            Series("DDP", ORANGE, ("ddp", "ddp, gradients as bucket views")),
        ),
        _MODELS,
    ),
    Chart(
        "frameworks",
        "What a step of two ranks takes longer than one alone; lower is better; each group has its own scale",
        (
            Series("Reigen", TEAL, ("reigen.tensorflow", "reigen.keras", "reigen.jax")),
            Series(
                "the framework's own",
                ORANGE,
                (
                    "MultiWorkerMirroredStrategy",
                    "MultiWorkerMirroredStrategy, legacy keras",
                    "jax.distributed, gloo",
                    "jax.distributed, gloo, one array",
                ),
            ),
        ),
        {f"mlp, {name}": f"{shown}, 25 M parameters" for name, shown in (
            ("tensorflow", "TensorFlow"), ("keras", "Keras"), ("jax", "JAX"),
        )},
        is_overhead=True,
    ),
    Chart(
        "network",
        "Time of an allreduce by TCP over loopback, by bytes on each rank; lower is better",
        (Series("Reigen", TEAL, ("reigen",)), Series("Gloo", ORANGE, ("gloo",))),
        {},
        suffix=", loopback",
    ),
    Chart(
        "kv",
        "Time of a push and pull of two workers; lower is better; each group has its own scale",
        (
            Series("Reigen, 1 server", TEAL, ("reigen, 1 server",)),
            Series("ps-lite, 1 server", ORANGE, ("ps-lite, 1 server",)),
            Series("Reigen, 2 servers", TEAL, ("reigen, 2 servers",)),
            Series("ps-lite, 2 servers", ORANGE, ("ps-lite, 2 servers",)),
            Series("two copies", GREY, ("two copies of the same arrays",)),
        ),
        {"one array of 100 MiB": "one array of 100 MiB", _GRADIENTS: "ResNet-50's 161 gradients"},
    ),
    Chart(
        "mxnet-step",
        "Time of a training step in MXNet; lower is better; each group has its own scale",
        (
            Series("one rank alone", GREY, ("alone",)),
            Series("Reigen, allreduce", TEAL, ("reigen",)),
            Series("Reigen, 1 server", BLUE, ("reigen kv",)),
            Series("ps-lite, 1 server", ORANGE, ("ps-lite",)),
        ),
        {"mlp": "MLP, 25 M parameters", "resnet18": "ResNet-18"},
    ),
    Chart(
        "ps_vs_ring",
        "Scaling efficiency, hosts with 200 Mbit/s each; higher is better",
        (
            Series("ring", TEAL, ("ring",)),
            Series("2 servers a worker", BLUE, ("servers = 2 x workers",)),
            Series("1 server a worker", PURPLE, ("servers = workers",)),
            Series("one server", ORANGE, ("one server",)),
        ),
        {f"{count} workers": f"{count} workers" for count in (2, 4, 6)},
        alone="a worker alone",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """What is drawn side by side: the values of the series that a row has; of a size, its bytes."""

    label: str
    values: Mapping[Series, float]
    nbytes: int = 0


def rows_of(chart: Chart, results: Results) -> dict[str, str]:
    """Return titles of the rows that a picture shows, and what they are called; they need not be there."""
    if chart.rows:
        return dict(chart.rows)
    shown = {row.title: format_size(row.nbytes or 4) for row in results.rows}
    return {title: size for title, size in shown.items() if title == size + chart.suffix}


def figures_of(chart: Chart, results: Results) -> dict[str, Mapping[str, Measured]]:
    """Return the figures of which a picture shows some: title of a row -> mode -> figure."""
    if chart.is_overhead:
        return dict(results.overheads)
    return {row.title: row.modes for row in results.rows}


def fastest(series: Sequence[Series], row: Mapping[str, Measured]) -> dict[Series, Measured]:
    """Return the figures of modes that a row has; where one has several names, the least."""
    found = {each: [row[name] for name in each.names if name in row] for each in series}
    return {each: min(figures, key=lambda figure: figure.median) for each, figures in found.items() if figures}


def groups_of(chart: Chart, results: Results) -> list[Group]:
    """Return what a picture shows of results.

    Raises:
        NothingToDrawError: there is nothing to draw.
    """
    rows = figures_of(chart, results)
    sizes = {row.title: row.nbytes for row in results.rows}
    wanted = rows_of(chart, results)
    found = []
    for title, label in wanted.items():
        values = _values(chart, rows.get(title, {}))
        if values:
            found.append(Group(label, values, 0 if chart.rows else sizes[title]))
    if not found:
        modes = [name for each in chart.series for name in each.names]
        raise NothingToDrawError(
            f"nothing to draw for {chart.name}: it wants rows called {list(wanted) or 'by a size'} and modes called "
            f"{modes}; there are { ({title: list(row) for title, row in rows.items()}) }"
        )
    return found


def _values(chart: Chart, row: Mapping[str, Measured]) -> dict[Series, float]:
    medians = {series: figure.median for series, figure in fastest(chart.series, row).items()}
    if not chart.alone:
        return medians
    return {series: 100 * row[chart.alone].median / each for series, each in medians.items() if chart.alone in row}


def describe(chart: Chart, results: Results, groups: Sequence[Group]) -> str:
    """Return what a picture shows in words: every figure, and where it was measured."""
    show = shown_as(chart)
    lines = [chart.title]
    for series in chart.series:
        figures = [f"{each.label} {show(each.values[series])}" for each in groups if series in each.values]
        if figures:
            lines.append(f"{series.label}: {', '.join(figures)}")
    lines.append(f"Measured on {results.machine.cpu}, {results.machine.num_cores} cores")
    return "".join(f"{line}. " for line in lines).strip()


def shown_as(chart: Chart) -> Callable[[float], str]:
    """Return how a picture writes its figures."""
    return (lambda value: f"{value:.0f} %") if chart.alone else format_seconds


def draw(chart: Chart, results: Results) -> str:
    """Return a picture, as SVG.

    Raises:
        NothingToDrawError: there is nothing to draw.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    groups = groups_of(chart, results)
    settings = {
        "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": _FONT_SIZE,
        "svg.fonttype": "none", "svg.hashsalt": chart.name, "text.color": _INK, "axes.labelcolor": _INK,
        "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "legend.frameon": False,
        "axes.facecolor": "none",
    }  # fmt: skip
    with mpl.rc_context(settings):
        figure = Figure(layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        (_draw_bars if chart.rows else _draw_lines)(figure, chart, groups)
        figure.suptitle(textwrap.fill(chart.title, 60), x=0.01, ha="left", fontsize=_FONT_SIZE)
        written = StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _as_part_of_a_page(written.getvalue(), describe(chart, results, groups))


def _draw_lines(figure: Figure, chart: Chart, groups: Sequence[Group]) -> None:
    figure.set_size_inches(_WIDTH / 72, 370 / 72)
    axes = figure.subplots()
    for series, marker in zip(chart.series, _MARKERS, strict=False):
        points = [(each.nbytes, each.values[series]) for each in groups if series in each.values]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, color=series.color, label=series.label, linewidth=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([each.nbytes for each in groups], [each.label.replace(" ", "\n") for each in groups])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [10.0**power for power in range(-7, 3) if low <= 10.0**power <= high]
    axes.set_yticks(ticks, [format_seconds(each).replace(".00", "").replace(".0", "") for each in ticks])
    axes.grid(color=_INK, alpha=0.15)
    _hide_frame(axes, ("top", "right"))
    figure.legend(loc="outside lower center", ncols=2, fontsize=12)


def _draw_bars(figure: Figure, chart: Chart, groups: Sequence[Group]) -> None:
    show = shown_as(chart)
    counts = [len(each.values) for each in groups]
    figure.set_size_inches(_WIDTH / 72, (22 * sum(counts) + 34 * len(groups) + 46) / 72)
    every = figure.subplots(len(groups), 1, squeeze=False, height_ratios=counts)[:, 0]
    for axes, group in zip(every, groups, strict=True):
        values = list(group.values.values())
        axes.barh(range(len(values)), values, 0.72, color=[each.color for each in group.values])
        axes.set_yticks(range(len(values)), [each.label for each in group.values])
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.invert_yaxis()
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.set_xlim(0, 1.3 * (100 / 1.15 if chart.alone else max(values)))
        for place, value in enumerate(values):
            axes.annotate(show(value), (value, place), (5, 0), textcoords="offset points", va="center")
        axes.set_title(group.label, loc="left", fontsize=_FONT_SIZE, fontweight="bold")
        _hide_frame(axes, ("top", "right", "bottom"))
    figure.align_ylabels()


def _hide_frame(axes: Axes, sides: Sequence[str]) -> None:
    for side in sides:
        axes.spines[side].set_visible(False)


def _as_part_of_a_page(svg: str, label: str) -> str:
    """Return matplotlib's picture without what would reach beyond it in a page: styles, names, sizes."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="(?:[a-z]+|[A-Za-z]+(?:\.[a-z]+)?)(?:_\d+)+"', "", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None, "every SVG of matplotlib's has one"
    head = (
        f'<svg class="drawing chart" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{view[0]} role="img" aria-label="{escape(label)}">\n{_STYLE}'
    )
    svg = head + svg[svg.index(">") + 1 :]
    svg = svg.replace(_INK, "currentColor").replace("'DejaVu Sans'", "system-ui")
    return "".join(f"{line.strip()}\n" for line in svg.splitlines() if line.strip())


def draw_all(results: Path, pictures: Path) -> list[Path]:
    """Draw every picture of which there are results; returns the files. A line says which file has none.

    Raises:
        ResultsError: a file is none of results, or there is nothing to draw at all.
    """
    pictures.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in CHARTS:
        if (results / chart.data).exists():
            file = pictures / f"{chart.name}.svg"
            found = read_results(results / chart.data)
            try:
                file.write_text(draw(chart, found), encoding="utf-8")
            except NothingToDrawError as error:  # a run of a part of the benchmark
                print(f"charts: {results / chart.data}: {error}", file=sys.stderr)
            else:
                written.append(file)
    if not written:
        raise ResultsError(
            f"{results}: there is nothing to draw; files are called {sorted({each.data for each in CHARTS})}"
        )
    return written


def main(arguments: Sequence[str]) -> int:
    """Draw; returns 0, or 1 with a message."""
    if not 1 <= len(arguments) <= 2:
        print("python -m tools.docs.charts RESULTS [DIRECTORY]", file=sys.stderr)
        return 2
    try:
        for file in draw_all(Path(arguments[0]), Path(arguments[-1])):
            print(file)
    except ResultsError as error:
        print(f"charts: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
