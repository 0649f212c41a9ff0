"""Claims about the drafter: the authors' numbers, one pass against step by step, drafts and what
they are drawn from."""
import copy
import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file
from torch import Tensor, nn

import llama
import moa
from app.loading import load_drafter, load_model
from llama import Config, KVCache, Llama, RMSNorm, Sampling, causal_mask, probabilities, sample
from moa import Draft, Drafter, DraftLimits, DraftState, default_config, likeliest_candidates
from speculate import TreeSampler
from train import drafter_pass, reuse_target_layers

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
LAYERS = 4
VOCABULARY = 32
SIZES = Config(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    max_position_embeddings=64,
)
N1 = {"target_layer_inference": 1}
N2 = {"target_layer_inference": 2}
N3 = {"target_layer_inference": 3}


def random_norms(module: nn.Module) -> None:
    """Give norms weights that are not all 1, so that it matters which norm is applied where."""
    for part in module.modules():
        if isinstance(part, RMSNorm):
            part.weight.uniform_(0.5, 1.5)


@pytest.fixture(scope="module")
def target() -> Llama:
    torch.manual_seed(0)
    target = Llama(SIZES)
    random_norms(target)
    return target


def random_drafter(target: Llama, seed: int = 1, **choices) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(target, replace(default_config(target), **choices))
    drafter.requires_grad_(False).eval()
    for name in moa.TRAINED:
        random_norms(getattr(drafter, name))
    return drafter


def features_of(drafter: Drafter, tokens: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
    """Return the predicted final hidden states (B, T, E) of one pass over all positions."""
    _, features = drafter_pass(drafter, tokens, kv, horizon)
    return features


def random_tokens(count: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=seeded(3)).tolist()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Reading(NamedTuple):
    """What the target computes from a text."""

    kv: Tensor  # from its cache, (1, T, L, 2 Ekv)
    hidden: Tensor  # its final states, (1, T, E)


def read(target: Llama, tokens: list[int]) -> Reading:
    cache = target.new_cache(len(tokens))
    hidden = target.hidden(torch.tensor([tokens]), cache)
    kv = cache.kv.permute(1, 3, 0, 2, 4)  # (1, T, L, Hkv, 2D)
    return Reading(kv.flatten(3), hidden)


def verify(state: DraftState, cache: KVCache, tokens: list[int]) -> None:
    """Let the target read tokens, and the drafter their memory."""
    state.drafter.target.hidden(torch.tensor([tokens]), cache)
    state.append_verified(state.drafter.cache_update(tokens, cache))


def state_after(
    drafter: Drafter, tokens: list[int], sampling: Sampling = Sampling()
) -> DraftState:
    state = TreeSampler(drafter, 64, sampling)
    verify(state, drafter.target.new_cache(len(tokens)), tokens)
    return state


def given_draft(tokens: list[int], parents: list[int]) -> Draft:
    """A draft of these tokens, the first of which is its root."""
    draft = Draft(tokens[0])
    for token, parent in zip(tokens[1:], parents[1:]):
        draft.add(token, parent, 1.0)
    return draft


def path_tokens(draft: Draft, i: int) -> list[int]:
    """The tokens on the way from the root to token i, both included."""
    path = []
    while i >= 0:
        path.insert(0, draft.tokens[i])
        i = draft.parents[i]
    return path


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The path from the root to each drafted token, without the root."""
    return [tuple(path_tokens(draft, i)[1:]) for i in range(1, len(draft.tokens))]


def chain_parents(count: int) -> list[int]:
    return list(range(-1, count - 1))


def step_through(state: DraftState, draft: Draft) -> Tensor:
    """Features (1 + K, E) of this draft, whose levels the drafter reads one by one."""
    state.draft(draft.tokens[0], DraftLimits(depth=0))  # drops the earlier draft
    levels = {}
    for i in range(len(draft.tokens)):
        levels.setdefault(len(path_tokens(draft, i)), []).append(i)
    features = {}
    for leaves in levels.values():
        features.update(zip(leaves, state.step(draft, leaves)))
    return torch.stack([features[i] for i in range(len(draft.tokens))])


def step_through_chain(state: DraftState, tokens: list[int]) -> Tensor:
    """Features of a chain of these tokens, the first of which is its root."""
    return step_through(state, given_draft(tokens, chain_parents(len(tokens))))


# --- Sizes, and the authors' numbers ---


def test_the_default_sizes_for_llama_3_8b_are_the_papers():
    llama3 = Config(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    assert default_config(SimpleNamespace(config=llama3)) == moa.DrafterConfig(
        num_attention_heads=32,
        layer_self_attention_num_attention_heads=32,
        layer_self_attention_num_key_value_heads=8,
        layer_self_attention_intermediate_size=3072,
        self_attention_num_key_value_heads=4,
        self_attention_intermediate_size=6144,
        cross_attention_num_key_value_heads=4,
        cross_attention_intermediate_size=6144,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    )


@pytest.mark.parametrize("N", [0, 1])
def test_lsa_memory_features_and_logits_are_those_of_the_authors(N):
    folder = GOLDEN / f"moa-tiny-n{N}"
    expected = load_file(folder / "expected.safetensors")
    target = load_model(folder / "target")
    drafter = load_drafter(folder / "drafter", target)
    tokens = expected["input_ids"]
    response = expected["response_mask"].bool()
    kv, hidden = read(target, tokens[0].tolist())
    last_of_prompt = int((~response).sum()) - 1
    horizon = torch.arange(tokens.shape[1]).clamp(max=last_of_prompt).unsqueeze(0)
    features = features_of(drafter, tokens, kv, horizon)
    logits = drafter.lm_head(features)

    def check(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual.view_as(expected), expected, **CLOSE)

    check(kv, expected["target_kv"])  # in the cache's order, which LSA was trained on
    check(hidden, expected["target_hidden"][:, -1])
    check(drafter.layer_self_attend(kv), expected["lsa_mean"])
    check(drafter.build_memory([kv]), expected["memory"])
    check(features[response], expected["features"][response])
    check(logits[response], expected["draft_logits"][response])


# --- The drafter again, written from the paper: slow, in float64, one query at a time ---


def normalize(x: Tensor, norm: RMSNorm) -> Tensor:
    return x / (x.square().mean() + norm.eps).sqrt() * norm.weight


def turn(heads: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of heads (H, D): a pair (x_i, x_{i + D/2}) is a complex number, which is rotated."""
    real, imaginary = heads.chunk(2, dim=-1)
    exponents = torch.arange(real.shape[-1]).double() / real.shape[-1]
    angles = position * theta**-exponents
    turned = torch.complex(real, imaginary) * torch.exp(1j * angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


class Block:
    """A decoder layer that reads one token at a time."""

    def __init__(self, layer: llama.DecoderLayer, heads: int, head_dim: int, theta: float):
        self.weights = copy.deepcopy(layer).double()
        self.heads = heads
        self.head_dim = head_dim
        self.theta = theta

    def key_value(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """The key and the value of x (E), both (Hkv, D), which other tokens read."""
        y = normalize(x, self.weights.input_layernorm)
        key = (self.weights.self_attn.k_proj.weight @ y).view(-1, self.head_dim)
        value = (self.weights.self_attn.v_proj.weight @ y).view(-1, self.head_dim)
        return turn(key, position, self.theta), value

    def run(self, x: Tensor, position: int, keys_values: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The layer's output (E) for x (E), which attends to these keys and values."""
        y = normalize(x, self.weights.input_layernorm)
        queries = (self.weights.self_attn.q_proj.weight @ y).view(self.heads, self.head_dim)
        outputs = torch.zeros_like(queries)
        for head, query in enumerate(turn(queries, position, self.theta)):
            weights = []
            values = []
            for key, value in keys_values:
                shared = head * len(key) // self.heads  # the kv head of this head's group
                weights.append(torch.exp(query @ key[shared] / self.head_dim**0.5))
                values.append(value[shared])
            for weight, value in zip(weights, values):
                outputs[head] += weight / sum(weights) * value
        x = x + self.weights.self_attn.o_proj.weight @ outputs.flatten()
        y = normalize(x, self.weights.post_attention_layernorm)
        gate = self.weights.mlp.gate_proj.weight @ y
        up = self.weights.mlp.up_proj.weight @ y
        return x + self.weights.mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * up)


class SlowDrafter:
    """The same drafter, written from the paper."""

    def __init__(self, drafter: Drafter):
        config = drafter.config
        sizes = drafter.target.config
        heads = config.num_attention_heads
        head_dim = sizes.hidden_size // heads
        layer_heads = config.layer_self_attention_num_attention_heads
        layer_head_dim = 2 * sizes.num_key_value_heads * sizes.head_dim // layer_heads
        theta = config.rope_theta
        self.lsa = Block(drafter.layer_self_attention, layer_heads, layer_head_dim, theta)
        self.projection = copy.deepcopy(drafter.Ekv2E).double()
        self.sa = Block(drafter.self_attention, heads, head_dim, theta)
        self.ca = Block(drafter.cross_attention, heads, head_dim, theta)
        self.embeddings = drafter.target.embed_tokens.weight.double()
        self.norm = drafter.target.norm
        self.sizes = sizes
        self.reused = {}  # the target's last N layers
        for i in range(sizes.num_hidden_layers - drafter.N, sizes.num_hidden_layers):
            layer = drafter.target.layers[i]
            self.reused[i] = Block(
                layer, sizes.num_attention_heads, sizes.head_dim, sizes.rope_theta
            )

    def memory(self, kv: Tensor) -> Tensor:
        """LSA, mean and projection, of one token's kv (L, 2 Ekv)."""
        read = [self.lsa.key_value(x, layer) for layer, x in enumerate(kv)]
        outputs = [self.lsa.run(x, layer, read) for layer, x in enumerate(kv)]
        return self.projection.weight @ (sum(outputs) / len(outputs)) + self.projection.bias

    def features(self, tokens: list[int], kv: Tensor, i: int, h: int) -> Tensor:
        """The features of token i, if tokens 0 to h are verified and kv (h + 1, L, 2 Ekv) holds
        their keys and values.

        The tokens after h are drafted. Their keys and values in the last N layers are those that
        the drafter itself computes, so it computes them for each of these tokens in turn.
        """
        kv = kv.double()
        memories = [self.ca.key_value(self.memory(kv[j]), j) for j in range(h + 1)]
        text = []
        states = {}
        for j in range(i + 1):
            x = self.embeddings[tokens[j]]
            text.append(self.sa.key_value(x, j))
            if j > h or j == i:
                states[j] = self.ca.run(self.sa.run(x, j, text), j, memories)
        for layer, block in self.reused.items():
            read = []
            for j in range(h + 1):
                heads = kv[j, layer].view(self.sizes.num_key_value_heads, -1)  # (Hkv, 2D)
                read.append(tuple(heads.chunk(2, dim=-1)))
            for j in states:
                if j > h:
                    read.append(block.key_value(states[j], j))
                states[j] = block.run(states[j], j, read)
        return normalize(states[i], self.norm) if self.reused else states[i]


GROUPED = {"self_attention_num_key_value_heads": 2}  # two query heads share each
HORIZONS = [
    [0, 1, 2, 3, 3, 3, 3, 6, 6, 6, 6, 6],  # as in training: a prompt of four tokens, then two runs
    [-1] * 12,  # no memory at all
]


@pytest.mark.parametrize("N", [0, 2])
def test_features_are_those_of_a_slow_drafter_that_is_written_from_the_paper(target, N):
    drafter = random_drafter(target, target_layer_inference=N, **GROUPED)
    slow = SlowDrafter(drafter)
    texts = [random_tokens(12), random_tokens(24)[12:]]
    kv = torch.cat([read(target, text).kv for text in texts])
    inputs = (torch.tensor(texts), kv, torch.tensor(HORIZONS))
    ca_output, features = drafter_pass(drafter, *inputs)
    assert torch.equal(ca_output, features) == (N == 0)
    for b, text in enumerate(texts):
        for i, h in enumerate(HORIZONS[b]):
            expected = slow.features(text, kv[b, :h + 1], i, h)
            torch.testing.assert_close(features[b, i].double(), expected, **CLOSE)


# --- Step by step against one pass ---


class Cycle(NamedTuple):
    """Tokens that are verified, followed by a draft. The next cycle verifies what is kept of it."""

    verified: list[int]
    drafted: list[int]  # the root first
    parents: list[int]


CYCLES = [
    Cycle([25, 3, 9, 9, 0, 31, 4], [5, 6, 7, 8], [-1, 0, 1, 2]),
    # After a rejection.
    Cycle([5, 6], [1, 2, 3], [-1, 0, 1]),
    # All were accepted.
    Cycle([1, 2, 3, 4], [9, 10, 11], [-1, 0, 1]),
    # The verified tokens differ from the drafted ones. A tree is drafted.
    Cycle([12, 13], [14, 15, 16, 17, 18, 19, 20], [-1, 0, 0, 0, 1, 3, 3]),
    # A branch of the tree was accepted, and not its first one.
    Cycle([14, 17, 19], [18, 19, 20, 21], [-1, 0, 1, 2]),
    # A tree with the same token on two branches.
    Cycle([18, 30, 20], [2, 3, 4, 5, 5, 6, 7], [-1, 0, 0, 1, 2, 3, 4]),
    # Nothing is drafted.
    Cycle([2, 4, 5, 8], [], []),
    # A single token is read.
    Cycle([16, 17], [22], [-1]),
    Cycle([24], [23, 25], [-1, 0]),
]


@pytest.mark.parametrize("choices", [
    {}, N1, GROUPED | N2, {"target_layer_inference": LAYERS},
], ids=str)
def test_drafting_step_by_step_gives_the_features_of_one_pass_under_its_horizon(
        target, choices, monkeypatch):
    monkeypatch.setattr(moa, "LSA_TOKENS", 2)  # a text takes several reads
    drafter = random_drafter(target, **choices)
    state = DraftState(drafter, 64, Sampling())
    cache = target.new_cache(64)
    verified = []
    for cycle in CYCLES:
        verify(state, cache, cycle.verified)
        verified = verified + cycle.verified
        assert state.text_length == len(verified)
        if not cycle.drafted:
            continue
        draft = given_draft(cycle.drafted, cycle.parents)
        steps = step_through(state, draft)
        for i in range(len(draft.tokens)):
            tokens = verified + path_tokens(draft, i)
            horizon = torch.full((1, len(tokens)), len(verified) - 1)
            kv, _ = read(target, tokens)
            features = features_of(drafter, torch.tensor([tokens]), kv, horizon)
            torch.testing.assert_close(steps[i], features[0, -1], **CLOSE)


@pytest.mark.parametrize("N", [1, LAYERS])
def test_from_the_true_hidden_state_the_draft_distribution_is_the_targets_own(target, N):
    drafter = random_drafter(target, target_layer_inference=N)
    tokens = torch.tensor([random_tokens(12)])
    positions = torch.arange(12)
    mask = causal_mask(12, past=0, device="cpu")
    embeddings = target.embed_tokens(tokens)
    true_state = embeddings
    for layer in target.layers[:LAYERS - N]:
        true_state = layer(true_state, target.rotary[:, :12], mask)
    kv, _ = read(target, tokens[0].tolist())
    none = torch.full((12,), -1)
    for horizon in (none, positions, positions - 1, positions.clamp(max=5)):
        features = reuse_target_layers(drafter, true_state, kv, horizon.unsqueeze(0))
        torch.testing.assert_close(drafter.lm_head(features), target(tokens), **CLOSE)


def test_features_do_not_depend_on_memory_beyond_the_horizon_nor_on_later_tokens(target):
    drafter = random_drafter(target, **N3)
    tokens = torch.tensor([random_tokens(12)])
    kv, _ = read(target, tokens[0].tolist())
    horizon = torch.arange(12).clamp(max=4).unsqueeze(0)
    none = torch.full((1, 12), -1)
    features = features_of(drafter, tokens, kv, horizon)

    beyond = kv.clone()
    beyond[:, 5:] = torch.randn_like(kv[:, 5:])
    torch.testing.assert_close(features_of(drafter, tokens, beyond, horizon), features)
    without = features_of(drafter, tokens, kv, none)
    assert torch.equal(features_of(drafter, tokens, beyond, none), without)

    at_horizon = kv.clone()
    at_horizon[:, 4] = torch.randn_like(kv[:, 4])
    difference = features_of(drafter, tokens, at_horizon, horizon) - features
    changed = difference.abs().amax(-1)[0] > 1e-4
    assert changed.tolist() == [False] * 4 + [True] * 8

    later = tokens.clone()
    later[0, 8:] = (tokens[0, 8:] + 1) % VOCABULARY
    torch.testing.assert_close(features_of(drafter, later, kv, horizon)[:, :8], features[:, :8])


def test_a_cycle_costs_its_new_tokens_only(target):
    drafter = random_drafter(target)
    rows = Counter()
    modules = {
        "SA keys": drafter.self_attention.input_layernorm,
        "SA": drafter.self_attention,
        "LSA": drafter.layer_self_attention,
        "memory": drafter.Ekv2E,
    }

    def count_rows(name: str):
        def hook(module, inputs):
            x, *_ = inputs
            rows[name] += x.shape[:-1].numel()
        return hook

    for name, module in modules.items():
        module.register_forward_pre_hook(count_rows(name))
    state = DraftState(drafter, 64, Sampling())
    cache = target.new_cache(64)
    for verified, drafted, parents in CYCLES:
        rows.clear()
        verify(state, cache, verified)
        if drafted:
            step_through(state, given_draft(drafted, parents))
        # Of verified tokens SA computes keys and values, and nothing else.
        assert rows["SA keys"] == len(verified) + len(drafted)
        assert rows["SA"] == len(drafted)
        assert rows["LSA"] == len(verified) * LAYERS
        assert rows["memory"] == len(verified)


# --- Drafts, and what they are drawn from ---


def test_the_first_token_is_drawn_from_the_drafters_own_q(target):
    drafter = random_drafter(target)
    tokens = random_tokens(6)
    state = state_after(drafter, tokens, Sampling(0.7, 0.9, seeded()))
    twin = seeded()
    for _ in range(20):
        draft = state.draft(2, DraftLimits(1))
        assert sample(draft.q[0], twin) == draft.tokens[1]
    features = step_through_chain(state_after(drafter, tokens), [2])  # (1, E)
    torch.testing.assert_close(draft.q[0], probabilities(target.lm_head(features), 0.7, 0.9)[0])


def tied_target() -> Llama:
    """A target in bfloat16 whose 8192 tokens form groups of 128 that have the same logit."""
    torch.manual_seed(0)
    target = Llama(replace(SIZES, vocab_size=8192))
    for parameter in target.parameters():  # not the rotary table
        parameter.data = parameter.data.bfloat16()
    target.lm_head.weight.copy_(torch.randn(64, 32).repeat(128, 1))
    return target


def check_drawn(draft: Draft, temperature: float, generator: torch.Generator) -> None:
    """Check that each of 12 tokens is what a twin generator draws from the q that is reported."""
    assert len(draft.tokens) == 1 + 12
    assert len(draft.q) == (12 if temperature > 0 else 0)
    for newest, q in draft.q.items():
        token = draft.tokens[newest + 1]
        assert q[token] > 0
        assert sample(q, generator) == token
        least = q[q > 0].min()
        assert (q == least).sum() >= 128  # all tokens with the same logit are in q


@pytest.mark.parametrize("temperature, top_p", [(0.7, 0.9), (0.0, 1.0)])
def test_a_chain_is_drawn_from_exactly_the_q_it_reports_although_logits_tie(temperature, top_p):
    sampling = Sampling(temperature, top_p, seeded())
    state = state_after(random_drafter(tied_target()), random_tokens(6), sampling)
    check_drawn(state.draft(2, DraftLimits(12)), temperature, seeded())


def test_every_token_of_a_tree_has_positive_probability_in_the_q_it_reports_although_logits_tie():
    sampling = Sampling(0.8, 0.5, seeded())
    state = state_after(random_drafter(tied_target()), random_tokens(6), sampling)
    draft = state.draft(2, DraftLimits(5, 4, 60))
    assert len(draft.tokens) == 1 + 60
    for i in range(1, 1 + 60):
        assert draft.q[draft.parents[i]][draft.tokens[i]] == draft.probabilities[i] > 0


LEAVES = [1, 2, 3]


def draft_of_leaves() -> Draft:
    draft = Draft(0)
    for leaf, probability in zip(LEAVES, (0.5, 0.3, 0.2)):
        draft.add(leaf, 0, probability)
    return draft


@pytest.mark.parametrize("count, least", [(1, 0.0), (4, 0.0), (9, 0.0), (9, 0.1)])
def test_the_likeliest_candidates_are_those_of_the_likeliest_paths_and_no_path_under_the_minimum(
        count, least):
    q = probabilities(torch.randn(3, 8), 0.5)
    choices = likeliest_candidates(draft_of_leaves(), LEAVES, q, count, least)
    found = {(choice.row, choice.token) for choice in choices}
    assert len(found) == len(choices)
    values = {}
    for leaf, path_probability in enumerate((0.5, 0.3, 0.2)):
        for token in range(8):
            values[leaf, token] = path_probability * q[leaf, token].item()
    likeliest = sorted(values, key=lambda pair: -values[pair])[:count]
    assert found == {pair for pair in likeliest if values[pair] >= least}
    assert (len(choices) < count) == (least > 0)


@pytest.mark.parametrize("N, least", [(0, 0.0), (1, 0.0), (3, 0.05)])
def test_a_greedy_tree_has_the_paths_that_the_drafter_finds_likeliest_of_all(N, least):
    depth = 3
    count = 20
    tokens = range(6)  # so few that every path can be tried
    target = Llama(replace(SIZES, vocab_size=len(tokens)))
    random_norms(target)
    target.lm_head.weight.mul_(3)  # sharper, so that deep paths beat shallow ones
    drafter = random_drafter(target, target_layer_inference=N)
    verified = [3, 1, 4, 1, 5, 0]

    # By one pass over every path of three tokens.
    endings = list(itertools.product(tokens, repeat=depth))
    texts = torch.tensor([verified + [2, *ending] for ending in endings])  # (B, T)
    kv, _ = read(target, verified)
    kv = nn.functional.pad(kv, (0, 0, 0, 0, 0, 1 + depth)).expand(len(texts), -1, -1, -1)
    horizon = torch.full_like(texts, len(verified) - 1)
    features = features_of(drafter, texts, kv, horizon)[:, len(verified):-1]
    q = drafter.lm_head(features).softmax(-1)  # (B, depth, V)
    q = q.gather(-1, torch.tensor(endings).unsqueeze(-1)).squeeze(-1)
    values = {}
    for path, row in zip(endings, q.cumprod(-1).tolist()):
        for length in range(1, depth + 1):
            values[path[:length]] = row[length - 1]
    likeliest = sorted(values, key=lambda path: -values[path])[:count]
    expected = {path for path in likeliest if values[path] >= least}
    assert (len(expected) < count) == (least > 0)

    tree = DraftLimits(depth, count, count, min_probability=least)
    draft = state_after(drafter, verified).draft(2, tree)
    found = paths(draft)
    assert set(found) == expected
    assert len(found) == len(expected)
    assert max(map(len, found)) == depth
    for i, path in enumerate(found, start=1):
        assert draft.parents[i] < i
        assert draft.path_probabilities[i] == pytest.approx(values[path], rel=1e-3)
        before = draft.path_probabilities[draft.parents[i]]
        assert draft.probabilities[i] == pytest.approx(values[path] / before, rel=1e-3)


def test_a_token_of_a_tree_is_drawn_from_the_drafters_q_after_its_own_path(target):
    drafter = random_drafter(target)
    verified = random_tokens(6)
    state = state_after(drafter, verified, Sampling(1.0, 1.0, seeded()))
    draft = state.draft(2, DraftLimits(4, 3, 16))
    assert set(draft.q) == set(draft.parents[1:])
    assert len(draft.q) > 5
    assert max(map(len, paths(draft))) == 4
    for parent, q in draft.q.items():
        text = verified + path_tokens(draft, parent)
        kv, _ = read(target, text)
        horizon = torch.full((1, len(text)), len(verified) - 1)
        features = features_of(drafter, torch.tensor([text]), kv, horizon)[0, -1]
        torch.testing.assert_close(q, probabilities(drafter.lm_head(features), 1.0), **CLOSE)
        for child in draft.children(parent):
            assert draft.parents[child] == parent
            assert draft.probabilities[child] == q[draft.tokens[child]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("limits", [
    DraftLimits(1), DraftLimits(12), DraftLimits(3, 2, 6), DraftLimits(5, 2, 30),
    DraftLimits(2, 8, 12), DraftLimits(6, 3, 8),
], ids=str)
def test_a_draft_is_as_large_as_its_config_says_and_no_larger(target, limits, temperature):
    sampling = Sampling(temperature, 1.0, seeded())
    state = state_after(random_drafter(target), random_tokens(6), sampling)
    draft = state.draft(2, limits)
    found = paths(draft)
    assert len(found) == (limits.depth if limits.top_k == 1 else limits.total_tokens)
    assert draft.is_chain or limits.top_k > 1
    deepest = max(map(len, found))
    assert deepest <= limits.depth
    assert deepest == limits.depth or temperature == 0
    expanded = Counter(len(path_tokens(draft, parent)) for parent in set(draft.parents[1:]))
    assert max(expanded.values()) <= limits.top_k
    assert len(state.expanded) <= 1 + limits.top_k * (limits.depth - 1)  # the root, then each level
    assert len(set(found)) == len(found)  # no token twice among siblings


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_draft_ends_where_the_drafter_is_no_longer_confident(target, top_k):
    depths = []
    for least in (0.0, 1e-4, 1e-2, 0.999):
        sampling = Sampling(1.0, 1.0, seeded())
        state = state_after(random_drafter(target), random_tokens(6), sampling)
        draft = state.draft(2, DraftLimits(8, top_k, 64, least))
        depths.append(max(map(len, paths(draft))))
    assert depths[0] == 8 > depths[1] > depths[2] > depths[3] == 1
