"""Claims about the comparison of drafters: that all arms are of one size, that each learns what it
says, that what is computed along a text is what drafting gives, and that a training that was killed
comes to the same end."""
import json
import shutil
import sys
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import close
from test_train import sequences
from tiny_models import new_target
from tiny_target import make_tiny_target, write

from app.answers import Alone, answer
from app.training import Optimizers, RunConfig, choose_optimizer
from experiments import compare, intervals, paper_family, report, side_by_side
from experiments.along_text import (
    Text,
    acceptance_by_depth,
    count_passes,
    entropies,
    features_by_depth,
    mean_by_depth,
)
from experiments.arms import ARMS, WithArm, count_parameters, new_drafter_of, sharpened
from experiments.autoregressive import AutoregressiveState, unroll
from experiments.paper_family import moa_features, scale_of_states
from experiments.reading import Reading, StateVerifier, read
from experiments.side_by_side import Entrant, loss_of, loss_of_steps, make_lesson, make_update
from llama import Attention, GenerationConfig, Llama, Sampling, probabilities
from moa import Draft, Drafter, DraftLimits, kv_hidden_size
from plumbing.conversations import Conversations, hold_out
from plumbing.errors import InputError
from plumbing.tokenizer import load_tokenizer
from train import Example, compute_gradients, count_trained, draw_examples, drafter_pass

PROMPT = [0, 3, 1, 4]
DEPTH = 3
STEPWISE = [name for name, arm in ARMS.items() if arm.is_autoregressive]


@pytest.fixture(scope="module")
def target() -> Llama:
    return new_target(6, layers=6)


def drafter_of(name: str, target: Llama) -> Drafter:
    """A random drafter. With six tokens it is right by chance now and then."""
    return new_drafter_of(ARMS[name], target, 24, None, seed=1)


# --- The arms ---


def test_all_arms_but_four_larger_ones_are_as_large_as_the_papers_within_3_percent(toy, target):
    for model, width in ((toy[0], None), (target, 24)):
        sizes = {}
        for name, arm in ARMS.items():
            sizes[name] = count_parameters(new_drafter_of(arm, model, width, None, seed=0))
        layer = sum(parameter.numel() for parameter in model.layers[0].parameters())
        expected = dict.fromkeys(ARMS, sizes["full"])
        for name in ("n-1-new", "n-1-new-scaled", "full-larger", "full-three-layers"):
            expected[name] += layer
        assert sizes == pytest.approx(expected, rel=0.03)


def test_all_arms_have_as_many_kv_heads_as_the_target(toy, smollm2):
    for model in (toy[0], smollm2[0]):
        for arm in ARMS.values():
            drafter = new_drafter_of(arm, model, None, None, seed=0)
            for name, module in drafter.named_modules():
                part = name.partition(".")[0]
                if isinstance(module, Attention) and part not in ("target", "layer_self_attention"):
                    assert module.kv_heads == model.config.num_key_value_heads


def test_the_compared_lsa_works_and_is_far_smaller_than_sa(toy, smollm2):
    for (model, *_), share in ((toy, 0.27), (smollm2, 0.45)):
        drafter = new_drafter_of(ARMS["full"], model, None, None, seed=0)
        kv = torch.zeros(1, 2, model.config.num_hidden_layers, kv_hidden_size(model.config))
        assert drafter.layer_self_attend(kv).shape == (1, 2, kv.shape[-1])
        lsa = sum(p.numel() for p in drafter.layer_self_attention.parameters())
        sa = sum(p.numel() for p in drafter.self_attention.parameters())
        assert lsa / sa < share


LAYERS = 8
ALL_KV = {f"kv {i}" for i in range(LAYERS)}


@pytest.mark.parametrize("name, expected", [
    ("full", ALL_KV),
    ("full-one-layer", ALL_KV),
    ("n-2", ALL_KV),
    ("last-layer", {f"kv {LAYERS - 1}"}),
    ("last-layer-lsa", {f"kv {LAYERS - 1}"}),
    ("last-layer-one-layer", {f"kv {LAYERS - 1}"}),
    ("last-state", {"final"}),
    ("last-input", {f"state {LAYERS - 1}"}),
    ("glide", {f"kv {LAYERS - 1}"}),
    ("glide-one-layer", {f"kv {LAYERS - 1}"}),
    ("no-memory", set()),
    ("no-memory-one-layer", set()),
    ("no-memory-two-attentions", set()),
    ("eagle", {"final"}),
    ("eagle-two-layers", {"final"}),
    ("hass", {"final"}),
    ("eagle-two-layers-on-policy", {"final"}),
    ("hass-two-layers", {"final"}),
    ("eagle-3", {"state 1", "state 4", "state 7"}),  # the outputs of layers 0, 3 and 6
])
@torch.no_grad()
def test_an_arm_reads_of_the_target_what_it_says_and_nothing_else(name, expected):
    target = new_target(6, layers=LAYERS)
    drafter = drafter_of(name, target)
    reading = read(target, torch.tensor([[0, 3, 1, 4, 2]]))

    def features(changed: str = "") -> torch.Tensor:
        """With noise in the place of one part of what the target computes."""
        kv, states, final = reading.kv.clone(), list(reading.states), reading.final
        if changed.startswith("kv"):
            kv[:, :, int(changed[3:])] = torch.randn_like(kv[:, :, 0])
        elif changed.startswith("state"):
            states[int(changed[6:])] = torch.randn_like(final)
        elif changed == "final":
            final = torch.randn_like(final)
        return features_by_depth(
            drafter, ARMS[name], Reading(reading.tokens, kv, states, final), depth=2
        )

    parts = [*sorted(ALL_KV), *[f"state {i}" for i in range(LAYERS + 1)], "final"]
    before = features()
    assert {part for part in parts if not torch.equal(features(part), before)} == expected


@pytest.mark.parametrize("name", STEPWISE)
@torch.no_grad()
def test_step_s_of_a_query_is_what_drafting_computes_there_in_a_draft_with_root_i_minus_s(
        name, target):
    """In trees of the text's own tokens, each of which has a wrong one before it."""
    drafter = drafter_of(name, target)
    text = [0, 3, 1, 4, 2, 5, 3, 0]
    steps = [drafter.feature(a) for a in unroll(drafter, read(target, torch.tensor([text])), 4)]
    verifier = StateVerifier(target, drafter, 16, Sampling())
    state = AutoregressiveState(drafter, 16, Sampling())
    state.append_verified(verifier.prefill(text[:1]).update)
    for root in range(2, len(text)):
        state.append_verified(verifier.prefill([text[root - 1]]).update)
        draft = Draft(text[root])
        frontier = [0]
        for a, token in zip(steps, text[root + 1:] + [0]):
            close(state.step(draft, frontier)[-1], a[0, root + draft.depth(frontier[-1])])
            parent = frontier[-1]
            frontier = [draft.add(other, parent, 1.0) for other in (5 - token, token)]


@torch.no_grad()
def test_verified_tokens_and_the_root_may_pass_through_the_layers_in_any_portions(target):
    drafter = drafter_of("eagle-two-layers", target)
    outputs = []
    for portions in ([PROMPT], [PROMPT[:1], PROMPT[1:]]):
        for drafts_between in (False, True):
            verifier = StateVerifier(target, drafter, 16, Sampling())
            state = AutoregressiveState(drafter, 16, Sampling())
            for tokens in portions:
                state.append_verified(verifier.prefill(tokens).update)
                if drafts_between:
                    state.draft(1, DraftLimits(depth=2))
            state.discard_draft()
            outputs.append(state.step(Draft(2), [0]))
    for output in outputs[1:]:
        close(output, outputs[0])


@torch.no_grad()
def test_a_sharpened_drafter_has_the_q_of_its_temperature_until_the_block_ends(target):
    for name in ("full", "eagle"):
        drafter = drafter_of(name, target)
        hidden = torch.randn(3, 16)
        plain = drafter.distributions(hidden, Sampling())
        with sharpened(drafter, 0.5):
            sharp = drafter.distributions(hidden, Sampling())
        close(sharp, plain**2 / (plain**2).sum(-1, keepdim=True))
        assert torch.equal(drafter.distributions(hidden, Sampling()), plain)


# --- Losses ---


CONFIG = RunConfig(micro_batch_size=2)
AS_IN_TRAIN = {  # the settings of train.py that an arm stands for
    "full": {},
    "full-unmasked": {"run_length": (1, 1)},
    "full-one-run": {"run_length": (100_000, 100_000)},
    "full-kl-1": {"kl_weight": 1.0},
    "n-1": {},
    "n-2": {},
    "n-4": {},
    "kl-only": {"feature_weight": 0.0},
}


def some_batch() -> list[Example]:
    return [(tokens % 6, answer) for tokens, answer in sequences((4, 18), (3, 12), (5, 9))]


def gradients(drafter: Drafter) -> list[torch.Tensor]:
    return [parameter.grad for parameter in drafter.trained_parameters().values()]


def test_side_by_side_each_of_the_papers_arms_learns_what_train_py_would_teach_it(
        target, monkeypatch):
    monkeypatch.setattr(side_by_side, "MAX_GRADIENT_NORM", 1e9)
    entrants = []
    for name in AS_IN_TRAIN:
        drafter = drafter_of(name, target)
        entrants.append(Entrant(name, ARMS[name], target, drafter, 0.1, Optimizers()))
    losses = make_update(entrants, some_batch(), 7, CONFIG)
    for entrant in entrants:
        ours = gradients(entrant.drafter)
        config = replace(CONFIG, **AS_IN_TRAIN[entrant.name])
        examples = draw_examples(some_batch(), 7, config)
        total = count_trained(examples)
        loss, _, _ = compute_gradients(entrant.drafter, examples, total, config) / total
        assert float(losses[entrant.name]) == pytest.approx(float(loss), rel=1e-5)
        torch.testing.assert_close(ours, gradients(entrant.drafter), atol=1e-5, rtol=1e-4)


def test_each_arm_is_trained_at_a_rate_of_its_own(target):
    entrants = []
    for rate in (0.0, 0.1):
        drafter = drafter_of("full", target)
        optimizer = choose_optimizer(drafter.trained_parameters().values(), "muon")
        entrants.append(Entrant(str(rate), ARMS["full"], target, drafter, rate, optimizer))
    make_update(entrants, some_batch(), 0, replace(CONFIG, updates=4, schedule="cosine"))
    still, moved = [entrant.drafter.Ekv2E.weight for entrant in entrants]
    untrained = drafter_of("full", target).Ekv2E.weight
    assert torch.equal(still, untrained) and not torch.equal(moved, untrained)


def test_gradients_that_are_not_finite_end_the_training_before_they_reach_a_drafter(target):
    drafter = drafter_of("full", target)
    with torch.no_grad():
        drafter.Ekv2E.weight.fill_(torch.inf)
    optimizer = choose_optimizer(drafter.trained_parameters().values(), "adamw")
    entrant = Entrant("full", ARMS["full"], target, drafter, 0.1, optimizer)
    with pytest.raises(InputError, match="update 3: the gradients of full are not finite"):
        make_update([entrant], some_batch(), 3, CONFIG)


@torch.no_grad()
def test_a_step_is_trained_where_query_and_root_are_in_an_answer_and_weighs_less_than_the_last(
        target):
    arm = replace(ARMS["eagle-3"], steps=3, feature_weight=0.5)
    drafter = drafter_of("eagle-3", target)
    entrant = Entrant("", arm, target, drafter, 0.1, Optimizers())
    tokens = torch.randint(6, (1, 12))
    # Two answers. The last query of one predicts a token of the user's.
    answers = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0]]).bool()
    pairs = [[2, 3, 4, 8, 9], [3, 4, 9], [4]]  # queries of each step
    lesson = make_lesson(target, drafter.lm_head, Example(tokens, answers, answers))
    loss = loss_of_steps(entrant, lesson, torch.zeros(1, 12, 16))
    kl = smooth_l1 = 0.0
    for step, a in enumerate(unroll(drafter, lesson.reading, 3)):
        for i in pairs[step]:
            final = lesson.reading.final[0, i]
            feature = drafter.feature(a[0, i])
            p = target.lm_head(final).softmax(-1)
            q = target.lm_head(feature).softmax(-1)
            kl += 0.8**step * (p * (p / q).log()).sum() / (1 + 0.8 + 0.64)
            distance = torch.nn.functional.smooth_l1_loss(feature, final)
            smooth_l1 += 0.8**step * distance / (1 + 0.8 + 0.64)
    close(loss, 0.1 * kl + 0.5 * smooth_l1)


def likeliest_terms(final: torch.Tensor, log_q: torch.Tensor, target: Llama) -> torch.Tensor:
    """The terms of the cross-entropy of p and q (V) of the two tokens likeliest under p."""
    p = target.lm_head(final).softmax(-1)
    first, second = p.argsort(descending=True)[:2]
    return -(p[first] * log_q[first] + p[second] * log_q[second])


@torch.no_grad()
def test_hass_weighs_all_steps_alike_and_learns_the_ten_likeliest_tokens_once_more(monkeypatch):
    monkeypatch.setattr(side_by_side, "LIKELIEST", 2)
    target = new_target(6, layers=2)
    drafter = drafter_of("hass", target)
    entrant = Entrant("", ARMS["hass"], target, drafter, 0.1, Optimizers())
    tokens = torch.randint(6, (1, 4))
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    lesson = make_lesson(target, drafter.lm_head, Example(tokens, everywhere, everywhere))
    expected = 0.0
    for step, a in enumerate(unroll(drafter, lesson.reading, 3)):
        for i in range(step, 3):  # no token follows the last
            final = lesson.reading.final[0, i]
            p = target.lm_head(final).softmax(-1)
            log_q = target.lm_head(a[0, i]).log_softmax(-1)
            expected += 0.1 * (p * (p.log() - log_q)).sum()
            expected += likeliest_terms(final, log_q, target)
            expected += torch.nn.functional.smooth_l1_loss(a[0, i], final)
    close(loss_of_steps(entrant, lesson, torch.zeros(1, 4, 16)), expected / 3)


@torch.no_grad()
def test_the_papers_drafter_too_can_learn_the_likeliest_tokens_once_more(target, monkeypatch):
    monkeypatch.setattr(side_by_side, "LIKELIEST", 2)
    drafter = drafter_of("full", target)
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    example = Example(torch.tensor([PROMPT]), everywhere, everywhere)
    lesson = make_lesson(target, drafter.lm_head, example)
    horizon = torch.tensor([[-1, -1, 1, 1]])
    losses = []
    for name in ("full", "full-hass-loss"):
        entrant = Entrant(name, ARMS[name], target, drafter, 0.1, Optimizers())
        losses.append(loss_of(entrant, lesson, horizon, torch.zeros(1, 4, 16)))
    [(_, features)] = moa_features(drafter, lesson.reading, [horizon])
    expected = 0.0
    for i in range(3):
        log_q = target.lm_head(features[0, i]).log_softmax(-1)
        expected += likeliest_terms(lesson.reading.final[0, i], log_q, target)
    close(losses[1] - losses[0], expected)


def test_the_state_that_enters_the_toys_last_layer_is_some_ten_times_as_large_as_the_final_one(toy):
    model, tokenizer = toy[:2]
    reading = read(model, torch.tensor([tokenizer.encode("def add(a, b):\n    return a + b\n")]))
    entering, final = reading.states[-2], reading.final
    assert 7 < entering.pow(2).mean().sqrt() / final.pow(2).mean().sqrt() < 15
    assert scale_of_states(model) == 10


@pytest.mark.parametrize(["name", "output_scale", "loss_unit"], [
    ("n-1-scaled", 10, 10),
    ("n-1-scaled-output", 10, 1),
    ("n-1-scaled-loss", 1, 10),
    ("n-1-scaled-no-ca-loss", 10, None),
    ("n-1-no-ca-loss", 1, None),
    ("n-1-new-scaled", 10, 10),
])
@torch.no_grad()
def test_ca_is_scaled_in_its_output_or_in_the_unit_of_its_loss(
        name, output_scale, loss_unit, target, monkeypatch):
    monkeypatch.setattr(paper_family, "scale_of_states", lambda target: 10.0)
    drafter = drafter_of(name, target)
    scale = loss_unit or 1.0
    entrant = Entrant("", ARMS[name], target, drafter, 0.1, Optimizers(), scale)
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    example = Example(torch.tensor([PROMPT]), everywhere, everywhere)
    lesson = make_lesson(target, drafter.lm_head, example)
    horizon = torch.tensor([[-1, -1, 1, 1]])
    loss = loss_of(entrant, lesson, horizon, torch.zeros(1, 4, 16))
    [(output, features)] = moa_features(drafter, lesson.reading, [horizon])
    kl = of_final = of_entering = 0.0
    for i in range(3):
        log_p = target.lm_head(lesson.reading.final[0, i]).log_softmax(-1)
        log_q = target.lm_head(features[0, i]).log_softmax(-1)
        kl += (log_p.exp() * (log_p - log_q)).sum()
        entering = lesson.reading.states[5][0, i]  # the last of six layers
        distance = torch.nn.functional.smooth_l1_loss
        of_final += distance(features[0, i], lesson.reading.final[0, i])
        of_entering += distance(output[0, i] / scale, entering / scale)
    if loss_unit is None:
        close(loss, 0.1 * kl + of_final)
    else:
        close(loss, 0.1 * kl + (of_final + of_entering) / 2)
    if output_scale > 1:
        drafter.cross_attention.scale = 1.0
        [(unscaled, _)] = moa_features(drafter, lesson.reading, [horizon])
        close(output, output_scale * unscaled)


@torch.no_grad()
def test_a_new_last_layer_is_trained_and_with_the_targets_weights_it_is_the_reused_one(target):
    reused = drafter_of("n-1", target)
    new = drafter_of("n-1-new", target)
    reading = read(target, torch.tensor([PROMPT]))
    horizon = torch.tensor([[-1, -1, 1, 1]])
    [(_, expected)] = moa_features(reused, reading, [horizon])
    parameters = new.trained_parameters()
    others = reused.trained_parameters()
    assert parameters.keys() - others.keys() == {
        f"last_layer.{name}" for name, _ in target.layers[-1].named_parameters()
    }
    for name, parameter in parameters.items():
        if name in others:
            parameter.copy_(others[name])
    [(_, features)] = moa_features(new, reading, [horizon])
    assert not torch.allclose(features, expected, atol=0.01)
    new.last_layer.load_state_dict(target.layers[-1].state_dict())
    [(_, features)] = moa_features(new, reading, [horizon])
    close(features, expected)


@pytest.mark.parametrize("detached", [False, True])
def test_detached_steps_take_as_given_what_the_step_before_has_computed(detached, target):
    drafter = drafter_of("eagle", target)
    reading = read(target, torch.tensor([PROMPT]))
    first, second = unroll(drafter, reading, 2, detached=detached)
    first.retain_grad()
    second.sum().backward()
    assert (first.grad is None) == detached


# --- Along a text ---


def passes_along(
    name: str, target: Llama, drafter: Drafter, texts: list[Text], depth: int
) -> list[float]:
    """texts: of one length."""
    reading = read(target, torch.stack([text.tokens for text in texts]))
    accepted = acceptance_by_depth(drafter, ARMS[name], reading, texts, depth)
    return [count_passes(a, text.prompt, len(text.tokens)) for a, text in zip(accepted, texts)]


# The other arms are drafters of these kinds that were trained otherwise.
KINDS = [
    "full", "full-one-layer", "last-layer", "last-layer-lsa", "last-layer-one-layer", "last-state",
    "last-input", "glide", "glide-one-layer", "n-1", "n-4", "n-1-scaled", "n-1-new",
    "full-three-layers", *STEPWISE,
]


@pytest.mark.parametrize("name", KINDS)
def test_greedy_chains_take_as_many_passes_along_a_text_as_while_drafting(name, target):
    drafter = drafter_of(name, target)
    method = WithArm(target, drafter, DraftLimits(depth=DEPTH))
    texts, calls = [], []
    for first in range(3):
        prompt = [first, *PROMPT]
        generation = answer(method, prompt, GenerationConfig(max_new_tokens=16))
        texts.append(Text(torch.tensor(prompt + generation.tokens), len(prompt), 0.0))
        calls.append(generation.target_calls)
    assert passes_along(name, target, drafter, texts, DEPTH) == calls
    assert sum(calls) < 3 * 15  # some drafts were accepted


@pytest.mark.parametrize("name", KINDS)
def test_a_drafter_in_float32_drafts_for_a_target_in_bfloat16(name):
    target = new_target(6, layers=6).bfloat16()
    config = GenerationConfig(max_new_tokens=8)
    method = WithArm(target, drafter_of(name, target), DraftLimits(depth=2, top_k=2))
    expected = answer(Alone(target), PROMPT, config)
    assert answer(method, PROMPT, config).tokens == expected.tokens


@pytest.mark.parametrize("name", ["full", "eagle"])
def test_sampled_chains_take_as_many_passes_on_average_as_their_texts_let_expect(name):
    target = new_target(5, layers=1, sharpness=2.0)
    drafter = drafter_of(name, target)
    method = WithArm(target, drafter, DraftLimits(depth=2))
    texts, calls = [], []
    for seed in range(200):
        generation = answer(method, PROMPT, GenerationConfig(5, temperature=1.0, seed=seed))
        texts.append(Text(torch.tensor(PROMPT + generation.tokens), len(PROMPT), 1.0))
        calls.append(generation.target_calls)
    excess = torch.tensor(calls) - torch.tensor(passes_along(name, target, drafter, texts, 2))
    error = float(excess.std()) / len(calls) ** 0.5
    assert 0 < error < 0.06
    assert abs(float(excess.mean())) < 4 * error


@pytest.mark.parametrize("accepted, count, passes", [
    # 1 is written. Then 2 is accepted, not 3. 4 is not. 5 is.
    ([[0, 1, 1, 0, 1], [0, 1, 0, 1, 1]], 6, 3.0),
    # Passes that are needed after token 3: 1. After 2: 1 + 0.75 * 1 = 1.75.
    # After 1: 1 + 0.5 * 1.75 (2 is rejected) + 0.5 * 0.4 * 1 (3 is).
    ([[0, 0.5, 0.25, 0.9], [0, 0.1, 0.6, 0.1]], 5, 2.075),
    ([[0, 0, 0, 0, 0, 0]], 7, 5.0),  # a pass for each token but the first
])
def test_passes_are_counted_as_by_hand(accepted, count, passes):
    assert count_passes(torch.tensor(accepted), 1, count) == pytest.approx(passes)


@torch.no_grad()
def test_entropies_are_of_p_and_of_q_at_the_first_token_of_each_draft(target):
    drafter = drafter_of("full", target)
    tokens = torch.tensor([[*PROMPT, 2, 5, 3]])
    reading = read(target, tokens)
    text = Text(tokens[0], len(PROMPT), temperature=0.7)
    of_p, of_q = entropies(drafter, ARMS["full"], reading, [text])
    # All tokens before a root are verified.
    _, features = drafter_pass(drafter, tokens, reading.kv, torch.arange(7).unsqueeze(0) - 1)
    for found, logits in ((of_p, target(tokens)), (of_q, drafter.lm_head(features))):
        of_roots = probabilities(logits[0, len(PROMPT):-1], 0.7)
        close(found, torch.distributions.Categorical(of_roots).entropy())


def test_the_mean_at_a_depth_is_over_drafts_whose_root_is_in_the_answer():
    text = Text(torch.arange(6), prompt=2, temperature=0.0)
    accepted = torch.tensor([  # by depth, of tokens 1 to 5
        [9, 9, 1, 0, 1],
        [9, 9, 9, 1, 0],
    ]).float()
    assert mean_by_depth([accepted], [text]) == [0.6667, 0.5]


# --- The command ---


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = make_tiny_target(tmp_path_factory.mktemp("tiny"))
    write(path / "prompts.jsonl", *[{"prompt": text} for text in ("Hi?", "Why?", "Is it?")])
    return path


def command(tiny: Path, out: Path, *arguments) -> None:
    sizes = "--device cpu --seq-len 64 --batch-size 2 --save-every 2 --tree-prompts 1"
    lengths = "--max-new-tokens 8 --mlp 24"
    files = ["--model", tiny, "--data", tiny / "data.jsonl", "--prompts", tiny / "prompts.jsonl"]
    flags = [*files, "--out", out, *sizes.split(), *lengths.split(), *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["compare.py", *map(str, flags)])
        compare.main()


def test_a_comparison_that_was_killed_goes_on_to_the_same_rows(tiny, tmp_path, capsys):
    flags = "--arms full eagle no-memory --lr 0.002 --updates 6 --stages 3 6 --seeds 1 --json"

    def rows_of(name: str) -> list[dict]:
        command(tiny, tmp_path / name, *flags.split())
        return json.loads(capsys.readouterr().out)["rows"]

    def killed_at_five(entrants, batch, update, config):
        if update == 5:
            raise KeyboardInterrupt
        return make_update(entrants, batch, update, config)

    expected = rows_of("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "make_update", killed_at_five)
        with pytest.raises(KeyboardInterrupt):
            rows_of("killed")
    assert rows_of("killed") == expected
    assert [(row["updates"], row["arm"]) for row in expected] == [
        (3, "full"), (3, "eagle"), (3, "no-memory"), (6, "full"), (6, "eagle"), (6, "no-memory")]
    assert rows_of("killed") == expected  # and nothing is trained again
    assert set(report.KINDS) <= set(expected[-1])


def test_learning_rates_are_chosen_by_answers_to_held_out_prompts_and_kept(
        tiny, tmp_path, capsys, monkeypatch):
    passes = {"full@0.002": 8, "full@0.004": 6, "full@0.008": 7}
    passes |= {"eagle@0.002": 9, "eagle@0.004": 8, "eagle@0.008": 5}
    scored = []

    def score_chains(entrants, texts, dtype):
        scored.extend(texts)
        counts = {}
        for entrant in entrants:
            assert entrant.name.endswith(f"@{entrant.rate}")
            counts[entrant.name] = {"tokens": [10], "passes": [passes[entrant.name]]}
        return counts

    flags = ["--arms", "full", "eagle", "--updates", 8, "--seeds"]
    with monkeypatch.context() as patch:
        patch.setattr(compare, "score_chains", score_chains)
        command(tiny, tmp_path, *flags)
    rates = json.loads((tmp_path / "rates-muon.json").read_text())["rates"]
    assert rates == {"full": 0.004, "eagle": 0.008}
    monkeypatch.setattr(compare, "train_side_by_side", None)  # nothing is trained again
    command(tiny, tmp_path, *flags)
    assert capsys.readouterr().err.count(str(rates)) == 2
    with pytest.raises(InputError, match="rates-muon.json was made with other settings"):
        command(tiny, tmp_path, *flags, "--updates", 16)
    data = Conversations([tiny / "data.jsonl"], load_tokenizer(tiny), 64)
    _, [(tokens, is_answer)] = hold_out(data, seed=0)
    [text] = scored  # in one batch, of all arms at all rates
    assert text.tokens[:text.prompt].tolist() == tokens[is_answer.cumsum(0) == 0].tolist()


def test_an_arm_that_reuses_more_layers_than_the_target_has_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match="--arms n-4: the target has only 3 layers"):
        command(tiny, tmp_path, "--arms", "full", "n-4")


def test_glide_is_refused_where_the_target_scales_its_rope(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "scaled")
    file = tmp_path / "scaled" / "config.json"
    config = json.loads(file.read_text())
    config["rope_scaling"] = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match="--arms glide: the target's RoPE is scaled"):
        command(tmp_path / "scaled", tmp_path, "--arms", "full", "glide")


def test_its_help_fits_a_screen(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--help"])
    with pytest.raises(SystemExit):
        compare.main()
    assert 20 < len(capsys.readouterr().out.splitlines()) <= 50


# --- The report ---


@pytest.mark.parametrize("of_prompts, of_seeds", [(1.0, 0.02), (1.0, 0.1), (0.1, 0.5)],
    ids=["prompts differ most", "both matter", "seeds differ most"])
def test_intervals_of_three_seeds_contain_the_truth_as_often_as_they_say(of_prompts, of_seeds):
    """Made-up experiments on 80 prompts, whose true mean is 0."""
    generator = np.random.default_rng(1)
    experiments = 400
    hits = 0
    for _ in range(experiments):
        prompts = generator.normal(scale=of_prompts, size=80)
        seeds = generator.normal(scale=of_seeds, size=(3, 1))
        values = prompts + seeds + generator.normal(scale=0.1, size=(3, 80))
        counts = np.stack([values, np.ones_like(values)])
        low, high = intervals.interval_over_seeds_and_prompts(report.length, counts)
        hits += low < 0 < high
    assert 0.93 < hits / experiments < 0.99


def test_one_seed_gives_an_interval_over_prompts_alone():
    counts = np.stack([np.arange(40.0), np.ones(40)])  # (2, prompts)
    one = intervals.interval_over_seeds_and_prompts(report.length, counts[:, None])
    three = intervals.interval_over_seeds_and_prompts(report.length, np.stack([counts] * 3, axis=1))
    assert one == pytest.approx(three)  # seeds that do not differ
    assert 15 < one[0] < 19.5 < one[1] < 24


def test_files_of_the_same_drafters_are_read_as_one_with_all_their_prompts(
        capsys, monkeypatch, tmp_path):
    fresh = []
    for arm in ("full", "eagle"):
        for seed in (0, 1):
            chain = {"tokens": [8], "passes": [2]}
            fresh.append({"updates": 20, "arm": arm, "seed": seed, "chain": chain})
    files = [write(tmp_path / "a.json", {"rows": made_up_rows()})]
    files.append(write(tmp_path / "b.json", {"rows": fresh}))
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, files)])
    report.main()
    out = capsys.readouterr().out
    assert "; 6 prompts (trees: 5), seeds" in out
    assert "| full | 2.52 | 2.12 |" in out  # 68 tokens in 27 and 32 passes
    write(files[1], {"rows": fresh[1:]})
    with pytest.raises(InputError, match="the files differ in their arms, seeds or updates"):
        report.main()


def test_arms_are_compared_by_the_seeds_that_both_have(capsys):
    rows = [row for row in made_up_rows() if (row["arm"], row["seed"]) != ("eagle", 1)]
    assert report.differences(rows, 20, "tree") == {"eagle": pytest.approx((100.0, 100.0, 100.0))}
    report.print_tables(rows)
    out = capsys.readouterr().out
    assert "seeds of drafters: 1 to 2." in out and "| eagle | 4.80 | – |" in out


def made_up_rows() -> list[dict]:
    """Two arms, two seeds, five prompts. The second arm always takes half the passes."""
    rows = []
    for seed in (0, 1):
        for arm, share in (("full", 1), ("eagle", 0.5)):
            for updates in (10, 20):
                passes = [share * (3 + seed + place) for place in range(5)]
                counts = {"tokens": [10, 11, 12, 13, 14], "passes": passes}
                counts["by_depth"] = [0.5 + 0.1 * seed, 0.4]
                kinds = {kind: counts for kind in report.KINDS}
                rows.append({"updates": updates, "arm": arm, "seed": seed} | kinds)
    return rows


def test_twice_the_tokens_of_a_pass_on_every_prompt_are_100_percent_more_for_sure(
        capsys, monkeypatch):
    monkeypatch.setattr(intervals, "DRAWS", 200)
    rows = made_up_rows()
    assert report.differences(rows, 20, "tree") == {"eagle": pytest.approx((100.0, 100.0, 100.0))}
    of_full = report.gather(rows, 20, "full", "tree")
    value, low, high = report.with_interval(report.length, of_full)
    assert value == pytest.approx(120 / 55)  # 60 tokens twice, 25 and 30 passes
    assert low < value - 0.1 and high > value + 0.1
    report.print_tables(rows)
    out = capsys.readouterr().out
    assert out.count("+100.0 (+100.0 to +100.0)") == len(report.KINDS) + 2  # at two stages
    assert "| eagle | 55.0% | 40.0% |" in out  # by depth, means over seeds
    assert "| full | 2.40 | 2.00 |" in out  # 60 tokens in 25 and 30 passes, seed by seed


def test_any_arm_may_be_the_one_that_the_others_are_compared_with(monkeypatch):
    monkeypatch.setattr(intervals, "DRAWS", 200)
    rows = report.rows_of(made_up_rows(), ["eagle", "full"])
    assert report.differences(rows, 20, "chain") == {"full": pytest.approx((-50.0, -50.0, -50.0))}
    with pytest.raises(InputError, match="--arms none: no such arm in this file"):
        report.rows_of(rows, ["full", "none"])


def test_a_single_arm_is_compared_with_nothing_and_fewer_prompts_of_trees_are_said(
        capsys, monkeypatch):
    monkeypatch.setattr(intervals, "DRAWS", 200)
    rows = [row for row in made_up_rows() if row["arm"] == "full"]
    for row in rows:
        row["tree"] = {name: counts[:2] for name, counts in row["tree"].items()}
        row |= {"draft_ms": 3.0 + row["seed"], "cycle_ms": 10.0}
    report.print_tables(rows)
    out = capsys.readouterr().out
    assert "; 5 prompts (trees: 2), seeds of drafters: 2." in out
    assert "| full | 3.5 | 10.0 |" in out  # milliseconds
    assert out.count("| full |") == 4 and "Percent" not in out and "by updates" not in out


def test_what_the_comparison_has_not_printed_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["report.py", str(write(tmp_path / "a.json", {"rows": []}))])
    with pytest.raises(InputError, match="a.json: not printed by experiments.compare --json"):
        report.main()


def test_the_picture_has_a_panel_of_each_kind_with_a_bar_of_each_arm(monkeypatch):
    monkeypatch.setattr(intervals, "DRAWS", 200)
    svg = xml.etree.ElementTree.fromstring(report.draw(made_up_rows()))
    space = "{http://www.w3.org/2000/svg}"
    panels = svg.findall(f"{space}g")
    drawn = [name for kind, name in report.KINDS.items() if kind != "tree"]
    assert [panel.findtext(f"{space}text") for panel in panels] == drawn
    assert all(len(panel.findall(f"{space}circle")) == 1 for panel in panels)
    assert all("0" in [text.text for text in panel.iter(f"{space}text")] for panel in panels)


def test_in_the_picture_an_arm_keeps_its_line_where_another_has_no_such_drafts(monkeypatch):
    monkeypatch.setattr(intervals, "DRAWS", 200)
    rows = made_up_rows()
    for row in made_up_rows():
        if row["arm"] == "eagle":
            chains = {kind: row[kind] for kind in ("chain", "sampled chain")}
            rows.insert(0, row | {"arm": "hass"})
            rows.insert(0, {"updates": row["updates"], "arm": "n-1", "seed": row["seed"]} | chains)
    rows.sort(key=lambda row: ["full", "n-1", "hass", "eagle"].index(row["arm"]))
    svg = xml.etree.ElementTree.fromstring(report.draw(rows))
    space = "{http://www.w3.org/2000/svg}"
    heights = []
    for panel in svg.findall(f"{space}g"):
        heights.append([int(bar.get("cy")) for bar in panel.findall(f"{space}circle")])
    assert heights == [[12, 36, 60], [12, 36, 60], [36, 60], [36, 60]]
