"""A leaf of any shape as matrices (S, K, N): S of them in a stack, K inputs that a product sums over, N outputs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a leaf is taken apart, and put together again.

    Attributes:
        shape: of the leaf.
        axis: the packed axis, 0 or more; None if nothing is packed.
        block: values along it that share a scale.
        inputs: the contracted axes, ascending.
        stack: the axes that number matrices, ascending.

    The packed axis becomes the last of the inputs, or of the outputs, and is padded to whole blocks: rows (or columns)
    of zeros, which change nothing.
    """

    shape: tuple[int, ...]
    axis: int | None
    block: int
    inputs: tuple[int, ...]
    stack: tuple[int, ...]

    @property
    def along_inputs(self) -> bool:
        """Do blocks run along the inputs? Else they run along the outputs."""
        return self.axis is None or self.axis in self.inputs

    @property
    def pad(self) -> int:
        return 0 if self.axis is None else -self.shape[self.axis] % self.block

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the leaf in the order of the matrices."""
        outputs = [a for a in range(len(self.shape)) if a not in (*self.inputs, *self.stack)]
        return (*self.stack, *self._packed_last(self.inputs), *self._packed_last(outputs))

    def _packed_last(self, axes: Any) -> list[int]:
        return [*(a for a in axes if a != self.axis), *(a for a in axes if a == self.axis)]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """S, K and N, with padding."""
        full = [n + (self.pad if a == self.axis else 0) for a, n in enumerate(self.shape)]
        s, k = (math.prod(full[a] for a in axes) for axes in (self.stack, self.inputs))
        return s, k, math.prod(full) // max(s * k, 1)

    def take(self, leaf: Any) -> Any:
        """The matrices of a leaf."""
        padding = [(0, self.pad if a == self.axis else 0) for a in range(len(self.shape))]
        padded = jnp.pad(leaf, padding) if self.pad else leaf
        return jnp.transpose(padded, self.order).reshape(self.sizes)

    def back(self, matrices: Any) -> Any:
        """The leaf of matrices (S, K, N)."""
        return self._back(matrices, self.shape)

    def back_scale(self, scale: Any) -> Any:
        """Scales (S, K / block, N), or (S, K, N / block), as a leaf that has one entry for each block."""
        shape = list(self.shape)
        if self.axis is not None:
            shape[self.axis] = -(-shape[self.axis] // self.block)
        return self._back(scale, tuple(shape))

    def _back(self, matrices: Any, shape: tuple[int, ...]) -> Any:
        full = list(shape)
        if self.axis is not None and shape == self.shape:
            full[self.axis] += self.pad
        split = matrices.reshape([full[a] for a in self.order])
        places = sorted(range(len(shape)), key=lambda i: self.order[i])
        return jnp.transpose(split, places)[tuple(slice(n) for n in shape)]

    def take_scale(self, scale: Any) -> Any:
        """The inverse of `back_scale`."""
        split = jnp.transpose(scale, self.order)
        s, k, n = self.sizes
        return split.reshape((s, k // self.block, n) if self.along_inputs else (s, k, n // self.block))

    def channels(self, diagonal: Any) -> Any:
        """Numbers of the channels, (S, channels), as (S, K): in the order of the matrices, 0 where padded."""
        return self._moved(diagonal, 1)

    def moment(self, moment: Any) -> Any:
        """Second moments (S, channels, channels) as (S, K, K)."""
        return self._moved(moment, 2)

    def _moved(self, array: Any, times: int) -> Any:
        sizes, ordered = [self.shape[a] for a in self.inputs], self._packed_last(self.inputs)
        axes = [0] + [1 + t * len(sizes) + self.inputs.index(a) for t in range(times) for a in ordered]
        split = np.transpose(array.reshape([len(array), *sizes * times]), axes)
        if self.along_inputs and self.pad:
            split = np.pad(split, [(0, 0)] + [(0, self.pad if a == self.axis else 0) for a in ordered] * times)
        return split.reshape([len(array), *[self.sizes[1]] * times])

    def carried(self, channels: Any) -> Any:
        """The inverse of `channels`, as an array of the rank of the leaf that has size 1 along the outputs."""
        kept = tuple(n if a in (*self.inputs, *self.stack) else 1 for a, n in enumerate(self.shape))
        lead = [self.shape[a] for a in self.stack]
        ordered = self._packed_last(self.inputs)
        sizes = [self.shape[a] + (self.pad if a == self.axis else 0) for a in ordered]
        split = channels.reshape([*lead, *sizes])[(..., *(slice(self.shape[a]) for a in ordered))]
        axes = [*self.stack, *ordered]
        places = sorted(range(len(axes)), key=lambda i: axes[i])
        return jnp.transpose(split, places).reshape(kept)
