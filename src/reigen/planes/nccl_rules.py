"""What NCCL can reduce, and which ranks' GPUs can work together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from reigen.kernels.reduce import Reduction
from reigen.types import DType, ReduceOp

# ncclRedOp_t
SUM, PRODUCT, MAX, MIN, AVERAGE = 0, 1, 2, 3, 4

#: ncclDataType_t. NCCL has no 16-bit integers.
DATATYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "bool": 1,
}
#: What moves without being reduced, moves as bytes.
BYTE = DATATYPES["uint8"]

#: For torch a bool is a byte that is 0 or 1.
_BOOL_OPS = {ReduceOp.SUM: MAX, ReduceOp.MAX: MAX, ReduceOp.PRODUCT: MIN, ReduceOp.MIN: MIN}
_OPS = {ReduceOp.SUM: SUM, ReduceOp.PRODUCT: PRODUCT, ReduceOp.MAX: MAX, ReduceOp.MIN: MIN}
#: A number of ranks by which a factor can be divided and still be exact.
_MANY = 1024


@dataclass(frozen=True, slots=True)
class Recipe:
    """How NCCL is told to reduce.

    Attributes:
        datatype: ncclDataType_t.
        op: ncclRedOp_t.
        factor: if not empty, each input is multiplied by this element, and ``op`` is SUM.
    """

    datatype: int
    op: int
    factor: bytes = b""


def refusal(dtype: DType, op: ReduceOp, prescale: float, postscale: float) -> str | None:
    """Why NCCL cannot reduce like this, whatever the number of ranks; None: it can.

    NCCL scales nothing but the inputs of a sum of floating-point numbers. Everything else that has a factor or a
    divisor is for the host, and so are types that NCCL does not have, and Adasum.
    """
    if op is ReduceOp.ADASUM:
        return "Adasum works on the host"
    if dtype.name not in DATATYPES:
        return f"NCCL has no {dtype.name}"
    scaled = prescale != 1.0 or postscale != 1.0
    if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        if not dtype.is_floating and (scaled or op is ReduceOp.AVERAGE):
            return f"NCCL does not scale {dtype.name} as the host does"
        smallest = prescale * postscale / (_MANY if op is ReduceOp.AVERAGE else 1)
        if scaled and not _keeps(smallest, dtype):
            return f"the factors {prescale} and {postscale}, taken together, do not fit {dtype.name}"
    elif scaled:
        return f"NCCL has no factors for op={op.name.title()}"
    return None


def recipe(reduction: Reduction, size: int) -> Recipe:
    """How NCCL reduces what `refusal` has not refused, among ``size`` ranks.

    Factors and divisor become one factor of the inputs, rounded to the element type. (Reigen's host planes multiply,
    add and divide one after the other, half-precision types in float32. So results may differ in the last bits.)
    """
    datatype, op = DATATYPES[reduction.dtype.name], reduction.op
    if reduction.dtype.name == "bool":
        return Recipe(datatype, _BOOL_OPS[op])
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return Recipe(datatype, _OPS[op])
    factor = reduction.prescale * reduction.postscale
    if op is ReduceOp.AVERAGE:
        if factor == 1.0 and reduction.count == size:
            return Recipe(datatype, AVERAGE)
        factor /= reduction.count
    return Recipe(datatype, SUM) if factor == 1.0 else Recipe(datatype, SUM, _element(factor, reduction.dtype))


def _element(factor: float, dtype: DType) -> bytes:
    """``factor`` in the type's bits, rounded to nearest."""
    if dtype.name != "bfloat16":
        with np.errstate(over="ignore"):
            return np.array(factor, dtype.storage).tobytes()
    bits = int(np.float32(factor).view(np.uint32))  # the upper half, after rounding to nearest even
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).tobytes()


def _keeps(factor: float, dtype: DType) -> bool:
    """Whether rounding to the type leaves the factor as exact as its other numbers are."""
    smallest = {"float16": 2.0**-14, "float64": 2.0**-1022}.get(dtype.name, 2.0**-126)
    largest = {"float16": 65504.0, "float64": 2.0**1023}.get(dtype.name, 2.0**127)
    return factor == 0.0 or smallest <= abs(factor) <= largest


_SHARED = (
    "several ranks use one GPU, which NCCL refuses; call torch.cuda.set_device(hvd.local_rank()) after hvd.init(), "
    "before anything is put on a GPU (or, to share a GPU on purpose, give each rank its own NCCL_HOSTID)"
)


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others before they make a communicator.

    Attributes:
        host: the same for ranks of one machine, as NCCL sees it.
        device: `reigen.planes.device.Device.identity`.
        name: what the process calls it.
        nccl: version of NCCL.
    """

    host: str
    device: str
    name: str
    nccl: int


def disagreement(facts: Sequence[Fact]) -> tuple[str, dict[int, str]] | None:
    """Why these ranks cannot make a communicator, and what each of those concerned said; None: they can.

    Args:
        facts: by number of the rank.
    """
    versions = {fact.nccl for fact in facts}
    if len(versions) > 1:
        return "the ranks have different versions of NCCL", {r: str(fact.nccl) for r, fact in enumerate(facts)}
    users: dict[tuple[str, str], list[int]] = {}
    for rank, fact in enumerate(facts):
        users.setdefault((fact.host, fact.device), []).append(rank)
    shared = next((ranks for ranks in users.values() if len(ranks) > 1), None)
    if shared is None:
        return None
    return _SHARED, {rank: f"{facts[rank].name} ({facts[rank].device})" for rank in shared}
