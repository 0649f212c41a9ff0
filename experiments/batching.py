"""Many conversations at once, with and without drafts.

A pass reads all weights, whether for one conversation or for sixteen. So a server answers many at
once: continuous batching (Yu et al. 2022). Every conversation has a row of the cache, with a length
of its own. When one ends, the last row moves into its place, and the next conversation gets the
free row. Three rows that hold 5, 2 and 3 tokens, and one new token for each:

    row   position of the new token   sees slots
     0               5                0 1 2 3 4 5      the longest row: S = 6
     1               2                0 1 2 . . .      slots 3 to 5 hold nothing of this row
     2               3                0 1 2 3 . .

Nothing branches here, so the position of a token is also its slot.

Drafts compete with batching: both make one reading of the weights serve several tokens. With many
rows the passes are no longer cheap, and drafts gain less. This program measures from where on.

    python -m experiments.batching --rows 1 4 16      # on the benchmark's prompts

Shapes: B rows in use, T new tokens of each, S slots of the longest row, K drafted tokens, E hidden
size, H heads, Hkv kv heads, D head size, L layers, V vocabulary.
"""
from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor, nn
from tqdm import tqdm

from app.loading import Models, load_models
from experiments.bench import COLUMNS, DEFAULT_PROMPTS, compare_texts
from experiments.prompts import Prompt, read_prompt_file
from experiments.tables import Column, print_rows
from llama import (
    GenerationConfig,
    KVCache,
    Llama,
    Sampling,
    check_logits,
    generate,
    probabilities,
    read_prompt,
    sample,
    sample_next,
)
from moa import Draft, Drafter, DraftState, run_target_layers
from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import InputError, run_command
from plumbing.flags import Parser, add_generation_arguments, add_model_arguments, number, path
from speculate import accept_draft

# --- A cache of rows of different lengths ---


class RaggedKVCache:
    """A cache whose rows are conversations of different lengths. The rows in use come first.

    A pass has three steps. A `RaggedPass` says where the new tokens go. The layers write them
    there. Then the caller adds to each `row.length` as many tokens as it keeps: of a draft perhaps
    not all.
    """

    def __init__(self, kv: Tensor):
        """kv: that of an empty cache, (L, rows, Hkv, capacity, 2D)."""
        self.kv = kv
        self.rows = [KVCache(row) for row in kv.split(1, dim=1)]  # views: one conversation each

    def move_row(self, source: int, to: int) -> None:
        """Move the last row in use, `source`, into the place of a row that has ended, perhaps its
        own. Afterwards `source` is empty."""
        length = self.rows[source].length
        self.rows[to].kv[:, :, :, :length] = self.rows[source].kv[:, :, :, :length]
        self.rows[to].length = length
        self.rows[source].length = 0


class RaggedPass(KVCache):
    """Where the next T tokens of B rows go, each row's after its own end, and what they see.
    `Llama.hidden` takes it for a cache.

    positions (B, 1, T) and mask (B, 1, T, S) have a dimension for the heads, too.
    """

    def __init__(self, cache: RaggedKVCache, first: int, shape: torch.Size, context: int):
        """first: the first of the B rows. shape: (B, T). context: the model's."""
        batch, count = shape
        end = first + batch
        super().__init__(cache.kv[:, first:end])  # (L, B, Hkv, capacity, 2D), a view
        device = cache.kv.device
        lengths = [row.length for row in cache.rows[first:end]]
        self.length = max(lengths)
        self.row_numbers = torch.arange(batch, device=device).unsqueeze(1)  # (B, 1)
        slots = torch.tensor(lengths).unsqueeze(1) + torch.arange(count)  # (B, T)
        self.slots = slots.to(device)
        # A draft may reach beyond the context, where there are no rotary angles. What it drafts
        # there is never kept, so any angle will do.
        positions = self.slots.clamp(max=context - 1)
        self.positions = positions.unsqueeze(1)  # (B, 1, T)
        # Each token sees its own row up to itself.
        all_slots = torch.arange(self.length + count, device=device)  # (S)
        self.mask = (all_slots <= self.slots.unsqueeze(-1)).unsqueeze(1)  # (B, 1, T, S)

    def append(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's new keys and values (B, Hkv, T, 2D). Return all up to the end of the
        longest row (B, Hkv, S, 2D)."""
        self.kv[layer, self.row_numbers, :, self.slots] = kv.transpose(1, 2)  # (B, T, Hkv, 2D)
        end = self.length + kv.shape[2]
        return self.kv[layer, :, :, :end]


def ragged_hidden(model: Llama, tokens: Tensor, cache: RaggedKVCache, first: int = 0) -> Tensor:
    """Run `Llama.hidden` on the next tokens (B, T) of B rows, from row `first` on: (B, T, E).

    The lengths of the rows stay as they are: only the caller knows how many tokens are kept.
    """
    new = RaggedPass(cache, first, tokens.shape, model.config.max_position_embeddings)
    return model.hidden(tokens, new, new.positions, new.mask)


# --- Continuous batching ---


@dataclass
class Request:
    """A prompt that is being answered in a row of a batch."""

    key: object  # the caller's name for it
    config: GenerationConfig
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)  # generated so far
    target_calls: int = 0  # without the one for the prompt
    ended: bool = False

    @property
    def left(self) -> int:
        """How many tokens it may still get."""
        return self.config.max_new_tokens - len(self.tokens)

    def extend(self, tokens: list[int]) -> None:
        """Add new tokens, up to the end of the answer."""
        for token in tokens:
            if not self.ended:
                self.tokens.append(token)
                self.ended = self.left == 0 or token in self.config.stop_ids


class Batch:
    """Requests that are answered together by the target alone. `answer_all` shows how it is used.
    """

    def __init__(self, model: Llama, rows: int, capacity: int):
        """capacity: how many tokens a row can hold, with its prompt."""
        self.model = model
        self.cache = RaggedKVCache(model.new_cache(capacity, rows).kv)
        self.caches = [self.cache]  # all in which a request has its row: `ChainBatch` adds some
        self.requests: list[Request] = []  # the one of each row in use

    @property
    def has_room(self) -> bool:
        return len(self.requests) < len(self.cache.rows)

    def add(self, key: object, prompt: list[int], config: GenerationConfig) -> None:
        """Read a prompt, and choose the first token after it."""
        row = self.open_row(key, config)
        last = read_prompt(self.model, prompt, self.cache.rows[row])  # (E)
        self.on_verified(row, prompt)
        self.choose_first_tokens(row, last.unsqueeze(0))

    def add_all(self, new: list[tuple[object, list[int], GenerationConfig]]) -> None:
        """Add several, each of them (key, prompt, config)."""
        if self.model.device.type == "cpu":
            for key, prompt, config in new:  # padding would cost more than the passes it saves
                self.add(key, prompt, config)
        elif new:
            self.add_together(new)

    def add_together(self, new: list[tuple[object, list[int], GenerationConfig]]) -> None:
        """Add one or more, whose prompts are read in one pass."""
        first = len(self.requests)
        prompts = []
        for key, prompt, config in new:
            self.open_row(key, config)
            prompts.append(torch.tensor(prompt))
        # Shorter prompts are padded on the right. What is written there lies beyond the row's
        # length, where nobody looks.
        ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True)  # (R, T), of R new rows
        hidden = ragged_hidden(self.model, ids.to(self.model.device), self.cache, first)
        last = []
        for i, prompt in enumerate(prompts):
            self.cache.rows[first + i].length = len(prompt)
            self.on_verified(first + i, prompt.tolist())
            last.append(hidden[i, len(prompt) - 1])
        self.choose_first_tokens(first, torch.stack(last))

    def open_row(self, key: object, config: GenerationConfig) -> int:
        """Give a request the next row. Returns its number."""
        self.requests.append(Request(key, config, config.new_sampling(self.model.device)))
        return len(self.requests) - 1

    def choose_first_tokens(self, first: int, hidden: Tensor) -> None:
        """Choose the first token of each request from row `first` on, after the hidden states of
        the last tokens of their prompts (R, E)."""
        requests = self.requests[first:]
        tokens = sample_rows(self.model.lm_head(hidden), requests)
        for request, token in zip(requests, tokens):
            request.extend([token])

    def on_verified(self, row: int, tokens: list[int]) -> None:
        """Called when a row of the cache has grown by tokens that stay. `ChainBatch` makes its
        memory of them here."""

    def step(self) -> list[Request]:
        """Run one pass for all rows in use. Returns the requests that have ended, whose rows are
        free now."""
        ended = self.remove_ended()  # those that were complete with their first token
        if self.requests:
            for request, tokens in zip(self.requests, self.advance()):
                request.extend(tokens)
                request.target_calls += 1
        return ended + self.remove_ended()

    def advance(self) -> list[list[int]]:
        """Run one pass. Returns the new tokens of each row: without drafts, one."""
        newest = [request.tokens[-1] for request in self.requests]
        ids = torch.tensor(newest, device=self.model.device).unsqueeze(1)  # (B, 1)
        hidden = ragged_hidden(self.model, ids, self.cache)  # (B, 1, E)
        for row in self.cache.rows[:len(newest)]:
            row.length += 1
        tokens = sample_rows(self.model.lm_head(hidden[:, 0]), self.requests)
        return [[token] for token in tokens]

    def remove_ended(self) -> list[Request]:
        """Take out the requests that have ended. The last row moves into the gap that each leaves.
        """
        ended = [request for request in self.requests if request.ended]
        # From the end, so that the last row, which moves, has not ended itself.
        for row in reversed(range(len(self.requests))):
            if not self.requests[row].ended:
                continue
            last = len(self.requests) - 1
            for cache in self.caches:
                cache.move_row(last, row)
            self.requests[row] = self.requests[last]
            self.requests.pop()
        return ended


def answer_all(
    batch: Batch, prompts: list[list[int]], config: GenerationConfig
) -> list[Request]:
    """Answer all prompts, as many at a time as the batch has rows. Returns them as they end, their
    keys their places in the list."""
    waiting = list(enumerate(prompts))
    ended = []
    while len(ended) < len(prompts):
        while waiting and batch.has_room:
            key, prompt = waiting.pop(0)
            batch.add(key, prompt, config)
        ended += batch.step()
    return ended


def sample_rows(logits: Tensor, requests: list[Request]) -> list[int]:
    """Choose the next token of each row, after logits (B, V). Each row has a random generator of
    its own, so that its tokens do not depend on its neighbours."""
    samplings = [request.sampling for request in requests]
    if logits.device.type != "cpu":
        return sample_together(logits, samplings)
    return [sample_next(row, sampling) for row, sampling in zip(logits, samplings)]


def sample_together(logits: Tensor, samplings: list[Sampling]) -> list[int]:
    """Choose the next token of each row, all rows of one temperature and top-p together.

    On a GPU each operation takes time to launch, and reading a result means waiting for it. (Where
    some p are 0, `sample_next` uses its random numbers differently. So the tokens are others, of
    the same distribution.)
    """
    check_logits(logits)
    tokens = logits.new_empty(len(samplings), dtype=torch.int64)
    for (temperature, top_p), rows in rows_sampled_alike(samplings).items():
        if temperature == 0:
            tokens[rows] = logits[rows].float().argmax(-1)
            continue
        p = probabilities(logits[rows], temperature, top_p)
        # This is how torch.multinomial draws: if token i arrives after an exponentially distributed
        # time, noise / p_i, then it is the first to arrive with probability p_i.
        noise = torch.empty_like(p)
        for row, row_noise in zip(rows, noise):
            row_noise.exponential_(generator=samplings[row].generator)
        noise = noise.clamp(min=torch.finfo(p.dtype).tiny)  # 0 / 0 would be NaN
        tokens[rows] = (p / noise).argmax(-1)
    return tokens.tolist()


def rows_sampled_alike(samplings: list[Sampling]) -> dict[tuple[float, float], list[int]]:
    """Return the rows of each temperature and top-p."""
    rows_of = {}
    for row, sampling in enumerate(samplings):
        rows_of.setdefault((sampling.temperature, sampling.top_p), []).append(row)
    return rows_of


# --- With chains ---


class BatchDraftState:
    """The drafter's side of several conversations: a `DraftState` whose caches have a row of each.
    """

    def __init__(self, drafter: Drafter, rows: int, capacity: int):
        self.drafter = drafter
        alone = DraftState(drafter, capacity, Sampling())  # of one conversation, with empty caches
        self.self_cache = repeat_rows(alone.self_cache, rows)
        self.ca_cache = repeat_rows(alone.ca_cache, rows)
        self.tli_cache = repeat_rows(alone.tli_cache, rows)
        self.caches = [self.self_cache, self.ca_cache, self.tli_cache]

    def append_verified(self, row: int, tokens: list[int], target_cache: KVCache) -> None:
        """Grow a row's caches by newly verified tokens, the last ones in its target cache, in place
        of what was drafted. As `DraftState.append_verified`."""
        drafter = self.drafter
        update = drafter.cache_update(tokens, target_cache)
        self_cache, ca_cache, tli_cache = [cache.rows[row] for cache in self.caches]
        start = ca_cache.length  # of the text so far
        self_cache.length = start
        tli_cache.length = start
        end = start + len(tokens)
        ids = torch.tensor([tokens], device=drafter.device)  # (1, T)
        rope = drafter.rotary[:, start:end]
        self_cache.append(0, drafter.self_attention.keys_values(drafter.embed(ids), rope))
        ca_cache.append(0, update.ca_kv)
        for i in range(drafter.N):
            tli_cache.append(i, update.tli_kv[i])
        for cache in (self_cache, ca_cache, tli_cache):
            cache.length = end

    def draft_chains(self, roots: list[int], K: int, samplings: list[Sampling]) -> list[Draft]:
        """Draft a chain of K tokens after the newest token, the root, of every row."""
        drafts = [Draft(root) for root in roots]
        for last in range(K):  # the last node of every chain so far
            hidden = self.step([draft.tokens[last] for draft in drafts])  # (B, E)
            for rows in rows_sampled_alike(samplings).values():
                q = self.drafter.distributions(hidden[rows], samplings[rows[0]])  # (rows, V)
                for row, row_q in zip(rows, q):
                    extend_chain(drafts[row], row_q, samplings[row])
        return drafts

    def step(self, tokens: list[int]) -> Tensor:
        """Run SA, CA and TLI on one more token of every row, as `DraftState.step` does for one row.

        Returns predicted hidden states (B, E).
        """
        drafter = self.drafter
        target = drafter.target
        batch = len(tokens)
        ids = torch.tensor(tokens, device=drafter.device).unsqueeze(1)  # (B, 1)
        context = target.config.max_position_embeddings
        new = RaggedPass(self.self_cache, 0, ids.shape, context)
        rope = drafter.rotary[:, new.positions]  # (2, B, 1, 1, D)
        x = drafter.self_attention(drafter.embed(ids), rope, new.mask, new, 0)  # (B, 1, E)
        x = self.read_memory(x, rope)
        if drafter.N > 0:
            new = RaggedPass(self.tli_cache, 0, ids.shape, context)
            x = run_target_layers(drafter, x, target.rotary[:, new.positions], new.mask, new)
        for cache in (self.self_cache, self.tli_cache):
            for row in cache.rows[:batch]:
                row.length += 1
        return x[:, 0]

    def read_memory(self, x: Tensor, rope: Tensor) -> Tensor:
        """Run CA: x (B, 1, E) -> (B, 1, E). Each row reads all of its own memory, and not the
        unused slots between its end and that of the longest row."""
        batch = len(x)
        lengths = torch.tensor([row.length for row in self.ca_cache.rows[:batch]])  # (B)
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths.unsqueeze(1)  # (B, S)
        mask = mask[:, None, None].to(x.device)  # (B, 1, 1, S)
        kv = self.ca_cache.kv[0, :batch, :, :longest]  # (B, Hkv, S, 2D)
        return self.drafter.cross_attention.attend_to(kv, x, rope, mask)


def extend_chain(draft: Draft, q: Tensor, sampling: Sampling) -> None:
    """Add a token that is chosen from q (V), as `DraftState.draft_chain` does."""
    last = len(draft.tokens) - 1
    if sampling.temperature == 0:
        token = int(q.argmax())
    else:
        token = sample(q, sampling.generator)
        draft.q[last] = q
    draft.add(token, parent=last, probability=float(q[token]))


def repeat_rows(cache: KVCache, rows: int) -> RaggedKVCache:
    """Return a cache with as many rows like this empty one."""
    return RaggedKVCache(cache.kv.repeat(1, rows, 1, 1, 1))


class ChainBatch(Batch):
    """A batch that drafts a chain of K tokens for each row. One pass verifies them all, and each
    row accepts as many as it likes.

    (Chains only: what a row keeps of a chain is its beginning, so nothing moves in the cache.)

    One `advance` with K = 3. Row 0 has 20 tokens left to generate, row 1 has 2:

        row   drafted   accepted   then the target's   new tokens   verified
         0     a b c      a b             x              a b x       root a b
         1     d e f     d e f            y              d e         root d

    Row 1 is cut to its two. Its e is the newest token then, and does not count as verified.
    """

    def __init__(self, model: Llama, drafter: Drafter, rows: int, capacity: int, K: int):
        super().__init__(model, rows, capacity + K)
        self.K = K
        self.state = BatchDraftState(drafter, rows, capacity + K)
        self.caches += self.state.caches  # so that `Batch` moves their rows, too

    def on_verified(self, row: int, tokens: list[int]) -> None:
        self.state.append_verified(row, tokens, self.cache.rows[row])

    def advance(self) -> list[list[int]]:
        """Draft, verify and accept once, for all rows. Returns the new tokens of each."""
        samplings = [request.sampling for request in self.requests]
        newest = [request.tokens[-1] for request in self.requests]
        # As many as the row with the most left can use: the target adds a token of its own.
        most_left = max(request.left for request in self.requests)
        drafts = self.state.draft_chains(newest, min(self.K, most_left - 1), samplings)
        ids = torch.tensor([draft.tokens for draft in drafts])  # (B, 1 + K)
        hidden = ragged_hidden(self.model, ids.to(self.model.device), self.cache)  # (B, 1 + K, E)
        logits = self.model.lm_head(hidden)  # (B, 1 + K, V)
        new_tokens = []
        for row, draft in enumerate(drafts):
            acceptance = accept_draft(logits[row], draft, samplings[row])
            kept = draft.tokens[:len(acceptance.path)]  # of a chain: the root, what is accepted
            new_tokens.append(kept[1:] + [acceptance.token])
            # All rows draft K tokens, even one that has fewer left. Such a row may accept tokens
            # beyond the end of its answer or of the context, where there are no positions.
            # `Request.extend` cuts them off, and here they do not count as verified.
            verified = kept[:self.requests[row].left]
            self.cache.rows[row].length += len(verified)
            self.on_verified(row, verified)
        return new_tokens


# --- Measuring ---


@torch.inference_mode()
def measure_batches(
    models: Models, prompts: list[Prompt], config: GenerationConfig, sizes: list[int], K: int
) -> list[dict]:
    """Answer the first turns of all prompts by the target alone and by chains of K, at most `size`
    at a time, for each of the sizes. Returns a row of each size and method. Raises InputError."""
    target = models.target
    texts = []
    for prompt in prompts:
        texts.append(models.tokenizer.chat([{"role": "user", "content": prompt.turns[0]}]))
    capacity = max(len(text) for text in texts) + config.max_new_tokens
    context = target.config.max_position_embeddings
    if capacity > context:
        raise InputError(
            f"a prompt with its answer needs {capacity} tokens and the context is {context}: lower "
            "--max-new-tokens, or leave the prompt out"
        )
    alone = None
    if config.temperature == 0:  # only then the tokens have to be those of the target alone
        alone = [list(generate(target, text, config)) for text in texts]
    warm_up = ChainBatch(target, models.drafter, 1, capacity, K)
    answer_all(warm_up, texts[:1], config)
    rows = []
    for size in tqdm(sizes, unit=" sizes"):
        count = min(size, len(texts))  # more rows would stay empty
        batches = {
            "target": Batch(target, count, capacity),
            "chain": ChainBatch(target, models.drafter, count, capacity, K),
        }
        measured = {}
        for method, batch in batches.items():
            measured[method] = measure_batch(batch, texts, config, alone)
            speed = measured[method]["tokens_per_second"]
            speedup = speed / measured["target"]["tokens_per_second"]
            row = {"category": "overall", "method": method, "batch": size, "speedup": speedup}
            rows.append(row | measured[method])
    return rows


def measure_batch(
    batch: Batch,
    prompts: list[list[int]],
    config: GenerationConfig,
    alone: list[list[int]] | None,
) -> dict:
    """Answer all prompts in a batch. Returns what that cost.

    alone: the target's own answer to each, to compare with.
    """
    start = perf_counter()
    answers = answer_all(batch, prompts, config)
    seconds = perf_counter() - start
    new_tokens = sum(len(answer.tokens) for answer in answers)
    target_calls = sum(answer.target_calls for answer in answers)
    measured = {
        "tokens_per_second": new_tokens / seconds,
        # The first token of an answer comes with the prompt's pass, which is not counted.
        "acceptance_length": (new_tokens - len(answers)) / max(1, target_calls),
        "target_calls": target_calls,
        "new_tokens": new_tokens,
    }
    if alone is not None:
        same = sum(answer.tokens == alone[answer.key] for answer in answers)
        measured["identical"] = same / len(answers)
    return measured


# --- Command line ---

EXAMPLES = """\
python -m experiments.batching
python -m experiments.batching prompts.jsonl --rows 1 4 16 --draft-length 2
"""
BATCH_COLUMNS = {"batch": Column("batch", "conversations at a time, at most"), **COLUMNS}


def parse_arguments() -> Namespace:
    parser = Parser(
        usage="python -m experiments.batching [FILE] [flags]",
        description="Answer many conversations at once, with and without chains of drafts. In "
        "float32, unless --dtype says otherwise.",
        examples=EXAMPLES,
    )
    add = parser.add_argument
    add("file", type=path, nargs="?", default=DEFAULT_PROMPTS, metavar="FILE",
        help="prompts, one JSON object a line (default: the benchmark's own)")
    add("--rows", type=number(int, 1, 1024), nargs="+", default=[1, 4, 16],
        help="conversations at a time (default: 1 4 16)")
    add("--draft-length", type=number(int, 1, 64), default=3, metavar="K",
        help="tokens of a chain (default: %(default)s)")
    add("--drafter", type=path, metavar="DIR", help="default: the one shipped for the model")
    add_model_arguments(parser)
    add_generation_arguments(parser)
    # On a GPU, too: in bfloat16 the rows of a batch are rounded in other ways than one alone, and
    # the texts would differ.
    parser.set_defaults(dtype="float32")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    prompts = read_prompt_file(args.file)
    dtype = DTYPES[choose_dtype(args.device, args.dtype)]
    models = load_models(args.model, args.drafter, args.device, dtype)
    stop_ids = frozenset(models.tokenizer.stop_ids)
    config = GenerationConfig(
        args.max_new_tokens, args.temperature, args.top_p, args.seed, stop_ids
    )
    rows = measure_batches(models, prompts, config, args.rows, args.draft_length)
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    print_rows(rows, ["method"], BATCH_COLUMNS)
    fastest = max(rows, key=lambda row: row["tokens_per_second"])
    print(
        f"\nFastest: {fastest['method']} with a batch of {fastest['batch']}, "
        f"{fastest['tokens_per_second']:.0f} tokens per second.\n{compare_texts(rows)}"
    )


if __name__ == "__main__":
    run_command(main)
