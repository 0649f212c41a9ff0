"""This process, the others of the same run, and how a person stops them.

`torchrun --nproc-per-node 4 train.py ...` starts four processes that train one drafter together.
Every process draws the same batch and computes the gradients of its share. Then all of them sum
up their gradients, so the sum is the same (up to rounding) for any number of processes. With two
processes and a batch of five, process 0 has sequences 0, 2 and 4, and process 1 has 1 and 3.

`all_reduce` is a meeting: it returns once all processes have called it. So all of them must make
the same calls in the same order, even one that has nothing to add; otherwise they wait for each
other forever. Without torchrun there is one process, and nothing to wait for.
"""
from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from plumbing.flags import check_device

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_processes(device: str) -> str:
    """Connect this process to the others, if torchrun started it. Returns its device: each process
    has a GPU of its own, if there are any. Raises InputError."""
    if not dist.is_torchelastic_launched():
        return device
    backend = "gloo"
    if device.startswith("cuda"):
        backend = "nccl"
        device = f"cuda:{dist.get_node_local_rank()}"
        check_device(device)  # a plain error if there are fewer GPUs than processes
        torch.cuda.set_device(device)
    # The others wait while process 0 evaluates, perhaps longer than the usual ten minutes.
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


def say(message: str) -> None:
    """Print to stderr, once for all processes, above any progress bar."""
    if rank() == 0:
        tqdm.write(message, file=sys.stderr)


class StopSignals:
    """Lets a program finish what it is doing when it is asked to stop, by Ctrl-C or by SIGTERM
    (which Slurm, Kubernetes and `timeout` send).

        with StopSignals("stopping after this update") as stop:
            for batch in batches:
                ...
                if stop.received:
                    save()
                    stop.exit()

    A second Ctrl-C ends the program at once. A second SIGTERM does not: Slurm sends one to
    torchrun and to each of its processes, and torchrun passes its own on to them.
    """

    def __init__(self, message: str):
        self.message = message
        self.received: int | None = None  # the signal's number

    def __enter__(self) -> StopSignals:
        self.previous = {number: signal.signal(number, self.receive) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number: int, _) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # (A signal may come amid any other write: os.write does not mind.)
        os.write(2, f"\n{self.message} (Ctrl-C again: at once)\n".encode())

    def exit(self) -> None:
        """End with the status that a shell gives to a program that a signal ended."""
        # Under torchrun another process may have received it.
        raise SystemExit(128 + (self.received or signal.SIGINT))
