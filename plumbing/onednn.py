"""Products with oneDNN, the library that multiplies matrices for PyTorch on a CPU.

oneDNN can store a weight in blocks, in the order in which its kernel reads them. With such a weight
a product of a few rows takes little longer than a product of a single row. PyTorch has no public
functions for this, which is why requirements.txt states the version of PyTorch.
"""
from __future__ import annotations

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


def can_multiply(dtype: torch.dtype) -> bool:
    """Return whether oneDNN can multiply matrices of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():  # it is missing on some Macs
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def has_fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 faster than float32."""
    # A CPU with AMX has AVX-512 BF16 as well.
    return can_multiply(torch.bfloat16) and torch.cpu._is_avx512_bf16_supported()
