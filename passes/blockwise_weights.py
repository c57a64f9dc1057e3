"""Weights in blocks of a few bits: how the whole numbers are found, and how they are packed for ONNX Runtime.

Rows are outputs, blocks lie along a row. A weight is `scale * (value - zero)`; values are unsigned, 4 or 8 bits. Sources: GPTQ (Frantar and
others, arXiv:2210.17323), AWQ (Lin and others, arXiv:2306.00978); k-quant and HQQ are ONNX Runtime's own code.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
SHRINKS: Sequence[float] = tuple(1 - 0.05 * i for i in range(9))  # shares of a block's range that AWQ tries to keep


@dataclass(frozen=True)
class Blocks:
    """Values uint8 of shape (rows, blocks, block size), scales float32 and zeros uint8 of shape (rows, blocks)."""

    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]
    bits: int

    def dequantized(self, columns: int) -> NDArray[np.float32]:
        """Weights of shape (rows, columns) that these values stand for."""
        return _flat(_weights(self), columns)

    def packed_values(self) -> NDArray[np.uint8]:
        """Values as ONNX Runtime's operators take them: at 4 bits two in a byte, the first one low."""
        return _packed(self.values, self.bits, fill=0)

    def packed_zeros(self) -> NDArray[np.uint8]:
        """Zeros packed along each row's blocks; the half byte left over at an odd number of blocks holds the middle, 8."""
        return _packed(self.zeros, self.bits, fill=8)


def _packed(values: NDArray[np.uint8], bits: int, *, fill: int) -> NDArray[np.uint8]:
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)], constant_values=fill)
    return np.ascontiguousarray(values[..., ::2] | values[..., 1::2] << 4)


def _weights(blocks: Blocks) -> NDArray[np.float32]:
    shifted: NDArray[np.float32] = blocks.values.astype(np.float32) - blocks.zeros[..., None].astype(np.float32)
    shifted *= blocks.scales[..., None]
    return shifted


def _flat(blocked: NDArray[np.float32], columns: int) -> NDArray[np.float32]:
    return blocked.reshape(len(blocked), -1)[:, :columns]


def _blocked(rows: Floats, block_size: int) -> NDArray[np.float32]:
    """Split rows into blocks; the last one is filled up with zeros."""
    missing = -rows.shape[1] % block_size
    padded = np.pad(rows, ((0, 0), (0, missing))) if missing else rows
    return np.ascontiguousarray(padded, np.float32).reshape(len(rows), -1, block_size)


def _grid(blocked: NDArray[np.float32], bits: int, symmetric: bool, shrink: float = 1.0) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Scale and zero for each block. Symmetric: the value farthest from zero, whatever its sign, becomes the lowest whole number."""
    low, high = blocked.min(-1) * shrink, blocked.max(-1) * shrink
    if symmetric:
        farthest = np.where(np.abs(low) > np.abs(high), low, high)
        scales = farthest / np.float32(-(2 ** (bits - 1)))
        zeros = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = (high - low) / np.float32(2**bits - 1)
        zeros = np.round(-low / np.where(scales == 0, 1, scales)).clip(0, 2**bits - 1).astype(np.uint8)
    tiny = np.float32(np.finfo(np.float32).tiny)
    return np.where(np.abs(scales) < tiny, np.float32(1), scales).astype(np.float32), zeros  # a block of zeros, or of numbers next to it


def _rounded(blocked: NDArray[np.float32], scales: NDArray[np.float32], zeros: NDArray[np.uint8], bits: int) -> Blocks:
    values = blocked / scales[..., None]
    np.round(values, out=values)
    values += zeros[..., None]
    return Blocks(values.clip(0, 2**bits - 1).astype(np.uint8), scales, zeros, bits)


def round_to_nearest(
    rows: Floats, *, bits: int, block_size: int, symmetric: bool, moments: Floats | None = None, shrinks: Sequence[float] = (1.0,)
) -> Blocks:
    """Round each weight to the nearest step. Of several `shrinks` of its range each block takes the one with the smallest error.

    `moments` makes that the error of the products: see `better_of`.
    """
    blocked = _blocked(rows, block_size)
    best = _rounded(blocked, *_grid(blocked, bits, symmetric, shrinks[0]), bits)
    for shrink in shrinks[1:]:
        best = better_of(best, _rounded(blocked, *_grid(blocked, bits, symmetric, shrink), bits), rows, moments)
    return best


def better_of(first: Blocks, second: Blocks, rows: Floats, moments: Floats | None = None) -> Blocks:
    """Take each block from whichever is nearer to the weights; from the first where neither is.

    With `moments`, the second moments of what the weights are multiplied with, of shape (blocks, block size, block size): nearer in products.
    """
    blocked = _blocked(rows, first.values.shape[-1])

    def error(blocks: Blocks) -> NDArray[np.float32]:
        difference = _weights(blocks) - blocked
        if moments is None:
            return np.asarray((difference * difference).sum(-1))
        turned = difference.transpose(1, 0, 2)
        return np.asarray(((turned @ moments.astype(np.float32)) * turned).sum(-1).T)

    with np.errstate(all="ignore"):
        take = error(second) < error(first)
    return Blocks(
        np.where(take[..., None], second.values, first.values),
        np.where(take, second.scales, first.scales),
        np.where(take, second.zeros, first.zeros),
        first.bits,
    )


def k_quant(rows: Floats, *, bits: int, block_size: int) -> Blocks:
    """ONNX Runtime's k-quant; blocks that it gets wrong (all of one sign, or constant) are rounded to nearest instead."""
    from onnxruntime.quantization.neural_compressor.weight_only import quant_tensor_k_quant_cpu

    blocked = _blocked(rows, block_size)
    with np.errstate(all="ignore"):
        values, scales, zeros = quant_tensor_k_quant_cpu(blocked.reshape(-1, block_size), bits, block_size)
    shape = blocked.shape[:2]
    found = Blocks(
        np.nan_to_num(values).astype(np.uint8).reshape(blocked.shape), scales.astype(np.float32).reshape(shape),
        zeros.astype(np.uint8).reshape(shape), bits,
    )  # fmt: skip
    return better_of(round_to_nearest(rows, bits=bits, block_size=block_size, symmetric=False), found, rows)


def hqq(rows: Floats, *, bits: int, block_size: int) -> Blocks:
    """ONNX Runtime's half-quadratic quantization, with its zeros rounded to whole numbers.

    With zeros that are not whole, the operator takes a path that is 20 times slower at 4 bits and fails at 8 (seen with 1.32).
    Blocks that come out worse than by rounding to nearest are rounded to nearest.
    """
    import torch
    from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantConfig, HQQWeightOnlyQuantizer

    quantizer = HQQWeightOnlyQuantizer(HQQWeightOnlyQuantConfig(block_size=block_size, bits=bits))
    given = torch.from_numpy(np.ascontiguousarray(rows, np.float32))
    with contextlib.redirect_stdout(io.StringIO()):
        _, scales, zeros = quantizer.quantize_internal(given, bits=bits, group_size=block_size)
    whole = zeros.numpy().round().clip(0, 2**bits - 1).astype(np.uint8)
    found = _rounded(_blocked(rows, block_size), scales.numpy().astype(np.float32), whole, bits)
    return better_of(round_to_nearest(rows, bits=bits, block_size=block_size, symmetric=False), found, rows)


DAMPING = 0.01  # of the mean of the Hessian's diagonal, as in the paper


def gptq(rows: Floats, hessian: NDArray[np.float64], *, bits: int, block_size: int, symmetric: bool) -> Blocks:
    """Round column by column; the error of each is made up for in those after it, by the inverse of the inputs' second moments.

    `hessian` has shape (columns, columns). ONNX Runtime's own version rounds a second time, on another grid than the one it made up
    errors for; here scales and zeros are those that the rounding used.
    """
    columns = rows.shape[1]
    weights = np.ascontiguousarray(rows.T, np.float64)  # one input a row: what is worked on lies together
    upper = _inverse_root(hessian)
    blocks = -(-columns // block_size)
    values = np.zeros((blocks * block_size, len(rows)), np.uint8)
    scales, zeros = np.ones((blocks, len(rows)), np.float32), np.zeros((blocks, len(rows)), np.uint8)
    for block, start in enumerate(range(0, columns, block_size)):
        stop = min(start + block_size, columns)
        part = weights[start:stop]
        grid = _grid(_blocked(part.T, block_size), bits, symmetric)
        scale, zero = scales[block], zeros[block] = grid[0][:, 0], grid[1][:, 0]
        errors = np.empty_like(part)
        for i in range(stop - start):
            value = (np.round(part[i] / scale) + zero).clip(0, 2**bits - 1)
            values[start + i] = value
            errors[i] = (part[i] - scale * (value - zero)) / upper[start + i, start + i]
            part[i:] -= np.outer(upper[start + i, start + i : stop], errors[i])
        weights[stop:] -= upper[start:stop, stop:].T @ errors
        values[stop : (block + 1) * block_size] = zero  # the filling stands for zero
    shaped = values.T.reshape(len(rows), blocks, block_size)
    return Blocks(np.ascontiguousarray(shaped), np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T), bits)


def _inverse_root(hessian: NDArray[np.float64]) -> NDArray[np.float64]:
    """Upper Cholesky factor of the inverse; columns that no input ever touched, and singular matrices, are damped until there is one."""
    damped = hessian.copy()
    diagonal = np.arange(len(damped))
    damped[diagonal, diagonal] += np.where(damped[diagonal, diagonal] == 0, 1.0, 0.0)
    step = DAMPING * float(np.mean(damped[diagonal, diagonal]))
    while True:
        damped[diagonal, diagonal] += step
        try:
            inverse = np.linalg.inv(np.linalg.cholesky(damped))
            return np.asarray(np.linalg.cholesky(inverse.T @ inverse).T)
        except np.linalg.LinAlgError:
            step *= 10
