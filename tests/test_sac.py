"""SAC's parts against their definitions, each with the wrong variant asserted to differ; that it learns; and that the two
trainers agree on what they share."""

from __future__ import annotations

import ast
import dataclasses
import math
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import hold_up

import ppo_racer
import sac_racer
from callbacks_lite import RaceStats, read_csv
from racer_env import ACTION_HIGH, ACTION_LOW, OBS_SIZE, RacerVectorEnv
from sac_racer import (
    Agent,
    Answer,
    Args,
    ReplayBuffer,
    Team,
    actor_loss,
    alpha_loss,
    critic_loss,
    drive,
    make_optimizers,
    soft_target,
    squashed_sample,
    to_inputs,
    train,
    update,
)


def small(tmp_path, **changes) -> Args:
    """A run of a second or two."""
    settings = {"total_timesteps": 4096, "num_envs": 16, "log_every": 512, "learning_starts": 512, "batch_size": 64}
    settings |= {
        "updates": 2,
        "run_dir": tmp_path,
        "tensorboard": False,
        "eval_every": 10**9,
        "checkpoint_every": 10**9,
    }
    return Args(**{**settings, **changes})


def parameters(*nets) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for net in nets for p in net.parameters()])


# -- policy ------------------------------------------------------------------------------------------------------------


def test_log_probabilities_of_squashed_actions_integrate_to_one_and_are_those_of_torch():
    mean, log_std = torch.tensor([[0.3, -1.2, 2.0]]), torch.tensor([[-0.5, 0.1, -1.0]])
    normal = torch.distributions.Normal(mean, log_std.exp())
    reference = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    noise = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    actions, logprobs = squashed_sample(mean, log_std, noise)
    torch.testing.assert_close(logprobs, reference.log_prob(actions).sum(-1), rtol=1e-3, atol=1e-3)
    for i in range(3):  # the density of each action over [-1, 1], by the midpoint rule
        a = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 100_000 - 1
        z = (torch.atanh(a) - mean[0, i]) / log_std[0, i].exp()
        same, logprob = squashed_sample(mean[:, i : i + 1].double(), log_std[:, i : i + 1].double(), z[:, None])
        torch.testing.assert_close(same[:, 0], a)
        assert logprob.exp().mean().item() * 2 == pytest.approx(1.0, abs=1e-3)
    _, far = squashed_sample(torch.tensor([[30.0]]), torch.tensor([[0.0]]), torch.zeros(1, 1))
    assert torch.isfinite(far).all(), "where tanh rounds to 1"


def test_actions_cover_the_box_of_the_game():
    corners = to_inputs(np.array([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(corners, [ACTION_LOW, ACTION_HIGH, [0, 0.5, 0.5]])


def test_the_driver_without_noise_is_the_squashed_mean():
    torch.manual_seed(0)
    agent = Agent()
    with torch.no_grad():
        agent.actor[-1].weight.mul_(200)
    obs = torch.rand(50, OBS_SIZE, generator=torch.Generator().manual_seed(1)) * 2 - 0.5
    with torch.no_grad():
        mean = agent.actor(agent.normalize(obs))[:, :3]
    driven = agent.driver()(obs.numpy())
    np.testing.assert_allclose(driven, to_inputs(torch.tanh(mean).numpy()), atol=1e-5)
    assert driven.min() < -0.5 and (driven >= ACTION_LOW).all() and (driven <= ACTION_HIGH).all()
    silent = agent.act(obs, torch.zeros(50, 3))
    np.testing.assert_allclose(to_inputs(silent.numpy()), driven, atol=1e-5)


def test_the_driver_starts_with_its_foot_down():
    steer, throttle, brake = Agent().driver()(np.full((1, OBS_SIZE), 0.3, np.float32))[0]
    assert abs(steer) < 0.1 and throttle > 0.9 and brake < 0.1


# -- losses ------------------------------------------------------------------------------------------------------------


def test_target_values_by_hand():
    targets = soft_target(
        *(torch.tensor(x) for x in ([1.0, 1.0], [0.9, 0.0], [5.0, 5.0], [4.0, 9.0], [-2.0, -2.0])), 0.1
    )
    torch.testing.assert_close(targets, torch.tensor([1 + 0.9 * (4 + 0.2), 1.0]))  # the lower of two, plus entropy


def test_losses_by_hand():
    q1, q2, targets = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0]), torch.tensor([1.0, 3.0])
    assert critic_loss(q1, q2, targets).item() == pytest.approx(0.5 * ((0 + 1) / 2 + (1 + 1) / 2))
    logprobs = torch.tensor([-1.0, 3.0])
    assert actor_loss(q1, q2, logprobs, 0.5).item() == pytest.approx(((-0.5 - 0.0) + (1.5 - 2.0)) / 2)


@pytest.mark.parametrize(("logprob", "direction"), [(5.0, 1), (-9.0, -1)])
def test_alpha_rises_where_entropy_is_too_low_and_falls_where_it_is_too_high(logprob, direction):
    log_alpha = torch.tensor(-2.0, requires_grad=True)
    alpha_loss(log_alpha, torch.full((8,), logprob), target_entropy=-3.0).backward()
    assert -log_alpha.grad * direction > 0


# -- replay buffer -----------------------------------------------------------------------------------------------------


def fill(buffer: ReplayBuffer, ticks: int, terminated=(), truncated=()) -> None:
    """Row k of car i: obs 10k+i, reward k+1, next_obs obs+0.5."""
    n = buffer.num_envs
    for k in range(ticks):
        obs = torch.full((n, OBS_SIZE), 10.0 * k) + torch.arange(n)[:, None]
        ends = [np.array([(k, i) in which for i in range(n)]) for which in (terminated, truncated)]
        answer = Answer(None, obs.numpy() + 0.5, np.full(n, k + 1.0), 0.5 * ~ends[0], *ends)
        buffer.add(obs, torch.full((n, 3), k / 100), answer)


def drawn(buffer: ReplayBuffer, n_step: int, count: int = 4000, scale=None) -> dict:
    """What is sampled, by the observation it began with: obs -> (reward, discount, next_obs)"""
    scale = torch.ones(buffer.num_envs) if scale is None else scale
    batch = buffer.sample(count, n_step, scale, torch.Generator().manual_seed(0))
    rows = zip(
        *(batch[k].reshape(count, -1)[:, 0].tolist() for k in ("obs", "rewards", "discounts", "next_obs")), strict=True
    )
    return {obs: rest for obs, *rest in rows}


def test_n_step_samples_by_hand_and_truncation_bootstraps_but_termination_does_not():
    buffer = ReplayBuffer(24, 2)
    fill(buffer, 6, terminated=[(2, 0)], truncated=[(2, 1)])
    seen = drawn(buffer, n_step=3)
    assert sorted(seen) == [0, 1, 10, 11, 20, 21, 30, 31], "the last two rows have no three ticks after them"
    assert seen[0] == [1 + 1 + 0.75, 0.0, 20.5], "three ticks, the third ended the episode for good"
    assert seen[1] == [2.75, 0.125, 21.5], "the same, cut short by time: what followed still counts"
    assert seen[10] == [2 + 1.5, 0.0, 20.5] and seen[11] == [3.5, 0.25, 21.5], "nothing of the next episode"
    assert seen[20] == [3.0, 0.0, 20.5] and seen[21] == [3.0, 0.5, 21.5]
    assert seen[30] == [4 + 2.5 + 1.5, 0.125, 50.5]
    assert drawn(buffer, n_step=1)[50] == [6.0, 0.5, 50.5]


@pytest.mark.parametrize("wrong", ["bootstraps through termination", "stops at truncation"])
def test_the_wrong_variants_of_the_target_differ(wrong):
    """Each is what a buffer that mixes up the two kinds of end would give."""
    right, mixed = ReplayBuffer(24, 2), ReplayBuffer(24, 2)
    fill(right, 6, terminated=[(2, 0)], truncated=[(2, 1)])
    if wrong == "stops at truncation":
        fill(mixed, 6, terminated=[(2, 0), (2, 1)])
    else:
        fill(mixed, 6, truncated=[(2, 0), (2, 1)])
    value = torch.tensor(4.0)

    def targets(buffer):
        return {
            obs: soft_target(torch.tensor(r), torch.tensor(d), value, value, torch.tensor(0.0), 0.1).item()
            for obs, (r, d, _) in drawn(buffer, 3).items()
        }

    a, b = targets(right), targets(mixed)
    differ = {obs for obs in a if a[obs] != b[obs]}
    assert differ == ({1, 11, 21} if wrong == "stops at truncation" else {0, 10, 20})


def test_the_ring_forgets_the_oldest_and_windows_never_cross_its_seam():
    buffer = ReplayBuffer(10, 2)
    fill(buffer, 8)
    assert len(buffer) == 10
    seen = drawn(buffer, n_step=2)
    assert sorted(seen) == [10.0 * k + i for k in (3, 4, 5, 6) for i in (0, 1)]
    for obs, (reward, discount, next_obs) in seen.items():
        k = obs // 10
        assert (reward, discount, next_obs) == (k + 1 + 0.5 * (k + 2), 0.25, obs + 10.5)
    counts = torch.bincount(
        buffer.sample(80_000, 2, torch.ones(2), torch.Generator().manual_seed(1))["obs"][:, 0].int()
    )
    assert counts[counts > 0].min() > 0.9 * 10_000, "all alike"


def test_a_cut_keeps_what_follows_out():
    buffer = ReplayBuffer(20, 2)
    fill(buffer, 3)
    buffer.cut()
    fill(buffer, 3)
    assert drawn(buffer, n_step=3)[20] in ([3.0, 0.5, 20.5], [3 + 0.5 * 1 + 0.25 * 2, 0.125, 10.5])
    batch = buffer.sample(2000, 3, torch.ones(2), torch.Generator().manual_seed(0))
    before = (batch["obs"][:, 0] == 20) & (batch["discounts"] == 0.5)
    assert before.any() and (batch["next_obs"][before][:, 0] == 20.5).all()


def test_rewards_are_scaled_by_car_when_they_are_drawn():
    buffer = ReplayBuffer(24, 2)
    fill(buffer, 4)
    seen = drawn(buffer, n_step=1, scale=torch.tensor([1.0, 10.0]))
    assert seen[10][0] == 2.0 and seen[11][0] == 20.0


def test_a_buffer_of_300_000_saves_and_loads_without_a_second_copy_in_memory(tmp_path):
    buffer = ReplayBuffer(300_000, 100)
    buffer.filled, buffer.head = buffer.rows, 7
    buffer.obs.uniform_(generator=torch.Generator().manual_seed(0))
    buffer.ended[5, 5] = True
    size = sum(getattr(buffer, name).nbytes for name in buffer.ARRAYS)
    tracemalloc.start()
    assert buffer.save(tmp_path / "buffer.npz", Team())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 38e6 and peak < size / 2, (size, peak)
    other = ReplayBuffer(300_000, 100)
    other.load(tmp_path / "buffer.npz", Team())
    assert (other.filled, other.head) == (3000, 7)
    for name in buffer.ARRAYS:
        assert torch.equal(getattr(other, name), getattr(buffer, name))


def test_a_buffer_that_does_not_fit_is_refused(tmp_path):
    buffer = ReplayBuffer(20, 2)
    fill(buffer, 3)
    buffer.save(tmp_path / "b.npz", Team())
    with pytest.raises(ValueError, match="which does not fit"):
        ReplayBuffer(30, 3).load(tmp_path / "b.npz", Team())
    data = (tmp_path / "b.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(data[: len(data) // 2])
    np.save(tmp_path / "pickle.npz", np.array([{"code": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "pickle.npz.npy").rename(tmp_path / "pickle.npz")
    parts = dict(np.load(tmp_path / "b.npz"))
    np.savez(tmp_path / "head.npz", **{**parts, "head": 99})
    np.savez(tmp_path / "short.npz", **{**parts, "obs": parts["obs"][:2]})
    np.savez(tmp_path / "part.npz", **{k: v for k, v in parts.items() if k != "rewards"})
    for name in ("missing.npz", "half.npz", "pickle.npz", "head.npz", "short.npz", "part.npz"):
        with pytest.raises(ValueError, match=r"is missing, damaged or of another run .*--no-save-buffer"):
            ReplayBuffer(20, 2).load(tmp_path / name, Team())


# -- driving -----------------------------------------------------------------------------------------------------------


class Script:
    """An environment of two cars that counts ticks; car 1 terminates in tick 2, car 0 is truncated in tick 3."""

    num_envs = 2

    def __init__(self):
        self.tick, self.given = 0, []

    def step(self, inputs):
        self.tick += 1
        self.given.append(inputs)
        term, trunc = np.array([False, self.tick == 2]), np.array([self.tick == 3, False])
        obs = np.full((2, OBS_SIZE), float(self.tick), np.float32)
        infos, done = {}, term | trunc
        if done.any():
            final = np.full(2, None, dtype=object)
            for i in np.flatnonzero(done):
                final[i] = np.full(OBS_SIZE, 100.0 + self.tick, np.float32)
            infos = {"final_obs": final, "_final_obs": done}
        return obs, np.array([1.0, 10.0]), term, trunc, infos


def test_a_choice_is_kept_for_some_ticks_and_nothing_of_the_next_episode_counts(monkeypatch):
    monkeypatch.setattr(RaceStats, "step", lambda *_: None)
    env, inputs = Script(), np.array([[0.1, 1, 0], [0.2, 1, 0]])
    answer = drive(env, inputs, 4, 0.5, RaceStats(2, 3000))
    assert len(env.given) == 4 and all(given is inputs for given in env.given)
    np.testing.assert_allclose(answer.rewards, [1 + 0.5 + 0.25, 10 + 5])
    np.testing.assert_allclose(answer.discounts, [0.5**3, 0], err_msg="the ticks that were driven; no future")
    assert answer.terminated.tolist() == [False, True] and answer.truncated.tolist() == [True, False]
    assert answer.obs[:, 0].tolist() == [4, 4] and answer.next_obs[:, 0].tolist() == [103, 102]


def test_every_tick_reaches_the_buffer_as_it_was(tmp_path, monkeypatch):
    """In a real run: obs of a row are the next_obs of the row before, unless an episode ended there."""
    runs = []
    real = sac_racer.report
    monkeypatch.setattr(sac_racer, "report", lambda run, stopped: (runs.append(run), real(run, stopped))[1])
    config = tmp_path / "short.json"
    config.write_text((Path(__file__).parent.parent / "ai-config.json").read_text().replace("3000", "90"))
    train(small(tmp_path, config_path=config, buffer_size=16_000, total_timesteps=8192))
    buffer = runs[0].buffer
    rows = slice(0, buffer.filled - 1)
    follows = (buffer.obs[1 : buffer.filled] == buffer.next_obs[rows]).all(-1)
    assert buffer.filled == 128 and buffer.ended[rows].sum() > 20 and torch.equal(~follows, buffer.ended[rows])
    assert buffer.actions[rows].abs().max() <= 1 and buffer.actions[rows].std() > 0.1


# -- updates -----------------------------------------------------------------------------------------------------------


def make_batches(agent, count=6, size=32, seed=0) -> dict[str, tuple]:
    g = torch.Generator().manual_seed(seed)
    total = count * size
    samples = {"obs": torch.randn(total, OBS_SIZE, generator=g), "next_obs": torch.randn(total, OBS_SIZE, generator=g)}
    samples |= {"actions": torch.rand(total, 3, generator=g) * 2 - 1, "rewards": torch.randn(total, generator=g)}
    samples["discounts"] = torch.full((total,), 0.5)
    return {name: values.split(size) for name, values in samples.items()}


def run_update(agent, batches=None, optimizers=None, **changes):
    args = Args(batch_size=32, **changes)
    optimizers = optimizers or make_optimizers(agent, args.learning_rate)
    with sac_racer.ThreadPoolExecutor(2) as cores:
        batches = batches or make_batches(agent)
        return update(agent, optimizers, batches, args, torch.Generator().manual_seed(0), cores, Team())


def frozen(*names):
    """Optimisers that do nothing, for these."""

    class Nothing:
        def __init__(self, real):
            self.param_groups = real.param_groups
            self.zero_grad, self.step = real.zero_grad, lambda: None

    return lambda optimizers: {k: Nothing(v) if k in names else v for k, v in optimizers.items()}


def test_the_actors_loss_leaves_the_critics_alone_and_theirs_the_actor():
    torch.manual_seed(0)
    agent = Agent()
    critics, actor = parameters(agent.qf1, agent.qf2), parameters(agent.actor)
    run_update(agent, optimizers=frozen("critic")(make_optimizers(agent, 1e-2)))
    assert torch.equal(parameters(agent.qf1, agent.qf2), critics) and not torch.equal(parameters(agent.actor), actor)
    assert all(
        p.grad is None for net in (agent.qf1_target, agent.qf2_target, agent.actor_target) for p in net.parameters()
    )
    actor = parameters(agent.actor)
    run_update(agent, optimizers=frozen("actor")(make_optimizers(agent, 1e-2)))
    assert torch.equal(parameters(agent.actor), actor) and not torch.equal(parameters(agent.qf1, agent.qf2), critics)


def test_the_critics_learn_the_targets_and_the_actor_what_they_value():
    torch.manual_seed(0)
    agent = Agent(init_alpha=1e-6)
    batches = make_batches(agent, count=30)
    batches["discounts"] = tuple(torch.zeros_like(d) for d in batches["discounts"])
    batches["rewards"] = tuple(a[:, 0] - a[:, 1] for a in batches["actions"])  # steering right is good, throttle is bad
    first = run_update(agent, batches, learning_rate=3e-3, tau=1.0)["train/critic_loss"]
    for _ in range(15):
        last = run_update(agent, batches, learning_rate=3e-3, tau=1.0, autotune=False)["train/critic_loss"]
    assert last < first / 10
    steer, throttle, _ = agent.driver()(np.full((1, OBS_SIZE), 0.3, np.float32))[0]
    assert steer > 0.8 and throttle < 0.2


def test_targets_follow_slowly_as_often_as_there_were_updates():
    torch.manual_seed(0)
    agent = Agent()
    before = parameters(agent.qf1_target, agent.qf2_target)
    run_update(agent, tau=0.1)
    after, critics = parameters(agent.qf1_target, agent.qf2_target), parameters(agent.qf1, agent.qf2)
    torch.testing.assert_close(after, before + (1 - 0.9**6) * (critics - before), rtol=1e-4, atol=1e-6)
    assert torch.equal(parameters(agent.actor_target), parameters(agent.actor))


def test_alpha_learns_only_with_autotune_and_every_policy_frequency_th_update():
    for autotune in (True, False):
        torch.manual_seed(0)
        agent = Agent()
        run_update(agent, autotune=autotune)
        assert (agent.log_alpha.item() != pytest.approx(math.log(0.01), abs=1e-6)) == autotune
    steps = []
    for frequency in (1, 3):
        agent = Agent()
        optimizers = make_optimizers(agent, 1e-3)
        run_update(agent, optimizers=optimizers, policy_frequency=frequency, updates=6)
        steps.append([int(next(iter(optimizers[k].state.values()))["step"]) for k in ("actor", "critic")])
    assert steps == [[6, 6], [2, 6]]


def test_an_update_does_not_depend_on_which_core_is_faster(monkeypatch):
    def after(slow):
        torch.manual_seed(0)
        agent = Agent()
        with monkeypatch.context() as patch:
            hold_up(patch, sac_racer, slow)
            losses = run_update(agent)
        return parameters(agent), losses

    (a, losses_a), (b, losses_b) = after("update_actor"), after("update_critics")
    assert torch.equal(a, b) and losses_a == losses_b


def test_new_statistics_reach_what_is_in_the_buffer_already():
    agent = Agent()
    buffer = ReplayBuffer(20, 2)
    fill(buffer, 5)
    args = Args(batch_size=4, updates=2, n_step=1)
    scaler = sac_racer.RewardScaler(2, 0.9)
    first = sac_racer.sample_batches(agent, buffer, scaler, args, torch.Generator().manual_seed(0), Team())
    agent.obs_mean += 1.0
    scaler.moments = [(0.0, 4.0, 10.0)]
    second = sac_racer.sample_batches(agent, buffer, scaler, args, torch.Generator().manual_seed(0), Team())
    for name in ("obs", "next_obs"):
        shift = torch.cat(first[name]) - torch.cat(second[name])
        torch.testing.assert_close(shift, torch.rsqrt(agent.obs_var + 1e-6).expand_as(shift), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.cat(first["rewards"]), 2 * torch.cat(second["rewards"]), rtol=1e-4, atol=1e-4)


# -- runs --------------------------------------------------------------------------------------------------------------


def test_it_learns_to_drive_laps(tmp_path):
    changes = {"total_timesteps": 100_000, "num_envs": 64, "updates": 8, "batch_size": 256, "log_every": 10_000}
    best = train(small(tmp_path, **changes))["best"]["episodes"][0]
    assert best["laps"] >= 1, best


def test_the_tags_of_a_real_run_are_the_promised_ones(tmp_path):
    result = train(small(tmp_path, config_path=None, total_timesteps=40_000, start="anywhere", log_every=4000))
    columns = set(read_csv(Path(result["run_folder"]) / "metrics.csv")[0])
    promised = {"train/learning_rate", "train/ent_coef", "train/actor_loss", "train/critic_loss", "train/ent_coef_loss"}
    promised |= {"reward/progress", "reward/wall", "rollout/ep_rew_mean", "rollout/ep_len_mean", "time/fps"}
    promised |= {"racer/completion_rate", "racer/episodes_this_rollout"}
    promised |= {"eval/mean_reward", "eval/mean_ep_length", "eval/completion_rate"}
    assert columns >= promised, promised - columns


def test_learning_starts_when_the_buffer_is_full_at_the_latest(tmp_path):
    result = train(small(tmp_path, buffer_size=320, learning_starts=10**6, total_timesteps=2048))
    rows = read_csv(Path(result["run_folder"]) / "metrics.csv")
    assert not rows[0].get("train/critic_loss") and float(rows[-1]["train/critic_loss"]) > 0


def test_metrics_are_no_rarer_than_what_waits_for_them(tmp_path):
    result = train(small(tmp_path, log_every=10**6, total_timesteps=2048, checkpoint_every=1024, run_name="run"))
    assert result["steps"] == 2048 and len(read_csv(tmp_path / "run" / "metrics.csv")) == 2


def test_a_gentle_start_is_not_one_on_the_brake():
    _, throttle, brake = Agent(init_throttle=0.0).driver()(np.full((1, OBS_SIZE), 0.3, np.float32))[0]
    assert throttle < 0.1 and brake < 0.1


def test_statistics_begin_with_the_fixed_ones():
    agent = Agent()
    agent.update_normalizer(torch.zeros(64, OBS_SIZE))  # all cars on the grid see the same
    assert (agent.obs_var > 0.5 * torch.tensor(sac_racer.OBS_STD).square()).all()


def test_without_its_buffer_a_run_goes_on_and_says_what_that_means(tmp_path, capsys):
    train(small(tmp_path, run_name="run", save_buffer=False))
    assert not list((tmp_path / "run").glob("buffer*"))
    result = train(Args(resume=tmp_path / "run", total_timesteps=6144))
    assert result["steps"] == 6144
    assert "the driver fills a new one with 512 steps first" in capsys.readouterr().out


@pytest.mark.slow
def test_checkpoint_and_buffer_are_replaced_as_a_pair(tmp_path, monkeypatch, capsys):
    folder = Path(train(small(tmp_path, run_name="run"))["run_folder"])
    (first,) = folder.glob("buffer-*.npz")
    (folder / "buffer-1-left-behind.npz").write_text("by a run that was killed")
    monkeypatch.setattr(sac_racer, "save_checkpoint", lambda *_: False)  # the disk is full after the buffer was written
    train(Args(resume=folder, total_timesteps=5120))
    assert first.exists() and sac_racer.load_checkpoint(folder)["buffer"] == first.name
    monkeypatch.undo()
    train(Args(resume=folder, total_timesteps=5120))
    (second,) = folder.glob("buffer-*.npz")
    assert second != first and sac_racer.load_checkpoint(folder)["buffer"] == second.name
    second.unlink()
    with pytest.raises(ValueError, match=r"buffer-.* is missing, damaged or of another run"):
        train(Args(resume=folder, total_timesteps=6144))
    assert train(Args(resume=folder, total_timesteps=6144, save_buffer=False))["steps"] == 6144


def test_a_loss_that_is_not_a_number_stops_the_run_and_is_not_saved(tmp_path, monkeypatch):
    real, calls = sac_racer.soft_target, []

    def poisoned(*arguments):
        calls.append(1)
        return real(*arguments) * (math.nan if len(calls) > 40 else 1.0)

    monkeypatch.setattr(sac_racer, "soft_target", poisoned)
    with pytest.raises(FloatingPointError, match="has become nan in update"):
        train(small(tmp_path, run_name="nan", checkpoint_every=512))
    agent = sac_racer.load_checkpoint(tmp_path / "nan")["agent"]
    assert all(torch.isfinite(value).all() for value in agent.values())


def test_an_error_while_driving_or_learning_ends_the_run_with_that_error(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("on purpose")

    for name in ("update_critics", "update_actor", "drive"):
        with monkeypatch.context() as patch:
            patch.setattr(sac_racer, name, broken)
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                train(small(tmp_path))


def test_the_networks_learn_while_the_cars_drive(tmp_path, monkeypatch):
    """Every drive waits for the update of the same choice: one after the other they would wait for ever."""
    learned, waits = threading.Event(), []
    real_drive, real_update = sac_racer.drive, sac_racer.update

    def waiting_drive(*arguments):
        waits.append(len(waits) < 8 or learned.wait(20))  # 8 choices of 64 steps before learning starts
        learned.clear()
        return real_drive(*arguments)

    def telling_update(*arguments):
        losses = real_update(*arguments)
        learned.set()
        return losses

    monkeypatch.setattr(sac_racer, "drive", waiting_drive)
    monkeypatch.setattr(sac_racer, "update", telling_update)
    train(small(tmp_path, total_timesteps=1024))
    assert len(waits) == 16 and all(waits)


def test_same_seed_same_numbers_and_another_seed_others(tmp_path):
    def weights(**changes):
        folder = Path(train(small(tmp_path, total_timesteps=2048, **changes))["run_folder"])
        return sac_racer.load_checkpoint(folder)["agent"]["actor.0.weight"]

    assert torch.equal(weights(), weights()) and not torch.equal(weights(), weights(seed=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 0}, "--num-envs is 0"),
        ({"tau": 0.0}, "--tau is 0.0"),
        ({"updates": 3}, "--updates is 3, which is no multiple of --policy-frequency 2"),
        ({"init_std": 5.0}, "--init-std is 5.0; it must be between 0.01 and 2.5"),
        ({"updates": -1}, "--updates is -1"),
        ({"action_repeat": 0}, "--action-repeat is 0"),
        ({"target_entropy": math.nan}, "--target-entropy is nan"),
        ({"buffer_size": 100}, "--buffer-size is 100, but 64 cars make 320 choices in --n-step 5"),
        ({"num_envs": 2, "track_id": ("track-01", "track-02", "track-03")}, "each needs a car"),
        ({"resume": Path("a"), "evaluate": Path("b")}, "give one of them"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Args(**settings)


def test_few_cars_have_the_defaults_of_a_bridge():
    many, few, bridge = Args(), Args(num_envs=8), Args(bridge_url=("ws://localhost:9876",))
    assert many.total_timesteps > few.total_timesteps and many.log_every > few.log_every
    assert dataclasses.replace(few, bridge_url=bridge.bridge_url) == bridge
    assert Args(bridge_url=("ws://localhost:9876",), buffer_size=5000).buffer_size == 5000


# -- what the two trainers share ---------------------------------------------------------------------------------------

# Shared names that differ on purpose, and why.
OTHER_DEFAULTS = {"gamma", "learning_rate"}  # each algorithm its own best
OTHER_HELP = {"total_timesteps", "num_envs", "eval_every", "checkpoint_every", "gamma", "init_std"}
OTHER_CODE = {
    "make_optimizers",  # other networks
    "update",
    "update_actor",
    "learn",  # PPO clips gradients
    "learn_once",
}
OTHER_CLASSES = {"Args", "Agent", "Run"}  # of Run, the methods that are not about networks are compared


def definitions(module) -> dict[str, str]:
    """name -> source without the positions; methods as Class.name"""
    found = {}
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.ClassDef) and node.name not in OTHER_CLASSES):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}": ast.unparse(m) for m in node.body if isinstance(m, ast.FunctionDef)}
    return found


def field_docs(module) -> dict[str, str]:
    (args,) = (
        n for n in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body if getattr(n, "name", "") == "Args"
    )
    pairs = zip(args.body, args.body[1:], strict=False)
    return {a.target.id: ast.unparse(b) for a, b in pairs if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)}


def test_shared_settings_have_the_same_type_default_and_help():
    ppo, sac = ({f.name: f for f in dataclasses.fields(m.Args)} for m in (ppo_racer, sac_racer))
    shared = [name for name in ppo if name in sac]
    assert len(shared) > 20 and [n for n in sac if n in ppo] == shared, "and stand in the same order"
    docs = field_docs(ppo_racer), field_docs(sac_racer)
    for name in shared:
        assert ppo[name].type == sac[name].type, name
        assert (ppo[name].default == sac[name].default) == (name not in OTHER_DEFAULTS), name
        assert (docs[0][name] == docs[1][name]) == (name not in OTHER_HELP), (name, docs[0][name], docs[1][name])
    assert len(docs[0]) == len(ppo) and len(docs[1]) == len(sac), "every field says what it is"


def test_helpers_of_the_same_name_are_the_same():
    ppo, sac = definitions(ppo_racer), definitions(sac_racer)
    shared = set(ppo) & set(sac)
    assert len(shared) > 40
    own = {"Args.__post_init__", "Args._check_ranges", "Args.steps_per_iteration", "Agent.__init__", "Agent.driver"}
    own |= {"Agent.to_onnx"}
    own |= {f"Run.{m}" for m in ("__init__", "begin", "save", "get_state", "set_state", "close")} | OTHER_CODE
    differ = {name for name in shared if ppo[name] != sac[name]}
    assert differ == own & shared, (differ - own, own & shared - differ)


def test_a_trained_driver_drives_the_same_in_the_scalar_environment(tmp_path):
    folder = Path(train(small(tmp_path))["run_folder"])
    agent = sac_racer.restore_agent(sac_racer.load_checkpoint(folder), folder)
    envs = RacerVectorEnv(1)
    episodes, actions = sac_racer.evaluate(agent, envs, ["track-01"])
    envs.close()
    assert episodes[0].length == len(actions) > 10
