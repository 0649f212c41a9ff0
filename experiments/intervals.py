"""Confidence intervals by the bootstrap (Efron 1979).

We measure some prompts, but would like to know what holds for all prompts like these. The bootstrap
stands a sample in for the population: it draws as many prompts again from those that were measured,
with repetitions, computes the statistic of that sample, and repeats this. Between the 2.5th and the
97.5th percentile of all these statistics lies the 95% interval.

Where drafters of several seeds were measured, seeds are drawn in the same way, and independently.
With three seeds that is coarse: it can only repeat the three.
"""
from __future__ import annotations

from typing import Callable

import numpy as np

DRAWS = 2000

Statistic = Callable[[np.ndarray, np.ndarray], float]  # of seeds (S, 1) and prompts (P), as indices


def bootstrap_interval(statistic: Statistic, prompts: int, seeds: int = 1) -> tuple[float, float]:
    """Return the 95% interval of a statistic over `prompts` prompts and `seeds` seeds.

    statistic(s, p) is computed from the prompts p, which may repeat, of the seeds s. Measurements
    in an array of shape (seeds, prompts) are picked by array[s, p]. Two drafters that are compared
    within one statistic are compared on the same prompts, that is, in pairs.
    """
    generator = np.random.default_rng(0)  # the same data give the same interval
    statistics = []
    for _ in range(DRAWS):
        drawn_seeds = generator.integers(seeds, size=(seeds, 1))
        drawn_prompts = generator.integers(prompts, size=prompts)
        statistics.append(statistic(drawn_seeds, drawn_prompts))
    low, high = np.percentile(statistics, [2.5, 97.5])
    return float(low), float(high)
