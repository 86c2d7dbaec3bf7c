"""One training run, new or resumed: it evaluates, logs, saves, stops and reports, while the trainer drives and learns.

    with Run("ppo", args, envs, parts) as run:      # --resume: the parts are as they were
        while not run.done:
            ...                                     # one iteration: drive and learn
            run.advance(steps, metrics)
            if run.due(args.eval_every):
                run.evaluate(agent.drive)           # the best driver so far is saved as best.pt
            run.log()
            if run.due(args.checkpoint_every) or run.stopped:
                run.save("checkpoint.pt")
        return run.report()

What a checkpoint holds, and what a part is, stands in checkpoints.py.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import shlex
import signal
import time
from collections.abc import Callable

import numpy as np
import torch

from callbacks_lite import MANY_TRACKS, MetricsLogger
from racer.game.bridge import BridgeError, retry_pause_s
from racer.game.rewards import REWARD_TERMS
from racer.game.tracks import track_name
from racer.training.checkpoints import (
    CHECKPOINT_FORMAT, like, load_checkpoint, make_run_folder, must_fit, network_settings, plain_settings, provenance,
    resumed_folder, write_checkpoint,
)  # fmt: skip
from racer.training.gallery import draw_best
from racer.training.evaluation import (
    eval_metrics, evaluate, fastest_lap, hand_written_settings, lines_of, score, summarize,
)  # fmt: skip
from racer.training.processes import (
    ProcessError, SharedError, all_gather, broadcast_from_rank0, gather_on_rank0, rank, remember, run_on_all, world_size,
)  # fmt: skip
from racer.training.report import how_to_resume, report
from racer.training.terminal import Clock, ProgressLine, print_safely, warn
from racer.training.twin import difference_from_engine
from racer_env import RacerVectorEnv

MAY_CHANGE = (  # when a run is resumed
    *("total_timesteps", "game", "bridges", "bridge_url", "bridge_retries", "resume"),
    *("eval_every", "checkpoint_every", "tensorboard", "save_buffer"),
)


class Run:
    """`parts` names everything that a checkpoint holds beside settings and counts; "agent", "scaler" and "stats" must be among
    them. Saving and restoring read the same dict. Parts named in `unsaved` are restored if a checkpoint has them, but not saved.

    Ctrl+C and SIGTERM ask for an orderly end: the iteration is finished and a checkpoint written. In a run of one process, a
    second signal ends it at once.
    """

    def __init__(self, algorithm: str, args, envs: RacerVectorEnv, parts: dict, unsaved: tuple[str, ...] = ()):
        self.algorithm, self.args, self.envs, self.parts, self.unsaved = algorithm, args, envs, parts, unsaved
        self.eval_envs: RacerVectorEnv | None = None
        self.logger: MetricsLogger | None = None
        self._handlers: dict = {}
        self.stats, self.clock = parts["stats"], Clock()
        self.steps = self._steps_before = 0
        self.best = {"score": -math.inf, "step": 0, "results": [], "laps": []}
        self.first_laps: dict[str, dict] = {}  # by track: the fastest lap of the first evaluation with one
        self.start_results: list[dict] = []  # with --start-from: what the first driver reached
        self.hand_written: dict[str, tuple] = {}  # the reward of its best setting by track, and that setting
        self.metrics: dict[str, float] = {}
        self.saved = True
        self.stopped: int | None = None  # the signal that stops all processes
        self._signal: int | None = None  # the signal that this process has received
        self.seconds_before, self._began = 0.0, time.perf_counter()

    # -- the beginning -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        try:
            self._begin()
        except BaseException:
            self._close()
            raise
        return self

    def _begin(self) -> None:
        args, note = self.args, ""
        self._difference = broadcast_from_rank0(self._difference_from_engine)
        if args.resume is not None:
            self._restore(broadcast_from_rank0(self._load_resumed))
            self.folder, note = broadcast_from_rank0(resumed_folder, args.resume, self.steps)
        else:
            if args.start_from is not None:
                self._load_networks(broadcast_from_rank0(load_checkpoint, args.start_from, self.algorithm, "best.pt"))
            self.folder = broadcast_from_rank0(make_run_folder, self.algorithm, args)
        for part in self.parts.values():
            if isinstance(part, torch.nn.Module):  # machines of different kinds may round differently
                part.load_state_dict(broadcast_from_rank0(part.state_dict))
        if not self._difference:  # each process drives its share of the tracks
            own = run_on_all(hand_written_settings, args.tracks[rank() :: world_size()], args.config_path)
            self.hand_written = {track: reward for part in all_gather(own) for track, reward in part.items()}
        broadcast_from_rank0(self._open, note)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread: somebody else handles signals
                self._handlers[number] = signal.signal(number, self._on_signal)
        if args.start_from is not None and args.resume is None:
            self.evaluate(self.parts["agent"].drive)
            self.start_results = self.best["results"]
            if rank() == 0:
                self.logger.dump(0)

    def _difference_from_engine(self) -> str:
        """Why evaluations have to run in the real game; "" if the embedded engine drives like it."""
        args, url = self.args, self.args.urls[:1]
        for attempt in range(args.bridge_retries + 1):
            try:
                found = (difference_from_engine(track, args.config_path, url[0]) for track in args.tracks if url)
                return next((text for text in found if text), "")
            except BridgeError:
                if attempt == args.bridge_retries:
                    raise
                time.sleep(retry_pause_s(attempt))

    def _load_networks(self, checkpoint: dict) -> None:
        """--start-from: the networks, and the scale of rewards that their critics have learned."""
        agent = self.parts["agent"]
        for name in network_settings(type(agent)):
            old = checkpoint["args"].get(name)
            new = getattr(self.args, name, old)
            if old is not None and old != new:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{flag} is {new}, but the networks of --start-from have {old}, and that cannot change"
                )
        with must_fit():
            agent.load_state_dict(checkpoint["parts"]["agent"])
            scaler = self.parts["scaler"]
            scaler.merge_states([like(state, scaler.get_state()) for state in checkpoint["parts"]["scaler"]])

    def _load_resumed(self) -> dict:
        """The checkpoint to resume. ValueError if the settings are not those that the run began with."""
        args = self.args
        checkpoint = load_checkpoint(args.resume, self.algorithm)
        before = plain_settings(type(args)()) | checkpoint["args"]
        now = plain_settings(args)
        for field in dataclasses.fields(args):
            old, new = before.get(field.name), now.get(field.name)
            if new != old and field.name not in MAY_CHANGE:
                flag = f"--{field.name.replace('_', '-')}"
                raise ValueError(f"{flag} is {new}, but the run to resume has {old}, and that cannot change")
        if checkpoint["config"] != self.envs.config:
            raise ValueError(
                f"the rewards or limits in {args.config_path} are not those that the run began with "
                f"({json.dumps(checkpoint['config'])}); restore them, or start a new run"
            )
        before, now = checkpoint.get("reward_terms", []), sorted(REWARD_TERMS)
        if before != now:
            raise ValueError(f"the run has the reward terms {before} (REWARD_TERMS), this program has {now}")
        return checkpoint

    def _restore(self, checkpoint: dict) -> None:
        notes = []
        with must_fit():
            saved, processes = checkpoint["parts"], len(checkpoint["parts"]["stats"])
            same_processes = processes == world_size()
            cars_continue = same_processes and saved["envs"][0] and self.envs.get_state()  # the real game has no state
            for name, part in self.parts.items():
                if name not in saved:
                    notes.append(f"the checkpoint has no {name}: it starts empty, and the run is not bit-exact")
                elif hasattr(part, "load_state_dict"):
                    part.load_state_dict(saved[name])
                elif cars_continue or (same_processes and part is not self.envs):
                    part.set_state(like(saved[name][rank()], part.get_state()))
                elif hasattr(part, "merge_states"):
                    part.merge_states([like(state, part.get_state()) for state in saved[name]])
            run = checkpoint["run"]
            self.steps, self.seconds_before, self.best = run["steps"], run["seconds_before"], run["best"]
            self.start_results, self.first_laps = run.get("start_results", []), run.get("first_laps", {})
            for lap in (*self.best["laps"], *self.first_laps.values()):
                lap["trajectory"] = lap["trajectory"].numpy()
        if not same_processes:
            change = f"{world_size()} instead of {processes} processes"
            notes.append(f"resuming with {change}: all cars begin new episodes, and the run is not bit-exact")
        elif not cars_continue:
            notes.append("all cars begin new episodes, since the state of the real game cannot be saved")
        for text in notes:
            broadcast_from_rank0(print_safely, text)
        if not cars_continue:
            run_on_all(self.envs.reset, seed=self.args.seed + self.steps)
            for part in self.parts.values():
                if hasattr(part, "on_reset"):
                    part.on_reset()

    def _open(self, note: str) -> None:
        """In process 0: what evaluates, logs and shows."""
        args, difference, url = self.args, self._difference, self.args.urls[:1]
        self.eval_envs = RacerVectorEnv(
            len(args.tracks), args.tracks, args.config_path, url if difference else None,
            render_mode=None if difference else "rgb_array", retries=args.bridge_retries,  # the engine draws
        )  # fmt: skip
        self.logger = MetricsLogger(self.folder, self.steps if args.resume else None, tensorboard=args.tensorboard)
        made_by = provenance()
        settings = {"command": shlex.join(made_by["command"]), "commit": made_by["commit"], **plain_settings(args)}
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        self.logger.text("hyperparameters", "\n".join(["| | |", "|-|-|", *rows]))
        self.terminal = ProgressLine(args.total_timesteps, self.steps)
        names = [track_name(track) for track in args.tracks]
        text = f"{self.folder}: {args.num_envs} cars on "
        text += ", ".join(names) if len(names) <= MANY_TRACKS else f"{len(names)} tracks"
        text += f" in the game at {', '.join(args.urls)}" if url else ""
        text += f", {world_size()} processes" if world_size() > 1 else ""
        if url:
            text += "; evaluated " + (f"in the game, since {difference}" if difference else "on the embedded engine")
        text += f", resuming from step {self.steps:,}" if args.resume else ""
        self.terminal.print(text + note)

    def _on_signal(self, number, _frame) -> None:
        if self._signal == number and world_size() == 1:
            raise KeyboardInterrupt
        if self._signal is None and rank() == 0:
            warn("\nstopping: finishing this iteration, then saving")
        self._signal = self._signal or number
        for envs in (self.envs, self.eval_envs):
            if envs is not None:
                envs.retries = 0  # do not wait for a bridge that is away

    # -- what the training loop asks for -------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.steps >= self.args.total_timesteps

    @property
    def done(self) -> bool:
        """Finished, or stopped by a signal."""
        return self.finished or self.stopped is not None

    @property
    def progress(self) -> float:
        """The share of the run that is done, from 0 to 1."""
        return min(self.steps / self.args.total_timesteps, 1.0)

    @property
    def seconds(self) -> float:
        """How long the run has taken, all sessions together."""
        return self.seconds_before + time.perf_counter() - self._began

    def due(self, every: int) -> bool:
        """Whether the last iteration passed a multiple of `every` steps, or was the last."""
        return self.finished or self.steps // every > self._steps_before // every

    def advance(self, steps: int, metrics: dict[str, float]) -> None:
        """After an iteration: count its steps and take its metrics, in all processes."""
        self.check(metrics)
        self._steps_before, self.steps, self.metrics = self.steps, self.steps + steps, metrics
        rollouts = gather_on_rank0(self.stats.take())
        if rank() == 0:
            self.stats.log(self.logger, rollouts)

    def check(self, metrics: dict[str, float]) -> None:
        """Training that has diverged ends here, before it reaches a checkpoint or the cars."""
        wrong = [f"{name} has become {value}" for name, value in metrics.items() if not math.isfinite(value)]
        for name, part in self.parts.items():
            if isinstance(part, torch.nn.Module):
                weights = torch.nn.utils.parameters_to_vector(part.parameters())
                wrong += [] if weights.isfinite().all() else [f"weights of the {name} have become infinite or NaN"]
        if wrong:
            raise FloatingPointError(f"{wrong[0]} after step {self.steps:,}")

    def evaluate(self, drive: Callable) -> None:
        """A deterministic episode per track from the grid. The best driver so far is saved as best.pt."""
        with self.clock("evaluation"):
            better = broadcast_from_rank0(self._evaluate, drive)
        if better is not None:
            before, self.best = self.best, better
            if not self.save("best.pt"):
                self.best = before
            elif rank() == 0:
                draw_best(self)

    def _evaluate(self, drive: Callable) -> dict | None:
        episodes = evaluate(drive, self.eval_envs, self.args.tracks, complete=self.finished)
        results, reward = self.summarize(episodes), score(episodes)
        for name, value in eval_metrics(results).items():
            self.logger.record(name, value)
        for line in lines_of(results):
            self.terminal.print(f"{self.steps:>11,} steps  {self.seconds:5.1f} s  {line}")
        laps = [lap for episode in episodes[:MANY_TRACKS] if (lap := fastest_lap(episode))]
        for lap in laps:
            self.first_laps.setdefault(lap["track_id"], {"step": self.steps, **lap})
        if reward <= self.best["score"]:
            return None
        extrapolated = any(episode.extrapolated for episode in episodes)
        return {
            "score": reward, "step": self.steps, "results": results, "laps": laps, "extrapolated": extrapolated,
        }  # fmt: skip

    def summarize(self, episodes) -> list[dict]:
        return [summarize([e], self.eval_envs.config, self.hand_written.get(e.track, [None])[0]) for e in episodes]

    def log(self) -> None:
        """Write a row of metrics, and let every process know whether one of them received a signal."""
        faults = self.envs.bridge_faults + (self.eval_envs.bridge_faults if self.eval_envs else 0)
        everyone = all_gather({"metrics": self.metrics, "signal": self._signal, "faults": faults})
        self.stopped = next((process["signal"] for process in everyone if process["signal"]), None)
        if rank() > 0:
            return
        with self.clock("logging"):
            for name in self.metrics:
                self.logger.record(name, np.mean([process["metrics"][name] for process in everyone]))
            if self.args.urls:
                self.logger.record("racer/bridge_faults", sum(process["faults"] for process in everyone))
            self.logger.record("time/fps", self.steps / self.seconds)
            for name, seconds in self.clock.seconds.items():
                self.logger.record(f"time/{name}_sec", seconds)
            metrics = self.logger.dump(self.steps)
            status = "no lap in training yet" if math.isinf(self.stats.best_lap_sec) else ""
            if not status and len(self.args.tracks) == 1:
                status = f"best lap in training {self.stats.best_lap_sec:.2f} s  "
            if "racer/completion_rate" in metrics:
                status += f"  {metrics['racer/completion_rate']:4.0%} of episodes with a lap"
            self.terminal.show(self.steps, status)

    def save(self, name: str = "checkpoint.pt") -> bool:
        """Save everything as one file. -> whether it was written"""
        with self.clock("checkpoints"):
            parts = {
                key: part.state_dict() if hasattr(part, "state_dict") else gather_on_rank0(part.get_state())
                for key, part in self.parts.items()
                if key not in self.unsaved
            }
            run = {
                "steps": self.steps,
                "seconds_before": self.seconds,
                "best": self.best,
                "first_laps": self.first_laps,
            }
            checkpoint = {
                "algorithm": self.algorithm,
                "format": CHECKPOINT_FORMAT,
                "args": plain_settings(self.args),
                "config": self.envs.config,
                "reward_terms": sorted(REWARD_TERMS),
                "parts": parts,
                "run": {**run, "start_results": self.start_results},
            }
            if rank() == 0 and name == "checkpoint.pt":
                remember("saved", str(self.folder.resolve()))
            self.saved = broadcast_from_rank0(write_checkpoint, self.folder / name, checkpoint)
        return self.saved

    # -- the end -------------------------------------------------------------------------------------------------------

    def __exit__(self, _kind, error, _traceback) -> None:
        try:
            if error is not None:
                self._explain(error)
        finally:
            self._close()

    def _close(self) -> None:
        for closable in (self.envs, self.eval_envs, self.logger):
            if closable is not None:
                closable.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _explain(self, error) -> None:
        """Raise an error that ends the run again, with what is lost and how to continue. A fault of the bridge saves first."""
        cause = error.error if isinstance(error, SharedError) else error
        if isinstance(cause, BridgeError):
            if not isinstance(error, SharedError):  # the others wait in an all_gather for what was driven
                with contextlib.suppress(BridgeError, SharedError):
                    all_gather(error)
            if self.save():
                saved = f"Saved; the run resumes at step {self.steps:,}, and what was driven since then is not counted"
                cause = BridgeError(f"{cause}\n{saved}. {how_to_resume(self.folder)}")
            raise (SharedError(cause) if world_size() > 1 else cause) from error
        if isinstance(error, ProcessError):
            raise ProcessError(f"{error}. The run has ended. {how_to_resume(self.folder)}") from error
        if isinstance(error, FloatingPointError):
            advice = "Training diverged; start again with a smaller --learning-rate"
            raise FloatingPointError(f"{error}. {advice}") from error

    def report(self) -> dict:
        """The summary, in the terminal and as summary.json. -> the summary as a dict"""
        if rank() > 0:
            reached = {"run_folder": str(self.folder), "steps": self.steps, "finished": self.finished}
            return {**reached, "signal": self.stopped, "saved": self.saved}
        self._evaluate_best()
        if self.finished:
            draw_best(self, finished=True)
        return report(self)

    def _evaluate_best(self) -> None:
        """The results of best.pt from complete episodes, as --evaluate drives them; in training some were extrapolated."""
        if not self.best.get("extrapolated"):
            return
        best = copy.deepcopy(self.parts["agent"])
        with self.clock("evaluation"), contextlib.suppress(BridgeError, ValueError):  # no bridge, no best.pt
            saved = load_checkpoint(self.folder / "best.pt", self.algorithm)
            if saved["run"]["steps"] != self.best["step"]:  # an older checkpoint was resumed
                return
            best.load_state_dict(saved["parts"]["agent"])
            self.best["results"] = self.summarize(evaluate(best.drive, self.eval_envs, self.args.tracks))
