"""Metrics, light: a logger with SB3's semantics, the racer's own numbers on top, and the pictures people look at.

    logger = MetricsLogger("runs/mine")
    logger.record("train/loss", 0.3)             # the last value counts
    logger.record_mean("reward/progress", 0.1)   # the mean of all values until dump counts
    logger.dump(step=16_384)                     # -> TensorBoard and runs/mine/metrics.csv

    1  MetricsLogger    scalars, texts and pictures to TensorBoard; scalars to metrics.csv
    2  RaceStats        laps, episodes and reward parts out of a vector environment's infos
    3  lap evaluation   what a driver does without noise: laps, lap times, their share of the best lap known
    4  pictures         a lap on its track as a racing line, and as an animated replay
    5  the terminal     where the time goes, the line that shows how far a run is

Nothing here can stop a training run: a TensorBoard or a file that cannot be written costs one warning.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import math
import os
import shutil
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

TICKS_PER_SECOND = 60  # of the game: step counts / this = seconds
REWARD_PARTS = ("progress", "speed", "wall", "offTrack", "backward", "stillness")
# The best flying laps known, in ticks: under the default rewards, which keep a car on the road, and at any price, over the
# shoulders too. Found by long training and direct search; the inputs that drive them are in tests/golden/best-laps.
BEST_LAP_TICKS = {
    "road": {"track-01": 385, "track-02": 946, "track-03": 1012},
    "any": {"track-01": 326, "track-02": 892, "track-03": 904},
}
EPISODE_WINDOW = 100  # rollout/ep_rew_mean and ep_len_mean look back this many episodes

# ======================================================================================================================
# 1  MetricsLogger
# ======================================================================================================================


class MetricsLogger:
    """Scalars by tag, written at `dump(step)` to TensorBoard and to metrics.csv in `folder`.

    resume_step: continue the folder of an earlier run from that step; what was logged after it is taken back.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None, tensorboard: bool = True):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.csv_path = self.folder / "metrics.csv"
        self._values: dict[str, float] = {}
        self._means: dict[str, tuple[float, int]] = {}
        self._writer = self._open_tensorboard(resume_step) if tensorboard else None
        self._csv_works = True
        self._columns: list[str] = []
        if resume_step is not None:
            self._try_csv(self._take_back_rows, resume_step)
        else:
            self._try_csv(self.csv_path.unlink, missing_ok=True)

    def _open_tensorboard(self, resume_step: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter

            if threading.excepthook.__module__ != __name__:
                threading.excepthook = _but_for_tensorboard(threading.excepthook)
            purge_step = None if resume_step is None else resume_step + 1
            return SummaryWriter(str(self.folder), purge_step=purge_step)
        except Exception as error:  # not installed, broken, or a folder that cannot be written
            self._give_up_tensorboard(error)
            return None

    def _give_up_tensorboard(self, error: Exception) -> None:
        self._writer = None
        warnings.warn(f"no TensorBoard from here on ({error!r}); training goes on, {self.csv_path} too", stacklevel=3)

    def _to_tensorboard(self, method: str, *arguments, **named) -> None:
        if self._writer is not None:
            try:
                getattr(self._writer, method)(*arguments, **named)
            except Exception as error:  # the disk is full, say
                self._give_up_tensorboard(error)

    # -- what to log ---------------------------------------------------------------------------------------------------

    def record(self, key: str, value: float) -> None:
        """The last value recorded before a dump is the one that counts."""
        self._means.pop(key, None)
        self._values[key] = float(value)

    def record_mean(self, key: str, value: float) -> None:
        """The mean of all values recorded before a dump counts."""
        total, count = self._means.get(key, (0.0, 0))
        self._means[key] = (total + float(value), count + 1)
        self._values[key] = self._means[key][0] / self._means[key][1]

    def text(self, key: str, text: str, step: int = 0) -> None:
        self._to_tensorboard("add_text", key, text, step)

    def picture(self, key: str, image: np.ndarray, step: int) -> None:
        """An (H, W, 3) uint8 picture for the Images tab."""
        self._to_tensorboard("add_image", key, image, step, dataformats="HWC")

    def animation(self, key: str, gif: bytes, step: int) -> None:
        """An encoded GIF for the Images tab, where it plays."""
        if self._writer is None:
            return
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary

            image = Summary.Image(encoded_image_string=gif, colorspace=3)
            summary = Summary(value=[Summary.Value(tag=key, image=image)])
            self._writer.file_writer.add_summary(summary, step)
        except Exception as error:
            self._give_up_tensorboard(error)

    # -- writing -------------------------------------------------------------------------------------------------------

    def dump(self, step: int) -> dict[str, float]:
        """Write everything recorded since the last dump under this step, and start afresh. -> what was written"""
        values = dict(self._values)
        self._values.clear()
        self._means.clear()
        for key, value in values.items():
            self._to_tensorboard("add_scalar", key, value, step)
        if values:
            self._try_csv(self._append_row, {"step": step, **values})
        return values

    def close(self) -> None:
        self._to_tensorboard("close")
        self._writer = None

    def _try_csv(self, write, *arguments, **named) -> None:
        if not self._csv_works:
            return
        try:
            write(*arguments, **named)
        except OSError as error:
            self._csv_works = False
            warnings.warn(f"{self.csv_path} cannot be written ({error}); training goes on without it", stacklevel=3)

    def _append_row(self, row: dict) -> None:
        """One line per dump, on disk at once. A new column rewrites the file with a longer header."""
        new = [key for key in row if key not in self._columns]
        if new:
            rows = read_csv(self.csv_path)
            self._columns += new
            self._rewrite([*rows, row])
        else:
            with self.csv_path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _rewrite(self, rows: list[dict]) -> None:
        temporary = self.csv_path.with_suffix(".csv.tmp")
        try:
            with temporary.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns, restval="")
                writer.writeheader()
                writer.writerows(rows)
            os.replace(temporary, self.csv_path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _take_back_rows(self, resume_step: int) -> None:
        """Rows of a run that was killed may be ahead of its last checkpoint, the last one even cut in the middle."""
        rows = [row for row in read_csv(self.csv_path) if int(float(row["step"])) <= resume_step]
        self._columns = list(rows[0]) if rows else []
        if rows:
            self._rewrite(rows)
        else:
            self.csv_path.unlink(missing_ok=True)


def _but_for_tensorboard(hook):
    """TensorBoard writes in a thread. An error there is told by the next thing that is recorded; no traceback is needed."""
    return lambda args: None if type(args.thread).__module__.startswith("tensorboard.") else hook(args)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Whole rows of a metrics file, none if there is no file. A last line cut short by a crash is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    rows = csv.DictReader(io.StringIO(whole))
    return [row for row in rows if None not in row and None not in row.values() and _is_number(row.get("step"))]


def _is_number(text) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True


# ======================================================================================================================
# 2  RaceStats
# ======================================================================================================================


class RaceStats:
    """Laps, episodes and reward parts of N cars, from the infos of a vector environment with same-step autoreset.

    begin(infos) after a reset, step(infos) after every step, log(logger) after a rollout.

    A lap is timed from line to line by step counts, per car. A lap that did not begin on the line (start="anywhere", or the
    first one after it) has no time. With many cars all first episodes would end in the same tick, late; the environment can
    cut them short at different times (`stagger`). Such an episode is counted as one that goes on to the limit at the reward
    per tick it had, so that the means are neither late nor drawn toward short episodes; for the completion rate it counts if
    it had half an episode's time for a lap.
    """

    def __init__(self, num_cars: int, max_steps: int, starts_on_line: bool = True):
        self.num_cars, self.max_steps, self.starts_on_line = num_cars, max_steps, starts_on_line
        self.lap = np.ones(num_cars, np.int64)
        self.checkpoint = np.zeros(num_cars, np.int64)
        self.lap_began = np.full(num_cars, 0 if starts_on_line else -1, np.int64)  # step count; -1: not on the line
        self.lapped = np.zeros(num_cars, bool)
        self.episodes: deque = deque(maxlen=EPISODE_WINDOW)  # (return, ticks, length it stands for)
        self.best_lap_sec = float("inf")
        self.total_laps = 0
        self._clear()

    def _clear(self) -> None:
        self.part_sums = dict.fromkeys(REWARD_PARTS, 0.0)
        self.steps = 0
        self.lap_times_sec: list[float] = []
        self.ended = self.counted = self.completed = 0

    def begin(self, infos: dict) -> None:
        self.lap, self.checkpoint = infos["lap"], infos["checkpoint"]

    def step(self, infos: dict) -> None:
        ended = infos.get("_final_info")
        self.steps += self.num_cars
        for part in REWARD_PARTS:
            if part in infos:
                self.part_sums[part] += float(infos[part].sum())
            if ended is not None:
                self.part_sums[part] += float(infos["final_info"][part].sum())
        if ended is None:
            lap, checkpoint, count = infos["lap"], infos["checkpoint"], infos["stepCount"]
        else:  # where an episode ended, infos already speak of the next one
            lap, checkpoint, count = (
                np.where(ended, infos["final_info"][key], infos[key]) for key in ("lap", "checkpoint", "stepCount")
            )
        crossed = np.flatnonzero((checkpoint == 0) & (self.checkpoint != 0))
        if len(crossed):
            self._cross_line(crossed, lap, count)
        if ended is not None:
            self._end_episodes(np.flatnonzero(ended), infos)
            lap, checkpoint = infos["lap"], infos["checkpoint"]
        self.lap, self.checkpoint = lap, checkpoint

    def _cross_line(self, cars, lap, count) -> None:
        whole = cars[(lap[cars] > self.lap[cars]) & (self.lap_began[cars] >= 0)]
        times = (count[whole] - self.lap_began[whole]) / TICKS_PER_SECOND
        self.lap_times_sec += times.tolist()
        self.total_laps += len(whole)
        self.best_lap_sec = min([self.best_lap_sec, *times.tolist()])
        self.lapped[whole] = True
        self.lap_began[cars] = count[cars]

    def interrupt(self, infos: dict) -> None:
        """All cars begin anew, infos from `reconnect()`: what they were doing counts as cut short."""
        self._end_episodes(np.flatnonzero(infos["_episode"]), infos)
        self.forget_episodes()
        self.begin(infos)

    def _end_episodes(self, cars, infos) -> None:
        episode = infos["episode"]
        cut = episode.get("cut", np.zeros(self.num_cars, bool))
        for i in cars:
            ticks = int(episode["l"][i])
            self.episodes.append((float(episode["r"][i]), ticks, self.max_steps if cut[i] else ticks))
            self.ended += 1
            if not cut[i] or ticks >= self.max_steps / 2:  # by its length, whatever happened in it
                self.counted += 1
                self.completed += int(self.lapped[i])
        self.lapped[cars] = False
        self.lap_began[cars] = 0 if self.starts_on_line else -1

    def news(self) -> dict:
        """What happened since the last time, for the process that logs. (Here it is forgotten.)"""
        names = ("part_sums", "steps", "lap_times_sec", "ended", "counted", "completed", "episodes")
        news = {name: getattr(self, name) for name in names}
        self.episodes = deque(maxlen=EPISODE_WINDOW)
        self._clear()
        return news

    def _take_in(self, news: dict) -> None:
        for part, total in news["part_sums"].items():
            self.part_sums[part] += total
        for name in ("steps", "ended", "counted", "completed"):
            setattr(self, name, getattr(self, name) + news[name])
        self.lap_times_sec += news["lap_times_sec"]
        self.total_laps += len(news["lap_times_sec"])
        self.best_lap_sec = min([self.best_lap_sec, *news["lap_times_sec"]])
        self.episodes.extend(news["episodes"])

    def log(self, logger: MetricsLogger, others: Sequence[dict] = ()) -> None:
        """Record the rollout and clear it, with the news of other processes. What did not happen is not logged: no laps, no
        lap times."""
        for news in others:
            self._take_in(news)
        for part, total in self.part_sums.items():
            logger.record(f"reward/{part}", total / max(self.steps, 1))
        if self.lap_times_sec:
            logger.record("racer/mean_lap_time_sec", float(np.mean(self.lap_times_sec)))
            logger.record("racer/best_lap_time_sec", min(self.lap_times_sec))
        if self.ended:
            logger.record("racer/episodes_this_rollout", self.ended)
        if self.counted:
            logger.record("racer/completion_rate", self.completed / self.counted)
        if self.episodes:
            returns, ticks, lengths = np.array(self.episodes).T
            logger.record("rollout/ep_rew_mean", (returns / ticks * lengths).mean())
            logger.record("rollout/ep_len_mean", lengths.mean())
        self._clear()

    def get_state(self) -> dict[str, np.ndarray]:
        """For a checkpoint taken between rollouts."""
        episodes = np.array(self.episodes, dtype=np.float64).reshape(-1, 3)
        totals = np.array([self.best_lap_sec, self.total_laps])
        arrays = {name: getattr(self, name).copy() for name in ("lap", "checkpoint", "lap_began", "lapped")}
        return {**arrays, "episodes": episodes, "totals": totals}

    def forget_episodes(self) -> None:
        """All cars begin anew, in the middle of whatever they were doing."""
        self.lap_began[:] = 0 if self.starts_on_line else -1
        self.lapped[:] = False

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        for name in ("lap", "checkpoint", "lap_began", "lapped"):
            setattr(self, name, np.array(state[name]))
        self.episodes = deque((tuple(row) for row in state["episodes"].tolist()), maxlen=EPISODE_WINDOW)
        self.best_lap_sec, self.total_laps = float(state["totals"][0]), int(state["totals"][1])


# ======================================================================================================================
# 3  Lap evaluation
# ======================================================================================================================


@dataclasses.dataclass
class Episode:
    """One evaluation episode of one car."""

    track: str
    reward: float = 0.0
    length: int = 0
    terminated: bool = False
    lap_ticks: list[int] = dataclasses.field(default_factory=list)
    lap_ends: list[int] = dataclasses.field(default_factory=list)  # step counts
    from_line: bool = True
    best_known: int | None = None  # the best flying lap there is, in ticks

    @property
    def first_lap(self) -> int | None:
        """The lap from the standing start, in ticks."""
        return self.lap_ticks[0] if self.from_line and self.lap_ticks else None

    @property
    def flying_laps(self) -> list[int]:
        return self.lap_ticks[1:] if self.from_line else self.lap_ticks


def evaluate(agent, envs, tracks, seed: int | None = None) -> tuple[list[Episode], np.ndarray]:
    """One episode of every car, without noise. -> episodes, and the actions given (ticks, N, 3)"""
    obs, infos = envs.reset(seed=seed)
    on_line = envs.starts_on_line
    episodes = [
        Episode(track, from_line=on_line, best_known=best_lap_ticks(track, envs.config))
        for track in (tracks[i % len(tracks)] for i in range(envs.num_envs))
    ]
    running, began = np.ones(envs.num_envs, bool), np.full(envs.num_envs, 0 if on_line else -1)
    lap, checkpoint, actions, drive = infos["lap"], infos["checkpoint"], [], agent.driver()
    while running.any():
        actions.append(drive(obs))
        obs, rewards, terminated, truncated, infos = envs.step(actions[-1])
        done = terminated | truncated
        now = infos
        if done.any():
            now = {k: np.where(done, infos["final_info"][k], infos[k]) for k in ("lap", "checkpoint", "stepCount")}
        for i in np.flatnonzero(running & (now["checkpoint"] == 0) & (checkpoint != 0)):
            if now["lap"][i] > lap[i] and began[i] >= 0:
                episodes[i].lap_ticks.append(int(now["stepCount"][i] - began[i]))
                episodes[i].lap_ends.append(int(now["stepCount"][i]))
            began[i] = now["stepCount"][i]
        for i in np.flatnonzero(running):
            episodes[i].reward += float(rewards[i])
            episodes[i].length += 1
            episodes[i].terminated = bool(terminated[i])
        lap, checkpoint = infos["lap"], infos["checkpoint"]
        running &= ~done
    return episodes, np.array(actions)


def score(episodes: list[Episode]) -> float:
    """What `best.pt` is the best of: the mean reward. Slow laps, grass, walls and standing still all cost some."""
    return float(np.mean([episode.reward for episode in episodes]))


def eval_metrics(episodes: list[Episode]) -> dict[str, float]:
    laps = [ticks / TICKS_PER_SECOND for episode in episodes for ticks in episode.lap_ticks]
    metrics = {
        "eval/mean_reward": score(episodes),
        "eval/mean_ep_length": float(np.mean([episode.length for episode in episodes])),
        "eval/completion_rate": float(np.mean([bool(episode.lap_ticks) for episode in episodes])),
    }
    if laps:
        metrics |= {"eval/mean_lap_time_sec": float(np.mean(laps)), "eval/best_lap_time_sec": min(laps)}
    shares = [percent_of_best([episode]) for episode in episodes]
    if any(shares):
        metrics["eval/percent_of_best_lap"] = float(np.mean([share for share in shares if share is not None]))
    return metrics


def percent_of_best(episodes: list[Episode]) -> float | None:
    """How fast the flying laps of some episodes on a track are (their median), measured by the best there is. Laps that beat the
    best on the road have left the road, and are measured by the best at any price."""
    flying = [ticks for episode in episodes for ticks in episode.flying_laps]
    best = episodes[0].best_known
    if not flying or not best:
        return None
    median = float(np.median(flying))
    if median < best:
        best = BEST_LAP_TICKS["any"].get(episodes[0].track, best)
    return 100 * best / median


def summarize(episodes: list[Episode]) -> dict:
    """The laps of several episodes on one track, in seconds."""
    first = [e.first_lap / TICKS_PER_SECOND for e in episodes if e.first_lap is not None]
    flying = [ticks / TICKS_PER_SECOND for e in episodes for ticks in e.flying_laps]
    return {
        "track": episodes[0].track,
        "episodes": len(episodes),
        "laps": sum(len(e.lap_ticks) for e in episodes),
        "completion_rate": float(np.mean([bool(e.lap_ticks) for e in episodes])),
        "failures": sum(e.terminated or not e.lap_ticks for e in episodes),
        "mean_reward": score(episodes),
        "mean_length": float(np.mean([e.length for e in episodes])),
        "first_lap_sec": float(np.mean(first)) if first else None,
        "flying_lap_sec": float(np.median(flying)) if flying else None,
        "best_lap_sec": min(first + flying) if first or flying else None,
        "flying_spread_sec": max(flying) - min(flying) if flying else None,
        "percent_of_best": percent_of_best(episodes),
    }


def lap_time(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:.3f} s"


def describe(result: dict) -> str:
    """A summary as a line of text."""
    if not result["laps"]:
        return f"{result['track']}: no lap, reward {result['mean_reward']:.3f}"
    share = f", {result['percent_of_best']:.1f} % of the best known" if result["percent_of_best"] else ""
    return (
        f"{result['track']}: flying lap {lap_time(result['flying_lap_sec'])} (best {lap_time(result['best_lap_sec'])}{share}), "
        f"first lap {lap_time(result['first_lap_sec'])}, {result['laps'] / result['episodes']:g} laps an episode, "
        f"reward {result['mean_reward']:.3f}"
    )


def best_lap_ticks(track: str, config: dict) -> int | None:
    """The best flying lap known on a track of the game, of the kind that these rewards ask for."""
    return BEST_LAP_TICKS["road" if config["weights"]["offTrackPenalty"] < 0 else "any"].get(track)


# ======================================================================================================================
# 4  Pictures
# ======================================================================================================================

# The colours of speed, from slow to fast.
SPEED_COLOURS = np.array(
    [(68, 40, 130), (47, 108, 178), (31, 161, 135), (140, 205, 70), (253, 231, 37), (255, 130, 40)]
)
GIF_FRAME_TICKS = 3  # 50 ms: a GIF counts in hundredths of a second
GIF_SECONDS_MOST = 20


def speed_colour(share: float) -> tuple[int, int, int]:
    place = min(max(share, 0.0), 1.0) * (len(SPEED_COLOURS) - 1)
    low = min(int(place), len(SPEED_COLOURS) - 2)
    colour = SPEED_COLOURS[low] + (SPEED_COLOURS[low + 1] - SPEED_COLOURS[low]) * (place - low)
    return tuple(int(c) for c in colour)


def speed_scale(speeds) -> tuple[float, float]:
    """From the slowest to the fastest, but wide enough that a lap at full speed does not look like one with corners."""
    fastest = float(np.max(speeds))
    return min(float(np.min(speeds)), fastest - 40.0), fastest


def racing_line(painter, positions, speeds, title: str) -> np.ndarray:
    """A lap on its track, coloured by speed. -> (H, W, 3) uint8

    painter draws the track (racer_env.Painter): canvas() gives an image at twice the size and a pen, to_pixels() a place.
    """
    image, pen = painter.canvas()
    way = painter.to_pixels(positions)
    slowest, fastest = speed_scale(speeds)
    shares = (np.asarray(speeds) - slowest) / (fastest - slowest)
    for i in range(len(way) - 1):
        pen.line((*way[i], *way[i + 1]), fill=speed_colour(shares[i]), width=7)
    _caption(painter, image, pen, title, slowest, fastest)
    return np.asarray(image.reduce(painter.SCALE))


def _caption(painter, image, pen, title: str, slowest: float, fastest: float) -> None:
    """Title and the scale of speeds in the emptiest corner: the one farthest from the track."""
    from PIL import ImageFont

    big, small = ImageFont.load_default(size=34), ImageFont.load_default(size=24)
    width, height = image.size
    box_width, box_height = 470, 120
    walls = np.array(painter.to_pixels(np.concatenate([painter.track.outer, painter.track.inner])))
    middle = painter.track.position(np.linspace(0, painter.track.length, 200))
    road = np.concatenate([walls, np.array(painter.to_pixels(middle))])
    places = [
        (x, y)
        for x in np.linspace(12, width - box_width - 12, 12)
        for y in np.linspace(12, height - box_height - 12, 12)
    ]
    x, y = max(places, key=lambda p: _gap(road, p, box_width, box_height))
    pen.text((x, y), title, fill=(255, 255, 255), font=big, stroke_width=2, stroke_fill=(24, 24, 26))
    bar = np.linspace(0, 1, 300)
    for i, share in enumerate(bar):
        pen.line((x + i, y + 56, x + i, y + 74), fill=speed_colour(share))
    label = f"{slowest:.0f} to {fastest:.0f} units/s"
    pen.text((x, y + 82), label, fill=(255, 255, 255), font=small, stroke_width=2, stroke_fill=(24, 24, 26))


def _gap(points, corner, width: float, height: float) -> float:
    """How far the nearest point is from a box."""
    dx = np.maximum(np.maximum(corner[0] - points[:, 0], points[:, 0] - corner[0] - width), 0)
    dy = np.maximum(np.maximum(corner[1] - points[:, 1], points[:, 1] - corner[1] - height), 0)
    return float(np.hypot(dx, dy).min())


def lap_replay(painter, positions, headings, speeds) -> bytes:
    """A lap as an animated GIF in real time: the car drives, its line stays behind it. -> the encoded file"""
    from PIL import Image

    image, pen = painter.canvas()
    way = painter.to_pixels(positions)
    slowest, fastest = speed_scale(speeds)
    shares = (np.asarray(speeds) - slowest) / (fastest - slowest)
    every = max(GIF_FRAME_TICKS, -(-len(way) // (GIF_SECONDS_MOST * TICKS_PER_SECOND // GIF_FRAME_TICKS)))
    frames, palette = [], None
    for end in range(every, len(way), every):
        for i in range(end - every, end):
            pen.line((*way[i], *way[i + 1]), fill=speed_colour(shares[i]), width=7)
        frame = image.copy()
        painter.paint_car(frame, *positions[end], headings[end])
        frame = frame.reduce(painter.SCALE)
        if palette is None:  # one palette for all, of the track with every colour of speed on it
            swatches = frame.copy()
            for i in range(64):
                swatches.paste(speed_colour(i / 63), (i * 4, 0, i * 4 + 4, 8))
            palette = swatches.quantize(128)
        frames.append(frame.quantize(palette=palette, dither=Image.Dither.NONE))
    out = io.BytesIO()
    duration_ms = round(1000 * every / TICKS_PER_SECOND / 10) * 10
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=duration_ms, loop=0)
    return out.getvalue()


# ======================================================================================================================
# 5  The terminal
# ======================================================================================================================


class Clock:
    """Where the time goes: `with clock("learning"): ...` adds up per name."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._stack: list[tuple[str, float]] = []

    def __call__(self, name: str) -> Clock:
        self._stack.append((name, time.perf_counter()))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        name, began = self._stack.pop()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class Nowhere(io.TextIOBase):
    """Where print goes when nobody is listening."""

    def write(self, text: str) -> int:
        return len(text)


def say(text: str, end: str = "\n", to: str = "stdout") -> None:
    """Print. Where that fails (`| head` has gone, the terminal too, the log's disk is full) be silent from then on: it must not
    end the run."""
    stream = getattr(sys, to)
    letters = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(text.encode(letters, "replace").decode(letters), end=end, file=stream or Nowhere(), flush=True)
    except RuntimeError:  # a signal has come in the middle of another print
        pass
    except (OSError, ValueError):  # ValueError: it is closed
        setattr(sys, to, Nowhere())


def warn(text: str) -> None:
    say(text, to="stderr")


class Progress:
    """A line that stays in place in a terminal; now and then a plain line where the output is a file or a pipe."""

    REFRESH_S = 0.2

    def __init__(self, total: int, first_step: int):
        self.total, self.first_step, self.began = total, first_step, time.perf_counter()
        self.live = sys.stdout is not None and sys.stdout.isatty()
        self._next_line, self._next_refresh = first_step, 0.0

    def show(self, steps: int, stats: RaceStats, metrics: dict) -> None:
        now = time.perf_counter()
        if now < self._next_refresh if self.live else steps < self._next_line:
            return
        self._next_refresh, self._next_line = now + self.REFRESH_S, steps + self.total // 10
        rate = (steps - self.first_step) / max(now - self.began, 1e-9)
        left = round(max(self.total - steps, 0) / max(rate, 1e-9))
        lap = "no lap yet" if math.isinf(stats.best_lap_sec) else f"best lap {stats.best_lap_sec:.2f} s"
        share = metrics.get("racer/completion_rate")
        completion = "" if share is None else f"  {share:4.0%} lapped"
        done = min(steps / self.total, 1)
        text = f"{steps:>11,} steps {done:4.0%}  {rate:>9,.0f}/s  {left // 60}:{left % 60:02} left  {lap}{completion}"
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            say(f"\r{text[:width]:<{width}}", end="")
        else:
            say(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.live:
            text = f"\r{text:<{shutil.get_terminal_size().columns - 1}}"
        say(text)
