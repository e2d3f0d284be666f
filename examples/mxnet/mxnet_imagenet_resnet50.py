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
import time
from contextlib import nullcontext
from pathlib import Path

import datasets
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp

import reigen.mxnet as hvd

_MEAN = dict(zip(("mean_r", "mean_g", "mean_b"), (123.68, 116.779, 103.939), strict=True))
_STD = dict(zip(("std_r", "std_g", "std_b"), (58.393, 57.12, 57.375), strict=True))


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
    add("--momentum", type=float, default=0.9)
    add("--wd", type=float, default=1e-4)
    add("--warmup-epochs", type=float, default=0.5, help="5 for ImageNet (default: %(default)s)")
    add("--label-smoothing", type=float, default=0.1, help="how much goes to the other classes (default: %(default)s)")
    add("--log-interval", type=int, default=5, help="steps between two lines (default: %(default)s)")
    add("--goal", type=float, help="exit with 1 below this accuracy (default: 0.3, without --rec-train)")
    options = parser.parse_args()
    if options.goal is None:
        options.goal = 0.0 if options.rec_train else 0.3
    return options


def records(file: Path, options: argparse.Namespace, *, train: bool) -> mx.io.DataIter:
    """This rank's part of a record file."""
    size = options.image_size
    crop = {"random_resized_crop": True, "min_random_area": 0.08, "min_aspect_ratio": 3 / 4, "max_aspect_ratio": 4 / 3}
    changed = {"shuffle": True, "rand_mirror": True, **crop} if train else {"resize": size * 8 // 7}
    return mx.io.ImageRecordIter(
        path_imgrec=str(file),
        path_imgidx=str(file.with_suffix(".idx")),
        data_shape=(3, size, size),
        batch_size=options.batch_size,
        preprocess_threads=options.data_nthreads,
        num_parts=hvd.size(),
        part_index=hvd.rank(),
        **changed,
        **_MEAN,
        **_STD,
    )


def drawn(directory: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """Record files for those who have none."""
    size = options.image_size * 8 // 7
    datasets.write_records(directory / "train", options.num_examples, size, seed=1)
    datasets.write_records(directory / "val", options.num_examples // 2, size, seed=2)
    return directory / "train.rec", directory / "val.rec"


def make_net(options: argparse.Namespace, context: mx.Context) -> gluon.HybridBlock:
    net = gluon.model_zoo.vision.get_model(options.model, classes=options.num_classes)
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
    warmup = int(options.warmup_epochs * steps)
    schedule = mx.lr_scheduler.CosineScheduler(options.num_epochs * steps, rate, warmup_steps=warmup)
    sgd = {"momentum": options.momentum, "wd": options.wd, "lr_scheduler": schedule, "multi_precision": True}
    trainer = hvd.DistributedTrainer(params, "sgd", sgd)
    if options.dtype == "mixed":
        amp.init_trainer(
            trainer
        )  # gradients that overflow do so in the sum, on all ranks alike: all leave out that step
    return trainer


def train_epoch(
    net: gluon.Block, trainer: gluon.Trainer, data: mx.io.DataIter, options: argparse.Namespace, context: mx.Context
) -> None:
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)
    others = options.label_smoothing / options.num_classes
    start = time.perf_counter()
    for step, batch in enumerate(data, start=1):
        images, labels = batch.data[0].as_in_context(context), batch.label[0].as_in_context(context)
        smooth = labels.one_hot(options.num_classes, 1 - options.label_smoothing + others, others)
        with autograd.record():
            loss = loss_of(net(images), smooth)
            with amp.scale_loss(loss, trainer) if options.dtype == "mixed" else nullcontext(loss) as scaled:
                autograd.backward(scaled)
        trainer.step(options.batch_size)
        if step % options.log_interval == 0:
            mean = hvd.allreduce(loss.mean(), name="loss").asscalar()
            rate = step * options.batch_size * hvd.size() / (time.perf_counter() - start)
            if hvd.rank() == 0:
                seen = f"loss={mean:.4f} lr={trainer.learning_rate:.4f}"
                print(f"Batch [{step}] Speed: {rate:.2f} images/sec  {seen}", flush=True)


def evaluate(net: gluon.Block, data: mx.io.DataIter, context: mx.Context) -> float:
    """The share of right answers, over the parts of all ranks."""
    right = seen = 0
    for batch in data:
        count = len(batch.label[0]) - batch.pad
        guesses = net(batch.data[0].as_in_context(context)).argmax(axis=1).asnumpy()
        right += np.sum(guesses[:count] == batch.label[0].asnumpy()[:count])
        seen += count
    right, seen = hvd.allreduce(mx.nd.array([right, seen]), op=hvd.Sum, name="counts").asnumpy()
    return float(right / seen)


def train(options: argparse.Namespace, files: tuple[Path, Path | None], context: mx.Context) -> float:
    """The accuracy in the end."""
    steps = options.num_examples // hvd.size() // options.batch_size
    mx.random.seed(hvd.rank())
    net = make_net(options, context)
    params = net.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    trainer = make_trainer(params, options, steps)
    # The parts of a record file differ in length. Every rank makes as many steps, and begins anew where its part ends.
    data = mx.io.ResizeIter(records(files[0], options, train=True), steps)
    accuracy = 0.0
    for epoch in range(options.num_epochs):
        data.reset()
        train_epoch(net, trainer, data, options, context)
        if files[1] is not None:
            accuracy = evaluate(net, records(files[1], options, train=False), context)
        if hvd.rank() == 0:
            print(f"Epoch[{epoch}] Validation-accuracy={accuracy:.4f}", flush=True)
    return accuracy


def main() -> int:
    options = parse()
    hvd.init()
    context = mx.gpu(hvd.local_rank()) if mx.context.num_gpus() else mx.cpu()
    if options.dtype == "mixed":
        amp.init("float16" if mx.context.num_gpus() else "bfloat16")
    with tempfile.TemporaryDirectory() as made:
        files = (options.rec_train, options.rec_val) if options.rec_train else drawn(Path(made), options)
        accuracy = train(options, files, context)
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
