"""Built-in training profiles: layer sizes of well-known models as published, and times from a device's speed.

============ ============ ======================================================================================
resnet50      25,557,032  He et al., "Deep Residual Learning for Image Recognition", 2015, table 1 (50-layer); a
                          block's stride is in its first convolution. 3.8e9 multiply-adds an image, says the paper
vgg16        138,357,544  Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
                          Recognition", 2014, table 1, configuration D
bert-large   336,226,108  Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018: 24 layers,
                          hidden size 1,024, 16 heads, 30,522 word pieces; with the pooler and both heads of
                          pre-training (masked words, whose decoder is the table of words; next sentence).
                          335,141,888 of them without the heads; the paper says 340 M
============ ============ ======================================================================================

Backward takes twice the arithmetic of forward: for the gradients of a layer's weights, and of its inputs. So a layer's
gradients are ready when the arithmetic of all layers behind it, and its own, is done. Layers without weights count as
free; so do the bytes that layers read and write, of which batch normalisation has many.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from reigen.errors import ArgumentError
from reigen.planner.profile import GradientProfile, TrainingProfile

#: Images of ImageNet's training set (ILSVRC 2012).
_IMAGENET_IMAGES = 1_281_167
#: Sequence length, and masked words of a sequence, of the first 90 % of BERT's pre-training; Devlin et al. mask 15 %.
_BERT_LENGTH, _BERT_MASKED = 128, 20
#: Half of what the data sheet of NVIDIA's V100 (SXM2) gives for float32, 15.7e12 a second: an assumption.
DEVICE_FLOPS = 7.85e12
#: What that data sheet gives for its memory, bytes a second.
DEVICE_MEMORY_RATE = 900e9
#: SGD with momentum reads weight, gradient and momentum of each element, and writes weight and momentum, in float32.
_UPDATE_BYTES = 5 * 4


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """Layer with weights.

    Attributes:
        shapes: name and shape of each parameter, in the order of ``model.parameters()``.
        forward_flops: of one sample; a multiply-add counts as two.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    forward_flops: float

    @property
    def elements(self) -> int:
        """Of all its parameters."""
        return sum(prod(shape) for _, shape in self.shapes)


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """Built-in model: layers from the input to the output, samples of a rank in a step and in an epoch, and source."""

    layers: tuple[ModelLayer, ...]
    batch: int
    samples_per_epoch: int
    source: str

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(layer.elements for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        """Of one sample."""
        return sum(layer.forward_flops for layer in self.layers)


def _convolution(name: str, outputs: int, inputs: int, kernel: int, size: int, bias: bool = False) -> ModelLayer:
    """Return a convolution whose result is ``size`` pixels wide and high."""
    weight = (outputs, inputs, kernel, kernel)
    shapes = [(f"{name}.weight", weight)] + ([(f"{name}.bias", (outputs,))] if bias else [])
    return ModelLayer(tuple(shapes), 2.0 * prod(weight) * size * size)


def _norm(name: str, width: int, values: int) -> ModelLayer:
    """Return a normalisation: two parameters a channel, and two operations a value."""
    return ModelLayer(((f"{name}.weight", (width,)), (f"{name}.bias", (width,))), 2.0 * values)


def _dense(name: str, inputs: int, outputs: int, times: int = 1) -> ModelLayer:
    """Return a fully connected layer that is used so many times in a sample."""
    return ModelLayer(
        ((f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))), 2.0 * inputs * outputs * times
    )


def _resnet50() -> Iterator[ModelLayer]:
    yield _convolution("conv1", 64, 3, 7, 112)
    yield _norm("bn1", 64, 64 * 112 * 112)
    inputs, size = 64, 56
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        size = 56 >> (stage - 1)
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for number, (outputs, kernel) in enumerate(((width, 1), (width, 3), (4 * width, 1)), 1):
                ins = (inputs, width, width)[number - 1]
                yield _convolution(f"{name}.conv{number}", outputs, ins, kernel, size)
                yield _norm(f"{name}.bn{number}", outputs, outputs * size * size)
            if not block:
                yield _convolution(f"{name}.downsample.0", 4 * width, inputs, 1, size)
                yield _norm(f"{name}.downsample.1", 4 * width, 4 * width * size * size)
            inputs = 4 * width
    yield _dense("fc", 2048, 1000)


def _vgg16() -> Iterator[ModelLayer]:
    inputs, number = 3, 0
    for stage, (count, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))):
        for _ in range(count):
            yield _convolution(f"features.{number}", width, inputs, 3, 224 >> stage, bias=True)
            inputs, number = width, number + 2  # an activation stands between
        number += 1  # pooling
    for number, (ins, outputs) in zip((0, 3, 6), itertools.pairwise((512 * 7 * 7, 4096, 4096, 1000)), strict=True):
        yield _dense(f"classifier.{number}", ins, outputs)


def _bert_large() -> Iterator[ModelLayer]:
    hidden, inner, words, length = 1024, 4096, 30522, _BERT_LENGTH
    for name, rows in (("word", words), ("position", 512), ("token_type", 2)):
        yield ModelLayer(((f"embeddings.{name}_embeddings.weight", (rows, hidden)),), 2.0 * length * hidden)
    yield _norm("embeddings.LayerNorm", hidden, length * hidden)
    for layer in range(24):
        name = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield _dense(f"{name}.attention.self.{part}", hidden, hidden, length)
        output = _dense(f"{name}.attention.output.dense", hidden, hidden, length)
        scores = 2 * 2.0 * length * length * hidden  # of all heads: products with keys, and with values
        yield ModelLayer(output.shapes, output.forward_flops + scores)
        yield _norm(f"{name}.attention.output.LayerNorm", hidden, length * hidden)
        yield _dense(f"{name}.intermediate.dense", hidden, inner, length)
        yield _dense(f"{name}.output.dense", inner, hidden, length)
        yield _norm(f"{name}.output.LayerNorm", hidden, length * hidden)
    yield _dense("pooler.dense", hidden, hidden)
    # The table of words is the decoder's weight, too; its gradient is complete when backward has come to the input.
    decoding = 2.0 * hidden * words * _BERT_MASKED
    yield ModelLayer((("cls.predictions.bias", (words,)),), decoding)
    yield _dense("cls.predictions.transform.dense", hidden, hidden, _BERT_MASKED)
    yield _norm("cls.predictions.transform.LayerNorm", hidden, _BERT_MASKED * hidden)
    yield _dense("cls.seq_relationship", hidden, 2)


#: By name; batches as one GPU holds them.
MODELS: dict[str, BuiltInModel] = {
    "resnet50": BuiltInModel(tuple(_resnet50()), 64, _IMAGENET_IMAGES, "He et al. 2015, table 1"),
    "vgg16": BuiltInModel(tuple(_vgg16()), 64, _IMAGENET_IMAGES, "Simonyan and Zisserman 2014, configuration D"),
    "bert-large": BuiltInModel(
        tuple(_bert_large()), 16, 0, f"Devlin et al. 2018, {_BERT_LENGTH} word pieces a sequence, both heads"
    ),
}


def built_in_profile(
    name: str,
    samples_per_second: float | None = None,
    *,
    batch: int = 0,
    dtype: str = "float32",
    flops: float = DEVICE_FLOPS,
) -> TrainingProfile:
    """Return the profile of a model on a device of some speed.

    Args:
        name: of `MODELS`.
        samples_per_second: that a rank alone trains; the step is divided as the arithmetic is. None: from ``flops``.
        batch: samples of a rank in a step; 0: the model's own.
        dtype: of the gradients.
        flops: operations that the device does in a second; a multiply-add counts as two.

    Raises:
        ArgumentError: there is no such model, or a number is not above 0.
    """
    model = MODELS.get(name)
    if model is None:
        raise ArgumentError(f"there is no built-in model {name!r}; there are {', '.join(MODELS)}")
    if batch < 0 or flops <= 0 or (samples_per_second is not None and samples_per_second <= 0):
        raise ArgumentError("batch, flops and samples_per_second must be above 0")
    batch = batch or model.batch
    update = model.elements * _UPDATE_BYTES / DEVICE_MEMORY_RATE
    forward = model.forward_flops * batch / flops
    speed = f"{flops:.3g} operations a second"
    if samples_per_second is not None:
        step = batch / samples_per_second
        update = min(update, step / 2)
        forward = (step - update) / 3
        speed = f"{samples_per_second:g} samples a second alone"
    return TrainingProfile(
        name=name,
        batch=batch,
        tensors=_tensors(model, 2 * forward, dtype),
        forward_seconds=forward,
        backward_seconds=2 * forward,
        update_seconds=update,
        processors=0.0,
        samples_per_epoch=model.samples_per_epoch,
        source=f"built-in: {model.source}; {speed}",
    )


def _tensors(model: BuiltInModel, backward_seconds: float, dtype: str) -> tuple[GradientProfile, ...]:
    """Return the parameters in order, each ready when the arithmetic behind it and its layer's own is done."""
    whole = model.forward_flops
    behind, reversed_layers = 0.0, []
    for layer in reversed(model.layers):
        behind += layer.forward_flops
        ready = min(1.0, behind / whole) * backward_seconds
        reversed_layers.append([GradientProfile(name, prod(shape), dtype, ready) for name, shape in layer.shapes])
    return tuple(tensor for layer in reversed(reversed_layers) for tensor in layer)
