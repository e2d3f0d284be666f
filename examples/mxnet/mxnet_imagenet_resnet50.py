"""ResNet-50 on ImageNet, in mixed precision: `reigen run -np 2 python examples/mxnet/mxnet_imagenet_resnet50.py`.

    mpirun -np 16 -H server1:4,server2:4,server3:4,server4:4 -bind-to none -map-by slot \\
        python examples/mxnet/mxnet_imagenet_resnet50.py --rec-train train.rec --batch-size 256 --image-size 224

The learning rate is --lr for each 256 images of a step, on all ranks together; it grows to that in the first epochs and
falls along a cosine. Each rank reads its part of the record files (im2rec makes them); where there are none, a few
pictures are drawn, small enough for a processor.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp
from progress import Progress
from record_data import draw, records

import reigen.mxnet as hvd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rec-train", type=Path, help="the record file to train on; its index stands beside it as FILE.idx")
    add("--rec-val", type=Path, help="the one to test with")
    add("--num-examples", type=int, default=320, help="images to train on: 1281167 in ImageNet (default: %(default)s)")
    add("--num-classes", type=int, default=10, help="1000 in ImageNet (default: %(default)s)")
    add("--image-size", type=int, default=32, help="224 for ImageNet (default: %(default)s)")
    add("--data-nthreads", type=int, default=2, help="threads of a rank that decode images (default: %(default)s)")
    models = [f"resnet{layers}_v1" for layers in (18, 34, 50, 101, 152)]
    add("--model", choices=models, default="resnet50_v1", metavar="NAME", help=f"{', '.join(models)}")
    add("--dtype", choices=["float32", "mixed"], default="mixed", help="mixed: float16 on GPUs, else bfloat16")
    add("--batch-size", type=int, default=16, help="images per step and rank, 256 on a GPU (default: %(default)s)")
    add("--num-epochs", type=int, default=2, help="90 for ImageNet (default: %(default)s)")
    add("--lr", type=float, default=0.1, help="for each 256 images of a step (default: %(default)s)")
    add("--momentum", type=float, default=0.9, help="default: %(default)s")
    add("--wd", type=float, default=1e-4, help="decay of the weights (default: %(default)s)")
    add("--warmup-epochs", type=float, default=0.5, help="5 for ImageNet (default: %(default)s)")
    add("--label-smoothing", type=float, default=0.1, help="how much goes to the other classes (default: %(default)s)")
    add("--log-interval", type=int, default=5, help="steps between two lines (default: %(default)s)")
    add("--goal", type=float, help="exit with 1 below this accuracy (default: 0.3, without --rec-train)")
    options = parser.parse_args()
    if options.goal is None:
        options.goal = 0.0 if options.rec_train else 0.3
    return options


def device() -> mx.Context:
    return mx.gpu(hvd.local_rank() % mx.context.num_gpus()) if mx.context.num_gpus() else mx.cpu()


def make_net(options: argparse.Namespace) -> gluon.HybridBlock:
    context, net = device(), gluon.model_zoo.vision.get_model(options.model, classes=options.num_classes)
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2), ctx=context)
    for stage in net.features:
        for unit in stage if isinstance(stage, gluon.nn.HybridSequential) else ():
            # every block begins as the identity: https://arxiv.org/abs/1706.02677, section 5.1
            unit.body[-1].gamma.initialize(mx.init.Zero(), ctx=context, force_reinit=True)
    net.hybridize(static_alloc=True)
    for parameter in net.collect_params(".*beta|.*gamma|.*bias").values():
        parameter.wd_mult = 0.0
    return net


def make_trainer(params: gluon.ParameterDict, options: argparse.Namespace, steps: int) -> gluon.Trainer:
    """SGD whose rate grows with the number of ranks, and in the first steps."""
    rate = options.lr * options.batch_size * hvd.size() / 256
    warmup = {"warmup_steps": int(options.warmup_epochs * steps)}
    schedule = mx.lr_scheduler.CosineScheduler(options.num_epochs * steps, rate, **warmup)
    sgd = {"momentum": options.momentum, "wd": options.wd, "lr_scheduler": schedule, "multi_precision": True}
    trainer = hvd.DistributedTrainer(params, "sgd", sgd)
    if options.dtype == "mixed":  # gradients that overflow do so in the sum: all ranks leave out that step
        amp.init_trainer(trainer)
    return trainer


def train_epoch(net: Any, trainer: Any, data: mx.io.DataIter, options: argparse.Namespace, progress: Progress) -> None:
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)
    others = options.label_smoothing / options.num_classes
    for step, batch in enumerate(data, start=1):
        images, labels = (part[0].as_in_context(device()) for part in (batch.data, batch.label))
        smooth = labels.one_hot(options.num_classes, 1 - options.label_smoothing + others, others)
        with autograd.record():
            loss = loss_of(net(images), smooth)
            with amp.scale_loss(loss, trainer) if options.dtype == "mixed" else nullcontext(loss) as scaled:
                autograd.backward(scaled)
        trainer.step(options.batch_size)
        progress.add(options.batch_size * hvd.size(), 0.0)
        if step % options.log_interval == 0:
            mean = hvd.allreduce(loss.mean(), name="loss").asscalar()
            if hvd.rank() == 0:
                seen = f"loss={mean:.4f} lr={trainer.learning_rate:.4f}  {progress.eta}"
                print(f"Batch [{step}] Speed: {progress.rate:.2f} images/sec  {seen}", flush=True)


def evaluate(net: gluon.Block, data: mx.io.DataIter) -> float:
    """The share of right answers, over the parts of all ranks."""
    counts = np.zeros(2)
    for batch in data:
        count = len(batch.label[0]) - batch.pad
        guesses = net(batch.data[0].as_in_context(device())).argmax(axis=1).asnumpy()
        counts += np.sum(guesses[:count] == batch.label[0].asnumpy()[:count]), count
    right, seen = hvd.allreduce(mx.nd.array(counts), op=hvd.Sum, name="counts").asnumpy()
    return float(right / seen)


def train(options: argparse.Namespace, files: tuple[Path, Path | None]) -> float:
    """The accuracy in the end."""
    steps = options.num_examples // hvd.size() // options.batch_size
    mx.random.seed(hvd.rank())
    net = make_net(options)
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = make_trainer(net.collect_params(), options, steps)
    # The parts of a record file differ in length. Every rank makes as many steps, and begins anew where its part ends.
    data = mx.io.ResizeIter(records(files[0], options, hvd.rank(), hvd.size(), train=True), steps)
    progress = Progress(options.num_epochs * steps * options.batch_size * hvd.size(), is_shown=False)
    accuracy = 0.0
    for epoch in range(options.num_epochs):
        data.reset()
        train_epoch(net, trainer, data, options, progress)
        if files[1] is not None:
            accuracy = evaluate(net, records(files[1], options, hvd.rank(), hvd.size(), train=False))
        if hvd.rank() == 0:
            print(f"Epoch[{epoch}] Validation-accuracy={accuracy:.4f}", flush=True)
    return accuracy


def main() -> int:
    options = parse()
    hvd.init()
    if options.dtype == "mixed":
        amp.init("float16" if mx.context.num_gpus() else "bfloat16")
    with tempfile.TemporaryDirectory() as made:
        files = (options.rec_train, options.rec_val) if options.rec_train else draw(Path(made), options)
        accuracy = train(options, files)
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
