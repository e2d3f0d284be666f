"""A program that trains, as far as a timeline can tell, with a cause that bounds it: see CAUSES.

reigen run -np 2 python verdict_program.py slow_rank 60
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

import reigen
from reigen import kv

#: CPU time that each step computes, and the gradients that it makes: 4 of 1 MiB.
COMPUTE_SECONDS = 0.02
GRADIENT_ELEMENTS, NUM_GRADIENTS = 1 << 18, 4
SLOW_SECONDS = 0.04
NUM_TINY, TINY_ELEMENTS = 2000, 16
VALUE_ELEMENTS = 6 << 20

_MATRIX = np.ones((64, 64), np.float32) / 64


def compute(seconds: float) -> None:
    """Compute for so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        for _ in range(5):
            _MATRIX @ _MATRIX


def train_step(gradients: list[np.ndarray], seconds: float = COMPUTE_SECONDS) -> None:
    """Compute, and have each gradient averaged as soon as it is there."""
    handles = []
    for number, gradient in enumerate(gradients):
        compute(seconds / len(gradients))
        handles.append(reigen.allreduce_async(gradient, name=f"gradient.{number}"))
    for handle in handles:
        reigen.synchronize(handle)


def gradients(count: int = NUM_GRADIENTS, elements: int = GRADIENT_ELEMENTS) -> list[np.ndarray]:
    return [np.ones(elements, np.float32) for _ in range(count)]


def even(num_steps: int) -> None:
    made = gradients(2, 1 << 12)
    for _ in range(num_steps):
        train_step(made, 2 * COMPUTE_SECONDS)
        reigen.report_progress(steps=1)


def slow_rank(num_steps: int) -> None:
    """The last rank waits for its data."""
    made = gradients()
    for _ in range(num_steps):
        if reigen.rank() == reigen.size() - 1:
            time.sleep(SLOW_SECONDS)
        train_step(made)
        reigen.report_progress(steps=1)


def slow_rank_in_short_steps(num_steps: int) -> None:
    """The same, in steps of some milliseconds."""
    made = gradients(1, 1 << 12)
    for _ in range(num_steps):
        if reigen.rank() == reigen.size() - 1:
            time.sleep(SLOW_SECONDS / 4)
        train_step(made, 0.0)
        reigen.report_progress(steps=1)


def large_share(num_steps: int) -> None:
    """The last rank computes more."""
    made = gradients()
    for _ in range(num_steps):
        train_step(made, COMPUTE_SECONDS + (2 * SLOW_SECONDS if reigen.rank() == reigen.size() - 1 else 0))
        reigen.report_progress(steps=1)


def large_gradients(num_steps: int) -> None:
    """For a slow link."""
    made = gradients()
    for _ in range(num_steps):
        train_step(made)
        reigen.report_progress(steps=1)


def tiny_tensors(num_steps: int) -> None:
    made = gradients(NUM_TINY, TINY_ELEMENTS)
    for _ in range(num_steps):
        compute(COMPUTE_SECONDS)
        handles = [reigen.allreduce_async(each, name=f"t{number}") for number, each in enumerate(made)]
        for handle in handles:
            reigen.synchronize(handle)
        reigen.report_progress(steps=1)


def many_ranks(num_steps: int) -> None:
    """For more ranks than processors."""
    made = gradients(2, 1 << 12)
    for _ in range(num_steps):
        train_step(made, 2 * COMPUTE_SECONDS)
        reigen.report_progress(steps=1)


def busy_server(num_steps: int) -> None:
    """Large values on one server, and little to compute."""
    with kv.create("dist_sync") as store:
        value = np.ones(VALUE_ELEMENTS, np.float32)
        store.init("weight", value)
        for _ in range(num_steps):
            compute(COMPUTE_SECONDS / 4)
            store.pushpull("weight", value)
            reigen.report_progress(steps=1)


CAUSES: dict[str, Callable[[int], None]] = {
    each.__name__: each
    for each in (
        even,
        slow_rank,
        slow_rank_in_short_steps,
        large_share,
        large_gradients,
        tiny_tensors,
        many_ranks,
        busy_server,
    )
}


if __name__ == "__main__":
    reigen.init()
    CAUSES[sys.argv[1]](int(sys.argv[2]))
    reigen.barrier()
