"""The bookkeeping of a training run: its log, its evaluations, its checkpoints, going on with it.

A run keeps two files in its folder, besides what the model's own format needs:

    log.jsonl        a line for each update, and one for each evaluation
    checkpoint.pt    weights, optimizers, where in the data the run is, and the run's settings

A run with --save-every 50 that is killed during update 71, and then resumed:

    log.jsonl        has updates 1 to 70
    checkpoint.pt    is that of update 50, and says how long the log was then
    --resume         cuts the log back to update 50, and goes on with update 51

Updates 51 to 70 are done a second time and come out the same, because everything that is drawn
depends only on the seed, the place in the data, and the number of the update.
"""
from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Collection, Iterable

import torch
from torch import nn
from tqdm import tqdm

from plumbing.errors import InputError, input_errors
from plumbing.files import atomic_write, checksum
from plumbing.processes import StopSignals, all_reduce, rank, say, wait_for_all

MODEL_SUFFIXES = {".safetensors", ".json", ".jinja"}


def begin_or_resume(out: Path, resume: bool) -> bool:
    """Return whether to go on with the run in a folder. Raises InputError if the folder holds a run
    or a model, and a new run would overwrite it."""
    has_checkpoint = (out / "checkpoint.pt").exists()
    has_model = any(out.glob("*.safetensors"))  # perhaps in shards
    if has_checkpoint and not resume:
        raise InputError(f"{out} holds a run: --resume goes on with it, else choose another folder")
    if has_model and not has_checkpoint:
        raise InputError(f"{out} holds a model but no checkpoint: choose another folder")
    if resume and not has_checkpoint:
        say(f"{out} holds no run to resume: a new one begins")
    wait_for_all()  # before the first of them writes into the folder
    return has_checkpoint


@dataclass
class Journal:
    """Records a training run in the folder `out`. Under torchrun only process 0 writes.

    Use it in a `with`, and call `record` after each update. It logs, evaluates and saves when it is
    time to, and stops the run after Ctrl-C or SIGTERM. `done` and `position` say where to begin.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    evaluate: Callable[[], dict]  # returns what to log
    save_model: Callable[[], None]  # writes the model as other programs read it
    out: Path
    updates: int  # of the whole run
    eval_every: int  # updates
    save_every: int
    settings: dict  # plain values; a run with other ones would be another run
    resumes: bool  # whether to go on from the checkpoint
    may_differ: Collection[str] = ()  # settings that may change when a run is resumed
    done: int = 0  # updates
    position: int = 0  # in the data, after them

    def __post_init__(self):
        """Raises InputError if the checkpoint is damaged, or is of another run."""
        self.device = next(self.model.parameters()).device
        self.log_path = self.out / "log.jsonl"
        self.checkpoint_path = self.out / "checkpoint.pt"
        if self.resumes:
            self.load()
        elif rank() == 0:
            with atomic_write(self.log_path) as part:
                part.touch()
            self.save()  # so that a run that is killed early can be resumed, too
        self.stop = StopSignals("stopping after this update, or evaluation")
        self.progress = tqdm(
            initial=self.done, total=self.updates, unit=" updates", disable=rank() > 0
        )
        self.began = time.perf_counter()  # when the current update began

    def __enter__(self) -> None:
        self.stop.__enter__()

    def __exit__(self, *_) -> None:
        self.progress.close()
        self.stop.__exit__()

    def record(self, done: int, measured: dict, tokens: int, position: int = 0) -> None:
        """Record an update: its number, what was measured, how many tokens it read, and the
        position in the data after it. Ends the program after Ctrl-C or SIGTERM."""
        self.done = done
        self.position = position
        is_last = done == self.updates
        if rank() == 0:
            # A GPU may still be working on the update: .item() waits for it.
            torch.zeros((), device=self.device).item()
            speed = tokens / (time.perf_counter() - self.began)
            self.progress.update()
            self.progress.set_postfix_str(f"loss {measured['loss']:.3f}, {speed:.0f} tokens/s")
            self.log(measured | {"tokens_per_second": speed})
            if done % self.eval_every == 0 or is_last:
                scores = self.evaluate()
                self.log(scores)
                show(scores, done)
        # Each process asks all of them at every update, so that all stop at the same one.
        stop = torch.tensor(float(self.stop.received is not None), device=self.device)
        all_reduce(stop)
        interrupted = bool(stop) and not is_last
        if rank() == 0 and (done % self.save_every == 0 or is_last or interrupted):
            self.save_model()  # before the checkpoint, which says that it is there
            self.save()
        if interrupted:
            self.progress.close()  # which would overwrite the line
            say(f"saved at {done}; go on with --resume")
            wait_for_all()  # until process 0 has saved
            self.stop.exit()
        self.began = time.perf_counter()

    def log(self, record: dict) -> None:
        with open(self.log_path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"update": self.done} | record) + "\n")

    def save(self) -> None:
        """Write everything that --resume needs to one file, completely or not at all."""
        state = {
            "update": self.done,
            "position": self.position,
            "log_bytes": self.log_path.stat().st_size,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "settings": self.settings,
        }
        with atomic_write(self.checkpoint_path) as part, open(part, "wb") as file:
            torch.save(state, file)

    def load(self) -> None:
        """Go back to the checkpoint. Raises InputError."""
        state = read_checkpoint(self.out)
        check_settings(state["settings"], self.settings, self.may_differ, self.out)
        with input_errors(f"{self.checkpoint_path}: does not fit this model", RuntimeError):
            self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        if rank() == 0:
            with open(self.log_path, "ab") as file:
                # (min, so that a log that was deleted is not filled with zeros.)
                file.truncate(min(file.tell(), state["log_bytes"]))
        self.done = state["update"]
        self.position = state["position"]
        if self.done >= self.updates:
            say(f"the run in {self.out} has its {self.done} updates already")


def read_checkpoint(out: Path) -> dict:
    """Return the checkpoint of the run in a folder. Raises InputError."""
    path = out / "checkpoint.pt"
    with input_errors(f"{path}: not a readable checkpoint", Exception):  # there are many kinds
        state = torch.load(path, map_location="cpu")
    if "settings" not in state:
        raise InputError(
            f"{path} was made by an earlier version of this program, which alone can go on with "
            "it: choose another folder"
        )
    return state


def read_settings(out: Path) -> dict:
    """Return the settings of the run in a folder, none if there is no run. Raises InputError."""
    return read_checkpoint(out)["settings"] if (out / "checkpoint.pt").exists() else {}


def check_settings(saved: dict, wanted: dict, may_differ: Collection[str], out: Path) -> None:
    """Raises InputError if a run that is to be resumed was made with other settings. It names all
    that differ."""
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


def model_files(path: Path) -> list[Path]:
    """Return what a model is read from: a .gguf file, or files of a Hugging Face directory."""
    if path.is_file():
        return [path]
    # (A toy target's folder also holds its text and its training run.)
    return sorted(file for file in path.iterdir() if file.suffix in MODEL_SUFFIXES)


def fingerprint(files: Iterable[str | Path]) -> str:
    """Return a checksum of the contents of some files. Where they lie does not matter."""
    checksums = [checksum(file) for file in files]
    return hashlib.sha256(" ".join(checksums).encode()).hexdigest()[:16]


def read_log(out: str | Path) -> list[dict]:
    """Return what a run has logged."""
    lines = Path(out, "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def show(scores: dict, update: int) -> None:
    """Print an evaluation for a person to read."""
    lines = [f"update {update}: held-out loss {scores['held_out_loss']:.3f}"]
    if "depth_accuracy" in scores:  # of a drafter
        lines.append(
            f"  KL {scores['held_out_kl']:.3f}, implied acceptance length "
            f"{scores['implied_acceptance_length']:.2f}, and how often drafts are right, by depth:"
        )
        for depth, accuracy in enumerate(scores["depth_accuracy"], 1):
            lines.append(f"  {depth}  {accuracy:4.0%}  {'█' * round(40 * accuracy)}")
    say("\n".join(lines))
