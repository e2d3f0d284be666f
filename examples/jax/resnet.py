"""ResNet-50, -18 and -10 in Flax, for imagenet_resnet50.py."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

BLOCKS = {6: (1, 1), 10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


class ResNet(nn.Module):
    """https://arxiv.org/abs/1512.03385 with strides in the 3 x 3 convolutions: ResNet-50 (v1.5), -18, -10 or -6."""

    layers: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        x = nn.relu(norm()(conv(64, (7, 7), 2)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(BLOCKS[self.layers]):
            for block in range(blocks):
                width, stride, before = 64 * 2**stage, 2 if stage and not block else 1, x
                if self.layers == 50:
                    x = nn.relu(norm()(conv(width, (1, 1))(x)))
                    x = nn.relu(norm()(conv(width, (3, 3), stride)(x)))
                    x = conv(4 * width, (1, 1))(x)
                else:
                    x = nn.relu(norm()(conv(width, (3, 3), stride)(x)))
                    x = conv(width, (3, 3))(x)
                x = norm(scale_init=nn.initializers.zeros)(x)  # a block does nothing at first
                if before.shape != x.shape:
                    before = norm()(conv(x.shape[-1], (1, 1), stride)(before))
                x = nn.relu(before + x)
        return nn.Dense(self.classes, dtype=jnp.float32)(x.mean((1, 2)))
