"""How well a driver drives: deterministic episodes, their laps, their summaries.

tracks = ["track-01", "track-02", "track-03"]
envs = RacerVectorEnv(3, tracks)
for episode in evaluate(full_throttle, envs, tracks):
    print(describe(summarize([episode], envs.config)))
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from callbacks_lite import MANY_TRACKS
from racer.game.bridge import BridgeError
from racer.game.config import load_config
from racer.game.limit import limit_seconds
from racer.game.observations import OBS_NAMES
from racer.game.rules import MAX_SPEED, TICKS_PER_SECOND
from racer.game.sim import ARC_TOLERANCE
from racer.game.tracks import TRACKS, has_shape, load_track, track_name
from racer.training.references import BEST_REWARD, is_default
from racer.view.telemetry import LapTrace
from racer_env import RacerEnv, RacerVectorEnv

FLYING_LAP_IN = 2.5  # laps at full speed, in which a good driver completes a flying lap

# == Episodes ==========================================================================================================


class LapResult(NamedTuple):
    ticks: int
    end: int  # the step count at the line
    off_road: int  # ticks; a clean lap has none
    flying: bool  # not from the standing start


@dataclasses.dataclass
class Episode:
    """One evaluation episode of one car, tick by tick."""

    track: str
    from_grid: bool = True
    rewards: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0), compare=False)
    off_road: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool), compare=False)
    laps: list[LapResult] = dataclasses.field(default_factory=list)
    terminated: bool = False
    trajectory: np.ndarray | None = dataclasses.field(default=None, compare=False)  # (ticks + 1, 7), with a render_mode

    @classmethod
    def of(cls, track: str, from_grid: bool, rewards, off_road, lap_ticks, terminated: bool, trajectory) -> Episode:
        """From columns by tick; lap_ticks: of the lap that a tick completed, or 0."""
        episode = cls(track, from_grid, rewards, off_road, [], terminated, trajectory)
        for end in np.flatnonzero(lap_ticks) + 1:
            ticks = int(lap_ticks[end - 1])
            flying = bool(episode.laps) or not from_grid
            episode.laps.append(LapResult(ticks, int(end), int(off_road[end - ticks : end].sum()), flying))
        return episode

    @property
    def reward(self) -> float:
        return float(sum(self.rewards))

    @property
    def failed(self) -> bool:
        """Terminated (it stood still), or without a lap though there was time for one, from the line to the line."""
        at_full_speed = len(self.rewards) / TICKS_PER_SECOND * MAX_SPEED  # units
        needed = (1.2 if self.from_grid else 2.2) * load_track(self.track).length if has_shape(self.track) else 0.0
        return self.terminated or (not self.laps and at_full_speed > needed)

    def lap_trajectory(self, lap: LapResult) -> np.ndarray:
        """The part of the trajectory in which a lap was driven (ticks + 1, 7)."""
        return self.trajectory[lap.end - lap.ticks : lap.end + 1]

    def lap_traces(self) -> list[LapTrace]:
        """All its laps tick by tick; without one, the complete episode."""
        traces = [LapTrace.of("", self.track, self.lap_trajectory(lap)) for lap in self.laps]
        return traces or [LapTrace.of("", self.track, self.trajectory)]

    def fastest(self) -> dict:
        """The trajectory to look at: of the fastest lap; without one, of the complete episode."""
        if not self.laps:
            return {"track_id": self.track, "trajectory": self.trajectory}
        return {"track_id": self.track, "trajectory": self.lap_trajectory(min(self.laps, key=lambda lap: lap.ticks))}


@contextlib.contextmanager
def one_thread():
    """Networks this small gain nothing from more threads of torch, and with one they give the same numbers everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def evaluate(drive: Callable, envs: RacerVectorEnv, tracks, seed: int | None = None, failures: int = 0) -> list[Episode]:
    """One complete episode of every car. drive: observations (N, 14) -> actions (N, 3)

    If the bridge fails and comes back, the evaluation restarts, at most `envs.retries` times.
    """
    obs, _ = envs.reset(seed=seed)
    faults, ticks, running = envs.bridge_faults, [], np.ones(envs.num_envs, bool)
    lengths, dead, trajectories = np.zeros(envs.num_envs, np.intp), np.zeros(envs.num_envs, bool), {}
    while running.any():
        obs, rewards, terminated, truncated, infos = envs.step(drive(obs))
        if envs.bridge_faults > faults:
            if failures >= envs.retries:
                raise BridgeError(f"the bridge failed {failures + 1} times in a row during an evaluation")
            return evaluate(drive, envs, tracks, seed, failures + 1)
        ticks.append((rewards, envs.off_road, infos["lapTicks"]))
        lengths += running
        ended = running & (terminated | truncated)
        if ended.any():
            dead, running = dead | (ended & terminated), running & ~ended
            for i in np.flatnonzero(ended) if envs.render_mode else ():
                trajectories[i] = envs.trajectory(i, last_episode=True)
    columns = [np.stack(column, axis=1) for column in zip(*ticks, strict=True)]  # (N, T) each
    return [
        Episode.of(
            tracks[i % len(tracks)], envs.from_grid, *(column[i, : lengths[i]] for column in columns), bool(dead[i]),
            trajectories.get(i),
        )
        for i in range(envs.num_envs)
    ]  # fmt: skip


def drive_laps(drive: Callable, tracks, config_path=None, render_mode=None) -> list[Episode]:
    """An episode from the grid on every track, on the embedded engine; longer than the config's if a flying lap needs more time."""
    config, longest = load_config(config_path), max(load_track(track).length for track in tracks)
    ticks = math.ceil(FLYING_LAP_IN * longest / MAX_SPEED * TICKS_PER_SECOND)
    config["episode"]["maxSteps"] = max(config["episode"]["maxSteps"], ticks)
    with contextlib.closing(RacerVectorEnv(len(tracks), list(tracks), config, render_mode=render_mode)) as envs:
        return evaluate(drive, envs, tracks)


def drive_lap(name: str, drive: Callable, track_id: str) -> LapTrace:
    """A driver's fastest lap from the grid, or what it manages of one."""
    (episode,) = drive_laps(drive, [track_id], render_mode="rgb_array")
    note = "from the standing start" if len(episode.laps) == 1 else ""
    return LapTrace.of(name, track_id, episode.fastest()["trajectory"], note)


def with_flying_laps(results: list[dict], drive: Callable, tracks, config: dict) -> list[dict]:
    """Summaries of one episode per track; where that is too short for a flying lap, with the flying laps of a longer one."""
    if all(result["flying_lap_sec"] is not None for result in results):
        return results
    longer = [summarize([episode], config) for episode in drive_laps(drive, tracks, config)]
    keys = ("flying_lap_sec", "flying_spread_sec", "percent_of_limit", "cutting")
    return [
        result if result["flying_lap_sec"] is not None else result | {key: more[key] for key in keys}
        for result, more in zip(results, longer, strict=True)
    ]


COMPARED_TICKS = 240


def why_not_like_engine(track_id: str, config_path, bridge_url: str) -> str | None:
    """Drive the same in the game and on the embedded engine, also into a wall. -> the first difference, None if there is none

    If the game drives like the engine, evaluations cost no game time.
    """
    if track_id not in TRACKS:
        return f"{track_id} is not known here"
    engine = RacerEnv(track_id, config_path)
    weight = max(1.0, abs(engine.config["weights"]["progress"]))
    with contextlib.closing(RacerEnv(track_id, config_path, bridge_url)) as game:
        for tick in range(COMPARED_TICKS + 1):
            action = [0.3 * math.sin(tick / 5), 1.0, 0.0]  # about straight on, and then along the wall
            both = []
            for env in (game, engine):
                obs, *rest, info = env.step(action) if tick else env.reset()
                both.append({**dict(zip(OBS_NAMES, obs, strict=True)), **info})
                both[-1] |= dict(zip(("reward", "terminated", "truncated"), rest, strict=False))
            a, b = both
            for name in a:
                tolerance = ARC_TOLERANCE * (weight if name in ("progress", "reward") else 1.0)
                if not abs(float(a[name]) - float(b[name])) <= tolerance:
                    return f"{name} on {track_id} is {a[name]:g} after {tick} ticks, {b[name]:g} on the embedded engine"
            if b.get("terminated") or b.get("truncated"):  # short episodes
                break
    return None


def score(episodes: list[Episode]) -> float:
    """What `best.pt` is the best of: the mean reward. Slow laps, leaving the road, walls and standing still all cost some."""
    return float(np.mean([episode.reward for episode in episodes]))


# == Summaries =========================================================================================================

EVAL_TAGS = {  # tag in TensorBoard and metrics.csv: its name in summarize()
    "mean_reward": "mean_reward",
    "mean_ep_length": "mean_length",
    "completion_rate": "completion_rate",
    "off_road_share": "off_road_share",
    "mean_lap_time_sec": "mean_lap_sec",
    "flying_lap_time_sec": "flying_lap_sec",
    "best_lap_time_sec": "best_lap_sec",
    "best_clean_lap_time_sec": "best_clean_lap_sec",
    "percent_of_limit": "percent_of_limit",
    "percent_of_best_reward": "percent_of_best_reward",
}


def summarize(episodes: list[Episode], config: dict, hand_written: float | None = None) -> dict:
    """Several episodes on one track, from one kind of start. Times in seconds; None where there is no value.

    `percent_of_limit` compares the median flying lap with the limit (racer/game/limit.py), which binds clean laps only:
    `cutting` says that the median lap was not clean. hand_written: the reward of the hand-written driver's best setting
    """
    track, laps = episodes[0].track, [lap for episode in episodes for lap in episode.laps]
    reward, best_reward = score(episodes), None
    if is_default(config) and episodes[0].from_grid:
        best_reward = BEST_REWARD.get(track)
    flying = sorted((lap for lap in laps if lap.flying), key=lambda lap: lap.ticks)
    middle = flying[(len(flying) - 1) // 2 : len(flying) // 2 + 1]  # one, or two whose mean is the median
    seconds = {
        "first": [lap.ticks / TICKS_PER_SECOND for lap in laps if not lap.flying],
        "flying": [lap.ticks / TICKS_PER_SECOND for lap in flying],
        "clean": [lap.ticks / TICKS_PER_SECOND for lap in laps if not lap.off_road],
    }
    every, median = seconds["first"] + seconds["flying"], float(np.median(seconds["flying"])) if flying else None
    return {
        "track": track_name(track),
        "episodes": len(episodes),
        "failures": sum(e.failed for e in episodes),
        "completion_rate": float(np.mean([bool(e.laps) for e in episodes])),
        "mean_reward": reward,
        "mean_length": float(np.mean([len(e.rewards) for e in episodes])),
        "off_road_share": float(np.mean(np.concatenate([e.off_road for e in episodes]))),
        "laps": len(laps),
        "clean_laps": len(seconds["clean"]),
        "mean_lap_sec": float(np.mean(every)) if every else None,
        "best_lap_sec": min(every, default=None),
        "best_clean_lap_sec": min(seconds["clean"], default=None),
        "first_lap_sec": float(np.mean(seconds["first"])) if seconds["first"] else None,
        "flying_lap_sec": median,
        "flying_spread_sec": max(seconds["flying"]) - min(seconds["flying"]) if flying else None,
        "percent_of_limit": 100 * limit_seconds(load_track(track)) / median if flying and has_shape(track) else None,
        "cutting": any(lap.off_road for lap in middle),
        "percent_of_best_reward": 100 * reward / best_reward if best_reward and reward > 0 else None,
        "percent_of_hand_written": 100 * reward / hand_written if (hand_written or 0) > 0 and reward > 0 else None,
    }


def eval_metrics(results: list[dict]) -> dict[str, float]:
    """Results by tag: of every track, and the mean of those that have one. Lap times of several tracks have no meaningful mean."""
    metrics = {}
    for tag, name in EVAL_TAGS.items():
        values = [result[name] for result in results if result[name] is not None]
        if values and (len(results) == 1 or not tag.endswith("_sec")):
            metrics[f"eval/{tag}"] = float(np.mean(values))
        for result in results if len(results) <= MANY_TRACKS else ():
            if result[name] is not None:
                metrics[f"eval/{result['track']}/{tag}"] = result[name]
    return metrics


def show_percent_of_limit(result: dict) -> str:
    """As text. The limit binds clean laps only, so a lap that is not clean says so."""
    if result["percent_of_limit"] is None:
        return ""
    return f"{result['percent_of_limit']:.1f} %{', cutting' if result['cutting'] else ' of limit'}"


def describe(result: dict) -> str:
    """A summary as a line of about 80 columns."""
    percent, lap = show_percent_of_limit(result), result["flying_lap_sec"]
    text = f"{result['track']}: "
    text += "no flying lap" if lap is None else f"flying lap {lap:.3f} s" + (f" ({percent})" if percent else "")
    text += f", reward {result['mean_reward']:.3f}, "
    if result["off_road_share"] > 0:
        return f"{text}{100 * result['off_road_share']:.1f} % off road"
    return f"{text}{result['clean_laps']} of {result['laps']} clean"


def describe_all(results: list[dict]) -> str:
    """Several tracks as a line of about 80 columns. The limit binds clean laps, so the percentages are of tracks with those."""
    reward, off_road = (np.mean([result[name] for result in results]) for name in ("mean_reward", "off_road_share"))
    clean = {r["track"]: r["percent_of_limit"] for r in results if r["percent_of_limit"] and not r["cutting"]}
    text = f"{len(results)} tracks: "
    if clean:
        worst = min(clean, key=clean.get)
        text += f"{np.median([*clean.values()]):.1f} % of limit ({clean[worst]:.1f} % on {worst}), "
    text += f"reward {reward:.3f}, {100 * off_road:.1f} % off road"
    none = sum(result["flying_lap_sec"] is None for result in results)
    cutting = len(results) - len(clean) - none
    text += f", {cutting} cutting" if cutting else ""
    return text + (f", {none} without a flying lap" if none else "")


def describe_more(results: list[dict]) -> list[str]:
    """What an evaluation after training says besides: failures, and the hand-written driver. Lines of at most 80 columns."""
    lines = []
    failures, count = (sum(result[name] for result in results) for name in ("failures", "episodes"))
    if count > len(results):
        lines.append(f"{failures} of {count} episodes failed (stood still, or without a lap)")
    percents = {r["track"]: r["percent_of_hand_written"] for r in results if r["percent_of_hand_written"]}
    if percents:
        worst = min(percents, key=percents.get)
        text = f"{np.mean([*percents.values()]):.1f} % of the reward of the best hand-written driver"
        lines.append(text + (f", {percents[worst]:.1f} % on {worst}" if len(percents) > 1 else ""))
    return lines


def lines_of(results: list[dict]) -> list[str]:
    """A line per track, and one for all of them if there are several; for many tracks, only that one."""
    lines = [describe(result) for result in results if len(results) <= MANY_TRACKS]
    return lines + ([describe_all(results)] if len(results) > 1 else [])
