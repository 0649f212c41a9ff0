"""A finished drafter is scored as while it was trained, and by really drafting."""
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_models import new_drafter
from tiny_target import counting, error_of, make_tiny_target, write

from app.evaluation import evaluate as evaluate_in_one_pass
from app.exact import ExactVerifier
from app.loading import load_drafter, load_model, save_drafter
from experiments import evaluate
from llama import Llama, Sampling
from moa import DraftLimits, DraftState
from plumbing.conversations import Conversations, TokenizedConversation
from plumbing.errors import run_command
from plumbing.tokenizer import load_tokenizer
from train import TrainConfig


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(tiny) -> Llama:
    return load_model(tiny)


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory, target) -> Path:
    path = tmp_path_factory.mktemp("drafter")
    save_drafter(new_drafter(target, target_layer_inference=3, likeness=0.9), path, torch.float32)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "held_out.jsonl", *counting(3))


def command(*arguments) -> None:
    """The program, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate.py", "--device", "cpu", *map(str, arguments)])
        run_command(evaluate.main)


@pytest.mark.parametrize("choices", [
    {},
    {"target_layer_inference": 1},
    {"target_layer_inference": 3, "likeness": 1.0},  # it is always right
])
def test_by_drafting_scores_what_is_right_of_chains_drafted_one_by_one(target, choices):
    """Against chains that are drafted and verified one by one, each from the text's beginning."""
    drafter = new_drafter(target, **choices)
    tokens = torch.randint(256, (65,))
    sequence = TokenizedConversation(tokens, torch.arange(65) >= 5)
    tried = Counter()
    right = Counter()
    for start in range(5, 65 - 8, 8):
        text = tokens[:start].tolist()
        root = int(tokens[start])
        state = DraftState(drafter, 65, Sampling())
        verifier = ExactVerifier(target, drafter, 65, Sampling())
        state.append_verified(verifier.prefill(text).update)
        draft = state.draft(root, DraftLimits(depth=8))
        with_draft = torch.tensor([text + draft.tokens])
        choices_after = target(with_draft)[0, start:].argmax(-1).tolist()
        for depth, (token, choice) in enumerate(zip(draft.tokens[1:], choices_after)):
            tried[depth] += 1
            right[depth] += token == choice
            if token != choice:
                break
    scores = evaluate.evaluate_drafting(drafter, [sequence])
    expected = [right[depth] / tried[depth] for depth in range(8) if tried[depth]]
    assert scores["depth_accuracy"] == expected
    assert tried[0] == 7
    assert choices.get("likeness") is None or expected == [1.0] * 8


def test_the_program_prints_the_scores_that_training_would_log(
    tiny, target, drafter_folder, data, capsys
):
    flags = [drafter_folder, "--model", tiny, "--data", data, "--seq-len", 200]
    command(*flags)
    conversations = Conversations([data], load_tokenizer(tiny), 200)
    sequences = [conversations[index] for index in range(3)]
    drafter = load_drafter(drafter_folder, target)
    expected = evaluate_in_one_pass(drafter, sequences, TrainConfig())
    assert json.loads(capsys.readouterr().out) == expected
    command(*flags, "--by-drafting")
    drafted = json.loads(capsys.readouterr().out)
    assert 1 <= len(drafted["depth_accuracy"]) <= 8
    assert drafted["implied_acceptance_length"] > 1


def test_by_default_a_conversation_is_read_up_to_a_context_of_less_than_2048_tokens(
    tiny, drafter_folder, data, capsys
):
    flags = [drafter_folder, "--model", tiny, "--data", data]
    command(*flags)
    by_default = capsys.readouterr().out
    command(*flags, "--seq-len", 256)
    assert by_default == capsys.readouterr().out


@pytest.mark.parametrize("flags, why", [
    (["nowhere"], "nowhere: no such folder"),
    (["--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (["--seq-len", "100000"], "context is 256"),
    (["--seq-len", "16"], "no answer within"),
    (["--by-drafting", "--seq-len", "40"], "no answer is long enough to draft in"),
])
def test_bad_input_ends_in_one_line(tiny, drafter_folder, data, capsys, flags, why):
    folder = [drafter_folder] if flags[0].startswith("--") else []
    files = ["--model", tiny, "--data", data, "--seq-len", 200]
    assert why in error_of(command, capsys, *folder, *files, *flags)
