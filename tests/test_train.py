"""Claims about the distillation: horizons, losses, and a training run that survives being killed."""
import itertools
import json
import multiprocessing
import os
import random
import resource
import runpy
import shutil
import subprocess
import sys
import time
import tracemalloc
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN, ROOT, run_script
from safetensors.torch import load_file, save_file
from test_llama import byte_tokenizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import llama
import moa
import train

CHAT = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "Döner?"}, {"role": "assistant", "content": "Gladly, döner."}]
STOP = 257  # the tiny target's stop token

@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random Llama as Hugging Face would write it. Its tokens are bytes, about every twelfth a stop token."""
    path = byte_tokenizer(tmp_path_factory.mktemp("tiny"), ["<|im_start|>", "<|im_end|>"])
    sizes = dict(vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256)
    write(path / "config.json", {"model_type": "llama", **sizes})
    write(path / "generation_config.json", {"eos_token_id": STOP})
    torch.manual_seed(0)
    model = llama.Llama(llama.Config(**sizes, head_dim=8))
    model.lm_head.weight.normal_(std=0.45)
    model.embed_tokens.weight[:, 0] = 4  # a constant, which the stop token's row of the head turns into its logit
    model.lm_head.weight[STOP, 0] = 1.8
    save_file({f"model.{name}".replace("model.lm_head", "lm_head"): p for name, p in model.named_parameters()},
              path / "model.safetensors")
    counts = [", ".join(map(str, range(1, n))) for n in range(4, 16)]
    write(path / "data.jsonl", *({"data": [f"Count: {c[:9]}", c, "Thanks!", "Any time."]} for c in counts))
    return path

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

def error_of(command, capsys, *arguments) -> str:
    """The error of a command: one line, the last on stderr, and exit status 2."""
    with pytest.raises(SystemExit) as end:
        command(*arguments)
    message = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and message.startswith("train.py: error: ")
    return message

def flags(tiny: Path, *arguments) -> list[str]:
    return [*f"--model {tiny} --device cpu --seq-len 96 --batch-size 3 --warmup 2 --mlp 32 --lsa-mlp 32".split(),
            "--data", str(tiny / "data.jsonl"), *map(str, arguments)]

def write(path: Path, *lines) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path

def read_log(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]

def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_log(out) if "loss" in line]

def random_drafter(target: llama.Llama, **choices) -> moa.Drafter:
    torch.manual_seed(1)
    return moa.Drafter(target, moa.DrafterConfig.sized_for(target, **choices))

def arguments(**changes) -> Namespace:
    return Namespace(**dict(seed=0, horizons=1, run_length=[5, 15], micro_batch_size=1, dtype="float32", kl_weight=0.1,
                            feature_weight=1.0, memory_weight=0.0) | changes)

def sequences(*sizes: tuple[int, int]) -> list[train.Sequence]:
    """Random ones, each of a prompt and an answer of these sizes."""
    g = torch.Generator().manual_seed(0)
    return [train.Sequence(torch.randint(256, (a + b,), generator=g), torch.arange(a + b) >= a) for a, b in sizes]

def encode(tokenizer: llama.Tokenizer, path: Path, seq_len: int, *records: dict) -> train.Conversations:
    return train.Conversations([str(write(path, *records))], tokenizer, seq_len)

def losses_of(drafter: moa.Drafter, sequence: train.Sequence, *runs: tuple[int, int], **changes) -> torch.Tensor:
    """Loss, KL and hidden-state loss under a horizon for each (length, phase)."""
    horizons = torch.stack([train.run_horizon(sequence.answer, *run) for run in runs])[:, None]
    return train.distill(drafter, *(field[None] for field in sequence), horizons, arguments(**changes))[2]


# --- Losses and horizons ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [0, 1])
def test_losses_are_the_authors(n):
    """Averages over the response. Their KL lacks the target's own entropy, which is constant."""
    folder = GOLDEN / f"moa-tiny-n{n}"
    target, golden = llama.load_model(folder / "target"), load_file(folder / "expected.safetensors")
    drafter, expected = moa.load_drafter(folder / "drafter", target), json.loads((folder / "expected.json").read_text())
    response = golden["response_mask"][0].bool()
    # one token more, so that every position of the response is trained
    tokens, answer = F.pad(golden["input_ids"], (0, 1)), F.pad(response, (0, 1), value=True)
    loss, kl, hidden = losses_of(drafter, train.Sequence(tokens[0], answer), (len(answer), 0)) / response.sum()
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

@pytest.mark.parametrize("n", [0, 1])
def test_padding_micro_batches_and_many_horizons_in_one_call_change_nothing(target, n):
    batch, separate, together = sequences((5, 12), (20, 31), (3, 4)), [], []
    drafter, runs = random_drafter(target, target_layer_inference=n), [(5, 0), (7, 3), (11, 10)]
    for calls in [runs], [[run] for run in runs]:
        sums = sum(losses_of(drafter, batch[1], *call, memory_weight=0.5) for call in calls)
        separate.append((sums, torch.autograd.grad(sums[0], list(drafter.parameters()))))
    for size in (1, 2, 3):
        drafter, args = random_drafter(target), arguments(micro_batch_size=size, horizons=2, memory_weight=0.3)
        means = train.compute_gradients(drafter, batch, 0, args)
        together.append([torch.tensor(means)] + [p.grad for p in drafter.parameters()])
        torch.testing.assert_close(together[-1], together[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(*separate, atol=1e-5, rtol=1e-4)

@pytest.mark.parametrize("choices", [{}, {"target_layer_inference": 1}, {"draft_vocabulary": tuple(range(0, 258, 2))}])
def test_the_memory_weight_adds_the_same_loss_on_memories(target, choices):
    drafter, (sequence,) = random_drafter(target, **choices), sequences((9, 30))
    plain, weighted = (losses_of(drafter, sequence, (5, 2), memory_weight=weight) for weight in (0, 0.25))
    kv, _, final = train.target_pass(target, sequence.tokens[None], drafter.N)
    memory, final = (x[:, train.loss_mask(sequence.answer)] for x in (drafter.memory(kv), final))
    log_q, log_p = ((x @ drafter.head_weight.T).log_softmax(-1) for x in (memory, final))
    kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    added = 0.1 * kl + F.smooth_l1_loss(memory, final) * final.shape[1]
    torch.testing.assert_close(weighted, plain + torch.tensor([0.25, 0, 0]) * added)
    of_memory = [p for name, p in drafter.named_parameters() if name.startswith(("layer_self_attention", "Ekv2E"))]
    torch.testing.assert_close(torch.autograd.grad(weighted[0] - plain[0], of_memory),
                               torch.autograd.grad(0.25 * added, of_memory), atol=1e-5, rtol=1e-3)

def test_only_the_assistants_tokens_are_trained(tmp_path, target, tokenizer):
    drafter, chat = random_drafter(target), encode(tokenizer, tmp_path / "chat", 96, {"messages": CHAT})[0]
    nothing, changed = train.Sequence(chat.tokens, torch.zeros_like(chat.answer)), chat.tokens.clone()
    assert losses_of(drafter, nothing, (5, 0), memory_weight=1.0).tolist() == [0, 0, 0]
    changed[chat.answer.nonzero()[-1, 0]:] = 0  # neither the stop token nor what follows it is a query
    torch.testing.assert_close(*(losses_of(drafter, train.Sequence(tokens, chat.answer), (5, 0), memory_weight=1.0)
                                 for tokens in (changed, chat.tokens)))

def test_a_query_reads_memory_up_to_the_token_before_its_run_and_every_depth_is_trained_at_every_position():
    answer = torch.tensor([0] * 3 + [1] * 12 + [0] * 2 + [1] * 4).bool()
    horizon = train.run_horizon(answer, length=5, phase=2)  # the first run of each answer is 5 - 2 long
    assert horizon.tolist() == [0, 1, 2] + [2] * 3 + [5] * 5 + [10] * 4 + [15, 16] + [16] * 3 + [19]
    assert train.loss_mask(answer).nonzero()[:, 0].tolist() == [*range(3, 14), *range(17, 20)]  # and it goes on
    for length in range(5, 16):
        horizons = torch.stack([train.run_horizon(torch.arange(40) >= 4, length, phase) for phase in range(length)])
        depths = torch.arange(40) - horizons
        assert not depths[:, :4].any()  # a prompt sees itself
        for phase, depth in enumerate(depths[:, 4:]):
            starts = (depth == 1).nonzero()[:, 0]
            assert starts[0] == 0 and starts[1] == length - phase and (starts[1:].diff() == length).all()
        assert all(set(depths[:, 4 + i].tolist()) == set(range(1, min(length, i + 1) + 1)) for i in range(36))


# --- Data ------------------------------------------------------------------------------------------------------------
def test_an_answer_is_the_assistants_tokens_and_their_stop_token_up_to_seq_len(tmp_path, tokenizer):
    sequence, cut, none = (encode(tokenizer, tmp_path / "a", n, {"messages": CHAT})[0] for n in (200, 50, 20))
    assert sequence.tokens.tolist() == tokenizer.chat(CHAT, add_generation_prompt=False)
    answers = [tokenizer.encode(message["content"]) + [STOP] for message in CHAT if message["role"] == "assistant"]
    assert sequence.tokens[sequence.answer].tolist() == answers[0] + answers[1]
    assert int(sequence.answer.int().diff().clamp(min=0).sum()) == 2  # two stretches
    assert torch.equal(cut.tokens, sequence.tokens[:50]) and torch.equal(cut.answer, sequence.answer[:50])
    assert none is None  # no answer so far

def test_four_formats_of_one_conversation_are_read_alike():
    texts = [message["content"] for message in CHAT[:2]]
    records = [{"messages": CHAT[:2]}, {"data": texts}, {"instruction": texts[0], "input": "", "output": texts[1]},
               {"instruction": "What is", "input": "2 + 2?", "output": texts[1]},
               {"conversations": [{"from": "human", "value": texts[0]}, {"from": "gpt", "value": texts[1]}]}]
    *same, = [train.read_messages(json.dumps(record).encode()) for record in records]
    assert same.pop(3)[0]["content"] == "What is\n\n2 + 2?" and same == [CHAT[:2]] * 4

BROKEN = {
    "{half": "Expecting", "[" * 100_000: "recursion", '"text"': "expected a list", '{"data": 3}': "expected a list",
    '{"messages": []}': "no answer", '{"messages": [3]}': "needs a role", '{"data": ["a", 3]}': "text as content",
    '{"data": ["a question"]}': "no answer", '{"conversations": [{"from": "tool", "value": ""}, 3]}': "needs a role",
    '{"instruction": "a", "output": null}': "text as content", '{"data": ["\\ud800", "b"]}': "not valid UTF-8"}

def test_lines_of_large_files_are_read_where_they_are_and_a_broken_one_is_named_counted_and_skipped(
        tmp_path, tokenizer, capsys):
    records = [{"data": [f"ö{'?' * (i % 9)}", f"answer {i}" + "b" * 10_000]} for i in range(1000)]  # 10 MB
    paths = [write(tmp_path / "a", *records[:300], *BROKEN, "", records[300]), write(tmp_path / "b", *records[301:])]
    data = train.Conversations([str(path) for path in paths], tokenizer, 96)
    *named, count = capsys.readouterr().err.splitlines()  # at once, not when the line's turn comes
    assert count == f"1000 conversations, {len(BROKEN)} lines skipped" and len(named) == len(BROKEN)
    for number, (line, why) in enumerate(zip(named, BROKEN.values()), 301):
        assert line.startswith(f"skipped {paths[0]}, line {number}: ") and why in line and len(line) < 500
    for i in (999, 0, 789, 301, 300, 299):
        messages = train.read_messages(json.dumps(records[i]).encode())
        assert data[i].tokens.tolist() == tokenizer.chat(messages, add_generation_prompt=False)[:96]
    tracemalloc.start()
    assert train.Conversations([str(paths[1])], tokenizer, 96)[400] and tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()

def test_an_epoch_is_a_permutation_and_can_be_gone_on_with_at_any_position():
    def walk(position: int) -> list[tuple[int, int]]:
        return list(itertools.islice(train.shuffled(range(20), np.arange(5, 15), 3, position), 25 - position))
    order, positions = zip(*walk(0))
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(5, 15)) and order[:10] != order[10:20]
    assert positions == tuple(range(1, 26)) and all(walk(position) == walk(0)[position:] for position in range(25))

def test_one_usable_conversation_is_found_in_every_epoch():
    data = {i: i if i == 7 else None for i in range(10)}
    found = list(itertools.islice(train.shuffled(data, np.arange(10), 0), 20))
    assert [(i, (position - 1) // 10) for i, position in found] == [(7, epoch) for epoch in range(20)]

def test_what_is_held_out_is_never_trained_on(tmp_path, command, monkeypatch):
    seen = {"compute_gradients": set(), "evaluate": set()}
    for name, texts in seen.items():
        def record(drafter, batch, *rest, texts=texts, function=getattr(train, name)):
            texts.update(tuple(sequence.tokens.tolist()) for sequence in batch)
            return function(drafter, batch, *rest)
        monkeypatch.setattr(train, name, record)
    command("--out", tmp_path, "--updates", 12)
    assert list(map(len, seen.values())) == [11, 1] and not set.intersection(*seen.values())


# --- Optimisation and evaluation -------------------------------------------------------------------------------------
def test_the_papers_recipe_is_the_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "x"])
    a = train.parse_arguments()
    assert (a.kl_weight, a.feature_weight, a.memory_weight, a.lr, a.warmup, a.run_length, a.batch_size, a.schedule,
            train.CLIP, a.horizons, a.tli) == (0.1, 1.0, 0.0, 3e-5, 50, [5, 15], 32, "paper", 1.0, 1, 0)
    adamw, = train.make_optimizers(torch.nn.Linear(2, 2), a.optimizer)
    assert adamw.defaults["betas"] == (0.9, 0.95) and adamw.defaults["weight_decay"] == 0
    rate = [train.learning_rate(update, a, 1050) / 3e-5 for update in range(2000)]
    assert rate[:50] == pytest.approx([20 * (i + 1) / 50 for i in range(50)])  # up to 20 times the rate,
    assert rate[50:1051] == pytest.approx(np.linspace(20, 1, 1001))  # down to it over the first epoch,
    assert rate[1050:] == pytest.approx([1] * 950)  # constant after
    cosine = Namespace(lr=1.0, schedule="cosine", warmup=1, updates=100)
    assert [train.learning_rate(update, cosine, 10) for update in (0, 50, 100)] == pytest.approx([1, 0.5, 0])

def test_one_conversation_trains_and_its_gradient_is_clipped(tmp_path, command, monkeypatch):
    path, norms = write(tmp_path / "data.jsonl", "", {"data": ["Count to 4.", "1, 2, 3, 4"]}, ""), []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: norms.append(
        torch.nn.utils.get_total_norm([p.grad for p in optimizer.param_groups[0]["params"]]).item()))
    for clip in (0.01, 1.0):
        monkeypatch.setattr(train, "CLIP", clip)
        command("--data", path, "--out", tmp_path / str(clip), "--updates", 1)
    hook.remove()
    norm = read_log(tmp_path / "1.0")[0]["grad_norm"]
    assert norms == pytest.approx([0.01, min(norm, 1.0)], rel=1e-3) and norms[1] > 0.05

def test_a_gradient_that_is_not_finite_ends_the_run_and_spares_its_checkpoint(tmp_path, command, capsys):
    choices = ["--out", tmp_path, "--updates", 3, "--save-every", 1, "--lr", 1e30]
    assert "update 2: the gradient is not finite" in error_of(command, capsys, *choices)
    assert torch.load(tmp_path / "checkpoint.pt")["update"] == 1

@pytest.mark.parametrize("optimizer, kinds", [("adamw", {"AdamW": {1, 2}}), ("muon", {"Muon": {2}, "AdamW": {1}})])
def test_training_lowers_the_loss(tmp_path, tiny, command, target, optimizer, kinds):
    optimizers = train.make_optimizers(random_drafter(target), optimizer)
    assert {type(o).__name__: {p.ndim for p in o.param_groups[0]["params"]} for o in optimizers} == kinds
    few = write(tmp_path / "few.jsonl", *(tiny / "data.jsonl").read_text().splitlines()[:4])
    command("--data", few, "--out", tmp_path / "out", "--updates", 50, "--optimizer", optimizer, "--lr", 3e-3,
            "--schedule", "cosine")
    loss = losses(tmp_path / "out")
    assert np.mean(loss[-3:]) < 0.7 * np.mean(loss[:3])

@pytest.mark.parametrize("choice, name, value", [
    ("--tli 1", "target_layer_inference", 1), ("--no-lsa", "use_layer_self_attention", False),
    ("--no-ca", "use_cross_attention", False), ("--draft-vocabulary 999", "draft_vocabulary", tuple(range(258))),
    ("--draft-vocabulary 3", "draft_vocabulary", (11, 220, STOP)),  # of answers that count: comma and space
    ("--kv-heads 2 --memory-weight 1 --horizons 2", "cross_attention_num_key_value_heads", 2)])
def test_every_kind_of_drafter_trains_in_either_type_and_loads(tmp_path, command, target, choice, name, value):
    for dtype in ("float32", "bfloat16"):
        command("--out", tmp_path / dtype, "--updates", 3, "--dtype", dtype, *choice.split())
    assert losses(tmp_path / "bfloat16") == pytest.approx(losses(tmp_path / "float32"), rel=0.05)
    assert getattr(moa.load_drafter(tmp_path / "float32", target).config, name) == value

@pytest.mark.parametrize("heads, kv_heads, head_dim", [(24, 8, 128), (52, 52, 8), (9, 3, 64), (5, 5, 6)])
def test_every_target_has_a_drafter_of_its_proportions(heads, kv_heads, head_dim):
    with torch.device("meta"):
        target = llama.Llama(llama.Config(258, heads * 8, 48, 3, heads, kv_heads, head_dim))
    assert all(p.numel() for p in moa.Drafter(target, moa.DrafterConfig.sized_for(target)).parameters())

@pytest.mark.parametrize("vocabulary", [None, tuple(reversed(range(258)))])
def test_a_drafter_that_knows_the_hidden_state_is_always_right(target, vocabulary, monkeypatch):
    """It reuses every layer of the target, and is given what enters them."""
    oracle = random_drafter(target, target_layer_inference=3, draft_vocabulary=vocabulary)
    monkeypatch.setattr(oracle, "self_attend", lambda tokens: target.embed_tokens(tokens))
    monkeypatch.setattr(oracle, "cross_attend", lambda x, memory, horizon: x)
    batch = sequences((5, 60), (9, 50))
    scores = train.evaluate(oracle, batch, arguments())
    assert scores["depth_accuracy"] == [1.0] * 8 and scores["implied_acceptance_length"] == 9
    assert scores["held_out_loss"] == pytest.approx(0, abs=1e-5)
    assert train.evaluate(random_drafter(target), batch, arguments())["implied_acceptance_length"] < 4
    without_ca = train.evaluate(random_drafter(target, use_cross_attention=False), batch, arguments())
    assert len(without_ca["depth_accuracy"]) == 1

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
LONG = ["--updates", 12, "--save-every", 2, "--eval-every", 5, "--lr", 1e-3]

@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, command) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    command("--out", out, *LONG)
    return out

def test_a_finished_drafter_is_evaluated_as_while_it_was_trained(tmp_path, tiny, command, undisturbed, capsys):
    held_out, *_ = np.random.default_rng(0).permutation(12)
    line = (tiny / "data.jsonl").read_text().splitlines()[held_out]
    command("--evaluate", undisturbed, "--data", write(tmp_path / "held_out.jsonl", line))
    scores, logged = json.loads(capsys.readouterr().out), read_log(undisturbed)[-1]
    for name in "held_out_kl", "held_out_hidden", "depth_accuracy":
        assert scores[name] == pytest.approx(logged[name], rel=0.01)  # saved in bfloat16

def assert_same_run(a: Path, b: Path) -> None:
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert read_log(a) == read_log(b) and not list(a.glob("*.part"))

def test_a_run_that_is_killed_and_resumed_ends_as_if_it_had_not_been(tmp_path, tiny, command, undisturbed):
    log = tmp_path / "log.jsonl"
    for lines in (3, 8):
        choices = flags(tiny, "--out", tmp_path, *LONG, "--resume")
        process = subprocess.Popen([sys.executable, ROOT / "train.py", *choices], stderr=subprocess.DEVNULL)
        while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= lines):
            time.sleep(0.001)
        process.kill()
        process.wait()
    command("--out", tmp_path, *LONG, "--resume")
    assert_same_run(tmp_path, undisturbed)

@pytest.mark.parametrize("owner, name, call", [
    (train, "evaluate", 2), (train, "compute_gradients", 6), (torch, "save", 1), (torch, "save", 4), (torch, "save", 7),
    *((os, "replace", call) for call in (1, 2, 3, 4, 5, 18, 19, 20))])  # of the first saves and of the very last
def test_a_run_can_be_resumed_after_dying_anywhere(tmp_path, command, undisturbed, owner, name, call):
    """Before the `call`-th call of a function: in the middle of a run, and at every step of saving."""
    original, calls = getattr(owner, name), itertools.count(1)

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

def test_a_finished_run_goes_on_without_its_log_where_it_had_ended(tmp_path, command, capsys, undisturbed):
    out = shutil.copytree(undisturbed, tmp_path / "out")
    (out / "log.jsonl").unlink()
    command("--out", out, *LONG, "--updates", 14, "--resume", "--json")
    assert json.loads(capsys.readouterr().out)["update"] == 14 and len(losses(out)) == 2

@pytest.mark.parametrize("limit, why", [(60_000, "checkpoint.pt cannot"), (1_000, "too large")])  # the latter: the log
def test_a_full_disk_is_an_error_and_leaves_what_was_there(tmp_path, command, capsys, limit, why):
    command("--out", tmp_path, "--updates", 4)
    names, checkpoint = set(tmp_path.iterdir()), (tmp_path / "checkpoint.pt").read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # it stands in for the disk
    try:
        assert why in error_of(command, capsys, "--out", tmp_path, "--updates", 40, "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert set(tmp_path.iterdir()) == names and (tmp_path / "checkpoint.pt").read_bytes() == checkpoint

def test_three_processes_train_as_one_does(tmp_path, tiny, command):
    """The last of them has no share of a batch of two."""
    choices = ["--updates", 4, "--eval-every", 2, "--horizons", 2, "--batch-size", 2, "--out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", ROOT / "train.py"]
    subprocess.run([*torchrun, *flags(tiny, *choices, tmp_path / "three")], check=True)
    command(*choices, tmp_path / "one")
    weights = [torch.load(tmp_path / name / "checkpoint.pt")["drafter"] for name in ("one", "three")]
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-5)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


# --- Synthesis and bad input -----------------------------------------------------------------------------------------
def written(path: Path) -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in path.read_bytes().splitlines()]

def converse(target: llama.Llama, tokenizer: llama.Tokenizer, *openings: list[dict],
             seq_len: int = 200) -> list[list[dict]]:
    """The conversations that begin like this, in the order in which they end."""
    args = Namespace(seq_len=seq_len, batch_size=4)
    return [messages for messages, _ in train.converse(target, tokenizer, iter(openings), len(openings), 0, args)]

def question(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]

def test_a_conversation_takes_turns_and_keeps_an_answer_that_is_cut_short_but_no_question(tokenizer, monkeypatch):
    def run(take):
        """A batch that writes these turns, and notes what it is asked for."""
        for tokens, item in zip(turns, iter(take, None)):
            asked.append(item[1:])
            yield llama.Conversation(item[0], item[2], None, tokens)
    monkeypatch.setattr(train, "NEXT_TURN", 1.0)
    monkeypatch.setattr(train, "Batch", lambda *_: Namespace(run=run))
    told, cut = [tokenizer.encode(message["content"]) + [STOP] for message in CHAT], tokenizer.encode("It")
    for start, turns, expected in (
            (0, [*told, [STOP]], CHAT), (0, [*told, cut], CHAT), (0, [cut], None), (1, [[STOP]], None),
            (1, [cut], CHAT[:1] + [{"role": "assistant", "content": "It"}])):
        asked = []
        assert converse(None, tokenizer, CHAT[:start]) == ([expected] if expected else [])
        for i, (prompt, config) in enumerate(asked, start):
            assert prompt == tokenizer.chat(CHAT[:i], False) + tokenizer.opening(("user", "assistant")[i % 2])
            assert len(prompt) + config.max_new_tokens == 200 and config.stop_ids == {STOP}
            assert config.temperature in (train.ANSWER_TEMPERATURES if i % 2 else [train.QUESTION_TEMPERATURE])
    turns = told[1:]
    assert converse(None, tokenizer, CHAT[:1], seq_len=80) == [CHAT[:2]]  # 31 tokens are left: no room for a question
    assert converse(None, tokenizer, question("long" * 50)) == []  # and no answer to one that is cut

def test_a_conversation_written_in_a_batch_is_the_one_written_alone(target, tokenizer, monkeypatch):
    monkeypatch.setattr(train, "ANSWER_TEMPERATURES", (0.0,))
    monkeypatch.setattr(train, "NEXT_TURN", -1.0)
    texts = [f"Number {i}?" * (1 + i % 3) for i in range(9)]
    together = converse(target, tokenizer, *map(question, texts), seq_len=120)
    alone = [messages for text in texts for messages in converse(target, tokenizer, question(text), seq_len=120)]
    assert together != alone and sorted(together, key=str) == sorted(alone, key=str)  # they end at different moments

def test_the_target_writes_its_own_training_data_and_answers_questions(tmp_path, command, tokenizer, capsys):
    questions = write(tmp_path / "questions", *({"data": [f"Count to {i % 9}.", "1"]} for i in range(18)))
    asked = set(train.read_questions(questions))
    for path, choices in (tmp_path / "own", []), (tmp_path / "answers", ["--questions", questions]):
        command("--synthesize", 7, "--data", path, *choices)
        for messages in written(path):
            assert [message["role"] for message in messages] == (["user", "assistant"] * 20)[:len(messages)]
        assert all(encode(tokenizer, tmp_path / "copy", 200, *({"messages": m} for m in written(path))))  # to train on
        assert len(written(path)) == 7 and ({m[0]["content"] for m in written(path)} <= asked) == bool(choices)
    for _ in range(6):  # an answer may come out empty
        command("--synthesize", 99, "--data", path, *choices, "--json")
    assert sorted(m[0]["content"] for m in written(path)) == sorted(asked)  # each once
    command("--synthesize", 3, "--data", path, "--json")
    assert capsys.readouterr().out.endswith('{"conversations": 9}\n' * 2)
    command("--data", tmp_path / "own", "--out", tmp_path, "--updates", 2, "--seq-len", 200)
    assert np.isfinite(losses(tmp_path)).all()

def test_a_file_cut_anywhere_and_continued_repeats_and_loses_nothing(tmp_path, command, monkeypatch):
    def answer_some(target, tokenizer, openings, count, seed, args):
        """Conversations that hold their question or seed; none for "b"."""
        for i, messages in zip(range(count), (messages for messages in openings if messages != question("b"))):
            yield (messages := messages or question(f"{seed} {i}")) + [{"role": "assistant", "content": "Ä"}], 1
            assert written(path)[-1][:1] == messages  # at once
    monkeypatch.setattr(train, "converse", answer_some)
    path, questions = tmp_path / "own", write(tmp_path / "questions", *({"data": [q]} for q in "ab\ud83dcbd"))
    command("--synthesize", 3, "--data", path)
    first = path.read_bytes()
    for cut in range(0, len(first) + 1, 9):
        path.write_bytes(first[:cut])
        command("--synthesize", 6, "--data", path)
        lines, complete = path.read_bytes().splitlines(), first[:cut].count(b"\n")
        assert len(set(lines)) == len(written(path)) == 6 and lines[:complete] == first.splitlines()[:complete]
    path.unlink()
    for count in (1, 2, 9):
        command("--synthesize", count, "--data", path, "--questions", questions, "--batch-size", 1)
    assert [messages[0]["content"] for messages in written(path)] == ["a", "c", "d"]

@pytest.mark.parametrize("ask", [False, True])
def test_synthesis_killed_at_any_moment_and_resumed_loses_doubles_and_breaks_no_line(
        tmp_path, tiny, command, monkeypatch, ask):
    path, draws, lines = tmp_path / "own", random.Random(0), []
    file = write(tmp_path / "questions", *({"data": [f"Count to {i}.", "1"]} for i in range(300)))
    task = ["--synthesize", 150, "--data", path, *(["--questions", file] if ask else [])]
    path.touch()
    monkeypatch.setattr(sys, "argv", ["train.py", *flags(tiny, *task)])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # which takes most of a process's start
    for more in (0, 1, 2, 20, 0, 9):
        process = context.Process(target=runpy.run_path, args=(str(ROOT / "train.py"), None, "__main__"))
        before = lines
        process.start()
        while process.is_alive() and path.read_bytes().count(b"\n") < len(before) + more:
            time.sleep(draws.uniform(0, 0.01))
        process.kill()
        process.join()
        lines = path.read_bytes().splitlines(keepends=True)
        assert lines[:len(before)] == before and len(lines) < 150
    command(*task)
    assert path.read_bytes().splitlines(keepends=True)[:len(lines)] == lines and len(written(path)) == 150
    texts = [messages[0]["content"] for messages in written(path)]
    texts = [text for text in texts if ask or len(text) > 5]  # of its own, short ones come up again by chance
    assert len(texts) == len(set(texts)) > 50

@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny, undisturbed) -> Path:
    """A folder with a run, a damaged one, one whose checkpoint is gone, and data of several kinds."""
    path = tmp_path_factory.mktemp("files")
    run, damaged, gone = (shutil.copytree(undisturbed, path / n) / "checkpoint.pt" for n in ("run", "damaged", "gone"))
    damaged.write_bytes(run.read_bytes()[:-1000])
    gone.unlink()
    (shutil.copytree(tiny, path / "endless") / "generation_config.json").unlink()
    for name, lines in {"empty": [], "broken": BROKEN, "long": [{"data": ["long" * 99, "b"]}] * 12,
                        "own": [{"messages": CHAT}], "deep": ["[" * 100_000]}.items():
        write(path / name, *lines)
    return path

@pytest.mark.parametrize("choices, why", [
    ("--data nowhere", "nowhere: cannot be read"), ("--data empty", "empty: no usable conversation"),
    ("--data broken", "broken: no usable conversation"), ("--data long", "no answer within"),
    ("--data long --evaluate run", "no answer within"),
    ("--kv-heads 3", "num_key_value_heads 3"), ("--lr nan", "invalid"),
    ("--lsa-heads 500", "num_attention_heads 500"), ("--tli 99", "3 layers"), ("--seq-len 100000", "context is 256"),
    ("--updates 0", "invalid"), ("--dtype float16", "bfloat16"), 
    ("--model nowhere", "nowhere"), ("--device nowhere", "nowhere"), ("--out empty/out", "Not a directory"),
    (f"--out {'x' * 300}", "name too long: 'xxx"), ("--out run --resume --lr 1", "made with --lr 0.001, not 1.0"),
    ("--out run --resume --tli 1", "made with --tli 0, not 1"), ("--out run --resume --data own", "not own (checksum"),
    ("--out run --resume --schedule cosine", "made with --schedule paper, not cosine"),
    ("--out run", "holds work: --resume goes on"), ("--out gone", "holds work"),
    ("--out gone --resume", "holds work"), ("--out damaged --resume", "not a readable checkpoint"),
    ("--synthesize 2 --data long", "holds no conversations"), ("--synthesize 2 --data run", "cannot be written"),
    ("--synthesize 2 --data own --model endless", "no stop token"),
    ("--synthesize 2 --data own --questions nowhere", "cannot be read"),
    ("--synthesize 2 --data own --questions empty", "no conversation with a question"),
    ("--synthesize 2 --data own --questions deep", "no conversation with a question"),
    ("--synthesize 502 --data own --seq-len 16 --batch-size 250", "raise --seq-len above 16")])
def test_bad_input_is_an_error_of_one_line_and_changes_no_file(files, command, capsys, monkeypatch, choices, why):
    monkeypatch.chdir(files)
    before = {path: path.is_file() and path.read_bytes() for path in files.rglob("*")}
    assert why in error_of(command, capsys, "--out", "out", *LONG, *choices.split())
    assert {path: path.is_file() and path.read_bytes() for path in files.rglob("*")} == before

def test_the_default_target_trains_a_drafter_that_speculate_loads(tmp_path, tiny):
    choices = "--seq-len 64 --batch-size 2 --updates 1 --json --mlp 64 --kv-heads 3 --lsa-mlp 32 --lsa-heads 6".split()
    trained = run_script("train.py", "--data", tiny / "data.jsonl", "--out", tmp_path, "--device", "cpu", *choices)
    assert trained.returncode == 0 and json.loads(trained.stdout)["update"] == 1 and np.isfinite(losses(tmp_path)).all()
    answer = run_script("speculate.py", "--drafter", tmp_path, "--device", "cpu", "--prompt", "Hello",
                        "--max-new-tokens", 8, "--draft-length", 2, "--json")
    assert json.loads(answer.stdout)["new_tokens"] == 8
