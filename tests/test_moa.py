"""The drafter: parity with the authors' numbers, one pass against step by step, drafts, ablations, checkpoints."""
import copy
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import moa
from llama import Config, InputError, Llama, RMSNorm, can_pack, load_model, probabilities
from moa import Draft, Drafter, DrafterConfig, Drafting, Memory, Shape, children, load_drafter, save_drafter

GOLDEN = Path(__file__).parent / "golden"
CLOSE = dict(atol=1e-4, rtol=1e-4)
V, LAYERS = 32, 4


@pytest.fixture(scope="module")
def target() -> Llama:
    torch.manual_seed(0)
    return Llama(Config(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=10, max_position_embeddings=64))


def new_drafter(target: Llama, seed: int = 1, **choices) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(target, DrafterConfig.sized_for(target, **choices)).requires_grad_(False).eval()
    for module in drafter.modules():
        if isinstance(module, RMSNorm):
            module.weight.uniform_(0.5, 1.5)
    return drafter


def read(target: Llama, tokens: list[int]):
    """What the target makes of tokens: its cache, kv (1, T, L, 2 Ekv) and final hidden states (1, T, E)."""
    cache = target.new_cache(len(tokens))
    hidden = target.hidden(torch.tensor([tokens]), cache)
    return cache, cache.read(0, len(tokens)), hidden


def first_memory(target: Llama, drafter: Drafter, tokens: list[int]) -> Memory:
    cache, _, hidden = read(target, tokens)
    return drafter.remember(tokens, cache, 0, hidden)


def start_behind(target: Llama, drafter: Drafter, tokens: list[int]) -> Drafting:
    drafting = drafter.start(64)
    drafting.observe(first_memory(target, drafter, tokens))
    return drafting


def random_tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_default_sizes_for_llama_3_8b_are_the_papers():
    llama3 = Config(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                    num_key_value_heads=8, head_dim=128)
    assert DrafterConfig.sized_for(SimpleNamespace(config=llama3)) == DrafterConfig(
        num_attention_heads=32, layer_self_attention_num_attention_heads=32, layer_self_attention_num_key_value_heads=8,
        layer_self_attention_intermediate_size=3072, self_attention_num_key_value_heads=4,
        self_attention_intermediate_size=6144, cross_attention_num_key_value_heads=4, cross_attention_intermediate_size=6144,
        rms_norm_eps=1e-5, rope_theta=500000.0)


# The authors' numbers ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("N", [0, 1])
def test_lsa_memory_features_and_logits_are_those_of_the_authors(N):
    folder = GOLDEN / f"moa-tiny-n{N}"
    expected = load_file(folder / "expected.safetensors")
    target = load_model(folder / "target")
    drafter = load_drafter(folder / "drafter", target)
    tokens, response = expected["input_ids"], expected["response_mask"].bool()
    _, kv, hidden = read(target, tokens[0].tolist())
    torch.testing.assert_close(kv, expected["target_kv"], **CLOSE)  # the cache's order is what LSA was trained on
    torch.testing.assert_close(hidden, expected["target_hidden"][:, -1], **CLOSE)

    projected = []
    drafter.Ekv2E.register_forward_pre_hook(lambda module, inputs: projected.append(inputs[0]))
    torch.testing.assert_close(drafter.memory(kv), expected["memory"], **CLOSE)
    torch.testing.assert_close(projected[0].view_as(expected["lsa_mean"]), expected["lsa_mean"], **CLOSE)

    last_of_prompt = int((~response).sum()) - 1
    horizon = torch.arange(tokens.shape[1]).clamp(max=last_of_prompt).unsqueeze(0)
    features = drafter.features(tokens, kv, horizon)
    torch.testing.assert_close(features[response], expected["features"][response], **CLOSE)
    torch.testing.assert_close(drafter.logits(features)[response], expected["draft_logits"][response], **CLOSE)


# One pass, and step by step ------------------------------------------------------------------------------------------

CYCLES = [  # (drafted, whom each follows, then verified): each way a cycle can end
    ([5, 6, 7, 8], [-1, 0, 1, 2], [5, 6]),  # a rejection
    ([1, 2, 3], [-1, 0, 1], [1, 2, 3, 4]),  # all accepted; the last draft was proposed but never read
    ([9, 10, 11], [-1, 0, 1], [12, 13]),  # other tokens than the drafted ones
    ([14, 15, 16, 17, 18, 19, 20], [-1, 0, 0, 0, 1, 3, 3], [14, 17, 19]),  # a tree, of which another branch is kept
    ([], [], [16, 17]),  # nothing was drafted
    ([18, 19, 20, 21], [-1, 0, 1, 2], [18, 30, 20]),  # they part and meet again
    ([2, 3, 4, 5, 5, 6, 7], [-1, 0, 0, 1, 2, 3, 4], [2, 4, 5, 8]),  # a token that occurs on two branches
    ([22], [-1], [24]),  # a single draft
    ([23, 25], [-1, 0], [23, 25])]


def path_to(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    return (path_to(parents[node], tokens, parents) if parents[node] >= 0 else []) + [tokens[node]]


def step_through(drafting: Drafting, tokens: list[int], parents: list[int]) -> torch.Tensor:
    """Features (K, E) of a tree, level by level."""
    levels: dict[int, list[int]] = {}
    for node in range(len(tokens)):
        levels.setdefault(len(path_to(node, tokens, parents)), []).append(node)
    return torch.cat([drafting.step([tokens[i] for i in level], [parents[i] for i in level]) for level in levels.values()])


def both_ways(target: Llama, drafter: Drafter):
    """Of each cycle the features of every draft, step by step, and of its path in one pass under the horizon (K, E)."""
    verified, cache, drafting = random_tokens(7), target.new_cache(64), drafter.start(64)
    drafting.observe(drafter.remember(verified, cache, 0, target.hidden(torch.tensor([verified]), cache)))
    for drafted, parents, then_verified in CYCLES:
        if drafted:
            features = []
            for node in range(len(drafted)):
                tokens = verified + path_to(node, drafted, parents)
                _, kv, hidden = read(target, tokens)
                horizon = torch.full((1, len(tokens)), len(verified) - 1)
                features.append(drafter.features(torch.tensor([tokens]), kv, horizon, hidden)[0, -1])
            yield step_through(drafting, drafted, parents), torch.stack(features)
        start = cache.length
        hidden = target.hidden(torch.tensor([then_verified]), cache)
        drafting.observe(drafter.remember(then_verified, cache, start, hidden))
        verified = verified + then_verified


@pytest.mark.parametrize("choices", [
    dict(), dict(target_layer_inference=1), dict(target_layer_inference=3), dict(target_layer_inference=LAYERS),
    dict(use_layer_self_attention=False), dict(use_layer_self_attention=False, target_layer_inference=2)], ids=str)
def test_drafting_step_by_step_gives_the_features_of_one_pass_under_its_horizon(target, choices):
    for steps, features in both_ways(target, new_drafter(target, **choices)):
        torch.testing.assert_close(steps, features, **CLOSE)


@pytest.mark.parametrize("N", [1, 2, LAYERS])
def test_from_the_true_hidden_state_the_draft_distribution_is_the_targets_own(target, N):
    drafter, tokens = new_drafter(target, target_layer_inference=N), torch.tensor([random_tokens(12)])
    _, kv, hidden = read(target, tokens[0].tolist())
    true_state = target.run_layers(target.embed_tokens(tokens), range(LAYERS - N))
    for horizon in (torch.full((12,), -1), torch.arange(12), torch.arange(12) - 1, torch.arange(12).clamp(max=5)):
        features = drafter.infer_target_layers(true_state, kv, horizon.unsqueeze(0))
        torch.testing.assert_close(features, hidden, **CLOSE)
        torch.testing.assert_close(drafter.logits(features), target(tokens), **CLOSE)


def test_without_any_memory_features_are_finite_and_do_not_depend_on_the_target(target):
    drafter, tokens = new_drafter(target), torch.tensor([random_tokens(9)])
    _, kv, _ = read(target, tokens[0].tolist())
    horizon = torch.full((1, 9), -1)
    features = drafter.features(tokens, kv, horizon)
    assert features.isfinite().all()
    torch.testing.assert_close(features, drafter.features(tokens, torch.randn_like(kv), horizon), atol=0, rtol=0)


@pytest.mark.parametrize("N", [0, 1, 3])
def test_features_do_not_depend_on_memory_beyond_the_horizon_nor_on_later_tokens(target, N):
    drafter, tokens = new_drafter(target, target_layer_inference=N), torch.tensor([random_tokens(12)])
    _, kv, _ = read(target, tokens[0].tolist())
    horizon = torch.arange(12).clamp(max=4).unsqueeze(0)
    features = drafter.features(tokens, kv, horizon)

    other_kv = torch.cat([kv[:, :5], torch.randn_like(kv[:, 5:])], dim=1)  # positions 0..4 lie within the horizon
    torch.testing.assert_close(drafter.features(tokens, other_kv, horizon), features)
    other_kv[:, 4] = torch.randn_like(kv[:, 4])
    changed = (drafter.features(tokens, other_kv, horizon) - features).abs().amax(-1)[0] > 1e-4
    assert changed.tolist() == [False] * 4 + [True] * 8

    other_tokens = tokens.clone()
    other_tokens[0, 8:] = (tokens[0, 8:] + 1) % V
    torch.testing.assert_close(drafter.features(other_tokens, kv, horizon)[:, :8], features[:, :8])


# Cost ----------------------------------------------------------------------------------------------------------------

def test_a_cycle_costs_its_new_tokens_only(target):
    drafter, rows = new_drafter(target), {"SA": 0, "LSA": 0, "CA keys": 0}
    for name, module in (("SA", drafter.self_attention), ("LSA", drafter.layer_self_attention),
                         ("CA keys", drafter.cross_attention.self_attn.k_proj)):
        module.register_forward_pre_hook(
            lambda module, inputs, name=name: rows.update({name: rows[name] + inputs[0].shape[:-1].numel()}))
    cache, drafting = target.new_cache(64), drafter.start(64)

    def verify(tokens: list[int]) -> None:
        start = cache.length
        drafting.observe(drafter.remember(tokens, cache, start, target.hidden(torch.tensor([tokens]), cache)))

    verify(random_tokens(10))
    assert rows == {"SA": 0, "LSA": 10 * LAYERS, "CA keys": 10}  # SA reads the prompt with the first draft
    step_through(drafting, [1, 2, 3, 4], [-1, 0, 0, 2])
    assert rows == {"SA": 14, "LSA": 10 * LAYERS, "CA keys": 10}
    verify([1, 3, 4])  # of four drafted tokens three are kept
    drafting.step([5], [-1])
    assert rows == {"SA": 15, "LSA": 13 * LAYERS, "CA keys": 13}
    verify([5, 6, 7])  # two tokens that SA has not read
    drafting.step([8], [-1])
    assert rows == {"SA": 18, "LSA": 16 * LAYERS, "CA keys": 16}


def test_a_long_prompt_is_remembered_in_chunks_as_in_one_piece(target, monkeypatch):
    drafter, tokens = new_drafter(target, target_layer_inference=1), random_tokens(13)
    whole = first_memory(target, drafter, tokens)
    monkeypatch.setattr(moa, "PROMPT_CHUNK", 5)
    chunked = first_memory(target, drafter, tokens)
    torch.testing.assert_close(chunked.cross_kv, whole.cross_kv)
    torch.testing.assert_close(chunked.reused_kv, whole.reused_kv)


@pytest.mark.skipif(not can_pack(torch.ones(1)), reason="PyTorch has no oneDNN here, which packing is for")
@pytest.mark.parametrize("choices", [
    dict(), dict(target_layer_inference=2), dict(use_cross_attention=False), dict(use_layer_self_attention=False),
    dict(draft_vocabulary=(3, 5, 8, 13, 21, 30))], ids=str)
def test_a_packed_drafter_of_a_packed_target_drafts_the_same(target, choices):
    drafter, twin, tokens = new_drafter(target, **choices), copy.deepcopy(target), random_tokens(9)
    packed = new_drafter(twin, **choices).pack()
    twin.pack()
    assert packed.self_attention.self_attn.o_proj.weight is None is packed.head.weight
    for rows in range(1, 18):
        pair = start_behind(target, drafter, tokens), start_behind(twin, packed, tokens)
        expected, features = (step_through(side, random_tokens(1 + rows), [-1] + [0] * rows) for side in pair)
        torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed.logits(features), drafter.logits(expected), atol=1e-5, rtol=1e-5)
    assert start_behind(twin, packed, tokens).draft(2, Shape(3, 4, 12)) == start_behind(target, drafter, tokens).draft(
        2, Shape(3, 4, 12))


@pytest.mark.skipif(not can_pack(torch.ones(1)), reason="PyTorch has no oneDNN here, which packing is for")
@pytest.mark.parametrize("choices", [
    dict(), dict(target_layer_inference=2), dict(use_cross_attention=False), dict(use_layer_self_attention=False),
    dict(draft_vocabulary=(3, 5, 8, 13, 21, 30))], ids=str)
def test_a_lightened_drafter_guesses_almost_the_same_in_half_the_bytes(target, choices, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)  # slower where it is not, but as exact
    drafter, twin, tokens = new_drafter(target, **choices), copy.deepcopy(target), random_tokens(9)
    light = new_drafter(twin, **choices).lighten().pack()
    twin.pack()
    assert light.dtype == torch.bfloat16 and light.rotary.dtype == twin.norm.weight.dtype == torch.float32
    pair = start_behind(target, drafter, tokens), start_behind(twin, light, tokens)
    assert pair[1].self_cache.kv.dtype == pair[1].cross_cache.kv.dtype == torch.bfloat16
    expected, features = (step_through(side, random_tokens(5), [-1, 0, 0, 1, 2]) for side in pair)
    assert (features - expected).norm() < 0.02 * expected.norm()
    assert (light.logits(features) - drafter.logits(expected)).norm() < 0.02 * drafter.logits(expected).norm()


def test_a_drafter_stays_as_it_is_where_bfloat16_is_no_faster(target, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert new_drafter(target).lighten().dtype == torch.float32


# Drafts --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("vocabulary", [None, (3, 5, 8, 13, 21, 30)])
def test_a_draft_is_drawn_from_exactly_the_q_it_reports(target, vocabulary):
    drafter = new_drafter(target, draft_vocabulary=vocabulary)
    memory = first_memory(target, drafter, random_tokens(6))
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(V)
    for _ in range(500):
        drafting = drafter.start(16)
        drafting.observe(memory)
        draft = drafting.draft(2, Shape(1), temperature=0.7, top_p=0.9, generator=generator)
        counts[draft.tokens[0]] += 1
    q = draft.q[0]
    torch.testing.assert_close(q.sum(), torch.tensor(1.0))
    assert (counts[q == 0] == 0).all()  # neither beyond top-p nor outside the draft vocabulary
    assert ((counts - 500 * q).abs() <= 4.5 * (500 * q * (1 - q)).sqrt() + 1).all()
    allowed = torch.tensor(vocabulary or range(V))
    assert set(q.nonzero().flatten().tolist()) <= set(allowed.tolist())
    drafting = drafter.start(16)
    drafting.observe(memory)
    own = probabilities(target.lm_head(drafting.step([2], [-1])[0])[allowed], 0.7, 0.9)
    torch.testing.assert_close(q[allowed], own)


def test_siblings_are_drawn_one_after_the_other_without_replacement():
    q, count, generator = [0.4, 0.3, 0.2, 0.1, 0.0], 3000, torch.Generator().manual_seed(0)
    pairs = Counter(tuple(choice for _, choice, _ in children(torch.tensor([q]), [1.0], 2, 0.0, 1.0, generator))
                    for _ in range(count))
    for first, second in itertools.product(range(5), repeat=2):
        p = q[first] * q[second] / (1 - q[first]) if first != second else 0.0
        assert abs(pairs[first, second] - count * p) <= 4.5 * (count * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("room, threshold", [(1, 0.0), (4, 0.0), (9, 0.0), (9, 0.1)])
def test_how_many_children_each_leaf_has_is_settled_before_they_are_drawn(room, threshold):
    q = probabilities(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), 0.5, 0.95)
    likeliest = children(q, [0.5, 0.3, 0.2], room, threshold, 0.0, None)
    draws = [children(q, [0.5, 0.3, 0.2], room, threshold, 1.0, torch.Generator().manual_seed(seed)) for seed in range(20)]
    for drawn in draws:
        assert [leaf for leaf, _, _ in drawn] == [leaf for leaf, _, _ in likeliest]
        assert all(value == pytest.approx(q[leaf, choice].item() * [0.5, 0.3, 0.2][leaf]) for leaf, choice, value in drawn)
    assert len({tuple(choice for _, choice, _ in drawn) for drawn in draws}) > 1


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(path_to(node, draft.tokens, draft.parents)) for node in range(len(draft.tokens))}


@pytest.mark.parametrize("threshold", [0.0, 0.02])
@pytest.mark.parametrize("N", [0, 1, 3])
def test_a_greedy_tree_has_the_paths_that_the_drafter_finds_likeliest_of_all(target, N, threshold):
    vocabulary, verified, depth, nodes = (3, 5, 8, 13, 21, 30), random_tokens(6), 3, 20
    drafter = new_drafter(target, target_layer_inference=N, draft_vocabulary=vocabulary)
    endings = list(itertools.product(range(len(vocabulary)), repeat=depth))
    tokens = torch.tensor([verified + [2] + [vocabulary[choice] for choice in ending] for ending in endings])  # (B, T)
    kv = torch.nn.functional.pad(read(target, verified)[1], (0, 0, 0, 0, 0, 1 + depth)).expand(len(tokens), -1, -1, -1)
    features = drafter.features(tokens, kv, torch.full_like(tokens, len(verified) - 1))[:, len(verified):-1]  # (B, depth, E)
    q = drafter.logits(3 * features).softmax(-1).gather(-1, torch.tensor(endings)[..., None])[..., 0].cumprod(-1)
    values = {tuple(tokens[i, -depth:][:n + 1].tolist()): q[i, n].item() for i in range(len(endings)) for n in range(depth)}
    best = {path for path in sorted(values, key=lambda path: -values[path])[:nodes] if values[path] >= threshold}

    logits = drafter.logits
    drafter.logits = lambda features: logits(3 * features)  # not all alike, so that deep paths beat shallow ones
    draft = start_behind(target, drafter, verified).draft(2, Shape(depth, nodes, nodes, threshold))
    assert paths(draft) == best and max(draft.depths()) == depth
    assert all(parent < child for child, parent in enumerate(draft.parents))


@pytest.mark.parametrize("N", [0, 2])
def test_a_token_of_a_tree_is_drawn_from_what_the_drafter_makes_of_its_own_path(target, N):
    drafter, verified = new_drafter(target, target_layer_inference=N), random_tokens(6)
    draft = start_behind(target, drafter, verified).draft(2, Shape(4, 3, 16), 1.0, generator=torch.Generator().manual_seed(0))
    parents = sorted(set(draft.parents))
    assert len(parents) > 6 and max(draft.depths()) == 4
    for parent, q in zip(parents, draft.q):
        tokens = torch.tensor([verified + [2] + (path_to(parent, draft.tokens, draft.parents) if parent >= 0 else [])])
        _, kv, _ = read(target, tokens[0].tolist())
        features = drafter.features(tokens, kv, torch.full_like(tokens, len(verified) - 1))[0, -1]
        torch.testing.assert_close(q, probabilities(drafter.logits(features), 1.0), **CLOSE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [Shape(1), Shape(12), Shape(3, 2, 6), Shape(5, 2, 30), Shape(2, 8, 12)], ids=str)
def test_a_draft_is_as_large_as_its_shape_and_no_larger(target, shape, temperature):
    drafting = start_behind(target, new_drafter(target), random_tokens(6))
    draft = drafting.draft(2, shape, temperature, generator=torch.Generator().manual_seed(0))
    depths = draft.depths()[1:]
    if shape.breadth == 1:
        assert draft.is_chain() and len(draft.tokens) == shape.depth
    else:
        assert len(draft.tokens) == shape.nodes and max(depths) <= shape.depth
    expanded = Counter(depths[parent] for parent in set(draft.parents) - {-1})
    assert all(count <= shape.breadth for count in expanded.values())
    assert len(paths(draft)) == len(draft.tokens)  # no token twice among siblings


def test_behind_tokens_that_have_come_a_draft_is_the_tree_that_follows_them():
    #      7         each parent's q is told by its first number
    #     / \
    #    3   4
    #   / \   \
    #  5   6   5
    #  |
    #  8
    draft = Draft(7, [3, 4, 5, 6, 5, 8], [-1, -1, 0, 0, 1, 2], torch.tensor([[0.0, 1], [1, 0], [2, 0], [3, 0]]))
    assert draft.behind([]).tokens == draft.tokens and draft.behind([]).q.equal(draft.q)
    left = draft.behind([3])
    assert (left.token, left.tokens, left.parents) == (3, [5, 6, 8], [-1, -1, 0])
    assert left.q[:, 0].tolist() == [1, 3]  # of 3's children and of their first one's, not of 4's
    assert draft.behind([4]).q[:, 0].tolist() == [2] and draft.behind([3]).behind([5]).tokens == draft.behind([3, 5]).tokens == [8]
    for tokens in ([6], [3, 5, 8], [3, 9, 9], [4, 5, 5]):  # it did not foresee them, or nothing behind them
        left = draft.behind(tokens)
        assert (left.token, left.tokens, left.parents) == (tokens[-1], [], [])


def test_a_level_whose_leaves_are_unlikely_is_the_last(target):
    drafting = start_behind(target, new_drafter(target), random_tokens(6))
    lengths = []
    for threshold in (0.0, 1e-4, 1e-2, 1.1):
        lengths.append(len(drafting.draft(2, Shape(8, level_threshold=threshold)).tokens))
        drafting = start_behind(target, new_drafter(target), random_tokens(6))
    assert lengths[0] == 8 > lengths[1] > lengths[2] > lengths[3] == 1


# Ablations -----------------------------------------------------------------------------------------------------------

def test_without_lsa_the_hidden_states_are_made_if_they_are_not_given(target):
    drafter, tokens = new_drafter(target, use_layer_self_attention=False), torch.tensor([random_tokens(8)])
    horizon = torch.full((1, 8), 3)
    given = drafter.features(tokens, None, horizon, target.hidden(tokens))
    assert torch.equal(drafter.features(tokens, None, horizon), given)


def test_without_lsa_the_memory_is_a_function_of_the_last_hidden_state_only(target):
    drafter = new_drafter(target, use_layer_self_attention=False)
    _, kv, hidden = read(target, random_tokens(8))
    memory = drafter.memory(kv, hidden)
    torch.testing.assert_close(drafter.memory(torch.randn_like(kv), hidden), memory, atol=0, rtol=0)
    torch.testing.assert_close(memory, torch.nn.functional.linear(hidden, drafter.Ekv2E.weight, drafter.Ekv2E.bias))


@pytest.mark.parametrize("use_lsa", [True, False])
def test_without_ca_the_horizon_has_no_effect(target, use_lsa):
    drafter = new_drafter(target, use_cross_attention=False, use_layer_self_attention=use_lsa)
    tokens = torch.tensor([random_tokens(10)])
    _, kv, hidden = read(target, tokens[0].tolist())
    horizons = torch.full((1, 10), -1), torch.arange(10).unsqueeze(0)
    features = [drafter.features(tokens, kv, horizon, hidden) for horizon in horizons]
    torch.testing.assert_close(*features, atol=0, rtol=0)


@pytest.mark.parametrize("choices", [
    dict(), dict(use_layer_self_attention=False), dict(target_layer_inference=2)], ids=str)
def test_without_ca_the_first_draft_of_each_cycle_has_the_features_of_one_pass(target, choices):
    for steps, features in both_ways(target, new_drafter(target, use_cross_attention=False, **choices)):
        torch.testing.assert_close(steps[0], features[0], **CLOSE)  # later ones read guesses, not truth


@pytest.mark.parametrize("N", [0, 2])
def test_without_ca_a_node_of_a_tree_has_the_features_it_has_in_a_chain(target, N):
    drafter, tokens = new_drafter(target, use_cross_attention=False, target_layer_inference=N), random_tokens(7)
    drafted, parents = [14, 15, 16, 17, 18, 19, 20], [-1, 0, 0, 0, 1, 3, 3]
    features = step_through(start_behind(target, drafter, tokens), drafted, parents)
    for node in range(7):
        path = path_to(node, drafted, parents)
        chain = step_through(start_behind(target, drafter, tokens), path, list(range(-1, len(path) - 1)))
        torch.testing.assert_close(features[node], chain[-1], **CLOSE)


# Checkpoints ---------------------------------------------------------------------------------------------------------

AUTHORS_NAMES = {f"{block}.{part}.weight" for block in ("self_attention", "cross_attention", "layer_self_attention")
                 for part in ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo"),
                              *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))} | {"Ekv2E.weight", "Ekv2E.bias"}


@pytest.mark.parametrize("choices", [
    dict(), dict(target_layer_inference=2), dict(draft_vocabulary=(1, 2, 31)), dict(use_layer_self_attention=False),
    dict(use_cross_attention=False), dict(layer_self_attention_num_attention_heads=10)], ids=str)
def test_a_saved_drafter_comes_back_as_it_was(target, tmp_path, choices):
    drafter = new_drafter(target, **choices)
    save_drafter(drafter, tmp_path / "drafter", torch.float32)
    assert sorted(file.name for file in (tmp_path / "drafter").iterdir()) == ["config.json", "model.safetensors"]
    loaded, tokens = load_drafter(tmp_path / "drafter", target), torch.tensor([random_tokens(9)])
    assert loaded.config == drafter.config
    _, kv, hidden = read(target, tokens[0].tolist())
    horizon = torch.arange(9).clamp(max=3).unsqueeze(0)
    features = drafter.features(tokens, kv, horizon, hidden)
    torch.testing.assert_close(loaded.features(tokens, kv, horizon, hidden), features)
    torch.testing.assert_close(loaded.logits(features), drafter.logits(features))


def test_parameters_have_the_authors_names_and_none_is_the_targets(target, tmp_path):
    drafter = new_drafter(target, target_layer_inference=2)
    assert {name for name, _ in drafter.named_parameters()} == set(drafter.state_dict()) == AUTHORS_NAMES
    save_drafter(drafter, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == AUTHORS_NAMES


def test_sizes_that_the_config_leaves_out_are_read_off_the_tensors(target, tmp_path):
    drafter = new_drafter(target, self_attention_num_key_value_heads=2, cross_attention_num_key_value_heads=4,
                          layer_self_attention_intermediate_size=7, self_attention_intermediate_size=9)
    save_drafter(drafter, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert load_drafter(tmp_path, target).config == drafter.config


def test_a_save_that_fails_leaves_the_old_checkpoint_whole(target, tmp_path, monkeypatch):
    save_drafter(new_drafter(target, seed=1), tmp_path)
    old = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr(moa, "save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_drafter(new_drafter(target, seed=2, target_layer_inference=2), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in old} == old


def change(folder: Path, edit) -> None:
    """Apply `edit` to the dict of a checkpoint's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("damage, complaint", [
    (lambda folder: folder.rename(folder.parent / "elsewhere"), "no such drafter"),
    (lambda folder: (folder / "config.json").unlink(), "no such file"),
    (lambda folder: (folder / "config.json").write_text("{"), "not readable as JSON"),
    (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
    (lambda folder: (folder / "model.safetensors").unlink(), "not a readable safetensors file"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"?"), "not a readable safetensors file"),
    (lambda folder: change(folder, lambda tensors: tensors.pop("Ekv2E.bias")), "Ekv2E.bias missing"),
    (lambda folder: change(folder, lambda tensors: tensors.update({"Ekv2E.bias": torch.ones(3)})), "Ekv2E.bias is"),
    (lambda folder: change(folder, lambda tensors: tensors["Ekv2E.bias"].fill_(math.nan)), "no numbers"),
    (lambda folder: change(folder, lambda tensors: tensors.update(more=torch.ones(3))), "unknown tensor more")])
def test_a_damaged_checkpoint_is_refused_in_one_line(target, tmp_path, damage, complaint):
    folder = tmp_path / "drafter"
    save_drafter(new_drafter(target), folder)
    damage(folder)
    with pytest.raises(InputError) as error:
        load_drafter(folder, target)
    assert complaint in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name, value", [
    ("target_layer_inference", LAYERS + 1), ("target_layer_inference", -1), ("target_layer_inference", "one"),
    ("num_attention_heads", 0), ("num_attention_heads", "four"), ("num_attention_heads", 64),
    ("layer_self_attention_num_attention_heads", 41), ("rope_theta", []), ("rope_theta", 0), ("rms_norm_eps", math.inf),
    ("use_cross_attention", "yes"),
    ("draft_vocabulary", [V]), ("draft_vocabulary", [-1]), ("draft_vocabulary", []), ("draft_vocabulary", [3, 3]),
    ("draft_vocabulary", "all")])
def test_a_config_that_does_not_fit_the_target_is_refused_in_one_line(target, tmp_path, name, value):
    save_drafter(new_drafter(target), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(InputError) as error:
        load_drafter(tmp_path, target)
    assert name in str(error.value) and "\n" not in str(error.value)
