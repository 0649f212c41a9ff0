"""The drafter: parity with the authors' numbers, one pass against step by step, drafts, ablations, checkpoints."""
import copy
import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file, save_file

import moa
from llama import Config, InputError, KVCache, Llama, RMSNorm, Sampling, can_pack, load_model, probabilities
from moa import (BatchDraftState, Draft, Drafter, DrafterConfig, DraftState, Node, TreeConfig, chain_parents,
                 dequantize_probabilities, expand_leaves, load_drafter, quantize_probabilities, save_drafter,
                 start_drafting)

CLOSE = dict(atol=1e-4, rtol=1e-4)
V, LAYERS, PARTIAL = 32, 4, (3, 5, 8, 13, 21, 30)  # PARTIAL: a draft vocabulary


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
    return cache, cache.kv[:, :, :, :len(tokens)].permute(1, 3, 0, 2, 4).flatten(3), hidden


def verify(state: DraftState, cache: KVCache, tokens: list[int]) -> None:
    """The target reads tokens, the drafter their memory."""
    start, hidden = cache.length, state.drafter.target.hidden(torch.tensor([tokens]), cache)
    state.append_verified(state.drafter.build_memory(tokens, cache, list(range(start, cache.length)), hidden))


def state_after(target: Llama, drafter: Drafter, tokens: list[int], *sampling) -> DraftState:
    state = start_drafting(drafter, 64, *sampling)
    verify(state, target.new_cache(len(tokens)), tokens)
    return state


def random_tokens(count: int) -> list[int]:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def path_to(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    return (path_to(parents[node], tokens, parents) if parents[node] >= 0 else []) + [tokens[node]]


def paths(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(path_to(node, draft.tokens, draft.parents)) for node in range(len(draft.tokens))]


def step_through(state: DraftState, tokens: list[int], parents: list[int]) -> torch.Tensor:
    """Features (K, E) of a tree, level by level."""
    nodes, levels = [], {}
    for i, (token, parent) in enumerate(zip(tokens, parents)):
        nodes.append(Node(token, nodes[parent] if parent >= 0 else None))
        levels.setdefault(len(path_to(i, tokens, parents)), []).append(nodes[i])
    steps = [state.step(level) for level in levels.values()]
    return torch.cat(steps) if steps else torch.empty(0)


def test_the_default_sizes_for_llama_3_8b_are_the_papers():
    llama3 = Config(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                    num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    heads, lsa_heads, sa, ca, lsa = 32, 32, (4, 6144), (4, 6144), (8, 3072)  # blocks: kv heads and inner width
    assert DrafterConfig.sized_for(SimpleNamespace(config=llama3)) == DrafterConfig(
        heads, lsa_heads, *lsa, *sa, *ca, rms_norm_eps=1e-5, rope_theta=500000.0)


@pytest.mark.parametrize("N", [0, 1])
def test_lsa_memory_features_and_logits_are_those_of_the_authors(N):
    folder = GOLDEN / f"moa-tiny-n{N}"
    expected, target = load_file(folder / "expected.safetensors"), load_model(folder / "target")
    drafter = load_drafter(folder / "drafter", target)
    tokens, response = expected["input_ids"], expected["response_mask"].bool()
    _, kv, hidden = read(target, tokens[0].tolist())
    torch.testing.assert_close(kv, expected["target_kv"], **CLOSE)  # the cache's order is what LSA was trained on
    torch.testing.assert_close(hidden, expected["target_hidden"][:, -1], **CLOSE)
    torch.testing.assert_close(drafter.layer_self_attend(kv).flatten(), expected["lsa_mean"].flatten(), **CLOSE)
    torch.testing.assert_close(drafter.memory(kv), expected["memory"], **CLOSE)
    last_of_prompt = int((~response).sum()) - 1
    features = drafter.features(tokens, kv, torch.arange(tokens.shape[1]).clamp(max=last_of_prompt).unsqueeze(0))
    torch.testing.assert_close(features[response], expected["features"][response], **CLOSE)
    torch.testing.assert_close(drafter.logits(features)[response], expected["draft_logits"][response], **CLOSE)


CYCLES = [  # (verified, then drafted, parents): each way a cycle can end is how the next one begins
    ([25, 3, 9, 9, 0, 31, 4], [5, 6, 7, 8], [-1, 0, 1, 2]),
    ([5, 6], [1, 2, 3], [-1, 0, 1]),  # after a rejection
    ([1, 2, 3, 4], [9, 10, 11], [-1, 0, 1]),  # all were accepted
    ([12, 13], [14, 15, 16, 17, 18, 19, 20], [-1, 0, 0, 0, 1, 3, 3]),  # other tokens than the drafted ones; a tree
    ([14, 17, 19], [18, 19, 20, 21], [-1, 0, 1, 2]),  # of the tree, another branch than the first was accepted
    ([18, 30, 20], [2, 3, 4, 5, 5, 6, 7], [-1, 0, 0, 1, 2, 3, 4]),  # they part and meet again; a token on two branches
    ([2, 4, 5, 8], [], []), ([16, 17], [22], [-1]), ([24], [23, 25], [-1, 0])]  # nothing is drafted; a single token


@pytest.mark.parametrize("choices", [
    dict(), dict(target_layer_inference=1), dict(target_layer_inference=3), dict(target_layer_inference=LAYERS),
    dict(use_layer_self_attention=False), dict(use_layer_self_attention=False, target_layer_inference=2),
    *(dict(use_cross_attention=False, **more) for more in (
        {}, dict(use_layer_self_attention=False), dict(target_layer_inference=2)))], ids=str)
def test_drafting_step_by_step_gives_the_features_of_one_pass_under_its_horizon(target, choices, monkeypatch):
    monkeypatch.setattr(moa, "PROMPT_CHUNK", 3)  # the memory of the first tokens is built in chunks,
    monkeypatch.setattr(moa, "LSA_TOKENS", 2)  # which LSA works on in pieces
    drafter, cache, verified = new_drafter(target, **choices), target.new_cache(64), []
    state = start_drafting(drafter, 64)
    for newly_verified, drafted, parents in CYCLES:
        verify(state, cache, newly_verified)
        verified = verified + newly_verified
        assert state.verified == [len(verified)]
        steps = step_through(state, drafted, parents)
        for node in range(len(drafted))[:None if drafter.config.use_cross_attention else 1]:  # others read predictions
            tokens = verified + path_to(node, drafted, parents)
            horizon = torch.full((1, len(tokens)), len(verified) - 1)
            features = drafter.features(torch.tensor([tokens]), read(target, tokens)[1], horizon)
            torch.testing.assert_close(steps[node], features[0, -1], **CLOSE)


@pytest.mark.parametrize("choices", [
    dict(), dict(target_layer_inference=2), dict(use_cross_attention=False),
    dict(use_cross_attention=False, target_layer_inference=2, use_layer_self_attention=False)], ids=str)
def test_a_draft_has_the_features_it_has_in_a_chain_also_after_unverified_tokens(target, choices):
    drafter, tokens = new_drafter(target, **choices), random_tokens(7)
    drafted, parents = [14, 15, 16, 17, 18, 19, 20], [-1, 0, 0, 0, 1, 3, 3]
    features = step_through(state_after(target, drafter, tokens), drafted, parents)
    for node in range(7):
        path = path_to(node, drafted, parents)
        chain = step_through(state_after(target, drafter, tokens), path, chain_parents(len(path)))
        torch.testing.assert_close(features[node], chain[-1], **CLOSE)
    state, cache = start_drafting(drafter, 64), target.new_cache(64)
    verify(state, cache, tokens)
    state.draft_unverified(14, 1)
    state.draft(9, TreeConfig(2))  # which is then dropped
    state.draft_unverified(17, 1)
    torch.testing.assert_close(state.step([Node(x, state.drafted[-1]) for x in (19, 20)]), features[5:], **CLOSE)
    verify(state, cache, [14, 15])  # the unverified 17 was wrong
    expected = state_after(target, drafter, tokens + [14, 15]).step([Node(18, None)])
    torch.testing.assert_close(state.step([Node(18, None)]), expected, **CLOSE)
    chain, begun = state.draft(2, TreeConfig(6)).tokens, state.draft_unverified(2, 4)
    assert begun + state.draft_unverified(begun[-1], 2) == chain  # it goes on after itself


@pytest.mark.parametrize("N", [1, 2, LAYERS])
def test_from_the_true_hidden_state_the_draft_distribution_is_the_targets_own(target, N):
    drafter, tokens = new_drafter(target, target_layer_inference=N), torch.tensor([random_tokens(12)])
    true_state = target.run_layers(target.embed_tokens(tokens), range(LAYERS - N))
    kv = read(target, tokens[0].tolist())[1]
    for horizon in (torch.full((12,), -1), torch.arange(12), torch.arange(12) - 1, torch.arange(12).clamp(max=5)):
        features = drafter.infer_target_layers(true_state, kv, horizon.unsqueeze(0))
        torch.testing.assert_close(drafter.logits(features), target(tokens), **CLOSE)


@pytest.mark.parametrize("N", [0, 1, 3])
def test_features_do_not_depend_on_memory_beyond_the_horizon_nor_on_later_tokens(target, N):
    drafter, tokens = new_drafter(target, target_layer_inference=N), torch.tensor([random_tokens(12)])
    kv, horizon = read(target, tokens[0].tolist())[1], torch.arange(12).clamp(max=4).unsqueeze(0)
    features, none = drafter.features(tokens, kv, horizon), torch.full((1, 12), -1)
    other_kv = torch.cat([kv[:, :5], torch.randn_like(kv[:, 5:])], dim=1)  # positions 0..4 lie within the horizon
    torch.testing.assert_close(drafter.features(tokens, other_kv, horizon), features)
    assert torch.equal(drafter.features(tokens, other_kv, none), drafter.features(tokens, kv, none))
    other_kv[:, 4] = torch.randn_like(kv[:, 4])
    changed = (drafter.features(tokens, other_kv, horizon) - features).abs().amax(-1)[0] > 1e-4
    assert changed.tolist() == [False] * 4 + [True] * 8
    other_tokens = tokens.clone()
    other_tokens[0, 8:] = (tokens[0, 8:] + 1) % V
    torch.testing.assert_close(drafter.features(other_tokens, kv, horizon)[:, :8], features[:, :8])


def test_a_cycle_costs_its_new_tokens_only(target):
    drafter, rows, cache = new_drafter(target), Counter(), target.new_cache(64)
    for name, module in (("SA keys", drafter.self_attention.input_layernorm), ("SA", drafter.self_attention),
                         ("LSA", drafter.layer_self_attention), ("memory", drafter.Ekv2E)):
        module.register_forward_pre_hook(
            lambda module, inputs, name=name: rows.update({name: inputs[0].shape[:-1].numel()}))
    state = start_drafting(drafter, 64)
    for tokens, drafted, parents in CYCLES:
        rows.clear()
        verify(state, cache, tokens)
        step_through(state, drafted, parents)
        count, drafts = len(tokens), len(drafted)  # of verified tokens, SA has the keys and values alone to compute
        assert rows == Counter({"SA keys": count + drafts, "SA": drafts, "LSA": count * LAYERS, "memory": count})


@pytest.mark.parametrize("choices", [
    dict(), dict(target_layer_inference=2), dict(use_cross_attention=False), dict(use_layer_self_attention=False),
    dict(draft_vocabulary=PARTIAL)], ids=str)
def test_packed_it_drafts_the_same_and_in_bfloat16_almost_the_same(target, choices, monkeypatch):
    drafter, tokens, tree = new_drafter(target, **choices), random_tokens(9), TreeConfig(3, 4, 12)
    for bfloat16, tolerance in ((False, 1e-5), (True, 0.02)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)  # slower if it is not, as exact
        twin = copy.deepcopy(target)
        packed = new_drafter(twin, **choices).to_bfloat16().pack()
        state = state_after(twin.pack(), packed, tokens)
        packs = can_pack(torch.ones(1))  # elsewhere it stays as it is, and all below holds too
        assert packed.dtype == state.self_cache.kv.dtype == (torch.bfloat16 if bfloat16 and packs else torch.float32)
        assert packed.rotary.dtype == twin.norm.weight.dtype == torch.float32
        if not bfloat16:
            assert not packs or packed.self_attention.self_attn.o_proj.weight is None is packed.head_weight
            assert state.draft(2, tree) == state_after(target, drafter, tokens).draft(2, tree)
        for rows in range(1, 18, 8 if bfloat16 else 1):
            drafts = random_tokens(1 + rows), [-1] + [0] * rows
            features = step_through(state_after(twin, packed, tokens), *drafts)
            expected = step_through(state_after(target, drafter, tokens), *drafts)
            assert (features - expected).norm() < tolerance * expected.norm()
            logits = drafter.logits(expected)
            assert (packed.logits(features) - logits).norm() < tolerance * logits.norm()


# Drafts --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("vocabulary", [None, PARTIAL])
def test_a_draft_is_drawn_from_exactly_the_q_it_reports(target, vocabulary, quantize, monkeypatch):
    monkeypatch.setattr(moa, "Q_TOKENS", 4)
    drafter, sampling = new_drafter(target, draft_vocabulary=vocabulary), Sampling(0.7, 0.9, torch.Generator())
    tokens, counts, allowed = random_tokens(6), torch.zeros(V), torch.tensor(vocabulary or range(V))
    for _ in range(300):
        draft = state_after(target, drafter, tokens, sampling, quantize).draft(2, TreeConfig(1))
        counts[draft.tokens[0]] += 1
    q = draft.q[0]
    assert (counts[q == 0] == 0).all() and q.sum() == pytest.approx(1)  # nothing beyond top-p or the draft vocabulary
    assert ((counts - 300 * q).abs() <= 4.5 * (300 * q * (1 - q)).sqrt() + 1).all()
    features = state_after(target, drafter, tokens).step([Node(2, None)])[0]
    own = probabilities(target.lm_head(features)[allowed], 0.7, 0.9)
    if quantize:
        own = dequantize_probabilities(*quantize_probabilities(own), len(own))
        assert (own > 0).sum() <= 4 and torch.equal(dequantize_probabilities(*quantize_probabilities(q), V), q)
    torch.testing.assert_close(q, torch.zeros(V).index_copy(0, allowed, own))


def test_a_quantized_q_is_close_to_q_and_unchanged_by_quantizing_it_again():
    q = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).mul(4).softmax(-1)
    ids, weights = quantize_probabilities(q)
    assert ids.shape == weights.shape == (5, 64) and (ids.dtype, weights.dtype) == (torch.int32, torch.uint8)
    coarse = dequantize_probabilities(ids, weights, 300)
    torch.testing.assert_close(coarse.sum(-1), torch.ones(5))
    assert torch.equal(coarse.argmax(-1), q.argmax(-1)) and (coarse - q).abs().sum(-1).max() < 0.1
    assert torch.equal(dequantize_probabilities(*quantize_probabilities(coarse), 300), coarse)


@pytest.mark.parametrize("room, least", [(1, 0.0), (4, 0.0), (9, 0.0), (9, 0.1)])
def test_how_many_children_each_leaf_has_is_settled_before_they_are_drawn(room, least):
    q = probabilities(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), 0.5, 0.95)
    likeliest = expand_leaves(q, [0.5, 0.3, 0.2], room, least, Sampling())
    sampling = Sampling(1.0, 1.0, torch.Generator())
    draws = [expand_leaves(q, [0.5, 0.3, 0.2], room, least, sampling) for _ in range(20)]
    for drawn in draws:
        assert [leaf for leaf, _, _ in drawn] == [leaf for leaf, _, _ in likeliest]
        assert all(value == pytest.approx(q[leaf, x].item() * [0.5, 0.3, 0.2][leaf]) for leaf, x, value in drawn)
    assert len(set(map(str, draws))) > 1


@pytest.mark.parametrize("least", [0.0, 0.02])
@pytest.mark.parametrize("N", [0, 1, 3])
def test_a_greedy_tree_has_the_paths_that_the_drafter_finds_likeliest_of_all(target, N, least):
    verified, depth, count = random_tokens(6), 3, 20
    drafter = new_drafter(target, target_layer_inference=N, draft_vocabulary=PARTIAL)
    endings = list(itertools.product(range(len(PARTIAL)), repeat=depth))
    tokens = torch.tensor([verified + [2] + [PARTIAL[choice] for choice in ending] for ending in endings])  # (B, T)
    kv = torch.nn.functional.pad(read(target, verified)[1], (0, 0, 0, 0, 0, 1 + depth)).expand(len(tokens), -1, -1, -1)
    features = drafter.features(tokens, kv, torch.full_like(tokens, len(verified) - 1))[:, len(verified):-1]
    q = drafter.logits(3 * features).softmax(-1).gather(-1, torch.tensor(endings)[..., None])[..., 0].cumprod(-1)
    values = {tuple(tokens[i, -depth:][:n].tolist()): q[i, n - 1].item() for i in range(len(q)) for n in (1, 2, 3)}
    best = {path for path in sorted(values, key=lambda path: -values[path])[:count] if values[path] >= least}

    logits = drafter.logits
    drafter.logits = lambda features: logits(3 * features)  # not all alike, so that deep paths beat shallow ones
    draft = state_after(target, drafter, verified).draft(2, TreeConfig(depth, count, count, min_probability=least))
    assert set(paths(draft)) == best and len(paths(draft)) == len(best) and max(map(len, paths(draft))) == depth
    assert all(parent < child for child, parent in enumerate(draft.parents))


@pytest.mark.parametrize("N", [0, 2])
def test_a_token_of_a_tree_is_drawn_from_what_the_drafter_makes_of_its_own_path(target, N):
    drafter, verified = new_drafter(target, target_layer_inference=N), random_tokens(6)
    sampling = Sampling(1.0, 1.0, torch.Generator().manual_seed(0))
    draft = state_after(target, drafter, verified, sampling).draft(2, TreeConfig(4, 3, 16))
    parents = sorted(set(draft.parents))
    assert len(parents) == len(draft.q) > 6 and max(map(len, paths(draft))) == 4
    for parent, q in zip(parents, draft.q):
        tokens = torch.tensor([verified + [2] + (path_to(parent, draft.tokens, draft.parents) if parent >= 0 else [])])
        kv, horizon = read(target, tokens[0].tolist())[1], torch.full_like(tokens, len(verified) - 1)
        features = drafter.features(tokens, kv, horizon)[0, -1]
        torch.testing.assert_close(q, probabilities(drafter.logits(features), 1.0), **CLOSE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [TreeConfig(1), TreeConfig(12), TreeConfig(3, 2, 6), TreeConfig(5, 2, 30),
                                  TreeConfig(2, 8, 12), TreeConfig(6, 3, 8)], ids=str)
def test_a_draft_is_as_large_as_its_config_says_and_no_larger(target, tree, temperature):
    sampling = Sampling(temperature, 1.0, torch.Generator().manual_seed(0))
    draft = state_after(target, new_drafter(target), random_tokens(6), sampling).draft(2, tree)
    assert len(draft.tokens) == (tree.depth if tree.top_k == 1 else tree.total_tokens)
    deepest = max(map(len, paths(draft)))
    assert deepest == tree.depth if temperature > 0 else deepest <= tree.depth
    expanded = Counter(len(paths(draft)[parent]) for parent in set(draft.parents) - {-1})
    assert max(expanded.values(), default=0) <= tree.top_k
    assert len(set(paths(draft))) == len(draft.tokens)  # no token twice among siblings


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_draft_ends_where_the_drafter_is_no_longer_confident(target, top_k):
    depths = []
    for least in (0.0, 1e-4, 1e-2, 0.999):
        state = state_after(target, new_drafter(target), random_tokens(6), Sampling(1.0, 1.0, torch.Generator()))
        depths.append(max(map(len, paths(state.draft(2, TreeConfig(8, top_k, 64, least))))))
    assert depths[0] == 8 > depths[1] > depths[2] > depths[3] == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("N", [0, 1])
def test_many_conversations_draft_what_each_would_alone(target, N, temperature):
    drafter, K, texts = new_drafter(target, target_layer_inference=N, draft_vocabulary=PARTIAL), 4, []
    state, cache = BatchDraftState(drafter, 64, rows=3), target.new_cache(64, 3)
    caches = cache, state.self_cache, state.cross_cache, state.reused_cache
    for each in caches:
        each.lengths = []
    for counts, dropped in [  # newly verified tokens of each row, which may be new; the row that then ends
            ([6], None), ([0, 3], None), ([0, 0, 8], None), ([1, 5, 2], 0), ([3, 1], None), ([2, 4], 1), ([3], None)]:
        if len(counts) > len(texts):
            texts.append([])
            for each in caches:
                each.lengths.append(0)
        tokens, starts = torch.randint(V, (len(counts), max(counts))), cache.lengths
        hidden = target.hidden(tokens, cache)  # (B, T, E)
        cache.lengths = [start + count for start, count in zip(starts, counts)]
        rows, steps = zip(*[(row, i) for row, count in enumerate(counts) for i in range(count)])
        state.append_verified(drafter.build_memory(
            tokens[rows, steps].tolist(), cache, [starts[row] + i for row, i in zip(rows, steps)],
            hidden[rows, steps][None], list(rows)))
        texts = [text + new[:count] for text, new, count in zip(texts, tokens.tolist(), counts)]
        samplings = [Sampling(temperature, 1.0, torch.Generator().manual_seed(row)) for row in range(len(texts))]
        twins = copy.deepcopy(samplings)
        for row, draft in enumerate(state.draft_rows(list(range(len(texts))), K, samplings)):
            alone = state_after(target, drafter, texts[row], twins[row]).draft(row, TreeConfig(K))
            assert (draft.token, draft.tokens, draft.parents) == (alone.token, alone.tokens, alone.parents)
            assert draft.q is alone.q is None or torch.allclose(draft.q, alone.q, **CLOSE)
        if dropped is not None:
            texts[dropped] = texts[-1]
            texts.pop()
            for each in caches:
                each.move_row(len(texts), dropped)
                each.lengths.pop()


def test_without_lsa_the_memory_is_a_function_of_the_last_hidden_state_only(target):
    drafter, tokens = new_drafter(target, use_layer_self_attention=False), random_tokens(8)
    _, kv, hidden = read(target, tokens)
    torch.testing.assert_close(drafter.memory(torch.randn_like(kv), hidden), drafter.Ekv2E(hidden))


@pytest.mark.parametrize("use_lsa", [True, False])
def test_without_ca_the_horizon_has_no_effect_and_a_draft_reads_what_was_predicted_before_it(target, use_lsa):
    drafter = new_drafter(target, use_cross_attention=False, use_layer_self_attention=use_lsa)
    tokens, horizons = torch.tensor([random_tokens(10)]), (torch.full((1, 10), -1), torch.arange(10).unsqueeze(0))
    kv = read(target, tokens[0].tolist())[1]
    assert torch.equal(*(drafter.features(tokens, kv, horizon) for horizon in horizons))
    verified = tokens[0, :7].tolist()  # while drafting, what was predicted at a draft stands in for its memory
    steps = step_through(state_after(target, drafter, verified), tokens[0, 7:].tolist(), chain_parents(3))
    _, kv, hidden = read(target, verified)
    memory = torch.cat([drafter.memory(kv, hidden), (steps if use_lsa else drafter.Ekv2E(steps))[None]], dim=1)
    torch.testing.assert_close(drafter.cross_attend(drafter.self_attend(tokens), memory, None)[0, 7:], steps, **CLOSE)


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
    inputs = tokens, read(target, tokens[0].tolist())[1], torch.arange(9).clamp(max=3).unsqueeze(0)
    features = drafter.features(*inputs)
    torch.testing.assert_close(loaded.features(*inputs), features)
    torch.testing.assert_close(loaded.logits(features), drafter.logits(features))


def test_parameters_have_the_authors_names_none_is_the_targets_and_the_config_may_leave_sizes_out(target, tmp_path):
    drafter = new_drafter(target, self_attention_num_key_value_heads=2, cross_attention_num_key_value_heads=4,
                          layer_self_attention_intermediate_size=7, self_attention_intermediate_size=9)
    assert {name for name, _ in drafter.named_parameters()} == set(drafter.state_dict()) == AUTHORS_NAMES
    save_drafter(drafter, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == AUTHORS_NAMES
    (tmp_path / "config.json").write_text("{}")
    assert load_drafter(tmp_path, target).config == drafter.config


def test_a_save_that_fails_leaves_the_old_checkpoint_complete(target, tmp_path, monkeypatch):
    save_drafter(new_drafter(target, seed=1), tmp_path)
    old = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr(moa, "save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_drafter(new_drafter(target, seed=2, target_layer_inference=2), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == old


@pytest.mark.parametrize("file, content, complaint", [
    ("config.json", None, "not readable as JSON"), ("config.json", b"{", "not readable as JSON"),
    ("config.json", b"[]", "not a mapping"), ("model.safetensors", None, "not a safetensors file"),
    ("model.safetensors", b"?", "not a safetensors file"),
    *(("model.safetensors", edit, complaint) for edit, complaint in (
        ({"Ekv2E.bias": None}, "Ekv2E.bias missing"), ({"Ekv2E.bias": torch.ones(3)}, "expected (32,)"),
        ({"Ekv2E.bias": torch.full((32,), math.nan)}, "holds NaN"), ({"more": torch.ones(3)}, "unknown tensor more"))),
    *(("config.json", {name: value}, name.removesuffix("_num_attention_heads")) for name, values in {
        "target_layer_inference": (LAYERS + 1, -1, "one"), "num_attention_heads": (0, "four", 64),
        "layer_self_attention_num_attention_heads": (0, 41), "rope_theta": ([], 0), "rms_norm_eps": (math.inf,),
        "use_cross_attention": ("yes",), "draft_vocabulary": ([V], [-1], [], [3, 3], "all")}.items()
      for value in values)], ids=lambda x: str(x)[:40])
def test_a_checkpoint_that_is_damaged_or_unfit_is_refused_in_one_line(target, tmp_path, file, content, complaint):
    save_drafter(new_drafter(target), tmp_path)
    path = tmp_path / file
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif file == "config.json":
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    else:
        save_file({name: x for name, x in (load_file(path) | content).items() if x is not None}, path)
    with pytest.raises(InputError) as error:
        load_drafter(tmp_path, target)
    assert complaint in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)
