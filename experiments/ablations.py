"""Drafters without a part: without LSA, without CA, without both, and EAGLE's.

What does each part of the drafter bring? Leave it out, train what is left in the same way, and let
it draft. This script trains each drafter into a folder of its own within --out, and lets it answer
prompts that it was not trained on, with chains and with trees. For the toy target that takes
minutes. The same command goes on where it was interrupted:

    python -m experiments.ablations --model toy --data answers.jsonl --out runs/parts --updates 400

answers.jsonl holds conversations, best with answers of the target's own (`python -m
experiments.synthesize` writes them). For longer trainings see experiments/results/README.md.
"""
from __future__ import annotations

import json
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Iterator, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from app.answers import (
    Cycles,
    acceptance_length,
    answer,
    count_slots,
    timed_cycles,
    tokens_per_second,
)
from app.exact import DetailedResult, ExactVerifier
from app.loading import load_drafter, load_target
from app.packed import pack_models
from app.training import RunConfig, train_drafter
from experiments.copies import NoDrafter
from experiments.tables import Column, print_rows
from llama import DecoderLayer, GenerationConfig, KVCache, Llama, Sampling, causal_mask
from moa import (
    CacheUpdate,
    Draft,
    Drafter,
    DrafterConfig,
    DraftLimits,
    DraftState,
    run_target_layers,
)
from plumbing.conversations import Conversations, hold_out
from plumbing.devices import DTYPES, choose_training_dtype
from plumbing.errors import InputError, run_command
from plumbing.flags import Parser, add_model_arguments, number, path, positive_int
from plumbing.tokenizer import Tokenizer
from speculate import LocalVerifier, TreeSampler

# Drafts of a fixed size, whatever the drafter thinks of them.
LIMITS = {
    "chain": DraftLimits(depth=4),
    "tree": DraftLimits(depth=6, top_k=3, total_tokens=16),
}
COLUMNS = {
    "chain_acceptance_length": Column("chain", "acceptance length, with chains of 4"),
    "tree_acceptance_length": Column("tree", "acceptance length, with trees of 16"),
    "chain_tokens_per_second": Column("chain tok/s", "tokens per second, with chains of 4"),
    "tree_tokens_per_second": Column("tree tok/s", "tokens per second, with trees of 16"),
}


# --- Parts left out ---
#
# What the layer after SA gets of the memory. After t verified tokens come the newest token r and
# drafted ones d1, d2:
#
#     at                          r              d1                 d2
#     with CA                     m_0 .. m_t-1   m_0 .. m_t-1       m_0 .. m_t-1
#     without, in training        m_t-1          r's memory         d1's memory
#     without, while drafting     m_t-1          predicted at r     predicted at d1
#
# Without CA each position adds the one memory before it to its own input, and attends to the
# positions before it. The last two rows differ: that is the off-policy problem.
#
# The chapters know nothing of this. Here a part is replaced by a module that is called in the same
# way, so that `drafter_pass` of train.py trains every drafter. Only while drafting do those without
# LSA need a verifier, and those without CA a draft state, of their own.


@dataclass(frozen=True)
class AblationConfig(DrafterConfig):
    """A drafter's config, which also states what parts it has."""

    use_layer_self_attention: bool = True
    use_cross_attention: bool = True
    use_self_attention: bool = True


class AblationDrafter(Drafter):
    """A drafter without the parts in `missing`."""

    missing: tuple[str, ...] = ()

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        parts = {f"use_{part}": False for part in self.missing}
        self.config = AblationConfig(**asdict(config), **parts)  # saved with the weights


# --- Without LSA ---


class NoLSADrafter(AblationDrafter):
    """Without LSA. A token's memory is its final hidden state in the target, projected."""

    missing = ("layer_self_attention",)

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        del self.layer_self_attention
        width = target.config.hidden_size
        self.Ekv2E = nn.Linear(width, width)  # the name stays, though it is from E to E
        self.states = torch.empty(0)  # of the tokens whose memory is built next, (B, T, E)
        # The cache does not hold these states, but in training the target has just computed them.
        target.norm.register_forward_hook(self.keep_states)

    def keep_states(self, norm: nn.Module, inputs: tuple[Tensor], states: Tensor) -> None:
        self.states = states

    def build_memory(self, pieces: Iterator[Tensor]) -> Tensor:
        return self.project_states(self.states)

    def project_states(self, hidden: Tensor) -> Tensor:
        """Turn final hidden states (B, T, E) into memories (B, T, E)."""
        return self.Ekv2E(hidden.to(self.dtype))


class LastStateVerifier(ExactVerifier):
    """For drafters without LSA: it hands them the target's final states of the verified tokens."""

    def __init__(self, model: Llama, drafter: NoLSADrafter, capacity: int, sampling: Sampling):
        # The verifier's own update would come before it is known which states to hand over.
        super().__init__(model, NoDrafter(), capacity, sampling)
        self.reader = drafter

    def prefill(self, prompt: list[int]) -> DetailedResult:
        with final_states(self.model) as passes:
            result = super().prefill(prompt)
        return self.with_update(result, prompt, passes, path=list(range(len(prompt))))

    def verify(self, draft: Draft) -> DetailedResult:
        with final_states(self.model) as passes:
            result = super().verify(draft)
        path = result.draft.path_of(result.accepted)
        return self.with_update(result, [draft.tokens[0], *result.accepted], passes, path)

    def with_update(
        self, result: DetailedResult, tokens: list[int], passes: list[Tensor], path: list[int]
    ) -> DetailedResult:
        """Return the result with the drafter's update. path: the places of the verified tokens in
        the target's passes (1, T, E)."""
        self.reader.states = torch.cat(passes, dim=1)[:, path]
        return replace(result, update=self.reader.cache_update(tokens, self.cache))


@contextmanager
def final_states(target: Llama) -> Iterator[list[Tensor]]:
    """Collect the final hidden states (B, T, E) of each pass that ends within this block. (A pass
    may be padded on the right.)"""
    passes = []
    handle = target.norm.register_forward_hook(lambda *args: passes.append(args[-1]))
    try:
        yield passes
    finally:
        handle.remove()


# --- Without CA ---


class CausalLayer(nn.Module):
    """A causal decoder layer in CA's place, called as CA is. At position i it reads SA's output
    plus the memory of the token at i - 1.

    In training that is always a true memory, and no horizon hides it.
    """

    def __init__(self, layer: DecoderLayer):
        super().__init__()
        self.layer = layer

    def keys_values(self, memory: Tensor, rope: Tensor) -> Tensor:
        return memory  # (B, T, E): the layer's own keys and values depend on SA's output, too

    def attend_to(
        self, memory: Tensor, x: Tensor, rope: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Run the layer on all positions x (B, T, E). The mask, which follows the horizon, is
        ignored: that is what makes this off-policy."""
        # The memory of the token before each. Nothing is before the first: zeros.
        previous = F.pad(memory[:, :-1], (0, 0, 1, 0))  # (B, T, E)
        return self.layer(x + previous, rope, causal_mask(x.shape[1], past=0, device=x.device))


class NoCADrafter(AblationDrafter):
    """Without CA. While drafting, the drafted tokens have no memory, and the drafter's own
    prediction stands in for it, `predicted_memory`. It was never trained on that: off-policy."""

    missing = ("cross_attention",)

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        self.cross_attention = CausalLayer(self.cross_attention)

    def predicted_memory(self, features: Tensor) -> Tensor:
        """Return what stands in for the memory of drafted tokens, given their features (F, E).

        A memory is made of keys and values, which a drafted token does not have. So a predicted
        hidden state takes its place: a vector of another kind, which the layer has never seen in
        training. So this is no fair measure of what CA brings.
        """
        return features.to(self.dtype)


class NoCADraftState(TreeSampler):
    """Drafts without CA.

    `ca_cache` has keys and values of the causal layer, of the text and of the draft, and grows with
    the other two. Verified tokens have to pass through both layers, as their keys and values depend
    on SA's output and the memory. (EAGLE's code lets them pass together with the next root.)
    """

    def __init__(self, drafter: NoCADrafter, capacity: int, sampling: Sampling):
        super().__init__(drafter, capacity, sampling)
        self.verified = 0  # tokens
        # The memory of the last verified token, (1, E). Before the first there is none: zeros.
        self.last_memory = torch.zeros_like(drafter.Ekv2E.bias).unsqueeze(0)
        # By node of the draft: what stands in for the memory of an expanded node, (E).
        self.predicted: dict[int, Tensor] = {}

    @property
    def text_length(self) -> int:
        return self.verified

    def discard_draft(self) -> None:
        super().discard_draft()
        self.ca_cache.length = self.text_length

    def append_verified(self, update: CacheUpdate) -> None:
        """Run both layers over newly verified tokens. update.ca_kv: see `CausalLayer`."""
        self.discard_draft()
        memory = update.ca_kv[0]  # (T, E)
        count = len(update.tokens)
        rope = self.drafter.rotary[:, self.verified:self.verified + count]
        mask = causal_mask(count, past=self.verified, device=self.drafter.device)
        memory_before = torch.cat([self.last_memory, memory[:-1]])  # (T, E)
        self.run_layers(update.tokens, memory_before, rope, mask)
        for i in range(self.drafter.N):
            self.tli_cache.append(i, update.tli_kv[i])
        self.grow(count)
        self.verified += count
        self.last_memory = memory[-1:]

    def step(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Run SA, the causal layer and TLI on the frontier. Returns predicted hidden states
        (F, E)."""
        drafter = self.drafter
        self.expanded += frontier
        mask = self.frontier_mask(draft, frontier)  # (F, S)
        position = self.text_length + draft.depth(frontier[0])
        rope = drafter.rotary[:, position:position + 1]
        memory_before = self.last_memory  # of the root, (1, E)
        if frontier != [0]:
            predicted = [self.predicted[draft.parents[node]] for node in frontier]
            memory_before = torch.stack(predicted)  # (F, E)
        x = self.run_layers([draft.tokens[node] for node in frontier], memory_before, rope, mask)
        if drafter.N > 0:
            target_rope = drafter.target.rotary[:, position:position + 1]
            x = run_target_layers(drafter, x, target_rope, mask, self.tli_cache)
        self.grow(len(frontier))
        features = x.squeeze(0)  # (F, E)
        self.predicted.update(zip(frontier, drafter.predicted_memory(features)))
        return features

    def run_layers(
        self, tokens: list[int], memory_before: Tensor, rope: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Run SA and the causal layer on tokens, given the memory before each (T, E): (1, T, E)."""
        drafter = self.drafter
        x = drafter.self_attention(self.embed(tokens), rope, mask, self.self_cache, 0)
        return drafter.cross_attention.layer(x + memory_before, rope, mask, self.ca_cache, 0)

    def grow(self, count: int) -> None:
        for cache in (self.self_cache, self.ca_cache, self.tli_cache):
            cache.length += count


# --- Without both; EAGLE's ---


class NoLSANoCADrafter(NoLSADrafter, NoCADrafter):
    """Without both: memories are made as in the first class, and read as in the second. Only what
    stands in for the memory of a drafted token is new: a predicted hidden state, projected like a
    true one."""

    missing = ("layer_self_attention", "cross_attention")

    def predicted_memory(self, features: Tensor) -> Tensor:
        return self.project_states(features)


class EagleDrafter(NoLSANoCADrafter):
    """EAGLE's (Li et al. 2024a): one decoder layer over U e + W h, with e the embedding of a token
    and h the hidden state of the one before it.

    Without LSA and CA we have SA(e) + W h under that layer. So here a linear map U takes SA's
    place. (EAGLE's layer has no norm before its attention. Here it has one, as all layers have.
    And EAGLE adds noise to h in training, uniform and of scale 0.2. Here is none.)
    """

    missing = ("layer_self_attention", "cross_attention", "self_attention")

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        self.self_attention = LinearMap(target.config.hidden_size)


class LinearMap(nn.Module):
    """Takes the arguments of a decoder layer, and maps each token by itself. So it writes nothing
    to SA's cache, of which only the length is used."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        return self.linear(x)


# --- Which drafter ---


class Ablation(NamedTuple):
    """What it takes to train a drafter and to draft with it."""

    kind: type[Drafter]
    new_verifier: type[LocalVerifier] = ExactVerifier
    new_state: type[DraftState] = TreeSampler


FULL = Ablation(Drafter)
ABLATIONS = {
    "no-lsa": Ablation(NoLSADrafter, LastStateVerifier),
    "no-ca": Ablation(NoCADrafter, new_state=NoCADraftState),
    "neither": Ablation(NoLSANoCADrafter, LastStateVerifier, NoCADraftState),
    "eagle": Ablation(EagleDrafter, LastStateVerifier, NoCADraftState),
}
ALL = {"full": FULL} | ABLATIONS


@dataclass
class WithAblation:
    """A way to answer prompts, as `WithDrafts` of app/answers.py, with any of these drafters."""

    target: Llama
    drafter: Drafter
    limits: DraftLimits
    ablation: Ablation

    @torch.inference_mode()
    def cycles(self, prompt: list[int], config: GenerationConfig) -> Cycles:
        sampling = config.new_sampling(self.target.device)
        capacity = count_slots(prompt, config, self.limits)
        verifier = self.ablation.new_verifier(self.target, self.drafter, capacity, sampling)
        state = self.ablation.new_state(self.drafter, capacity, sampling)
        return timed_cycles(verifier, state, prompt, config, self.limits)


# --- Measuring ---


def measure_drafter(
    target: Llama, drafter: Drafter, ablation: Ablation, prompts: list[list[int]], count: int
) -> dict:
    """Answer prompts greedily with `count` tokens each, with chains and with trees. Returns the
    acceptance length and the tokens per second of both."""
    config = GenerationConfig(max_new_tokens=count)
    row = {}
    for name, limits in LIMITS.items():
        method = WithAblation(target, drafter, limits, ablation)
        progress = tqdm(prompts, desc=f"answers, {name}s", leave=False)
        generations = [answer(method, prompt, config) for prompt in progress]
        row[f"{name}_acceptance_length"] = acceptance_length(generations)
        row[f"{name}_tokens_per_second"] = tokens_per_second(generations)
    return row


def held_out_prompts(args: Namespace, tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """Return what comes before the first answer of each conversation that training holds out, if
    the context has room for a new answer. Raises InputError."""
    data = Conversations(args.data, tokenizer, args.seq_len)
    _, held_out = hold_out(data, args.seed)
    prompts = []
    for tokens, is_answer in held_out:
        prompt = tokens[:int(is_answer.int().argmax())].tolist()
        if len(prompt) + args.max_new_tokens <= context:
            prompts.append(prompt)
    if not prompts:
        raise InputError(f"--max-new-tokens {args.max_new_tokens}: the context is {context}")
    return prompts


# --- Command line ---


def parse_arguments() -> Namespace:
    parser = Parser(
        description="Train and measure drafters without a part, and EAGLE's.",
        examples="python -m experiments.ablations --model toy --data answers.jsonl --updates 400",
    )
    add = parser.add_argument
    add("--data", nargs="+", required=True, type=path, metavar="FILE",
        help="conversations, of which a tenth (64 at most) is held out, as prompts")
    add("--out", default=Path("runs/ablations"), type=path,
        help="the folder that gets a folder for each drafter (default: %(default)s)")
    add("--names", nargs="+", choices=ALL, default=list(ALL), metavar="NAME",
        help="which drafters, of %(choices)s (default: all)")
    add("--updates", type=positive_int, default=400, help="default: %(default)s")
    add("--batch-size", type=positive_int, default=2, help="sequences (default: %(default)s)")
    add("--seq-len", type=number(int, 16), default=512, help="tokens (default: %(default)s)")
    add("--lr", type=number(float, 0), default=4e-3, help="its peak (default: %(default)s)")
    add("--max-new-tokens", type=positive_int, default=64,
        help="tokens of an answer (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add_model_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dtype = choose_training_dtype(args.device, args.dtype)
    config = RunConfig(
        updates=args.updates,
        batch_size=args.batch_size,
        micro_batch_size=args.batch_size,
        seq_len=args.seq_len,
        lr=args.lr,
        schedule="cosine",
        warmup=20,
        optimizer="muon",
        dtype=dtype,
        seed=args.seed,
    )
    for name in args.names:
        train_drafter(
            args.model,
            args.data,
            args.out / name,
            config,
            device=args.device,
            resume=(args.out / name).exists(),
            kind=ALL[name].kind,
        )
    target, tokenizer = load_target(args.model, args.device, DTYPES[dtype])
    prompts = held_out_prompts(args, tokenizer, target.config.max_position_embeddings)
    drafters = [load_drafter(args.out / name, target, ALL[name].kind) for name in args.names]
    target = pack_models(target, drafters)
    rows = []
    for name, drafter in zip(args.names, drafters):
        scores = measure_drafter(target, drafter, ALL[name], prompts, args.max_new_tokens)
        rows.append({"drafter": name} | scores)
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        print_rows(rows, ["drafter"], COLUMNS)


if __name__ == "__main__":
    run_command(main)
