"""The log and the checkpoint of a training, and how it goes on after an interruption.

app/training.py and experiments/toy.py keep two files in the folder of a training, beside the model
that other programs read:

    log.jsonl        a line for each update, and one for each evaluation
    checkpoint.pt    weights, optimizer, and the settings

A training that saves every 50 updates is killed during update 71, and then resumed:

    log.jsonl        has updates 1 to 70
    checkpoint.pt    is that of update 50, and says how long the log was then
    --resume         cuts the log back to update 50, and goes on with update 51

Updates 51 to 70 are done a second time. On the same machine they come out the same, because
everything that is drawn depends only on the seed and the number of the update. Settings on which
the result depends must stay the same. The checkpoint therefore holds them, with checksums of the
model and of the data, and `resume` compares them.
"""
from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Collection, Iterator, NoReturn

import torch
from torch import Tensor

from plumbing.errors import InputError, input_errors
from plumbing.files import atomic_write
from plumbing.processes import rank, say, wait_for_all
from plumbing.signals import StopSignals

LOG = "log.jsonl"
CHECKPOINT = "checkpoint.pt"


@dataclass
class Journal:
    """Writes the log and the checkpoints of a training into the folder `out`.

        with lock_folder(out):
            journal = Journal(out, parameters, optimizer, save_model, settings)
            journal.begin()  # or journal.resume(...)
            for update in range(journal.done, updates):
                ...
                journal.log(update + 1, {"loss": loss})
                if (update + 1) % 50 == 0:
                    journal.save(update + 1)

    If there are several processes, every process must make these calls; only process 0 writes.
    """

    out: Path
    parameters: dict[str, Tensor]  # what is trained, by name
    optimizer: torch.optim.Optimizer
    save_model: Callable[[], None]  # writes the model as other programs read it
    settings: dict  # plain values, which `resume` compares with those of the checkpoint
    done: int = 0  # how many updates were done at the checkpoint

    def begin(self) -> None:
        """Begin a training: write an empty log, and a checkpoint from which even a training that is
        killed early can be resumed. Raises InputError if one has begun here meanwhile."""
        wait_for_all()  # in every process, `find_run` must return before there are new files
        if rank() == 0:
            find_run(self.out, resume=False)  # again: now the folder is locked
            (self.out / LOG).write_text("")
            self.write_checkpoint()

    def resume(self, updates: int, may_differ: Collection[str]) -> None:
        """Go back to the state and the log of the checkpoint.

        updates: how many updates the training is to have in the end. may_differ: the names of
        settings that may differ from those in the checkpoint. Raises InputError if the checkpoint
        is damaged, or belongs to a different training.
        """
        state = read_checkpoint(self.out)
        check_settings(state["settings"], self.settings, may_differ, self.out)
        for name, parameter in self.parameters.items():
            parameter.data.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        if rank() == 0:
            # A log that was deleted is empty here, and must not be filled up with zeros.
            log = self.out / LOG
            os.truncate(log, min(log.stat().st_size, state["log_bytes"]))
        self.done = state["update"]
        if self.done >= updates:
            say(f"the training in {self.out} has its {self.done} updates already")
        else:
            say(f"going on with update {self.done + 1} of {updates}")

    def log(self, update: int, record: dict) -> None:
        """Add a line about an update, counted from 1."""
        if rank() == 0:
            with open(self.out / LOG, "a", encoding="utf-8") as file:
                file.write(json.dumps({"update": update} | record) + "\n")

    def save(self, done: int) -> None:
        """Save the model and a checkpoint, after `done` updates."""
        self.done = done
        if rank() == 0:
            # The model comes first. A training that is killed in between resumes from the
            # checkpoint before this one, and saves the model again. In the other order, it might
            # find that all updates are done, and leave an old model.
            self.save_model()
            self.write_checkpoint()

    def write_checkpoint(self) -> None:
        """Write everything that `resume` needs to one file, completely or not at all."""
        state = {
            "update": self.done,
            "log_bytes": (self.out / LOG).stat().st_size,
            "model": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "settings": self.settings,
        }
        with atomic_write(self.out / CHECKPOINT) as part, open(part, "wb") as file:
            torch.save(state, file)


# --- Before a training: its folder ---


def find_run(out: Path, resume: bool) -> bool:
    """Check that a training may begin or be resumed in a folder. Returns whether there is one to
    resume. Raises InputError if the folder holds a training or a model that a new one would
    overwrite, or cannot be written."""
    has_checkpoint = (out / CHECKPOINT).exists()
    if has_checkpoint and not resume:
        raise InputError(
            f"{out} holds a training: --resume goes on with it, else choose another folder"
        )
    if not has_checkpoint and any(out.glob("*.safetensors")):
        raise InputError(f"{out} holds a model but no checkpoint: choose another folder")
    existing = next(path for path in (out, *out.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"{out} cannot be written: {existing} is not a folder that you may write")
    if resume and not has_checkpoint:
        say(f"{out} holds no training to resume: a new one begins")
    return has_checkpoint


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Make a folder, with a log in it, and keep other trainings out of it within the block. Raises
    InputError if one is at work there.

    The lock is on the log. It ends with this process, whatever ends it. Where there are several
    processes, process 0 holds the lock for all.
    """
    if rank() > 0:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOG, "a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another training is at work in {out}: choose another folder")
        yield


# --- Reading ---


def read_checkpoint(out: Path) -> dict:
    """Return the checkpoint of the training in a folder. Raises InputError."""
    path = out / CHECKPOINT
    # torch.load raises errors of many kinds for a damaged file.
    with input_errors(f"{path}: not a readable checkpoint", Exception):
        state = torch.load(path, map_location="cpu")
        if "settings" not in state:
            raise ValueError("made by an earlier version")
        return state


def read_settings(out: Path) -> dict:
    """Return the settings of the training in a folder, or {} if there is none. Raises InputError.

    A command line needs the settings before there is a model into which `Journal.resume` could load
    the rest. The checkpoint is therefore read twice.
    """
    if not (out / CHECKPOINT).exists():
        return {}
    return read_checkpoint(out)["settings"]


def check_settings(saved: dict, wanted: dict, may_differ: Collection[str], out: Path) -> None:
    """Check that a training is resumed with the settings that it was begun with. Otherwise raise an
    InputError that names all differences."""
    differences = []
    for name, value in saved.items():
        now = wanted.get(name)
        if name not in may_differ and now != value:
            differences.append(f"{name.replace('_', ' ')} {value}, not {now}")
    if differences:
        raise InputError(
            f"resume with the same settings, or choose another folder: the training in {out} has "
            + "; ".join(differences)
        )


def read_log(out: str | Path) -> list[dict]:
    """Return the records that a training has logged."""
    lines = Path(out, LOG).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# --- After a training was stopped ---


def end_stopped_run(done: int, signals: StopSignals) -> NoReturn:
    """End the program after a signal has stopped a training, which was saved after `done`
    updates."""
    say(f"saved at {done}; go on with --resume")
    wait_for_all()  # until process 0 has saved
    signals.end_program()
