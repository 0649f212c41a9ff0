"""Several processes that train one drafter together (app/training.py), each on a GPU of its own.

Without torchrun there is one process, and nothing of this has an effect. But
`torchrun --nproc-per-node 4 train.py ...` starts four processes. Every process draws the same batch
and computes the gradients of its share of the batch. The gradients are then summed over all
processes, so the sum is the same (up to rounding) for any number of processes. With two processes
and a batch of five, process 0 has sequences 0, 2 and 4, and process 1 has sequences 1 and 3.

`all_reduce` is a meeting: it returns once all processes have called it. Therefore all processes
must make the same calls in the same order, even a process that has nothing to add; otherwise they
wait for each other forever.

Process 0 alone writes files and prints messages (`say`).
"""
from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from plumbing.devices import check_device
from plumbing.terminal import PICTURES


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_processes(device: str) -> str:
    """Connect this process to the others, if torchrun started it. Returns the device of this
    process: each process has a GPU of its own, if `device` is a GPU. Raises InputError."""
    if not dist.is_torchelastic_launched():
        return device
    backend = "gloo"
    if device.startswith("cuda"):
        backend = "nccl"
        device = f"cuda:{dist.get_node_local_rank()}"
        check_device(device)  # a plain error if there are fewer GPUs than processes
        torch.cuda.set_device(device)
    # While process 0 evaluates, all other processes wait, perhaps for longer than the default
    # timeout, which is ten minutes on GPUs.
    dist.init_process_group(backend, timeout=timedelta(hours=2))
    return device


def wait_for_all() -> None:
    """Return once all processes have called it."""
    if dist.is_initialized():
        dist.barrier()


def leave_processes() -> None:
    """Wait until all processes are done, then disconnect."""
    if dist.is_initialized():
        wait_for_all()
        # End gloo's threads before Python frees tensors that they may still hold, or they crash.
        dist.destroy_process_group()


def all_reduce(tensor: Tensor) -> None:
    """Replace a tensor by its sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def true_in_any(condition: bool, device: torch.device) -> bool:
    """Return whether a condition is true in at least one process. All processes must call this
    function, and all get the same answer."""
    count = torch.tensor(float(condition), device=device)
    all_reduce(count)
    return count.item() > 0


def say(message: str) -> None:
    """Print to stderr, from process 0 only, above any progress bar."""
    if rank() == 0:
        tqdm.write(message.translate(PICTURES), file=sys.stderr)
