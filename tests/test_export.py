"""The driver in the game: the exported pair acts as the checkpoint does, and drives the same laps."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import both

import ppo_racer
import sac_racer
from racer_env import ACTION_HIGH, ACTION_LOW, OBS_HIGH, OBS_LOW, OBS_SIZE, RacerVectorEnv

MODULES = {"ppo": ppo_racer, "sac": sac_racer}


@pytest.fixture
def checkpoint(tmp_path, request):
    """A run folder with a driver whose statistics are odd, so that leaving them out is noticed."""
    module = MODULES[request.node.callspec.params["name"]]
    few = (
        {"rollout_steps": 64, "minibatch_size": 64}
        if module is ppo_racer
        else {"log_every": 500, "learning_starts": 100}
    )
    args = module.Args(
        num_envs=8, total_timesteps=1000, norm_steps=600, run_dir=tmp_path, run_name="run", tensorboard=False, **few
    )
    return Path(module.train(args)["run_folder"])


def model_of(folder: Path):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    stats = json.loads((folder / "vecnorm_stats.json").read_text())

    def drive(obs):
        """As the game's own loader does it, in double precision."""
        scaled = (obs - np.array(stats["obs_mean"])) / np.sqrt(np.array(stats["obs_var"]) + stats["epsilon"])
        scaled = np.clip(scaled, -stats["clip_obs"], stats["clip_obs"])
        return session.run(["actions"], {"obs": scaled.astype(np.float32)})[0]

    return drive, session, stats


@both
def test_the_exported_pair_acts_as_the_checkpoint_does(checkpoint, tmp_path, name, capsys):
    pytest.importorskip("onnx")
    module = MODULES[name]
    module.export_driver(module.Args(export=tmp_path / "driver", checkpoint=checkpoint))
    assert "the actions differ by" in capsys.readouterr().out
    drive, session, stats = model_of(tmp_path / "driver")
    assert set(stats) == {"obs_mean", "obs_var", "clip_obs", "epsilon"} and len(stats["obs_mean"]) == OBS_SIZE
    assert not np.allclose(stats["obs_mean"], module.OBS_MEAN, atol=1e-3), "these were gathered"
    assert [(i.name, i.shape[1]) for i in (*session.get_inputs(), *session.get_outputs())] == [
        ("obs", 14),
        ("actions", 3),
    ]
    obs = np.random.default_rng(1).uniform(OBS_LOW, OBS_HIGH, (10_000, OBS_SIZE)).astype(np.float32)
    actions = drive(obs)
    agent = module.restore_agent(module.load_checkpoint(checkpoint, prefer="best.pt"), checkpoint)
    np.testing.assert_allclose(actions, agent.driver()(obs), atol=1e-5)
    assert (actions >= ACTION_LOW).all() and (actions <= ACTION_HIGH).all() and actions.std() > 0.001
    assert np.abs((obs - stats["obs_mean"]) / np.sqrt(np.array(stats["obs_var"]) + 1e-6)).max() < stats["clip_obs"]


@pytest.mark.slow
@both
def test_the_exported_pair_drives_the_same_laps(tmp_path, name):
    pytest.importorskip("onnx")
    module = MODULES[name]
    folder = Path(module.train(module.Args(total_timesteps=400_000, run_dir=tmp_path, tensorboard=False))["run_folder"])
    module.export_driver(module.Args(export=tmp_path / "driver", checkpoint=folder))
    agent = module.restore_agent(module.load_checkpoint(folder, prefer="best.pt"), folder)
    envs = RacerVectorEnv(1)
    (episode,), _ = module.evaluate(agent, envs, ["track-01"])

    class Exported:
        def driver(self):
            return model_of(tmp_path / "driver")[0]

    (exported,), _ = module.evaluate(Exported(), envs, ["track-01"])
    assert len(episode.lap_ticks) >= 4 and exported.lap_ticks == episode.lap_ticks


@both
def test_what_export_lacks_is_said(tmp_path, name, monkeypatch):
    module = MODULES[name]
    for alone in ({"export": tmp_path}, {"checkpoint": tmp_path}):
        with pytest.raises(ValueError, match="--export DIR and --checkpoint PATH go together"):
            module.Args(**alone)
    with pytest.raises(ValueError, match="--evaluate and --export do not train; give one of them"):
        module.Args(export=tmp_path, checkpoint=tmp_path, evaluate=tmp_path)
    real = builtins.__import__

    def without_onnx(name, *rest, **named):
        if name == "onnx":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_onnx)
    with pytest.raises(ValueError, match="pip install onnx onnxruntime"):
        module.export_driver(module.Args(export=tmp_path, checkpoint=tmp_path))


@both
def test_what_no_network_should_give_stays_in_the_box(tmp_path, name):
    onnx, module = pytest.importorskip("onnx"), MODULES[name]
    agent = module.Agent()
    with torch.no_grad():
        agent.actor[-1].weight.mul_(1e4)
    onnx.save(agent.to_onnx(onnx), str(tmp_path / "model.onnx"))
    (tmp_path / "vecnorm_stats.json").write_text(json.dumps(agent.observation_stats()))
    obs = np.random.default_rng(0).uniform(OBS_LOW, OBS_HIGH, (100, OBS_SIZE))
    for actions in (model_of(tmp_path)[0](obs), agent.driver()(obs.astype(np.float32))):
        assert (actions >= ACTION_LOW).all() and (actions <= ACTION_HIGH).all()
        assert (actions == ACTION_LOW).any() and (actions == ACTION_HIGH).any()
