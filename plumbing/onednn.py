"""Products with oneDNN, the library that multiplies matrices for PyTorch on a CPU.

It can store a weight in blocks, in the order in which its kernel reads them. Then a product of a
few rows takes little longer than one of a single row. PyTorch has no public calls for this, which
is why requirements.txt states its version.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reorder_weight(weight: Tensor) -> Tensor:
    """Store a weight (out, in) in blocks, in the order in which oneDNN's kernel reads it."""
    # oneDNN chooses the blocks for an expected number of rows. They serve any number. A pass over a
    # draft has 4 to 32 rows.
    expected_rows = 16
    return torch.ops.mkldnn._reorder_linear_weight(weight, expected_rows)


def packed_product(x: Tensor, weight: Tensor, min_rows: int = 1) -> Tensor:
    """Return x W^T (..., out) for x (..., in) and a reordered weight. If x has fewer rows than
    `min_rows`, it is padded to `min_rows` for the product."""
    rows = x.reshape(-1, x.shape[-1])  # (n, in)
    count = len(rows)
    if count < min_rows:
        rows = F.pad(rows, (0, 0, 0, min_rows - count))
    # None: no bias. The rest: no activation after it.
    out = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return out[:count].reshape(*x.shape[:-1], -1)


def has_fast_bfloat16() -> bool:
    """Tell whether this CPU multiplies bfloat16 faster than float32."""
    if not torch.backends.mkldnn.is_available():  # as on some Macs
        return False
    can_multiply = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return can_multiply and torch.cpu._is_avx512_bf16_supported()  # a CPU with AMX has both
