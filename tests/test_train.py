"""Claims about the distillation: horizons, losses, data, and a training run that survives being killed."""
import contextlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
import tracemalloc
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from conftest import GOLDEN, ROOT, run_script
from safetensors.torch import load_file, save_file

import llama
import moa
import train

CHAT = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "Döner?"}, {"role": "assistant", "content": "Gladly, döner."}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random Llama as Hugging Face would write it. Its tokens are bytes, about every twelfth a stop token."""
    path = tmp_path_factory.mktemp("tiny")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(path / "tokenizer.json"))
    sizes = dict(vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256)
    write(path / "config.json", {"model_type": "llama", **sizes})
    write(path / "generation_config.json", {"eos_token_id": 257})
    torch.manual_seed(0)
    model = llama.Llama(llama.Config(**sizes, head_dim=8))
    model.lm_head.weight.normal_(std=0.45)
    model.embed_tokens.weight[:, 0] = 4  # a constant, which the stop token's row of the head turns into its logit
    model.lm_head.weight[257, 0] = 1.8
    save_file({f"model.{name}".replace("model.lm_head", "lm_head"): p.clone() for name, p in model.named_parameters()},
              path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    counts = {n: ", ".join(map(str, range(1, n + 1))) for n in range(3, 15)}
    return write(tmp_path_factory.mktemp("data") / "data.jsonl",
                 *({"data": [f"Count to {n}.", count, "Thanks!", "Any time."]} for n, count in counts.items()))


@pytest.fixture(scope="module")
def target(tiny) -> llama.Llama:
    return llama.load_model(tiny)


@pytest.fixture(scope="module")
def tokenizer(tiny) -> llama.Tokenizer:
    return llama.load_tokenizer(tiny)


@pytest.fixture(scope="module")
def command(tiny):
    """train.py's command line on the tiny target, in this process."""
    def run(*arguments) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train.py", *flags(tiny, *arguments)])
            llama.run_command(train.main)
    return run


def flags(tiny: Path, *arguments) -> list[str]:
    small = ["--seq-len", 96, "--batch-size", 3, "--warmup", 2]
    if "--init" not in arguments:
        small += ["--mlp", 32, "--lsa-mlp", 32]
    return list(map(str, ["--model", tiny, "--device", "cpu", *small, *arguments]))


def write(path: Path, *lines) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_log(out: Path) -> list[dict]:
    """The log without its timings."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_log(out) if "loss" in line]


def assert_same_run(a: Path, b: Path) -> None:
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert read_log(a) == read_log(b)


def random_drafter(target: llama.Llama, kind: type = moa.Drafter, **choices) -> moa.Drafter:
    torch.manual_seed(1)
    return kind(target, moa.DrafterConfig.sized_for(target, **choices))


def arguments(**changes) -> Namespace:
    defaults = dict(seed=0, horizons=1, run_length=[5, 15], micro_batch_size=1, dtype="float32", kl_weight=0.1,
                    feature_weight=1.0, freeze_lsa=False)
    return Namespace(**{**defaults, **changes})


def sequences(*sizes: tuple[int, int]) -> list[train.Sequence]:
    """Random ones, each of a prompt and an answer of these sizes."""
    g = torch.Generator().manual_seed(0)
    return [train.Sequence(torch.randint(256, (a + b,), generator=g), torch.arange(a + b) >= a) for a, b in sizes]


# The losses ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [0, 1])
def test_losses_are_the_authors(n):
    """Averages over the response. Their KL lacks the target's own entropy, which is constant."""
    folder = GOLDEN / f"moa-tiny-n{n}"
    target, golden = llama.load_model(folder / "target"), load_file(folder / "expected.safetensors")
    drafter, expected = moa.load_drafter(folder / "drafter", target), json.loads((folder / "expected.json").read_text())
    response = golden["response_mask"][0].bool()
    # one token more, so that every position of the response is a query
    tokens, answer = F.pad(golden["input_ids"], (0, 1)), F.pad(response, (0, 1), value=True)
    horizon = train.run_horizon(answer, len(answer), 0)
    sums = train.distillation_loss(drafter, tokens, answer[None], horizon[None, None], 0.1, 1.0)
    loss, kl, hidden = (x / response.sum() for x in sums)
    entropy = torch.distributions.Categorical(logits=golden["target_logits"][0, response]).entropy().mean()
    features = expected["feature_loss"] if n == 0 else (expected["feature_loss"] + expected["prev_feature_loss"]) / 2
    assert kl + entropy == pytest.approx(expected["forward_KL"], abs=1e-4)
    assert hidden == pytest.approx(features, abs=1e-4)
    assert loss + 0.1 * entropy == pytest.approx(expected["loss"], abs=1e-4)


def test_forward_kl_and_its_gradient_are_the_formulas_whatever_the_chunk(monkeypatch):
    torch.manual_seed(0)
    features, hidden, head = torch.randn(2, 10, 16, requires_grad=True), torch.randn(10, 16), torch.randn(40, 16)
    log_q, log_p = (features @ head.T).log_softmax(-1), (hidden @ head.T).log_softmax(-1)
    plain = (log_p.exp() * (log_p - log_q)).sum()
    gradient, = torch.autograd.grad(plain, features)
    for chunk in (3, 5, 256):
        monkeypatch.setattr(train, "LOSS_CHUNK", chunk)
        loss = train.ForwardKL.apply(features, hidden, head)
        torch.testing.assert_close(loss, plain)
        torch.testing.assert_close(torch.autograd.grad(3 * loss, features)[0], 3 * gradient)


@pytest.mark.parametrize("n", [0, 1])
def test_many_horizons_in_one_call_are_as_many_calls(target, n):
    drafter, (sequence,) = random_drafter(target, target_layer_inference=n), sequences((9, 30))
    tokens, answer = train.pad([sequence], "cpu")
    horizons = torch.stack([train.run_horizon(sequence.answer, *run) for run in ((5, 0), (7, 3), (11, 10))])

    def total(horizons) -> tuple[torch.Tensor, torch.Tensor]:
        loss, _, _ = train.distillation_loss(drafter, tokens, answer, horizons[:, None], 0.1, 1.0)
        return loss, torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(drafter.parameters()))])
    together, separate = total(horizons), [total(h[None]) for h in horizons]
    torch.testing.assert_close(together[0], sum(loss for loss, _ in separate))
    torch.testing.assert_close(together[1], sum(gradient for _, gradient in separate), atol=1e-5, rtol=1e-4)


def test_padding_and_micro_batches_change_nothing(target):
    batch, scaler, results = sequences((5, 12), (20, 31), (3, 4)), torch.amp.GradScaler("cpu", enabled=False), []
    for size in (1, 3):
        drafter, args = random_drafter(target), arguments(micro_batch_size=size, horizons=2)
        figures = train.train_batch(drafter, batch, 0, args, train.Worker(0, 1), scaler)
        results.append([torch.tensor(figures)] + [p.grad for p in drafter.parameters()])
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-4)


def test_a_memory_that_is_kept_gives_the_same_loss_without_the_target(target, monkeypatch):
    drafter, batch = random_drafter(target), sequences((5, 20), (9, 30))
    tokens, answer = train.pad(batch, "cpu")
    horizon = torch.nn.utils.rnn.pad_sequence([train.run_horizon(s.answer, 4, 1) for s in batch], batch_first=True)
    full = train.distillation_loss(drafter, tokens, answer, horizon[None], 0.1, 1.0)
    train.frozen_states(drafter, batch)
    monkeypatch.setattr(train, "target_pass", None)  # a further visit does without
    again = train.distillation_loss(drafter, tokens, answer, horizon[None], 0.1, 1.0, train.frozen_states(drafter, batch))
    torch.testing.assert_close(again, full, rtol=5e-3, atol=0)  # kept in bfloat16
    again[0].backward()
    assert all((p.grad is None) == name.startswith("layer_self_attention") for name, p in drafter.named_parameters())


def test_only_the_assistants_tokens_are_learnt(target, tokenizer):
    drafter, sequence = random_drafter(target), train.encode_conversation(tokenizer, CHAT, 96)
    tokens, answer = train.pad([sequence], "cpu")
    horizon = train.run_horizon(sequence.answer, 5, 0)[None, None]
    loss = lambda tokens, answer: train.distillation_loss(drafter, tokens, answer, horizon, 0.1, 1.0)[0]  # noqa: E731
    assert loss(tokens, torch.zeros_like(answer)) == 0  # where nothing is the assistant's
    changed = tokens.clone()
    changed[0, sequence.answer.nonzero()[-1, 0]:] = 0  # nothing is asked at the stop token or behind it
    torch.testing.assert_close(loss(changed, answer), loss(tokens, answer))


# The horizon ---------------------------------------------------------------------------------------------------------

def test_a_query_sees_memory_up_to_the_token_before_its_run():
    answer = torch.tensor([0] * 3 + [1] * 12 + [0] * 2 + [1] * 4).bool()
    horizon = train.run_horizon(answer, length=5, phase=2)  # the first run of each answer is 5 - 2 long
    assert horizon.tolist() == [0, 1, 2] + [2] * 3 + [5] * 5 + [10] * 4 + [15, 16] + [16] * 3 + [19]
    asked = [i for i in range(21) if i in range(3, 14) or i in range(17, 20)]  # where a token of the answer follows
    assert train.loss_mask(answer).nonzero()[:, 0].tolist() == asked


def test_runs_have_their_length_and_all_that_drafting_can_reach_is_trained():
    answer = torch.arange(40) >= 4
    for length in range(5, 16):
        horizons = torch.stack([train.run_horizon(answer, length, phase) for phase in range(length)])
        assert (horizons[:, :4] == torch.arange(4)).all()  # a prompt sees itself
        depths = torch.arange(36) - (horizons[:, 4:] - 4)
        for phase, depth in enumerate(depths):
            starts = (depth == 1).nonzero()[:, 0]
            assert starts[0] == 0 and starts[1] == length - phase and (starts[1:].diff() == length).all()
        for i in range(36):
            assert set(depths[:, i].tolist()) == set(range(1, min(length, i + 1) + 1))


# Data ----------------------------------------------------------------------------------------------------------------

def test_the_reply_is_the_assistants_tokens_and_their_stop_token(tokenizer):
    sequence = train.encode_conversation(tokenizer, CHAT, 200)
    assert sequence.tokens.tolist() == tokenizer.chat(CHAT, add_generation_prompt=False)
    replies = [tokenizer.encode(message["content"]) + [257] for message in CHAT if message["role"] == "assistant"]
    assert sequence.tokens[sequence.answer].tolist() == replies[0] + replies[1]
    assert int(sequence.answer.int().diff().clamp(min=0).sum()) == 2  # two stretches


def test_a_conversation_is_cut_at_seq_len(tokenizer):
    whole, cut = (train.encode_conversation(tokenizer, CHAT, length) for length in (96, 50))
    assert len(cut.tokens) == 50 and torch.equal(cut.tokens, whole.tokens[:50])
    assert torch.equal(cut.answer, whole.answer[:50])
    with pytest.raises(ValueError, match="no answer within the first 20 tokens"):
        train.encode_conversation(tokenizer, CHAT, 20)


def test_four_formats_one_conversation():
    texts = [message["content"] for message in CHAT[:2]]
    records = [{"messages": CHAT[:2]}, {"data": texts}, {"instruction": texts[0], "input": "", "output": texts[1]},
               {"conversations": [{"from": "human", "value": texts[0]}, {"from": "gpt", "value": texts[1]}]}]
    assert [train.read_messages(json.dumps(record)) for record in records] == [CHAT[:2]] * 4


BROKEN = {
    "{half": "not JSON", "[" * 100_000: "not JSON", '"text"': "not a JSON object", '{"data": 3}': "data is not a list",
    '{"text": "?"}': "none of messages", '{"messages": []}': "no answer", '{"messages": [3]}': "not a list of objects",
    '{"data": ["a", 3]}': "text as content", '{"data": ["only a question"]}': "no answer",
    '{"conversations": [{"from": "tool", "value": ""}]}': "known speaker",
    '{"data": ["\\ud800", "b"]}': "not valid UTF-8"}


def test_a_broken_line_is_counted_named_and_skipped(tmp_path, tokenizer, capsys):
    path = write(tmp_path / "mixed.jsonl", {"messages": CHAT}, *BROKEN, {"messages": CHAT})
    data = train.Conversations([str(path)], tokenizer, 96)
    *named, count = capsys.readouterr().err.splitlines()  # at once
    assert count == f"skipped {len(BROKEN)} of {len(BROKEN) + 2} lines" and len(data.skipped) == len(named) == len(BROKEN)
    for _ in range(2):  # epochs
        assert [data.get(i) is not None for i in range(len(data))] == [True] + [False] * len(BROKEN) + [True]
    assert not capsys.readouterr().err  # and not again
    for number, (line, why) in enumerate(zip(named, BROKEN.values()), 2):
        assert line.startswith(f"skipped {path}, line {number}: ") and why in line


def test_random_access_to_several_files_equals_reading_them_in_order(tmp_path, tokenizer):
    records = [{"data": [f"ö{'?' * i}", f"answer {i}"]} for i in range(20)]
    paths = [write(tmp_path / "a", *records[:7]), write(tmp_path / "b"), write(tmp_path / "c", *records[7:])]
    data = train.Conversations([str(path) for path in paths], tokenizer, 96)
    assert len(data) == 20
    for i in random.Random(0).sample(range(20), 20):
        expected = train.encode_conversation(tokenizer, train.read_messages(json.dumps(records[i])), 96)
        assert torch.equal(data.get(i).tokens, expected.tokens)


def test_a_large_file_is_not_read_into_memory(tmp_path, tokenizer):
    path = tmp_path / "large.jsonl"
    path.write_text((json.dumps({"data": ["a", "b" * 10_000]}) + "\n") * 2000)  # 20 MB
    tracemalloc.start()
    data = train.Conversations([str(path)], tokenizer, 96)
    data.get(1234)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_an_epoch_is_a_permutation_and_the_order_can_be_taken_up_anywhere():
    indices = np.arange(5, 15)
    order = train.Order(indices, seed=3)
    walk = [next(order) for _ in range(25)]
    assert sorted(walk[:10]) == sorted(walk[10:20]) == indices.tolist() and walk[:10] != walk[10:20]
    for taken in (0, 4, 10, 17):
        order = train.Order(indices, seed=3)
        assert [next(order) for _ in range(taken)] == walk[:taken]
        again = train.Order(indices, 3, order.epoch, order.position)
        assert [next(again) for _ in range(25 - taken)] == walk[taken:]


@pytest.mark.parametrize("lines, why", [(None, "cannot be read"), ([], "empty"), (list(BROKEN), "no usable")])
def test_data_without_anything_usable_is_an_error_of_one_line(tmp_path, command, capsys, lines, why):
    path = tmp_path / "data.jsonl"
    if lines is not None:
        write(path, *lines)
    with pytest.raises(SystemExit) as error:
        command("--data", path, "--out", tmp_path / "out")
    messages = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("skipped ")]
    assert error.value.code == 2 and len(messages) == 1 and str(path) in messages[0] and why in messages[0]


@pytest.mark.parametrize("arguments, why", [
    (["--run-length", 9, 3], "low end"), (["--kv-heads", 3], "multiple of the kv heads"), (["--lsa-heads", 500], "cannot have"),
    (["--tli", 9], "3 layers"), (["--seq-len", 100000], "beyond the target's context"),
    (["--init", "x", "--tli", 1], "leave out --tli"),
    (["--no-ca", "--warm-start"], "leave out --no-ca"), (["--synthesize", 1, "--data", "a", "b"], "one --data"),
    (["--freeze-lsa"], "name it with --init"), (["--questions", "file"], "--synthesize COUNT")])
def test_arguments_that_cannot_be_meant_are_errors_of_one_line(tmp_path, data, command, capsys, arguments, why):
    with pytest.raises(SystemExit) as error:
        command("--data", data, "--out", tmp_path / "out", *arguments)
    message, = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and why in message


def test_the_papers_recipe_is_the_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "x"])
    a = train.parse()
    assert (a.kl_weight, a.feature_weight, a.lr, a.warmup, a.run_length, a.batch_size, a.schedule, a.clip) == (
        0.1, 1.0, 3e-5, 50, [5, 15], 32, "paper", 1.0)
    adamw, = train.Optimizer([torch.nn.Parameter(torch.zeros(2, 2))], a.optimizer).parts
    assert adamw.defaults["betas"] == (0.9, 0.95) and adamw.defaults["weight_decay"] == 0


def test_a_gradient_is_clipped_to_the_norm_that_is_asked_for(tmp_path, data, command, monkeypatch):
    norms, step = [], train.Optimizer.step
    monkeypatch.setattr(train.Optimizer, "step", lambda self, *args: norms.append(torch.nn.utils.get_total_norm(
        [p.grad for group in self.parts[0].param_groups for p in group["params"]]).item()) or step(self, *args))
    for clip in (0.01, 0):
        command("--data", data, "--out", tmp_path / str(clip), "--updates", 1, "--clip", clip)
    assert norms[0] == pytest.approx(0.01, rel=1e-3) and norms[1] > 0.05


def test_what_is_held_out_is_never_trained_on(tmp_path, data, command, monkeypatch):
    trained, held_out, train_batch, evaluate = set(), set(), train.train_batch, train.evaluate
    texts = lambda sequences: {tuple(s.tokens.tolist()) for s in sequences}  # noqa: E731
    monkeypatch.setattr(train, "train_batch", lambda d, batch, *a: trained.update(texts(batch)) or train_batch(d, batch, *a))
    monkeypatch.setattr(train, "evaluate", lambda d, held, a: held_out.update(texts(held)) or evaluate(d, held, a))
    command("--data", data, "--out", tmp_path, "--updates", 12)
    assert len(trained) == 11 and len(held_out) == 1 and not trained & held_out


@pytest.mark.parametrize("blank", [0, 1])
def test_a_single_conversation_trains_wherever_it_stands(tmp_path, command, blank):
    lines = [{"data": ["Count to 4.", "1, 2, 3, 4"]}]
    lines.insert(blank, "")
    path = write(tmp_path / "data.jsonl", *lines)
    command("--data", path, "--out", tmp_path / "out", "--updates", 1)


def test_the_draft_vocabulary_is_of_the_answers(tmp_path, tokenizer):
    path = write(tmp_path / "data.jsonl", {"data": ["zzzzzzzzzzzz", "aab"]})
    data = train.Conversations([str(path)], tokenizer, 96)
    assert train.frequent_tokens(data, [0], 3, 258) == tuple(sorted(tokenizer.encode("ab") + [257]))
    assert train.frequent_tokens(data, [0], 999, 257) == tuple(range(257))  # ids beyond the target's are none of its


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(24, 8, 128), (52, 52, 8), (9, 3, 64), (5, 5, 6)])  # Llama-3.2-3B, ...
def test_every_target_has_a_drafter_of_its_proportions(heads, kv_heads, head_dim):
    with torch.device("meta"):
        target = llama.Llama(llama.Config(258, heads * 8, 48, 3, heads, kv_heads, head_dim))
    moa.Drafter(target, moa.DrafterConfig.sized_for(target))


# Optimisation --------------------------------------------------------------------------------------------------------

def test_schedules():
    paper = Namespace(lr=3e-5, schedule="paper", warmup=50)
    rate = [train.learning_rate(update, paper, 1050) / 3e-5 for update in range(2000)]
    assert rate[:50] == pytest.approx([20 * (i + 1) / 50 for i in range(50)])  # up to 20 times the rate,
    assert rate[50:1051] == pytest.approx(np.linspace(20, 1, 1001))  # down to it over the first epoch,
    assert rate[1050:] == pytest.approx([1] * 950)  # constant after
    cosine = Namespace(lr=1.0, schedule="cosine", warmup=1, updates=100)
    assert [train.learning_rate(update, cosine, 10) for update in (0, 50, 100)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_lowers_the_loss(tmp_path, data, command, optimizer):
    few = write(tmp_path / "few.jsonl", *data.read_text().splitlines()[:4])
    command("--data", few, "--out", tmp_path / "out", "--updates", 60, "--optimizer", optimizer, "--lr", 3e-3,
            "--schedule", "cosine")
    loss = losses(tmp_path / "out")
    assert np.mean(loss[-3:]) < 0.7 * np.mean(loss[:3])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("n", [0, 1])
def test_half_precision_trains(tmp_path, data, command, dtype, n):
    command("--data", data, "--out", tmp_path / "out", "--updates", 3, "--dtype", dtype, "--tli", n)
    command("--data", data, "--out", tmp_path / "full", "--updates", 3, "--tli", n)
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "full"), rel=0.05)


def test_frozen_lsa_stays_as_it_was_while_the_rest_learns(tmp_path, data, command):
    command("--data", data, "--out", tmp_path / "first", "--updates", 1)
    command("--data", data, "--out", tmp_path / "second", "--init", tmp_path / "first", "--freeze-lsa", "--lr", 1e-2,
            "--updates", 4)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("layer_self_attention"), name


@pytest.mark.parametrize("choice, stated", [
    (["--tli", 1], {"target_layer_inference": 1}), (["--no-lsa"], {"use_layer_self_attention": False}),
    (["--no-ca"], {"use_cross_attention": False}), (["--draft-vocabulary", 3], {}), (["--warm-start"], {}),
    (["--kv-heads", 2, "--lsa-heads", 2],
     {"self_attention_num_key_value_heads": 2, "layer_self_attention_num_attention_heads": 2})])
def test_every_kind_of_drafter_trains_and_its_config_says_what_it_is(tmp_path, data, command, target, choice, stated):
    command("--data", data, "--out", tmp_path, "--updates", 2, *choice)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {name: config[name] for name in stated} == stated and np.isfinite(losses(tmp_path)).all()
    drafter = moa.load_drafter(tmp_path, target)
    if "--draft-vocabulary" in choice:  # there are three more frequent tokens, but a draft may end an answer
        assert len(drafter.config.draft_vocabulary) == 3 and 257 in drafter.config.draft_vocabulary


def test_after_a_warm_start_a_memory_tells_the_final_hidden_state(target, monkeypatch):
    """LSA, trained, tells what the plain mean over layers that it starts near to does not."""
    batch = sequences(*[(5, 60)] * 20)
    tokens, _ = train.pad(batch[:1], "cpu")
    kv, _, final = train.target_pass(target, tokens, 0)
    lacking = []
    for updates in (0, 200):
        monkeypatch.setattr(train, "FIT_UPDATES", updates)
        drafter = random_drafter(target)
        train.warm_start(drafter, batch, torch.float32)
        error = F.mse_loss(drafter.memory(kv, final), final) / final.var()
        lacking.append(error.item())
    assert lacking[1] < 0.8 * lacking[0] < 0.8


# Evaluation ----------------------------------------------------------------------------------------------------------

class Oracle(moa.Drafter):
    """Reuses every layer of the target, and knows what enters them."""

    def self_attend(self, tokens):
        return self.target.embed_tokens(tokens)

    def cross_attend(self, x, memory, horizon):
        return x


def test_a_drafter_that_knows_the_hidden_state_is_always_right(target):
    oracle, batch = random_drafter(target, Oracle, target_layer_inference=3), sequences((5, 60), (9, 50))
    assert train.evaluate(random_drafter(target), batch, arguments())["implied_acceptance_length"] < 4
    figures = train.evaluate(oracle, batch, arguments())
    assert figures["depth_accuracy"] == [1.0] * 8 and figures["implied_acceptance_length"] == 9
    assert figures["held_out_loss"] == pytest.approx(0, abs=1e-5)


def test_accuracy_at_a_depth_is_among_runs_that_were_right_before(target, monkeypatch):
    """An answer of three runs: 8, 8 and 3 queries."""
    drafter, (sequence,) = random_drafter(target), sequences((4, 20))
    truth = target.lm_head(train.target_pass(target, sequence.tokens[None], 0)[2])
    wrong = [4 + 2, 4 + 3, 4 + 8 + 5]  # depths 3 and 4 of the first run, depth 6 of the second
    truth[0, wrong] = -truth[0, wrong]
    monkeypatch.setattr(drafter, "logits", lambda features: truth[0, train.loss_mask(sequence.answer)])
    figures = train.evaluate(drafter, [sequence], arguments())
    assert figures["depth_accuracy"] == pytest.approx([1, 1, 2 / 3, 1, 1, 0, 0, 0])
    assert figures["implied_acceptance_length"] == pytest.approx(1 + 1 + 1 + 2 / 3 * 3)


# Checkpoints, processes, synthesis -----------------------------------------------------------------------------------

LONG = ["--updates", 40, "--save-every", 2, "--eval-every", 7, "--lr", 1e-3]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data, command) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    command("--data", data, "--out", out, *LONG)
    return out


def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path, tiny, data, command, undisturbed):
    checkpoint, draw = tmp_path / "checkpoint.pt", random.Random(0)
    for attempt in range(3):
        before = checkpoint.stat().st_mtime_ns if attempt else 0
        arguments = flags(tiny, "--data", data, "--out", tmp_path, *LONG, *["--resume"] * (attempt > 0))
        process = subprocess.Popen([sys.executable, ROOT / "train.py", *arguments], stderr=subprocess.DEVNULL)
        while process.poll() is None and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > before):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.wait()
    command("--data", data, "--out", tmp_path, *LONG, "--resume")
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.parametrize("owner, name, call", [
    (train, "evaluate", 3), (train, "train_batch", 20), (train, "save_checkpoint", 1), (torch, "save", 10),
    (os, "replace", 30), (os, "replace", 60), (train, "save_drafter", 20), (train, "save_checkpoint", 20)])
def test_no_moment_is_a_bad_one_to_die(tmp_path, data, command, undisturbed, monkeypatch, owner, name, call):
    """Before the `call`-th call of a function: in the middle of a run, and within its first and its very last save."""
    original, left = getattr(owner, name), [call]

    def fatal(*arguments, **keywords):
        left[0] -= 1
        if left[0] == 0:
            raise SystemError("killed")
        return original(*arguments, **keywords)
    with monkeypatch.context() as patch, pytest.raises(SystemError):
        patch.setattr(owner, name, fatal)
        command("--data", data, "--out", tmp_path, *LONG)
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"update": null}\n{}\n{"update": 3')  # what was being written, and worse
    command("--data", data, "--out", tmp_path, *LONG, "--resume", "--json")
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.parametrize("arguments, why", [
    (["--resume", "--lr", 1], "made with --lr 0.001, not 1.0"), (["--resume", "--tli", 1], "made with --tli 0, not 1"),
    ([], "holds a checkpoint: add --resume")])
def test_a_checkpoint_is_neither_misused_nor_overwritten(data, command, undisturbed, capsys, arguments, why):
    before = (undisturbed / "checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit) as error:
        command("--data", data, "--out", undisturbed, *LONG, *arguments)
    message, = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and why in message and (undisturbed / "checkpoint.pt").read_bytes() == before


def test_a_file_that_is_no_checkpoint_and_a_drafter_without_one_are_left_alone(tmp_path, data, command, capsys):
    torch.save([1], tmp_path / "checkpoint.pt")
    for arguments, why in ((["--resume"], "not a checkpoint"), ([], "holds a drafter")):
        with pytest.raises(SystemExit) as error:
            command("--data", data, "--out", tmp_path, *LONG, *arguments)
        message, = capsys.readouterr().err.splitlines()
        assert error.value.code == 2 and why in message
        (tmp_path / "checkpoint.pt").unlink(missing_ok=True)
        (tmp_path / "model.safetensors").write_bytes(b"precious")
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_a_run_whose_checkpoint_is_gone_is_not_begun_again_over_its_drafter(tmp_path, data, command, capsys):
    arguments = ["--data", data, "--out", tmp_path, "--updates", 1]
    command(*arguments)
    (tmp_path / "checkpoint.pt").unlink()
    before = (tmp_path / "model.safetensors").read_bytes()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        command(*arguments, "--resume")
    assert "checkpoint.pt is gone" in capsys.readouterr().err and (tmp_path / "model.safetensors").read_bytes() == before


def test_a_run_goes_on_with_the_sizes_it_began_with_whatever_became_of_its_start(tmp_path, data, command):
    base, out = tmp_path / "base", tmp_path / "out"
    command("--data", data, "--out", base, "--draft-vocabulary", 12, "--updates", 1)
    command("--data", data, "--out", out, "--init", base, "--freeze-lsa", "--updates", 1)
    before, weights = (out / "config.json").read_text(), load_file(out / "model.safetensors")
    for file in base.iterdir():
        file.unlink()
    command("--data", data, "--out", out, "--init", base, "--freeze-lsa", "--updates", 3, "--resume")
    assert (out / "config.json").read_text() == before
    changed = {name for name, weight in load_file(out / "model.safetensors").items() if not weight.equal(weights[name])}
    assert changed and not any(name.startswith("layer_self_attention") for name in changed)


@pytest.mark.parametrize("spoil, why", [
    (lambda out: out / ("x" * 300), "File name too long"), (lambda out: write(out / "file", "") / "out", "Not a directory")])
def test_a_folder_that_cannot_be_is_an_error_of_one_line(tmp_path, data, command, capsys, spoil, why):
    with pytest.raises(SystemExit) as error:
        command("--data", data, "--out", spoil(tmp_path))
    message, = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and why in message


@pytest.mark.parametrize("limit, culprit", [(100_000, "checkpoint.pt"), (1_000, "log.jsonl")])
def test_a_full_disk_is_an_error_of_one_line_and_leaves_what_was_there(tmp_path, tiny, data, command, limit, culprit):
    """A limit on the size of files stands in for the disk."""
    command("--data", data, "--out", tmp_path, *LONG[2:], "--updates", 4)
    names, checkpoint = set(tmp_path.iterdir()), (tmp_path / "checkpoint.pt").read_bytes()
    script = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), -1)); sys.argv[:2] = [];"
              "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
              "import llama, train; llama.run_command(train.main)")
    arguments = flags(tiny, "--data", data, "--out", tmp_path, *LONG[2:], "--updates", 8, "--resume")
    done = subprocess.run([sys.executable, "-c", script, str(limit), "train.py", *arguments], cwd=ROOT, capture_output=True,
                          text=True)
    message = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and f"{culprit} cannot be written" in message and "Traceback" not in done.stderr
    assert set(tmp_path.iterdir()) == names and (tmp_path / "checkpoint.pt").read_bytes() == checkpoint


def test_data_that_grew_during_a_run_is_not_the_data_it_was_made_from(tmp_path, data, command, capsys, monkeypatch):
    copy, save = tmp_path / "copy.jsonl", train.save_checkpoint
    copy.write_bytes(data.read_bytes())

    def grow_and_save(*args) -> None:
        with open(copy, "a") as file:
            file.write(json.dumps({"messages": CHAT}) + "\n")
        save(*args)

    monkeypatch.setattr(train, "save_checkpoint", grow_and_save)
    command("--data", copy, "--out", tmp_path / "out", "--updates", 1)
    with pytest.raises(SystemExit):
        command("--data", copy, "--out", tmp_path / "out", "--updates", 1, "--resume", "--lr", 1)
    assert "changed since" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_update_whose_gradient_overflows_is_skipped_in_float16_and_else_the_end(tmp_path, data, command, monkeypatch, capsys,
                                                                                   dtype):
    normal, calls = train.train_batch, []

    def overflowing(drafter, *args):
        result = normal(drafter, *args)
        calls.append(next(iter(drafter.parameters())))
        if len(calls) == 1:
            drafter.Ekv2E.weight.grad[0, 0] = math.inf
        return result

    monkeypatch.setattr(train, "train_batch", overflowing)
    with pytest.raises(SystemExit) if dtype == "float32" else contextlib.nullcontext():
        command("--data", data, "--out", tmp_path, "--updates", 2, "--optimizer", "muon", "--clip", 0, "--dtype", dtype)
    if dtype == "float32":
        assert "update 1: the gradient is not finite" in capsys.readouterr().err
        return
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "model.safetensors").values())
    first, second = [json.loads(line)["grad_norm"] for line in (tmp_path / "log.jsonl").read_text().splitlines()
                     if "grad_norm" in line]
    assert first is None and second > 0


def test_a_run_killed_before_its_first_checkpoint_is_resumed_from_the_beginning(tmp_path, data, command, capsys):
    command("--data", data, "--out", tmp_path / "out", "--updates", 1, "--resume")
    assert "no checkpoint yet: starting at the beginning" in capsys.readouterr().err
    assert train.update_of((tmp_path / "out" / "log.jsonl").read_text().splitlines()[0]) == 1


def test_sizes_that_cannot_be_leave_no_folder_behind(tmp_path, data, command, capsys):
    with pytest.raises(SystemExit):
        command("--data", data, "--out", tmp_path / "out", "--tli", 99)
    assert "the target has" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_finished_run_without_its_log_can_be_resumed(tmp_path, data, command, capsys):
    arguments = ["--data", data, "--out", tmp_path, "--updates", 1, "--json"]
    command(*arguments)
    (tmp_path / "log.jsonl").unlink()
    capsys.readouterr()
    command(*arguments, "--resume")
    assert json.loads(capsys.readouterr().out) == {}


def test_processes_that_cannot_work_together_are_an_input_error(monkeypatch):
    monkeypatch.setenv("RANK", "0")  # as a cluster may set it for one process
    assert train.Worker.join("cpu") == train.Worker(0, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun does
    with pytest.raises(llama.InputError, match="torchrun"):
        train.Worker.join("mps")


def test_two_processes_train_as_one_does(tmp_path, tiny, data, command):
    arguments = ["--data", data, "--updates", 4, "--eval-every", 2, "--horizons", 2, "--warm-start"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, ROOT / "train.py"]
    subprocess.run([*map(str, torchrun), *flags(tiny, *arguments, "--out", tmp_path / "two")], check=True)
    command(*arguments, "--out", tmp_path / "one")
    one, two = (torch.load(tmp_path / name / "checkpoint.pt")["drafter"] for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=1e-5)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    idle = ["--data", data, "--updates", 2, "--batch-size", 1, "--dtype", "float16", "--out", tmp_path / "idle"]
    subprocess.run([*map(str, torchrun), *flags(tiny, *idle)], check=True)  # the second has no share of any batch


def test_the_target_writes_its_own_training_data(tmp_path, command, tokenizer, capsys):
    path = tmp_path / "own.jsonl"
    command("--synthesize", 5, "--data", path)
    first = path.read_bytes()
    assert first.count(b"\n") == 5
    path.write_bytes(first + first[:20])  # interrupted in the middle of a line
    command("--synthesize", 12, "--data", path)
    lines = path.read_bytes().splitlines()
    assert len(lines) == 12 and path.read_bytes().startswith(first)
    capsys.readouterr()
    command("--synthesize", 3, "--data", path, "--json")
    assert json.loads(capsys.readouterr().out) == {"conversations": 12}
    for line in lines:
        messages = json.loads(line)["messages"]
        assert [message["role"] for message in messages] == (["user", "assistant"] * 20)[:len(messages)]
        train.encode_conversation(tokenizer, messages, 200)  # raises unless there is an answer to learn
    command("--data", path, "--out", tmp_path, "--updates", 2, "--seq-len", 200)
    assert np.isfinite(losses(tmp_path)).all()


def test_a_conversation_written_in_a_batch_is_the_one_written_alone(target, tokenizer, monkeypatch):
    monkeypatch.setattr(train, "ANSWER_TEMPERATURES", (0.0,))
    monkeypatch.setattr(train, "NEXT_TURN", -1.0)
    questions = [f"Number {i}?" * (1 + i % 3) for i in range(9)]
    together = train.synthesize_batch(target, tokenizer, list(range(9)), questions, 120)
    assert together == [train.synthesize_batch(target, tokenizer, [0], [question], 120)[0] for question in questions]
    assert len({sum(len(m["content"]) for m in messages) for messages in together}) > 2  # they end at different moments


def test_a_file_that_holds_something_else_is_not_written_to(tmp_path, command, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nand their last line")
    with pytest.raises(SystemExit) as error:
        command("--synthesize", 2, "--data", path)
    assert error.value.code == 2 and "other than conversations" in capsys.readouterr().err
    assert path.read_text() == "my notes\nand their last line"


def test_a_target_without_a_stop_token_writes_no_training_data(tmp_path, tiny, command, capsys):
    endless = shutil.copytree(tiny, tmp_path / "endless")
    (endless / "generation_config.json").unlink()
    with pytest.raises(SystemExit):
        command("--synthesize", 2, "--data", tmp_path / "own.jsonl", "--model", endless)
    assert "names no stop token" in capsys.readouterr().err and not (tmp_path / "own.jsonl").exists()


def test_the_target_answers_the_questions_it_is_given(tmp_path, command, data):
    command("--synthesize", 6, "--questions", data, "--data", tmp_path / "own.jsonl")
    asked = [json.loads(line)["data"][0] for line in data.read_text().splitlines()]
    for line in (tmp_path / "own.jsonl").read_text().splitlines():
        question, answer, *_ = json.loads(line)["messages"]
        assert question["role"] == "user" and question["content"] in asked and answer["role"] == "assistant"


def test_a_file_that_is_continued_repeats_no_conversation(tmp_path, command, monkeypatch):
    def write_seeds(target, tokenizer, seeds, questions, seq_len) -> list[list[dict]]:  # nothing comes of two in three
        return [CHAT + [{"role": "user", "content": str(seed)}] if seed % 3 == 0 else [] for seed in seeds]
    monkeypatch.setattr(train, "synthesize_batch", write_seeds)
    for count in (3, 6, 9):
        command("--synthesize", count, "--data", tmp_path / "own.jsonl")
    assert len(set((tmp_path / "own.jsonl").read_text().splitlines())) == 9


def test_a_file_that_is_continued_asks_the_questions_that_are_left_and_can_be_read(tmp_path, command, monkeypatch):
    def answer_some(target, tokenizer, seeds, questions, seq_len) -> list[list[dict]]:
        return [[] if q == "b" else [{"role": "user", "content": q}, {"role": "assistant", "content": "A"}] for q in questions]
    monkeypatch.setattr(train, "synthesize_batch", answer_some)
    own, questions = tmp_path / "own.jsonl", tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"messages": [{"role": "user", "content": q}]}) + "\n" for q in "ab\ud83dcbd"))
    for count in (1, 2, 3):
        command("--synthesize", count, "--data", own, "--questions", questions, "--batch-size", 1)
    assert [json.loads(line)["messages"][0]["content"] for line in own.read_text().splitlines()] == ["a", "c", "d"]


def test_the_default_target_trains_a_drafter_that_speculate_loads(tmp_path, data):
    sizes = ["--mlp", 64, "--kv-heads", 3, "--lsa-mlp", 32, "--lsa-heads", 6]
    trained = run_script("train.py", "--data", data, "--out", tmp_path, "--device", "cpu", "--seq-len", 64,
                         "--batch-size", 2, "--updates", 2, "--json", *sizes)
    assert json.loads(trained.stdout)["update"] == 2
    assert trained.returncode == 0 and np.isfinite(losses(tmp_path)).all()
    answer = run_script("speculate.py", "--drafter", tmp_path, "--device", "cpu", "--prompt", "Hello",
                        "--max-new-tokens", 8, "--draft-length", 2, "--json")
    assert json.loads(answer.stdout)["new_tokens"] == 8
