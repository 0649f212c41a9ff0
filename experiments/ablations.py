"""Drafters without a part: without LSA, without CA, without both, and EAGLE's.

What does each part of the drafter bring? Leave it out, train what is left in the same way, and let
it draft. This script trains each drafter into a folder of its own within --out, and lets it answer
prompts that it was not trained on, with chains and with trees. For the toy target that takes
minutes. The same command goes on where it was interrupted:

    python -m experiments.ablations --model toy --data answers.jsonl --out runs/parts --updates 400

answers.jsonl holds conversations, best with answers of the target's own (`python -m
experiments.synthesize` writes them). experiments/results/README.md has the results of longer runs.
"""
from __future__ import annotations

import plumbing.start  # first: no traceback for Ctrl-C or a missing package while PyTorch loads

import json
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from experiments.tables import Column, print_rows
from llama import GenerationConfig, KVCache, Llama, Sampling, causal_mask, load_target
from moa import (
    Draft,
    Drafter,
    DrafterConfig,
    DraftLimits,
    DraftState,
    VerifyResult,
    load_drafter,
    pack_together,
)
from plumbing.conversations import Conversations, hold_out
from plumbing.devices import DTYPES, choose_training_dtype
from plumbing.errors import InputError, run_command
from plumbing.files import read_json
from plumbing.flags import Parser, add_model_arguments, number, path, positive_int
from plumbing.tokenizer import Tokenizer
from speculate import (
    ExactVerifier,
    LocalVerifier,
    WithDrafts,
    acceptance_length,
    answer,
    tokens_per_second,
)
from train import EVALUATION_RUN, TrainConfig, train_drafter

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

    def mix_attentions(self, tokens: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        # The cache does not hold the final states. So training runs the target a second time.
        memory = self.project_states(self.target.hidden(tokens))
        return self.cross_attend(self.self_attend(tokens), memory, horizon)

    def memory_update(self, tokens: list[int], cache: KVCache) -> None:
        """The cache is not read: see `LastStateVerifier`."""

    def project_states(self, hidden: Tensor) -> Tensor:
        """Turn final hidden states (B, T, E) into memories (B, T, E)."""
        return self.Ekv2E(hidden.to(self.dtype))


class RecordingTarget:
    """A target that keeps the final states of its passes."""

    def __init__(self, target: Llama):
        self.target = target
        self.passes: list[Tensor] = []  # (1, T, E) each

    def __getattr__(self, name: str):
        return getattr(self.target, name)

    def hidden(self, *args) -> Tensor:
        self.passes.append(self.target.hidden(*args))
        return self.passes[-1]


class LastStateVerifier(ExactVerifier):
    """For drafters without LSA: it hands them the target's final states, not its cache."""

    def __init__(self, model: Llama, *others):
        super().__init__(RecordingTarget(model), *others)

    def prefill(self, prompt: list[int]) -> VerifyResult:
        result = super().prefill(prompt)
        return self.with_states(result, prompt, path=list(range(len(prompt))))

    def verify(self, draft: Draft) -> VerifyResult:
        result = super().verify(draft)
        path = result.draft.path_of(result.accepted)
        return self.with_states(result, [draft.tokens[0], *result.accepted], path)

    def with_states(self, result: VerifyResult, tokens: list[int], path: list[int]) -> VerifyResult:
        """Return the result with what the drafter makes of the states of these tokens. path: their
        places in the passes since the last call."""
        hidden = torch.cat(self.model.passes, dim=1)[:, path]  # (1, T, E)
        self.model.passes.clear()
        memory = self.drafter.project_states(hidden)
        return replace(result, memory=self.drafter.update_from_memory(tokens, memory, self.cache))


# --- Without CA ---


@dataclass
class NoCAUpdate:
    """What verified tokens bring to a drafter without CA: its layer reads their memory itself."""

    tokens: list[int]
    memory: Tensor  # (1, T, E)
    reused_kv: Tensor  # as in `MemoryUpdate`


class NoCADrafter(AblationDrafter):
    """Without CA. In its place is a causal layer of the same size, which at position i reads SA's
    output plus the memory of the token at i - 1.

    In training that is always a true memory, and no horizon hides it. While drafting, the drafted
    tokens have none, and the drafter's own prediction stands in for it, `predicted_memory`. It was
    never trained on that: off-policy.
    """

    missing = ("cross_attention",)

    def cross_attend(self, x: Tensor, memory: Tensor, horizon: Tensor) -> Tensor:
        """Run the causal layer. The horizon is ignored: that is what makes this off-policy."""
        count = x.shape[1]
        # The memory of the token before each. Nothing is before the first: zeros.
        previous = nn.functional.pad(memory[:, :-1], (0, 0, 1, 0))  # (B, T, E)
        mask = causal_mask(count, past=0, device=x.device)
        return self.cross_attention(x + previous, self.rotary[:, :count], mask)

    def update_from_memory(self, tokens: list[int], memory: Tensor, cache: KVCache) -> NoCAUpdate:
        first_reused = len(cache.kv) - self.N
        start = cache.length - len(tokens)
        return NoCAUpdate(tokens, memory, cache.kv[first_reused:, :, :, start:cache.length])

    def predicted_memory(self, features: Tensor) -> Tensor:
        """Return what stands in for the memory of drafted tokens, given their features (F, E).

        A memory is made of keys and values, which a drafted token does not have. So a predicted
        hidden state takes its place: a vector of another kind, which the layer has never seen in
        training. So this is no fair measure of what CA brings.
        """
        return features.to(self.dtype)

    def new_state(self, capacity: int, sampling: Sampling = Sampling()) -> DraftState:
        return NoCADraftState(self, capacity, sampling)


class NoCADraftState(DraftState):
    """Drafts without CA.

    `cross_cache` has keys and values of the causal layer, of the text and of the draft, and grows
    with the other two. Verified tokens have to pass through both layers, as their keys and values
    depend on SA's output and the memory. (EAGLE's code lets them pass together with the next root.)
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
        self.cross_cache.length = self.text_length

    def append_verified(self, update: NoCAUpdate) -> None:
        """Run both layers over newly verified tokens."""
        self.discard_draft()
        drafter = self.drafter
        count = len(update.tokens)
        rope = drafter.rotary[:, self.verified:self.verified + count]
        mask = causal_mask(count, past=self.verified, device=drafter.target.device)
        memory_before = torch.cat([self.last_memory, update.memory[0, :-1]])  # (T, E)
        x = drafter.self_attention(self.embed(update.tokens), rope, mask, self.self_cache, 0)
        drafter.cross_attention(x + memory_before, rope, mask, self.cross_cache, 0)
        for i in range(drafter.N):
            self.reused_cache.append(i, update.reused_kv[i])
        for cache in (self.self_cache, self.cross_cache, self.reused_cache):
            cache.length += count
        self.verified += count
        self.last_memory = update.memory[0, -1:]

    def step(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Run SA, the causal layer and TLI on the frontier: features (F, E)."""
        drafter = self.drafter
        self.expanded += frontier
        mask = self.tree_mask(draft, frontier)  # (F, S)
        position = self.text_length + draft.depth(frontier[0])
        rope = drafter.rotary[:, position:position + 1]
        target_rope = drafter.target.rotary[:, position:position + 1]
        memory_before = self.last_memory  # of the root, (1, E)
        if frontier != [0]:
            predicted = [self.predicted[draft.parents[node]] for node in frontier]
            memory_before = torch.stack(predicted)  # (F, E)
        x = self.embed([draft.tokens[node] for node in frontier])  # (1, F, E), and so on
        x = drafter.self_attention(x, rope, mask, self.self_cache, 0)
        x = drafter.cross_attention(x + memory_before, rope, mask, self.cross_cache, 0)
        x = drafter.run_target_layers(x, target_rope, mask, self.reused_cache)
        for cache in (self.self_cache, self.cross_cache, self.reused_cache):
            cache.length += len(frontier)
        features = x.squeeze(0)  # (F, E)
        self.predicted.update(zip(frontier, drafter.predicted_memory(features)))
        return features


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
    place. (EAGLE's layer has no norm before its attention. Here it has one, as all layers have.)
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
    new_verifier: type[LocalVerifier]
    max_depth: int  # of the tokens of a draft that one pass over a text can score


FULL = Ablation(Drafter, ExactVerifier, EVALUATION_RUN)
# Without CA, one pass over a text reads true memories where drafting reads predictions. So it
# scores only the first token of a draft.
ABLATIONS = {
    "no-lsa": Ablation(NoLSADrafter, LastStateVerifier, EVALUATION_RUN),
    "no-ca": Ablation(NoCADrafter, ExactVerifier, 1),
    "neither": Ablation(NoLSANoCADrafter, LastStateVerifier, 1),
    "eagle": Ablation(EagleDrafter, LastStateVerifier, 1),
}
ALL = {"full": FULL} | ABLATIONS


def load_ablation(folder: Path, target: Llama) -> tuple[Drafter, Ablation]:
    """Load a drafter that has all of its parts, or not. Raises InputError."""
    stated = read_json(folder / "config.json")
    missing = []
    for part in EagleDrafter.missing:
        if stated.get(f"use_{part}") is False:
            missing.append(part)
    if not missing:
        return load_drafter(folder, target), FULL
    for ablation in ABLATIONS.values():
        if ablation.kind.missing == tuple(missing):
            return load_drafter(folder, target, ablation.kind), ablation
    raise InputError(f"{folder}: no drafter here lacks only {' and '.join(missing)}")


# --- Measuring ---


def measure_drafter(
    target: Llama, drafter: Drafter, ablation: Ablation, prompts: list[list[int]], count: int
) -> dict:
    """Answer prompts greedily with `count` tokens each, with chains and with trees. Returns the
    acceptance length and the tokens per second of both."""
    config = GenerationConfig(max_new_tokens=count)
    row = {}
    for name, limits in LIMITS.items():
        method = WithDrafts(target, drafter, limits, new_verifier=ablation.new_verifier)
        progress = tqdm(prompts, desc=f"answers, {name}s", leave=False)
        generations = []
        for prompt in progress:
            generations.append(answer(method, prompt, config))
            if generations[-1].interrupted:  # by Ctrl-C, which `answer` takes for an answer's end
                raise KeyboardInterrupt
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
    config = TrainConfig(
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
            max_depth=ALL[name].max_depth,
        )
    target, tokenizer = load_target(args.model, args.device, DTYPES[dtype])
    prompts = held_out_prompts(args, tokenizer, target.config.max_position_embeddings)
    drafters = [load_ablation(args.out / name, target) for name in args.names]
    pack_together(target, [drafter for drafter, _ in drafters])
    rows = []
    for name, (drafter, ablation) in zip(args.names, drafters):
        scores = measure_drafter(target, drafter, ablation, prompts, args.max_new_tokens)
        rows.append({"drafter": name} | scores)
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        print_rows(rows, ["drafter"], COLUMNS)


if __name__ == "__main__":
    run_command(main)
