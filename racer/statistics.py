"""Is one command better than another? Statistics of a few runs each, after Agarwal et al. 2021 ("rliable").

Runs of two commands with the same seed are not paired: their random numbers part after the first difference, so that a seed is
lucky for one and not for the other. Hence every command's runs are resampled by themselves (an unpaired, stratified bootstrap).
"""

from __future__ import annotations

import math

import numpy as np

RESAMPLES = 10_000
NORMAL = 1.96  # the 97.5 % quantile of the normal distribution
DETECTION = NORMAL + 0.84  # standard errors that a test of 5 % detects in four of five experiments


def resample(values, rng: np.random.Generator) -> np.ndarray:
    """Means of bootstrap resamples (RESAMPLES,), spread as the mean of so few values is."""
    values = np.asarray(values, float)
    means = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(1)
    # Resampled means of n values vary by (n - 1) / n too little.
    return values.mean() + (means - values.mean()) * math.sqrt(len(values) / max(len(values) - 1, 1))


def difference_of_means(a, b) -> tuple[float, float, float]:
    """mean(b) - mean(a), and its 95 % bootstrap interval, as wide as Student's t makes it for so few values (Hesterberg 2015)."""
    rng, difference = np.random.default_rng(0), float(np.mean(b) - np.mean(a))
    wider = student_t(len(a) + len(b) - 2) / NORMAL
    low, high = np.percentile(resample(b, rng) - resample(a, rng), [2.5, 97.5])
    return difference, difference + wider * float(low - difference), difference + wider * float(high - difference)


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by its expansion around the normal distribution's."""
    z = NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def probability_of_improvement(a, b) -> float:
    """That a run of b is better than a run of a; ties count half."""
    a, b = np.asarray(a, float)[:, None], np.asarray(b, float)
    return float((b > a).mean() + 0.5 * (b == a).mean())


def verdict(a, b) -> str:
    """What can be said of command b beside command a, in words."""
    if min(len(a), len(b)) < 2:
        return "one run says nothing; give more --seeds"
    difference, low, high = difference_of_means(a, b)
    chance = f"a run of it is better with probability {probability_of_improvement(a, b):.2f}"
    if low > 0 or high < 0:
        return f"{'better' if low > 0 else 'worse'}: {difference:+.3f} ({low:+.3f} to {high:+.3f}); {chance}"
    more = 4 * min(len(a), len(b))
    spread = math.sqrt((np.var(a, ddof=1) + np.var(b, ddof=1)) / more)
    found = f"no difference found in {min(len(a), len(b))} seeds ({low:+.3f} to {high:+.3f})"
    return f"{found}; {more} would show one of {DETECTION * spread:.3f}; {chance}"
