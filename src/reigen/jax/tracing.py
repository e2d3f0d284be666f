"""Places in a program that is being traced, and the order of its collectives.

Collectives of a compiled program match between ranks by name. XLA may begin those of one execution that do not depend
on each other in any order, on several threads, and runs a process's executions one after the other, as they were
dispatched (`reigen.xla.FfiHandler` looks that they are). So names must be unique within one program, on every rank the
same, and not depend on what else was traced before:

a. In the outermost trace, which is that of the whole program, a name is the user's or the place of the call, with its
   number among those that are the same in this trace.
   A collective whose result nothing uses is no part of the program, as with JAX's own collectives: whether it is used
   must not depend on the rank.
b. A trace within it (a ``jit`` in a ``jit``, the body of a loop, a rematerialised function) may stand in the program
   several times, each with the same names. There they are ordered by an effect of JAX's: tokens go from one to the
   next, through loops, branches and calls. A program with such an effect takes JAX longer to call: about 0.15 ms.
   So are collectives of tangents everywhere: ``jax.linearize`` and nested ``jax.jvp`` may give several with one name.
"""

from __future__ import annotations

import functools
import sys
import weakref
from pathlib import Path
from typing import Any

import jax

_LIBRARIES = tuple(f"/site-packages/{name}/" for name in ("jax", "jaxlib", "optax", "flax", "equinox", "keras"))
_OURS = str(Path(__file__).parent.parent)


try:
    from jax._src import core, effects
    from jax.interpreters import mlir

    class OrderedCollective(effects.Effect):
        """Effect of collectives that are called in the order in which they stand in the program."""

        def __str__(self) -> str:
            return "Collective"

    for _allowed in (
        effects.ordered_effects,
        effects.shardable_ordered_effects,
        effects.lowerable_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    ):
        _allowed.add_type(OrderedCollective)
    ORDERED: Any = OrderedCollective()
    ABSTRACT_TOKEN, TOKEN_SET = core.abstract_token, mlir.TokenSet
    core.trace_ctx.trace  # noqa: B018
    _import_error = ""
except (ImportError, AttributeError, TypeError) as error:
    core = ABSTRACT_TOKEN = TOKEN_SET = ORDERED = None
    _import_error = str(error)

#: how often a name was given in a trace, while that lasts
_counts: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


@functools.cache
def find_difference() -> str | None:
    """Return the difference of this version of JAX, if it has another interior than the known ones; None: it has not.

    Then collectives are host callbacks, which JAX keeps in order (`reigen.jax.native`).
    """
    if _import_error:
        return f"JAX {jax.__version__} has other internals than the known versions: {_import_error}"
    depths: list[int] = []

    def note(x: Any) -> Any:
        depths.append(len(_staging_traces()))
        return x

    note(0.0)  # perhaps in a program already
    jax.make_jaxpr(lambda x: jax.jit(jax.grad(note))(note(x)))(0.0)
    outside = depths[0]
    if depths != [outside, outside + 1, outside + 2] or bool(outside) != _makes_tracers():
        return f"JAX {jax.__version__} traces in another way than the known versions"
    return None


def _makes_tracers() -> bool:
    """Return what `is_traced` does, by what JAX promises, which takes longer."""
    return isinstance(jax.lax.full((), 0.0), jax.core.Tracer)


def _staging_traces() -> list[Any]:
    """The traces that make programs of the code that runs now, the innermost first."""
    found, trace = [], core.trace_ctx.trace
    while trace is not None:
        if hasattr(trace, "frame"):
            found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def is_traced() -> bool:
    """Return whether calls become part of a program, instead of being run."""
    if find_difference() is None:
        return bool(_staging_traces())
    return _makes_tracers()


def place_call(kind: str, name: str | None) -> tuple[str, bool]:
    """Return the name of a collective that is called here, and whether it is ordered by an effect.

    Outside of a trace a call without a name has none, which is "".
    """
    if not is_traced():
        return name or "", False
    if name is None:
        name = f"{kind} at {_find_caller()}"
    if find_difference() is not None:  # one of them runs at a time, so that they may have one name
        return name, False
    traces = _staging_traces()
    counts = _counts.setdefault(traces[0], {})
    count = counts[name] = counts.get(name, 0) + 1
    if count > 1:
        name = f"{name}#{count}"
    return (f"{name}/{len(traces) - 1}", True) if len(traces) > 1 else (name, False)


def _find_caller() -> str:
    """Return file, function and line of the code that is neither ours nor a library of JAX's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_library(filename: str) -> bool:
    return filename.startswith(("<", _OURS)) or any(each in filename for each in _LIBRARIES)
