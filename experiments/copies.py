"""Drafts that are all copied from the text, without a drafter: the benchmark's method "lookup"."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from app.answers import Cycles, count_slots, timed_cycles
from app.exact import ExactVerifier
from app.lookup import Lookup
from llama import GenerationConfig, KVCache, Llama, Sampling
from moa import CacheUpdate, Draft, DraftLimits


class NoDrafter:
    """Takes the place of a `Drafter` in a verifier, and that of a `DraftState` in `Lookup`. It has
    no caches that grow, and drafts nothing."""

    def cache_update(self, tokens: list[int], cache: KVCache) -> CacheUpdate:
        return CacheUpdate(tokens, ca_kv=None, tli_kv=None)

    def append_verified(self, update: CacheUpdate) -> None:
        pass

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        return Draft(root)


def new_copier(vocab_size: int, sampling: Sampling) -> Lookup:
    """Copy where the last 3 tokens occurred before, else where the last 2 did, else the last 1."""
    state = NoDrafter()
    for size in (1, 2, 3):
        state = Lookup(state, vocab_size, sampling, size)
    return state


@dataclass
class WithCopies:
    """A way to answer prompts, as `WithDrafts` of app/answers.py, with copied drafts only."""

    model: Llama
    limits: DraftLimits

    @torch.inference_mode()
    def cycles(self, prompt: list[int], config: GenerationConfig) -> Cycles:
        sampling = config.new_sampling(self.model.device)
        capacity = count_slots(prompt, config, self.limits)
        verifier = ExactVerifier(self.model, NoDrafter(), capacity, sampling)
        state = new_copier(self.model.config.vocab_size, sampling)
        return timed_cycles(verifier, state, prompt, config, self.limits)
