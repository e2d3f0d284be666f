"""Self-test of XLA's foreign function interface with the JAX that is installed; for a process of its own.

It runs what a crash or a wrong result of which would show that the runtime is another than the one that `reigen.xla`
knows: calls that end at once, later on another thread, or with an error, many at the same time and in order; and our
primitive in programs, by a job of one rank.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

import reigen.jax as rj
from reigen.jax.native import get_handler, register
from reigen.xla.self_test import FAILURE, DelayedCall, decode_delayed

_TARGET = "reigen_self_test"
_COUNT, _EXECUTIONS = 50, 5


def main() -> int | str:
    """Run it; returns the exit code, 0 for success, or the failure, which is written to stderr."""
    handler, reason = register(_TARGET, decode=decode_delayed)
    if handler is None:
        return f"no handler is taken: {reason}"
    for how in ("now", "later"):
        executions = [_double(jnp.full(1000, 1.0 * number), how) for number in range(_EXECUTIONS)]
        for number, made in enumerate(executions):
            for index, each in enumerate(made):
                if set(each.tolist()) != {2.0 * (number + index)}:
                    return f"operations that end {how} give wrong results"
    try:
        jax.block_until_ready(_double(jnp.ones(1000), "error"))
    except (RuntimeError, ValueError) as error:
        if FAILURE not in str(error):
            return f"an operation that fails ends with another error: {error}"
        return 0 if _runs_programs() else "collectives in programs give wrong results"
    return "an operation that fails ends without an error"


@functools.partial(jax.jit, static_argnums=1)
def _double(x: Any, how: str) -> list[Any]:
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype), has_side_effect=True)
    return [call(x + index, call=DelayedCall.named(f"{how} {index}").encode()) for index in range(_COUNT)]


def _runs_programs() -> bool:
    """Return whether collectives, and the tokens between those of a loop, give the right results."""
    rj.init(rank=0, size=1, coordinator="127.0.0.1:1")  # alone, whatever job this process is in

    @jax.jit  # type: ignore[untyped-decorator]
    def program(x: Any) -> Any:
        looped = jax.lax.scan(lambda c, k: (c + rj.allreduce(k * x, op=rj.Sum).sum(), k), 0.0, jnp.arange(4.0))[0]
        return rj.allgather(x) + looped + jax.grad(lambda y: (rj.allreduce(y) ** 2).sum())(x)

    return get_handler() is not None and bool((program(jnp.ones(3)) == 1.0 + 18.0 + 2.0).all())


if __name__ == "__main__":
    sys.exit(main())
