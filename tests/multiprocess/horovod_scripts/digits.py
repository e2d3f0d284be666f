"""A training script as Horovod's users write them: nothing in it knows of Reigen."""

import argparse
import subprocess
import sys

import horovod
import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import num_rank_is_power_2
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3)
        self.fc1 = nn.Linear(8 * 9, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(self.fc1(x.view(-1, 8 * 9)))
        return F.log_softmax(self.fc2(x), dim=1)


def metric_average(val, name):
    tensor = torch.tensor(val)
    avg_tensor = hvd.allreduce(tensor, name=name)
    return avg_tensor.item()


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    return loss.item()


def test():
    model.eval()
    test_loss, test_accuracy = 0.0, 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            test_accuracy += output.argmax(1).eq(target).float().sum().item()
    test_loss /= len(test_sampler)
    test_accuracy /= len(test_sampler)
    return metric_average(test_loss, "avg_loss"), metric_average(test_accuracy, "avg_accuracy")


hvd.init()
torch.manual_seed(42 + hvd.rank())  # different on purpose: the broadcast makes them equal
torch.set_num_threads(1)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
labels = torch.tensor(labels)
train_dataset = TensorDataset(images[:1440], labels[:1440])
test_dataset = TensorDataset(images[1440:], labels[1440:])

train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
test_sampler = DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = DataLoader(test_dataset, batch_size=args.batch_size, sampler=test_sampler)

model = Net()
assert num_rank_is_power_2(hvd.size())
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)

for epoch in range(1, args.epochs + 1):
    train(epoch)
loss, accuracy = test()

hashes = hvd.allgather_object([p.detach().numpy().tobytes() for p in model.parameters()])
try:
    hvd.allreduce(torch.ones(2 + hvd.rank()), name="uneven")
except HorovodInternalError:
    print("mismatch told")
child = subprocess.run(
    [sys.executable, "-c", "import horovod.common.exceptions; print(horovod.__version__)"],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
)
if hvd.rank() == 0:
    print("same", all(h == hashes[0] for h in hashes))
    print("accuracy", accuracy)
    print("version", horovod.__version__, child.stdout)
