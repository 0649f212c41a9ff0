"""What arms read of the target: `read` computes it for a text, in training, and a `StateVerifier`
while drafting, for arms that read hidden states (the paper's reads keys and values).

Shapes: as in moa.py and train.py, and R states of the target that a drafter reads of a token.
"""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Iterator, NamedTuple

import torch
from torch import Tensor, nn

from app.exact import DetailedResult, ExactVerifier
from experiments.copies import NoDrafter
from llama import Llama, Sampling, causal_mask
from moa import CacheUpdate, Draft, Drafter


class Reading(NamedTuple):
    """What the target computes in a pass over tokens (B, T)."""

    tokens: Tensor  # (B, T)
    kv: Tensor  # its cache by token, (B, T, L, 2 Ekv)
    states: list[Tensor]  # the states that enter each layer, and the last one's output, (B, T, E)
    final: Tensor  # its final hidden states, (B, T, E)


@torch.no_grad()
def read(target: Llama, tokens: Tensor) -> Reading:
    """Run the target over tokens (B, T). As `target_pass` of train.py, but all states are kept."""
    count = tokens.shape[1]
    rope = target.rotary[:, :count]
    mask = causal_mask(count, past=0, device=tokens.device)
    cache = target.new_cache(count, len(tokens))
    states = [target.embed_tokens(tokens)]
    for i, layer in enumerate(target.layers):
        states.append(layer(states[-1], rope, mask, cache, i))
    return Reading(tokens, cache.by_token(0, count), states, target.norm(states[-1]))


class StateReader(Drafter):
    """A drafter that reads R hidden states of each token."""

    def read_modules(self, target: Llama) -> list[nn.Module]:
        """Return the R modules of the target whose outputs are read."""
        raise NotImplementedError

    def states_of(self, reading: Reading) -> Tensor:
        """Return these outputs for a text, those of a token side by side, (B, T, R E)."""
        raise NotImplementedError

    def condense(self, states: Tensor) -> Tensor:
        """Make one vector for each token of its states: (B, T, R E) -> (B, T, E)."""
        raise NotImplementedError

    def update_of(self, tokens: list[int], vectors: Tensor, end: int) -> CacheUpdate:
        """Return what to remember of T tokens that have been verified. vectors (1, T, E): from
        `condense`. end: the position after the last of them."""
        raise NotImplementedError


class StateVerifier(ExactVerifier):
    """A verifier for drafters that read states of the target's."""

    def __init__(self, model: Llama, drafter: Drafter, capacity: int, sampling: Sampling):
        super().__init__(model, NoDrafter(), capacity, sampling)
        self.reader = drafter

    def prefill(self, prompt: list[int]) -> DetailedResult:
        with self.outputs() as outputs:
            result = super().prefill(prompt)
        return self.with_vectors(result, prompt, outputs, list(range(len(prompt))))

    def verify(self, draft: Draft) -> DetailedResult:
        with self.outputs() as outputs:
            result = super().verify(draft)
        path = result.draft.path_of(result.accepted)
        return self.with_vectors(result, [draft.tokens[0], *result.accepted], outputs, path)

    @contextmanager
    def outputs(self) -> Iterator[list[list[Tensor]]]:
        """Collect what the read modules put out (1, T, E), a list for each, within this block. (A
        prompt may take several passes, and a pass may be padded on the right.)"""
        modules = self.reader.read_modules(self.model)
        outputs = [[] for _ in modules]
        handles = []
        for module, kept in zip(modules, outputs):
            handles.append(module.register_forward_hook(partial(keep_output, kept)))
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    def with_vectors(
        self, result: DetailedResult, tokens: list[int], outputs: list, path: list[int]
    ) -> DetailedResult:
        """Return the result with what the drafter makes of verified tokens' states. path: their
        places in passes."""
        states = [torch.cat(kept, dim=1)[:, path] for kept in outputs]
        nothing = torch.zeros(1, len(tokens), 0, device=self.model.device)  # some read no states
        vectors = self.reader.condense(torch.cat([nothing, *states], dim=-1))
        update = self.reader.update_of(tokens, vectors, end=self.cache.length)
        return replace(result, update=update)


def keep_output(kept: list[Tensor], _module: nn.Module, _inputs: tuple, output: Tensor) -> None:
    kept.append(output)
