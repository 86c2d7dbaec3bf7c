"""The scale of the rewards that networks learn from."""

from __future__ import annotations

import math

import numpy as np


class RewardScaler:
    """Scales rewards so that a unit of progress pays the same on every track, and returns are of order 1.

    Rewards are multiplied by the track's length (a lap pays 1 on any track; penalties grow too), then divided by the standard
    deviation of the discounted returns so far. Only what the networks learn from is scaled; metrics show raw rewards.
    """

    def __init__(self, gamma: float, track_lengths: np.ndarray):
        self.gamma, self.track_lengths = gamma, track_lengths  # (N,)
        self.returns = np.zeros(len(track_lengths))  # (N,) discounted sums of each car's rewards so far
        self.moments = (0.0, 1.0, 1e-4)  # mean, variance and count of all returns so far

    def update(self, rewards, done, gather=lambda value: [value]) -> None:
        """Take in rewards and ends (T, N) of these cars, and through `gather` the statistics of the other processes' cars."""
        returns = np.empty_like(rewards)
        for t in range(len(rewards)):
            returns[t] = self.returns = self.returns * self.gamma + rewards[t] * self.track_lengths
            self.returns = np.where(done[t], 0.0, self.returns)
        for moments in gather((float(returns.mean()), float(returns.var()), returns.size)):
            self.moments = merge_moments(self.moments, moments)

    @property
    def scale(self) -> np.ndarray:
        """What to multiply every car's rewards by (N,)."""
        return self.track_lengths / math.sqrt(self.moments[1] + 1e-8)

    def on_reset(self) -> None:
        self.returns = np.zeros_like(self.returns)

    def get_state(self) -> dict:
        return {"returns": self.returns, "moments": np.array(self.moments)}

    def set_state(self, state: dict) -> None:
        self.returns, self.moments = np.array(state["returns"]), tuple(state["moments"].tolist())

    def merge_states(self, states: list[dict]) -> None:
        """The moments are those of all processes, so any state has them."""
        self.moments = tuple(states[0]["moments"].tolist())


def merge_moments(a, b):
    """Mean, variance and count of two sets taken together (Chan et al.)."""
    (mean_a, var_a, count_a), (mean_b, var_b, count_b) = a, b
    count, delta = count_a + count_b, mean_b - mean_a
    var = (var_a * count_a + var_b * count_b + delta * delta * (count_a * count_b / count)) / count
    return mean_a + delta * (count_b / count), var, count
