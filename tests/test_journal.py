"""Claims about trainings: whatever interrupts them, they can be resumed, and end the same."""
import io
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT
from tiny_target import (
    counting,
    error_of,
    flags,
    losses,
    make_tiny_target,
    train_with,
    write,
)

from app import training
from plumbing.errors import InputError
from plumbing.files import fingerprint_files, fingerprint_model
from plumbing.journal import Journal, lock_folder, read_log

LONG = ["--updates", 8, "--save-every", 2, "--eval-every", 3, "--lr", 1e-3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def command(tiny):
    """train.py's command line on the tiny target and its data, in this process."""
    return lambda *arguments: train_with(*flags(tiny, *arguments))


def log_of(out: Path) -> list[dict]:
    """A training's log, without what depends on the clock."""
    records = read_log(out)
    for record in records:
        record.pop("tokens_per_second", None)
    return records


def assert_same(a: Path, b: Path) -> None:
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert log_of(a) == log_of(b)
    assert not list(a.glob("*.part"))


class Run(NamedTuple):
    out: Path
    told: str  # on stderr


@pytest.fixture(scope="module")
def long_run(tmp_path_factory, command) -> Run:
    out = tmp_path_factory.mktemp("undisturbed")
    with redirect_stderr(io.StringIO()) as told:
        command("--out", out, *LONG)
    return Run(out, told.getvalue())


@pytest.fixture(scope="module")
def undisturbed(long_run) -> Path:
    return long_run.out


def test_a_training_tells_what_to_expect_its_progress_and_what_to_do_next(tiny, long_run):
    out, told = long_run
    assert "8 updates: a drafter needs hundreds" in told
    assert "| 8/8 [" in told
    assert "update 3: held-out loss" in told
    accuracy = read_log(out)[-1]["depth_accuracy"]
    assert f"right drafts by depth {accuracy[0]:.0%} " in told
    where, worth = told.splitlines()[-2:]
    next_command = f"python speculate.py --model {tiny} --drafter {out}"
    assert where == f"the drafter is in {out}: {next_command}"
    assert "a pass of the target yields about" in worth


# --- Killed, or full ---


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    """Start the process from which `background` forks others, before it is needed: its imports take
    most of a process's start. (This one cannot be forked: it has threads.)"""
    multiprocessing.set_forkserver_preload(["app.training"])
    multiprocessing.forkserver.ensure_running()


def background(monkeypatch, tiny: Path, *arguments) -> multiprocessing.Process:
    """train.py's command line in another process, which can be killed."""
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(sys, "argv", ["train.py", *flags(tiny, *arguments)])
    script = (str(ROOT / "train.py"), None, "__main__")
    process = context.Process(target=runpy.run_path, args=script)
    process.start()
    return process


def test_a_training_that_is_killed_and_resumed_ends_as_if_it_had_not_been(
    tmp_path, tiny, command, undisturbed, monkeypatch
):
    log = tmp_path / "log.jsonl"
    for lines in (3, 7):
        process = background(monkeypatch, tiny, "--out", tmp_path, *LONG, "--resume")
        while process.is_alive() and not (log.exists() and log.read_text().count("\n") >= lines):
            time.sleep(0.001)
        process.kill()
        process.join()
    command("--out", tmp_path, *LONG, "--resume")
    assert_same(tmp_path, undisturbed)


@pytest.mark.parametrize("owner, name, call", [
    (training, "evaluate", 2),
    (training, "compute_gradients", 5),
    (torch, "save", 4),
    (os, "replace", 1),  # no checkpoint
    (os, "replace", 2),  # no weights
    (os, "replace", 3),  # weights, no config.json
    (os, "replace", 4),  # a model, but the checkpoint is of update 0
    (os, "replace", 11),  # the last log line, but neither model nor checkpoint of it
    (os, "replace", 13),  # the finished model, but no checkpoint of it
])
def test_a_training_can_be_resumed_after_dying_anywhere(
    tmp_path, command, undisturbed, owner, name, call
):
    """Before the `call`-th call of a function: amid a training, at every step of saving."""
    original = getattr(owner, name)
    calls = itertools.count(1)

    def fatal(*arguments, **keywords):
        if next(calls) == call:
            raise SystemError("killed")
        return original(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemError):
        patch.setattr(owner, name, fatal)
        command("--out", tmp_path, *LONG)
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"update": 3')  # what was being written
    (tmp_path / "checkpoint.pt.part").write_bytes(b"half")
    command("--out", tmp_path, *LONG, "--resume", "--json")
    assert_same(tmp_path, undisturbed)


@pytest.mark.parametrize("limit, why", [
    (60_000, "checkpoint.pt cannot"), (1_000, "too large")  # the latter: the log
])
def test_a_full_disk_is_an_error_and_leaves_what_was_there(
    tmp_path, command, capsys, limit, why
):
    command("--out", tmp_path, "--updates", 4)
    names = set(tmp_path.iterdir())
    checkpoint = (tmp_path / "checkpoint.pt").read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # it stands in for the disk
    try:
        assert why in error_of(command, capsys, "--out", tmp_path, "--updates", 6, "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert set(tmp_path.iterdir()) == names
    assert (tmp_path / "checkpoint.pt").read_bytes() == checkpoint


# --- Two in one folder ---


def test_a_folder_belongs_to_one_training_until_it_ends(
    tmp_path, tiny, command, capsys, monkeypatch
):
    choices = ["--out", tmp_path, "--updates", 100_000, "--eval-every", 1]
    process = background(monkeypatch, tiny, *choices)
    while not (tmp_path / "model.safetensors").exists():
        time.sleep(0.01)
    error = error_of(command, capsys, *choices, "--resume")
    assert f"another training is at work in {tmp_path}" in error
    process.kill()
    process.join()
    done = torch.load(tmp_path / "checkpoint.pt")["update"]
    command(*choices, "--updates", done + 1, "--resume")
    assert len(losses(tmp_path)) == done + 1


def test_a_training_that_began_meanwhile_is_not_overwritten(tmp_path, undisturbed):
    """Meanwhile: after a second one found the folder empty, and before it could lock it."""
    out = shutil.copytree(undisturbed, tmp_path / "out")
    with lock_folder(out), pytest.raises(InputError, match="holds a training"):
        Journal(out, {}, torch.optim.AdamW([torch.zeros(1)]), lambda: None, {}).begin()
    assert_same(out, undisturbed)


# --- Asked to stop ---


def send_signals(patch, at_update: int, *signals: signal.Signals) -> None:
    """Send signals to this process during an update."""
    original = training.compute_gradients
    calls = itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == at_update:
            for number in signals:
                os.kill(os.getpid(), number)
        return original(*arguments)

    patch.setattr(training, "compute_gradients", interrupted)


@pytest.mark.parametrize("signals, status", [
    ([signal.SIGINT], 130),
    ([signal.SIGTERM], 143),  # Slurm, Kubernetes, `timeout`
    ([signal.SIGTERM, signal.SIGTERM], 143),  # Slurm, to torchrun and to what it started
    ([signal.SIGHUP], 129),  # the terminal was closed
])
def test_a_signal_finishes_the_update_saves_and_says_how_to_go_on(
    tmp_path, command, undisturbed, capfd, signals, status
):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        send_signals(patch, 3, *signals)  # update 3 is also evaluated
        command("--out", tmp_path, *LONG)
    told = capfd.readouterr().err
    assert end.value.code == status
    assert "stopping after this update" in told
    assert told.splitlines()[-1] == "saved at 3; go on with --resume"
    command("--out", tmp_path, *LONG, "--resume")
    assert "going on with update 4 of 8\n" in capfd.readouterr().err
    assert_same(tmp_path, undisturbed)


def test_a_second_ctrl_c_ends_a_training_at_once_and_says_what_is_saved(
    tmp_path, command, undisturbed, capfd
):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        send_signals(patch, 3, signal.SIGINT, signal.SIGINT)
        command("--out", tmp_path, *LONG)
    assert end.value.code == 130
    assert "what is saved is update 2" in capfd.readouterr().err
    assert torch.load(tmp_path / "checkpoint.pt")["update"] == 2
    command("--out", tmp_path, *LONG, "--resume")
    assert_same(tmp_path, undisturbed)


def test_three_processes_train_as_one_does_and_stop_together(tmp_path, tiny, command):
    """The last of them has no share of a batch of two. SIGTERM reaches torchrun alone."""
    choices = ["--eval-every", 2, "--batch-size", 2, "--save-every", 1000]
    three = tmp_path / "three"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=3", ROOT / "train.py"]
    process = subprocess.Popen(
        [*torchrun, *flags(tiny, *choices, "--updates", 100_000, "--out", three)],
        stderr=subprocess.PIPE,
        text=True,
    )
    log = three / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 6):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate()
    saved = torch.load(three / "checkpoint.pt")
    assert f"saved at {saved['update']}; go on with --resume" in told
    assert told.count("12 conversations") == 1  # they speak with one voice
    command(*choices, "--updates", saved["update"], "--out", tmp_path / "one")
    alone = torch.load(tmp_path / "one" / "checkpoint.pt")
    torch.testing.assert_close(saved["model"], alone["model"], atol=1e-5, rtol=1e-5)
    assert losses(three) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


# --- Going on ---


def test_what_a_resumed_training_is_not_told_again_is_as_it_was(tmp_path, command, undisturbed):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        send_signals(patch, 3, signal.SIGINT)
        command("--out", tmp_path, *LONG)
    train_with("--out", tmp_path, "--resume", "--device", "cpu")
    assert_same(tmp_path, undisturbed)


def test_resume_knows_model_and_data_by_their_contents_and_not_by_their_place(
    tmp_path, tiny, command, capsys
):
    model = shutil.copytree(tiny, tmp_path / "model")
    data = write(tmp_path / "data.jsonl", *counting(12))
    out = tmp_path / "out"
    command("--model", model, "--data", data, "--out", out, "--updates", 2)
    model = model.rename(tmp_path / "model-elsewhere")
    data = data.rename(tmp_path / "data-elsewhere")
    choices = ["--model", model, "--data", data, "--out", out, "--updates", 3, "--resume"]
    command(*choices)
    assert len(losses(out)) == 3
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    data.write_text(data.read_text().replace("Thanks", "Thanke", 1))  # of the same length
    error = error_of(command, capsys, *choices, "--lr", 0.5, "--seed", 1)
    for name in ("model checksum", "data checksum", "lr 3e-05, not 0.5", "seed 0, not 1"):
        assert name in error  # all at once


def test_a_mistyped_folder_to_resume_is_mentioned(tmp_path, command, capsys):
    command("--out", tmp_path / "mistyped", "--updates", 1, "--resume")
    assert "mistyped holds no training to resume: a new one begins" in capsys.readouterr().err


def test_a_training_whose_log_was_deleted_goes_on_with_a_new_one(
    tmp_path, command, capsys, undisturbed
):
    out = shutil.copytree(undisturbed, tmp_path / "out")
    (out / "log.jsonl").unlink()
    command("--out", out, *LONG, "--updates", 10, "--resume", "--json")
    assert json.loads(capsys.readouterr().out)["update"] == 10
    assert len(losses(out)) == 2


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path, command, capsys):
    torch.save({"update": 3, "arguments": {"lr": 1.0}}, tmp_path / "checkpoint.pt")
    error = error_of(command, capsys, "--out", tmp_path, "--resume")
    assert "made by an earlier version" in error


@pytest.fixture(scope="module")
def files(tmp_path_factory, undisturbed) -> Path:
    """A folder with a training, a damaged one, and one whose checkpoint is gone."""
    path = tmp_path_factory.mktemp("files")
    (path / "shards").mkdir()
    (path / "shards" / "model-00001-of-00002.safetensors").touch()
    for name in ("run", "damaged", "gone"):
        shutil.copytree(undisturbed, path / name)
    checkpoint = (path / "run" / "checkpoint.pt").read_bytes()
    (path / "damaged" / "checkpoint.pt").write_bytes(checkpoint[:-1000])
    (path / "gone" / "checkpoint.pt").unlink()
    write(path / "file")
    return path


@pytest.mark.parametrize("choices, why", [
    ("--out run", "holds a training: --resume goes on"),
    ("--out run --resume --lr 1", "run has lr 0.001, not 1.0"),
    ("--out run --resume --schedule cosine --updates 9", "updates 8, not 9"),
    ("--out gone --resume", "holds a model but no checkpoint"),
    ("--out shards", "shards holds a model"),
    ("--out damaged --resume", "not a readable checkpoint"),
    ("--out file/out", "file is not a folder"),
    (f"--out {'x' * 300}", "file name too long"),
])
def test_a_folder_that_cannot_be_used_is_an_error_and_stays_as_it_is(
    files, command, capsys, monkeypatch, choices, why
):
    monkeypatch.chdir(files)
    before = {path: path.is_file() and path.read_bytes() for path in files.rglob("*")}
    assert why in error_of(command, capsys, "--out", "out", *LONG, *choices.split())
    assert {path: path.is_file() and path.read_bytes() for path in files.rglob("*")} == before


# --- Files ---


def test_paths_may_have_any_letters_whatever_the_locale(tmp_path, tiny, command):
    data = write(tmp_path / "dätä.jsonl", *counting(12))
    out = tmp_path / "läuft"
    choices = ["--data", data, "--out", out]
    command(*choices, "--updates", 1)
    again = [sys.executable, ROOT / "train.py", *flags(tiny, *choices, "--updates", 2, "--resume")]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(again, env=os.environ | ascii_only, check=True)
    assert len(losses(out)) == 2


def test_files_are_known_again_by_their_contents_and_order_whatever_they_are_called(tmp_path):
    for name, text in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / name).write_text(text)
    a, b, c = (tmp_path / name for name in "abc")
    assert fingerprint_files([a, b]) == fingerprint_files([c, b]) != fingerprint_files([b, a])


def test_a_model_is_known_again_by_the_files_that_it_is_read_from(tmp_path):
    for name in ("config.json", "model.safetensors", "chat_template.jinja"):
        (tmp_path / name).write_text("a")
    before = fingerprint_model(tmp_path)
    (tmp_path / "log.txt").write_text("a")
    assert fingerprint_model(tmp_path) == before
    (tmp_path / "chat_template.jinja").write_text("b")
    assert fingerprint_model(tmp_path) != before
    weights = tmp_path / "model.safetensors"
    assert fingerprint_model(weights) == fingerprint_files([weights])
