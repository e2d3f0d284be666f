"""A collective as a primitive of JAX: shapes, gradients, batches, and its operation in compiled programs.

Gradients follow the table's rules (`reigen.api.operations`), which are Horovod's, in reverse mode: that of allreduce is
the same reduction of the gradients, those of allgather and broadcast *average*, and each can be differentiated again.
In forward mode the tangent of a linear collective is the collective of the tangents. Operators that are not linear
(Min, Max, Product, Adasum) have neither.

Inside a program the shape of every result has to be known when it is traced: all ranks' tensors have the same shape
there, and all give an alltoall the same splits. Otherwise the operation fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from msgspec import structs

from reigen import context
from reigen.api.native_calls import NativeCall
from reigen.api.operations import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER, Collective
from reigen.engine.operation_builders import ReductionSpec, resolve_splits
from reigen.errors import ArgumentError, UnsupportedError
from reigen.jax.adapter import JaxAdapter, dtype_of, empty_aligned, over_memory
from reigen.jax.native import TARGET, callback_effects, get_handler, run_by_callback
from reigen.jax.tracing import ABSTRACT_TOKEN, ORDERED, TOKEN_SET, is_traced, place_call
from reigen.types import DTYPES, ReduceOp

try:
    from jax._src.core import Primitive  # jax.extend's, which imports Pallas as well
except ImportError:
    from jax.extend.core import Primitive

_ADAPTER = JaxAdapter()
_MEAN = ReductionSpec(ReduceOp.AVERAGE, 1.0, 1.0)
_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)
#: behind the name of a collective of tangents
_TANGENT = ".jvp"

collective_p = Primitive("reigen_collective")
collective_p.multiple_results = True


def run_collective(
    collective: Collective,
    arrays: Sequence[Any],
    argument: Any,
    name: str | None,
    process_set: int,
    *,
    grouped: bool,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> list[Any]:
    """Run a collective here, or make it part of the program that is traced.

    Args:
        collective: of the table.
        arrays: jax.Arrays, or traced values, of element types that can be communicated.
        argument: of the collective's own.
        name: matches the ranks' calls; see `reigen.jax.tracing` for those that have none.
        process_set: number of the set.
        grouped: all or none of them; otherwise there is one.
        shapes: of the results; None: those of the same shapes on all ranks.

    Returns:
        The results; of an alltoall, also the rows received from each rank.

    Raises:
        ArgumentError, UnsupportedTypeError: an argument is wrong here; nothing was sent.
        CollectiveError: it failed; inside a program JAX raises it, as a JaxRuntimeError, where a result is needed.
    """
    kind = f"grouped_{collective.name}" if grouped else collective.name
    name, ordered = place_call(kind, name)
    splits = argument if collective is ALLTOALL else None
    call = NativeCall.of(collective, None if splits else argument, name, process_set, is_grouped=grouped)
    traced = is_traced()
    if not traced and not any(isinstance(array, jax.core.Tracer) for array in arrays):
        return _run(*arrays, call=call, splits=splits)  # as the primitive would, in less time
    if shapes is None:
        shapes = [_result_shape(collective, np.shape(array), argument, process_set) for array in arrays]
    if traced:
        _check_arguments(collective, arrays, argument, process_set)
    return list(
        collective_p.bind(*arrays, call=call, splits=splits, shapes=tuple(shapes), ordered=ordered, received=None)
    )


def _members(process_set: int) -> tuple[int, ...]:
    job = context.current()
    ranks = job.process_sets.get(process_set)
    if ranks is None or job.rank not in ranks:
        raise ArgumentError(f"this rank is in no process set {process_set}")
    return tuple(ranks)


def _result_shape(collective: Collective, shape: tuple[int, ...], argument: Any, process_set: int) -> tuple[int, ...]:
    ranks = _members(process_set)
    size, index = len(ranks), ranks.index(context.current().rank)
    if collective.in_place or not (shape or collective is ALLGATHER):
        return shape
    if collective is ALLGATHER:
        return ((shape[0] if shape else 1) * size, *shape[1:])
    if collective is REDUCESCATTER:
        return (shape[0] // size + (index < shape[0] % size), *shape[1:])
    return (resolve_splits(shape, argument, size)[index] * size, *shape[1:])


def _check_arguments(collective: Collective, arrays: Sequence[Any], argument: Any, process_set: int) -> None:
    """Raise the errors of arguments now, instead of when the program runs."""
    ranks = _members(process_set)
    for array in arrays:
        shape = np.shape(array)
        shape = (1,) if collective.takes_scalars and not shape else shape
        collective.build(shape, dtype_of(array.dtype).name, argument, ranks, process_set)


# -- run here ---------------------------------------------------------------------------------------------------------


def _run(*arrays: Any, call: NativeCall, splits: Any, **_: Any) -> list[Any]:
    tensors = [_ADAPTER.as_tensor(array) for array in arrays]
    dtypes = [dtype_of(tensor.dtype) for tensor in tensors]
    sources = [_ADAPTER.array(tensor)[0] for tensor in tensors]
    targets = [empty_aligned(each.shape, each.dtype) for each in sources] if call.row.in_place else None
    outcome = call.start(
        sources,
        dtypes,
        targets,
        splits=splits,
        blocking=True,
        in_program=False,
        make_output=None if call.is_grouped else lambda shape: empty_aligned(shape, sources[0].dtype),
    ).wait()
    outcomes = outcome.members if call.is_grouped else (outcome,)
    results = [over_memory(each.on_host, like.dtype, like) for each, like in zip(outcomes, tensors, strict=True)]
    if call.row.returns_splits:
        results.append(jnp.asarray(np.array(outcome.received_splits, np.int32)))
    return results


# -- in programs ------------------------------------------------------------------------------------------------------


def _describe(
    *avals: Any, call: NativeCall, splits: Any, shapes: Any, ordered: bool, received: Any
) -> tuple[list[Any], Any]:
    results = [_type_of_result(aval, shape, aval.dtype) for aval, shape in zip(avals, shapes, strict=True)]
    if call.row.returns_splits:
        results.append(_type_of_result(avals[0], (len(_members(call.process_set)),), np.dtype(np.int32)))
    if get_handler() is None:
        return results, callback_effects()
    return results, {ORDERED} if ordered else set()


def _type_of_result(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the type of a result, which varies over the axes of a shard_map over which its own tensor varies.

    Each device's part is communicated with that of the same device of the other ranks: a result is the same on all
    devices if its own tensor is, whatever else is in the group. The type is made from that of the tensor, because the
    field for it is ``vma`` or ``manual_axis_type``, depending on the version of JAX.
    """
    sharding = aval.sharding
    if sharding.mesh.empty:
        return ShapedArray(shape, dtype)
    if shape != aval.shape:
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _lower(ctx: Any, *operands: Any, call: NativeCall, splits: Any, shapes: Any, ordered: bool, received: Any) -> Any:
    if getattr(ctx.module_context.axis_context, "num_devices", 1) > 1:  # XLA's words would be of its own inside
        raise UnsupportedError(
            f"{call.collective} inside a jax.jit whose arrays lie on several devices of this process: call it in "
            "jax.shard_map, for each device's part, or outside of jit"
        )
    if get_handler() is None:
        results = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_out]
        by_callback = mlir.lower_fun(lambda *xs: run_by_callback(xs, results, call, splits), multiple_results=True)
        return by_callback(ctx, *operands)
    attributes = {"call": call.encode()} | ({"splits": ",".join(map(str, splits))} if splits else {})
    # The sums of tensors that nobody needs any more, as a step's gradients, take their memory; XLA copies all others.
    aliases = {index + ordered: index + ordered for index in range(len(operands) if call.row.in_place else 0)}
    lower = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases, has_side_effect=True)
    if not ordered:
        return lower(ctx, *operands, **attributes)
    with_token = dataclasses.replace(
        ctx, avals_in=[ABSTRACT_TOKEN, *ctx.avals_in], avals_out=[ABSTRACT_TOKEN, *ctx.avals_out]
    )
    token, *results = lower(with_token, ctx.tokens_in.get(ORDERED), *operands, **attributes)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(TOKEN_SET({ORDERED: token})))
    return results


def _refuse_device(ctx: Any, *operands: Any, **params: Any) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise UnsupportedError(
        f"collectives of reigen.jax are compiled for the platform cpu only, not for {platforms}: inside jax.jit use "
        "jax.lax.psum and its like there, or call them outside, where arrays are copied to the host and back"
    )


collective_p.def_impl(_run)
collective_p.def_effectful_abstract_eval(_describe)
mlir.register_lowering(collective_p, _refuse_device)
mlir.register_lowering(collective_p, _lower, platform="cpu")


# -- gradients --------------------------------------------------------------------------------------------------------


def _differentiate(
    primals: Any, tangents: Any, *, call: NativeCall, splits: Any, shapes: Any, ordered: bool, received: Any
) -> Any:
    """Run it on primals and, if it is linear, on tangents of floating point."""
    results = collective_p.bind(*primals, call=call, splits=splits, shapes=shapes, ordered=ordered, received=received)
    floating = [jnp.issubdtype(primal.dtype, jnp.inexact) for primal in primals]
    zeros = [_zero(result) for result in results]
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return results, zeros
    op = None if call.reduction is None else ReduceOp(call.reduction[0])
    if op is not None and op not in _LINEAR:
        name = f"grouped_{call.collective}" if call.is_grouped else call.collective
        raise ArgumentError(
            f"{name} with op={op.name.title()} has no gradient; use jax.lax.stop_gradient() on its input"
        )
    if call.row.returns_splits:
        received = _received_rows(results[-1], splits, call.process_set, primals[0].shape)
    made = collective_p.bind(
        *[ad.instantiate_zeros(each) for each, used in zip(tangents, floating, strict=True) if used],
        call=structs.replace(call, name=call.name and f"{call.name}{_TANGENT}"),
        splits=splits,
        shapes=tuple(np.shape(result) for result, used in zip(results, floating, strict=False) if used),
        ordered=ordered or (is_traced() and get_handler() is not None),  # several have one name, unlike calls
        received=received,
    )
    found = iter(made)
    used = [*floating, False][: len(results)]
    return results, [next(found) if each else zero for zero, each in zip(zeros, used, strict=True)]


def _zero(result: Any) -> Any:
    return ad.Zero(jax.typeof(result).to_tangent_aval())


def _received_rows(rows: Any, splits: Any, process_set: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many rows an alltoall gave from each rank: as it was, or, in a program, as it has to be."""
    if not isinstance(rows, jax.core.Tracer):
        return tuple(np.asarray(rows).tolist())
    ranks = _members(process_set)
    return (resolve_splits(shape, splits, len(ranks))[ranks.index(context.current().rank)],) * len(ranks)


def _transpose(
    cotangents: Any, *operands: Any, call: NativeCall, splits: Any, shapes: Any, ordered: bool, received: Any
) -> list[Any]:
    """Return the gradients of the tensors by the table's rules, of those of the results."""
    if all(type(each) is ad.Zero for each in cotangents[: len(operands)]):  # as of a metric beside the loss
        return [ad.Zero(operand.aval) for operand in operands]
    given = [ad.instantiate_zeros(each) for each in cotangents[: len(operands)]]
    wanted = [operand.aval.shape for operand in operands]
    name = f"{call.name.removesuffix(_TANGENT)}.grad" if call.name else None

    def run(collective: Collective, argument: Any, shapes: Any = None) -> list[Any]:
        return run_collective(
            collective, given, argument, name, call.process_set, grouped=call.is_grouped, shapes=shapes
        )

    row = call.row
    if row is ALLREDUCE:
        return run(ALLREDUCE, call.argument)
    if row is BROADCAST:
        averaged = run(ALLREDUCE, _MEAN)
        is_root = jnp.array(context.current().rank == call.root_rank)
        return [jnp.where(is_root, each, 0) for each in averaged]  # used on every rank, so that none leaves it out
    if row is ALLGATHER:
        begins = _begins_of_rows(wanted, name, call.process_set)
        return list(map(_take_rows, run(ALLREDUCE, _MEAN), begins, wanted))
    if row is ALLTOALL:
        sent = sum(resolve_splits(wanted[0], splits, len(received)))
        returned = run(ALLTOALL, received, [(sent, *wanted[0][1:])])
        return [_take_rows(returned[0], 0, wanted[0])]
    op, prescale, postscale = call.argument
    scale = prescale * postscale * (len(_members(call.process_set)) if op is ReduceOp.SUM else 1)
    return [each if scale == 1 else each * scale for each in run(ALLGATHER, None, wanted)]


def _begins_of_rows(shapes: Sequence[tuple[int, ...]], name: str | None, process_set: int) -> list[int]:
    """Return the first row of this rank in the gathered rows, for each tensor."""
    index = _members(process_set).index(context.current().rank)
    rows = np.array([[shape[0] if shape else 1 for shape in shapes]])
    if is_traced():
        return list((rows[0] * index).tolist())
    name = None if name is None else f"{name}.rows"
    asked = context.current().allgather(
        rows, DTYPES[rows.dtype.name], name=name, process_set=process_set, blocking=True
    )
    return list(asked.wait().on_host[:index].sum(0).tolist())


def _take_rows(array: Any, begin: int, shape: tuple[int, ...]) -> Any:
    """Return rows of an array in a shape, with zeros behind the last one."""
    count = shape[0] if shape else 1
    rows = array[begin : begin + count]
    missing = count - rows.shape[0]
    if missing:
        rows = jnp.concatenate([rows, jnp.zeros((missing, *rows.shape[1:]), rows.dtype)])
    return rows.reshape(shape)


ad.primitive_jvps[collective_p] = _differentiate
ad.primitive_transposes[collective_p] = _transpose


# -- batches ----------------------------------------------------------------------------------------------------------


def _batch(
    arrays: Any, dims: Any, *, call: NativeCall, splits: Any, shapes: Any, ordered: bool, received: Any
) -> tuple[list[Any], list[Any]]:
    """Run it once for all examples of a batch, which is a dimension of the tensors behind that of the rows."""
    if call.reduction is not None and call.reduction[0] == ReduceOp.ADASUM:
        raise UnsupportedError("op=Adasum treats a tensor as one vector: it does not work inside jax.vmap")
    at = 0 if call.row.in_place else 1
    given, made = [], []
    places: list[int | None] = []
    for array, dim, shape in zip(arrays, dims, shapes, strict=True):
        if dim is None:
            given.append(array)
            made.append(shape)
            places.append(None)
            continue
        if at and array.ndim == 1:  # scalars are gathered as rows
            given.append(array[None])
        else:
            given.append(jnp.moveaxis(array, dim, at))
        made.append((*shape[:at], array.shape[dim], *shape[at:]))
        places.append(at)
    results = collective_p.bind(
        *given, call=call, splits=splits, shapes=tuple(made), ordered=ordered, received=received
    )
    return results, [*places, *[None] * (len(results) - len(places))]


batching.primitive_batchers[collective_p] = _batch
