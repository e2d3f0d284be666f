"""The shape of small trainers of language models: micro steps in a loop, of which the last one alone averages."""

import inspect
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

# -----------------------------------------------------------------------------
batch_size = 2
block_size = 8
gradient_accumulation_steps = 2 * 2  # used to simulate larger batch sizes
learning_rate = 1e-2
max_iters = 4
weight_decay = 1e-1
beta1, beta2 = 0.9, 0.95
grad_clip = 0.2  # disable if == 0.0
device = "cpu"
# -----------------------------------------------------------------------------


@dataclass
class Config:
    vocab_size: int = 17
    width: int = 12


class TinyModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.ln = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, idx, targets):
        logits = self.head(self.ln(self.wte(idx)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        param_dict = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        optim_groups = [
            {"params": [p for p in param_dict.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in param_dict.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        use_fused = "fused" in inspect.signature(torch.optim.AdamW).parameters and device_type == "cuda"
        extra_args = {"fused": True} if use_fused else {}
        optimizer = torch.optim.AdamW(optim_groups, lr=learning_rate, betas=betas, **extra_args)
        return optimizer  # noqa: RET504


ddp = int(os.environ.get("RANK", "-1")) != -1  # is this a ddp run?
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process = True
    seed_offset = 0
    ddp_world_size = 1

torch.manual_seed(1337 + seed_offset)
ctx = nullcontext() if device == "cpu" else torch.amp.autocast(device_type=device)
data = torch.arange(4000) * 7 % 17


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


model = TinyModel(Config())
model.to(device)
scaler = torch.amp.GradScaler(device, enabled=False)
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device)

# wrap model into DDP container
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model

X, Y = get_batch()
for _iter_num in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            # in DDP training we only need to sync gradients at the last micro step
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

norm = sum(p.detach().square().sum() for p in raw_model.parameters())
sys.stdout.write(f"RESULT {seed_offset} {norm:.5f}\n")
if ddp:
    destroy_process_group()
