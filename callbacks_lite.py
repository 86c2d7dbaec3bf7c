"""A small metrics logger: scalars to TensorBoard and metrics.csv, under the tags of Stable-Baselines3.

    logger = MetricsLogger("runs/mine")
    logger.record("train/loss", 0.3)             # the last value before a dump counts
    logger.dump(step=16_384)                     # -> TensorBoard and runs/mine/metrics.csv

`RaceStats` turns what cars do while they train into scalars: laps, episodes, reward parts (`racer/`, `rollout/`, `reward/`).
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from racer.game.checks import UserError
from racer.game.rewards import REWARD_TERMS
from racer.game.rules import REWARD_PARTS, TICKS_PER_SECOND
from racer.game.tracks import track_name

MANY_TRACKS = 6  # beyond this number of tracks only means are logged, not every track by itself
MIN_CUT_TICKS = 10  # a shorter episode is not representative of a complete one
EPISODE_WINDOW = 100  # rollout/ep_rew_mean and ep_len_mean are means of this many episodes

# == MetricsLogger =====================================================================================================


class MetricsLogger:
    """Scalars by tag, written at `dump(step)` to TensorBoard and to metrics.csv in `folder`.

    resume_step: continue the folder of an earlier run from this step; later rows are removed.
    wandb: a project of Weights & Biases, which then gets all that TensorBoard gets, and `settings`.
    If TensorBoard or the file cannot be written, it warns once and training continues.
    """

    def __init__(
        self,
        folder: str | Path,
        resume_step: int | None = None,
        tensorboard: bool = True,
        wandb: str = "",
        settings: dict | None = None,
    ):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.csv_path = self.folder / "metrics.csv"
        self._values: dict[str, float] = {}
        self._columns: list[str] = []
        self._writer, self._wandb, self._failed = None, None, set()
        last = -1 if resume_step is None else resume_step
        self._try("metrics.csv", lambda: self._rewrite(lambda row: int(float(row["step"])) <= last))
        self._wandb = self._open_wandb(wandb, settings) if wandb else None
        if tensorboard:
            self._try("TensorBoard", lambda: self._open_tensorboard(resume_step))

    def _try(self, target: str, write: Callable) -> None:
        """Write, unless writing there has failed before: a missing package, a full disk, a deleted folder."""
        if target not in self._failed:
            try:
                write()
            except Exception as error:
                self._failed.add(target)
                warnings.warn(f"{self.folder}: cannot write {target} ({error}); training continues without it", stacklevel=4)

    def _open_wandb(self, project: str, settings: dict | None):
        """Before TensorBoard's log is opened, which wandb then watches."""
        import wandb

        return wandb.init(
            project=project, name=self.folder.name, config=settings, dir=str(self.folder), sync_tensorboard=True, save_code=True
        )

    def _open_tensorboard(self, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if threading.excepthook.__module__ != __name__:
            threading.excepthook = _quiet_for_tensorboard(threading.excepthook)
        self._writer = SummaryWriter(str(self.folder), purge_step=None if resume_step is None else resume_step + 1)

    def _to_tensorboard(self, method: str, *arguments, **named) -> None:
        if self._writer is not None:
            self._try("TensorBoard", lambda: getattr(self._writer, method)(*arguments, **named))

    def record(self, key: str, value: float) -> None:
        """The last value recorded before a dump is the one that counts."""
        self._values[key] = float(value)

    def text(self, key: str, text: str) -> None:
        self._to_tensorboard("add_text", key, text, 0)

    def image(self, key: str, image: np.ndarray, step: int) -> None:
        """An (H, W, 3) uint8 image for the Images tab."""
        self._to_tensorboard("add_image", key, image, step, dataformats="HWC")

    def animation(self, key: str, gif: bytes, step: int) -> None:
        """An encoded GIF, which the Images tab plays."""
        if self._writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            value = Summary.Value(tag=key, image=Summary.Image(encoded_image_string=gif, colorspace=3))
            self._try("TensorBoard", lambda: self._writer.file_writer.add_summary(Summary(value=[value]), step))

    def dump(self, step: int) -> dict[str, float]:
        """Write everything recorded since the last dump under this step. -> what was written"""
        values, self._values = self._values, {}
        for key, value in values.items():
            self._to_tensorboard("add_scalar", key, value, step)
        if values:
            self._try("metrics.csv", lambda: self._append({"step": step, **values}))
        return values

    def close(self) -> None:
        self._to_tensorboard("close")
        self._writer = None
        if self._wandb is not None:
            self._wandb.finish()

    def _append(self, row: dict[str, float]) -> None:
        new = [key for key in row if key not in self._columns]
        if new:  # a longer header: rewrite the file
            self._columns += new
            self._rewrite(lambda row: True)
        with self.csv_path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _rewrite(self, keep: Callable) -> None:
        """The file with the rows to keep, under all columns."""
        rows = [row for row in read_csv(self.csv_path) if keep(row)]
        self._columns += [key for key in (rows[0] if rows else ()) if key not in self._columns]
        temporary = self.csv_path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.csv_path)


def check_wandb(tensorboard: bool) -> None:
    """UserError if nothing could be logged there."""
    if importlib.util.find_spec("wandb") is None:
        raise UserError("--wandb needs a package that is not installed: pip install wandb")
    if not tensorboard:
        raise UserError("--wandb takes what TensorBoard gets; leave out --no-tensorboard")


def _quiet_for_tensorboard(hook):
    """TensorBoard writes in a thread of its own. Its next call raises an error that occurred there; no traceback is needed."""
    return lambda args: None if type(args.thread).__module__.startswith("tensorboard.") else hook(args)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics file, none if there is no file. A last line cut short by a crash is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    return [row for row in rows if None not in row and None not in row.values() and row["step"]]


# == RaceStats =========================================================================================================


class RaceStats:
    """Laps, episodes and reward parts of the cars that train, from the infos of a RacerVectorEnv.

    `on_reset()` after a reset, `step(infos)` after every step. `take()` returns what has happened since the last time,
    `log()` records it.

    An episode that was cut short (by `stagger` or a fault of the bridge) is extrapolated to full length at its reward per tick,
    so that early means are not biased to short episodes. It counts for the completion rate if it lasted half an episode.
    """

    def __init__(self, track_ids: Sequence[str], max_steps: int):
        self.num_cars, self.max_steps = len(track_ids), max_steps
        names = {track: track_name(track) for track in set(track_ids)}
        self.track_names = [names[track] for track in track_ids]
        self.episodes: deque = deque(maxlen=EPISODE_WINDOW)  # (return, ticks, extrapolated length)
        self.best_lap_sec, self.rollout = math.inf, {}
        self.on_reset()
        self.take()

    def on_reset(self) -> None:
        self.lapped = np.zeros(self.num_cars, bool)  # which cars have completed a lap in this episode

    def step(self, infos: dict) -> None:
        self.rollout["ticks"] += int(infos["ticks"].sum())
        for part in self.rollout["parts"]:
            self.rollout["parts"][part] += float(infos[part].sum())
        for car in np.flatnonzero(infos["lapTicks"]):
            self.rollout["laps"].append((self.track_names[car], float(infos["lapTicks"][car]) / TICKS_PER_SECOND))
            self.lapped[car] = True
        if "episode" in infos:
            self._end_episodes(np.flatnonzero(infos["_final_info"]), infos["episode"])

    def _end_episodes(self, cars, episode: dict) -> None:
        for i in cars:
            ticks, cut = int(episode["l"][i]), bool(episode["cut"][i])
            if ticks:  # none if the bridge failed before the first tick
                length = self.max_steps if cut and ticks >= MIN_CUT_TICKS else ticks
                self.rollout["episodes"].append((float(episode["r"][i]), ticks, length))
            if not cut or ticks >= self.max_steps / 2:  # by its length, whatever happened in it
                self.rollout["counted"] += 1
                self.rollout["completed"] += int(self.lapped[i])
        self.lapped[cars] = False

    def take(self) -> dict:
        """What has happened since the last time."""
        rollout = self.rollout
        self.rollout = {"ticks": 0, "counted": 0, "completed": 0, "laps": [], "episodes": []}
        self.rollout["parts"] = dict.fromkeys((*REWARD_PARTS, *REWARD_TERMS), 0.0)
        return rollout

    def log(self, logger, rollouts: list[dict]) -> None:
        """Record what `take()` returned in every process. What did not happen is not logged: without laps, no lap times.

        Lap times of several tracks are logged for each of them, since their mean is meaningless.
        """
        ticks, counted, completed = (sum(r[name] for r in rollouts) for name in ("ticks", "counted", "completed"))
        laps, episodes = ([x for r in rollouts for x in r[name]] for name in ("laps", "episodes"))
        for part in rollouts[0]["parts"]:
            logger.record(f"reward/{part}", sum(r["parts"][part] for r in rollouts) / max(ticks, 1))
        tracks = dict.fromkeys(self.track_names)
        for track in tracks if len(tracks) <= MANY_TRACKS else ():
            prefix = "racer" if len(tracks) == 1 else f"racer/{track}"
            if times := [seconds for name, seconds in laps if name == track]:
                logger.record(f"{prefix}/mean_lap_time_sec", float(np.mean(times)))
                logger.record(f"{prefix}/best_lap_time_sec", min(times))
        self.best_lap_sec = min([self.best_lap_sec, *(seconds for _, seconds in laps)])
        if counted:
            logger.record("racer/completion_rate", completed / counted)
        if episodes:
            logger.record("racer/episodes_this_rollout", len(episodes))
            self.episodes.extend(episodes)
        if self.episodes:
            returns, driven, lengths = np.array(self.episodes).T
            logger.record("rollout/ep_rew_mean", (returns / driven * lengths).mean())
            logger.record("rollout/ep_len_mean", lengths.mean())

    def get_state(self) -> dict[str, np.ndarray]:
        """For a checkpoint taken between rollouts."""
        episodes = np.array(self.episodes).reshape(-1, 3)
        return {"lapped": self.lapped, "episodes": episodes, "best_lap_sec": self.best_lap_sec}

    def set_state(self, state: dict) -> None:
        self.lapped = np.array(state["lapped"])
        self.episodes = deque(state["episodes"].tolist(), maxlen=EPISODE_WINDOW)
        self.best_lap_sec = state["best_lap_sec"]
