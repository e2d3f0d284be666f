"""Functions for equal variables at the start, whole Python objects, and operations that ask for a rank's place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from reigen import context
from reigen.api import functions, job, objects
from reigen.api.gradients.gradient_agreement import agree_on_gradients
from reigen.api.operations import BROADCAST, as_root
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.tensorflow import graph
from reigen.tensorflow.collectives import COLLECTIVES
from reigen.tensorflow.errors import raises_tensorflow_errors
from reigen.tensorflow.native.trust import is_known
from reigen.tensorflow.queries import Query

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]


@functools.wraps(job.init)
def init(*args: Any, **kwargs: Any) -> None:
    """Join the job. A SavedModel with collectives can be loaded from then on."""
    job.init(*args, **kwargs)
    if is_known():
        graph.native_collectives()


@raises_tensorflow_errors
def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Overwrite variables with those of the root.

    Args:
        variables: of TensorFlow or of Keras; the same shapes and dtypes, in the same order, on every rank.
        root_rank: whose values all get; its rank in the job, also in a process set.
        name: matches the ranks' calls; without one they match in the order of the calls.
        process_set: whose ranks take part.

    Returns:
        The values, as tensors. In a graph, the variables have them when these have been computed.

    Raises:
        ArgumentError, UnsupportedTypeError: an argument is wrong here; nothing was sent.
        MismatchError: the ranks' variables differ in number, shape or dtype; nothing was sent.
        CollectiveError: see `reigen.errors`; not in a graph, which raises it when it runs.
    """
    variables = list(variables)
    values = [tf.convert_to_tensor(variable) for variable in variables]
    label = name or "broadcast_"
    if not tf.executing_eagerly():
        label = name or graph.name_of(label)
        results = [
            COLLECTIVES.run(BROADCAST, False, value, root_rank, f"{label}.{index}", process_set)
            for index, value in enumerate(values)
        ]
        with tf.control_dependencies([variable.assign(new) for variable, new in zip(variables, results, strict=True)]):
            return [tf.identity(new) for new in results]
    current, number = context.current(), process_set_number(process_set)
    if name is None:
        label = current.next_name("broadcast_", number)
    if current.size > 1 and process_set.included():
        lines = [f"variable {index}: {value.dtype.name} {tuple(value.shape)}" for index, value in enumerate(values)]
        agree_on_gradients(current, lines, [], f"{label}.variables", number)
    pending = [
        COLLECTIVES.start(BROADCAST, value, root_rank, f"{label}.{index}", process_set)
        for index, value in enumerate(values)
    ]
    results = [handle.wait() for handle in pending]
    for variable, new in zip(variables, results, strict=True):
        variable.assign(new)
    return results


def broadcast_variables(
    variables: Sequence[tf.Variable],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Overwrite variables with those of the root.

    Args:
        variables: as for :func:`broadcast_`.
        root_rank: whose values all get.
        process_set: whose ranks take part.
        inplace: accepted for Horovod's sake.

    Returns:
        In a graph, an operation that does it; else None.
    """
    del inplace
    results = broadcast_(variables, root_rank, None, process_set)
    return None if tf.executing_eagerly() else tf.group(*results)


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return an operation that overwrites all global variables of the graph with those of the root.

    Raises:
        RuntimeError: there is no graph: eager execution is on. Use :func:`broadcast_variables`.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() needs a graph, and eager execution has none: use broadcast_variables()"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Hook that overwrites all global variables with those of the root when a session begins.

    Args:
        root_rank: whose values all get.
        device: accepted for Horovod's sake.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        """Add the operation to the graph, unless it is there."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self.bcast_op)


@raises_tensorflow_errors
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object, on every rank; at once, also while a graph is built.

    Args:
        obj: read on the root alone; anything that pickle (or cloudpickle, if it is installed) can write.
        root_rank: whose object all get.
        session: accepted for Horovod's sake.
        name: matches the ranks' calls.
        process_set: whose ranks take part; ``root_rank`` is a rank of the job all the same.
    """
    del session
    return functions.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of an object that is :func:`broadcast_object` with these arguments."""
    as_root(root_rank)
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@raises_tensorflow_errors
def allgather_object(
    obj: Any, session: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, as a list by rank of the set; at once, also while a graph is built.

    Args:
        obj: anything that pickle (or cloudpickle, if it is installed) can write.
        session: accepted for Horovod's sake.
        name: matches the ranks' calls.
        process_set: whose ranks take part.
    """
    del session
    return objects.allgather_object(context.current(), obj, name, process_set_number(process_set))


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of a process set, as an int32 scalar: in a graph, that at the time when it runs."""
    return _ask("size", process_set_id, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this process is in a process set, else 0; as :func:`size_op`."""
    return _ask("included", process_set_id, name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's number in the job; as :func:`size_op`."""
    return _ask("rank", 0, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's number on its host; as :func:`size_op`."""
    return _ask("local_rank", 0, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of the job's processes on this host; as :func:`size_op`."""
    return _ask("local_size", 0, name)


@raises_tensorflow_errors
def join() -> tf.Tensor:
    """Wait until all ranks have called this: this one has no more data. See `reigen.api.functions.join`.

    Returns:
        The last rank that joined, as an int32 scalar; in a graph, when it runs.
    """
    return tf.constant(functions.join(), tf.int32) if tf.executing_eagerly() else graph.ask("join")


@raises_tensorflow_errors
def _ask(question: str, process_set: int, name: str | None) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(Query(question, process_set).answer(), tf.int32, name=name)
    return tf.identity(graph.ask(question, process_set), name=name)
