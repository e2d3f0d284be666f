"""Decision where weights are updated, on the store or by the worker: gluon.Trainer's table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from reigen.errors import ArgumentError
from reigen.kv.store import KVStore


class StoreKind(Enum):
    """Kind of a store, as far as it matters here."""

    NONE = "no store"
    LOCAL = "a store of this process"
    SYNCHRONOUS = "a synchronous store on servers"
    ASYNCHRONOUS = "an asynchronous store on servers"
    ALLREDUCE = "a store over allreduce"
    CUSTOM = "another library's store"


@dataclass(frozen=True, slots=True)
class UpdateRequirements:
    """Facts that the decision depends on.

    Attributes:
        is_capable: whether the store can update weights.
        wanted: the user's ``update_on_kvstore``; None: not said.
        default: REIGEN_KV_UPDATE_ON_KVSTORE (MXNET_UPDATE_ON_KVSTORE).
        by_name: the user gave a name, not a store that exists already.
        sparse_gradients: some gradients are row-sparse.
        sparse_weights: some weights are only pulled row by row.
    """

    kind: StoreKind
    is_capable: bool = True
    wanted: bool | None = None
    default: bool = True
    by_name: bool = False
    sparse_gradients: bool = False
    sparse_weights: bool = False


@dataclass(frozen=True, slots=True)
class UpdateLocation:
    """Decision: whether gradients, or weights, go through the store, and whether it updates the weights."""

    needs_store: bool
    on_store: bool


_ALONE = UpdateLocation(needs_store=False, on_store=False)
_WORKER = UpdateLocation(needs_store=True, on_store=False)
_STORE = UpdateLocation(needs_store=True, on_store=True)


def store_kind(store: object | None) -> StoreKind:
    """Return the kind of a store: with staleness 0, ``dist_ssp`` is synchronous.

    Example:
        >>> store_kind(None)
        <StoreKind.NONE: 'no store'>
    """
    if store is None:
        return StoreKind.NONE
    if not isinstance(store, KVStore):
        return StoreKind.CUSTOM
    if store.staleness:
        return StoreKind.ASYNCHRONOUS
    if "dist" in store.type or store.type == "byteps":
        return StoreKind.SYNCHRONOUS
    return StoreKind.ALLREDUCE if store.type in {"ring", "horovod"} else StoreKind.LOCAL


def choose_update_location(question: UpdateRequirements) -> tuple[UpdateLocation, str]:
    """Return where the weights are updated, and why.

    Raises:
        ArgumentError: what the user wants is not possible with this store and these parameters.
    """
    kind, wanted = question.kind, question.wanted
    if question.sparse_weights:
        return _with_sparse_weights(question)
    if kind is StoreKind.NONE:
        if wanted:
            raise ArgumentError("update_on_kvstore=True needs a store, and kvstore is None")
        return _ALONE, "there is no store"
    if kind is StoreKind.ASYNCHRONOUS:
        if wanted is False:
            raise ArgumentError(
                "update_on_kvstore=False does not work with an asynchronous store: without an optimizer on the "
                "servers, gradients of one worker would replace what the others have sent"
            )
        return _STORE, "an asynchronous store has to update the weights"
    if kind is StoreKind.CUSTOM and question.sparse_gradients:
        raise ArgumentError("row-sparse gradients need a store of reigen.kv, not another library's")
    if not question.is_capable:
        if wanted:
            raise ArgumentError("update_on_kvstore=True is not possible: this store has no optimizers")
        return _WORKER, "the store has no optimizers"
    if kind is StoreKind.LOCAL and question.by_name and not wanted:
        return _ALONE, "a single process has nothing to add up"
    if kind is StoreKind.SYNCHRONOUS and question.sparse_gradients and wanted is False:
        raise ArgumentError(
            "update_on_kvstore=False does not work with row-sparse gradients on servers: they are added up only where "
            "servers update the weights"
        )
    return _choose_by_default(question)


def _choose_by_default(question: UpdateRequirements) -> tuple[UpdateLocation, str]:
    if question.wanted is not None:
        return (_STORE if question.wanted else _WORKER), f"update_on_kvstore={question.wanted}"
    if question.kind is StoreKind.ALLREDUCE:
        return _WORKER, "every worker has the sums, and no server that could update for all"
    if question.sparse_gradients:
        on_store = question.kind is StoreKind.SYNCHRONOUS
        return (_STORE if on_store else _WORKER), "some gradients are row-sparse"
    return (_STORE if question.default else _WORKER), f"REIGEN_KV_UPDATE_ON_KVSTORE is {int(question.default)}"


def _with_sparse_weights(question: UpdateRequirements) -> tuple[UpdateLocation, str]:
    if question.kind in {StoreKind.NONE, StoreKind.CUSTOM} or not question.is_capable:
        raise ArgumentError(
            f"row-sparse weights need a store of reigen.kv to hold them; there is {question.kind.value}"
        )
    if question.wanted is False:
        raise ArgumentError("update_on_kvstore=False cannot be with row-sparse weights: only the store has all rows")
    return _STORE, "some weights are row-sparse, and only the store has all rows"
