"""One training run, new or resumed: what happens around learning. `Run` is all of it that a trainer sees."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import textwrap
import time
import warnings

import numpy as np
import torch

from callbacks_lite import MANY_TRACKS, MetricsLogger, RaceStats, check_wandb
from racer.game.bridge import BridgeError, GameRefusal, retry_pause_s
from racer.game.checks import UserError
from racer.game.rewards import REWARD_TERMS
from racer.game.tracks import check_game_tracks, pinned_tracks, track_name
from racer.training.checkpoints import (
    CHECKPOINT_FORMAT, args_to_json, check_resumed, flag_of, load_checkpoint, lock_folder, make_run_folder, mismatch_as_error,
    network_settings, provenance, restore_components, resumed_folder, save_components, source_file, to_numpy_like,
    write_checkpoint,
)  # fmt: skip
from racer.training.evaluation import (
    EVAL_TAGS, eval_metrics, evaluate, lines_of, one_thread, score, summarize, why_not_like_engine,
)  # fmt: skip
from racer.training.processes import average_over_processes  # noqa: F401  trainers take the collective functions from here
from racer.training.processes import (
    ProcessError, SharedError, all_gather, broadcast_from_rank0, extend_timeout, gather_on_rank0, process_seed, rank, remember,
    run_on_all, world_size,
)  # fmt: skip
from racer.training.references import best_known_lap, limit_lap
from racer.training.terminal import (
    WIDEST, Clock, ProgressLine, TrainingDiverged, print_safely, quote, resume_command, warn,
)  # fmt: skip
from racer.view.page import race_page
from racer.view.telemetry import LapTrace, Race, save_laps
from racer_env import RacerVectorEnv

FEW_UPDATES, LARGE_UPDATE = 50, 4096  # a run of fewer and larger updates hardly learns


class Run:
    """A training run in this process, or this process's share of it.

        with Run("ppo", args) as run:          # starts the game's bridges; later ends them, closes everything, explains errors
            envs = RacerVectorEnv(run.num_envs, args.tracks, ..., run.bridge_urls, first_car=run.first_car)
            ...
            run.begin(envs, agent=agent, optimizer=optimizer, scaler=scaler, generator=generator)
            while not run.done:                # finished, or stopped by Ctrl+C or SIGTERM
                ...                            # drive and learn; run.stats takes the infos of every step, run.clock the time
                run.step(steps, metrics)
            return run.report()

    `begin` takes the components of a checkpoint (checkpoints.py says what one is; "agent" and "scaler" must be among them). It
    resets the cars and makes the run folder, or restores all as it was saved (--resume). `step` ends an iteration: it stops a run
    that has diverged, counts, evaluates the driver, writes a row of metrics and checkpoints, each when due, and notices signals.
    `report` gives the summary. `num_envs`, `first_car`, `bridge_urls` and `seed` are this process's share.

    Ctrl+C and SIGTERM ask for an orderly end: the iteration is finished and a checkpoint written. In a run of one process, a
    second signal ends it at once.
    """

    def __init__(self, algorithm: str, args):
        self.algorithm, self.args, self.stats, self.clock = algorithm, args, None, Clock()
        self.processes, self.seed = world_size(), process_seed(args.seed)
        self.envs = self.eval_envs = self.logger = self._lock = None
        self._began_driving = False  # in all processes: there is a folder to save in
        self._cleanup = contextlib.ExitStack()
        self.components: dict = {}
        self.unsaved: tuple[str, ...] = ()
        self.steps = self._steps_before = 0
        self.best = {"score": -math.inf, "step": 0, "results": [], "laps": []}
        self.first_laps: dict[str, dict] = {}  # by track: the fastest lap of the first evaluation
        self.latest_laps: list[dict] = []  # and those of the latest one
        self.start_results: list[dict] = []  # with --start-from: what the first driver reached
        self.metrics: dict[str, float] = {}
        self.saved = True
        self.stopped: int | None = None  # the signal that stops all processes
        self._signal: int | None = None  # the signal that this process has received
        self._handlers: dict = {}
        self.seconds_before, self._began = 0.0, time.perf_counter()

    # -- the beginning -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        args, size, place = self.args, self.processes, rank()
        self.num_envs, tracks = args.num_envs // size, args.tracks
        self.first_car = place * self.num_envs
        if args.num_envs % size or self.num_envs < len(tracks):
            needed = f"a multiple of the number of processes ({size}), and give each a car on every track ({len(tracks)})"
            raise UserError(f"--num-envs is {args.num_envs}; it must be {needed}")
        if len(tracks) > 1 and len({track_name(track) for track in tracks}) < len(tracks):
            raise UserError(f"--track-id is {' '.join(tracks)}; the tracks must have different names")
        if args.game or args.bridge_url:
            check_game_tracks(tracks)  # before bridges are started
        if len(tracks) > MANY_TRACKS:
            broadcast_from_rank0(print_safely, f"building the tables of {len(tracks)} tracks, about 0.2 s each")
        if args.wandb:
            broadcast_from_rank0(check_wandb, args.tensorboard)
        self._cleanup.enter_context(pinned_tracks(tracks))  # whatever happens to their files
        extend_timeout(args.bridge_retries)  # starting bridges takes a while, too
        self._cleanup.enter_context(one_thread())
        try:
            self.urls = broadcast_from_rank0(self._start_bridges)
        except BaseException:
            self._close()
            raise
        own = self.urls[place::size] or self.urls[place % max(len(self.urls), 1) :][:1]
        self.bridge_urls = list(own) or None
        return self

    def _start_bridges(self) -> tuple[str, ...]:
        if not self.args.game:
            return self.args.bridge_url
        from racer.game.launcher import end_bridges, start_bridges

        self._cleanup.callback(end_bridges)
        return start_bridges(self.args.game, min(self.args.bridges, self.args.num_envs))

    def begin(self, envs: RacerVectorEnv, unsaved: tuple[str, ...] = (), **components) -> None:
        """Start, or continue where the checkpoint of --resume was saved. Components named in `unsaved` are restored if a
        checkpoint has them, but not saved."""
        args = self.args
        self.envs, self.unsaved = envs, unsaved
        self.stats = RaceStats(envs.track_ids, envs.config["episode"]["maxSteps"])
        self.components = {**components, "envs": envs, "stats": self.stats}
        self.agent, self.scaler = components["agent"], components["scaler"]
        self._trainer = source_file(type(self.agent))
        all_gather(None)  # the first thing that all processes do together: an error in one, so far, is known to all
        self._difference = broadcast_from_rank0(self._why_not_like_engine)
        if args.resume is not None:
            self.folder = broadcast_from_rank0(resumed_folder, args.resume)
            broadcast_from_rank0(self._lock_folder)
            self._restore(broadcast_from_rank0(load_checkpoint, args.resume, self.algorithm))
        else:
            run_on_all(envs.reset, seed=args.seed)
            if args.start_from is not None:
                self._start_from(broadcast_from_rank0(load_checkpoint, args.start_from, self.algorithm, "best.pt"))
            self.folder = broadcast_from_rank0(make_run_folder, self.algorithm, args, self._trainer)
            broadcast_from_rank0(self._lock_folder)
        for part in self.components.values():
            if isinstance(part, torch.nn.Module):  # machines of different kinds may round differently
                part.load_state_dict(broadcast_from_rank0(part.state_dict))
        broadcast_from_rank0(self._open)
        self._began_driving = True
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread: somebody else handles signals
                self._handlers[number] = signal.signal(number, self._on_signal)
        if args.start_from is not None and args.resume is None:
            self._evaluate()
            self.start_results = self.best["results"]
            if rank() == 0:
                self.logger.dump(0)

    def _why_not_like_engine(self) -> str:
        """Why evaluations have to run in the real game; "" if the embedded engine drives like it."""
        args = self.args
        for attempt in range(args.bridge_retries + 1):
            try:
                found = (why_not_like_engine(track, args.config_path, self.urls[0]) for track in args.tracks if self.urls)
                return next((text for text in found if text), "")
            except BridgeError as error:
                if attempt == args.bridge_retries or isinstance(error, GameRefusal):
                    raise
                time.sleep(retry_pause_s(attempt))

    def _lock_folder(self) -> None:
        self._lock = lock_folder(self.folder)

    def _start_from(self, checkpoint: dict) -> None:
        """--start-from: the networks, and the scale of rewards that their critics have learned."""
        for name in network_settings(type(self.agent)):
            old = checkpoint["args"].get(name)
            if old is not None and (new := getattr(self.args, name, old)) != old:
                raise UserError(
                    f"{flag_of(name)} is {new}, but the networks of --start-from have {old}, and that cannot change"
                )
        with mismatch_as_error(checkpoint):
            self.agent.load_state_dict(checkpoint["parts"]["agent"])
            own = self.scaler.get_state()
            self.scaler.merge_states([to_numpy_like(state, own) for state in checkpoint["parts"]["scaler"]])

    def _restore(self, checkpoint: dict) -> None:
        check_resumed(checkpoint, self.args, self.envs.config)
        run, now = checkpoint["run"], self._trainer
        if now and checkpoint.get("trainer", now.name) != now.name:
            text = f"{checkpoint['trainer']} trained this run so far; {now.name} continues it, with its own networks and losses"
            broadcast_from_rank0(print_safely, text)
            broadcast_from_rank0(shutil.copy, now, self.folder / now.name)
        with mismatch_as_error(checkpoint):
            cars_continue, notes = restore_components(self.components, checkpoint["parts"])
            self.steps, self.seconds_before, self.best = run["steps"], run["seconds_before"], run["best"]
        if not cars_continue:
            run_on_all(self.envs.reset, seed=self.args.seed + self.steps)
            for part in self.components.values():
                if hasattr(part, "on_reset"):
                    part.on_reset()
        for text in notes:
            broadcast_from_rank0(print_safely, text)
        self.start_results, self.first_laps = run.get("start_results", []), run.get("first_laps", {})
        for result in (*self.best["results"], *self.start_results):  # of a version that had fewer numbers
            result |= dict.fromkeys((*EVAL_TAGS.values(), "cutting")) | result
        moved = dict(zip(checkpoint["args"].get("track_id", ()), self.args.tracks, strict=False))
        for lap in (*self.best["laps"], *self.first_laps.values()):
            lap["trajectory"] = lap["trajectory"].numpy()
            lap["track_id"] = moved.get(lap["track_id"], lap["track_id"])
        self.first_laps = {lap["track_id"]: lap for lap in self.first_laps.values()}

    def _open(self) -> None:
        """In process 0: what evaluates, logs and shows."""
        args, url = self.args, self.urls[:1]
        self.eval_envs = RacerVectorEnv(
            len(args.tracks), args.tracks, args.config_path, list(url) if self._difference else None,
            render_mode=None if self._difference else "rgb_array", retries=args.bridge_retries,  # the engine draws
        )  # fmt: skip
        made_by, settings = provenance(), args_to_json(args)
        about = {"command": shlex.join(made_by["command"]), "commit": made_by["commit"], **settings}
        self.logger = MetricsLogger(self.folder, self.steps if args.resume else None, args.tensorboard, args.wandb, about)
        self.logger.text("hyperparameters", "\n".join(["| | |", "|-|-|", *(f"| {k} | {v} |" for k, v in about.items())]))
        self.terminal = ProgressLine(args.total_timesteps, self.steps)
        names = [track_name(track) for track in args.tracks]
        text = f"{self.folder}: {args.num_envs} cars on "
        text += ", ".join(names) if len(names) <= MANY_TRACKS else f"{len(names)} tracks"
        text += f", {self.processes} processes" if self.processes > 1 else ""
        text += f", resuming from step {self.steps:,}" if args.resume else ""
        self.terminal.print(text)
        if url:
            where = f"in the game, since {self._difference}" if self._difference else "on the embedded engine"
            bridges = f"{url[0]}" + (f" and {len(self.urls) - 1} more" if len(self.urls) > 1 else "")
            self.terminal.print(f"driving in the game at {bridges}; evaluated {where}")
        updates, size = args.total_timesteps // args.steps_per_update, args.steps_per_update
        if updates < FEW_UPDATES and size > LARGE_UPDATE and not args.start_from and not args.resume:
            few = f"only {updates} updates, of {size:,} steps each: few to learn from, and results will vary"
            self.terminal.print(f"{few}.\nRaise --total-timesteps, or lower --num-envs (PPO: or --rollout-steps)")

    def _on_signal(self, number, _frame) -> None:
        if self._signal is not None and self.processes == 1:
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
        """The fraction of the run that is done, from 0 to 1."""
        return min(self.steps / self.args.total_timesteps, 1.0)

    @property
    def seconds(self) -> float:
        """How long the run has taken, all sessions together."""
        return self.seconds_before + time.perf_counter() - self._began

    def check(self, metrics: dict[str, float]) -> None:
        """Training that has diverged ends here, before it reaches a checkpoint or the cars."""
        wrong = [f"{name} has become {value}" for name, value in metrics.items() if not math.isfinite(value)]
        for name, part in self.components.items():
            if isinstance(part, torch.nn.Module):
                weights = torch.nn.utils.parameters_to_vector(part.parameters())
                wrong += [] if weights.isfinite().all() else [f"weights of the {name} have become infinite or NaN"]
        if wrong:
            advice = "Training diverged; start again with a smaller --learning-rate"
            raise TrainingDiverged(f"{wrong[0]} after step {self.steps:,}. {advice}")

    def step(self, steps: int, metrics: dict[str, float]) -> None:
        """End an iteration that took so many steps of all cars together."""
        self.check(metrics)
        self._steps_before, self.steps, self.metrics = self.steps, self.steps + steps, metrics
        rollouts = gather_on_rank0(self.stats.take())
        if rank() == 0:
            self.stats.log(self.logger, rollouts)
        if self._due(self.args.eval_every):
            self._evaluate()
        self._log()
        if self._due(self.args.checkpoint_every) or self.stopped:
            self._save("checkpoint.pt")

    def _due(self, every: int) -> bool:
        """Whether the last iteration passed a multiple of `every` steps, or was the last."""
        return self.finished or self.steps // every > self._steps_before // every

    def _evaluate(self) -> None:
        """A deterministic episode per track from the grid. The best driver so far is saved as best.pt."""
        with self.clock("evaluation"):
            better, self.latest_laps = broadcast_from_rank0(self._drive_episodes)
        if better:
            before, self.best = self.best, better
            if not self._save("best.pt"):
                self.best = before
        if rank() == 0 and self.args.pictures:
            self._show(improved=bool(better))

    def _drive_episodes(self) -> tuple[dict | None, list[dict]]:
        """-> what to say of the driver if it is the best so far, and its fastest laps"""
        episodes = evaluate(self.agent.drive, self.eval_envs, self.args.tracks)
        results, reward = [summarize([episode], self.eval_envs.config) for episode in episodes], score(episodes)
        for name, value in eval_metrics(results).items():
            self.logger.record(name, value)
        for line in lines_of(results):
            self.terminal.print(f"{self.steps:>11,} {self.seconds:6.1f} s  {line}")
        laps = [episode.fastest() for episode in episodes[:MANY_TRACKS] if episode.trajectory is not None]
        for lap in laps:
            self.first_laps.setdefault(lap["track_id"], {"step": self.steps, **lap})
        if reward <= self.best["score"]:
            return None, laps
        return {"score": reward, "step": self.steps, "results": results, "laps": laps}, laps

    def _show(self, improved: bool = False, finished: bool = False) -> None:
        """race.html, with the best driver so far; its picture, if it is new; at the end a replay and telemetry, too.

        Errors only warn: no Pillow, a full disk.
        """
        try:
            with self.clock("pictures"):
                latest = {lap["track_id"]: lap for lap in self.latest_laps}
                races = [self._race(lap, latest.get(lap["track_id"])) for lap in self.best["laps"]]
                for race in races if finished else ():
                    save_laps(self.folder / f"lap-{track_name(race.track_id)}.csv", race.laps[:1])
                if self.args.pictures:
                    page = self.folder / "race.html.tmp"
                    page.write_text(race_page(self.folder.name, races), encoding="utf-8")
                    os.replace(page, self.folder / "race.html")  # somebody may be looking at it
                    if improved or finished:
                        self._draw(races, finished)
        except Exception as error:
            warnings.warn(f"no picture of the best lap ({error!r}); training continues", stacklevel=2)

    def _draw(self, races: list[Race], replay: bool) -> None:
        from racer.view.pictures import draw_laps, save_picture  # needs Pillow

        for race in races:
            name = track_name(race.track_id)
            tag, suffix = ("", "") if len(self.args.tracks) == 1 else (f"{name}/", f"-{name}")
            thin = [] if race.laps[1].name == "limit" else [limit_lap(race.track_id)]
            picture = draw_laps([*race.laps[:2], *thin], replay=replay)
            if replay:
                self.logger.animation(f"eval/{tag}replay", picture, self.steps)
                (self.folder / f"replay{suffix}.gif").write_bytes(picture)
            else:
                self.logger.image(f"eval/{tag}racing_line", picture, self.steps)
                save_picture(self.folder / f"racing_line{suffix}.png", picture)

    def _race(self, best: dict, latest: dict | None) -> Race:
        """The best driver so far, the best lap known or the limit, and the run's first and latest evaluations."""
        track, step, first = best["track_id"], self.best["step"], self.first_laps[best["track_id"]]
        laps = [LapTrace.of("this run", **best, note=f"step {step:,}"), best_known_lap(track) or limit_lap(track)]
        if first["step"] < step:
            laps.append(LapTrace.of("first evaluation", track, first["trajectory"], f"step {first['step']:,}"))
        if latest and self.steps > step:
            laps.append(LapTrace.of("latest evaluation", **latest, note=f"step {self.steps:,}"))
        return Race(laps)

    def _log(self) -> None:
        """Write a row of metrics, and let every process know whether one of them received a signal."""
        faults = self.envs.bridge_faults + (self.eval_envs.bridge_faults if self.eval_envs else 0)
        everyone = all_gather({"metrics": self.metrics, "signal": self._signal, "faults": faults})
        self.stopped = next((process["signal"] for process in everyone if process["signal"]), None)
        if rank() > 0:
            return
        with self.clock("logging"):
            for name in self.metrics:
                self.logger.record(name, np.mean([process["metrics"][name] for process in everyone]))
            if self.urls:
                self.logger.record("racer/bridge_faults", sum(process["faults"] for process in everyone))
            self.logger.record("time/fps", self.steps / self.seconds)
            for name, seconds in self.clock.seconds.items():
                self.logger.record(f"time/{name}_sec", seconds)
            metrics = self.logger.dump(self.steps)
            status = "no lap yet" if math.isinf(self.stats.best_lap_sec) else ""
            if not status and len(self.args.tracks) == 1:
                status = f"best lap {self.stats.best_lap_sec:.2f} s"
            if "racer/completion_rate" in metrics:
                status += f", laps in {metrics['racer/completion_rate']:.0%} of episodes"
            self.terminal.show(self.steps, status.removeprefix(", "))

    def _save(self, name: str = "checkpoint.pt") -> bool:
        """Save everything as one file. -> whether it was written"""
        with self.clock("checkpoints"):
            run = {"steps": self.steps, "seconds_before": self.seconds, "best": self.best}
            checkpoint = {
                "algorithm": self.algorithm,
                "trainer": self._trainer.name if self._trainer else f"{self.algorithm}_racer.py",
                "format": CHECKPOINT_FORMAT,
                "args": args_to_json(self.args),
                "config": self.envs.config,
                "reward_terms": sorted(REWARD_TERMS),
                "parts": save_components(self.components, self.unsaved),
                "run": {**run, "first_laps": self.first_laps, "start_results": self.start_results},
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
        for number, handler in self._handlers.items():
            self._cleanup.callback(signal.signal, number, handler)
        for closable in (self._lock, self.logger, self.eval_envs, self.envs):  # from the last one on
            if closable is not None:
                self._cleanup.callback(closable.close)
        self._cleanup.close()

    def _explain(self, error) -> None:
        """Raise an error that ends the run again, with what is lost and how to continue. A fault of the bridge saves first."""
        if self.envs is None and isinstance(error, (BridgeError, UserError)):
            all_gather(error)  # the others wait in the all_gather at the start of begin()
        cause = error.error if isinstance(error, SharedError) else error
        if isinstance(cause, BridgeError) and self._began_driving:
            if not isinstance(error, SharedError):  # the others wait in an all_gather for what was driven
                with contextlib.suppress(BridgeError, SharedError):
                    all_gather(error)
            if self._save():
                saved = f"Saved; the run resumes at step {self.steps:,}, and what was driven since then is not counted"
                cause = BridgeError(f"{cause}\n{saved}. {self._how_to_resume()}")
            raise (SharedError(cause) if self.processes > 1 else cause) from error
        if isinstance(error, ProcessError) and self._began_driving:
            raise ProcessError(f"{error}. The run has ended. {self._how_to_resume()}") from error

    def _how_to_resume(self) -> str:
        if not (self.folder / "checkpoint.pt").exists():
            return f"There is no checkpoint in {self.folder}"
        return f"Resume from the last checkpoint with: {resume_command(self.folder)}"

    def report(self) -> dict:
        """Print the summary and write it as summary.json. -> the summary as a dict"""
        reached = {"run_folder": str(self.folder), "steps": self.steps, "finished": self.finished}
        reached |= {"signal": self.stopped, "saved": self.saved}
        if rank() > 0:
            return reached
        session, driven = self.seconds - self.seconds_before, self.steps - self.terminal.first_step
        if not driven:  # what an earlier session wrote stays
            more = "--total-timesteps extends it"
            print_safely(f"\nnothing to do: the run is at {self.steps:,} of {self.args.total_timesteps:,} steps; {more}")
            return {**reached, "results": self.best["results"], "best": self.best}
        if self.finished:
            self._show(finished=True)
        clock = self.clock.seconds
        rate = driven / max(session - clock.get("evaluation", 0.0), 1e-9)
        here = f", {session:.1f} s of them in this session" if self.seconds_before else ""
        how = "done" if self.finished else "stopped"
        print_safely("\n" if self.terminal.live else "")
        print_safely(f"{how}: {self.steps:,} steps in {self.seconds:.1f} s{here}; {rate:,.0f} steps/s without evaluation")
        clock["other"] = max(session - sum(clock.values()), 0.0)
        times = sorted(clock.items(), key=lambda item: -item[1])
        print_safely("time      " + ", ".join(f"{name} {s:.1f} s" for name, s in times[:5] if s >= 0.05))
        self._print_results("start", self.start_results)
        worse = ": training did not improve on the start" if self.start_results and not self.best["step"] else ""
        self._print_results("best", self.best["results"], f"at step {self.best['step']:,}{worse}")
        self._print_what_next()
        if not self.saved:
            warn(f"\nThe end of this run could not be written. Free disk space. {self._how_to_resume()}")
        summary = {
            **reached,
            "seconds": self.seconds,
            "steps_per_sec": rate,
            "clock": clock,
            "start_results": self.start_results,
            "best_step": self.best["step"],
            "results": self.best["results"],
        }
        with contextlib.suppress(OSError):  # a full disk has been reported
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
        return {**summary, "best": self.best}

    @staticmethod
    def _print_results(label: str, results: list[dict], *more: str) -> None:
        if results:
            print_safely(f"{label:<10}" + f"\n{'':10}".join([*lines_of(results), *more]))

    def _print_what_next(self) -> None:
        folder, files = self.folder, ("best.pt", "checkpoint.pt", "metrics.csv", "racing_line*.png", "replay*.gif", "lap-*.csv")
        if (folder / "race.html").exists():
            print_safely(f"look      {folder / 'race.html'} (in a browser); tensorboard --logdir {quote(folder.parent)}")
        else:
            print_safely(f"look      tensorboard --logdir {quote(folder.parent)}")
        if not self.finished:
            print_safely(f"resume    {resume_command(folder)}")
        if (folder / "best.pt").exists():
            ours = self._trainer is None or self._trainer.name == f"{self.algorithm}_racer.py"
            more = "" if ours else f" --trainer {quote(folder / self._trainer.name)}"
            print_safely(f"evaluate  python -m racer.evaluate {quote(folder)}{more}")
        names = ", ".join(path.name for name in files for path in sorted(folder.glob(name)))
        print_safely(textwrap.fill(f"files     {names}", WIDEST, subsequent_indent=" " * 10, break_on_hyphens=False))
