"""Claims about `python -m experiments.toy`: a target made from the Python that runs the tests."""
import inspect
import itertools
import json
import signal
import socket
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from app.loading import load_model
from experiments import toy
from experiments.prompts import read_prompt_file
from llama import GenerationConfig, generate
from plumbing.conversations import Conversations
from plumbing.errors import run_command
from plumbing.records import read_messages
from plumbing.tokenizer import Tokenizer, load_tokenizer

SIZES = ["--layers", "2", "--width", "64", "--vocabulary", "300"]
UPDATES = ["--updates", "6", "--eval-every", "1", "--save-every", "2"]
WINDOW = 128
HELD_OUT = 20  # functions


# --- What the tests share ---


@pytest.fixture(scope="module")
def make(library):
    """The command, on some hundred short functions."""
    short = [signature for signature, source in library.items() if len(source) < 120]
    functions = {signature: library[signature] for signature in short[:500]}

    def run(folder: Path, *flags: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(toy, "library_functions", lambda: functions)
            patch.setattr(toy, "HELD_OUT_FUNCTIONS", HELD_OUT)
            patch.setattr(toy, "WINDOW", WINDOW)
            patch.setattr(sys, "argv", ["toy", str(folder), *SIZES, *UPDATES, *flags])
            run_command(toy.main)

    return run


@pytest.fixture(scope="module")
def made(make, tmp_path_factory) -> Path:
    """The folder of a small toy target."""
    folder = tmp_path_factory.mktemp("toy") / "made"
    make(folder)
    return folder


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_clock(path: Path) -> list[dict]:
    """A log but for what depends on the clock."""
    records = read_lines(path)
    for record in records:
        record.pop("tokens_per_second", None)
    return records


def text_of(tokenizer: Tokenizer, messages: list[dict]) -> torch.Tensor:
    """A conversation as a target is trained on it, (T)."""
    return torch.tensor(tokenizer.chat(messages, add_generation_prompt=False))


def error_of(capsys, run, *arguments) -> str:
    """The one line that a wrong command ends with."""
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


# --- The text ---


def test_the_library_has_thousands_of_functions_each_under_its_signature(library):
    assert len(library) > 5000
    for signature, source in library.items():
        name, _, parameters = signature.partition("(")
        assert source.lstrip().startswith(name)
        assert parameters.endswith("):")
        assert len(source) <= toy.FUNCTION_CHARACTERS
    fill = library["def fill(text, width=70, **kwargs):"]
    assert fill == inspect.getsource(textwrap.fill).rstrip()


def test_no_function_that_is_held_out_is_trained_on(made):
    training = read_lines(made / "functions.jsonl")
    held_out = read_lines(made / "held_out.jsonl")
    assert len(training) == 500 - HELD_OUT
    assert len(held_out) == HELD_OUT
    for role in range(2):  # question, answer
        trained = {line["data"][role] for line in training}
        kept = {line["data"][role] for line in held_out}
        assert not trained & kept


def test_the_same_seed_writes_the_same_text_and_another_one_does_not(make, made, tmp_path):
    for seed in ("0", "1"):
        make(tmp_path / seed, "--seed", seed, "--updates", "1")
    for name in ("functions.jsonl", "held_out.jsonl", "tokenizer.json"):
        assert (tmp_path / "0" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "1" / name).read_bytes() != (made / name).read_bytes()


def test_training_and_the_benchmark_read_the_functions(made):
    tokenizer = load_tokenizer(made)
    path = made / "held_out.jsonl"
    sequence = Conversations([str(path)], tokenizer, 512)[0]
    question, answer = read_lines(path)[0]["data"]
    assert tokenizer.decode(sequence.tokens[sequence.answer].tolist()) == answer
    assert read_prompt_file(path)[0].turns == [question]


# --- The target ---


def test_a_toy_target_is_saved_in_bfloat16_loads_and_chats(made):
    weights = load_file(made / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert all(name.startswith("model.") for name in weights)  # Hugging Face's; the head is tied
    model = load_model(made)
    tokenizer = load_tokenizer(made)
    text = "def größe(self):\n\treturn '<|im_end|>'\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.stop_ids == {tokenizer.backend.token_to_id("<|im_end|>")}
    prompt = tokenizer.chat([{"role": "user", "content": "def close(self):"}])
    config = GenerationConfig(8, stop_ids=frozenset(tokenizer.stop_ids))
    tokens = list(generate(model, prompt, config))
    assert len(tokens) == 8 or tokens[-1] in tokenizer.stop_ids
    assert max(prompt + tokens) < model.config.vocab_size == 300


def test_the_held_out_loss_falls_to_the_one_that_the_saved_target_has(made):
    log = read_lines(made / "log.jsonl")
    losses = [record["held_out_loss"] for record in log if "held_out_loss" in record]
    assert len([record for record in log if "loss" in record]) == 6
    assert len(losses) == 6
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    model = load_model(made)
    tokenizer = load_tokenizer(made)
    texts = []
    for line in read_lines(made / "held_out.jsonl"):
        messages = read_messages(line)
        texts.append(text_of(tokenizer, messages)[:WINDOW])
    text = torch.cat(texts)
    expected = []
    for first in range(0, len(text) - WINDOW, WINDOW):
        window = text[first:first + WINDOW + 1]
        expected.append(F.cross_entropy(model(window[None, :-1])[0], window[1:]))
    assert len(expected) > 5
    assert losses[-1] == pytest.approx(np.mean(expected), rel=1e-3)  # saved in bfloat16


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_and_resumes_to_the_same_weights(make, made, tmp_path, number):
    steps = []

    def stop(*_) -> None:
        steps.append(1)
        if len(steps) == 8:  # of three optimizers: in the third update
            signal.raise_signal(number)

    hook = register_optimizer_step_pre_hook(stop)
    with pytest.raises(SystemExit) as stopped:
        make(tmp_path)
    hook.remove()
    assert stopped.value.code == 128 + number
    assert torch.load(tmp_path / "checkpoint.pt")["update"] == 3
    make(tmp_path, "--resume")
    resumed = load_file(tmp_path / "model.safetensors")
    whole = load_file(made / "model.safetensors")
    torch.testing.assert_close(resumed, whole, atol=0, rtol=0)
    assert without_clock(tmp_path / "log.jsonl") == without_clock(made / "log.jsonl")


# --- Bad input ---


def test_a_finished_target_is_not_overwritten(make, made, capsys):
    before = {path: path.read_bytes() for path in made.iterdir()}
    assert f"{made} holds a training" in error_of(capsys, make, made, "--seed", "1")
    assert {path: path.read_bytes() for path in made.iterdir()} == before


@pytest.mark.parametrize("flags, why", [
    (["--device", "nowhere"], "nowhere"),
    (["--width", "96"], "multiple of 64"),
    (["--vocabulary", "257"], "at least 258"),
])
def test_bad_input_is_refused_before_anything_is_written(make, tmp_path, capsys, flags, why):
    assert why in error_of(capsys, make, tmp_path / "toy", *flags)
    assert not (tmp_path / "toy").exists()


def test_a_resumed_run_refuses_other_settings(make, made, capsys):
    error = error_of(capsys, make, made, "--resume", "--layers", "3", "--seed", "1")
    assert "layers 2, not 3" in error and "seed 0, not 1" in error


def test_resume_alone_reads_the_other_settings_from_the_checkpoint(made, monkeypatch):
    before = (made / "log.jsonl").read_bytes()
    monkeypatch.setattr(sys, "argv", ["toy", str(made), "--resume"])
    toy.main()  # which has nothing left to do
    assert (made / "log.jsonl").read_bytes() == before


# --- The one that is shipped ---


def test_the_shipped_toy_target_loads_anywhere_without_a_network_and_knows_the_library(
    library, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "socket", None)
    model = load_model("toy")
    tokenizer = load_tokenizer("toy")
    losses = []
    for signature in sorted(library)[::len(library) // 30]:
        question = {"role": "user", "content": signature}
        answer = {"role": "assistant", "content": library[signature]}
        text = text_of(tokenizer, [question, answer])
        logits = model(text[None, :-1])[0]
        losses.append(F.cross_entropy(logits, text[1:], reduction="none"))
    assert torch.cat(losses).mean() < 3  # ln 2048 = 7.6 would be chance, this one has 1.8
