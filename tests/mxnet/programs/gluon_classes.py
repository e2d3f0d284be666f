"""Classes of points, trained with gluon.Trainer and a store that an option names, as examples of MXNet's are."""

import argparse

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

parser = argparse.ArgumentParser(description="Train a small net on points of three classes")
parser.add_argument("--kv-store", type=str, default="device", help="kvstore to use for trainer/module")
parser.add_argument("--batch-size", type=int, default=16, help="the batch size of one worker")
parser.add_argument("--num-epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

kv = mx.kv.create(args.kv_store)
random = np.random.RandomState(3)
centers = np.array([[2, 0, 0, 1], [0, 2, 1, 0], [0, 0, 2, 2]], "float32")
labels = random.randint(0, 3, 240)
points = centers[labels] + random.randn(240, 4).astype("float32") * 0.5


class SplitSampler(gluon.data.sampler.Sampler):
    """The part of a worker: every so manieth sample."""

    def __init__(self, length, num_parts, part_index):
        self._indices = range(part_index, length - length % num_parts, num_parts)

    def __iter__(self):
        return iter(self._indices)

    def __len__(self):
        return len(self._indices)


train_data = gluon.data.DataLoader(
    gluon.data.ArrayDataset(points[:192], labels[:192].astype("float32")),
    args.batch_size,
    sampler=SplitSampler(192, kv.num_workers, kv.rank),
)
mx.random.seed(kv.rank)  # the store's first values are those of worker 0
net = gluon.nn.Sequential()
net.add(gluon.nn.Dense(8, activation="relu", in_units=4), gluon.nn.Dense(3, in_units=8))
net.initialize(mx.init.Xavier())
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": args.lr, "momentum": 0.9}, kvstore=kv)
softmax = gluon.loss.SoftmaxCrossEntropyLoss()
for _ in range(args.num_epochs):
    for data, label in train_data:
        with autograd.record():
            loss = softmax(net(data), label)
        loss.backward()
        trainer.step(args.batch_size * kv.num_workers)

metric = mx.metric.Accuracy()
metric.update([mx.nd.array(labels[192:])], [net(mx.nd.array(points[192:]))])
norm = sum(float((p.data() ** 2).sum().asscalar()) for p in net.collect_params().values())
print(f"RESULT rank={kv.rank} of {kv.num_workers} accuracy={metric.get()[1]:.3f} norm={norm:.5f}", flush=True)
