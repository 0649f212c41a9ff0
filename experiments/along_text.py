"""How many tokens chains of drafts yield, computed along texts that the target has written.

What drafts are accepted could be counted while drafting. But the text is the target's whatever is
drafted, so it can be written once, for all drafters that are compared. Along such a text the counts
follow without drafting, exactly:

- At temperature 0 a draft is accepted up to the first token that differs from the text. So all that
  is asked of the drafter is whether its first choice is the text's next token, after drafts that
  agree with the text.
- Above, a token of the text, y, comes out accepted with probability min(p(y), q(y)), and with
  probability p(y) in all. So, given the text, it was an accepted draft with probability
  min(1, q(y) / p(y)). This is exact, too, and without the chance of the drafts' own draws.

A cycle whose root is token i drafts tokens i + 1 to i + D. So a drafter runs over the text once for
each depth, for all roots at once, and `count_passes` adds up the cycles from the last to the first.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.arms import Arm, LimitedHead
from experiments.autoregressive import unroll
from experiments.paper_family import moa_features
from experiments.reading import Reading
from llama import probabilities
from moa import Drafter


class Text(NamedTuple):
    """A prompt, and what the target has written after it."""

    tokens: Tensor  # (T)
    prompt: int  # how many of them are the prompt's
    temperature: float


def features_by_depth(drafter: Drafter, arm: Arm, reading: Reading, depth: int) -> Tensor:
    """Return what the LM head is applied to, (depth, B, T, E): at [d, b, i] that of query i in a
    draft whose root is token i - d. (Where i < d there is no such draft.)"""
    batch, count, width = reading.final.shape
    if arm.is_autoregressive:
        steps = depth if drafter.reads_states else 1  # without states all steps are the same
        features = torch.stack([drafter.feature(a) for a in unroll(drafter, reading, steps)])
        return features.expand(depth, -1, -1, -1)
    positions = torch.arange(count, device=drafter.device)
    features = torch.zeros(depth, batch, count, width, dtype=drafter.dtype, device=drafter.device)
    # Each pass has mock cycles of `depth` tokens. After as many passes, with a cycle's first query
    # at another place in each, every query was at every depth.
    depths = []  # of queries in their cycles, (T) for each pass
    horizons = []
    for first in range(depth):
        depth_of_query = (positions - first) % depth
        depths.append(depth_of_query)
        horizons.append((positions - depth_of_query - 1).clamp(min=-1).expand(batch, -1))
    for depth_of_query, (_, hidden) in zip(depths, moa_features(drafter, reading, horizons)):
        by_position = hidden.transpose(0, 1).to(features.dtype)  # (T, B, E)
        features[depth_of_query, :, positions] = by_position  # each position at its depth
    return features


@torch.no_grad()
def acceptance_by_depth(
    drafter: Drafter, arm: Arm, reading: Reading, texts: list[Text], depth: int
) -> list[Tensor]:
    """Return for each text the probabilities that its tokens are accepted, if those before them
    were: at [d, i] that of token i + 1, in a draft whose root is token i - d. (depth, T - 1)

    reading: of the texts, padded on the right. Their temperature is the same.
    """
    temperature = texts[0].temperature
    features = features_by_depth(drafter, arm, reading, depth)
    results = []
    for row, text in enumerate(texts):
        # No draft has a root in the prompt.
        queries = slice(text.prompt, len(text.tokens) - 1)
        tokens = text.tokens[text.prompt + 1:].to(drafter.device)  # (n), those that are predicted
        if temperature > 0:
            logits = logits_of(drafter.target.lm_head, reading.final[row, queries])
            p = probabilities(logits, temperature).gather(-1, tokens.unsqueeze(-1))  # (n, 1)
        accepted = torch.zeros(depth, len(text.tokens) - 1)
        for d in range(depth):
            logits = logits_of(drafter.lm_head, features[d, row, queries])  # (n, V)
            if temperature == 0:
                accepted[d, queries] = (logits.argmax(-1) == tokens).float().cpu()
            else:
                q = probabilities(logits, temperature).gather(-1, tokens.unsqueeze(-1))
                accepted[d, queries] = (q / p).clamp(max=1.0)[:, 0].cpu()
        results.append(accepted)
    return results


@torch.no_grad()
def entropies(
    drafter: Drafter, arm: Arm, reading: Reading, texts: list[Text]
) -> tuple[Tensor, Tensor]:
    """Return the entropies, in nats, of the target's p and of the drafter's q for the first token
    of each draft along texts, (n) each. The temperature is the texts'.

    reading: of the texts, padded on the right.
    """
    temperature = texts[0].temperature
    [features] = features_by_depth(drafter, arm, reading, depth=1)  # (B, T, E)
    of_p = []
    of_q = []
    for row, text in enumerate(texts):
        roots = slice(text.prompt, len(text.tokens) - 1)
        p = probabilities(logits_of(drafter.target.lm_head, reading.final[row, roots]), temperature)
        q = probabilities(logits_of(drafter.lm_head, features[row, roots]), temperature)
        of_p.append(torch.special.entr(p).sum(-1))
        of_q.append(torch.special.entr(q).sum(-1))
    return torch.cat(of_p), torch.cat(of_q)


def mean_by_depth(accepted: list[Tensor], texts: list[Text]) -> list[float]:
    """Return for each depth the mean of what `acceptance_by_depth` returned, over all roots."""
    means = []
    for d in range(len(accepted[0])):
        probabilities = []
        for row, text in zip(accepted, texts):
            first = text.prompt + d  # the first root is the first token of the answer
            probabilities.append(row[d, first:])
        means.append(round(torch.cat(probabilities).mean().item(), 4))
    return means


def logits_of(head: nn.Module, hidden: Tensor) -> Tensor:
    """Apply an LM head in float32: in bfloat16 some likeliest tokens would be tied."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.float(), head.weight.float())
    return head.spread(logits) if isinstance(head, LimitedHead) else logits


def count_passes(accepted: Tensor, prompt: int, count: int) -> float:
    """Return the expected number of passes that write the text, without the one over the prompt,
    which also gives the first token.

    accepted: from `acceptance_by_depth`. prompt, count: tokens of the prompt, and of all the text.
    """
    depth = len(accepted)
    accepted = accepted.tolist()
    passes = [0.0] * (count + depth)  # passes[i]: those still needed when token i is the newest
    for root in range(count - 2, prompt - 1, -1):
        needed = 1.0
        reached = 1.0  # the probability that the draft is accepted up to here
        for d in range(depth):
            query = root + d
            if query == count - 1:  # the text ends within this draft
                break
            accepts = accepted[d][query]
            needed += reached * (1 - accepts) * passes[query + 1]  # the target's own token
            reached *= accepts
        else:
            needed += reached * passes[root + depth + 1]  # all accepted, and a bonus token
        passes[root] = needed
    return passes[prompt]
