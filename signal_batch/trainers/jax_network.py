"""The network of the `jax` trainer, in Flax NNX, and the options that shape and train it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from signal_batch.errors import SpecError

#: Log powers are cut off here: a record of unit power, and 40 dB below.
SMALLEST_POWER = 1e-4
NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Options:
    """What `trainer_args` may hold."""

    width: int = 16
    blocks: int = 4
    kernel: int = 7
    stride: int = 4
    learning_rate: float = 1e-2
    warmup_fraction: float = 0.1
    weight_decay: float = 0.05
    label_smoothing: float = 0.0
    clip_norm: float = 1.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("width", "blocks", "kernel", "stride"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"trainer jax: {name} must be a positive integer, not {value!r}")
        if self.kernel % 2 == 0:
            raise SpecError(f"trainer jax: kernel must be odd, not {self.kernel}")
        for name in ("learning_rate", "clip_norm"):
            if not _is_number(value := getattr(self, name)) or value <= 0:
                raise SpecError(f"trainer jax: {name} must be a positive number, not {value!r}")
        if not _is_number(self.weight_decay) or self.weight_decay < 0:
            raise SpecError(
                f"trainer jax: weight_decay must be 0 or a positive number, not "
                f"{self.weight_decay!r}"
            )
        for name in ("warmup_fraction", "label_smoothing", "dropout"):
            if not _is_number(value := getattr(self, name)) or not 0 <= value < 1:
                raise SpecError(
                    f"trainer jax: {name} must be a number from 0 to less than 1, not {value!r}"
                )


class Convolution(nnx.Module):
    """(records, time, channels) -> (records, ceil(time / stride), width), zeros all around.

    Output `j` is centred on input `j * stride`, so padding at the end of a record moves nothing.
    Weights are drawn as in K. He et al., "Delving deep into rectifiers" (ICCV 2015), by NumPy:
    the same on every device, and without compiling anything.
    """

    def __init__(
        self, rng: np.random.Generator, channels: int, width: int, kernel: int, stride: int = 1
    ) -> None:
        self.stride = stride
        scale = math.sqrt(2 / (kernel * channels))
        weights = scale * rng.standard_normal((kernel, channels, width))
        self.kernel = nnx.Param(weights.astype(np.float32))
        self.bias = nnx.Param(np.zeros(width, np.float32))

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        kernel = self.kernel[...]
        side = kernel.shape[0] // 2
        y = jax.lax.conv_general_dilated(
            x, kernel, (self.stride,), [(side, side)], dimension_numbers=("NWC", "WIO", "NWC")
        )
        return _zeroed(y + self.bias[...], mask)


class Norm(nnx.Module):
    """Each position over the root mean square of its channels, times a weight a channel."""

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(np.ones(width, np.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        power = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        scaled: jax.Array = x * jax.lax.rsqrt(power + NORM_EPSILON) * self.scale[...]
        return scaled


class Block(nnx.Module):
    """x -> x + convolutions of x. Positions at zero stay at zero up to a convolution."""

    def __init__(self, rng: np.random.Generator, width: int, kernel: int) -> None:
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.conv1 = Convolution(rng, width, width, kernel)
        self.conv2 = Convolution(rng, width, width, kernel)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        y = self.conv1(jax.nn.relu(self.norm1(x)), mask)
        return x + self.conv2(jax.nn.relu(self.norm2(y)), mask)


class Network(nnx.Module):
    """Logits (records, classes) of an input (records, channels, time) or (records, time).

    `mask`, bool (records, time), is True where a record is real. Masked positions are zeros to
    every convolution, and are left out of the mean.
    """

    def __init__(
        self, rng: np.random.Generator, channels: int, classes: int, options: Options
    ) -> None:
        width, kernel = options.width, options.kernel
        self.stem = Convolution(rng, channels, width, kernel, options.stride)
        self.blocks = nnx.List([Block(rng, width, kernel) for _ in range(options.blocks)])
        self.norm = Norm(width)
        head = rng.standard_normal((width, classes)) / width
        self.head = nnx.Param(head.astype(np.float32))
        self.bias = nnx.Param(np.zeros(classes, np.float32))

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, drop: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        x = _zeroed(_features(x), mask)
        mask = None if mask is None else mask[:, :: self.stem.stride]
        x = self.stem(x, mask)
        for block in self.blocks:
            x = block(x, mask)
        pooled = drop(_mean(jax.nn.relu(self.norm(x)), mask))
        logits: jax.Array = pooled @ self.head[...] + self.bias[...]
        return logits


def _features(x: jax.Array) -> jax.Array:
    """float32 (records, time, channels) of an input.

    Complex values come with their log power: the envelope tells modulations apart whatever the
    phase and carrier are, and a convolution has no square to find it with.
    """
    x = x if x.ndim == 3 else x[:, None]
    if jnp.iscomplexobj(x):
        power = jnp.square(x.real) + jnp.square(x.imag)
        x = jnp.concatenate([x.real, x.imag, jnp.log(power + SMALLEST_POWER)], axis=1)
    return jnp.swapaxes(x, 1, 2)


def _zeroed(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    return x if mask is None else jnp.where(mask[:, :, None], x, 0)


def _mean(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """(records, time, channels) -> (records, channels); masked positions are zero already."""
    if mask is None:
        return x.mean(axis=1)
    return x.sum(axis=1) / jnp.maximum(1, mask.sum(axis=1, dtype=jnp.float32))[:, None]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
