"""Claims about the distillation: horizons, losses, data, and a training run that survives being killed."""
import functools
import itertools
import json
import os
import random
import resource
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
STOP = 257  # the tiny target's stop token


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
    write(path / "generation_config.json", {"eos_token_id": STOP})
    torch.manual_seed(0)
    model = llama.Llama(llama.Config(**sizes, head_dim=8))
    model.lm_head.weight.normal_(std=0.45)
    model.embed_tokens.weight[:, 0] = 4  # a constant, which the stop token's row of the head turns into its logit
    model.lm_head.weight[STOP, 0] = 1.8
    save_file({name if name == "lm_head.weight" else f"model.{name}": p.clone() for name, p in model.named_parameters()},
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


@pytest.fixture
def error_of(command, capsys):
    """The error of a command, which is one line, after at most a note on the data; the exit status is 2."""
    def run(*arguments) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command(*arguments)
        *notes, message = [line for line in capsys.readouterr().err.splitlines() if " updates" not in line]
        assert end.value.code == 2 and message.startswith("train.py: error: ") and all("skipped" in note for note in notes)
        return message
    return run


def flags(tiny: Path, *arguments) -> list[str]:
    sizes = [] if "--init" in arguments else ["--mlp", 32, "--lsa-mlp", 32]
    return list(map(str, ["--model", tiny, "--device", "cpu", "--seq-len", 96, "--batch-size", 3, "--warmup", 2,
                          *sizes, *arguments]))


def write(path: Path, *lines) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_log(out: Path) -> list[dict]:
    """The log without its speeds."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_log(out) if "loss" in line]


def read_conversations(path: Path) -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def assert_same_run(a: Path, b: Path) -> None:
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert read_log(a) == read_log(b)


def random_drafter(target: llama.Llama, kind: type = moa.Drafter, **choices) -> moa.Drafter:
    torch.manual_seed(1)
    return kind(target, moa.DrafterConfig.sized_for(target, **choices))


def arguments(**changes) -> Namespace:
    defaults = dict(seed=0, horizons=1, run_length=[5, 15], micro_batch_size=1, dtype="float32", kl_weight=0.1,
                    feature_weight=1.0, memory_weight=0.0)
    return Namespace(**{**defaults, **changes})


def sequences(*sizes: tuple[int, int]) -> list[train.Sequence]:
    """Random ones, each of a prompt and an answer of these sizes."""
    g = torch.Generator().manual_seed(0)
    return [train.Sequence(torch.randint(256, (a + b,), generator=g), torch.arange(a + b) >= a) for a, b in sizes]


# --- The losses ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [0, 1])
def test_losses_are_the_authors(n):
    """Averages over the response. Their KL lacks the target's own entropy, which is constant."""
    folder = GOLDEN / f"moa-tiny-n{n}"
    target, golden = llama.load_model(folder / "target"), load_file(folder / "expected.safetensors")
    drafter, expected = moa.load_drafter(folder / "drafter", target), json.loads((folder / "expected.json").read_text())
    response = golden["response_mask"][0].bool()
    # one token more, so that every position of the response is trained
    tokens, answer = F.pad(golden["input_ids"], (0, 1)), F.pad(response, (0, 1), value=True)
    horizon = train.run_horizon(answer, len(answer), 0)
    loss, kl, hidden = train.distill(drafter, tokens, answer[None], horizon[None, None], arguments())[2] / response.sum()
    entropy = torch.distributions.Categorical(logits=golden["target_logits"][0, response]).entropy().mean()
    features = expected["feature_loss"] if n == 0 else (expected["feature_loss"] + expected["prev_feature_loss"]) / 2
    assert kl + entropy == pytest.approx(expected["forward_KL"], abs=1e-4)
    assert hidden == pytest.approx(features, abs=1e-4)
    assert loss + 0.1 * entropy == pytest.approx(expected["loss"], abs=1e-4)


def test_forward_kl_and_its_gradient_are_the_formulas_for_any_chunk_size(monkeypatch):
    features, hidden, head = torch.randn(2, 10, 16, requires_grad=True), torch.randn(10, 16), torch.randn(40, 16)
    log_q, log_p = (features @ head.T).log_softmax(-1), (hidden @ head.T).log_softmax(-1)
    plain = (log_p.exp() * (log_p - log_q)).sum()
    gradient, = torch.autograd.grad(plain, features)
    for chunk in (3, 5, 256):
        monkeypatch.setattr(train, "LOSS_CHUNK", chunk)
        loss = train.ForwardKL.apply(features, hidden, head)
        torch.testing.assert_close(loss, plain)
        torch.testing.assert_close(torch.autograd.grad(3 * loss, features)[0], 3 * gradient)


@pytest.mark.parametrize("n, weight", [(0, 0.0), (1, 0.5)])
def test_many_horizons_in_one_call_are_as_many_calls(target, n, weight):
    drafter, (sequence,) = random_drafter(target, target_layer_inference=n), sequences((9, 30))
    tokens, answer = train.pad([sequence], "cpu")
    horizons = torch.stack([train.run_horizon(sequence.answer, *run) for run in ((5, 0), (7, 3), (11, 10))])

    def total(horizons) -> tuple[torch.Tensor, torch.Tensor]:
        _, _, parts = train.distill(drafter, tokens, answer, horizons[:, None], arguments(memory_weight=weight))
        gradients = torch.autograd.grad(parts[0], list(drafter.parameters()))
        return parts.detach(), torch.cat([g.flatten() for g in gradients])
    together, separate = total(horizons), [total(h[None]) for h in horizons]
    torch.testing.assert_close(together[0], sum(parts for parts, _ in separate))
    torch.testing.assert_close(together[1], sum(gradient for _, gradient in separate), atol=1e-5, rtol=1e-4)


def test_padding_and_micro_batches_change_nothing(target):
    batch, results = sequences((5, 12), (20, 31), (3, 4)), []
    for size in (1, 2, 3):
        drafter, args = random_drafter(target), arguments(micro_batch_size=size, horizons=2, memory_weight=0.3)
        sums = train.compute_gradients(drafter, batch, 0, args)
        results.append([torch.tensor(sums)] + [p.grad for p in drafter.parameters()])
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(results[2], results[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("choices", [{}, {"target_layer_inference": 1}, {"draft_vocabulary": tuple(range(0, 258, 2))}])
def test_the_memory_weight_adds_the_same_loss_on_memories(target, choices):
    drafter, (sequence,) = random_drafter(target, **choices), sequences((9, 30))
    tokens, answer = train.pad([sequence], "cpu")
    horizon, trained = train.run_horizon(sequence.answer, 5, 2)[None, None], train.loss_mask(answer)
    plain, weighted = (train.distill(drafter, tokens, answer, horizon, arguments(memory_weight=w))[2] for w in (0.0, 0.25))
    kv, _, final = train.target_pass(target, tokens, drafter.N)
    memory, final = drafter.memory(kv)[trained], final[trained]
    log_q, log_p = ((x @ drafter.head_weight.T).log_softmax(-1) for x in (memory, final))
    added = 0.1 * F.kl_div(log_q, log_p, reduction="sum", log_target=True) + F.smooth_l1_loss(memory, final) * len(final)
    torch.testing.assert_close(weighted[0], plain[0] + 0.25 * added)
    torch.testing.assert_close(weighted[1:], plain[1:])
    extra = torch.autograd.grad(weighted[0] - plain[0], list(drafter.parameters()), allow_unused=True)
    for (name, _), ours, expected in zip(drafter.named_parameters(), extra, torch.autograd.grad(
            0.25 * added, list(drafter.parameters()), allow_unused=True)):
        assert (expected is not None) == name.startswith(("layer_self_attention", "Ekv2E"))
        torch.testing.assert_close(ours, torch.zeros_like(ours) if expected is None else expected, atol=1e-5, rtol=1e-3)


def test_only_the_assistants_tokens_are_trained(target, tokenizer):
    drafter, sequence = random_drafter(target), train.encode_conversation(tokenizer, CHAT, 96)
    tokens, answer = train.pad([sequence], "cpu")
    horizon = train.run_horizon(sequence.answer, 5, 0)[None, None]
    args = arguments(memory_weight=1.0)
    assert train.distill(drafter, tokens, torch.zeros_like(answer), horizon, args)[2].tolist() == [0, 0, 0]
    changed = tokens.clone()
    changed[0, sequence.answer.nonzero()[-1, 0]:] = 0  # neither the stop token nor what follows it is a query
    torch.testing.assert_close(train.distill(drafter, changed, answer, horizon, args),
                               train.distill(drafter, tokens, answer, horizon, args))


# --- The horizon -----------------------------------------------------------------------------------------------------

def test_a_query_reads_memory_up_to_the_token_before_its_run():
    answer = torch.tensor([0] * 3 + [1] * 12 + [0] * 2 + [1] * 4).bool()
    horizon = train.run_horizon(answer, length=5, phase=2)  # the first run of each answer is 5 - 2 long
    assert horizon.tolist() == [0, 1, 2] + [2] * 3 + [5] * 5 + [10] * 4 + [15, 16] + [16] * 3 + [19]
    trained = [*range(3, 14), *range(17, 20)]  # where a token of the answer follows
    assert train.loss_mask(answer).nonzero()[:, 0].tolist() == trained


def test_runs_have_their_length_and_every_depth_is_trained_at_every_position():
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


# --- Data ------------------------------------------------------------------------------------------------------------

def test_an_answer_is_the_assistants_tokens_and_their_stop_token(tokenizer):
    sequence = train.encode_conversation(tokenizer, CHAT, 200)
    assert sequence.tokens.tolist() == tokenizer.chat(CHAT, add_generation_prompt=False)
    answers = [tokenizer.encode(message["content"]) + [STOP] for message in CHAT if message["role"] == "assistant"]
    assert sequence.tokens[sequence.answer].tolist() == answers[0] + answers[1]
    assert int(sequence.answer.int().diff().clamp(min=0).sum()) == 2  # two stretches


def test_a_conversation_is_cut_at_seq_len(tokenizer):
    full, cut = (train.encode_conversation(tokenizer, CHAT, length) for length in (96, 50))
    assert len(cut.tokens) == 50 and torch.equal(cut.tokens, full.tokens[:50])
    assert torch.equal(cut.answer, full.answer[:50])
    assert train.encode_conversation(tokenizer, CHAT, 20) is None  # no answer so far


def test_four_formats_of_one_conversation_are_read_alike():
    texts = [message["content"] for message in CHAT[:2]]
    records = [{"messages": CHAT[:2]}, {"data": texts}, {"instruction": texts[0], "input": "", "output": texts[1]},
               {"conversations": [{"from": "human", "value": texts[0]}, {"from": "gpt", "value": texts[1]}]}]
    assert [train.read_messages(json.dumps(record).encode()) for record in records] == [CHAT[:2]] * 4
    record = {"instruction": "Translate.", "input": "Döner", "output": "Kebab"}
    assert train.read_messages(json.dumps(record, ensure_ascii=False).encode())[0]["content"] == "Translate.\n\nDöner"


BROKEN = {
    "{half": "not JSON", "[" * 100_000: "not JSON", '"text"': "expected a list", '{"data": 3}': "expected a list",
    '{"text": "?"}': "expected a list", '{"messages": []}': "no answer", '{"messages": [3]}': "needs a role",
    '{"data": ["a", 3]}': "text as content", '{"data": ["only a question"]}': "no answer",
    '{"conversations": [{"from": "tool", "value": ""}]}': "needs a role", '{"conversations": [3]}': "needs a role",
    '{"instruction": "a", "output": null}': "text as content", '{"data": ["\\ud800", "b"]}': "not valid UTF-8"}


def test_a_broken_line_is_named_counted_and_skipped(tmp_path, tokenizer, capsys):
    path = write(tmp_path / "mixed.jsonl", {"messages": CHAT}, *BROKEN, "", {"messages": CHAT})
    data = train.Conversations([str(path)], tokenizer, 96)
    *named, count = capsys.readouterr().err.splitlines()  # at once, not when the line's turn comes
    assert count == f"2 conversations, {len(BROKEN)} lines skipped" and len(named) == data.skipped == len(BROKEN)
    for number, (line, why) in enumerate(zip(named, BROKEN.values()), 2):
        assert line.startswith(f"skipped {path}, line {number}: ") and why in line and len(line) < 500
    assert len(data) == 2 and torch.equal(data[0].tokens, data[1].tokens)


def test_random_access_to_several_files_equals_reading_them_in_order(tmp_path, tokenizer):
    records = [{"data": [f"ö{'?' * i}", f"answer {i}"]} for i in range(20)]
    paths = [write(tmp_path / "a", *records[:7]), write(tmp_path / "b"), write(tmp_path / "c", *records[7:])]
    data = train.Conversations([str(path) for path in paths], tokenizer, 96)
    assert len(data) == 20
    for i in random.Random(0).sample(range(20), 20):
        expected = train.encode_conversation(tokenizer, train.read_messages(json.dumps(records[i]).encode()), 96)
        assert torch.equal(data[i].tokens, expected.tokens) and torch.equal(data[i].answer, expected.answer)


def test_a_large_file_is_not_read_into_memory(tmp_path, tokenizer):
    path = tmp_path / "large.jsonl"
    path.write_text((json.dumps({"data": ["a", "b" * 10_000]}) + "\n") * 2000)  # 20 MB
    tracemalloc.start()
    assert len(train.Conversations([str(path)], tokenizer, 96)[1234].tokens) == 96
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_an_epoch_is_a_permutation_and_the_sampler_can_start_at_any_position():
    indices = np.arange(5, 15)
    sampler = train.Sampler(indices, seed=3)
    walk = [next(sampler) for _ in range(25)]
    assert sorted(walk[:10]) == sorted(walk[10:20]) == indices.tolist() and walk[:10] != walk[10:20]
    for position in range(25):
        sampler = train.Sampler(indices, 3, position)
        assert [next(sampler) for _ in range(25 - position)] == walk[position:] and sampler.position == 25


@pytest.mark.parametrize("lines, why", [
    (None, "cannot be read"), ([], "no usable conversation"), (list(BROKEN), "no usable conversation"),
    ([{"data": ["long" * 99, "b"]}] * 12, "no answer within the first 96 tokens")])
def test_data_without_anything_usable_is_an_error_of_one_line(tmp_path, error_of, lines, why):
    path = tmp_path / "data.jsonl"
    if lines is not None:
        write(path, *lines)
    message = error_of("--data", path, "--out", tmp_path / "out")
    assert str(path) in message and why in message


@pytest.mark.parametrize("choices, why", [
    (["--run-length", 9, 3], "low end"), (["--kv-heads", 3], "invalid SA: 4 heads"), (["--lsa-heads", 500], "invalid LSA"),
    (["--tli", 99], "the target has 3 layers"), (["--seq-len", 100000], "the target's context is 256"),
    (["--dtype", "float16"], "bfloat16"), (["--lr", "nan"], "invalid"), (["--updates", 0], "invalid"),
    (["--init", "nowhere"], "nowhere"), (["--model", "nowhere"], "nowhere"), (["--device", "nowhere"], "nowhere")])
def test_invalid_arguments_are_errors_of_one_line_and_leave_no_folder(tmp_path, data, error_of, choices, why):
    assert why in error_of("--data", data, "--out", tmp_path / "out", *choices)
    assert not (tmp_path / "out").exists()


def test_the_papers_recipe_is_the_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "x"])
    a = train.parse_arguments()
    assert (a.kl_weight, a.feature_weight, a.memory_weight, a.lr, a.warmup, a.run_length, a.batch_size, a.schedule,
            a.clip, a.horizons, a.tli) == (0.1, 1.0, 0.0, 3e-5, 50, [5, 15], 32, "paper", 1.0, 1, 0)
    adamw, = train.make_optimizers(torch.nn.Linear(2, 2), a.optimizer)
    assert type(adamw) is torch.optim.AdamW
    assert adamw.defaults["betas"] == (0.9, 0.95) and adamw.defaults["weight_decay"] == 0


def test_what_is_held_out_is_never_trained_on(tmp_path, data, command, monkeypatch):
    seen = {"compute_gradients": set(), "evaluate": set()}
    for name in seen:
        def record(drafter, batch, *rest, name=name, function=getattr(train, name)):
            seen[name].update(tuple(s.tokens.tolist()) for s in batch)
            return function(drafter, batch, *rest)
        monkeypatch.setattr(train, name, record)
    command("--data", data, "--out", tmp_path, "--updates", 12)
    trained, held_out = seen.values()
    assert len(trained) == 11 and len(held_out) == 1 and not trained & held_out


@pytest.mark.parametrize("blank", [0, 1])
def test_a_single_conversation_trains_before_or_after_a_blank_line(tmp_path, command, blank):
    lines = [{"data": ["Count to 4.", "1, 2, 3, 4"]}]
    lines.insert(blank, "")
    command("--data", write(tmp_path / "data.jsonl", *lines), "--out", tmp_path / "out", "--updates", 1)
    assert len(losses(tmp_path / "out")) == 1


def test_the_draft_vocabulary_is_what_answers_use_most_and_the_stop_token(tmp_path, tokenizer):
    path = write(tmp_path / "data.jsonl", {"data": ["zzzzzzzzzzzz", "aaabbc"]})
    data = train.Conversations([str(path)], tokenizer, 96)
    assert train.frequent_tokens(data, np.array([0]), 3, 258) == tuple(sorted(tokenizer.encode("ab") + [STOP]))
    assert train.frequent_tokens(data, np.array([0]), 999, 258) == tuple(range(258))


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(24, 8, 128), (52, 52, 8), (9, 3, 64), (5, 5, 6)])  # Llama-3.2-3B, ...
def test_every_target_has_a_drafter_of_its_proportions(heads, kv_heads, head_dim):
    with torch.device("meta"):
        target = llama.Llama(llama.Config(258, heads * 8, 48, 3, heads, kv_heads, head_dim))
    assert sum(p.numel() for p in moa.Drafter(target, moa.DrafterConfig.sized_for(target)).parameters()) > 0


# --- Optimisation ----------------------------------------------------------------------------------------------------

def test_the_schedules_are_the_papers_and_a_cosine():
    paper = Namespace(lr=3e-5, schedule="paper", warmup=50)
    rate = [train.learning_rate(update, paper, 1050) / 3e-5 for update in range(2000)]
    assert rate[:50] == pytest.approx([20 * (i + 1) / 50 for i in range(50)])  # up to 20 times the rate,
    assert rate[50:1051] == pytest.approx(np.linspace(20, 1, 1001))  # down to it over the first epoch,
    assert rate[1050:] == pytest.approx([1] * 950)  # constant after
    cosine = Namespace(lr=1.0, schedule="cosine", warmup=1, updates=100)
    assert [train.learning_rate(update, cosine, 10) for update in (0, 50, 100)] == pytest.approx([1, 0.5, 0])


def test_the_gradient_is_clipped_to_the_norm_that_is_asked_for(tmp_path, data, command):
    norms = []
    hook = torch.optim.optimizer.register_optimizer_step_pre_hook(lambda optimizer, *_: norms.append(
        torch.nn.utils.get_total_norm([p.grad for group in optimizer.param_groups for p in group["params"]]).item()))
    for clip in (0.01, 0):
        command("--data", data, "--out", tmp_path / str(clip), "--updates", 1, "--clip", clip)
    hook.remove()
    assert norms[0] == pytest.approx(0.01, rel=1e-3) and norms[1] == pytest.approx(read_log(tmp_path / "0")[0]["grad_norm"])
    assert norms[1] > 0.05


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_lowers_the_loss(tmp_path, data, command, target, optimizer):
    kinds = [(type(o), sorted({p.ndim for group in o.param_groups for p in group["params"]}))
             for o in train.make_optimizers(random_drafter(target), optimizer)]
    assert kinds == [(torch.optim.Muon, [2]), (torch.optim.AdamW, [1])][optimizer == "adamw":] or kinds == [
        (torch.optim.AdamW, [1, 2])]
    few = write(tmp_path / "few.jsonl", *data.read_text().splitlines()[:4])
    command("--data", few, "--out", tmp_path / "out", "--updates", 60, "--optimizer", optimizer, "--lr", 3e-3,
            "--schedule", "cosine")
    loss = losses(tmp_path / "out")
    assert np.mean(loss[-3:]) < 0.7 * np.mean(loss[:3])


@pytest.mark.parametrize("choice, stated", [
    (["--tli", 1], {"target_layer_inference": 1}), (["--no-lsa"], {"use_layer_self_attention": False}),
    (["--no-ca"], {"use_cross_attention": False}), (["--draft-vocabulary", 3], {}), (["--memory-weight", 0.5], {}),
    (["--kv-heads", 2, "--lsa-heads", 2, "--horizons", 2],
     {"self_attention_num_key_value_heads": 2, "layer_self_attention_num_attention_heads": 2})])
def test_every_kind_of_drafter_trains_in_either_type_and_its_config_states_it(tmp_path, data, command, target, choice,
                                                                             stated):
    for dtype in ("float32", "bfloat16"):
        command("--data", data, "--out", tmp_path / dtype, "--updates", 3, "--dtype", dtype, *choice)
    assert losses(tmp_path / "bfloat16") == pytest.approx(losses(tmp_path / "float32"), rel=0.05)
    config = json.loads((tmp_path / "float32" / "config.json").read_text())
    assert {name: config[name] for name in stated} == stated
    drafter = moa.load_drafter(tmp_path / "float32", target)
    if "--draft-vocabulary" in choice:  # there are three more frequent tokens, but a draft may end an answer
        assert len(drafter.config.draft_vocabulary) == 3 and STOP in drafter.config.draft_vocabulary


def test_a_gradient_that_is_not_finite_ends_the_run_and_spares_its_checkpoint(tmp_path, data, error_of):
    choices = ["--data", data, "--out", tmp_path, "--updates", 3, "--save-every", 1, "--lr", 1e30]
    assert "update 2: the gradient is not finite" in error_of(*choices)
    assert torch.load(tmp_path / "checkpoint.pt")["update"] == 1


# --- Evaluation ------------------------------------------------------------------------------------------------------

class Oracle(moa.Drafter):
    """Reuses every layer of the target, and knows what enters them."""

    def self_attend(self, tokens):
        return self.target.embed_tokens(tokens)

    def cross_attend(self, x, memory, horizon):
        return x


@pytest.mark.parametrize("vocabulary", [None, tuple(reversed(range(258)))])
def test_a_drafter_that_knows_the_hidden_state_is_always_right(target, vocabulary):
    oracle = random_drafter(target, Oracle, target_layer_inference=3, draft_vocabulary=vocabulary)
    scores = train.evaluate(oracle, sequences((5, 60), (9, 50)), arguments())
    assert scores["depth_accuracy"] == [1.0] * 8 and scores["implied_acceptance_length"] == 9
    assert scores["held_out_loss"] == pytest.approx(0, abs=1e-5)


def test_a_random_drafter_is_mostly_wrong_and_without_ca_only_its_first_depth_is_scored(target):
    batch = sequences((5, 60), (9, 50))
    assert train.evaluate(random_drafter(target), batch, arguments())["implied_acceptance_length"] < 4
    scores = train.evaluate(random_drafter(target, use_cross_attention=False), batch, arguments())
    assert len(scores["depth_accuracy"]) == 1 and scores["implied_acceptance_length"] == 1 + scores["depth_accuracy"][0]


def test_accuracy_at_a_depth_is_among_runs_that_were_right_before(target, monkeypatch):
    """An answer of three runs: 8, 8 and 3 queries."""
    drafter, (sequence,) = random_drafter(target), sequences((4, 20))
    truth = target.lm_head(train.target_pass(target, sequence.tokens[None], 0)[2])
    wrong = [4 + 2, 4 + 3, 4 + 8 + 5]  # depths 3 and 4 of the first run, depth 6 of the second
    truth[0, wrong] = -truth[0, wrong]
    monkeypatch.setattr(drafter, "logits", lambda features: truth[0, train.loss_mask(sequence.answer)])
    scores = train.evaluate(drafter, [sequence], arguments())
    assert scores["depth_accuracy"] == pytest.approx([1, 1, 2 / 3, 1, 1, 0, 0, 0])
    assert scores["implied_acceptance_length"] == pytest.approx(1 + 1 + 1 + 2 / 3 * 3)


# --- Checkpoints, processes ------------------------------------------------------------------------------------------

LONG = ["--updates", 20, "--save-every", 2, "--eval-every", 7, "--lr", 1e-3]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data, command) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    command("--data", data, "--out", out, *LONG)
    return out


def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path, tiny, data, command, undisturbed):
    checkpoint, draws = tmp_path / "checkpoint.pt", random.Random(0)
    for attempt in range(3):
        before = checkpoint.stat().st_mtime_ns if attempt else 0
        choices = flags(tiny, "--data", data, "--out", tmp_path, *LONG, *["--resume"] * (attempt > 0))
        process = subprocess.Popen([sys.executable, ROOT / "train.py", *choices], stderr=subprocess.DEVNULL)
        while process.poll() is None and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > before):
            time.sleep(0.001)
        time.sleep(draws.uniform(0, 0.1))
        process.kill()
        process.wait()
    command("--data", data, "--out", tmp_path, *LONG, "--resume")
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.parametrize("owner, name, call", [
    (train, "evaluate", 2), (train, "compute_gradients", 11), (train, "save_drafter", 1), (train, "save_drafter", 10),
    (train, "save_checkpoint", 1), (train, "save_checkpoint", 11), (torch, "save", 6),
    *((os, "replace", call) for call in (1, 2, 3, 4, 5, 30, 31, 32))])  # of the first saves and the very last
def test_a_run_can_be_resumed_after_dying_anywhere(tmp_path, data, command, undisturbed, monkeypatch, owner, name, call):
    """Before the `call`-th call of a function: in the middle of a run, and at every step of saving."""
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
        log.write('{"update": 3')  # what was being written
    (tmp_path / "checkpoint.pt.part").write_bytes(b"half")
    command("--data", data, "--out", tmp_path, *LONG, "--resume", "--json")
    assert_same_run(tmp_path, undisturbed)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("choices, why", [
    (["--resume", "--lr", 1], "made with --lr 0.001, not 1.0"), (["--resume", "--tli", 1], "made with --tli 0, not 1"),
    (["--resume", "--schedule", "cosine"], "made with --schedule paper, not cosine"),
    (["--resume", "--data", "changed.jsonl"], "changed since"), ([], "holds a drafter or a checkpoint: add --resume")])
def test_a_checkpoint_is_neither_misused_nor_overwritten(tmp_path, data, error_of, undisturbed, monkeypatch, choices, why):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "changed.jsonl", *data.read_text().splitlines(), {"messages": CHAT})
    before = (undisturbed / "checkpoint.pt").read_bytes()
    assert why in error_of("--data", data, "--out", undisturbed, *LONG, *choices)
    assert (undisturbed / "checkpoint.pt").read_bytes() == before


def test_a_damaged_checkpoint_and_a_drafter_without_one_are_errors_and_left_alone(tmp_path, data, error_of, undisturbed):
    choices = ["--data", data, "--out", tmp_path, *LONG]
    torch.save([1], tmp_path / "checkpoint.pt")
    assert "not a readable checkpoint" in error_of(*choices, "--resume")
    (tmp_path / "checkpoint.pt").write_bytes((undisturbed / "checkpoint.pt").read_bytes()[:-1000])
    assert "not a readable checkpoint" in error_of(*choices, "--resume")
    (tmp_path / "checkpoint.pt").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    for resume in ([], ["--resume"]):
        assert "holds a drafter" in error_of(*choices, *resume)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_a_run_starts_from_another_drafter_and_resumes_without_it(tmp_path, data, command, capsys):
    base, out = tmp_path / "base", tmp_path / "out"
    command("--data", data, "--out", base, "--draft-vocabulary", 12, "--updates", 1)
    choices = ["--data", data, "--out", out, "--init", base, "--lr", 0, "--updates"]
    command(*choices, 1)
    for file in base.iterdir():
        before, after = (load_file(path / file.name) if file.suffix == ".safetensors" else 0 for path in (base, out))
        assert before == 0 or all(before[name].equal(after[name]) for name in before)
    assert (out / "config.json").read_text() == (base / "config.json").read_text()
    shutil.rmtree(base)
    (out / "log.jsonl").unlink()
    capsys.readouterr()
    command(*choices, 3, "--resume", "--json")
    assert json.loads(capsys.readouterr().out)["update"] == 3 and len(losses(out)) == 2
    assert len(json.loads((out / "config.json").read_text())["draft_vocabulary"]) == 12


@pytest.mark.parametrize("spoil, why", [
    (lambda out: out / ("x" * 300), "File name too long"), (lambda out: write(out / "file", "") / "out", "Not a directory")])
def test_a_folder_that_cannot_be_made_is_an_error_of_one_line(tmp_path, data, error_of, spoil, why):
    assert why in error_of("--data", data, "--out", spoil(tmp_path))


@pytest.mark.parametrize("limit, note, culprit", [(100_000, 0, "checkpoint.pt"), (1_000, 0, "log.jsonl"),
                                                  (2_000_000, 1_999_000, "log.jsonl")])
def test_a_full_disk_is_an_error_of_one_line_and_leaves_what_was_there(tmp_path, data, command, error_of, limit, note,
                                                                      culprit):
    """A limit on the size of files stands in for the disk."""
    choices = ["--data", data, "--out", tmp_path, "--save-every", 2, "--updates"]
    command(*choices, 4)
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write(json.dumps({"update": 4, "note": "x" * note}) + "\n")
    names, checkpoint = set(tmp_path.iterdir()), (tmp_path / "checkpoint.pt").read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        message = error_of(*choices, 40, "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"{culprit} cannot be written" in message
    assert set(tmp_path.iterdir()) == names
    assert culprit == "log.jsonl" or (tmp_path / "checkpoint.pt").read_bytes() == checkpoint


def test_processes_train_as_one_does(tmp_path, tiny, data, command):
    """Three of them, of which the last has no share of a batch of two."""
    choices = ["--data", data, "--updates", 4, "--eval-every", 2, "--horizons", 2, "--batch-size", 2]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3, ROOT / "train.py"]
    subprocess.run([*map(str, torchrun), *flags(tiny, *choices, "--out", tmp_path / "three")], check=True)
    command(*choices, "--out", tmp_path / "one")
    one, three = (torch.load(tmp_path / name / "checkpoint.pt")["drafter"] for name in ("one", "three"))
    for name in one:
        torch.testing.assert_close(three[name], one[name], atol=1e-5, rtol=1e-5)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


# --- Synthesis -------------------------------------------------------------------------------------------------------

def test_a_conversation_asks_for_tokens_and_takes_turns(tokenizer, monkeypatch):
    monkeypatch.setattr(train, "NEXT_TURN", 1.0)
    messages, fed, temperatures = [], [], []
    conversation = train.converse(tokenizer, messages, seed=0)
    given, temperature = next(conversation)
    for token in [*itertools.chain(*(tokenizer.encode(message["content"]) + [STOP] for message in CHAT)), STOP]:
        fed += given
        temperatures.append(temperature)
        try:
            given, temperature = conversation.send(token)
        except StopIteration:
            break
    assert messages == CHAT and token == STOP  # an empty turn ends it
    question = tokenizer.chat(CHAT, add_generation_prompt=False) + tokenizer.opening("user")
    assert fed == question  # what the target reads is a conversation as in training
    assert temperatures[0] == train.QUESTION_TEMPERATURE
    assert set(temperatures) <= {train.QUESTION_TEMPERATURE, *train.ANSWER_TEMPERATURES}


@pytest.mark.parametrize("question, kept", [
    ([], []), (CHAT[:1], [CHAT[0], {"role": "assistant", "content": "It"}])])
def test_an_answer_that_is_cut_short_is_kept_and_a_question_is_not(tokenizer, question, kept):
    messages = list(question)
    conversation = train.converse(tokenizer, messages, seed=0)
    next(conversation)
    for token in tokenizer.encode("It"):
        conversation.send(token)
    conversation.close()
    assert messages == kept


def test_the_target_writes_its_own_training_data(tmp_path, command, tokenizer, capsys):
    path = tmp_path / "own.jsonl"
    command("--synthesize", 5, "--data", path)
    first = path.read_bytes()
    path.write_bytes(first + first[:20])  # interrupted in the middle of a line
    command("--synthesize", 12, "--data", path)
    lines = path.read_bytes().splitlines()
    assert len(lines) == len(set(lines)) == 12 and first.count(b"\n") == 5 and path.read_bytes().startswith(first)
    capsys.readouterr()
    command("--synthesize", 3, "--data", path, "--json")
    assert json.loads(capsys.readouterr().out) == {"conversations": 12}
    for messages in read_conversations(path):
        assert [message["role"] for message in messages] == (["user", "assistant"] * 20)[:len(messages)]
        assert train.encode_conversation(tokenizer, messages, 200)  # there is an answer to learn
    command("--data", path, "--out", tmp_path, "--updates", 2, "--seq-len", 200)
    assert np.isfinite(losses(tmp_path)).all()


def test_a_conversation_written_in_a_batch_is_the_one_written_alone(target, tokenizer, monkeypatch):
    monkeypatch.setattr(train, "ANSWER_TEMPERATURES", (0.0,))
    monkeypatch.setattr(train, "NEXT_TURN", -1.0)
    questions = [f"Number {i}?" * (1 + i % 3) for i in range(9)]
    together = train.synthesize_batch(target, tokenizer, list(range(9)), questions, 120)
    assert together == [train.synthesize_batch(target, tokenizer, [0], [question], 120)[0] for question in questions]
    assert len({sum(len(m["content"]) for m in messages) for messages in together}) > 2  # they end at different moments


def test_the_target_answers_the_questions_it_is_given(tmp_path, command, error_of, data):
    command("--synthesize", 6, "--questions", data, "--data", tmp_path / "own.jsonl")
    asked = [json.loads(line)["data"][0] for line in data.read_text().splitlines()]
    for question, answer, *_ in read_conversations(tmp_path / "own.jsonl"):
        assert question["role"] == "user" and question["content"] in asked and answer["role"] == "assistant"
    for questions, why in ((tmp_path / "none", "cannot be read"), (write(tmp_path / "empty", "?"), "no conversation")):
        assert why in error_of("--synthesize", 6, "--questions", questions, "--data", tmp_path / "own.jsonl")


def answer_some(target, tokenizer, seeds, questions, seq_len) -> list[list[dict]]:
    """In place of the target's own conversations: as texts the seed or the question, and nothing of two in three."""
    texts = [question or str(seed) for question, seed in zip(questions, seeds)]
    keep = [text in "acd" if question else seed % 3 == 0 for text, seed, question in zip(texts, seeds, questions)]
    return [[{"role": "user", "content": t}, {"role": "assistant", "content": "Ä"}] if k else [] for t, k in zip(texts, keep)]


def test_a_file_that_was_cut_anywhere_and_is_continued_repeats_and_loses_no_conversation(tmp_path, command, monkeypatch):
    monkeypatch.setattr(train, "synthesize_batch", answer_some)
    monkeypatch.setattr(train, "load_target", functools.cache(train.load_target))
    monkeypatch.setattr(train.load_target, "__hash__", object.__hash__, raising=False)
    path = tmp_path / "own.jsonl"
    command("--synthesize", 3, "--data", path)
    first = path.read_bytes()
    for cut in range(0, len(first) + 1, 5):
        path.write_bytes(first[:cut])
        command("--synthesize", 6, "--data", path)
        lines = path.read_bytes().splitlines()
        assert len(set(lines)) == len(lines) == 6
        assert lines[:first[:cut].count(b"\n")] == first.splitlines()[:first[:cut].count(b"\n")]


def test_a_file_that_is_continued_asks_the_questions_that_are_left(tmp_path, command, monkeypatch):
    monkeypatch.setattr(train, "synthesize_batch", answer_some)
    own, questions = tmp_path / "own.jsonl", tmp_path / "questions.jsonl"
    write(questions, *({"messages": [{"role": "user", "content": q}]} for q in "ab\ud83dcbd"))
    for count in (1, 2, 3):
        command("--synthesize", count, "--data", own, "--questions", questions, "--batch-size", 1)
    assert [messages[0]["content"] for messages in read_conversations(own)] == ["a", "c", "d"]


@pytest.mark.parametrize("text", ["my notes\nand their last line", '{"data": ["a", "b"]}\n', "{"])
def test_a_file_that_holds_something_else_is_not_written_to(tmp_path, error_of, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    assert "other than conversations" in error_of("--synthesize", 2, "--data", path) and path.read_text() == text


def test_a_target_that_ends_no_turn_and_a_length_that_holds_no_answer_are_errors_of_one_line(tmp_path, tiny, error_of):
    endless = shutil.copytree(tiny, tmp_path / "endless")
    (endless / "generation_config.json").unlink()
    own = ["--synthesize", 2, "--data", tmp_path / "own.jsonl"]
    assert "names no stop token" in error_of(*own, "--model", endless) and not (tmp_path / "own.jsonl").exists()
    assert "raise --seq-len above 16" in error_of(*own, "--seq-len", 16, "--batch-size", 64)


# --- On the real target ----------------------------------------------------------------------------------------------

def test_the_default_target_trains_a_drafter_that_speculate_loads(tmp_path, data):
    sizes = ["--mlp", 64, "--kv-heads", 3, "--lsa-mlp", 32, "--lsa-heads", 6]
    trained = run_script("train.py", "--data", data, "--out", tmp_path, "--device", "cpu", "--seq-len", 64,
                         "--batch-size", 2, "--updates", 2, "--json", *sizes)
    assert trained.returncode == 0 and json.loads(trained.stdout)["update"] == 2 and np.isfinite(losses(tmp_path)).all()
    answer = run_script("speculate.py", "--drafter", tmp_path, "--device", "cpu", "--prompt", "Hello",
                        "--max-new-tokens", 8, "--draft-length", 2, "--json")
    assert json.loads(answer.stdout)["new_tokens"] == 8
