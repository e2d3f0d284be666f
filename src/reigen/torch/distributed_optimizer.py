"""DistributedOptimizer: any torch optimizer, fed with gradients that all ranks agree on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from reigen import context as contexts
from reigen.api.gradients.reduce_group import choose_reduction
from reigen.api.operations import Average
from reigen.api.process_sets import ProcessSet, global_process_set
from reigen.compression import Codec
from reigen.elastic import membership
from reigen.errors import ArgumentError
from reigen.torch.compression import Compression, Compressor
from reigen.torch.optimizers.adasum_optimizer import AdasumOptimizer, DeltaReducer, check_adasum_options
from reigen.torch.optimizers.allreduce_optimizer import AllreduceOptimizer
from reigen.torch.optimizers.arguments import choose_compression, choose_compressor, choose_groups, name_parameters
from reigen.torch.optimizers.gradient_sync import GradientSynchronizer
from reigen.torch.optimizers.optimizer_wrapper import (
    check_not_wrapped,
    unwrap_in_place,
    wrap_in_place,
    wrap_optimizer,
)
from reigen.torch.reducer.reducer import ReduceOptions
from reigen.torch.shared_parameters.eligibility import choose_parameter_sharing
from reigen.torch.shared_parameters.optimizer import SharedParametersOptimizer
from reigen.types import ReduceOp


def DistributedOptimizer(  # noqa: N802 - the name is Horovod's, and what it returns is an optimizer
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor | Codec | Mapping[str, Any] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    share_parameters: bool | Literal["auto"] = False,
    elementwise: bool = False,
    synchronize_in_backward: bool = False,
) -> Any:
    """Wrap an optimizer so that ``step()`` uses gradients reduced over all ranks.

    The result is an instance of a subclass of the optimizer's class, which shares its parameter groups and state:
    learning rate schedulers, ``state_dict`` and ``isinstance`` work. Gradients lie in shared memory and are reduced,
    bucket by bucket, while backward still runs. The buckets' memory is registered in the first ``step()`` or
    ``synchronize()``, and given back when the optimizer is garbage-collected.

    Parameters without a gradient contribute zeros, so models may run partly, and differently on different ranks.
    Parameters that are added or become trainable later are found at the next step, which must be the same on all ranks.
    Where ranks begin with different parameters the lowest of them warns (with REIGEN_CHECK_REPLICAS, a ReplicaError).
    After an exception in backward, ``step()`` goes on with the gradients that came; ``synchronize()`` and then
    ``zero_grad()`` drop them, if all ranks do that. Where ranks have different numbers of batches: ``uneven_data()``.
    In a job of one rank this is the plain optimizer.

    Args:
        optimizer: any optimizer of torch.optim, or another subclass of its ``Optimizer``. For LBFGS the closure's loss
            is averaged too, so that its line search decides the same on all ranks.
        named_parameters: what ``model.named_parameters()`` gives; the names are used in messages.
        compression: the element type in which gradients travel; or, as a dict such as ``{"type": "2bit"}`` or a codec
            of :mod:`reigen.compression`, the codes. Those are gathered and added up, so they need op=Average or Sum,
            and pay with few ranks or few bits (docs/compression.md).
        backward_passes_per_step: gradients that are summed up locally before they are reduced. They are not averaged:
            divide the loss by their number for that.
        op: Average, Sum, Min, Max or Product. With Adasum, and several ranks, each rank's optimizer steps on its own
            gradients, and what that did to each parameter is combined over the ranks, 2, 4, 8, ... of them, when
            ``step()`` is called; ``synchronize()`` does nothing then and ``skip_synchronize()`` is an AssertionError.
            ``groups`` mean nothing. Sparse gradients are left to the optimizer, unless ``sparse_as_dense``.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added, multiplied after.
        num_groups: deprecated; use ``groups``.
        groups: which gradients are reduced together: lists of parameters, each reduced when all its members have their
            gradients, the parameters in no list as usual; or a number of groups, into which the parameters are divided
            in the order in which rank 0's gradients arrive. The same on every rank. Without it buckets are filled up.
        sparse_as_dense: reduce sparse gradients as dense ones; the optimizer gets them as sparse ones again, without
            their zeros. Otherwise their indices and values are gathered, for parameters whose gradient is sparse in the
            first step on any rank.
        process_set: the ranks that average among themselves. A rank outside it has a plain optimizer of its own.
        share_parameters: from the first step on the parameters and the optimizer's state exist once a host, and every
            rank updates a part of them (docs/shared-parameters.md). For optimizers that treat every element, or every
            parameter, by itself, without closures, and parameters on the host. ``p.grad`` is None after ``step()``;
            clip with ``clip_grad_norm_()`` of the optimizer. "auto": where that is exact, and some host has several
            ranks; rank 0 logs the choice and its reason.
        elementwise: with ``share_parameters``: an optimizer whose class is not one of torch's own does treat every
            element by itself.
        synchronize_in_backward: with op=Average: ``backward()`` returns when the gradients are averaged, as with
            DistributedDataParallel. For code that clips, scales or logs them and knows nothing of ``synchronize()``:
            transformers.Trainer, open_clip.

    Returns:
        The optimizer, with ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step()`` added.

    Raises:
        ArgumentError: an argument makes no sense; the names do not cover the parameters, or are not unique.
        UnsupportedTypeError: a parameter's dtype cannot be communicated.
        UnsupportedError: Adasum with a process set, or another number of ranks (a NotImplementedError, too).
        NotInitializedError: ``init()`` has not been called.

    Example:
        Clip gradients after they have been averaged::

            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
    """
    check_not_wrapped(optimizer)
    if process_set is not global_process_set:
        membership.join()  # the sets of an elastic job are its members'
    if synchronize_in_backward and (op != ReduceOp.AVERAGE or share_parameters):
        raise ArgumentError("synchronize_in_backward goes with op=Average only, and not with share_parameters")
    named = name_parameters(optimizer, named_parameters)
    if op == ReduceOp.ADASUM:
        if share_parameters is True:
            raise ArgumentError("share_parameters does not go with op=Adasum, for which every rank updates all weights")
        check_adasum_options(gradient_predivide_factor, process_set)
        if contexts.current().size > 1 or membership.may_change():
            deltas = DeltaReducer(named, choose_compressor(compression), backward_passes_per_step, sparse_as_dense)
            return wrap_optimizer(optimizer, AdasumOptimizer, deltas)
        op = Average  # of one rank
    reduction = choose_reduction(op, gradient_predivide_factor)
    choice = choose_compression(compression, reduction.op)
    options = ReduceOptions(
        reduction=reduction,
        compression=choice,
        sparse_as_dense=sparse_as_dense,
        groups=choose_groups(groups, num_groups),
        process_set=process_set,
        owned=choose_parameter_sharing(optimizer, share_parameters, choice, process_set, asserted=elementwise),
    )
    reducer = GradientSynchronizer(named, options, backward_passes_per_step, in_backward=synchronize_in_backward)
    return wrap_optimizer(optimizer, SharedParametersOptimizer if options.owned else AllreduceOptimizer, reducer)


def distribute_in_place(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor | Codec | Mapping[str, Any] = Compression.none,
    *,
    synchronize_in_backward: bool = False,
) -> None:
    """Let an optimizer be what `DistributedOptimizer` makes of it, under whatever name it is known.

    Raises:
        ArgumentError: the names do not cover the parameters, or are not unique.
    """
    check_not_wrapped(optimizer)
    named = name_parameters(optimizer, named_parameters)
    reduction = choose_reduction(Average, 1.0)
    choice = choose_compression(compression, reduction.op)
    options = ReduceOptions(reduction, choice, sparse_as_dense=False, groups=None, process_set=global_process_set)
    reducer = GradientSynchronizer(named, options, 1, in_backward=synchronize_in_backward)
    wrap_in_place(optimizer, AllreduceOptimizer, reducer)


def restore_in_place(optimizer: torch.optim.Optimizer) -> None:
    """Undo `distribute_in_place`; an optimizer that is not wrapped is left alone."""
    if isinstance(optimizer, AllreduceOptimizer):
        unwrap_in_place(optimizer)
