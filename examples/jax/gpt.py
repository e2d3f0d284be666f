"""A small GPT in JAX and optax that learns to write like Python's own documentation.

    reigen run -np 2 python examples/jax/gpt.py
    reigen run -np 8 python examples/jax/gpt.py --text book.txt --layers 12 --width 768 --context 512 --steps 20000

Tokens are bytes. Without --text they are those of the language reference, which `help()` shows: it ships with Python.
--batch is that of all ranks together, and has to be a multiple of their number, which does not matter otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import reigen.jax as rj

Params = Any  # a tree of arrays


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, help="any file; its last tenth is kept to test with")
    add("--layers", type=int, default=2, help="default: %(default)s")
    add("--heads", type=int, default=4, help="default: %(default)s")
    add("--width", type=int, default=64, help="numbers of a token's vector (default: %(default)s)")
    add("--context", type=int, default=64, help="tokens that are seen (default: %(default)s)")
    add("--batch", type=int, default=32, help="sequences of a step, of all ranks together (default: %(default)s)")
    add("--steps", type=int, default=300, help="default: %(default)s")
    add("--lr", type=float, default=3e-3, help="after the warm-up; falls along a cosine (default: %(default)s)")
    add("--warmup", type=int, default=20, help="steps, at most half of all (default: %(default)s)")
    add("--goal", type=float, default=2.4, help="exit with 1 above this loss per byte (default: %(default)s)")
    return parser.parse_args()


def make_params(options: argparse.Namespace) -> Params:
    """Random weights: matrices scaled to their number of rows."""
    width, generator = options.width, np.random.default_rng(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(generator.normal(size=(rows, columns)) * scale / np.sqrt(rows), jnp.float32)

    blocks = [
        {
            "attention": matrix(width, 3 * width),
            "join": matrix(width, width, 0.5),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width, 0.5),
            "before": jnp.ones(width),
            "between": jnp.ones(width),
        }
        for _ in range(options.layers)
    ]
    tokens, places = matrix(256, width, 0.3), matrix(options.context, width, 0.2)
    return {"tokens": tokens, "places": places, "blocks": blocks, "norm": jnp.ones(width), "out": matrix(width, 256)}


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def logits_of(params: Params, text: jax.Array, heads: int) -> jax.Array:
    """Logits of each next byte: (batch, length) of integers to (batch, length, 256)."""
    x = params["tokens"][text] + params["places"][: text.shape[1]]
    for block in params["blocks"]:
        joint = normalize(x, block["before"]) @ block["attention"]
        query, key, value = (each.reshape(*x.shape[:2], heads, -1) for each in jnp.split(joint, 3, axis=-1))
        x = x + jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape) @ block["join"]
        x = x + jax.nn.gelu(normalize(x, block["between"]) @ block["up"]) @ block["down"]
    return normalize(x, params["norm"]) @ params["out"]


def load(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and to test with."""
    raw = options.text.read_bytes() if options.text else "\n\n".join(topics[name] for name in sorted(topics)).encode()
    text = np.frombuffer(raw, np.uint8)
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def main() -> int:
    options = parse()
    jax.config.update("jax_platforms", "cpu")  # within jax.jit, collectives are for processors
    rj.init()
    if options.batch % rj.size():
        sys.exit(f"--batch {options.batch} is no multiple of the {rj.size()} ranks")
    text, test_text = load(options)
    params = rj.broadcast_parameters(make_params(options), root_rank=0)
    warmup = min(options.warmup, options.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.lr, warmup, options.steps, options.lr / 10)
    # Clipping sees the averages of all ranks: the gradients are reduced in front of it.
    optimizer = rj.distributed(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95)))
    state = optimizer.init(params)

    def loss_of(params: Params, sequences: jax.Array) -> jax.Array:
        logits = logits_of(params, sequences[:, :-1], options.heads)
        return optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:]).mean()

    @jax.jit
    def step(params: Params, state: Any, sequences: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, sequences)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, rj.allreduce(loss)

    generator = np.random.default_rng(1)  # the same on all ranks: each takes its part of the same batches
    window = np.arange(options.context + 1)
    start = shown = time.perf_counter()
    for number in range(1, options.steps + 1):
        starts = generator.integers(len(text) - options.context, size=options.batch)[rj.rank() :: rj.size()]
        params, state, loss = step(params, state, text[starts[:, None] + window].astype(np.int32))
        if rj.rank() == 0 and (time.perf_counter() - shown >= 2 or number == options.steps):
            loss_now = float(loss)  # waits for this step; the program is some steps ahead
            shown = time.perf_counter()
            rate = number * options.batch / (shown - start)
            left = (options.steps - number) * options.batch / rate
            print(f"{number / options.steps:4.0%}  {rate:8,.1f} samples/s  loss {loss_now:.4f}  ETA {left:.0f} s")

    starts = np.linspace(0, len(test_text) - options.context - 1, 256 // rj.size() * rj.size()).astype(int)
    sequences = test_text[starts[rj.rank() :: rj.size(), None] + window].astype(np.int32)
    test_loss = float(rj.allreduce(jax.jit(loss_of)(params, sequences), name="test loss"))
    if rj.rank() == 0:
        seconds = time.perf_counter() - start
        print(f"{rj.size()} rank(s), {seconds:.1f} s: test loss {test_loss:.4f}, wanted {options.goal}")
    rj.shutdown()
    return 0 if test_loss <= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
