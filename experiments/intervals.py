"""Confidence intervals by the bootstrap (Efron 1979).

We measure some prompts, but would like to know what holds for all prompts like these. The bootstrap
stands a sample in for the population: it draws as many prompts again from those that were measured,
with repetitions, computes the statistic of that sample, and repeats this. Between the 2.5th and the
97.5th percentile of all these statistics lies the 95% interval.

Where drafters of several seeds were measured, seeds are drawn in the same way, and independently.
With three seeds that is coarse: it can only repeat the three.
"""
from __future__ import annotations

import functools
from typing import Callable

import numpy as np

DRAWS = 2000


def bootstrap_interval(
    statistic: Callable[[np.ndarray], float], prompts: int
) -> tuple[float, float]:
    """Return the 95% interval of a statistic over `prompts` prompts. statistic(p) is computed from
    prompts (P), given as indices, which may repeat."""
    generator = np.random.default_rng(0)  # the same data give the same interval
    statistics = []
    for _ in range(DRAWS):
        statistics.append(statistic(generator.integers(prompts, size=prompts)))
    return middle(statistics)


def bootstrap_totals(counts: np.ndarray) -> np.ndarray:
    """Return the totals of counts (K, S, P) over seeds and prompts, in each drawn sample of these
    -> (K, DRAWS). Counts of two drafters, among the K, are summed over the same prompts and seeds:
    that compares them in pairs."""
    of_seeds, of_prompts = draw_samples(*counts.shape[1:], DRAWS)
    by_seed = counts @ of_prompts.T  # (K, S, DRAWS)
    return (by_seed * of_seeds.T).sum(axis=1)


@functools.cache
def draw_samples(seeds: int, prompts: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how often each seed (DRAWS, S) and each prompt (DRAWS, P) is drawn in each sample."""
    generator = np.random.default_rng(0)
    of_seeds = []
    of_prompts = []
    for _ in range(draws):
        drawn = generator.integers(seeds, size=seeds)
        of_seeds.append(np.bincount(drawn, minlength=seeds))
        drawn = generator.integers(prompts, size=prompts)
        of_prompts.append(np.bincount(drawn, minlength=prompts))
    return np.array(of_seeds, dtype=float), np.array(of_prompts, dtype=float)


def middle(statistics: np.ndarray | list[float]) -> tuple[float, float]:
    """Return between which two numbers the middle 95% lie."""
    low, high = np.percentile(statistics, [2.5, 97.5])
    return float(low), float(high)
