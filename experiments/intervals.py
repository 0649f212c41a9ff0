"""95% confidence intervals, over prompts and over trainings.

*Prompts.* We measure some, but would like to know what holds for all prompts like these. The
bootstrap (Efron 1979) stands a sample in for the population: it draws as many prompts again from
those that were measured, with repetitions, computes the statistic of that sample, and repeats this.
Between the 2.5th and the 97.5th percentile of all these statistics lies the interval.

*Seeds.* Drafters of a few seeds stand for all trainings that there could have been. Of three the
bootstrap can only repeat the three, and its intervals are far too narrow. Student's t knows how
little three values tell: their mean is uncertain by t s / sqrt(3), where s is their standard
deviation and t is 4.30, in place of the 1.96 that many values would need.

*Both.* The two errors are independent, so their squares add.
"""
from __future__ import annotations

import functools
from typing import Callable

import numpy as np

DRAWS = 2000
# The 97.5th percentile of Student's t, of 1, 2, ... degrees of freedom. (More are treated like the
# last.)
STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def interval_over_seeds_and_prompts(
    statistic: Callable[[np.ndarray], np.ndarray], counts: np.ndarray
) -> tuple[float, float]:
    """Return the 95% interval of a statistic of counts (K, S, P), of S seeds and P prompts.

    statistic(totals) is computed from totals (K, ...) over both. Counts of two drafters, among the
    K, are summed over the same prompts and the same seeds: that compares them in pairs. With one
    seed the interval is over prompts alone, and says nothing about another training.
    """
    value = statistic(counts.sum(axis=(1, 2)))
    drawn = draw_prompts(counts.shape[2], DRAWS)
    low, high = middle(statistic(counts.sum(axis=1) @ drawn.T))
    by_seed = statistic(counts.sum(axis=2))
    of_seeds = half_width_over_seeds(by_seed)
    return value - np.hypot(value - low, of_seeds), value + np.hypot(high - value, of_seeds)


def half_width_over_seeds(values: np.ndarray) -> float:
    """Return by how much the mean of the values of some seeds (S) is uncertain."""
    if len(values) == 1:
        return 0.0
    freedom = min(len(values) - 1, len(STUDENT_T))
    return STUDENT_T[freedom - 1] * values.std(ddof=1) / np.sqrt(len(values))


@functools.cache
def draw_prompts(prompts: int, draws: int) -> np.ndarray:
    """Return how often each prompt is drawn in each sample, (DRAWS, P)."""
    generator = np.random.default_rng(0)  # the same data give the same interval
    samples = []
    for _ in range(draws):
        drawn = generator.integers(prompts, size=prompts)
        samples.append(np.bincount(drawn, minlength=prompts))
    return np.array(samples, dtype=float)


def bootstrap_interval(
    statistic: Callable[[np.ndarray], float], prompts: int
) -> tuple[float, float]:
    """Return the 95% interval of a statistic over `prompts` prompts. statistic(p) is computed from
    prompts (P), given as indices, which may repeat."""
    generator = np.random.default_rng(0)
    statistics = []
    for _ in range(DRAWS):
        statistics.append(statistic(generator.integers(prompts, size=prompts)))
    return middle(statistics)


def middle(statistics: np.ndarray | list[float]) -> tuple[float, float]:
    """Return between which two numbers the middle 95% lie."""
    low, high = np.percentile(statistics, [2.5, 97.5])
    return float(low), float(high)
