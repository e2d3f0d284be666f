"""What the staging of fused tensors costs in memory: measured in ranks of their own, with the kernel's own counters.

The peak is VmHWM, which the kernel keeps without sampling and sets back on request (proc(5), clear_refs). Shared pages
count in every rank that has touched them, those of other ranks' segments too: it is what a rank sees, not its share.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from benchmarks.harness.work import WrongResultError
from reigen.runner import run

#: What gradients, counters and masks are made of. Their sums of ones are exact in all of them.
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8")
_STEPS = 3
_RESET_PEAK = "5"


class Usage(msgspec.Struct, frozen=True):
    """Memory of one rank beyond its tensors, in bytes.

    Attributes:
        peak: the most that was resident while the tensors were reduced, shared pages included.
        share: this rank's part of what stays resident after that: shared pages count by the number of their users.
        segment: size of this rank's shared memory.
    """

    peak: int
    share: int
    segment: int


class Staging(msgspec.Struct, frozen=True):
    """What one setting costs.

    Attributes:
        threshold_bytes: REIGEN_FUSION_THRESHOLD.
        num_dtypes: among how many dtypes the tensors were divided.
        tensors_bytes: of all tensors of a rank.
        ranks: by rank.
    """

    threshold_bytes: int
    num_dtypes: int
    tensors_bytes: int
    ranks: tuple[Usage, ...]

    @property
    def peak(self) -> int:
        """Of the rank that needed most."""
        return max(usage.peak for usage in self.ranks)

    @property
    def segment(self) -> int:
        """The largest."""
        return max(usage.segment for usage in self.ranks)

    @property
    def share(self) -> int:
        """The largest."""
        return max(usage.share for usage in self.ranks)


def measure(num_ranks: int, threshold_bytes: int, num_dtypes: int, num_tensors: int, nbytes: int) -> Staging:
    """Reduce ``num_tensors`` tensors of ``nbytes`` as separate asynchronous calls, in a job of its own.

    Raises:
        LaunchError: the job failed.
    """
    usages = run(use, (threshold_bytes, DTYPES[:num_dtypes], num_tensors, nbytes), num_proc=num_ranks)
    return Staging(threshold_bytes, num_dtypes, num_tensors * nbytes, tuple(usages))


def use(threshold_bytes: int, dtypes: tuple[str, ...], num_tensors: int, nbytes: int) -> Usage:
    """One rank: what its memory does while the tensors are reduced.

    Raises:
        WrongResultError: a sum is wrong.
    """
    os.environ["REIGEN_FUSION_THRESHOLD"] = str(threshold_bytes)
    import torch

    import reigen.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    kinds = [getattr(torch, dtypes[number % len(dtypes)]) for number in range(num_tensors)]
    tensors = [torch.ones(nbytes // kind.itemsize, dtype=kind) for kind in kinds]

    def step(parts: list[torch.Tensor]) -> None:
        handles = [hvd.allreduce_async_(part, name=f"memory.{i}", op=hvd.Max) for i, part in enumerate(parts)]
        for handle in handles:
            hvd.synchronize(handle)

    step([tensor[:1] for tensor in tensors])  # code is loaded, bookkeeping has its size, hardly any staging is touched
    hvd.barrier()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before, share = _status("VmRSS"), _share()
    for _ in range(_STEPS):
        step(tensors)
    peak, share = _status("VmHWM") - before, _share() - share
    if any(not bool((tensor == 1).all()) for tensor in tensors):
        raise WrongResultError("the maximum of ones is not one")
    segment = _segment_bytes(hvd.rank())
    hvd.shutdown()
    return Usage(peak, share, segment)


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    return kib_of(Path("/proc/self/status").read_text(), field) << 10


def _share() -> int:
    """Bytes of anonymous and of shared memory; code is left out: it is shared with whoever runs just now."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return (kib_of(text, "Pss_Anon") + kib_of(text, "Pss_Shmem")) << 10


def kib_of(text: str, field: str) -> int:
    """The number behind ``field`` in a file such as /proc/PID/status, whose unit is KiB.

    Example:
        >>> kib_of("VmHWM:   64752 kB", "VmHWM")
        64752
    """
    match = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    assert match is not None, f"the kernel does not tell {field}"
    return int(match[1])


def _segment_bytes(rank: int) -> int:
    """Size of this rank's shared memory, by the name that its file has for the kernel."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and os.readlink(link).startswith(f"/memfd:reigen-{rank} "):
            total += link.stat().st_size
    return total
