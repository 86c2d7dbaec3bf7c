"""Trained drivers: loaded from a checkpoint, evaluated, exported into the browser game."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

from racer.game.launcher import GAME_ASSETS
from racer.game.observations import OBS_HIGH, OBS_LOW, OBS_SIZE, obs_moments
from racer.training.checkpoints import load_checkpoint, must_fit, saved_args
from racer.training.evaluation import describe, describe_all, evaluate, hand_written_settings, laps_of, summarize
from racer.training.processes import rank
from racer.training.terminal import print_safely
from racer.view.telemetry import save_laps
from racer_env import RacerVectorEnv


class Driver(torch.nn.Module):
    """What a trainer's Agent is: `forward` maps normalised observations to actions within the game's box.

    Observations are normalised with fixed means and variances. As buffers they are saved and exported with the weights.
    """

    NORM_EPSILON, NORM_CLIP = 1e-6, 4.0

    def __init__(self, hide_arc: bool):
        super().__init__()
        for name, values in zip(("obs_mean", "obs_var"), obs_moments(hide_arc), strict=True):
            self.register_buffer(name, torch.from_numpy(values))

    def normalize(self, obs):
        scaled = (obs - self.obs_mean) * torch.rsqrt(self.obs_var + self.NORM_EPSILON)
        return scaled.clamp(-self.NORM_CLIP, self.NORM_CLIP)

    @torch.inference_mode()
    def drive(self, obs: np.ndarray) -> np.ndarray:
        """Raw observations (N, 14) -> deterministic actions (N, 3)."""
        return self(self.normalize(torch.from_numpy(obs))).numpy()


class TrainedDriver:
    """A driver for code of your own: driver(observations) -> actions, of one car (14,) or of many (N, 14).

    `args` are the settings of its training, `steps` how long that was.
    """

    def __init__(self, agent: Driver, args, steps: int):
        self.agent, self.args, self.steps = agent, args, steps

    def __call__(self, observations) -> np.ndarray:
        observations = np.asarray(observations, np.float32)
        return self.agent.drive(np.atleast_2d(observations)).reshape(*observations.shape[:-1], -1)


def load_driver(path: str | Path) -> TrainedDriver:
    """The driver of a run folder (its best one) or of a checkpoint, of either algorithm."""
    checkpoint = load_checkpoint(path, None, prefer="best.pt")
    trainer = importlib.import_module(f"{checkpoint['algorithm']}_racer")  # the file that trained it knows its networks
    args = saved_args(trainer.Args, checkpoint["args"])
    agent = restore_driver(path, checkpoint["algorithm"], trainer.make_agent(args))
    return TrainedDriver(agent, args, checkpoint["run"]["steps"])


def restore_driver(path: str | Path, algorithm: str, agent: Driver) -> Driver:
    """Load the driver of a checkpoint into `agent`. Only the actor is needed, so the critics may have another shape."""
    parts = load_checkpoint(path, algorithm, prefer="best.pt")["parts"]
    needed = [name for name in agent.state_dict() if name.startswith(("actor.", "obs_"))]
    with must_fit():
        agent.load_state_dict({name: parts["agent"][name] for name in needed}, strict=False)
    return agent


def evaluate_driver(agent: Driver, args, task) -> list[dict]:
    """`--evaluate`: complete episodes of a trained driver, on the tracks of its training unless others are given."""
    if rank() > 0:
        return []
    torch.set_num_threads(1)  # as in training
    for file in (task.json, task.telemetry):
        if file:
            file.open("a").close()  # fail now, not after the drive
    from_grid = args.start == "grid"
    count, tracks, references = task.episodes, args.tracks, {}
    if from_grid and not args.urls:  # deterministic: one episode is like the other, and like that of the training
        count, references = 1, hand_written_settings(tracks, args.config_path)
    print_safely(
        f"{count} {'episode' if count == 1 else 'episodes'} per track, from {'the grid' if from_grid else 'anywhere'}"
    )
    settings = {"bridge_url": args.urls or None, "start": args.start, "retries": args.bridge_retries}
    settings |= {"render_mode": "rgb_array"} if task.telemetry else {}
    with contextlib.closing(RacerVectorEnv(count * len(tracks), tracks, args.config_path, **settings)) as envs:
        episodes = evaluate(agent.drive, envs, tracks, args.seed)
    results = [
        summarize(episodes[i :: len(tracks)], envs.config, references.get(track, [None])[0])
        for i, track in enumerate(tracks)
    ]
    for result in results:
        print_safely(describe(result))
    if len(results) > 1:
        print_safely(describe_all(results))
    if task.telemetry:
        save_laps(task.telemetry, [lap for episode in episodes for lap in laps_of(episode)])
    if task.json:
        task.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    return results


def export_driver(agent: Driver, folder: Path, game: Path | None = None) -> None:
    """`--export`: a driver as the browser game loads it. The game normalises observations with the stats, then runs the model.

    Files that it would replace are kept as *.old; of several exports, those before the first one. game: the game's folder, if
    the driver goes there
    """
    try:
        import onnx  # noqa: F401  torch.onnx needs it
        import onnxruntime
    except ImportError as error:
        raise ValueError("--export needs packages that are not installed: pip install onnx onnxruntime") from error
    folder.mkdir(parents=True, exist_ok=True)
    stats = {"obs_mean": agent.obs_mean.tolist(), "obs_var": agent.obs_var.tolist()}
    stats |= {"clip_obs": agent.NORM_CLIP, "epsilon": agent.NORM_EPSILON}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:  # what is there stays until the new files are checked
        path = Path(temporary) / "model.onnx"
        path.with_name("vecnorm_stats.json").write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
        names = {"input_names": ["obs"], "output_names": ["actions"], "opset_version": 13}
        names["dynamic_axes"] = {"obs": {0: "batch"}, "actions": {0: "batch"}}
        if "dynamo" in inspect.signature(torch.onnx.export).parameters:
            names["dynamo"] = False  # the newer exporter writes a second file, which a browser does not load
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(agent, (torch.zeros(1, OBS_SIZE),), str(path), **names)
        difference = difference_of_export(agent, onnxruntime.InferenceSession(path.read_bytes()), stats)
        if not difference <= 1e-5:
            found = "the exported model gives different actions than the checkpoint"
            raise ValueError(f"{found}: they differ by {difference:g}. Nothing was replaced")
        for new in (path, path.with_name("vecnorm_stats.json")):
            old, kept = folder / new.name, folder / f"{new.name}.old"
            if old.exists() and not kept.exists():
                os.replace(old, kept)
                print_safely(f"{kept}: what was there before")
            os.replace(new, old)
    print_safely(
        f"{folder / path.name}: obs [batch, {OBS_SIZE}], normalised with vecnorm_stats.json -> actions [batch, 3]"
    )
    print_safely(f"checked on 10,000 observations: the actions differ by at most {difference:.1e}")
    if game and folder == game / GAME_ASSETS:
        print_safely(f"race it: cd {game} && pnpm dev")


def difference_of_export(agent: Driver, session, stats: dict) -> float:
    """The largest difference between the actions of a driver and of its export, on observations at random."""
    obs = np.random.default_rng(0).uniform(OBS_LOW, OBS_HIGH, (10_000, OBS_SIZE)).astype(np.float32)
    normalized_obs = (obs - np.float32(stats["obs_mean"])) / np.sqrt(np.float32(stats["obs_var"]) + stats["epsilon"])
    clipped = np.clip(normalized_obs, -stats["clip_obs"], stats["clip_obs"]).astype(np.float32)
    (actions,) = session.run(None, {"obs": clipped})
    return float(np.abs(actions - agent.drive(obs)).max())
