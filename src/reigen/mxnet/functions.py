"""Functions for equal parameters at the start, and whole Python objects."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import mxnet as mx
from mxnet.gluon.parameter import DeferredInitializationError, Parameter, ParameterDict

from reigen import context
from reigen.api import functions
from reigen.api.operations import check_root
from reigen.errors import ArgumentError
from reigen.mxnet.errors import raises_mxnet_errors
from reigen.mxnet.ops import broadcast_


@raises_mxnet_errors
def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite parameters in place with those of the root, and wait for it.

    A parameter whose shape is not known yet (deferred initialisation) is broadcast when it gets its values, in the
    first forward pass, which all ranks must do, too. One that is on several contexts gets the root's values on all.

    Args:
        params: ``net.collect_params()``, or a dict of Parameters or NDArrays; the same names on all ranks.
        root_rank: the rank with the values.
        prefix: put before the names; different for models that are broadcast at the same time.

    Raises:
        ArgumentError: ``params`` is something else.
        UnsupportedTypeError: a parameter is sparse, or of a dtype that cannot be communicated.
        CollectiveError: the ranks' parameters differ in shape or dtype, or the job is broken. An MXNetError, too.
    """
    if not isinstance(params, (Mapping, ParameterDict)):
        raise ArgumentError(f"invalid params of type: {type(params)}")
    check_root(root_rank, context.current().size)
    under_way = []
    for key, value in sorted(params.items()):
        name = f"parameters.{prefix or ''}{key}"
        if not isinstance(value, Parameter):
            under_way.append(broadcast_(value, root_rank, name))
            continue
        try:
            copies = value.list_data()
        except DeferredInitializationError:
            _broadcast_when_initialised(value, root_rank, name)
        else:
            under_way += _broadcast_copies(copies, root_rank, name)
    for array in under_way:
        array.wait_to_read()


def _broadcast_copies(copies: list[Any], root_rank: int, name: str) -> list[Any]:
    """Broadcast the first copy, and make the others like it; does not wait."""
    broadcast_(copies[0], root_rank, name)
    return [copies[0], *(copies[0].copyto(other) for other in copies[1:])]


def _broadcast_when_initialised(parameter: Any, root_rank: int, name: str) -> None:
    """Broadcast a parameter once, when it gets its first values."""

    def initialise(self: Any, data: Any, ctx_list: Any) -> None:
        del self.__dict__["_init_impl"]  # from now on it is the class's again
        self._init_impl(data, ctx_list)
        with mx.autograd.pause():
            _broadcast_copies(self.list_data(), root_rank, name)

    parameter._init_impl = types.MethodType(initialise, parameter)


broadcast_object = raises_mxnet_errors(functions.broadcast_object)
allgather_object = raises_mxnet_errors(functions.allgather_object)
