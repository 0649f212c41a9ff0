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
    given_draft,
    path_tokens,
    random_drafter,
    random_norms,
    random_tokens,
    read,
    step_through,
    step_through_chain,
)
from tiny_models import PROMPT, new_target, target_alone
from tiny_target import counting, make_tiny_target, write
from torch import nn

from experiments import ablations
from experiments.ablations import ABLATIONS, ALL, Ablation, load_ablation
from experiments.bench import CHAIN
from llama import GenerationConfig, Llama, Sampling
from moa import Drafter, DraftLimits, DraftState, load_drafter, save_drafter
from plumbing.errors import InputError, run_command
from plumbing.journal import read_log
from speculate import TREE, WithDrafts, answer

NO_LSA = ["no-lsa", "neither", "eagle"]
NO_CA = ["no-ca", "neither", "eagle"]


@pytest.fixture(scope="module")
def target() -> Llama:
    torch.manual_seed(0)
    target = Llama(SIZES)
    random_norms(target)
    return target


def state_after(drafter: Drafter, ablation: Ablation, tokens: list[int]) -> DraftState:
    state = drafter.new_state(64)
    verifier = ablation.new_verifier(drafter.target, drafter, 64, Sampling())
    state.append_verified(verifier.prefill(tokens).memory)
    return state


@pytest.mark.parametrize("name, choices", [
    ("no-lsa", {}), ("no-lsa", N2), ("no-ca", {}), ("no-ca", N2), ("neither", N2), ("eagle", {}),
], ids=str)
def test_drafting_step_by_step_gives_the_features_of_one_pass(target, name, choices):
    ablation = ABLATIONS[name]
    drafter = random_drafter(target, kind=ablation.kind, **choices)
    state = drafter.new_state(64)
    verifier = ablation.new_verifier(target, drafter, 64, Sampling())
    verified = []
    for cycle in CYCLES:
        state.append_verified(verifier.prefill(cycle.verified).memory)
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
            horizon = torch.full((1, len(tokens)), len(verified) - 1)
            kv, _ = read(target, tokens)
            features = drafter.features(torch.tensor([tokens]), kv, horizon)
            torch.testing.assert_close(steps[i], features[0, -1], **CLOSE)


# After 14 come 15, 16 and 17. 18 follows 15, 19 and 20 follow 17.
TREE_OF_7 = given_draft([14, 15, 16, 17, 18, 19, 20], [-1, 0, 0, 0, 1, 3, 3])


@pytest.mark.parametrize("name, choices", [("no-ca", {}), ("neither", N2), ("eagle", {})], ids=str)
def test_without_ca_a_token_of_a_tree_has_the_features_that_it_has_in_a_chain(
        target, name, choices):
    drafter = random_drafter(target, kind=ABLATIONS[name].kind, **choices)
    state = state_after(drafter, ABLATIONS[name], random_tokens(7))
    features = step_through(state, TREE_OF_7)
    for i in range(len(TREE_OF_7.tokens)):
        chain = step_through_chain(state, path_tokens(TREE_OF_7, i))
        torch.testing.assert_close(features[i], chain[-1], **CLOSE)


@pytest.mark.parametrize("name", NO_LSA)
def test_without_lsa_features_depend_on_the_last_hidden_state_and_not_on_the_cache(target, name):
    drafter = random_drafter(target, kind=ABLATIONS[name].kind)
    tokens = torch.tensor([random_tokens(8)])
    kv, hidden = read(target, tokens[0].tolist())
    horizon = torch.arange(8).unsqueeze(0)
    features = drafter.features(tokens, torch.randn_like(kv), horizon)
    torch.testing.assert_close(features, drafter.features(tokens, kv, horizon))
    memory = drafter.Ekv2E(hidden)
    expected = drafter.cross_attend(drafter.self_attend(tokens), memory, horizon)
    torch.testing.assert_close(features, expected, **CLOSE)


@pytest.mark.parametrize("name", ["no-ca", "neither"])
def test_without_ca_the_horizon_has_no_effect_and_a_draft_reads_what_was_predicted_before_it(
        target, name):
    ablation = ABLATIONS[name]
    drafter = random_drafter(target, kind=ablation.kind)
    tokens = torch.tensor([random_tokens(10)])
    kv, _ = read(target, tokens[0].tolist())
    none = torch.full((1, 10), -1)
    everything = torch.arange(10).unsqueeze(0)
    without = drafter.features(tokens, kv, none)
    assert torch.equal(drafter.features(tokens, kv, everything), without)

    # While drafting, what was predicted at a draft stands in for its memory.
    verified = tokens[0, :7].tolist()
    steps = step_through_chain(state_after(drafter, ablation, verified), tokens[0, 7:].tolist())
    kv, hidden = read(target, verified)
    if name == "no-ca":
        memory = torch.cat([drafter.build_memory(kv), steps[None]], dim=1)
    else:
        memory = drafter.Ekv2E(torch.cat([hidden, steps[None]], dim=1))
    expected = drafter.cross_attend(drafter.self_attend(tokens), memory, none)[0, 7:]
    torch.testing.assert_close(steps, expected, **CLOSE)


def test_eagles_drafter_is_a_decoder_layer_over_embeddings_and_the_states_before(target):
    """layer(U e + W h), with h of the token before e's."""
    drafter = random_drafter(target, kind=ABLATIONS["eagle"].kind)
    tokens = torch.tensor([random_tokens(9)])
    kv, hidden = read(target, tokens[0].tolist())
    states = nn.functional.pad(drafter.Ekv2E(hidden)[:, :-1], (0, 0, 1, 0))  # none before the first
    x = target.embed_tokens(tokens) @ drafter.self_attention.linear.weight.T + states
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = drafter.cross_attention(x, drafter.rotary[:, :9], mask)
    features = drafter.features(tokens, kv, torch.zeros(1, 9))
    torch.testing.assert_close(features, expected, **CLOSE)


LIMITS = [CHAIN, TREE, DraftLimits(3, 2, 6), DraftLimits(6, top_k=4, total_tokens=8)]


@pytest.mark.parametrize("name, choices", [
    ("no-lsa", {}), ("no-ca", {}), ("no-ca", N2), ("neither", {}), ("eagle", {}),
], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone(name, choices):
    target = new_target(16)
    drafter = random_drafter(target, kind=ABLATIONS[name].kind, **choices)
    verifier = ABLATIONS[name].new_verifier
    alone = target_alone(target, 20)
    for limits in LIMITS:
        method = WithDrafts(target, drafter, limits, new_verifier=verifier)
        assert answer(method, PROMPT, GenerationConfig(20)).tokens == alone


# --- Saved, loaded, trained, measured ---


@pytest.mark.parametrize("name", ALL)
def test_a_saved_drafter_comes_back_as_it_was_and_its_config_says_what_it_lacks(
        target, tmp_path, name):
    drafter = random_drafter(target, kind=ALL[name].kind)
    save_drafter(drafter, tmp_path, torch.float32)
    loaded, ablation = load_ablation(tmp_path, target)
    assert ablation is ALL[name]
    assert type(loaded) is type(drafter)
    assert loaded.config == drafter.config
    tokens = random_tokens(9)
    kv, _ = read(target, tokens)
    horizon = torch.arange(9).clamp(max=3).unsqueeze(0)
    features = drafter.features(torch.tensor([tokens]), kv, horizon)
    loaded_features = loaded.features(torch.tensor([tokens]), kv, horizon)
    torch.testing.assert_close(loaded_features, features)


@pytest.mark.parametrize("name", ABLATIONS)
def test_elsewhere_a_drafter_without_a_part_is_refused_in_one_line(target, tmp_path, name):
    """So no server and no client ever has one."""
    save_drafter(random_drafter(target, kind=ABLATIONS[name].kind), tmp_path)
    with pytest.raises(InputError, match="python -m experiments.ablations"):
        load_drafter(tmp_path, target)


def test_a_combination_of_parts_that_no_drafter_here_has_is_refused(target, tmp_path):
    save_drafter(random_drafter(target), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_self_attention": False}))
    with pytest.raises(InputError, match="no drafter here lacks only self_attention"):
        load_ablation(tmp_path, target)


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
    for name, ablation in ALL.items():
        log = read_log(tmp_path / "parts" / name)
        # Without CA one pass can score the first token of a draft only.
        assert len(log[-1]["depth_accuracy"]) == 1 or name not in NO_CA
    run_command(ablations.main)  # nothing is trained again
    again = json.loads(capsys.readouterr().out)["rows"]
    lengths = [row["tree_acceptance_length"] for row in rows]
    assert [row["tree_acceptance_length"] for row in again] == lengths
