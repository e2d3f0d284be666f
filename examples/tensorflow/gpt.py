"""A small GPT in TensorFlow that learns to write like Python's own documentation.

    reigen run -np 2 python examples/tensorflow/gpt.py
    reigen run -np 8 python examples/tensorflow/gpt.py --text book.txt --layers 12 --width 768 --context 512 \\
        --steps 20000

Tokens are bytes. Without --text they are those of the language reference, which `help()` shows: it ships with Python.
--batch is that of all ranks together, and has to be a multiple of their number, which does not matter otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import tensorflow as tf
from progress import Progress

import reigen.tensorflow as hvd


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


class Gpt(tf.Module):
    """Logits of each next byte: (batch, length) of integers to (batch, length, 256)."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self._generator, self._heads, width = np.random.default_rng(0), options.heads, options.width
        self._tokens, self._places = self._matrix(256, width, 0.3), self._matrix(options.context, width, 0.2)
        self._blocks = [
            {
                "attention": self._matrix(width, 3 * width),
                "join": self._matrix(width, width, 0.5),
                "up": self._matrix(width, 4 * width),
                "down": self._matrix(4 * width, width, 0.5),
                "before": tf.Variable(tf.ones(width)),
                "between": tf.Variable(tf.ones(width)),
            }
            for _ in range(options.layers)
        ]
        self._norm, self._out = tf.Variable(tf.ones(width)), self._matrix(width, 256)

    def _matrix(self, rows: int, columns: int, scale: float = 1.0) -> tf.Variable:
        """Random weights, scaled to their number of rows."""
        return tf.Variable(self._generator.normal(size=(rows, columns)) * scale / np.sqrt(rows), dtype=tf.float32)

    def __call__(self, text: tf.Tensor) -> tf.Tensor:
        x = tf.gather(self._tokens, text) + self._places[: text.shape[1]]
        for block in self._blocks:
            x += self._attend(normalize(x, block["before"]) @ block["attention"]) @ block["join"]
            x += tf.nn.gelu(normalize(x, block["between"]) @ block["up"]) @ block["down"]
        return normalize(x, self._norm) @ self._out

    def _attend(self, joint: tf.Tensor) -> tf.Tensor:
        """Causal attention: (batch, length, 3 * width) to (batch, length, width)."""
        length, width = joint.shape[1], joint.shape[2] // 3
        split = tf.reshape(joint, (-1, length, 3, self._heads, width // self._heads))
        query, key, value = tf.unstack(tf.transpose(split, (2, 0, 3, 1, 4)))
        scores = tf.matmul(query, key, transpose_b=True) / (width // self._heads) ** 0.5
        is_seen = tf.linalg.band_part(tf.ones((length, length), tf.bool), -1, 0)
        weights = tf.nn.softmax(tf.where(is_seen, scores, scores.dtype.min))
        return tf.reshape(tf.transpose(weights @ value, (0, 2, 1, 3)), (-1, length, width))


def normalize(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    return scale * x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-6)


def load(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and to test with."""
    raw = options.text.read_bytes() if options.text else "\n\n".join(topics[name] for name in sorted(topics)).encode()
    text = np.frombuffer(raw, np.uint8)
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def main() -> int:
    hvd.init()
    options = parse()
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    text, test_text = load(options)
    model = Gpt(options)
    weights = model.trainable_variables
    warmup = min(options.warmup, options.steps // 2)
    falling = {"decay_steps": options.steps - warmup, "alpha": 0.1, "warmup_target": options.lr, "warmup_steps": warmup}
    rate = tf.keras.optimizers.schedules.CosineDecay(0.0, **falling)
    optimizer = tf.keras.optimizers.AdamW(rate, weight_decay=0.1, beta_2=0.95)
    hvd.broadcast_variables(weights, root_rank=0)

    def loss_of(sequences: tf.Tensor) -> tf.Tensor:
        logits = model(sequences[:, :-1])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(sequences[:, 1:], logits))

    @tf.function
    def step(sequences: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(sequences)
        # The rows of tokens become a dense gradient, so that clipping sees the averages of all ranks.
        gradients = hvd.DistributedGradientTape(tape, sparse_as_dense=True).gradient(loss, weights)
        clipped, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply_gradients(zip(clipped, weights, strict=True))
        return loss

    generator = np.random.default_rng(1)  # the same on all ranks: each takes its part of the same batches
    window = np.arange(options.context + 1)
    progress = Progress(options.steps * options.batch, is_shown=hvd.rank() == 0)
    for _ in range(options.steps):
        starts = generator.integers(len(text) - options.context, size=options.batch)[hvd.rank() :: hvd.size()]
        progress.add(options.batch, step(text[starts[:, None] + window].astype(np.int32)))
    starts = np.linspace(0, len(test_text) - options.context - 1, 256 // hvd.size() * hvd.size()).astype(int)
    loss = loss_of(test_text[starts[hvd.rank() :: hvd.size(), None] + window].astype(np.int32))
    test_loss = float(hvd.allreduce(loss, name="test loss"))
    if hvd.rank() == 0:
        how = f"{hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test loss {test_loss:.4f}, wanted {options.goal}")
    hvd.shutdown()
    return 0 if test_loss <= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
