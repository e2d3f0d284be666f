"""The shape of Horovod's own example for PyTorch, on digits that are drawn here."""

import argparse
import sys

import horovod.torch
import torch
import torch.nn.functional as F  # noqa: N812
from horovod.torch.mpi_ops import Sum
from torch import nn, optim
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--use-adasum", action="store_true", default=False)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

hvd = horovod.torch
hvd.init()
torch.manual_seed(42)

dataset = TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,)))
train_sampler = DistributedSampler(dataset, num_replicas=horovod.torch.size(), rank=horovod.torch.rank())
train_loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=train_sampler)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
lr_scaler = horovod.torch.size() if not args.use_adasum else 1
optimizer = optim.SGD(model.parameters(), lr=0.01 * lr_scaler, momentum=0.5)
horovod.torch.broadcast_parameters(model.state_dict(), root_rank=0)
horovod.torch.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = horovod.torch.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=horovod.torch.Compression.none,
    op=horovod.torch.Adasum if args.use_adasum else horovod.torch.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
for epoch in range(2):
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
total = horovod.torch.allreduce(loss.detach(), op=Sum, name="loss")
if horovod.torch.rank() == 0:
    sys.stdout.write(f"RESULT {horovod.torch.size()} {total.item():.5f}\n")
