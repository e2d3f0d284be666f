"""A small GPT that learns to write like Python's own documentation.

    reigen run -np 2 python examples/torch/gpt.py
    reigen run -np 8 python examples/torch/gpt.py --text book.txt --layers 12 --width 768 --context 512 --steps 20000

Tokens are bytes. Without --text they are those of the language reference, which `help()` shows: it ships with Python.
--batch is that of all ranks together, so that their number does not matter.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from progress import Progress
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import reigen.torch as hvd

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
    add("--warmup", type=int, default=20, help="steps (default: %(default)s)")
    add("--goal", type=float, default=2.3, help="exit with 1 above this loss per byte (default: %(default)s)")
    return parser.parse_args()


class Block(nn.Module):
    """Attention to what came before, and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.linear = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attention(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.linear(self.between(x))


class GPT(nn.Module):
    """Logits of each next byte: (batch, length) of integers to (batch, length, 256)."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(options.context, width)
        self.blocks = nn.Sequential(*(Block(width, options.heads) for _ in range(options.layers)))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.last(self.blocks(self.tokens(text) + self.positions(places)))


def load(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and to test with."""
    raw = options.text.read_bytes() if options.text else "\n\n".join(topics[name] for name in sorted(topics)).encode()
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def loss_of(model: nn.Module, text: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    """The mean loss per byte of the sequences that begin there."""
    sequences = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long().to(DEVICE)
    return cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())


def evaluate(model: nn.Module, text: torch.Tensor, options: argparse.Namespace) -> float:
    """The mean over the test text, of which each rank reads a part; a sample of it, where it is long."""
    starts = torch.arange(0, len(text) - options.context - 1, options.context)
    starts = starts[:: max(1, len(starts) // 256)][hvd.rank() :: hvd.size()]
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for part in starts.split(32):
            sums += torch.tensor([float(loss_of(model, text, part, options.context)) * len(part), len(part)])
    total, count = hvd.allreduce(sums, op=hvd.Sum, name="test loss").tolist()
    return float(total / count)


def continue_text(model: nn.Module, text: str, count: int, context: int) -> str:
    """A text, and ``count`` bytes that the model adds."""
    written = torch.tensor([list(text.encode())])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(count):
            logits = model(written[:, -context:].to(DEVICE))[:, -1].cpu()
            written = torch.cat([written, torch.multinomial((logits / 0.7).softmax(1), 1, generator=generator)], 1)
    return bytes(written[0].tolist()).decode(errors="replace")


def main() -> int:
    options = parse()
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    text, test_text = load(options)
    model = GPT(options).to(DEVICE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / options.warmup, 0.55 + 0.45 * math.cos(math.pi * step / options.steps))
    )
    generator = torch.Generator().manual_seed(1)  # the same on all ranks: each takes its part of the same batches
    progress = Progress(options.steps * options.batch, is_shown=hvd.rank() == 0)
    for _ in range(options.steps):
        starts = torch.randint(len(text) - options.context, (options.batch,), generator=generator)
        mine = starts[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        loss = loss_of(model, text, mine, options.context)
        (loss * len(mine) * hvd.size() / options.batch).backward()  # ranks may have unequal parts
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        progress.add(options.batch, loss.detach())
    test_loss = evaluate(model, test_text, options)
    if hvd.rank() == 0:
        print(continue_text(model, "The statement ", 120, options.context))
        print(f"{hvd.size()} rank(s), {progress.elapsed:.1f} s: test loss {test_loss:.4f}, wanted {options.goal}")
    return 0 if test_loss <= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
