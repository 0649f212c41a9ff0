"""Claims about training: horizons, losses, data as it is published, runs that survive anything."""
import gzip
import io
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import xml.etree.ElementTree
import zipfile
from argparse import Namespace
from collections import Counter
from contextlib import redirect_stderr
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN, ROOT
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer, new_drafter
from torch.optim.optimizer import register_optimizer_step_pre_hook

import llama
import moa
import speculate
import train

CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Döner?"},
    {"role": "assistant", "content": "Gladly, döner."},
]
STOP = 257  # the tiny target's stop token
LONG = ["--updates", 8, "--save-every", 2, "--eval-every", 3, "--lr", 1e-3]  # a run of 8 updates


# --- What the tests share ---


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random Llama as Hugging Face would write it, and data. Its tokens are bytes, and about
    every twelfth that it writes is a stop token."""
    path = byte_tokenizer(tmp_path_factory.mktemp("tiny"), ["<|im_start|>", "<|im_end|>"])
    sizes = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    write(path / "config.json", {"model_type": "llama", **sizes})
    write(path / "generation_config.json", {"eos_token_id": STOP})
    torch.manual_seed(0)
    model = llama.Llama(llama.Config(**sizes, head_dim=8))
    model.lm_head.weight.normal_(std=0.45)
    model.embed_tokens.weight[:, 0] = 4  # a constant, which the head makes the stop token's logit
    model.lm_head.weight[STOP, 0] = 1.8
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name if name.startswith("lm_head") else f"model.{name}"] = parameter
    save_file(tensors, path / "model.safetensors")
    write(path / "data.jsonl", *counting(12))
    return path


def counting(count: int) -> list[dict]:
    """Conversations of which no two are alike."""
    texts = [", ".join(map(str, range(1, n))) for n in range(4, 4 + count)]
    return [{"data": [f"Count: {text[:9]}", text, "Thanks!", "Any time."]} for text in texts]


@pytest.fixture(scope="module")
def target(tiny) -> llama.Llama:
    return llama.load_model(tiny)


@pytest.fixture(scope="module")
def tokenizer(tiny) -> llama.Tokenizer:
    return llama.load_tokenizer(tiny)


@pytest.fixture(scope="module")
def command(tiny):
    """train.py's command line on the tiny target and its data, in this process."""

    def run(*arguments) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train.py", *flags(tiny, *arguments)])
            llama.run_command(train.main)

    return run


def flags(tiny: Path, *arguments) -> list[str]:
    sizes = "--device cpu --seq-len 96 --batch-size 3 --warmup 2 --mlp 32 --lsa-mlp 32"
    files = ["--model", str(tiny), "--data", str(tiny / "data.jsonl")]
    return [*files, *sizes.split(), *map(str, arguments)]


def error_of(command, capsys, *arguments) -> str:
    """The error of a command: one line, the last on stderr, and exit status 2."""
    with pytest.raises(SystemExit) as end:
        command(*arguments)
    message = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2
    assert message.startswith("train.py: error: ")
    return message


def write(path: Path, *lines) -> Path:
    """A file of lines, which are text or JSON."""
    with open(path, "w") as file:
        for line in lines:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    return path


def read_log(out: Path) -> list[dict]:
    """A run's log, without what depends on the clock."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("tokens_per_second", None)
    return records


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_log(out) if "loss" in record]


def assert_same_run(a: Path, b: Path) -> None:
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert read_log(a) == read_log(b)
    assert not list(a.glob("*.part"))


def random_drafter(target: llama.Llama, **choices) -> moa.Drafter:
    """A drafter to train."""
    return new_drafter(target, **choices).requires_grad_(True)


def arguments(**changes) -> Namespace:
    """The paper's."""
    defaults = {
        "seed": 0,
        "horizons": 1,
        "run_length": [5, 15],
        "micro_batch_size": 1,
        "dtype": "float32",
        "kl_weight": 0.1,
        "feature_weight": 1.0,
        "memory_weight": 0.0,
        "updates": 100,
    }
    return Namespace(**defaults | changes)


def sequences(*sizes: tuple[int, int]) -> list[train.Sequence]:
    """Random ones, each of a prompt and an answer of these sizes."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for prompt, answer in sizes:
        tokens = torch.randint(256, (prompt + answer,), generator=generator)
        made.append(train.Sequence(tokens, torch.arange(prompt + answer) >= prompt))
    return made


def example(sequence: train.Sequence, *runs: tuple[int, int]) -> train.Example:
    """A batch of one sequence, cut into runs by each (length, phase)."""
    horizons = [train.run_horizon(sequence.answer, length, phase) for length, phase in runs]
    stacked = torch.stack(horizons, dim=-1)
    one = train.Example(sequence.tokens, sequence.answer, stacked)
    return train.collate([one], "cpu")


def losses_of(
    drafter: moa.Drafter, sequence: train.Sequence, *runs: tuple[int, int], **changes
) -> torch.Tensor:
    """Loss, KL and Smooth L1, summed over positions."""
    return train.distill(drafter, example(sequence, *runs), arguments(**changes)).parts


def encode(tokenizer: llama.Tokenizer, path: Path, seq_len: int, *records) -> train.Conversations:
    return train.Conversations([str(write(path, *records))], tokenizer, seq_len)


# --- Horizons and losses ---


def test_a_query_reads_memory_up_to_the_token_before_its_run():
    answer = torch.tensor([0] * 3 + [1] * 12 + [0] * 2 + [1] * 4).bool()
    horizon = train.run_horizon(answer, length=5, phase=2)  # an answer's first run is 5 - 2 long
    first_answer = [2] * 3 + [5] * 5 + [10] * 4
    assert horizon.tolist() == [0, 1, 2] + first_answer + [15, 16] + [16] * 3 + [19]
    nothing_before = train.run_horizon(torch.ones(6, dtype=torch.bool), length=4, phase=1)
    assert nothing_before.tolist() == [-1] * 3 + [2] * 3


def test_the_picture_in_the_file_is_what_run_horizon_does():
    horizons = train.run_horizon(torch.arange(13) >= 4, length=4, phase=0).tolist()
    row = re.compile(r"#  +(\d+)  +0 \.\. (\d+)  +0 \.\. (\d+)  +(\d+)  +(\d+)\b")
    rows = row.findall((ROOT / "train.py").read_text())
    assert [int(numbers[0]) for numbers in rows] == [4, 5, 6, 7, 8]
    for numbers in rows:
        query, reads, memory, drafts, depth = map(int, numbers)
        assert (reads, memory, drafts) == (query, horizons[query], query + 1)
        assert depth == query - horizons[query]


def test_every_depth_is_trained_at_every_position_of_an_answer():
    answer = torch.arange(40) >= 4
    for length in range(5, 16):
        depths = []
        for phase in range(length):
            depth = torch.arange(40) - train.run_horizon(answer, length, phase)
            assert not depth[:4].any()  # a prompt sees itself
            starts = (depth[4:] == 1).nonzero()[:, 0]
            assert starts[0] == 0
            assert starts[1] == length - phase
            assert (starts[1:].diff() == length).all()
            depths.append(depth)
        for i in range(36):
            reached = {int(depth[4 + i]) for depth in depths}
            assert reached == set(range(1, min(length, i + 1) + 1))


def test_runs_of_one_see_the_memory_just_before_and_endless_runs_the_prompts_only():
    (sequence,) = sequences((4, 30))
    (just_before,) = train.draw_examples([sequence], 0, arguments(run_length=[1, 1]))
    (unbounded,) = train.draw_examples([sequence], 0, arguments(run_length=[10**9, 10**9]))
    assert just_before.horizons[:, 0].tolist() == [0, 1, 2, 3, *range(3, 33)]
    assert unbounded.horizons[:, 0].tolist() == [0, 1, 2] + [3] * 31


def test_only_what_is_in_an_answer_and_predicts_what_is_in_it_is_trained():
    answer = torch.tensor([0] * 3 + [1] * 12 + [0] * 2 + [1] * 4).bool()
    assert train.loss_mask(answer).nonzero()[:, 0].tolist() == [*range(3, 14), *range(17, 20)]


@pytest.mark.parametrize("N", [0, 1])
def test_losses_are_the_authors(N):
    """Averages over the response. Their KL lacks the target's own entropy, which is constant."""
    folder = GOLDEN / f"moa-tiny-n{N}"
    target = llama.load_model(folder / "target")
    drafter = moa.load_drafter(folder / "drafter", target)
    golden = load_file(folder / "expected.safetensors")
    expected = json.loads((folder / "expected.json").read_text())
    response = golden["response_mask"][0].bool()
    # One token more, so that every position of the response is trained.
    tokens = F.pad(golden["input_ids"][0], (0, 1))
    answer = F.pad(response, (0, 1), value=True)
    parts = losses_of(drafter, train.Sequence(tokens, answer), (len(answer), 0))
    loss, kl, hidden = parts / response.sum()
    distribution = torch.distributions.Categorical(logits=golden["target_logits"][0, response])
    entropy = distribution.entropy().mean()
    features = expected["feature_loss"]
    if N > 0:
        features = (features + expected["prev_feature_loss"]) / 2
    assert kl + entropy == pytest.approx(expected["forward_KL"], abs=1e-4)
    assert hidden == pytest.approx(features, abs=1e-4)
    assert loss + 0.1 * entropy == pytest.approx(expected["loss"], abs=1e-4)


def test_the_kl_in_chunks_and_its_gradient_are_those_of_the_plain_formula(monkeypatch):
    features = torch.randn(10, 16, requires_grad=True)
    hidden = torch.randn(10, 16)
    head = torch.randn(40, 16)
    log_q = (features @ head.T).log_softmax(-1)
    log_p = (hidden @ head.T).log_softmax(-1)
    plain = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close(train.kl_divergence(features, hidden, head), plain)
    (gradient,) = torch.autograd.grad(plain, features)
    for chunk in (1, 6, 10, 256):
        monkeypatch.setattr(train, "LOGITS", chunk * len(head))
        loss = train.chunked_kl(features, hidden, head)
        torch.testing.assert_close(loss, plain)
        (ours,) = torch.autograd.grad(3 * loss, features)
        torch.testing.assert_close(ours, 3 * gradient)


def test_padding_and_micro_batches_change_nothing(target):
    batch = sequences((5, 12), (20, 31), (3, 4))
    results = []
    for size in (1, 2, 3):
        drafter = random_drafter(target)
        args = arguments(micro_batch_size=size, horizons=2, memory_weight=0.3)
        means = train.compute_gradients(drafter, batch, 25, args)
        results.append([torch.tensor(means)] + [p.grad for p in drafter.parameters()])
    # The plain mean over all trained positions, each sequence by itself.
    drafter = random_drafter(target)
    alone = []
    for one in train.draw_examples(batch, 25, args):
        alone.append(train.distill(drafter, train.collate([one], "cpu"), args))
    count = sum(len(result.final) for result in alone)
    (sum(result.loss for result in alone) / count).backward()
    means = sum(result.parts for result in alone) / count
    expected = [means] + [p.grad for p in drafter.parameters()]
    for result in results:
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-4)


def test_batches_padded_as_on_a_gpu_to_few_shapes_give_the_same_gradients(target, monkeypatch):
    padded_length = train.padded_length
    assert [padded_length(size, "cpu") for size in (63, 64, 65)] == [63, 64, 65]
    assert [padded_length(size, "cuda") for size in (63, 64, 65)] == [64, 64, 128]
    batch = sequences((5, 12), (20, 31), (3, 4))
    results = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(train, "padded_length", lambda size, _: padded_length(size, device))
        drafter = random_drafter(target)
        means = train.compute_gradients(drafter, batch, 25, arguments(horizons=2))
        results.append([torch.tensor(means)] + [p.grad for p in drafter.parameters()])
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("N", [0, 1])
def test_the_losses_of_many_cuts_are_the_mean_over_single_ones(target, N):
    drafter = random_drafter(target, target_layer_inference=N)
    (sequence,) = sequences((20, 31))
    runs = [(5, 0), (7, 3), (11, 10)]
    results = []
    for calls in ([runs], [[run] for run in runs]):
        parts = torch.zeros(3)
        drafter.zero_grad()
        for call in calls:
            args = arguments(memory_weight=0.5)
            result = train.distill(drafter, example(sequence, *call), args)
            (result.loss / len(calls)).backward()
            parts += result.parts / len(calls)
        results.append([parts] + [p.grad.clone() for p in drafter.parameters()])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("choices", [
    {}, {"target_layer_inference": 1}, {"draft_vocabulary": tuple(range(0, 258, 2))}
])
def test_the_memory_weight_adds_the_same_loss_on_memories(target, choices):
    drafter = random_drafter(target, **choices)
    (sequence,) = sequences((9, 30))
    with_runs = example(sequence, (5, 2))
    plain = train.distill(drafter, with_runs, arguments())
    weighted = train.distill(drafter, with_runs, arguments(memory_weight=0.25))
    states = train.target_pass(target, sequence.tokens[None], drafter.N)
    trained = train.loss_mask(sequence.answer)
    memory = drafter.build_memory(states.kv, states.final)[:, trained]
    final = states.final[:, trained]
    head = drafter.head.weight
    log_q = (memory @ head.T).log_softmax(-1)
    log_p = (final @ head.T).log_softmax(-1)
    kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    added = 0.25 * (0.1 * kl + F.smooth_l1_loss(memory, final) * final.shape[1])
    torch.testing.assert_close(weighted.loss, plain.loss + added)
    torch.testing.assert_close(weighted.parts[1:], plain.parts[1:])
    of_memory = [*drafter.layer_self_attention.parameters(), *drafter.Ekv2E.parameters()]
    ours = torch.autograd.grad(weighted.loss - plain.loss, of_memory)
    expected = torch.autograd.grad(added, of_memory)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-3)


# --- Data ---


def test_an_answer_is_the_assistants_tokens_and_their_stop_token_up_to_seq_len(
    tmp_path, tokenizer
):
    record = {"messages": CHAT}
    sequence = encode(tokenizer, tmp_path / "a", 200, record)[0]
    cut = encode(tokenizer, tmp_path / "a", 50, record)[0]
    assert encode(tokenizer, tmp_path / "a", 20, record)[0] is None  # no answer so far
    assert sequence.tokens.tolist() == tokenizer.chat(CHAT, add_generation_prompt=False)
    answers = []
    for message in CHAT[1::2]:
        answers += [*tokenizer.encode(message["content"]), STOP]
    assert sequence.tokens[sequence.answer].tolist() == answers
    assert int(sequence.answer.int().diff().clamp(min=0).sum()) == 2  # two stretches
    assert torch.equal(cut.tokens, sequence.tokens[:50])
    assert torch.equal(cut.answer, sequence.answer[:50])


def messages_of(record: dict) -> list[dict]:
    return train.read_messages(json.dumps(record).encode())


def test_four_formats_of_one_conversation_are_read_alike():
    question, answer = [message["content"] for message in CHAT[:2]]
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    for record in (
        {"messages": CHAT[:2]},
        {"data": [question, answer]},
        {"conversations": turns},
        {"instruction": question, "output": answer},
        {"instruction": question, "input": "", "output": answer},
    ):
        assert messages_of(record) == CHAT[:2]
    alpaca = messages_of({"instruction": "What is", "input": "2 + 2?", "output": answer})
    assert alpaca[0]["content"] == "What is\n\n2 + 2?"


@pytest.mark.parametrize("name, role", [
    ("human", "user"), ("user", "user"), ("gpt", "assistant"), ("chatgpt", "assistant"),
    ("assistant", "assistant"), ("bing", "assistant"), ("bard", "assistant"),
    ("system", "system"),
])
def test_roles_are_known_by_the_names_that_data_sets_give_them(name, role):
    for record in (
        {"conversations": [{"from": name, "value": "a"}]},
        {"messages": [{"role": name, "content": "a"}]},
    ):
        assert messages_of(record) == [{"role": role, "content": "a"}]


def test_answers_before_any_question_and_all_from_an_empty_turn_on_are_cut_and_counted(
    tmp_path, tokenizer, capsys
):
    system = {"role": "system", "content": ""}  # which may be empty
    early = {"role": "assistant", "content": "Hello!"}
    empty = {"role": "user", "content": " \n"}
    data = encode(
        tokenizer,
        tmp_path / "chats",
        200,
        {"messages": [early, *CHAT]},
        {"messages": [system, early, *CHAT[:2]]},
        {"messages": [*CHAT[:2], empty, *CHAT[2:]]},
        {"messages": [CHAT[0], {"role": "assistant", "content": ""}, *CHAT[2:]]},
    )
    kept = [CHAT, [system, *CHAT[:2]], CHAT[:2]]
    assert len(data.places) == 3
    for i, messages in enumerate(kept):
        assert data[i].tokens.tolist() == tokenizer.chat(messages, add_generation_prompt=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("line 4: no answer")
    assert lines[1:] == [
        "3 conversations, 1 records skipped",
        "  2 answers before any question left out",
        "  1 cut at an empty turn",  # and another that is skipped
        "  1 skipped: no answer",
    ]


BROKEN = {  # a line, and what is wrong with it
    "{half": "not valid JSON: Expecting",
    '{"a":' + "[" * 100_000: "recursion",
    '"text"': "neither messages",
    '{"data": 3}': "neither messages",
    '{"messages": []}': "no answer",
    '{"messages": [3]}': "an unusable turn",
    '{"data": ["a", 3]}': "an unusable turn",
    '{"data": ["a question"]}': "no answer",
    '{"conversations": [{"from": "tool", "value": ""}, 3]}': "needs a role",
    '{"conversations": [{"from": ["user"], "value": ""}]}': "an unusable turn",
    '{"instruction": "a", "output": null}': "an unusable turn",
    '{"data": ["\\ud800", "b"]}': "not valid UTF-8",
}
REASONS = [
    "  2 skipped: not valid JSON",
    "  2 skipped: neither messages, data or conversations nor instruction and output",
    "  2 skipped: no answer",
    "  6 skipped: an unusable turn",
]


def test_a_broken_record_is_skipped_five_are_named_and_all_are_counted_by_reason(
    tmp_path, tokenizer, capsys, monkeypatch
):
    path = write(tmp_path / "a", *counting(3), *BROKEN, "", *counting(1))
    data = train.Conversations([str(path)], tokenizer, 96)
    assert len(data.places) == 4
    told = capsys.readouterr().err.splitlines()
    assert told[5:] == [f"4 conversations, {len(BROKEN)} records skipped", *REASONS]
    monkeypatch.setattr(train, "MAX_NAMED", 100)
    train.Conversations([str(path)], tokenizer, 96)
    named = capsys.readouterr().err.splitlines()[:len(BROKEN)]
    assert named[:5] == told[:5]
    for number, (line, why) in enumerate(zip(named, BROKEN.values()), 4):
        assert line.startswith(f"skipped {path}, line {number}: ")
        assert why in line
        assert len(line) < 500


def test_lines_of_large_files_are_read_where_they_are(tmp_path, tokenizer):
    records = []
    for i in range(1000):  # 10 MB
        records.append({"data": [f"ö{'?' * (i % 9)}", f"answer {i}" + "b" * 10_000]})
    paths = [write(tmp_path / "a", *records[:301], "{"), write(tmp_path / "b", *records[301:])]
    data = train.Conversations(list(map(str, paths)), tokenizer, 96)
    for i in (999, 0, 789, 301, 300, 299):
        tokens = tokenizer.chat(messages_of(records[i]), add_generation_prompt=False)
        assert data[i].tokens.tolist() == tokens[:96]
    tracemalloc.start()
    assert train.Conversations([str(paths[1])], tokenizer, 96)[400]
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_a_json_array_is_read_as_its_records_one_a_line_would_be(tmp_path, tokenizer, capsys):
    records = [{"data": ["Döner?", f"[{i}], \\ü"]} for i in range(5)] + [{"data": 3}]
    path = tmp_path / "array.json"
    text = json.dumps(records, indent=2, ensure_ascii=False)
    path.write_text("\ufeff \n" + text, encoding="utf-8")  # with a byte order mark
    data = train.Conversations([str(path)], tokenizer, 96)
    lines = encode(tokenizer, tmp_path / "lines", 96, *records)
    assert len(data.places) == 5
    for i in range(5):
        assert torch.equal(data[i].tokens, lines[i].tokens)
    named, *_ = capsys.readouterr().err.splitlines()
    assert named.startswith(f"skipped {path}, record 6: neither messages")


def test_the_time_to_read_an_array_grows_with_its_length_only(tmp_path, tokenizer):
    turns = [{"from": "human", "value": "é" * 9}, {"from": "gpt", "value": "an answer " * 100}]
    record = json.dumps({"conversations": turns})
    path = write(tmp_path / "array.json", "[" + ",\n".join([record] * 10_000) + "]")
    began = time.process_time()
    data = train.Conversations([str(path)], tokenizer, 96)
    assert time.process_time() - began < 5  # a fraction of a second; by its square, minutes
    assert len(data.places) == 10_000
    assert torch.equal(data[9_999].tokens, data[0].tokens)


def test_an_epoch_is_a_permutation_and_can_be_gone_on_with_at_any_position():
    def walk(position: int) -> list[int]:
        stream = train.Stream(range(20), np.arange(5, 15), seed=3, position=position)
        drawn = list(itertools.islice(stream, 25 - position))
        assert stream.position == 25
        return drawn

    order = walk(0)
    assert sorted(order[:10]) == list(range(5, 15))
    assert sorted(order[10:20]) == list(range(5, 15))
    assert order[:10] != order[10:20]
    for position in range(25):
        assert walk(position) == order[position:]


def test_one_usable_conversation_is_found_in_every_epoch():
    data = {i: i if i == 7 else None for i in range(10)}
    stream = train.Stream(data, np.arange(10), seed=0)
    for epoch in range(20):
        assert next(iter(stream)) == 7
        assert (stream.position - 1) // 10 == epoch


def test_what_is_held_out_is_never_trained_on(tmp_path, command, monkeypatch):
    seen = {"take_step": set(), "evaluate": set()}

    def watch(name: str, place: int) -> None:
        """Note the sequences, which are the argument at this place."""
        function = getattr(train, name)

        def record(*arguments):
            seen[name].update(tuple(sequence.tokens.tolist()) for sequence in arguments[place])
            return function(*arguments)

        monkeypatch.setattr(train, name, record)

    watch("take_step", 2)
    watch("evaluate", 1)
    command("--out", tmp_path, "--updates", 4)
    assert len(seen["take_step"]) == 11
    assert len(seen["evaluate"]) == 1
    assert not seen["take_step"] & seen["evaluate"]


@pytest.mark.parametrize("count, told", [(9, True), (10, False)])
def test_with_fewer_than_ten_conversations_it_says_that_none_is_held_out(
    tmp_path, command, capsys, count, told
):
    path = write(tmp_path / "data.jsonl", *counting(count))
    command("--data", path, "--out", tmp_path / "out", "--updates", 2, "--eval-every", 1)
    lines = capsys.readouterr().err.splitlines()
    assert sum("is trained on" in line for line in lines) == told


# --- Optimization and evaluation ---


def test_the_papers_recipe_is_the_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "x"])
    args = train.parse_arguments()
    assert (args.kl_weight, args.feature_weight, args.memory_weight) == (0.1, 1.0, 0.0)
    assert (args.lr, args.warmup, args.schedule) == (3e-5, 50, "paper")
    assert (args.run_length, args.horizons, args.tli) == ([5, 15], 1, 0)
    assert (args.batch_size, args.seq_len, train.CLIP) == (32, 2048, 1.0)
    (adamw,) = train.make_optimizers(torch.nn.Linear(2, 2), args.optimizer)
    assert adamw.defaults["betas"] == (0.9, 0.95)
    assert adamw.defaults["weight_decay"] == 0


def test_the_papers_rate_rises_falls_over_the_first_epoch_and_stays():
    args = Namespace(lr=3e-5, schedule="paper", warmup=50, epoch_updates=1050)
    rate = [train.learning_rate(update, args) / 3e-5 for update in range(2000)]
    assert rate[:50] == pytest.approx([20 * (i + 1) / 50 for i in range(50)])
    assert rate[50:1051] == pytest.approx(np.linspace(20, 1, 1001))
    assert rate[1050:] == pytest.approx([1] * 950)


def test_the_papers_rate_rises_for_half_of_an_epoch_that_is_shorter_than_two_warm_ups():
    args = Namespace(lr=1.0, schedule="paper", warmup=50, epoch_updates=10)
    rate = [train.learning_rate(update, args) for update in range(20)]
    assert rate[:5] == pytest.approx([4, 8, 12, 16, 20])
    assert rate[5:11] == pytest.approx(np.linspace(20, 1, 6))
    assert rate[10:] == pytest.approx([1] * 10)


def test_a_cosine_falls_to_nothing():
    args = Namespace(lr=1.0, schedule="cosine", warmup=1, updates=100)
    rates = [train.learning_rate(update, args) for update in (0, 50, 100)]
    assert rates == pytest.approx([1, 0.5, 0])


def test_one_conversation_trains_and_its_gradient_is_clipped(tmp_path, command, monkeypatch):
    path = write(tmp_path / "data.jsonl", "", {"data": ["Count to 4.", "1, 2, 3, 4"]}, "")
    norms = []

    def note_norm(optimizer, *_) -> None:
        gradients = [p.grad for p in optimizer.param_groups[0]["params"]]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    hook = register_optimizer_step_pre_hook(note_norm)
    for clip in (0.01, 1.0):
        monkeypatch.setattr(train, "CLIP", clip)
        command("--data", path, "--out", tmp_path / str(clip), "--updates", 1)
    hook.remove()
    norm = read_log(tmp_path / "1.0")[0]["grad_norm"]
    assert norms == pytest.approx([0.01, min(norm, 1.0)], rel=1e-3)
    assert norms[1] > 0.05


def test_a_gradient_that_is_not_finite_ends_the_run_and_spares_its_checkpoint(
    tmp_path, command, capsys
):
    choices = ["--out", tmp_path, "--updates", 3, "--save-every", 1, "--lr", 1e30]
    assert "update 2: the gradient is not finite" in error_of(command, capsys, *choices)
    assert torch.load(tmp_path / "checkpoint.pt")["update"] == 1


def test_muon_is_for_matrices_and_adamw_for_the_rest(target):
    dimensions = {}
    for made in train.make_optimizers(random_drafter(target), "muon"):
        parameters = made.param_groups[0]["params"]
        dimensions[type(made).__name__] = {parameter.ndim for parameter in parameters}
    assert dimensions == {"Muon": {2}, "AdamW": {1}}


def test_training_lowers_the_loss(tmp_path, command):
    few = write(tmp_path / "few.jsonl", *counting(4))
    recipe = ["--updates", 30, "--lr", 4e-3, "--schedule", "cosine"]
    command("--data", few, "--out", tmp_path / "out", *recipe)
    loss = losses(tmp_path / "out")
    assert np.mean(loss[-3:]) < 0.7 * np.mean(loss[:3])


@pytest.mark.parametrize("choice, expected", [
    ("--tli 1", {"target_layer_inference": 1}),
    ("--no-lsa", {"use_layer_self_attention": False, "use_cross_attention": True}),
    ("--no-ca", {"use_layer_self_attention": True, "use_cross_attention": False}),
    ("--no-lsa --no-ca", {"use_layer_self_attention": False, "use_cross_attention": False}),
    ("--no-lsa --no-ca --no-sa", {"use_cross_attention": False, "use_self_attention": False}),
    ("--draft-vocabulary 999", {"draft_vocabulary": tuple(range(258))}),
    ("--draft-vocabulary 3", {"draft_vocabulary": (11, 220, STOP)}),  # and comma and space
    ("--kv-heads 2 --lsa-heads 2 --horizons 2 --memory-weight 1", {
        "cross_attention_num_key_value_heads": 2, "layer_self_attention_num_attention_heads": 2
    }),
])
def test_every_kind_of_drafter_trains_in_either_type_and_loads(
    tmp_path, command, target, choice, expected
):
    for dtype in ("float32", "bfloat16"):
        command("--out", tmp_path / dtype, "--updates", 3, "--dtype", dtype, *choice.split())
    exact = losses(tmp_path / "float32")
    assert losses(tmp_path / "bfloat16") == pytest.approx(exact, rel=0.05)
    drafter = moa.load_drafter(tmp_path / "float32", target)
    assert expected.items() <= asdict(drafter.config).items()


@pytest.mark.parametrize("vocabulary", [None, tuple(reversed(range(258)))])
def test_a_drafter_that_knows_the_hidden_state_is_always_right(target, vocabulary, monkeypatch):
    """It reuses every layer of the target, and is given what enters them."""
    choices = {"target_layer_inference": 3, "draft_vocabulary": vocabulary}
    oracle = random_drafter(target, **choices)
    monkeypatch.setattr(oracle, "self_attend", lambda tokens: target.embed_tokens(tokens))
    monkeypatch.setattr(oracle, "cross_attend", lambda x, memory, horizon: x)
    batch = sequences((5, 60), (9, 50))
    scores = train.evaluate(oracle, batch, arguments())
    assert scores["depth_accuracy"] == [1.0] * 8
    assert scores["implied_acceptance_length"] == 9
    assert scores["held_out_loss"] == pytest.approx(0, abs=1e-5)
    ordinary = train.evaluate(random_drafter(target), batch, arguments())  # without its gift
    assert ordinary["implied_acceptance_length"] < 4


def test_in_one_pass_only_the_first_draft_of_a_drafter_without_ca_is_scored(target):
    off_policy = random_drafter(target, use_cross_attention=False)
    scores = train.evaluate(off_policy, sequences((5, 60)), arguments())
    assert len(scores["depth_accuracy"]) == 1


def right_but_for(
    monkeypatch, target: llama.Llama, batch: list[train.Sequence], *wrong: tuple[int, int]
) -> moa.Drafter:
    """A drafter that is right but for some (sequence, position)."""
    drafter = random_drafter(target)
    logits = []
    for i, sequence in enumerate(batch):
        states = train.target_pass(target, sequence.tokens[None], N=0)
        truth = target.lm_head(states.final[0])  # (T, V)
        for position in range(len(truth)):
            if (i, position) in wrong:
                truth[position] = -truth[position]
        logits.append(truth[train.loss_mask(sequence.answer)])
    answers = iter(logits)
    monkeypatch.setattr(drafter.head, "logits", lambda features: next(answers))
    return drafter


def test_accuracy_at_a_depth_is_among_runs_that_were_right_before(target, monkeypatch):
    """An answer of three runs, of 8, 8 and 3 queries. Wrong are depths 3 and 4 of the first run and
    depth 6 of the second."""
    batch = sequences((4, 20))
    wrong = [(0, 4 + 2), (0, 4 + 3), (0, 4 + 8 + 5)]
    drafter = right_but_for(monkeypatch, target, batch, *wrong)
    scores = train.evaluate(drafter, batch, arguments())
    assert scores["depth_accuracy"] == pytest.approx([1, 1, 2 / 3, 1, 1, 0])
    assert scores["implied_acceptance_length"] == pytest.approx(1 + 1 + 1 + 2 / 3 * 3)


def test_a_run_that_ends_wrong_says_nothing_about_the_next_conversation(target, monkeypatch):
    """Two answers, of one run of 3 queries and two of 7 and 4. Wrong is the first query of all."""
    batch = sequences((4, 4), (4, 12))
    drafter = right_but_for(monkeypatch, target, batch, (0, 4))
    scores = train.evaluate(drafter, batch, arguments())
    assert scores["depth_accuracy"] == pytest.approx([2 / 3, 1, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("choices", [
    {},
    {"target_layer_inference": 3, "likeness": 1.0},  # it is always right
    {"use_cross_attention": False},
    {"use_cross_attention": False, "use_layer_self_attention": False},
])
def test_by_drafting_scores_what_is_right_of_chains_drafted_one_by_one(target, choices):
    """Against chains that are drafted and verified one by one, each from the text's beginning."""
    drafter = new_drafter(target, **choices)
    (sequence,) = sequences((5, 60))
    tokens = sequence.tokens.tolist()
    tried = Counter()
    right = Counter()
    for start in range(5, 65 - 8, 8):
        state = moa.start_drafting(drafter, 65)
        cache = target.new_cache(65)
        hidden = target.hidden(sequence.tokens[None, :start], cache)
        state.append_verified(drafter.memory_update(tokens[:start], cache, hidden))
        draft = state.draft(tokens[start], moa.TreeConfig(depth=8))
        text = torch.tensor([tokens[:start] + draft.tokens])
        choices_after = target(text)[0, start:].argmax(-1).tolist()
        for depth, (token, choice) in enumerate(zip(draft.tokens[1:], choices_after)):
            tried[depth] += 1
            right[depth] += token == choice
            if token != choice:
                break
    scores = train.evaluate_drafting(drafter, [sequence])
    expected = [right[depth] / tried[depth] for depth in range(8) if tried[depth]]
    assert scores["depth_accuracy"] == expected
    assert tried[0] == 7
    assert choices.get("likeness") is None or expected == [1.0] * 8


# --- Runs: their checkpoints, interruptions and processes ---


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


def test_a_finished_drafter_is_evaluated_as_while_it_was_trained(
    tmp_path, tiny, command, undisturbed, capsys
):
    held_out, *_ = np.random.default_rng(0).permutation(12)
    line = (tiny / "data.jsonl").read_text().splitlines()[held_out]
    path = write(tmp_path / "held_out.jsonl", line)
    command("--evaluate", undisturbed, "--data", path)
    scores = json.loads(capsys.readouterr().out)
    logged = read_log(undisturbed)[-1]
    for name in ("held_out_kl", "held_out_smooth_l1", "depth_accuracy"):
        assert scores[name] == pytest.approx(logged[name], rel=0.01)  # saved in bfloat16
    command("--evaluate", undisturbed, "--data", path, "--by-drafting")
    assert 1 <= len(json.loads(capsys.readouterr().out)["depth_accuracy"]) <= 8


def test_a_run_tells_its_cost_its_progress_and_what_to_do_next(tiny, long_run):
    out, told = long_run
    assert "an update takes about" in told
    assert "8 updates 0:00:" in told
    assert "more than a day" not in told
    assert "update 3: held-out loss" in told
    accuracy = read_log(out)[-1]["depth_accuracy"]
    assert f"  1  {accuracy[0]:4.0%}  {'█' * round(40 * accuracy[0])}\n" in told
    next_command = f"python speculate.py --model {tiny} --drafter {out}"
    assert told.splitlines()[-1] == f"the drafter is in {out}: {next_command}"


def test_where_training_takes_days_a_small_recipe_is_named(target, capsys):
    args = arguments(batch_size=32, micro_batch_size=2, updates=186_000_000)
    train.announce_cost(random_drafter(target), sequences((5, 20), (3, 9), (4, 8)), args)
    assert "README.md, Train a drafter" in capsys.readouterr().err


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    """Start the process from which `background` forks others, before it is needed: its imports take
    most of a process's start. (This one cannot be forked: it has threads.)"""
    multiprocessing.set_forkserver_preload(["train"])
    multiprocessing.forkserver.ensure_running()


def background(monkeypatch, tiny: Path, *arguments) -> multiprocessing.Process:
    """train.py's command line in another process, which can be killed."""
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(sys, "argv", ["train.py", *flags(tiny, *arguments)])
    script = (str(ROOT / "train.py"), None, "__main__")
    process = context.Process(target=runpy.run_path, args=script)
    process.start()
    return process


def test_a_run_that_is_killed_and_resumed_ends_as_if_it_had_not_been(
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
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.parametrize("owner, name, call", [
    (train, "evaluate", 2),
    (train, "compute_gradients", 7),
    (torch, "save", 4),
    (os, "replace", 2),  # no checkpoint
    (os, "replace", 3),  # no weights
    (os, "replace", 4),  # weights, no config.json
    (os, "replace", 5),  # a model, but the checkpoint is of update 0
    (os, "replace", 12),  # the last log line, but neither model nor checkpoint of it
    (os, "replace", 14),  # the finished model, but no checkpoint of it
])
def test_a_run_can_be_resumed_after_dying_anywhere(
    tmp_path, command, undisturbed, owner, name, call
):
    """Before the `call`-th call of a function: amid a run, and at every step of saving."""
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
    assert_same_run(tmp_path, undisturbed)


def press_ctrl_c(patch, at_call: int, times: int) -> None:
    """During the at_call-th call of compute_gradients, the first two of which measure its cost."""
    original = train.compute_gradients
    calls = itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == at_call:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    patch.setattr(train, "compute_gradients", interrupted)


def test_ctrl_c_finishes_the_update_saves_and_says_how_to_go_on(
    tmp_path, command, undisturbed, capfd
):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        press_ctrl_c(patch, at_call=3 + 2, times=1)  # update 3, which is also evaluated
        command("--out", tmp_path, *LONG)
    told = capfd.readouterr().err
    assert end.value.code == 130
    assert "stopping after this update" in told
    assert told.splitlines()[-1] == "saved at 3; go on with --resume"
    command("--out", tmp_path, *LONG, "--resume")
    assert_same_run(tmp_path, undisturbed)


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path, command, undisturbed, capfd):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        press_ctrl_c(patch, at_call=5, times=2)
        command("--out", tmp_path, *LONG)
    assert end.value.code == 130
    assert "saved at" not in capfd.readouterr().err
    assert torch.load(tmp_path / "checkpoint.pt")["update"] == 2
    command("--out", tmp_path, *LONG, "--resume")
    assert_same_run(tmp_path, undisturbed)


def test_a_run_whose_log_was_deleted_goes_on_with_a_new_one(
    tmp_path, command, capsys, undisturbed
):
    out = shutil.copytree(undisturbed, tmp_path / "out")
    (out / "log.jsonl").unlink()
    command("--out", out, *LONG, "--updates", 10, "--resume", "--json")
    assert json.loads(capsys.readouterr().out)["update"] == 10
    assert len(losses(out)) == 2


def test_a_run_is_not_made_longer_by_forgetting_how_long_it_was(tmp_path, command, capsys):
    command("--out", tmp_path, "--updates", 2)
    assert "made with --updates 2, not" in error_of(command, capsys, "--out", tmp_path, "--resume")


def test_resume_knows_its_data_by_their_contents_and_not_by_their_place(
    tmp_path, command, capsys
):
    path = write(tmp_path / "data.jsonl", *counting(12))
    out = tmp_path / "out"
    command("--data", path, "--out", out, "--updates", 2)
    (tmp_path / "elsewhere").mkdir()
    moved = path.rename(tmp_path / "elsewhere" / "data.jsonl")
    choices = ["--data", moved, "--out", out, "--updates", 3, "--resume"]
    command(*choices)
    assert len(losses(out)) == 3
    moved.write_text(moved.read_text().replace("Thanks", "Thanke", 1))  # of the same length
    assert "was made with --data" in error_of(command, capsys, *choices)


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


def test_three_processes_train_as_one_does_and_stop_together(tmp_path, tiny, command):
    """The last of them has no share of a batch of two. Ctrl-C reaches torchrun alone."""
    choices = ["--eval-every", 2, "--horizons", 2, "--batch-size", 2, "--save-every", 1000]
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
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    saved = torch.load(three / "checkpoint.pt")
    assert f"saved at {saved['update']}; go on with --resume" in told
    assert told.count("12 conversations") == 1  # they speak with one voice
    command(*choices, "--updates", saved["update"], "--out", tmp_path / "one")
    alone = torch.load(tmp_path / "one" / "checkpoint.pt")
    torch.testing.assert_close(saved["model"], alone["model"], atol=1e-5, rtol=1e-5)
    assert losses(three) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


# --- Synthesis ---


def written(path: Path) -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in path.read_bytes().splitlines()]


def converse(target, tokenizer, *openings: list[dict], seq_len: int = 200) -> list[list[dict]]:
    """The conversations that begin like this, in the order in which they end."""
    args = Namespace(seq_len=seq_len, batch_size=4, seed=0)
    copies = iter([list(messages) for messages in openings])
    return list(train.converse(target, tokenizer, copies, len(openings), 0, args))


def question(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


class ScriptedBatch:
    """Writes the turns that it is told, one at a time, and notes what it is asked for."""

    def __init__(self, turns: list[list[int]]):
        self.turns = iter(turns)
        self.asked = []
        self.requests = []

    def add_all(self, requests) -> None:
        for key, prompt, config in requests:
            self.asked.append((prompt, config))
            self.requests.append(llama.Request(key, config, None, next(self.turns)))

    def step(self) -> list[llama.Request]:
        ended = self.requests
        self.requests = []
        return ended


def test_a_conversation_takes_turns_and_keeps_an_answer_that_is_cut_short_but_no_question(
    tokenizer, monkeypatch
):
    monkeypatch.setattr(train, "NEXT_TURN", 1.0)
    told = [[*tokenizer.encode(message["content"]), STOP] for message in CHAT]
    cut = tokenizer.encode("It")
    cut_answer = [CHAT[0], {"role": "assistant", "content": "It"}]
    for begun, turns, expected in (
        (0, [*told, [STOP]], [CHAT]),
        (0, [*told, cut], [CHAT]),
        (0, [cut], []),
        (1, [[STOP]], []),
        (1, [cut], [cut_answer]),
    ):
        batch = ScriptedBatch(turns)
        monkeypatch.setattr(train, "Batch", lambda *_: batch)
        assert converse(None, tokenizer, CHAT[:begun]) == expected
        assert len(batch.asked) == len(turns)
        for i, (prompt, config) in enumerate(batch.asked, begun):
            role = ("user", "assistant")[i % 2]
            before = tokenizer.chat(CHAT[:i], add_generation_prompt=False)
            assert prompt == before + tokenizer.opening(role)
            assert len(prompt) + config.max_new_tokens == 200
            assert config.stop_ids == {STOP}
            assert config.temperature in train.TEMPERATURES[role]
    # 31 tokens are left: no room for a question. And none to answer one that is cut.
    for opening, expected in ((CHAT[:1], [CHAT[:2]]), (question("long" * 50), [])):
        batch = ScriptedBatch(told[1:])
        assert converse(None, tokenizer, opening, seq_len=80) == expected


def test_a_conversation_written_in_a_batch_is_the_one_written_alone(
    target, tokenizer, monkeypatch
):
    monkeypatch.setitem(train.TEMPERATURES, "assistant", (0.0,))
    monkeypatch.setattr(train, "NEXT_TURN", -1.0)
    texts = [f"Number {i}?" * (1 + i % 3) for i in range(9)]
    together = converse(target, tokenizer, *map(question, texts), seq_len=120)
    alone = []
    for text in texts:
        alone += converse(target, tokenizer, question(text), seq_len=120)
    assert sorted(together, key=str) == sorted(alone, key=str)


def test_the_target_writes_its_own_training_data_and_answers_questions(
    tmp_path, command, tokenizer, capsys
):
    records = [{"data": [f"Count to {i % 9}.", "1"]} for i in range(18)]
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps(records))  # an array will do
    asked = set(train.read_questions(questions))
    assert len(asked) == 9
    own = tmp_path / "own"
    answers = tmp_path / "answers"
    command("--synthesize", 7, "--data", own)
    command("--synthesize", 7, "--data", answers, "--questions", questions)
    for path in (own, answers):
        assert len(written(path)) == 7
        for messages in written(path):
            roles = [message["role"] for message in messages]
            assert roles == (["user", "assistant"] * 20)[:len(roles)]
        data = train.Conversations([str(path)], tokenizer, 200)
        assert len(list(data.read_usable(range(7)))) == 7  # to train on
    assert {messages[0]["content"] for messages in written(answers)} <= asked
    assert not {messages[0]["content"] for messages in written(own)} <= asked
    for _ in range(6):  # an answer may come out empty
        command("--synthesize", 99, "--data", answers, "--questions", questions, "--json")
    assert sorted(messages[0]["content"] for messages in written(answers)) == sorted(asked)
    command("--synthesize", 3, "--data", answers, "--json")
    assert capsys.readouterr().out.endswith('{"conversations": 9}\n' * 2)
    command("--data", own, "--out", tmp_path, "--updates", 2, "--seq-len", 200)
    assert np.isfinite(losses(tmp_path)).all()


def test_it_is_an_error_if_no_question_could_be_answered(tmp_path, command, capsys):
    path = write(tmp_path / "questions.jsonl", {"data": ["long " * 300, "1"]})
    choices = ["--synthesize", 3, "--data", tmp_path / "answers", "--questions", path]
    assert "0 of 3: there are no more questions" in error_of(command, capsys, *choices)


def test_a_file_cut_anywhere_and_continued_repeats_and_loses_nothing(
    tmp_path, command, monkeypatch
):
    path = tmp_path / "own"

    def answer_some(target, tokenizer, openings, count, seed, args):
        """Conversations that hold their question or seed; none for "b"."""
        answered = (messages for messages in openings if messages != question("b"))
        for i, messages in zip(range(count), answered):
            messages = messages or question(f"{seed} {i}")
            yield [*messages, {"role": "assistant", "content": "Ä"}]
            assert written(path)[-1][:1] == messages  # at once

    monkeypatch.setattr(train, "converse", answer_some)
    command("--synthesize", 3, "--data", path)
    first = path.read_bytes()
    cuts = {*range(0, len(first) + 1, 9), first.index(b"\n"), len(first) - 1}
    for cut in sorted(cuts):
        path.write_bytes(first[:cut])
        command("--synthesize", 6, "--data", path)
        lines = path.read_bytes().splitlines()
        complete = first[:cut].count(b"\n")
        assert len(set(lines)) == len(written(path)) == 6
        assert lines[:complete] == first.splitlines()[:complete]
    path.unlink()
    questions = write(tmp_path / "questions", *({"data": [q]} for q in "ab\ud83dcbd"))
    for count in (1, 2, 9):
        choices = ["--questions", questions, "--batch-size", 1]
        command("--synthesize", count, "--data", path, *choices)
        path.write_bytes(path.read_bytes()[:-1])  # the last line is not complete
    command("--synthesize", 9, "--data", path, *choices)
    assert [messages[0]["content"] for messages in written(path)] == ["a", "c", "d"]


@pytest.mark.parametrize("ask", [False, True])
def test_synthesis_killed_at_any_moment_and_resumed_loses_doubles_and_breaks_no_line(
    tmp_path, tiny, command, monkeypatch, ask
):
    path = tmp_path / "own"
    draws = random.Random(0)
    records = [{"data": [f"Count to {i}.", "1"]} for i in range(150)]
    questions = ["--questions", write(tmp_path / "questions", *records)] if ask else []
    task = ["--synthesize", 50, "--data", path, "--batch-size", 8, *questions]
    path.touch()
    lines = []
    for more in (0, 1, 10, 5):
        before = lines
        process = background(monkeypatch, tiny, *task)
        while process.is_alive() and path.read_bytes().count(b"\n") < len(before) + more:
            time.sleep(draws.uniform(0, 0.01))
        process.kill()
        process.join()
        lines = path.read_bytes().splitlines(keepends=True)
        assert lines[:len(before)] == before
        assert len(lines) < 50
    command(*task)
    assert path.read_bytes().splitlines(keepends=True)[:len(lines)] == lines
    assert len(written(path)) == 50
    texts = [messages[0]["content"] for messages in written(path)]
    # Of the target's own questions, short ones come up again by chance.
    texts = [text for text in texts if ask or len(text) > 5]
    assert len(texts) == len(set(texts)) > 10


# --- Curves ---


def test_the_curves_of_runs_are_one_svg_file(tmp_path, command, undisturbed, monkeypatch):
    """Read as XML: every run in every panel and in the legend, each point where its value is."""
    monkeypatch.chdir(tmp_path)
    short = tmp_path / "<short>"
    command("--out", short, "--updates", 3, "--no-ca")
    monkeypatch.setattr(sys, "argv", ["train.py", "--plot", str(undisturbed), str(short)])
    train.main()
    svg = xml.etree.ElementTree.parse("curves.svg").getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    legend = [text.text for text in svg.findall("svg:text", space)]
    assert legend == [str(undisturbed), str(short)]
    panels = svg.findall("svg:g", space)
    titles = [panel.find("svg:text", space).text for panel in panels]
    assert titles == [
        "training loss", "held-out KL", "implied acceptance length", "accuracy, last evaluation"
    ]
    labels = [text.text for text in panels[0].findall("svg:text", space)]
    assert labels[2::2] == ["0", "2", "4", "6", "8"]
    top = float(labels[-1])
    first_line = panels[0].find("svg:polyline", space).get("points")
    drawn = first_line.split()[1:]  # the first point is there twice
    for update, (point, loss) in enumerate(zip(drawn, losses(undisturbed), strict=True), 1):
        x, y = map(float, point.split(","))
        assert x == pytest.approx(300 * update / 8, abs=0.1)
        assert y == pytest.approx(200 - 200 * loss / top, abs=0.2)
    points = []
    for panel in panels:
        lines = panel.findall("svg:polyline", space)
        points.append([len(line.get("points").split()) for line in lines])
    depths = len(read_log(undisturbed)[-1]["depth_accuracy"])
    assert points == [[1 + 8, 1 + 3], [1 + 3, 1 + 1], [1 + 3, 1 + 1], [1 + depths, 1 + 1]]


@pytest.mark.parametrize("values, end", [
    ([0.2, 0.218], 0.22), ([8], 8), ([1.0], 1), ([8.9], 9), ([186_000], 200_000), ([0.0], 1e-9),
    ([], 1),
])
def test_an_axis_ends_at_a_round_number(values, end):
    assert train.axis_end(values) == pytest.approx(end)


def test_a_long_curve_is_averaged():
    log = [{"update": i, "loss": float(i % 2)} for i in range(10_000)]
    points = train.update_curve(log, "loss")
    assert len(points) <= train.MAX_POINTS
    assert all(value == pytest.approx(0.5, abs=0.02) for _, value in points)


# --- Bad input ---


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny, undisturbed) -> Path:
    """A folder with a run, a damaged one, one whose checkpoint is gone, and data of many kinds."""
    path = tmp_path_factory.mktemp("files")
    (path / "shards").mkdir()
    (path / "shards" / "model-00001-of-00002.safetensors").touch()
    for name in ("run", "damaged", "gone"):
        shutil.copytree(undisturbed, path / name)
    checkpoint = (path / "run" / "checkpoint.pt").read_bytes()
    (path / "damaged" / "checkpoint.pt").write_bytes(checkpoint[:-1000])
    (path / "gone" / "checkpoint.pt").unlink()
    write(path / "empty")
    write(path / "broken", *BROKEN)
    write(path / "long", *[{"data": ["long" * 99, "b"]}] * 12)
    write(path / "own", {"synthetic": True, "messages": CHAT})
    text = json.dumps(counting(2))
    write(path / "deep", "[" * 100_000)
    write(path / "cut.json", text[:-5])
    write(path / "twice.json", text + text)
    write(path / "messages", {"messages": CHAT})
    write(path / "questionless", {"data": [""]})
    (path / "a.parquet").write_bytes(b"PAR1" + bytes(20))
    (path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    with zipfile.ZipFile(path / "a.zip", "w") as archive:
        archive.writestr("a.json", text)
    (path / "utf16").write_text(text, encoding="utf-16")
    (path / "folder").mkdir()
    return path


@pytest.mark.parametrize("choices, why", [
    ("--data nowhere", "nowhere: no such file. To fetch UltraChat: pip install datasets"),
    ("--data folder", "folder is a folder: name the files in it, as in folder/*.jsonl"),
    ("--data a.parquet", "a.parquet is Parquet, not JSON; try: python -c \"import pandas"),
    ("--data a.jsonl.gz", "a.jsonl.gz is gzip, not JSON; try: gunzip a.jsonl.gz"),
    ("--data a.zip", "a.zip is a zip archive, not JSON; try: unzip a.zip"),
    ("--data utf16", "utf16 is UTF-16, not JSON; try: iconv -f UTF-16 -t UTF-8 utf16"),
    ("--data cut.json", "cut.json: the JSON array is damaged or cut short at its record 2"),
    ("--data deep", "deep: the JSON array is damaged or cut short at its record 1"),
    ("--data empty broken", "empty broken: no usable conversation"),
    ("--data long", "no answer within"),
    ("--data long --evaluate run", "no answer within"),
    ("--evaluate nowhere", "nowhere: no such folder"),
    ("--kv-heads 3", "num_key_value_heads 3"),
    ("--lsa-heads 500", "num_attention_heads 500"),
    ("--no-sa", "--no-sa needs --no-ca"),
    ("--lr nan", "invalid"),
    ("--tli 99", "3 layers"),
    ("--seq-len 100000", "context is 256"),
    ("--updates 0", "invalid"),
    ("--run-length 15 5", "--run-length LOW HIGH: the shortest comes first"),
    ("--dtype float16", "bfloat16"),
    ("--out empty/out", "Not a directory"),
    (f"--out {'x' * 300}", "name too long: 'xxx"),
    ("--out run --resume --lr 1", "made with --lr 0.001, not 1.0"),
    ("--out run --resume --data own", "not ['own ("),
    ("--out run", "holds work: --resume goes on"),
    ("--out gone --resume", "holds work but no checkpoint"),
    ("--out shards", "shards holds work"),
    ("--out damaged --resume", "not a readable checkpoint"),
    ("--synthesize 2 --data long", "was not written by --synthesize"),
    ("--synthesize 2 --data messages", "was not written by --synthesize"),
    ("--data twice.json", "text after the JSON array"),
    ("--synthesize 2 --data run", "Is a directory: 'run'"),
    ("--synthesize 2 --data own --questions nowhere", "nowhere: cannot be read"),
    ("--synthesize 2 --data own --questions questionless", "no conversation with a question"),
    ("--synthesize 502 --data own --seq-len 16 --batch-size 250", "raise --seq-len above 16"),
    ("--synthesize 2 --data own empty", "--synthesize writes one file"),
    ("--questions own", "--questions needs --synthesize"),
    ("--by-drafting", "--by-drafting needs --evaluate"),
    ("--layers 4", "--layers needs --pretrain"),
    ("--pretrain toy --lr 1", "has no effect with --pretrain"),
    ("--plot run nowhere", "nowhere: no run with a log"),
])
def test_bad_input_is_an_error_of_one_line_and_changes_no_file(
    files, command, capsys, monkeypatch, choices, why
):
    monkeypatch.chdir(files)
    before = {path: path.is_file() and path.read_bytes() for path in files.rglob("*")}
    assert why in error_of(command, capsys, "--out", "out", *LONG, *choices.split())
    assert {path: path.is_file() and path.read_bytes() for path in files.rglob("*")} == before


def test_without_data_one_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as end:
        train.main()
    assert end.value.code == 2
    assert "--data FILE is missing" in capsys.readouterr().err


# --- Where it all comes together ---


@pytest.fixture
def on_toy(monkeypatch, capsys):
    """A command line on the toy target, in this process: the object that it prints."""

    def run(script: str, *arguments) -> dict:
        words = [script, "--model", "toy", "--device", "cpu", "--json", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        (train.main if script == "train.py" else speculate.main)()
        return json.loads(capsys.readouterr().out)

    return run


def test_forty_updates_make_a_drafter_whose_drafts_are_accepted(tmp_path, on_toy, library):
    """On a real model and real text. Without training it would be 1.0 tokens a call."""
    signatures = [name for name, source in sorted(library.items()) if 200 <= len(source) <= 600]
    records = []
    for signature in signatures[::len(signatures) // 400]:
        question = {"role": "user", "content": signature}
        answer = {"role": "assistant", "content": library[signature]}
        records.append({"messages": [question, answer]})
    recipe = "--updates 40 --batch-size 4 --seq-len 256 --eval-every 1000 --kl-weight 1"
    recipe += " --micro-batch-size 4"
    schedule = "--optimizer muon --lr 2e-2 --schedule cosine --warmup 10"
    task = ["--data", write(tmp_path / "functions.jsonl", *records), "--out", tmp_path]
    trained = on_toy("train.py", *task, *recipe.split(), *schedule.split())
    assert trained["update"] == 40
    new_tokens = 0
    target_calls = 0
    for signature in ("def close(self):", "def read(self, size=-1):", "def __repr__(self):"):
        question = ["--prompt", signature, "--max-new-tokens", 48]
        drafted = on_toy("speculate.py", "--drafter", tmp_path, "--draft-length", 4, *question)
        new_tokens += drafted["new_tokens"] - 1  # the first comes with the prompt
        target_calls += drafted["target_calls"]
    assert new_tokens / target_calls > 1.25  # about 1.6, with other seeds 1.5 and 1.7
