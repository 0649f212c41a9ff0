"""Where to run (--device), and which dtype to use there (--dtype). Used by the command lines."""
from __future__ import annotations

import torch

from plumbing.errors import InputError
from plumbing.onednn import has_fast_bfloat16

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_device(device: str) -> None:
    """Raise InputError if the device cannot be used."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason, _, _ = str(error).partition(". ")  # PyTorch may go on for a page
        if "device string" in reason:
            reason = "a device is cpu, cuda or mps"  # instead of PyTorch's twenty
        raise InputError(f"--device {device} cannot be used here: {reason}") from None


def choose_dtype(device: str, dtype: str | None) -> str:
    """Return the name of the dtype to compute in. The default, if `dtype` is None, is bfloat16, or
    float32 on a CPU where bfloat16 is slow. Raises InputError if the device cannot be used."""
    check_device(device)
    if dtype is None:
        slow = device.startswith("cpu") and not has_fast_bfloat16()
        dtype = "float32" if slow else "bfloat16"
    return dtype


def choose_training_dtype(device: str, dtype: str | None) -> str:
    """Return the name of the dtype in which to train, or to score a trained drafter. It is the
    dtype that `choose_dtype` returns, except that the default on a CPU is float32."""
    if dtype is None and device.startswith("cpu"):
        dtype = "float32"
    return choose_dtype(device, dtype)
