"""ResNet-50, -18 and -10 in Keras, for imagenet_resnet50.py."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

BLOCKS = {6: (1, 1), 10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


def make_resnet(depth: int, classes: int, size: int) -> keras.Model:
    """https://arxiv.org/abs/1512.03385 with strides in the 3 x 3 convolutions: ResNet-50 (v1.5), -18, -10 or -6."""

    def conv(x: Any, width: int, kernel: int, stride: int = 1) -> Any:
        options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}
        return layers.Conv2D(width, kernel, stride, **options)(x)

    def norm(x: Any, gamma: str = "ones") -> Any:
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma)(x)

    def relu(x: Any) -> Any:
        return layers.ReLU()(x)

    pictures = keras.Input((size, size, 3))
    x = layers.MaxPooling2D(3, 2, "same")(relu(norm(conv(pictures, 64, 7, 2))))
    for stage, blocks in enumerate(BLOCKS[depth]):
        for block in range(blocks):
            width, stride, before = 64 * 2**stage, 2 if stage and not block else 1, x
            if depth == 50:
                x = relu(norm(conv(x, width, 1)))
                x = relu(norm(conv(x, width, 3, stride)))
                x = conv(x, 4 * width, 1)
            else:
                x = relu(norm(conv(x, width, 3, stride)))
                x = conv(x, width, 3)
            x = norm(x, "zeros")  # a block does nothing at first
            if before.shape != x.shape:
                before = norm(conv(before, x.shape[-1], 1, stride))
            x = relu(layers.Add()([before, x]))
    x = layers.GlobalAveragePooling2D()(x)
    small = keras.initializers.RandomNormal(stddev=0.01)  # https://arxiv.org/abs/1706.02677, section 5.1
    return keras.Model(pictures, layers.Dense(classes, kernel_initializer=small, dtype="float32")(x))
