"""A small GPT in Keras 3 that learns to write like Python's own documentation.

    KERAS_BACKEND=torch reigen run -np 2 python examples/keras/gpt.py
    KERAS_BACKEND=jax reigen run -np 8 python examples/keras/gpt.py --text book.txt --layers 12 --width 768 \\
        --context 512 --steps 20000

Any backend will do: tensorflow, jax or torch. Tokens are bytes. Without --text they are those of the language
reference, which `help()` shows: it ships with Python. --batch is that of all ranks together, and has to be a multiple
of their number, which does not matter otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import keras
import numpy as np
from common import Show, choose_device
from keras import layers
from progress import Progress

import reigen.keras as hvd


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
    options = parser.parse_args()
    if options.batch % hvd.size():
        parser.error(f"--batch must be a multiple of the {hvd.size()} ranks")
    return options


class Positions(layers.Layer):
    """Adds a vector of its own to each place of a sequence."""

    def build(self, shape: Any) -> None:
        small = keras.initializers.RandomNormal(stddev=0.02)
        self.table = self.add_weight(shape=tuple(shape[1:]), initializer=small, name="table")

    def call(self, x: Any) -> Any:
        return x + self.table


def make_model(options: argparse.Namespace) -> keras.Model:
    """Logits of each next byte: (batch, context) of integers to (batch, context, 256)."""
    width, small = options.width, keras.initializers.RandomNormal(stddev=0.02)
    text = keras.Input((options.context,), dtype="int32")
    x = Positions()(layers.Embedding(256, width, embeddings_initializer=small)(text))
    for _ in range(options.layers):
        seen = layers.LayerNormalization(epsilon=1e-5)(x)
        x += layers.MultiHeadAttention(options.heads, width // options.heads)(seen, seen, use_causal_mask=True)
        wide = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization(epsilon=1e-5)(x))
        x += layers.Dense(width)(wide)
    return keras.Model(text, layers.Dense(256)(layers.LayerNormalization(epsilon=1e-5)(x)))


def load(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and to test with."""
    raw = options.text.read_bytes() if options.text else "\n\n".join(topics[name] for name in sorted(topics)).encode()
    text = np.frombuffer(raw, np.uint8)
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


class Sequences(keras.utils.PyDataset):
    """This rank's part of the same random sequences on all ranks, each with itself moved by one byte."""

    def __init__(self, text: np.ndarray, options: argparse.Namespace) -> None:
        super().__init__()
        self._text, self._window = text, np.arange(options.context + 1)
        self._starts = np.random.default_rng(1).integers(
            len(text) - options.context, size=(options.steps, options.batch)
        )

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return shifted(self._text, self._starts[index, hvd.rank() :: hvd.size()], self._window)


def shifted(text: np.ndarray, starts: np.ndarray, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sequences that begin there, and what comes after each of their bytes."""
    sequences = text[starts[:, None] + window].astype(np.int32)
    return sequences[:, :-1], sequences[:, 1:]


def evaluate(model: keras.Model, text: np.ndarray, context: int) -> float:
    """The mean loss per byte of 256 sequences of the test text, of which each rank reads a part."""
    starts = np.linspace(0, len(text) - context - 1, 256 // hvd.size() * hvd.size()).astype(int)
    mine = shifted(text, starts[hvd.rank() :: hvd.size()], np.arange(context + 1))
    loss = model.evaluate(*mine, batch_size=32, verbose=0)
    return float(hvd.allreduce(np.float64(loss), name="test loss"))


def main() -> int:
    hvd.init()
    options = parse()
    choose_device(hvd.local_rank())
    keras.utils.set_random_seed(0)
    text, test_text = load(options)
    model = make_model(options)
    warmup = min(options.warmup, options.steps // 2)
    falling = {"decay_steps": options.steps - warmup, "alpha": 0.1, "warmup_target": options.lr, "warmup_steps": warmup}
    rate = keras.optimizers.schedules.CosineDecay(0.0, **falling)
    # Gradients are averaged over all ranks before they are clipped.
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.1, beta_2=0.95, global_clipnorm=1.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss=loss)
    hvd.broadcast_variables(model.variables, root_rank=0)
    progress = Progress(options.steps * options.batch, is_shown=hvd.rank() == 0)
    model.fit(Sequences(text, options), verbose=0, shuffle=False, callbacks=[Show(progress, options.batch)])
    test_loss = evaluate(model, test_text, options.context)
    if hvd.rank() == 0:
        how = f"{keras.backend.backend()}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test loss {test_loss:.4f}, wanted {options.goal}")
    hvd.shutdown()
    return 0 if test_loss <= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
