"""Products with oneDNN, the library that multiplies matrices for PyTorch on a CPU.

app/packed.py reorders the weights of a model for it, and multiplies with `packed_product`. oneDNN
can store a weight in blocks, in the order in which its kernel reads them. With such a weight a
product of a few rows takes little longer than a product of a single row. PyTorch has no public
functions for this. requirements.txt therefore states the version of PyTorch that is tested. With
another one `can_multiply` tries whether its private functions still work in the same way. If they
do not, weights stay as they are, and nothing else changes.
"""
from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def reorder_weight(weight: Tensor) -> Tensor:
    """Return a copy of a weight (out, in) that is stored in oneDNN's blocks."""
    # oneDNN chooses the blocks for an expected number of rows, but they serve any number. A pass
    # over a draft has 4 to 32 rows.
    expected_rows = 16
    return torch.ops.mkldnn._reorder_linear_weight(weight, expected_rows)


def packed_product(x: Tensor, weight: Tensor, min_rows: int = 1) -> Tensor:
    """Return x W^T (..., out) for x (..., in) and a reordered weight. If x has fewer rows than
    `min_rows`, it is padded to `min_rows` for the product."""
    rows = x.reshape(-1, x.shape[-1])  # (n, in)
    count = len(rows)
    if count < min_rows:
        rows = F.pad(rows, (0, 0, 0, min_rows - count))
    no_bias = None
    no_activation = ("none", [], "")  # its name, parameters and algorithm
    out = torch.ops.mkldnn._linear_pointwise(rows, weight, no_bias, *no_activation)
    return out[:count].reshape(*x.shape[:-1], -1)


@cache
def can_multiply(dtype: torch.dtype) -> bool:
    """Return whether `packed_product` multiplies matrices of this dtype on this CPU, which is tried
    once."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    ones = torch.ones(1, 8, dtype=dtype)
    try:
        return bool(packed_product(ones, reorder_weight(ones)) == 8)
    # A CPU may lack instructions, and PyTorch the functions, or they take other arguments.
    except (RuntimeError, AttributeError, TypeError):
        return False


def has_fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 faster than float32."""
    # A CPU with AMX has AVX-512 BF16 as well. (This function is private, too.)
    has_instructions = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return can_multiply(torch.bfloat16) and has_instructions()
