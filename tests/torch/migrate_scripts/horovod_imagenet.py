"""The shape of Horovod's example for ImageNet: warm-up, batches per allreduce, resume, and metrics of all ranks."""

import argparse
import math
import sys
import tempfile
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="PyTorch ImageNet-like")
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pth.tar")
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--use-adasum", action="store_true", default=False)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.05)
parser.add_argument("--warmup-epochs", type=float, default=1)
args = parser.parse_args()

allreduce_batch_size = args.batch_size * args.batches_per_allreduce
hvd.init()
torch.manual_seed(42)

# All ranks resume from the epoch that rank 0 finds.
directory = Path(tempfile.mkdtemp() if hvd.rank() == 0 else "nowhere")
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if (directory / args.checkpoint_format.format(epoch=try_epoch)).exists():
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()
verbose = 1 if hvd.rank() == 0 else 0

data = torch.randn(64, 3, 4, 4)
train_dataset = TensorDataset(data, (data.sum((1, 2, 3)) > 0).long())
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler)

model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
lr_scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
optimizer = optim.SGD(model.parameters(), lr=args.base_lr * lr_scaler, momentum=0.9, weight_decay=5e-5)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


class Metric:
    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def adjust_learning_rate(epoch, batch_idx):
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 1.0
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss = Metric("train_loss")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        # Split data into sub-batches of size batch_size
        for i in range(0, len(data), args.batch_size):
            output = model(data[i : i + args.batch_size])
            loss = F.cross_entropy(output, target[i : i + args.batch_size])
            train_loss.update(loss)
            # Average gradients among sub-batches
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        optimizer.step()
    return train_loss.avg.item()


for epoch in range(resume_from_epoch, args.epochs):
    average = train(epoch)
    if hvd.rank() == 0:
        filepath = directory / args.checkpoint_format.format(epoch=epoch + 1)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, filepath)
norm = sum(p.detach().square().sum() for p in model.parameters())
sys.stdout.write(f"RESULT {hvd.size()} {average:.5f} {norm:.5f}\n")
