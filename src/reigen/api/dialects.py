"""Signatures of each framework's functions: Horovod's for that framework.

They are here, and not beside the adapters, so that stubs can be written where a framework is not installed.
"""

from __future__ import annotations

from reigen.api.collectives import Form
from reigen.api.functions import Dialect
from reigen.api.operations import Collective, Parameter

_COMPRESSION = Parameter("compression", "Compressor", "in which type the tensor travels.", None)
_PRIORITY = Parameter(
    "priority",
    "int",
    "among arrays that are ready at the same time, the largest is begun first, if it is not waited for.",
    0,
)


def _insert_behind_name(parameters: list[Parameter], own: Parameter) -> list[Parameter]:
    at = [parameter.name for parameter in parameters].index("name") + 1
    return [*parameters[:at], own, *parameters[at:]]


def _arrange_compression(collective: Collective, form: Form, parameters: list[Parameter]) -> list[Parameter]:
    """Differentiable reductions take a compression."""
    return _insert_behind_name(parameters, _COMPRESSION) if collective.reduces and form == Form() else parameters


def _arrange_mxnet(collective: Collective, form: Form, parameters: list[Parameter]) -> list[Parameter]:
    """All take a priority; the operator is the last argument where there is ``average``, and else the first."""
    arranged = _insert_behind_name(parameters, _PRIORITY)
    names = [parameter.name for parameter in arranged]
    if "op" in names:
        op = arranged.pop(names.index("op"))
        arranged.insert(len(arranged) if "average" in names else 0, op)
    return arranged


_DEVICE_DENSE = Parameter("device_dense", "str", "accepted for Horovod's sake.", "")
_DEVICE_SPARSE = Parameter("device_sparse", "str", "accepted for Horovod's sake.", "")
_IGNORE_NAME_SCOPE = Parameter("ignore_name_scope", "bool", "accepted for Horovod's sake: names are as given.", False)
#: The order of the arguments behind the tensor, where it is not the table's.
_TENSORFLOW_ORDER = {
    "allreduce": "average device_dense device_sparse compression op prescale_factor postscale_factor name process_set "
    "ignore_name_scope",
    "grouped_allreduce": "average device_dense device_sparse compression op prescale_factor postscale_factor "
    "process_set ignore_name_scope name",
    "reducescatter": "device_dense compression op name process_set ignore_name_scope prescale_factor postscale_factor",
    "allgather": "name ignore_name_scope process_set",
    "broadcast": "root_rank name ignore_name_scope process_set",
    "alltoall": "splits name ignore_name_scope process_set",
}


def _arrange_tensorflow(collective: Collective, form: Form, parameters: list[Parameter]) -> list[Parameter]:
    """Reductions take a compression; devices and scopes of names are accepted."""
    return _in_tensorflow_order(collective.name, parameters)


def _arrange_tensorflow_grouped(collective: Collective, form: Form, parameters: list[Parameter]) -> list[Parameter]:
    grouped = f"grouped_{collective.name}"
    return _in_tensorflow_order(grouped if grouped in _TENSORFLOW_ORDER else collective.name, parameters)


def _in_tensorflow_order(order: str, parameters: list[Parameter]) -> list[Parameter]:
    own = (_DEVICE_DENSE, _DEVICE_SPARSE, _COMPRESSION, _IGNORE_NAME_SCOPE)
    known = {parameter.name: parameter for parameter in (*own, *parameters)}
    return [known[name] for name in _TENSORFLOW_ORDER[order].split()]


NUMPY = Dialect("Array", "ArrayLike")
TORCH = Dialect(
    "torch.Tensor",
    arrange=_arrange_compression,
    notes=lambda collective, form: " Differentiable." if form == Form() else "",
)
MXNET = Dialect(
    "NDArray",
    forms=(Form(), Form(in_place=True)),
    arrange=_arrange_mxnet,
    notes=lambda collective, form: " Does not wait." if collective.in_place else " Waits.",
)
TENSORFLOW = Dialect(
    "tf.Tensor",
    "TensorLike",
    forms=(Form(),),
    arrange=_arrange_tensorflow,
    arrange_grouped=_arrange_tensorflow_grouped,
    notes=lambda collective, form: " Differentiable.",
)
JAX = Dialect(
    "Any",
    forms=(Form(), Form(is_async=True)),
    arrange=_arrange_compression,
    notes=lambda collective, form: " Takes pytrees. Differentiable." if form == Form() else "",
)
