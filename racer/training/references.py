"""What a result is compared with: the limit, the best laps and rewards known, and the hand-written driver.

best_known_lap("track-01"), limit_lap("track-01")       laps to race against
hand_written_settings(tracks)                           did learning gain anything over a rule of one line?
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np

from racer.game.config import load_config
from racer.game.limit import shortest_line
from racer.game.rewards import REWARD_TERMS
from racer.game.rules import DEFAULT_CONFIG, DT_S, MAX_SPEED
from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS, load_track
from racer.view.telemetry import BEST_LAPS, PLACE, LapTrace
from racer_env import RacerVectorEnv

# The best flying laps known, in ticks: clean ones, which never leave the road, and laps that may leave it. Found by long training
# and direct search; the actions that drive them are in racer/view/best-laps.
BEST_LAP_TICKS = {
    "clean": {"track-01": 385, "track-02": 946, "track-03": 1012},
    "any": {"track-01": 326, "track-02": 892, "track-03": 904},
}
# The best rewards known for an episode from the grid with the default config, found and recorded in the same way.
BEST_REWARD = {"track-01": 7.494, "track-02": 3.047, "track-03": 2.835}

# The hand-written driver is measured at its best: by reward, of these 28 settings.
GAINS, OFFSETS = (0.25, 0.4, 0.5, 0.7, 1.0, 1.4, 2.0), (-0.1, -0.03, 0.0, 0.03)
HAND_WRITTEN = {  # reward, gain and offset of the best one with the default config; held by a test
    "track-01": (7.2152, 0.4, 0.03), "track-02": (2.9787, 2.0, -0.1), "track-03": (2.7305, 0.25, 0.0),
}  # fmt: skip


def is_default(config: dict) -> bool:
    """Whether rewards are the game's own, so that they can be compared with recorded ones."""
    return config == DEFAULT_CONFIG and not REWARD_TERMS


# == Laps to race against ==============================================================================================


@functools.lru_cache(maxsize=8)
def best_known_lap(track_id: str) -> LapTrace | None:
    """The fastest lap known that never leaves the road, driven by its recorded actions. None for other tracks than the game's."""
    if track_id not in TRACKS:
        return None
    actions = np.load(BEST_LAPS / f"clean-{track_id}.npz")["actions"].astype(np.float64)
    sim, places, lines = RacerSim(1, [track_id]), [], [0]
    for tick, action in enumerate(actions, start=1):
        lap = sim.lap[0]
        sim.step(action[None], observing=False)
        places.append([getattr(sim, name)[0] for name in PLACE])
        if sim.lap[0] > lap:
            lines.append(tick)
    return LapTrace.of("best known", track_id, np.array(places[lines[-2] - 1 : lines[-1]]))


def limit_lap(track_id: str) -> LapTrace:
    """The shortest line on the road, driven at MAX_SPEED all along: where it is, not how a car could get there."""
    line, length = shortest_line(load_track(track_id))
    corners = np.append(line, line[:1], axis=0)
    travelled = np.append(0.0, np.cumsum(np.hypot(*np.diff(corners, axis=0).T)))
    ticks = round(length / MAX_SPEED / DT_S)
    at = np.arange(ticks + 1) * (length / ticks)
    x, y = (np.interp(at, travelled, column) for column in corners.T)
    heading = np.unwrap(np.arctan2(np.gradient(y), np.gradient(x)))
    rest = np.zeros_like(x)
    trajectory = np.column_stack([x, y, heading, rest + MAX_SPEED, rest, rest + 1.0, rest])
    lap = LapTrace.of("limit", track_id, trajectory, note=f"{length / MAX_SPEED:.3f} s: no clean lap is faster")
    lap.columns["off_road"][:] = 0  # the line touches the edge of the road, on one side of it or the other by a rounding error
    return lap


# == The hand-written driver ===========================================================================================


def full_throttle(observations: np.ndarray, gain=1.0, offset=0.0) -> np.ndarray:
    """The hand-written driver: full throttle, and steer to the side that has more room. (N, 14) -> (N, 3)"""
    right, left = observations[:, 0:4].sum(1), observations[:, 5:9].sum(1)
    steer = np.clip(gain * (right - left) + offset, -1, 1)
    return np.stack([steer, np.ones(len(steer)), np.zeros(len(steer))], axis=1)


def best_hand_written(tracks, config_path=None) -> dict[str, tuple[float, float, float]]:
    """Drive all settings on every track from the grid. -> reward, gain and offset of the best one, by track"""
    gain, offset = (np.repeat(values.ravel(), len(tracks)) for values in np.meshgrid(GAINS, OFFSETS))
    with contextlib.closing(RacerVectorEnv(len(gain), list(tracks), config_path)) as envs:
        obs, _ = envs.reset()
        total, running = np.zeros(len(gain)), np.ones(len(gain), bool)
        while running.any():
            obs, rewards, terminated, truncated, _ = envs.step(full_throttle(obs, gain, offset))
            total += running * rewards
            running &= ~(terminated | truncated)
    best = total.reshape(-1, len(tracks)).argmax(0) * len(tracks) + np.arange(len(tracks))
    return {track: (total[i], gain[i], offset[i]) for track, i in zip(tracks, best, strict=True)}


def hand_written_settings(tracks, config_path=None) -> dict[str, tuple[float, float, float]]:
    """As `best_hand_written`, which takes some seconds for many tracks, but recorded where that is possible."""
    recorded = HAND_WRITTEN if is_default(load_config(config_path)) else {}
    unknown = [track for track in tracks if track not in recorded]
    driven = best_hand_written(unknown, config_path) if unknown else {}
    return {track: recorded[track] if track in recorded else tuple(map(float, driven[track])) for track in tracks}
