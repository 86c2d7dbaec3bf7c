"""Laps: timed, counted while cars train, driven and judged in evaluations.

    tracks = ["track-01", "track-02", "track-03"]
    envs = RacerVectorEnv(3, tracks)
    for episode in evaluate(full_throttle, envs, tracks):
        print(describe(summarize([episode], envs.config)))

    1  RaceStats     laps, episodes and reward parts of the cars that train
    2  evaluation    an episode of every car without noise: its laps, its rewards, its time off the road
    3  hand-written  the driver to compare with
    4  summaries     how clean and how fast that was, and how near to the best known: numbers, tags, lines of text

A lap goes from line to line, as in the game.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from racer.game.bridge import BridgeError
from racer_env import RacerVectorEnv
from racer.game.sim import DEFAULT_CONFIG, REWARD_PARTS, TICKS_PER_SECOND

# The best flying laps known, in ticks: clean ones, which never leave the road, and laps at any price. Found by long training
# and direct search; the inputs that drive them are in tests/golden/best-laps.
BEST_LAP_TICKS = {
    "clean": {"track-01": 385, "track-02": 946, "track-03": 1012},
    "any": {"track-01": 326, "track-02": 892, "track-03": 904},
}
# The best rewards known for an episode from the grid with the default config, found and recorded in the same way.
BEST_REWARD = {"track-01": 7.494, "track-02": 3.047, "track-03": 2.835}
EVAL_TAGS = {  # in TensorBoard and metrics.csv: what summarize() calls it
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
MANY_TRACKS = 6  # of more than these, training shows a summary: not every track's line, picture and tags
MIN_CUT_TICKS = 10  # a shorter episode says nothing about a whole one
EPISODE_WINDOW = 100  # rollout/ep_rew_mean and ep_len_mean look back this many episodes

# == 1  RaceStats ======================================================================================================


class LapTimer:
    """Laps of N cars from line to line, from the infos of a vector environment: begin(infos) after a reset, then cross(infos).

    The game counts a lap only if it began on the line. With start="anywhere" the first crossing starts the clock.
    """

    def begin(self, infos: dict) -> None:
        self.lap, self.checkpoint = infos["lap"], infos["checkpoint"]
        self.lap_began = np.zeros(len(self.lap), np.int64)  # step counts

    def cross(self, infos: dict) -> tuple[np.ndarray, np.ndarray]:
        """-> the cars that have finished a lap in this tick, and the ticks it took them"""
        now = final_infos(infos)
        crossed = np.flatnonzero((now["checkpoint"] == 0) & (self.checkpoint != 0))
        cars = crossed[now["lap"][crossed] > self.lap[crossed]]
        ticks = now["stepCount"][cars] - self.lap_began[cars]
        self.lap_began[crossed] = now["stepCount"][crossed]
        if "_final_info" in infos:
            self.lap_began[infos["_final_info"]] = 0
        self.lap, self.checkpoint = infos["lap"], infos["checkpoint"]
        return cars, ticks


def final_infos(infos: dict, names=("lap", "checkpoint", "stepCount")) -> dict:
    """Some infos of a tick. Where an episode ended, `infos` already speaks of the next one."""
    ended = infos.get("_final_info")
    return {n: infos[n] if ended is None else np.where(ended, infos["final_info"][n], infos.get(n, 0)) for n in names}


class RaceStats(LapTimer):
    """Laps, episodes and reward parts of N cars, from the infos of a vector environment with same-step autoreset.

    begin(infos) after a reset, step(infos) after every step; take() after a rollout gives what has happened, log() writes it.

    An episode that was cut (`stagger`, or a fault of the bridge) is extrapolated to full length at its reward per tick, so that
    early means are not biased to short episodes. For the completion rate it counts if it had half an episode's time for a lap.
    """

    ARRAYS = ("lap", "checkpoint", "lap_began", "lapped")

    def __init__(self, num_cars: int, max_steps: int, patience: int = 0):
        self.num_cars, self.max_steps, self.patience = num_cars, max_steps, patience
        self.episodes: deque = deque(maxlen=EPISODE_WINDOW)  # (return, ticks, length it stands for)
        self.best_lap_sec, self.rollout = math.inf, {}
        self.begin({"lap": np.ones(num_cars, np.int64), "checkpoint": np.zeros(num_cars, np.int64)})
        self.take()

    def begin(self, infos: dict) -> None:
        super().begin(infos)
        self.lapped = np.zeros(self.num_cars, bool)

    def step(self, infos: dict) -> None:
        self.rollout["steps"] += self.num_cars
        for part, values in final_infos(infos, REWARD_PARTS).items():
            self.rollout["parts"][part] += float(values.sum())
        cars, ticks = self.cross(infos)
        if len(cars):
            self.rollout["lap_times_sec"] += (ticks / TICKS_PER_SECOND).tolist()
            self.lapped[cars] = True
        if "episode" in infos:
            self._end_episodes(np.flatnonzero(infos["_final_info"]), infos["episode"])

    def _end_episodes(self, cars, episode: dict) -> None:
        cut = episode.get("cut", np.zeros(self.num_cars, bool))
        self.rollout["put_back"] += int(np.sum(episode.get("put_back", 0)))
        for i in cars:
            ticks = int(episode["l"][i])
            if ticks:  # none if the bridge failed before the first tick
                stands_for = self.max_steps if cut[i] and ticks >= MIN_CUT_TICKS else ticks
                self.rollout["episodes"].append((float(episode["r"][i]), ticks, stands_for))
            if not cut[i] or ticks >= self.max_steps / 2:  # by its length, whatever happened in it
                self.rollout["counted"] += 1
                self.rollout["completed"] += int(self.lapped[i])
        self.lapped[cars] = False

    def take(self) -> dict:
        """What has happened since the last time."""
        rollout = self.rollout
        self.rollout = {"steps": 0, "counted": 0, "completed": 0, "put_back": 0, "lap_times_sec": [], "episodes": []}
        self.rollout["parts"] = dict.fromkeys(REWARD_PARTS, 0.0)
        return rollout

    def log(self, logger, rollouts: list[dict]) -> None:
        """Record what take() gave in every process. What did not happen is not logged: no laps, no lap times."""
        steps, counted, completed = (sum(r[name] for r in rollouts) for name in ("steps", "counted", "completed"))
        laps, episodes = ([x for r in rollouts for x in r[name]] for name in ("lap_times_sec", "episodes"))
        for part in REWARD_PARTS:
            logger.record(f"reward/{part}", sum(r["parts"][part] for r in rollouts) / max(steps, 1))
        if laps:
            self.best_lap_sec = min(self.best_lap_sec, *laps)
            logger.record("racer/mean_lap_time_sec", float(np.mean(laps)))
            logger.record("racer/best_noisy_lap_time_sec", min(laps))
        if self.patience:
            logger.record("racer/put_back", sum(r["put_back"] for r in rollouts))
        if counted:
            logger.record("racer/completion_rate", completed / counted)
        if episodes:
            logger.record("racer/episodes_this_rollout", len(episodes))
            self.episodes.extend(episodes)
        if self.episodes:
            returns, ticks, lengths = np.array(self.episodes).T
            logger.record("rollout/ep_rew_mean", (returns / ticks * lengths).mean())
            logger.record("rollout/ep_len_mean", lengths.mean())

    def get_state(self) -> dict[str, np.ndarray]:
        """For a checkpoint taken between rollouts."""
        arrays = {name: getattr(self, name) for name in self.ARRAYS}
        return {**arrays, "episodes": np.array(self.episodes).reshape(-1, 3), "best_lap_sec": self.best_lap_sec}

    def set_state(self, state: dict) -> None:
        for name in self.ARRAYS:
            setattr(self, name, np.array(state[name]))
        self.episodes = deque(state["episodes"].tolist(), maxlen=EPISODE_WINDOW)
        self.best_lap_sec = state["best_lap_sec"]


# == 2  Evaluation =====================================================================================================


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
    places: np.ndarray | None = dataclasses.field(default=None, compare=False)  # (ticks + 1, 7), with a render_mode

    def finish_lap(self, ticks: int, flying: bool) -> None:
        self.laps.append(Lap(ticks, len(self.rewards), sum(self.off_road[-ticks:]), flying))

    @property
    def failed(self) -> bool:
        """Without a lap, or ended before the time."""
        return self.terminated or not self.laps

    @property
    def repeats(self) -> bool:
        """Whether the last two laps are alike to the tick. Where inside of a tick a car crosses the line adds one or two."""
        if len(self.laps) < 3:  # the first one is not flying
            return False
        a, b = self.laps[-2:]
        return abs(a.ticks - b.ticks) <= 1 and abs(a.off_road - b.off_road) <= 2

    def repeat(self, length: int) -> None:
        """Fill the episode with its last lap."""
        ticks = self.laps[-1].ticks
        while len(self.rewards) < length:
            self.rewards.append(self.rewards[-ticks])
            self.off_road.append(self.off_road[-ticks])
            if len(self.rewards) == self.laps[-1].end + ticks:
                self.finish_lap(ticks, flying=True)


def evaluate(
    drive: Callable, envs: RacerVectorEnv, tracks, seed: int | None = None, whole: bool = True, failures: int = 0
) -> list[Episode]:
    """One episode of every car. drive: observations (N, 14) -> inputs (N, 3)

    Unless `whole`, a car that drives the same flying lap twice is not driven any farther: the track and the driver are
    deterministic, so the rest of its episode is filled with that lap.
    A bridge that fails and comes back restarts the evaluation, as often as it may be connected to again.
    """
    obs, infos = envs.reset(seed=seed)
    faults, timer, limit = envs.bridge_faults, LapTimer(), envs.config["episode"]["maxSteps"]
    timer.begin(infos)
    episodes = [Episode(tracks[i % len(tracks)], envs.starts_on_line) for i in range(envs.num_envs)]
    running = np.ones(envs.num_envs, bool)
    while running.any():
        obs, rewards, terminated, truncated, infos = envs.step(drive(obs))
        if envs.bridge_faults > faults:
            if failures >= envs.retries:
                raise BridgeError(f"the bridge failed in an evaluation, {failures + 1} times in a row")
            return evaluate(drive, envs, tracks, seed, whole, failures + 1)
        off_road, ended, laps = envs.off_road, terminated | truncated, dict(zip(*timer.cross(infos), strict=True))
        for i in running.nonzero()[0]:
            episode = episodes[i]
            episode.rewards.append(float(rewards[i]))
            episode.off_road.append(bool(off_road[i]))
            if i in laps:
                episode.finish_lap(int(laps[i]), flying=bool(episode.laps) or not episode.from_grid)
            repeats = i in laps and not whole and episode.repeats
            if ended[i] or repeats:
                running[i], episode.terminated = False, bool(terminated[i])
                episode.places = envs.places(i, last_episode=ended[i]) if envs.render_mode else None
            if repeats and not ended[i]:
                episode.repeat(limit)
    return episodes


def score(episodes: list[Episode]) -> float:
    """What `best.pt` is the best of: the mean reward. Slow laps, grass, walls and standing still all cost some."""
    return float(np.mean([sum(episode.rewards) for episode in episodes]))


def fastest_lap(episode: Episode) -> dict | None:
    """Where the car was in its fastest lap (ticks + 1, 7), for a picture."""
    if not episode.laps or episode.places is None:
        return None
    lap = min(episode.laps, key=lambda lap: lap.ticks)
    return {"track_id": episode.track, "places": episode.places[lap.end - lap.ticks : lap.end + 1]}


# == 3  The hand-written driver ========================================================================================


def full_throttle(observations: np.ndarray, gain=1.0, offset=0.0) -> np.ndarray:
    """The hand-written driver: full throttle, and steer to the side that has more room. (N, 14) -> (N, 3)"""
    right, left = observations[:, 0:4].sum(1), observations[:, 5:9].sum(1)
    steer = np.clip(gain * (right - left) + offset, -1, 1)
    return np.stack([steer, np.ones(len(steer)), np.zeros(len(steer))], axis=1)


def hand_written_rewards(tracks, config_path) -> dict[str, float]:
    """What that driver reaches on every track in an episode from the grid."""
    with contextlib.closing(RacerVectorEnv(len(tracks), tracks, config_path)) as envs:
        return {episode.track: score([episode]) for episode in evaluate(full_throttle, envs, tracks, whole=False)}


# == 4  Summaries ======================================================================================================


def summarize(episodes: list[Episode], config: dict, hand_written: float | None = None) -> dict:
    """Several episodes on one track, from one kind of start. Times in seconds; None for what there is none of.

    `percent_of_best` compares the median flying lap with the best one known: clean laps with the best clean lap, unless
    leaving the road costs nothing; then all laps with the best at any price. `percent_of_best_reward` compares rewards.
    """
    track, laps = episodes[0].track, [lap for episode in episodes for lap in episode.laps]
    kind = "clean" if config["weights"]["offTrackPenalty"] < 0 else "any"
    best_lap = BEST_LAP_TICKS[kind].get(track)
    comparable = [lap.ticks for lap in laps if lap.flying and (kind == "any" or not lap.off_road)]
    best_reward = BEST_REWARD.get(track) if config == DEFAULT_CONFIG and episodes[0].from_grid else None
    seconds = {
        "first": [lap.ticks / TICKS_PER_SECOND for lap in laps if not lap.flying],
        "flying": [lap.ticks / TICKS_PER_SECOND for lap in laps if lap.flying],
        "clean": [lap.ticks / TICKS_PER_SECOND for lap in laps if not lap.off_road],
    }
    every = seconds["first"] + seconds["flying"]
    return {
        "track": track,
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
    """Results by tag: the mean over the tracks, and each of several tracks. A mean is left out while a track has no value."""
    metrics = {}
    for tag, name in EVAL_TAGS.items():
        values = [result[name] for result in results]
        if None not in values:
            metrics[f"eval/{tag}"] = float(np.mean(values))
        for result in results if 1 < len(results) <= MANY_TRACKS else ():
            if result[name] is not None:
                metrics[f"eval/{Path(result['track']).stem}/{tag}"] = result[name]
    return metrics


def describe(result: dict) -> str:
    """A summary as a line of text."""
    lap, best_lap = result["flying_lap_sec"], result["percent_of_best"]
    best_reward = result["percent_of_best_reward"]
    text = f"{result['track']}: "
    if result["episodes"] > 1:
        text += f"{result['episodes']} episodes, {result['failures']} failures, "
    text += "no flying lap" if lap is None else f"flying lap {lap:.3f} s"
    text += "" if best_lap is None else f" ({best_lap:.1f} % of the best)"
    text += f", reward {result['mean_reward']:.3f}"
    text += "" if best_reward is None or best_reward < 0 else f" ({best_reward:.1f} %)"
    if result["percent_of_hand_written"] is not None:
        text += f", {result['percent_of_hand_written']:.1f} % of the hand-written driver's"
    return f"{text}, {result['clean_laps']} of {result['laps']} laps clean, off the road {100 * result['off_road_share']:.1f} %"


def describe_all(results: list[dict]) -> str:
    """Several tracks as one line of text."""
    failures, count = (sum(result[name] for result in results) for name in ("failures", "episodes"))
    reward, off_road = (np.mean([result[name] for result in results]) for name in ("mean_reward", "off_road_share"))
    text = f"{len(results)} tracks: {count} episodes, {failures} failures, reward {reward:.3f}"
    shares = {r["track"]: r["percent_of_hand_written"] for r in results if r["percent_of_hand_written"] is not None}
    if shares:
        worst = min(shares, key=shares.get)
        text += f", {np.mean([*shares.values()]):.1f} % of the hand-written driver's (worst {shares[worst]:.1f} % on {worst})"
    return f"{text}, off the road {100 * off_road:.1f} %"


def lines_of(results: list[dict]) -> list[str]:
    """A line for every track, and one for all of several. Of many tracks, that one alone."""
    lines = [describe(result) for result in results if len(results) <= MANY_TRACKS]
    return lines + ([describe_all(results)] if len(results) > 1 else [])
