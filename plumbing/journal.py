"""The log and the checkpoint of a training run, and how a run goes on after an interruption.

A run keeps two files in its folder, beside the model that other programs read:

    log.jsonl        a line for each update, and one for each evaluation
    checkpoint.pt    weights, optimizers, where in the data the run is, and the run's settings

A run that saves every 50 updates is killed during update 71, and then resumed:

    log.jsonl        has updates 1 to 70
    checkpoint.pt    is that of update 50, and says how long the log was then
    --resume         cuts the log back to update 50, and goes on with update 51

Updates 51 to 70 are done a second time. On the same machine they come out the same, because
everything that is drawn depends only on the seed, the place in the data, and the number of the
update. Settings on which the result depends must stay the same. The checkpoint therefore holds
them, with checksums of the model and of the data, and `resume` compares them.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Collection, Iterable, NoReturn

import torch
from torch import nn

from plumbing.errors import InputError, input_errors
from plumbing.files import atomic_write, checksum
from plumbing.processes import rank, say, wait_for_all
from plumbing.signals import StopSignals


def find_run(out: Path, resume: bool) -> bool:
    """Check that a run may begin or be resumed in a folder. Returns whether there is one to resume.
    Raises InputError if the folder holds a run or a model that a new run would overwrite."""
    has_checkpoint = (out / "checkpoint.pt").exists()
    has_model = any(out.glob("*.safetensors"))  # perhaps in shards
    if has_checkpoint and not resume:
        raise InputError(f"{out} holds a run: --resume goes on with it, else choose another folder")
    if has_model and not has_checkpoint:
        raise InputError(f"{out} holds a model but no checkpoint: choose another folder")
    if resume and not has_checkpoint:
        say(f"{out} holds no run to resume: a new one begins")
    return has_checkpoint


@dataclass
class Journal:
    """Writes the log and the checkpoints of a run into the folder `out`.

        journal = Journal(out, model, optimizers, save_model, settings)
        journal.begin()  # or journal.resume(...)
        for update in range(journal.done, updates):
            ...
            journal.log(update + 1, {"loss": loss})
            if (update + 1) % 50 == 0:
                journal.save(update + 1, position)

    If there are several processes, every process must make these calls; only process 0 writes.
    """

    out: Path
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    save_model: Callable[[], None]  # writes the model as other programs read it
    settings: dict  # plain values, which `resume` compares with those of the checkpoint
    done: int = 0  # how many updates were done at the checkpoint
    position: int = 0  # the place in the data at the checkpoint

    @property
    def log_path(self) -> Path:
        return self.out / "log.jsonl"

    def begin(self) -> None:
        """Begin a run: write an empty log, and a checkpoint from which even a run that is killed
        early can be resumed. Raises InputError if the folder cannot be written."""
        wait_for_all()  # in every process, `find_run` must return before there are new files
        if rank() == 0:
            with atomic_write(self.log_path) as part:
                part.write_text("")
            self.write_checkpoint()

    def resume(self, updates: int, may_differ: Collection[str]) -> None:
        """Go back to the state and the log of the checkpoint.

        updates: how many updates the run is to have in the end. may_differ: the names of settings
        that may differ from those in the checkpoint. Raises InputError if the checkpoint is
        damaged, or belongs to a different run.
        """
        state = read_checkpoint(self.out)
        check_settings(state["settings"], self.settings, may_differ, self.out)
        with input_errors(f"{self.out}/checkpoint.pt: does not fit this model", RuntimeError):
            self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        if rank() == 0:
            with open(self.log_path, "ab") as file:
                # A log that was deleted is empty here, and must not be filled up with zeros.
                file.truncate(min(file.tell(), state["log_bytes"]))
        self.done = state["update"]
        self.position = state["position"]
        if self.done >= updates:
            say(f"the run in {self.out} has its {self.done} updates already")

    def log(self, update: int, record: dict) -> None:
        """Add a line about an update, counted from 1."""
        if rank() == 0:
            with open(self.log_path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"update": update} | record) + "\n")

    def save(self, done: int, position: int) -> None:
        """Save the model and a checkpoint, after `done` updates, at a position in the data."""
        self.done = done
        self.position = position
        if rank() == 0:
            # The model comes first. A run that is killed in between resumes from the checkpoint
            # before this one, and saves the model again. In the other order, the resumed run might
            # find that all updates are done, and leave an old model.
            self.save_model()
            self.write_checkpoint()

    def write_checkpoint(self) -> None:
        """Write everything that `resume` needs to one file, completely or not at all."""
        state = {
            "update": self.done,
            "position": self.position,
            "log_bytes": self.log_path.stat().st_size,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "settings": self.settings,
        }
        with atomic_write(self.out / "checkpoint.pt") as part, open(part, "wb") as file:
            torch.save(state, file)


def end_stopped_run(done: int, signals: StopSignals) -> NoReturn:
    """End the program after a signal has stopped a run, which was saved after `done` updates."""
    say(f"saved at {done}; go on with --resume")
    wait_for_all()  # until process 0 has saved
    signals.end_program()


# --- Checkpoints, and the settings in them ---


def read_checkpoint(out: Path) -> dict:
    """Return the checkpoint of the run in a folder. Raises InputError."""
    path = out / "checkpoint.pt"
    # torch.load raises errors of many kinds for a damaged file.
    with input_errors(f"{path}: not a readable checkpoint", Exception):
        state = torch.load(path, map_location="cpu")
    if "settings" not in state:
        raise InputError(f"{path} was made by an earlier version: choose another folder")
    return state


def read_settings(out: Path) -> dict:
    """Return the settings of the run in a folder, or {} if there is no run. Raises InputError.

    A command line needs the settings before there is a model into which `Journal.resume` could load
    the rest. The checkpoint is therefore read twice.
    """
    if not (out / "checkpoint.pt").exists():
        return {}
    return read_checkpoint(out)["settings"]


def check_settings(saved: dict, wanted: dict, may_differ: Collection[str], out: Path) -> None:
    """Check that a run is resumed with the settings that it was begun with. Otherwise raise an
    InputError that names all differences."""
    differences = []
    for name, value in saved.items():
        now = wanted.get(name)
        if name not in may_differ and now != value:
            differences.append(f"{name.replace('_', ' ')} {value}, not {now}")
    if differences:
        raise InputError(
            f"resume with the same settings, or choose another folder: the run in {out} has "
            + "; ".join(differences)
        )


def fingerprint_files(files: Iterable[str | Path]) -> str:
    """Return a checksum of the contents of several files, in this order. Their names do not matter.

    The checksum is cut to 16 digits, because people read it in messages.
    """
    checksums = [checksum(file) for file in files]
    return hashlib.sha256(" ".join(checksums).encode()).hexdigest()[:16]


def fingerprint_model(path: Path) -> str:
    """Return a checksum of a .gguf file, or of those files of a Hugging Face folder from which a
    model and its tokenizer may be read."""
    if path.is_file():
        return fingerprint_files([path])
    # The folder may hold other files. A toy target's folder also holds the text on which the target
    # was trained, and the log and the checkpoint of that training.
    suffixes = (".safetensors", ".json", ".jinja")
    files = [file for file in path.iterdir() if file.suffix in suffixes]
    return fingerprint_files(sorted(files))


# --- The log ---


def read_log(out: str | Path) -> list[dict]:
    """Return the records that a run has logged."""
    lines = Path(out, "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
