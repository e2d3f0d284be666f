"""Tables of benchmarks: ``python -m tools.docs.tables`` writes those of `PAGES` anew from docs/data.

In a page a table stands between the comments ``<!-- table NAME -->`` and ``<!-- end of table -->``. It has the modes
and rows of a picture (`tools.docs.charts`), and may have more of them; or it is a record (`tools.docs.records`), as it
stands in docs/data/records/NAME.json. What stands elsewhere in a page is left alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks import frameworks
from benchmarks.harness.report import format_seconds, markdown
from tools.docs.charts import CHARTS, DATA, GREY, ROOT, Chart, Series, fastest, figures_of, rows_of
from tools.docs.records import RECORDS, draw_record, read_record
from tools.docs.results import Figure, Results, ResultsError, read_results

#: The pages that have tables.
PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            *("index", "benchmarks", "shared-parameters", "gpu", "autotune", "compression", "hosts", "metrics"),
            *("planner-model", "timeline-events", "kv-failures"),
        )
    ),
)
_TABLE = re.compile(r"(?<=<!-- table )([\w-]+)( -->\n).*?(?=<!-- end of table -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: in the page.
        chart: the picture whose modes and rows it has; efficiencies that it draws come beside times.
        more: modes that are not drawn.
        ratios: (heading, label of a mode, label of another): how many times as long as the other's the first's time is.
        first: heading of the first column.
        verdict: (heading, claim behind the row's title) of a figure that the benchmark has beside its budget; or none.
        ranks: how many there were, where rows of the file differ in that.
    """

    name: str
    chart: Chart
    more: tuple[Series, ...] = ()
    ratios: tuple[tuple[str, str, str], ...] = ()
    first: str = ""
    verdict: tuple[str, str] | None = None
    ranks: str = ""

    def columns(self) -> tuple[Series, ...]:
        """Return the modes."""
        return (*self.chart.series, *self.more)


def _mode(label: str, *names: str) -> Series:
    return Series(label, GREY, names or (label,))


_CHARTS = {chart.name: chart for chart in CHARTS}
_HOSTS = tuple(
    f"25 MiB, {count} hosts, {rate} Mbit/s, {delay} ms"
    for delay in (0, 5)
    for rate in (200, 1000)
    for count in (2, 3, 4)
)
TABLES = (
    Table(
        "allreduce",
        _CHARTS["allreduce"],
        (_mode("its backend alone", "reigen's backend alone"),),
        (
            ("Gloo / Reigen", "Gloo", "Reigen, registered memory"),
            ("MPI / Reigen", "MPI", "Reigen, registered memory"),
        ),
        "bytes",
    ),
    Table(
        "gradients",
        _CHARTS["gradients"],
        ratios=(
            ("Gloo / Reigen, buckets", "Gloo, buckets", "Reigen, buckets"),
            ("Gloo / Reigen, calls", "Gloo, 161 calls", "Reigen, 161 calls"),
            ("MPI / Reigen, calls", "MPI, 161 calls", "Reigen, 161 calls"),
        ),
    ),
    Table(
        "calls",
        replace(_CHARTS["calls"], rows=_CHARTS["calls"].rows | {"1000 tensors of 4 B": "1,000 tensors of 4 bytes"}),
        (_mode("Reigen, calls, no response cache", "reigen separate, no response cache"),),
        (("Gloo / Reigen, calls", "Gloo, calls", "Reigen, calls"),),
    ),
    Table("train-step", _CHARTS["train-step"], ratios=(("DDP / Reigen", "DDP", "Reigen"),), first="model"),
    Table(
        "train-step-overhead",
        replace(_CHARTS["train-step"], series=_CHARTS["train-step"].series[1:], is_overhead=True),
        ratios=(("Reigen / DDP", "Reigen", "DDP"),),
        first="model",
    ),
    Table(
        "frameworks",
        replace(
            _CHARTS["frameworks"],
            rows={
                f"{model}, {section}": f"{model}, {shown}"
                for section, shown in (("tensorflow", "TensorFlow"), ("keras", "Keras"), ("jax", "JAX"))
                for model in ("mlp", "deep", "cnn")
            },
        ),
        (_mode("reigen.torch", frameworks.TORCH),),
        (
            ("Reigen / the framework's own", "Reigen", "the framework's own"),
            ("Reigen / reigen.torch", "Reigen", "reigen.torch"),
        ),
        "model",
    ),
    Table("network", _CHARTS["network"], ratios=(("Gloo / Reigen", "Gloo", "Reigen"),), first="bytes", ranks="2 ranks"),
    Table(
        "hosts",
        replace(
            _CHARTS["network"],
            rows={title: title.removeprefix("25 MiB, ").removesuffix(", 0 ms") for title in _HOSTS},
            suffix="",
        ),
        (_mode("plain TCP, pipelined"), _mode("plain TCP")),
        (("Gloo / Reigen", "Gloo", "Reigen"),),
        "25 MiB",
        ("part of the wire", ": part of the wire's limit"),
        "one rank a host",
    ),
    Table(
        "kv",
        replace(_CHARTS["kv"], rows={"4 bytes": "4 bytes"} | dict(_CHARTS["kv"].rows)),
        (
            _mode("Reigen, 2 servers, SGD", "reigen, 2 servers, sgd"),
            _mode("ps-lite, 2 servers, SGD", "ps-lite, 2 servers, sgd"),
            _mode("Reigen, 1 server, 2bit", "reigen, 1 server, 2bit"),
        ),
        (
            ("ps-lite / Reigen, 1 server", "ps-lite, 1 server", "Reigen, 1 server"),
            ("2 servers", "ps-lite, 2 servers", "Reigen, 2 servers"),
            ("2 servers, SGD", "ps-lite, 2 servers, SGD", "Reigen, 2 servers, SGD"),
        ),
    ),
    Table(
        "mxnet-step",
        _CHARTS["mxnet-step"],
        ratios=(
            ("Reigen, allreduce / alone", "Reigen, allreduce", "one rank alone"),
            ("Reigen, 1 server / alone", "Reigen, 1 server", "one rank alone"),
            ("ps-lite / alone", "ps-lite, 1 server", "one rank alone"),
        ),
        first="model",
    ),
    Table("ps_vs_ring", _CHARTS["ps_vs_ring"]),
)


@dataclass(frozen=True)
class Headline:
    """A line of the table for those who read one alone.

    Attributes:
        what: was done; `{alone}` stands for the time of one rank alone, `{noise}` for that by which rounds differ.
        file: of results, without .json.
        row: title of the file's row.
        ours: the mode of Reigen's.
        peers: what each peer is called, empty for Gloo, and its modes, of which the fastest counts.
    """

    what: str
    file: str
    row: str
    ours: str
    peers: Mapping[str, tuple[str, ...]]


_STEP = "training step, {model}: one rank alone takes {{alone}}; rounds differ by {{noise}}"
_DDP = {"DDP": ("ddp", "ddp, gradients as bucket views")}
HEADLINES = (
    Headline(
        "allreduce of 25 MiB in registered memory (where the optimizer's gradients live)",
        *("allreduce", "25 MiB", "reigen registered", {"": ("gloo",), "MPI": ("mpi",)}),
    ),
    Headline(
        "allreduce of 25 MiB in an ordinary tensor",
        *("allreduce", "25 MiB", "reigen ordinary", {"": ("gloo",), "MPI": ("mpi",)}),
    ),
    Headline(
        "allreduce of 4 KiB", *("allreduce", "4 KiB", "reigen ordinary", {"": ("gloo",), "MPI": ("mpi",)})
    ),
    Headline(
        "ResNet-50's 161 gradients, in buckets",
        *("allreduce", "ResNet-50, 161 gradients", "reigen buckets", {"": ("gloo 25 MiB buckets",)}),
    ),
    Headline(
        "1,000 tensors of 4 KiB, in separate calls",
        *("calls", "1000 tensors of 4 KiB", "reigen separate"),
        {"": ("gloo separate",), "in buckets": ("gloo 25 MiB buckets",)},
    ),
    Headline(_STEP.format(model="80 layers of 256 x 256"), "train-step", "deep", "reigen", _DDP),
    Headline(_STEP.format(model="25 M parameters"), "train-step", "mlp", "reigen", _DDP),
)  # fmt: skip


def draw_headlines() -> str:
    """Return the table for those who read one alone.

    Raises:
        ResultsError: a file, a row or a mode is missing.
    """
    lines = []
    for line in HEADLINES:
        file = DATA / f"{line.file}.json"
        results = read_results(file)
        modes = next((row.modes for row in results.rows if row.title == line.row), {})
        try:
            times = {
                name: min(modes[each].median for each in names if each in modes) for name, names in line.peers.items()
            }
            ours = format_seconds(modes[line.ours].median)
        except (KeyError, ValueError):
            raise ResultsError(f"{file}: the row {line.row!r} lacks a mode of {line}; it has {list(modes)}") from None
        alone = noise = ""
        if "{alone}" in line.what:
            alone = format_seconds(modes["one rank alone"].median)
            noise = format_seconds(results.overheads[line.row][line.ours].noise)
        peers = "; ".join(f"{name} {format_seconds(each)}".strip() for name, each in times.items())
        lines.append([line.what.format(alone=alone, noise=noise), ours, peers])
    return f"\n{markdown(['', 'Reigen', 'torch.distributed with Gloo, or as named'], lines)}\n\n"


#: Tables that are records, each of a file of its name.
RECORD_NAMES = (
    *("elastic-faults", "elastic-kills", "elastic-hosts", "elastic-join", "elastic-spares", "elastic-other"),
    *("shared-parameters", "shared-memory", "gpu", "autotune"),
    *("kv-wire", "leases", "server-moves", "replica-check", "launchers", "engines"),
    *("control-negotiation", "control-membership", "control-start"),
    *("compression-speed", "compression-gain"),
    *("packet-loss", "metrics-cost", "planner-accuracy", "verdicts"),
)
#: Tables of figures beside their budgets: (file of results, what their claims begin with).
BUDGETS = {"sums": ("sums", (frameworks.GROUP, frameworks.SMALL, "import "))}


def draw_budgets(results: Results, beginnings: tuple[str, ...]) -> str:
    """Return the figures whose claims begin so, beside their budgets.

    Raises:
        ResultsError: there is none.
    """
    found = [each for each in results.verdicts if each.claim.startswith(beginnings) and each.value is not None]
    if not found:
        raise ResultsError(f"nothing to show: no budget of {[each.claim for each in results.verdicts]} begins so")
    lines = []
    for each in found:
        budget = f"{'at least' if each.at_least else 'at most'} {each.budget:g}"
        lines.append([each.claim, f"{each.value:.3g} {each.note}".strip(), budget])
    return f"\n{markdown(['', 'measured', 'budget'], lines)}\n\n{origin(results)}\n\n"


def draw(table: Table, results: Results) -> str:
    """Return a table in Markdown, and below it the command, the day and the load of the machine.

    Raises:
        ResultsError: there is nothing to show.
    """
    found = figures_of(table.chart, results)
    wanted = rows_of(table.chart, results)
    rows = {title: (label, fastest(table.columns(), found.get(title, {}))) for title, label in wanted.items()}
    shown = [each for each in table.columns() if any(each in figures for _, figures in rows.values())]
    if not shown:
        raise ResultsError(f"nothing to show for {table.name}: none of {list(rows)} has one of its modes")
    by_label = {each.label: each for each in table.columns()}
    claims = {each.claim: each.value for each in results.verdicts}
    lines = []
    for title, (label, figures) in rows.items():
        if figures:
            times = [_time(table, found[title], figures.get(series)) for series in shown]
            ratios = [
                _ratio(figures.get(by_label[over]), figures.get(by_label[under])) for _, over, under in table.ratios
            ]
            value = claims.get(f"{title}{table.verdict[1]}") if table.verdict else None
            lines.append(
                [label, *times, *ratios, *(["" if value is None else f"{value:.3f}"] if table.verdict else [])]
            )
    headings = [table.first, *(each.label for each in shown), *(heading for heading, *_ in table.ratios)]
    headings += [table.verdict[0]] if table.verdict else []
    return f"\n{markdown(headings, lines)}\n\n{origin(results, table.ranks)}\n\n"


def _time(table: Table, row: Mapping[str, Figure], figure: Figure | None) -> str:
    if figure is None:
        return ""
    shown = format_seconds(figure.median)
    if table.chart.alone:
        return f"{shown}, {100 * row[table.chart.alone].median / figure.median:.0f} %"
    return shown if figure.is_clear else f"{shown}, within the noise of {format_seconds(figure.noise)}"


def _ratio(over: Figure | None, under: Figure | None) -> str:
    if over is None or under is None or not under.is_clear:
        return ""
    return f"{over.median / under.median:.2f}"


def origin(results: Results, ranks: str = "") -> str:
    """Return where figures are from, as a line of the page; `ranks`: of these figures, if not those of the file."""
    versions = ", ".join(f"{name} {version}".removeprefix("mpi ") for name, version in results.versions.items())
    command = re.sub(r" --json \S+", "", results.command)
    ranks = ranks or f"{results.num_ranks} ranks"
    return (
        f"`{command}`, {results.created[:10]}: {ranks}, medians of {results.rounds} rounds; "
        f"{results.machine.cpu}, {results.machine.num_cores} cores, load before the run {results.machine.load:.1f}; "
        f"{versions}."
    )


def write(page: str) -> str:
    """Return a page with its tables made anew.

    Raises:
        ResultsError: there is no such table, or nothing to show in it.
    """
    by_name = {table.name: table for table in TABLES}

    def made(found: re.Match[str]) -> str:
        if found[1] == "headlines":
            return f"{found[1]}{found[2]}{draw_headlines()}"
        if found[1] in BUDGETS:
            file, beginnings = BUDGETS[found[1]]
            return f"{found[1]}{found[2]}{draw_budgets(read_results(DATA / f'{file}.json'), beginnings)}"
        if found[1] in RECORD_NAMES:
            return f"{found[1]}{found[2]}{draw_record(read_record(RECORDS / f'{found[1]}.json'))}"
        if found[1] not in by_name:
            raise ResultsError(f"there is no table {found[1]}; there are {sorted(by_name)}")
        table = by_name[found[1]]
        return f"{found[1]}{found[2]}{draw(table, read_results(DATA / table.chart.data))}"

    return _TABLE.sub(made, page)


def main() -> int:
    """Write the pages; returns 0, or 1 with a message."""
    try:
        for page in PAGES:
            page.write_text(write(page.read_text(encoding="utf-8")), encoding="utf-8")
    except ResultsError as error:
        print(f"tables: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
