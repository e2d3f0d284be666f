"""Records, the tables of docs/data/records: how they are shown, what benchmarks write, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.figures import Footprint, summarize
from benchmarks.harness.machine import Machine
from benchmarks.harness.record import Column, Line, Quantity, Record
from benchmarks.harness.report import Document, Row
from tools.docs import records
from tools.docs.records import RECORDS, draw_record, read_record, shared_parameters
from tools.docs.results import ResultsError, read_results

MACHINE = Machine("a processor", 2, 1 << 30, "Linux", 1.25)


def record(**changes: Any) -> Record:
    columns = (Column("median", "s"), Column("how"))
    lines = (Line("a", {"median": Quantity(0.1, 3), "how": "by itself"}), Line("b", {"how": "with others"}))
    fields = {"command": "run", "created": "2026-11-27T01:02:03+00:00", "conditions": "quiet", "is_manual": False}
    return Record(**{**fields, "title": "what", "columns": columns, "lines": lines, **changes})


def headings(shown: Record) -> list[str]:
    return shown.cells()[0]


def test_a_quantity_has_its_decimals_its_range_its_unit_and_its_note() -> None:
    assert str(Quantity(25.0, 1)) == "25.0"
    assert str(Quantity(1234, 0)) == "1,234"
    assert str(Quantity(0.38, 2, 0.29, 0.4)) == "0.38 (0.29 to 0.40)"
    assert str(Quantity(1.0, 1, note="at most")) == "1.0 at most"
    assert str(Quantity(898, 0, note="once", unit="ms")) == "898 ms once"


def test_a_record_is_a_table_and_where_it_is_from() -> None:
    assert draw_record(record()) == (
        "\n| what | median, s | how |\n|---|---|---|\n| a | 0.100 | by itself |\n| b |  | with others |\n\n"
        "`run`, 2026-11-27: quiet.\n\n"
    )


@pytest.mark.parametrize(
    ("changes", "origin"),
    [
        ({"created": ""}, "`run`: quiet."),
        ({"created": "", "is_manual": True}, "`run`, measured manually: quiet."),
        ({"created": "", "command": "", "is_manual": True}, "Measured manually: quiet."),
        ({"created": "", "command": ""}, "quiet."),
    ],
)
def test_what_is_not_known_of_figures_is_not_claimed(changes: dict[str, Any], origin: str) -> None:
    assert record(**changes).origin() == origin


def test_what_is_saved_is_what_is_read(tmp_path: Path) -> None:
    record().save(tmp_path / "a.json")
    assert read_record(tmp_path / "a.json") == record()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is no table: Input data was truncated"),
        ("{}", "is no table: Object missing required field `command`"),
        ('{"is_manual": "no"', "is no table"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ResultsError, match=f"a.json {reason}"):
        read_record(tmp_path / "a.json")


def test_a_cell_without_a_column_is_named(tmp_path: Path) -> None:
    record(columns=(Column("median", "s"),)).save(tmp_path / "a.json")
    with pytest.raises(ResultsError, match=r"cells without a column: {'a': \['how'\], 'b': \['how'\]}"):
        read_record(tmp_path / "a.json")
    record(lines=()).save(tmp_path / "a.json")
    with pytest.raises(ResultsError, match="no lines"):
        read_record(tmp_path / "a.json")


# -- what benchmarks write --------------------------------------------------------------------------------------------


def train_step(path: Path, *, memory: bool = True) -> Path:
    seconds = {"one rank alone": 0.1, "reigen": 0.2, "reigen, shared parameters": 0.125}
    modes = {name: summarize([[each]]) for name, each in {**seconds, "ddp": 0.4}.items()}
    modes["ddp, gradients as bucket views"] = summarize([[0.3]])
    document = Document("reigen bench train-step --json x.json --memory", 2, 3, machine=MACHINE)
    document.rows = [Row("mlp+adam", 0, modes, "one rank alone"), Row("cnn", 0, modes, "one rank alone")]
    if memory:
        document.footprints = [Footprint("mlp+adam", name, 2, 100, 250 if name == "ddp" else 580) for name in modes]
    document.save(path)
    return path


def test_shared_parameters_are_made_of_what_the_benchmark_writes(tmp_path: Path) -> None:
    found = shared_parameters(read_results(train_step(tmp_path / "a.json")))
    assert {name: headings(each) for name, each in found.items()} == {
        name: headings(read_record(RECORDS / f"{name}.json")) for name in ("shared-parameters", "shared-memory")
    }
    [_, line] = found["shared-parameters"].cells()
    assert line == ["mlp, Adam", "100", "200", "125", "300", "1.25 (1.25 to 1.25)"]
    [_, line] = found["shared-memory"].cells()
    assert line == ["mlp, Adam", "5.8", "5.8", "5.8", "2.5"]
    assert found["shared-memory"].origin().startswith("`reigen bench train-step --memory`, ")
    assert found["shared-memory"].origin().endswith("3 rounds; a processor, 2 cores, load before the run 1.2.")


def test_the_command_writes_both_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    assert records.main([str(train_step(tmp_path / "a.json"))]) == 0
    assert read_record(tmp_path / "shared-memory.json").title == "sizes of the model"
    assert records.main([str(train_step(tmp_path / "a.json", memory=False))]) == 1
    assert "records: no step with shared parameters, or no memory" in capsys.readouterr().err
    assert records.main([]) == 2


def test_kills_and_newcomers_are_written_as_the_page_has_them() -> None:
    elastic = pytest.importorskip("benchmarks.elastic")
    found = {
        "reigen": {"median_seconds": 0.12, "most_seconds": 0.2, "steps_lost": [0, 0]},
        "torchrun": {"median_seconds": 25.8, "most_seconds": 38.2, "steps_lost": [0, 10]},
    }
    shown = elastic.make_table("kills", 8, found, "python -m benchmarks.elastic kills --rounds 8", MACHINE)
    published = read_record(RECORDS / "elastic-kills.json")
    assert headings(shown) == headings(published)
    assert [line.title for line in shown.lines] == [line.title for line in published.lines]
    assert [cells[1:] for cells in shown.cells()[1:]] == [["0.12", "0.20", "none"], ["25.80", "38.20", "0 to 10"]]
    assert "8 rounds; a processor, 2 cores, load before the run 1.2" in shown.origin()
    join = {"parameters": 25.0, "optimizer": "sgd", "joins": 3, "usual_ms": [310.0, 300.0, 320.0]}
    join |= {"pause_ms": [380.0, 290.0, 400.0], "transfer_ms": [90.0, 80.0, 100.0]}
    shown = elastic.make_table("join", 3, join, "join", MACHINE)
    assert headings(shown)[1:] == headings(read_record(RECORDS / "elastic-join.json"))[1:]
    assert shown.cells()[1] == ["25 million, sgd", "0.310", "0.380 (0.290 to 0.400)", "transfer 0.090"]
    spares = {"parameters": 25.0, "optimizer": "sgd", "no spares, usual_step_ms": [320.0, 300.0, 340.0]}
    spares |= {f"{who}, begun_ms": [440.0, 380.0, 640.0] for who in ("spares 1", "spares 1:warm")}
    shown = elastic.make_table("spares", 8, spares, "spares", MACHINE)
    published = read_record(RECORDS / "elastic-spares.json")
    assert headings(shown) == headings(published)
    assert {line.title for line in published.lines} <= {line.title for line in shown.lines}
    assert shown.cells()[1] == ["until the next step has begun", *(["0.44 (0.38 to 0.64)"] * 2), ""]
    assert shown.cells()[-1] == ["a usual step", "", "", "0.32 (0.30 to 0.34)"]


def test_leases_and_moves_of_servers_are_written_as_the_page_has_them() -> None:
    elastic_servers = pytest.importorskip("benchmarks.elastic_servers")
    line = elastic_servers.lease_line("nothing", "4 KiB", [[0.5, 0.75], [0.25, 1.0], [1.0, 1.25]])
    shown, published = elastic_servers.make_table("leases", [line], 3, MACHINE), read_record(RECORDS / "leases.json")
    assert headings(shown) == headings(published)
    assert shown.cells()[1] == ["nothing, 4 KiB", "0.50", "1.00", "0.25"]
    assert line.title in {each.title for each in published.lines}
    line = elastic_servers.move_line(25, [[300.0, 100.0], [200.0, 101.0], [250.0, 99.0]])
    shown, published = (
        elastic_servers.make_table("moves", [line], 3, MACHINE),
        read_record(RECORDS / "server-moves.json"),
    )
    assert headings(shown) == headings(published)
    assert shown.cells()[1] == ["25 million parameters", "100.0", "250 (200 to 300)"]
    assert line.title in {each.title for each in published.lines}


def test_autotuning_is_written_as_the_page_has_it() -> None:
    autotune = pytest.importorskip("benchmarks.autotune")
    points = autotune.make_grid(autotune.ParameterPoint(128 << 20, 64 << 20))
    base = autotune.asdict(points[3])
    found = {
        "seconds": 41.2,
        "base": base,
        "chosen": base,
        "points": [base, *(autotune.asdict(point) for point in points if autotune.asdict(point) != base)],
        "times": [[0.1, 0.1]] + [[0.05, 0.05]] + [[0.2, 0.2]] * (len(points) - 2),
    }
    shown = autotune.make_table({"tiny": found}, 2, "python -m benchmarks.autotune", MACHINE)
    assert headings(shown) == headings(read_record(RECORDS / "autotune.json"))
    best = autotune.format_point(found["points"][1])
    assert shown.cells()[1] == ["600 small tensors", "100", "1.000", "2.000", "0.500", "41", best]


def test_steps_on_a_gpu_are_written_as_the_page_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_step = pytest.importorskip("benchmarks.cuda_step")
    monkeypatch.setattr(cuda_step.hvd, "size", lambda: 2)
    turns = {cuda_step.APART: (1.0, 2.0), cuda_step.REIGEN: (4.0, 30.0), cuda_step.DDP: (2.0, 20.0)}
    found = {"mlp": {mode: [turn] for mode, turn in turns.items()}}
    shown = cuda_step.make_table(found, argparse.Namespace(rounds=1, steps=20), MACHINE)
    published = read_record(RECORDS / "gpu.json")
    assert headings(shown) == headings(published)
    assert shown.cells()[1] == ["mlp, 25 M parameters", "1.00", "4.00", "30.0", "2.00", "20.0", "1.50"]
    assert shown.command == "reigen run -np 2 python -m benchmarks.cuda_step --rounds 1 --steps 20"


def test_codecs_are_written_as_the_page_has_them() -> None:
    compression = pytest.importorskip("benchmarks.compression")
    found = {"int8": (3.938, 2.871, 8.11, 5.7, 3.04), "topk 1 %": (50.0, 2.31, 19.87, 25.41, 3.7)}
    shown = compression.make_table(64, 9, 8.62, found, "python -m benchmarks.compression", MACHINE)
    published = read_record(RECORDS / "compression-speed.json")
    assert headings(shown) == headings(published)
    assert shown.cells()[1] == ["int8", "1/3.94", "2.87", "8.11", "5.70", "3.0"]
    assert shown.cells()[2] == next(cells for cells in published.cells() if cells[0] == "topk 1 %")
    assert "64 MiB of float32; a copy: 8.6 GB/s; medians of 9 rounds; a processor, 2 cores" in shown.origin()


def test_comparisons_of_replicas_are_written_as_the_page_has_them() -> None:
    replica_check = pytest.importorskip("benchmarks.replica_check")
    shown = replica_check.make_table({(10, 2_500_000): 9.93, (161, 155_280): 9.4, (1000, 1024): 14.2}, 2, MACHINE)
    assert shown.cells() == read_record(RECORDS / "replica-check.json").cells()


def test_the_cost_of_metrics_is_written_as_the_page_has_it() -> None:
    metrics_cost = pytest.importorskip("benchmarks.metrics_cost")
    found = {
        "without reports": [(10.2e-6, 27.4e-3)] * 3,
        "with reports": [(10.2e-6, 26.4e-3)] * 3,
        "the other package": [(9.4e-6, 27e-3)] * 3,
    }
    shown = metrics_cost.make_table(found, "python -m benchmarks.metrics_cost --against OLD/src", MACHINE)
    published = read_record(RECORDS / "metrics-cost.json").cells()
    assert shown.cells()[0] == published[0]
    assert shown.cells()[1] == ["the other package", *published[1][1:]]
    assert shown.cells()[2:] == published[2:]


def test_starts_are_written_as_the_page_has_them() -> None:
    launchers = pytest.importorskip("benchmarks.launchers")
    seconds = {launchers.SSH: 1.61, launchers.SLURM: 1.34, launchers.SRUN: 0.22, launchers.AGENT: 0.17}
    modes = {name: summarize([[each]]) for name, each in seconds.items()}
    document = Document("launchers", 8, 4, machine=MACHINE, rows=[Row("start and end", 0, modes, launchers.SSH)])
    shown = launchers.make_table(document, 4)
    assert shown.cells() == read_record(RECORDS / "launchers.json").cells()
    assert shown.command == "python -m benchmarks.launchers --hosts 4 --ranks 8 --rounds 4"


def test_engines_are_written_as_the_page_has_them() -> None:
    engines = pytest.importorskip("benchmarks.engines")
    document = Document("engines", 4, 1, machine=MACHINE)
    for engine, alone, ours in (("ray", 1.31, 1.71), ("spark", 0.11, 1.14)):
        took = dict(zip(engines.modes(engine), (alone, ours), strict=True))
        modes = {name: summarize([[each]]) for name, each in took.items()}
        document.rows.append(Row(engine, 0, modes, engines.modes(engine)[0]))
    published = read_record(RECORDS / "engines.json").cells()
    shown = engines.make_table(document, "python -m benchmarks.engines")
    assert shown.cells()[:2] == published[:2]
    assert shown.cells()[2] == [*published[2][:3], "1.03 s", "2 s"]  # the page has the median of rounds' differences


def test_errors_of_the_planner_are_written_as_the_page_has_them() -> None:
    planner = pytest.importorskip("benchmarks.planner")
    compared = [
        planner.ComparedStep(planner.Configuration(hosts, 1, 200.0, delay, store, "deep"), 1.0, predicted)
        for hosts, delay, store, predicted in ((3, 0.0, "ring", 1.05), (4, 0.0, "ring", 0.85), (3, 5.0, "one", 1.3))
    ]
    compared.append(planner.ComparedStep(planner.Configuration(2, 1, 200.0, 5.0, "one", "deep"), 1.0, 1.01))
    shown = planner.make_table(compared, 5)
    published = read_record(RECORDS / "planner-accuracy.json")
    assert headings(shown) == headings(published)
    assert {line.title for line in shown.lines} < {line.title for line in published.lines}
    assert shown.cells()[1:] == [
        ["held out, collectives, no delay", "2", "10.0 %", "15.0 %", "1", "2"],
        ["held out, servers, with delay", "1", "30.0 %", "30.0 %", "0", "0"],
        ["**all that are held out**", "3", "15.0 %", "30.0 %", "1", "2"],
        ["two hosts", "1", "1.0 %", "1.0 %", "1", "1"],
    ]


def test_servers_on_a_wire_are_written_as_the_page_has_them() -> None:
    kv_wire = pytest.importorskip("benchmarks.kv_wire")
    settings = kv_wire.Settings((), (200e6,), 100 << 20, 100e6, 25 << 20, 2, 2.0)
    wire = [
        kv_wire.wire_line("one array of 100 MiB", "2 workers, 1 server", 200e6, 9.3, 0.902, 1.002, 131.0),
        kv_wire.wire_line("one array of 100 MiB", "2 workers, 2 servers", 1e9, 0.898, 0.934, 1.002, 23.0),
    ]
    shown, published = kv_wire.make_table("wire", wire, "run", settings, MACHINE), read_record(RECORDS / "kv-wire.json")
    assert headings(shown) == headings(published)
    assert [cells in published.cells() for cells in shown.cells()] == [True] * 3
    took = {"plain": 4.9, "2bit": 0.288, "1bit": 0.1365, "fp16": 2.44}
    gain = [kv_wire.gain_line("2 workers, 1 server", "servers add up", "plain", took)]
    shown = kv_wire.make_table("compression", gain, "run", settings, MACHINE)
    assert shown.cells() == read_record(RECORDS / "compression-gain.json").cells()[:2]
    assert shown.origin().startswith("`run`, ")
    assert "medians of 2 rounds; 100 Mbit/s in each direction, one array of 25 MiB; a processor" in shown.origin()
    took = {"sgd": 5.35, "2bit+sgd": 5.35 / 1.22}
    [line] = kv_wire.make_table("compression", [kv_wire.gain_line("a", "b", "sgd", took)], "", settings, MACHINE).lines
    assert {name: str(cell) for name, cell in line.cells.items()} == {
        "": "b",
        "2bit": "1.22",
        "without codes": "5.35 s",
    }


def test_lost_connections_are_written_as_the_page_has_them() -> None:
    packet_loss = pytest.importorskip("benchmarks.packet_loss")
    counts = {"50 %": (88, 10.0, 10.38), "20 %": (740, 10.0, 79.2), "5 %": (0, 333.3, 1.2e-13)}
    defaults = {"peer_timeout": 20.0, "connections": 500}
    found = {
        title: (argparse.Namespace(**{**defaults, **packet_loss.CASES[title]}), packet_loss.LossFigures(*figures))
        for title, figures in counts.items()
    }
    shown, published = packet_loss.make_table(found, MACHINE), read_record(RECORDS / "packet-loss.json")
    assert headings(shown) == headings(published)
    assert list(packet_loss.CASES) == [line.title for line in published.lines]
    assert [cells in published.cells() for cells in shown.cells()[1:3]] == [True] * 2
    assert shown.cells()[3] == ["5 %", "20 s", "none of 2000 connections in 333 hours", "1e-13"]


def test_the_control_plane_is_written_as_the_pages_have_it() -> None:
    control_plane = pytest.importorskip("benchmarks.control_plane")
    rows = [(64, False, 7.1, 1.2), (64, True, 1.24, 0.561), (1, True, 0.38, 0.12)]
    costs = [
        control_plane.NegotiationCost(1000, "tree", tensors, cached, cpu, relay, 23, 22, 2987, 2970)
        for tensors, cached, cpu, relay in rows
    ]
    shown = control_plane.negotiation_table(costs, "run", MACHINE)
    assert headings(shown) == headings(read_record(RECORDS / "control-negotiation.json"))
    assert shown.cells()[1] == ["1,000", "tree", "7.1", "1.2", "0.38", "23, 22", "2,987, 2,970", "1.2, 0.56, 0.12"]
    membership = [control_plane.MembershipCost(9900, 0.37, 100.0, 9.04, 164_086)]
    shown = control_plane.membership_table(membership, "run", MACHINE)
    assert headings(shown) == headings(read_record(RECORDS / "control-membership.json"))
    assert shown.cells()[1] == ["9,900", "0.37", "9.0", "164,086"]
    start = {"ranks": 128, "started_seconds": 30.0, "phases_median": {"init": 5.0}, "rank_0_cpu_ms_per_step": 6.9}
    start |= {"messages_in": 41.0, "messages_out": 43.0, "bytes_in": 659.0, "bytes_out": 577.0, "step_ms": 258.0}
    found = [
        {**start, "layout": "tree", "last_told_seconds": 0.85},
        {**start, "layout": "star", "last_told_seconds": None},
    ]
    shown = control_plane.start_table(found, "run", MACHINE)
    assert headings(shown) == headings(read_record(RECORDS / "control-start.json"))
    assert shown.cells()[3:5] == [
        ["processor time of rank 0, ms a step", "6.9", "6.9"],
        ["messages to and from rank 0, a step", "41, 43", "41, 43"],
    ]
    assert shown.cells()[-1][1:] == ["", "0.85"]


def test_verdicts_are_counted_and_written_as_the_page_has_them() -> None:
    verdicts = pytest.importorskip("benchmarks.verdicts")
    cause, confidence = verdicts.Cause, verdicts.Confidence

    def verdict(first: Any, *others: Any, rank: int = 1, sure: bool = False) -> Any:
        found = tuple(verdicts.JobVerdict(each, 0.5, confidence.LIKELY, "", rank=1) for each in others)
        how = confidence.CLEAR if sure else confidence.LIKELY
        return verdicts.JobVerdict(first, 0.5, how, "", rank=rank, others=found)

    found = verdicts.count_verdicts(
        verdicts.KINDS["slow_rank"],
        [
            verdict(cause.LATE_RANK, sure=True),
            verdict(cause.LATE_RANK, cause.MEMORY),
            verdict(cause.PROCESSORS, cause.LATE_RANK, sure=True),
            verdict(cause.LATE_RANK, rank=0, sure=True),
            verdict(cause.UNCLEAR),
        ],
    )
    others = frozenset({"memory", "processors", "late rank"})
    assert found == verdicts.VerdictCount(runs=5, first=2, named=3, clear=1, others=others)
    shown = verdicts.make_table({"slow_rank": found}, "python -m benchmarks.verdicts --runs 4", MACHINE)
    published = read_record(RECORDS / "verdicts.json")
    assert headings(shown) == headings(published)
    assert [kind.title for kind in verdicts.KINDS.values()] == [line.title for line in published.lines]
    options = ["slow_rank", "-np 2, 25"]
    assert shown.cells()[1][1:] == [*options, "2 of 5", "3 of 5", "1 of 5", "late rank, memory, processors"]
