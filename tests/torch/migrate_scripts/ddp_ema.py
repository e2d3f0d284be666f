"""The shape of trainers of image models: a factory of optimizers, a class for the scaler, and an average model."""

import argparse
import os
import sys
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP


def create_optimizer(model, opt="momentum", lr=0.1, weight_decay=0.0):
    decay, no_decay = [], []
    for name, param in model.named_parameters():
        (no_decay if param.ndim <= 1 or name.endswith(".bias") else decay).append(param)
    parameters = [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]
    if opt == "adamw":
        return torch.optim.AdamW(parameters, lr=lr)
    if opt == "momentum":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    raise ValueError(opt)


class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None):
        self._scaler.scale(loss).backward()
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


def unwrap_model(model):
    return model.module if hasattr(model, "module") else model


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= n
    return rt


def init_distributed_device(args):
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.distributed = args.world_size > 1
    args.rank = 0
    if args.distributed:
        dist.init_process_group(backend="gloo", init_method="env://")
        args.world_size = dist.get_world_size()
        args.rank = dist.get_rank()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt", default="momentum")
    parser.add_argument("--clip-grad", type=float, default=0.5)
    args = parser.parse_args()
    init_distributed_device(args)
    torch.manual_seed(23 + args.rank)

    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 4))
    optimizer = create_optimizer(model, opt=args.opt, weight_decay=0.01)
    loss_scaler = NativeScaler()
    if args.distributed:
        model = NativeDDP(model)
    # after the wrapper, so that all ranks' averages begin with the same weights
    model_ema = ModelEma(unwrap_model(model), decay=0.8)

    generator = torch.Generator().manual_seed(args.rank)
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(5):
        input = torch.randn(6, 5, generator=generator)
        target = torch.randint(0, 4, (6,), generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(model(input), target)
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, clip_grad=args.clip_grad, parameters=model.parameters())
        model_ema.update(unwrap_model(model))
    reduced = reduce_tensor(loss.data, args.world_size) if args.distributed else loss.data
    norm = sum(p.detach().square().sum() for p in model_ema.module.parameters())
    sys.stdout.write(f"RESULT {args.rank} {norm:.4f} {reduced.item():.3f}\n")


if __name__ == "__main__":
    main()
