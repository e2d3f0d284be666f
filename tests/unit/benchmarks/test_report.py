"""What benchmarks write and print, and how figures are held against budgets."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import allreduce, train_step
from benchmarks.__main__ import main
from benchmarks.harness.figures import Footprint, Overhead, Summary, summarize
from benchmarks.harness.machine import Machine
from benchmarks.harness.memory import Staging, Usage
from benchmarks.harness.report import Document, Row, Verdict, format_seconds, rows_markdown, show


def _took(*rounds: float) -> Summary:
    return summarize([[seconds] for seconds in rounds])


def _document() -> Document:
    machine = Machine("Some CPU", 2, 4 << 30, "Linux 6.0 x86_64", 0.5)
    row = Row("1 MiB", 1 << 20, {"ours": _took(0.001), "peer": _took(0.004)}, "ours", {"other": "broken\ndetails"})
    overheads = {"mlp": {"ours": Overhead(0.002, (0.002,), 0.0)}}
    verdict = Verdict("peer / ours", 4.0, 2.0, at_least=True)
    memory = [Staging(1 << 20, 8, 64 << 20, (Usage(3 << 20, 2 << 20, 1 << 20), Usage(5 << 20, 1 << 20, 1 << 20)))]
    return Document(
        "reigen bench x",
        2,
        1,
        machine=machine,
        rows=[row],
        overheads=overheads,
        verdicts=[verdict],
        memory=memory,
        footprints=[Footprint("mlp+adam", "ours", 2, 100 << 20, 550 << 20)],
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.3, "12.3 s"),
        (1.0, "1.00 s"),
        (0.0123, "12.3 ms"),
        (0.123, "123 ms"),
        (4.56e-6, "4.56 us"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_seconds_have_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_json_holds_machine_summaries_ratios_and_verdicts(tmp_path: Path) -> None:
    document = _document()
    document.save(tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["cpu"] == "Some CPU"
    assert found["rows"][0]["modes"]["peer"]["median"] == 0.004
    assert found["rows"][0]["ratios"] == {"peer": {"value": 4.0, "low": 4.0, "high": 4.0}}
    assert found["verdicts"][0]["is_met"] is True
    assert "reigen" in found["versions"]


def test_everything_is_printed() -> None:
    screen = io.StringIO()
    show(_document(), "reigen bench x", Console(file=screen, width=120))
    text = screen.getvalue()
    for part in (
        "Some CPU",
        "1.00 ms",
        "4.00 ms",
        "4 x",
        "failed: broken",
        "2.00 ms",
        "peer / ours",
        "yes",
        "5.0 MiB",
        "5.50",
    ):
        assert part in text
    assert "details" not in text


def test_medians_are_a_table_for_the_documentation() -> None:
    rows = [Row("1 MiB", 0, {"ours": _took(0.001)}, "ours"), Row("4 B", 0, {"peer": _took(4e-6)}, "ours")]
    assert rows_markdown(rows).splitlines() == [
        "| mode | 1 MiB | 4 B |",
        "|---|---|---|",
        "| ours | 1.00 ms |  |",
        "| peer |  | 4.00 us |",
    ]


def test_a_row_without_its_baseline_has_no_ratios() -> None:
    assert Row("x", 0, {"peer": _took(1.0)}, "ours").ratios == {}


@pytest.mark.parametrize(
    ("value", "at_least", "met"), [(2.0, True, True), (1.9, True, False), (2.1, False, False), (None, True, None)]
)
def test_a_budget_is_a_least_or_a_most(value: float | None, at_least: bool, met: bool | None) -> None:
    assert Verdict("", value, 2.0, at_least=at_least).is_met is met


def test_a_failure_of_our_own_is_known_from_a_peers() -> None:
    assert not _document().has_failed("reigen")
    assert Document("", 2, 1, rows=[Row("x", 0, {}, "", {"reigen buckets": "why"})]).has_failed("reigen")
    assert Document("", 2, 1, skipped=["reigen is left out: why"]).has_failed("reigen")


def test_allreduce_is_held_against_its_budgets() -> None:
    modes = {allreduce.REGISTERED: _took(0.002), allreduce.ORDINARY: _took(0.004), allreduce.GLOO_SUM: _took(0.014)}
    rows = [
        Row("25 MiB", 25 << 20, modes, allreduce.REGISTERED),
        Row("1 KiB", 1024, {allreduce.ORDINARY: _took(100e-6)}, allreduce.REGISTERED),
    ]
    found = {verdict.claim: verdict for verdict in allreduce.verdicts(rows, 2)}
    assert len(found) == 3
    assert found["25 MiB: gloo / reigen registered"].value == pytest.approx(7.0)
    assert found["25 MiB: gloo / reigen ordinary"].value == pytest.approx(3.5)
    latency = found["1 KiB: reigen ordinary, blocking, named"]
    assert (latency.value, latency.budget) == (pytest.approx(100.0), 250.0)
    assert [verdict.budget for verdict in allreduce.verdicts(rows, 4)] == [1000.0]
    assert allreduce.verdicts(rows, 3) == []


def test_a_training_step_is_compared_with_the_better_of_ddps_settings() -> None:
    summaries = {
        train_step.ALONE: _took(0.100, 0.100),
        train_step.REIGEN: _took(0.110, 0.110),
        train_step.DDP_DEFAULT: _took(0.200, 0.200),
        train_step.DDP_VIEW: _took(0.150, 0.150),
    }
    found = train_step.overheads(summaries)
    assert train_step.ALONE not in found
    assert train_step.verdict("mlp", found).value == pytest.approx(0.2)


def test_no_ratio_of_overheads_where_ddps_is_noise() -> None:
    summaries = {
        train_step.ALONE: _took(0.100, 0.200),
        train_step.REIGEN: _took(0.110, 0.210),
        train_step.DDP_DEFAULT: _took(0.120, 0.220),
    }
    verdict = train_step.verdict("cnn", train_step.overheads(summaries))
    assert verdict.value is None
    assert "noise" in verdict.note


def _save(path: Path, rank: int, weights: list[float], initial: list[float]) -> None:
    np.savez(f"{path}.{rank}.npz", weights=np.array(weights, np.float32), initial=np.array(initial, np.float32))


def test_weights_are_compared_on_the_scale_of_the_update(tmp_path: Path) -> None:
    """Far from zero even a wrong update is a small part of the weights."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    _save(theirs, 0, [100.0, 104.0], [100.0, 100.0])
    for rank in range(2):
        _save(ours, rank, [103.0, 104.0], [100.0, 100.0])
    found = train_step.agreement(ours, theirs, 2)
    assert found.difference == pytest.approx(0.75)
    assert found.ranks_identical
    assert not found.holds


def test_ranks_with_different_bits_do_not_agree(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    _save(theirs, 0, [1.0], [0.0])
    _save(ours, 0, [1.0], [0.0])
    _save(ours, 1, [float(np.nextafter(np.float32(1), np.float32(2)))], [0.0])
    found = train_step.agreement(ours, theirs, 2)
    assert found.difference == 0.0
    assert not found.holds
    assert train_step.agreement(ours, theirs, 1).holds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allreduce", "--sizes", "5"], "multiple of 4"),
        (["allreduce", "--peers", "nccl"], "the peers are gloo, mpi"),
        (["calls", "--peers", "mpi"], "the peers are gloo"),
        (["calls", "--tensors", "0"], "at least 1"),
        (["train-step", "--models", "gpt"], "the models are mlp, deep, cnn"),
        (["frameworks", "--only", "mxnet"], "the parts are sums, tensorflow, keras, jax, import"),
        (["frameworks", "--models", "gpt"], "the models are mlp, deep, cnn"),
        (["startup", "--np", "0"], "at least 1"),
        (["allreduce", "--seconds", "0"], "more than 0"),
        (["nothing"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # it would end every process below this one, which are other tests' ranks
    monkeypatch.setattr("benchmarks.__main__._kill_descendants_on_exit", contextlib.nullcontext)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_shared_step_is_held_against_one_rank_alone_where_every_rank_has_a_core() -> None:
    summaries = {
        train_step.ALONE: _took(0.100, 0.200),
        train_step.SHARED: _took(0.080, 0.180),
        train_step.DDP_DEFAULT: _took(0.200, 0.300),
        train_step.DDP_VIEW: _took(0.160, 0.240),
    }
    verdict = train_step.shared_verdict("mlp", "adam", summaries, is_crowded=False)
    assert verdict is not None
    assert (verdict.value, verdict.budget) == (pytest.approx(0.85), 0.9)
    crowded = train_step.shared_verdict("mlp", "adam", summaries, is_crowded=True)
    assert crowded is not None
    assert (crowded.value, crowded.budget) == (pytest.approx(0.625), 0.6)
    assert crowded.is_met is False
    del summaries[train_step.SHARED]
    assert train_step.shared_verdict("mlp", "adam", summaries, is_crowded=False) is None


def test_memory_is_held_against_what_need_not_be_shared() -> None:
    """Alone: the model, its gradients, two states, and half a model's size of activations."""
    alone = Footprint("mlp+adam", train_step.ALONE, 1, 100, 450)
    shared = Footprint("mlp+adam", train_step.SHARED, 3, 100, 750)
    assert train_step.memory_verdict(shared, alone, 2).value == pytest.approx(1.0)
    assert train_step.memory_verdict(shared, alone, 1).is_met is True
    assert shared.copies == 7.5
