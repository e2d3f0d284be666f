"""Many tensors as separate calls, and the memory of fusion: what figures are held against."""

from __future__ import annotations

import pytest

from benchmarks import calls
from benchmarks.harness.figures import Summary, summarize
from benchmarks.harness.memory import Staging, Usage, kib_of
from benchmarks.harness.report import Row
from benchmarks.harness.sizes import element_counts, resnet50_counts
from benchmarks.harness.work import Case


def _took(*rounds: float) -> Summary:
    return summarize([[seconds] for seconds in rounds])


def _staging(threshold_bytes: int, num_dtypes: int, *peaks_mib: float) -> Staging:
    ranks = tuple(Usage(int(peak * (1 << 20)), 0, 1 << 20) for peak in peaks_mib)
    return Staging(threshold_bytes, num_dtypes, 64 << 20, ranks)


def test_a_case_has_so_many_tensors_of_one_size_or_resnets() -> None:
    assert element_counts(Case("separate", 4096, count=3)) == [1024] * 3
    assert element_counts(Case("separate")) == resnet50_counts()


def test_the_cost_of_a_call_is_that_of_one_tensor() -> None:
    modes = {calls.SEPARATE: _took(0.02), calls.UNCACHED: _took(0.05), calls.GROUPED: _took(0.001)}
    rows = [Row("1000 tensors of 4 KiB", 4096000, modes, ""), Row("500 tensors of 4 B", 2000, modes, "")]
    assert calls.negotiation(rows, 1000) == []
    assert calls.negotiation(rows, 500) == [
        "a call with next to no data, reigen separate: 40.00 us",
        "a call with next to no data, reigen separate, no response cache: 100.00 us",
        "a call with next to no data, reigen one group: 2.00 us",
    ]


def test_separate_calls_are_held_against_gloos_and_against_no_cache() -> None:
    modes = {calls.SEPARATE: _took(0.02), calls.UNCACHED: _took(0.01), calls.GLOO_SEPARATE: _took(0.1)}
    found = {verdict.claim: verdict for verdict in calls.verdicts([Row("x", 0, modes, ""), Row("y", 0, {}, "")])}
    assert len(found) == 2
    assert found["x: gloo separate / reigen separate"].value == pytest.approx(5.0)
    assert found["x: reigen separate, no response cache / reigen separate"].is_met is False


def test_memory_must_not_grow_with_the_number_of_dtypes() -> None:
    """The rank that needs most counts; a buffer of 1 MiB for each of 8 dtypes would be 7 MiB more."""
    memory = [
        _staging(1 << 20, 1, 7.0, 6.0),
        _staging(1 << 20, 8, 6.0, 14.0),
        _staging(16 << 20, 1, 7.0, 7.0),
        _staging(16 << 20, 8, 8.0, 8.5),
        _staging(128 << 20, 8, 8.0, 8.5),  # the other one failed
    ]
    found = calls.memory_verdicts(memory)
    assert [verdict.claim.partition(":")[0] for verdict in found] == [
        "memory, threshold 1 MiB",
        "memory, threshold 16 MiB",
    ]
    assert [verdict.value for verdict in found] == pytest.approx([7.0, 1.5])
    assert [verdict.is_met for verdict in found] == [False, True]


def test_the_kernels_numbers_are_read_by_their_whole_name() -> None:
    text = "VmPeak:\t   9 kB\nVmHWM:\t   64752 kB\nVmRSS:\t   13548 kB\nPss:  77 kB\nPss_Anon:  5 kB\n"
    assert [kib_of(text, field) for field in ("VmHWM", "Pss", "Pss_Anon")] == [64752, 77, 5]
    with pytest.raises(AssertionError, match="does not tell Pss_Shmem"):
        kib_of(text, "Pss_Shmem")
