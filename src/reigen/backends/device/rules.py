"""Reductions that devices can do, and devices that can work together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from reigen.kernels.reduce import Reduction
from reigen.types import DType, ReduceOp

#: Types that both NCCL and Gloo reduce in process groups of torch: neither has 16-bit integers.
_DTYPES = frozenset(("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"))
#: For torch a bool is a byte that is 0 or 1.
_BOOL_OPS = {ReduceOp.SUM: "MAX", ReduceOp.MAX: "MAX", ReduceOp.PRODUCT: "MIN", ReduceOp.MIN: "MIN"}
#: A number of ranks by which a factor can be divided and still be exact.
_MANY_RANKS = 1024


@dataclass(frozen=True, slots=True)
class DeviceReduction:
    """Reduction of a process group.

    Attributes:
        op: name of an operator of ``torch.distributed.ReduceOp``: SUM, PRODUCT, MIN or MAX.
        factor: each input is multiplied by it first.
        as_bytes: elements are taken for unsigned bytes.
    """

    op: str
    factor: float = 1.0
    as_bytes: bool = False


def explain_unsupported(dtype: DType, op: ReduceOp, prescale: float, postscale: float) -> str | None:
    """Return why devices cannot reduce like this, whatever the number of ranks; None: they can.

    They scale nothing but the inputs of a sum of floating-point numbers. Everything else that has a factor or a divisor
    is for the host, and so are types that process groups do not have, and Adasum.
    """
    if op is ReduceOp.ADASUM:
        return "Adasum works on the host"
    if dtype.name not in _DTYPES:
        return f"process groups have no {dtype.name}"
    scaled = prescale != 1.0 or postscale != 1.0
    if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        if not dtype.is_floating and (scaled or op is ReduceOp.AVERAGE):
            return f"devices do not scale {dtype.name} as the host does"
        smallest = prescale * postscale / (_MANY_RANKS if op is ReduceOp.AVERAGE else 1)
        if scaled and not _is_factor_exact(smallest, dtype):
            return f"the factors {prescale} and {postscale}, taken together, do not fit {dtype.name}"
    elif scaled:
        return f"devices have no factors for op={op.name.title()}"
    return None


def make_device_reduction(reduction: Reduction) -> DeviceReduction:
    """Return the devices' reduction for one that `explain_unsupported` has not refused.

    Factors and divisor become one factor of the inputs, so that sums of half-precision numbers do not overflow where
    their average would not. (Reigen's host backends multiply, add and divide one after the other, half-precision types
    in float32. So results may differ in the last bits.)
    """
    op = reduction.op
    if reduction.dtype.name == "bool":
        return DeviceReduction(_BOOL_OPS[op], as_bytes=True)
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return DeviceReduction(op.name)
    factor = reduction.prescale * reduction.postscale
    return DeviceReduction("SUM", factor / reduction.count if op is ReduceOp.AVERAGE else factor)


def _is_factor_exact(factor: float, dtype: DType) -> bool:
    """Return whether the type holds the factor as exactly as its other numbers."""
    smallest = {"float16": 2.0**-14, "float64": 2.0**-1022}.get(dtype.name, 2.0**-126)
    largest = {"float16": 65504.0, "float64": 2.0**1023}.get(dtype.name, 2.0**127)
    return factor == 0.0 or smallest <= abs(factor) <= largest


_SHARED_GPU_ERROR = (
    "several ranks use one GPU, which NCCL refuses; call torch.cuda.set_device(hvd.local_rank()) after hvd.init(), "
    "before anything is put on a GPU (or, to share a GPU on purpose, give each rank its own NCCL_HOSTID)"
)


class RankDeviceInfo(msgspec.Struct, frozen=True, array_like=True):
    """Message of a rank to the others before they connect.

    Attributes:
        host: the same for ranks of one host, as NCCL sees it.
        device: `reigen.backends.device.Device.identity`.
        name: the process's name for it.
        library: name and version of the library that connects it with others.
    """

    host: str
    device: str
    name: str
    library: str


def find_device_mismatch(facts: Sequence[RankDeviceInfo]) -> tuple[str, dict[int, str]] | None:
    """Return why ranks with these facts, by number, cannot connect, and those facts; None: they can."""
    if len({fact.library for fact in facts}) > 1:
        return "the ranks have different libraries for their devices", {r: f.library for r, f in enumerate(facts)}
    users: dict[tuple[str, str], list[int]] = {}
    for rank, fact in enumerate(facts):
        users.setdefault((fact.host, fact.device), []).append(rank)
    shared = next((ranks for ranks in users.values() if len(ranks) > 1), None)
    if shared is None:
        return None
    return _SHARED_GPU_ERROR, {rank: f"{facts[rank].name} ({facts[rank].device})" for rank in shared}
