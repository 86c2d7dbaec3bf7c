"""How well a driver drives: deterministic laps, their summaries, and what to compare them with.

tracks = ["track-01", "track-02", "track-03"]
envs = RacerVectorEnv(3, tracks)
for episode in evaluate(full_throttle, envs, tracks):
    print(describe(summarize([episode], envs.config)))

1  evaluation    an episode of every car: its laps, its rewards, its time off the road
2  yardsticks    the best laps and rewards known, and the hand-written driver
3  summaries     numbers, tags and lines of text
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from callbacks_lite import MANY_TRACKS
from racer.game.bridge import BridgeError
from racer.game.config import load_config
from racer.game.rewards import REWARD_TERMS
from racer.game.rules import DEFAULT_CONFIG, TICKS_PER_SECOND
from racer.game.tracks import track_name
from racer.view import telemetry
from racer_env import RacerVectorEnv

# == 1  Evaluation =====================================================================================================


class Lap(NamedTuple):
    ticks: int
    end: int  # the step count at the line
    off_road: int  # ticks; a clean lap has none
    flying: bool  # not from the standing start


@dataclasses.dataclass
class Episode:
    """One evaluation episode of one car, tick by tick."""

    track: str
    from_grid: bool = True
    rewards: list[float] = dataclasses.field(default_factory=list)
    off_road: list[bool] = dataclasses.field(default_factory=list)
    laps: list[Lap] = dataclasses.field(default_factory=list)
    terminated: bool = False
    extrapolated: bool = False  # its last laps were not driven, but repeat the one before
    trajectory: np.ndarray | None = dataclasses.field(default=None, compare=False)  # (ticks + 1, 7), with a render_mode

    def finish_lap(self, ticks: int, flying: bool) -> None:
        self.laps.append(Lap(ticks, len(self.rewards), sum(self.off_road[-ticks:]), flying))

    def way(self, lap: Lap) -> np.ndarray:
        """The part of the trajectory in which a lap was driven (ticks + 1, 7)."""
        return self.trajectory[lap.end - lap.ticks : lap.end + 1]

    @property
    def failed(self) -> bool:
        """Without a lap, or terminated."""
        return self.terminated or not self.laps

    @property
    def repeats(self) -> bool:
        """Whether the last two laps are the same. Lap times vary by a tick, since the line is crossed between ticks."""
        if len(self.laps) < 3:  # the first one is not flying
            return False
        a, b = self.laps[-2:]
        return abs(a.ticks - b.ticks) <= 1 and abs(a.off_road - b.off_road) <= 2

    def extrapolate(self, length: int) -> None:
        """Fill the episode with its last lap."""
        ticks, self.extrapolated = self.laps[-1].ticks, True
        while len(self.rewards) < length:
            self.rewards.append(self.rewards[-ticks])
            self.off_road.append(self.off_road[-ticks])
            if len(self.rewards) == self.laps[-1].end + ticks:
                self.finish_lap(ticks, flying=True)


def evaluate(
    drive: Callable, envs: RacerVectorEnv, tracks, seed: int | None = None, complete: bool = True, failures: int = 0
) -> list[Episode]:
    """One episode of every car. drive: observations (N, 14) -> actions (N, 3)

    Unless `complete`, the episode of a car that drives the same flying lap twice stops early: track and driver are
    deterministic, so the rest of it is extrapolated, which is right to a tick per lap.
    If the bridge fails and comes back, the evaluation restarts, at most `envs.retries` times.
    """
    obs, _ = envs.reset(seed=seed)
    faults, limit = envs.bridge_faults, envs.config["episode"]["maxSteps"]
    episodes = [Episode(tracks[i % len(tracks)], envs.from_grid) for i in range(envs.num_envs)]
    running = np.ones(envs.num_envs, bool)
    while running.any():
        obs, rewards, terminated, truncated, infos = envs.step(drive(obs))
        if envs.bridge_faults > faults:
            if failures >= envs.retries:
                raise BridgeError(f"the bridge failed {failures + 1} times in a row during an evaluation")
            return evaluate(drive, envs, tracks, seed, complete, failures + 1)
        off_road, ended, lap_ticks = envs.off_road, terminated | truncated, infos["lapTicks"]
        for i in running.nonzero()[0]:
            episode = episodes[i]
            episode.rewards.append(float(rewards[i]))
            episode.off_road.append(bool(off_road[i]))
            if lap_ticks[i]:
                episode.finish_lap(int(lap_ticks[i]), flying=bool(episode.laps) or not episode.from_grid)
            repeats = bool(lap_ticks[i]) and not complete and episode.repeats
            if ended[i] or repeats:
                running[i], episode.terminated = False, bool(terminated[i])
                episode.trajectory = envs.trajectory(i, last_episode=ended[i]) if envs.render_mode else None
            if repeats and not ended[i]:
                episode.extrapolate(limit)
    return episodes


def score(episodes: list[Episode]) -> float:
    """What `best.pt` is the best of: the mean reward. Slow laps, leaving the road, walls and standing still all cost some."""
    return float(np.mean([sum(episode.rewards) for episode in episodes]))


def laps_of(episode: Episode) -> list[telemetry.Lap]:
    """The laps that were driven in an episode with a render_mode."""
    driven = [lap for lap in episode.laps if lap.end < len(episode.trajectory)]  # the others are extrapolated
    return [telemetry.Lap.of("", episode.track, episode.way(lap)) for lap in driven]


def fastest_lap(episode: Episode) -> dict | None:
    """The trajectory of the fastest lap (ticks + 1, 7), for a picture."""
    if not episode.laps or episode.trajectory is None:
        return None
    lap = min(episode.laps, key=lambda lap: lap.ticks)
    return {"track_id": episode.track, "trajectory": episode.way(lap)}


def drive_lap(name: str, drive: Callable, track_id: str) -> telemetry.Lap:
    """A driver's fastest lap on the embedded engine, or what it manages of one."""
    with contextlib.closing(RacerVectorEnv(1, track_id, render_mode="rgb_array")) as envs:
        (episode,) = evaluate(drive, envs, [track_id], complete=False)
    way = (fastest_lap(episode) or {"trajectory": episode.trajectory})["trajectory"]
    note = "" if not episode.laps or len(episode.laps) > 1 else "from the standing start"
    return telemetry.Lap.of(name, track_id, way, note)


@functools.lru_cache(maxsize=8)
def hand_written_lap(track_id: str, gain: float, offset: float) -> telemetry.Lap:
    """The lap of the hand-written driver's setting that earns most (`hand_written_settings`)."""
    return drive_lap("hand-written", functools.partial(full_throttle, gain=gain, offset=offset), track_id)


# == 2  Reference results ================================================================================================

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


def is_default(config: dict) -> bool:
    """Whether rewards are the game's own, so that they can be compared with recorded ones."""
    return config == DEFAULT_CONFIG and not REWARD_TERMS


# == 3  Summaries ======================================================================================================

EVAL_TAGS = {  # tag in TensorBoard and metrics.csv: its name in summarize()
    "mean_reward": "mean_reward",
    "mean_ep_length": "mean_length",
    "completion_rate": "completion_rate",
    "off_road_share": "off_road_share",
    "mean_lap_time_sec": "mean_lap_sec",
    "flying_lap_time_sec": "flying_lap_sec",
    "best_lap_time_sec": "best_lap_sec",
    "best_clean_lap_time_sec": "best_clean_lap_sec",
    "percent_of_best_lap": "percent_of_best",
    "percent_of_best_reward": "percent_of_best_reward",
    "percent_of_hand_written": "percent_of_hand_written",
}


def summarize(episodes: list[Episode], config: dict, hand_written: float | None = None) -> dict:
    """Several episodes on one track, from one kind of start. Times in seconds; None where there is no value.

    hand_written: the reward of the hand-written driver's best setting, if it is known. `percent_of_best` compares the median
    flying lap with the best one known: clean laps with the best clean lap, unless leaving the road costs nothing; then all
    laps with the best of any kind. `percent_of_best_reward` compares rewards.
    """
    track, laps = episodes[0].track, [lap for episode in episodes for lap in episode.laps]
    kind = "clean" if config["weights"]["offTrackPenalty"] < 0 else "any"
    best_lap = BEST_LAP_TICKS[kind].get(track)
    comparable = [lap.ticks for lap in laps if lap.flying and (kind == "any" or not lap.off_road)]
    best_reward = BEST_REWARD.get(track) if is_default(config) and episodes[0].from_grid else None
    seconds = {
        "first": [lap.ticks / TICKS_PER_SECOND for lap in laps if not lap.flying],
        "flying": [lap.ticks / TICKS_PER_SECOND for lap in laps if lap.flying],
        "clean": [lap.ticks / TICKS_PER_SECOND for lap in laps if not lap.off_road],
    }
    every = seconds["first"] + seconds["flying"]
    return {
        "track": track_name(track),
        "episodes": len(episodes),
        "failures": sum(e.failed for e in episodes),
        "completion_rate": float(np.mean([bool(e.laps) for e in episodes])),
        "mean_reward": score(episodes),
        "mean_length": float(np.mean([len(e.rewards) for e in episodes])),
        "off_road_share": float(np.mean([tick for e in episodes for tick in e.off_road])),
        "laps": len(laps),
        "clean_laps": len(seconds["clean"]),
        "mean_lap_sec": float(np.mean(every)) if every else None,
        "best_lap_sec": min(every, default=None),
        "best_clean_lap_sec": min(seconds["clean"], default=None),
        "first_lap_sec": float(np.mean(seconds["first"])) if seconds["first"] else None,
        "flying_lap_sec": float(np.median(seconds["flying"])) if seconds["flying"] else None,
        "flying_spread_sec": max(seconds["flying"]) - min(seconds["flying"]) if seconds["flying"] else None,
        "percent_of_best": 100 * best_lap / float(np.median(comparable)) if comparable and best_lap else None,
        "percent_of_best_reward": 100 * score(episodes) / best_reward if best_reward else None,
        "percent_of_hand_written": 100 * score(episodes) / hand_written if (hand_written or 0) > 0 else None,
    }


def eval_metrics(results: list[dict]) -> dict[str, float]:
    """Results by tag: of every track, and over all of them. Lap times of several tracks have no meaningful mean."""
    metrics = {}
    for tag, name in EVAL_TAGS.items():
        values = [result[name] for result in results]
        if None not in values and (len(results) == 1 or not tag.endswith("_sec")):
            metrics[f"eval/{tag}"] = float(np.mean(values))
        for result in results if len(results) <= MANY_TRACKS else ():
            if result[name] is not None:
                metrics[f"eval/{result['track']}/{tag}"] = result[name]
    return metrics


def describe(result: dict) -> str:
    """A summary as a line of text."""
    lap, best_lap = result["flying_lap_sec"], result["percent_of_best"]
    best_reward = result["percent_of_best_reward"]
    text = f"{result['track']}: "
    if result["episodes"] > 1:
        text += f"{result['episodes']} episodes, {result['failures']} failures, "
    text += "no flying lap" if lap is None else f"flying lap {lap:.3f} s"
    text += "" if best_lap is None else f" ({best_lap:.1f} % of the best known)"
    shares = (best_reward, "the best known"), (result["percent_of_hand_written"], "the best hand-written")
    shares = ", ".join(f"{share:.1f} % of {what}" for share, what in shares if share is not None and share > 0)
    text += f", reward {result['mean_reward']:.3f}" + (f" ({shares})" if shares else "")
    return f"{text}, {result['clean_laps']} of {result['laps']} laps clean, off the road {100 * result['off_road_share']:.1f} %"


def describe_all(results: list[dict]) -> str:
    """Several tracks as one line of text."""
    failures, count = (sum(result[name] for result in results) for name in ("failures", "episodes"))
    reward, off_road = (np.mean([result[name] for result in results]) for name in ("mean_reward", "off_road_share"))
    text = f"{len(results)} tracks: {count} episodes, {failures} failures, reward {reward:.3f}"
    shares = {r["track"]: r["percent_of_hand_written"] for r in results if r["percent_of_hand_written"] is not None}
    if shares:
        worst = min(shares, key=shares.get)
        text += (
            f", {np.mean([*shares.values()]):.1f} % of the best hand-written (worst {shares[worst]:.1f} % on {worst})"
        )
    return f"{text}, off the road {100 * off_road:.1f} %"


def lines_of(results: list[dict]) -> list[str]:
    """A line per track, and one for all of them if there are several; for many tracks, only that one."""
    lines = [describe(result) for result in results if len(results) <= MANY_TRACKS]
    return lines + ([describe_all(results)] if len(results) > 1 else [])
