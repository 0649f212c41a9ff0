"""Claims about drafters without a part: what they compute, draft by draft and in one pass, that
their drafts change no text, and that they are trained, saved, loaded and measured."""
import json

import pytest
import torch
from test_moa import (
    CLOSE,
    CYCLES,
    N2,
    SIZES,
    features_of,
    given_draft,
    path_tokens,
    random_norms,
    random_tokens,
    read,
    step_through,
    step_through_chain,
)
from tiny_models import PROMPT, new_drafter, new_target, target_alone
from tiny_target import counting, make_tiny_target, write
from torch import Tensor, nn

from app.answers import answer
from app.loading import load_drafter, save_drafter
from app.speculate_command import TREE
from experiments import ablations
from experiments.ablations import ABLATIONS, ALL, Ablation, WithAblation
from experiments.bench import CHAIN
from llama import GenerationConfig, Llama, Sampling
from moa import TRAINED, Drafter, DraftLimits, DraftState
from plumbing.errors import InputError, run_command
from train import cross_attend, self_attend

NO_LSA = ["no-lsa", "neither", "eagle"]
NO_CA = ["no-ca", "neither", "eagle"]


@pytest.fixture(scope="module")
def target() -> Llama:
    torch.manual_seed(0)
    target = Llama(SIZES)
    random_norms(target)
    return target


def random_drafter(target: Llama, ablation: Ablation, **choices) -> Drafter:
    drafter = new_drafter(target, kind=ablation.kind, **choices)
    for name, part in drafter.named_children():
        if name in TRAINED:
            random_norms(part)
    return drafter


def features(drafter: Drafter, tokens: list[int], horizon: list[int]) -> Tensor:
    """What one pass over all positions predicts, (T, E), after the target's own pass."""
    kv, _ = read(drafter.target, tokens)
    return features_of(drafter, torch.tensor([tokens]), kv, torch.tensor([horizon]))[0]


def state_after(drafter: Drafter, ablation: Ablation, tokens: list[int]) -> DraftState:
    state = ablation.new_state(drafter, 64, Sampling())
    verifier = ablation.new_verifier(drafter.target, drafter, 64, Sampling())
    state.append_verified(verifier.prefill(tokens).update)
    return state


@pytest.mark.parametrize("name, choices", [
    ("no-lsa", {}), ("no-lsa", N2), ("no-ca", {}), ("no-ca", N2), ("neither", N2), ("eagle", {}),
], ids=str)
def test_drafting_step_by_step_gives_the_features_of_one_pass(target, name, choices):
    ablation = ABLATIONS[name]
    drafter = random_drafter(target, ablation, **choices)
    state = ablation.new_state(drafter, 64, Sampling())
    verifier = ablation.new_verifier(target, drafter, 64, Sampling())
    verified = []
    for cycle in CYCLES:
        state.append_verified(verifier.prefill(cycle.verified).update)
        verified = verified + cycle.verified
        assert state.text_length == len(verified)
        if not cycle.drafted:
            continue
        draft = given_draft(cycle.drafted, cycle.parents)
        steps = step_through(state, draft)
        # Without CA later drafts read predictions, where one pass reads the true states.
        comparable = 1 if name in NO_CA else len(draft.tokens)
        for i in range(comparable):
            tokens = verified + path_tokens(draft, i)
            expected = features(drafter, tokens, [len(verified) - 1] * len(tokens))
            torch.testing.assert_close(steps[i], expected[-1], **CLOSE)


# After 14 come 15, 16 and 17. 18 follows 15, 19 and 20 follow 17.
TREE_OF_7 = given_draft([14, 15, 16, 17, 18, 19, 20], [-1, 0, 0, 0, 1, 3, 3])


@pytest.mark.parametrize("name, choices", [("no-ca", {}), ("neither", N2), ("eagle", {})], ids=str)
def test_without_ca_a_token_of_a_tree_has_the_features_that_it_has_in_a_chain(
        target, name, choices):
    drafter = random_drafter(target, ABLATIONS[name], **choices)
    state = state_after(drafter, ABLATIONS[name], random_tokens(7))
    steps = step_through(state, TREE_OF_7)
    for i in range(len(TREE_OF_7.tokens)):
        chain = step_through_chain(state, path_tokens(TREE_OF_7, i))
        torch.testing.assert_close(steps[i], chain[-1], **CLOSE)


@pytest.mark.parametrize("name", NO_LSA)
def test_without_lsa_features_depend_on_the_last_hidden_state_and_not_on_the_cache(target, name):
    drafter = random_drafter(target, ABLATIONS[name])
    tokens = torch.tensor([random_tokens(8)])
    kv, hidden = read(target, tokens[0].tolist())
    horizon = torch.arange(8).unsqueeze(0)
    predicted = features_of(drafter, tokens, torch.randn_like(kv), horizon)
    memory = drafter.Ekv2E(hidden)
    expected = cross_attend(drafter, self_attend(drafter, tokens), memory, horizon)
    torch.testing.assert_close(predicted, expected, **CLOSE)


@pytest.mark.parametrize("name", ["no-ca", "neither"])
def test_without_ca_the_horizon_has_no_effect_and_a_draft_reads_what_was_predicted_before_it(
        target, name):
    ablation = ABLATIONS[name]
    drafter = random_drafter(target, ablation)
    tokens = random_tokens(10)
    without = features(drafter, tokens, [-1] * 10)
    assert torch.equal(features(drafter, tokens, list(range(10))), without)

    # While drafting, what was predicted at a draft stands in for its memory.
    steps = step_through_chain(state_after(drafter, ablation, tokens[:7]), tokens[7:])
    kv, hidden = read(target, tokens[:7])
    if name == "no-ca":
        memory = torch.cat([drafter.build_memory([kv]), steps[None]], dim=1)
    else:
        memory = drafter.Ekv2E(torch.cat([hidden, steps[None]], dim=1))
    sa_output = self_attend(drafter, torch.tensor([tokens]))
    expected = cross_attend(drafter, sa_output, memory, torch.zeros(1, 10))[0, 7:]
    torch.testing.assert_close(steps, expected, **CLOSE)


def test_eagles_drafter_is_a_decoder_layer_over_embeddings_and_the_states_before(target):
    """layer(U e + W h), with h of the token before e's."""
    drafter = random_drafter(target, ABLATIONS["eagle"])
    tokens = random_tokens(9)
    predicted = features(drafter, tokens, [0] * 9)
    states = nn.functional.pad(drafter.Ekv2E(drafter.states)[:, :-1], (0, 0, 1, 0))
    x = target.embed_tokens(torch.tensor([tokens])) @ drafter.self_attention.linear.weight.T
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = drafter.cross_attention.layer(x + states, drafter.rotary[:, :9], mask)
    torch.testing.assert_close(predicted, expected[0], **CLOSE)


LIMITS = [CHAIN, TREE, DraftLimits(3, 2, 6), DraftLimits(6, top_k=4, total_tokens=8)]


@pytest.mark.parametrize("name, choices", [
    ("no-lsa", {}), ("no-ca", {}), ("no-ca", N2), ("neither", {}), ("eagle", {}),
], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone(name, choices):
    target = new_target(16)
    drafter = random_drafter(target, ABLATIONS[name], **choices)
    alone = target_alone(target, 20)
    for limits in LIMITS:
        method = WithAblation(target, drafter, limits, ABLATIONS[name])
        assert answer(method, PROMPT, GenerationConfig(20)).tokens == alone


# --- Saved, loaded, trained, measured ---


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_saved_drafter_comes_back_as_it_was_and_elsewhere_is_refused_in_one_line(
        target, tmp_path, name):
    """So no server and no client ever has one."""
    drafter = random_drafter(target, ABLATIONS[name])
    save_drafter(drafter, tmp_path, torch.float32)
    loaded = load_drafter(tmp_path, target, ABLATIONS[name].kind)
    assert loaded.config == drafter.config
    tokens = random_tokens(9)
    horizon = [min(i, 3) for i in range(9)]
    torch.testing.assert_close(
        features(loaded, tokens, horizon), features(drafter, tokens, horizon)
    )
    with pytest.raises(InputError):
        load_drafter(tmp_path, target)


def test_every_drafter_is_trained_and_measured_by_one_command_which_can_be_repeated(
        tmp_path, monkeypatch, capsys):
    model = make_tiny_target(tmp_path)
    data = write(tmp_path / "data.jsonl", *counting(20))
    command = ["ablations", "--device", "cpu", "--model", str(model), "--data", str(data), "--out",
               str(tmp_path / "parts"), "--updates", "3", "--seq-len", "64", "--max-new-tokens",
               "16", "--json"]
    monkeypatch.setattr("sys.argv", command)
    run_command(ablations.main)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["drafter"] for row in rows] == list(ALL)
    for row in rows:
        assert row["chain_acceptance_length"] >= 1
        assert row["tree_acceptance_length"] >= 1
    run_command(ablations.main)  # nothing is trained again
    again = json.loads(capsys.readouterr().out)["rows"]
    lengths = [row["tree_acceptance_length"] for row in rows]
    assert [row["tree_acceptance_length"] for row in again] == lengths
