"""SAC's parts against their definitions and numbers worked out by hand; and that it learns."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, promised_tags, short_episodes

import sac_racer
from callbacks_lite import read_csv
from racer.game.observations import OBS_SIZE
from racer.game.rules import ACTION_HIGH, ACTION_LOW
from racer.training.references import full_throttle
from racer_env import RacerVectorEnv
from sac_racer import (
    Agent,
    Args,
    Noise,
    ReplayBuffer,
    actor_loss,
    alpha_loss,
    critic_loss,
    make_optimizers,
    soft_target,
    squashed_sample,
    to_box,
    train,
    update,
)


def small(tmp_path, **changes) -> Args:
    """A run of a second or two."""
    settings = {**TINY["sac"], "config_path": short_episodes(tmp_path, 300)}
    return Args(**{**settings, "total_timesteps": 4096, "run_dir": tmp_path, **changes})


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
    corners = to_box(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(corners, [ACTION_LOW, ACTION_HIGH, [0, 0.5, 0.5]])


def test_the_deterministic_driver_is_the_squashed_mean():
    torch.manual_seed(0)
    agent = Agent()
    with torch.no_grad():
        agent.actor[-1].weight.mul_(200)
    obs = torch.rand(50, OBS_SIZE, generator=torch.Generator().manual_seed(1)) * 2 - 0.5
    with torch.no_grad():
        mean = agent.actor(agent.normalize(obs))[:, :3]
    driven = agent.drive(obs.numpy())
    np.testing.assert_allclose(driven, to_box(torch.tanh(mean)), atol=1e-5)
    assert driven.min() < -0.5 and (driven >= ACTION_LOW).all() and (driven <= ACTION_HIGH).all()
    with torch.no_grad():
        silent, _ = agent.sample(agent.normalize(obs), torch.zeros(50, 3))
    np.testing.assert_allclose(to_box(silent), driven, atol=1e-5)


def test_the_driver_starts_with_its_foot_down():
    steer, throttle, brake = Agent().drive(np.full((1, OBS_SIZE), 0.3, np.float32))[0]
    assert abs(steer) < 0.1 and throttle > 0.9 and brake < 0.1


# -- losses ------------------------------------------------------------------------------------------------------------


def test_target_values_by_hand():
    rewards, discounts, logprobs = (torch.tensor(x) for x in ([1.0, 1.0], [0.9, 0.0], [-2.0, -2.0]))
    targets = soft_target(rewards, discounts, torch.tensor([[5.0, 5.0], [4.0, 9.0]]), logprobs, 0.1)
    torch.testing.assert_close(targets, torch.tensor([1 + 0.9 * (4 + 0.2), 1.0]))  # the lower of two, plus entropy


def test_losses_by_hand():
    values, targets = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([1.0, 3.0])
    assert critic_loss(values, targets).item() == pytest.approx(0.5 * ((0 + 1) / 2 + (1 + 1) / 2))
    logprobs = torch.tensor([-1.0, 3.0])
    assert actor_loss(values, logprobs, 0.5).item() == pytest.approx(((-0.5 - 0.0) + (1.5 - 2.0)) / 2)


def test_the_two_critics_are_two_networks():
    torch.manual_seed(0)
    critics, x = Agent().critics, torch.randn(1, 5, OBS_SIZE + 3)
    both = critics(x.expand(2, -1, -1)).squeeze(-1)
    assert both.shape == (2, 5) and not torch.allclose(both[0], both[1])
    both[0].sum().backward()
    for weights in critics.parameters():
        assert weights.grad[0].abs().sum() > 0 and weights.grad[1].abs().sum() == 0


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
        ended, infos = ends[0] | ends[1], {"discount": 0.5 * ~ends[0], "final_obs": obs.numpy() + 0.5}
        next_obs = np.where(ended[:, None], -1.0, obs.numpy() + 0.5)  # after an end, the first of the next episode
        buffer.add(obs, torch.full((n, 3), k / 100), np.full(n, k + 1.0), next_obs, ended, infos)


def drawn(buffer: ReplayBuffer, n_step: int, count: int = 4000, scale=None) -> dict:
    """What is sampled, by the observation it began with: obs -> (reward, discount, next_obs)"""
    scale = np.ones(buffer.num_envs) if scale is None else scale
    batch = buffer.sample(count, n_step, scale, torch.Generator().manual_seed(0))
    rows = zip(*(batch[k].reshape(count, -1)[:, 0].tolist() for k in ("obs", "rewards", "discounts", "next_obs")), strict=True)
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


def test_the_ring_forgets_the_oldest_and_windows_never_cross_its_seam():
    buffer = ReplayBuffer(10, 2)
    fill(buffer, 8)
    assert buffer.filled == 5
    seen = drawn(buffer, n_step=2)
    assert sorted(seen) == [10.0 * k + i for k in (3, 4, 5, 6) for i in (0, 1)]
    for obs, (reward, discount, next_obs) in seen.items():
        k = obs // 10
        assert (reward, discount, next_obs) == (k + 1 + 0.5 * (k + 2), 0.25, obs + 10.5)
    counts = torch.bincount(buffer.sample(80_000, 2, np.ones(2), torch.Generator().manual_seed(1))["obs"][:, 0].int())
    assert counts[counts > 0].min() > 0.9 * 10_000, "all alike"


def test_after_a_reset_nothing_follows_from_the_last_actions():
    buffer = ReplayBuffer(24, 2)
    fill(buffer, 3)
    buffer.on_reset()
    fill(buffer, 3)
    assert drawn(buffer, n_step=3)[20] == [3.0, 0.5, 20.5], "cut short, and what followed is valued"
    with pytest.raises(ValueError, match=r"--noise-memory is 1\.0"):
        Args(noise_memory=1.0)


def test_noise_remembers_and_is_standard_normal_all_the_same():
    for memory in (0.0, 0.8):
        noise, generator = Noise(2000, memory), torch.Generator().manual_seed(0)
        draws = torch.stack([noise.draw(generator) for _ in range(60)])[30:]
        assert draws.std().item() == pytest.approx(1.0, abs=0.02) and draws.mean().item() == pytest.approx(0, abs=0.02)
        for lag in (1, 3):
            product = (draws[lag:] * draws[:-lag]).mean().item()
            assert product == pytest.approx(memory**lag, abs=0.03), "each car and action for itself"
        assert (draws[0, :-1] * draws[0, 1:]).mean().abs() < 0.05
    first, second = Noise(3, 0.8), Noise(3, 0.8)
    first.draw(generator)
    second.set_state(first.get_state())
    state = generator.get_state()
    a = first.draw(generator)
    generator.set_state(state)
    assert torch.equal(a, second.draw(generator))


def test_the_actor_has_a_rate_of_its_own_and_all_fall_over_the_run(tmp_path, monkeypatch):
    rates, real = [], sac_racer.update

    def update(agent, actor_optimizer, critic_optimizer, *rest):
        groups = (*actor_optimizer.param_groups, *critic_optimizer.param_groups)
        rates.append([group["lr"] for group in groups])
        return real(agent, actor_optimizer, critic_optimizer, *rest)

    monkeypatch.setattr(sac_racer, "update", update)
    train(small(tmp_path, learning_rate=1e-3, actor_learning_rate=1e-4, total_timesteps=2048, run_name="a"))
    np.testing.assert_allclose(np.array(rates) / rates[0][1], np.outer([r[1] for r in rates], [0.1, 1, 1]) / rates[0][1])
    assert rates[0][1] == pytest.approx(7.5e-4) and rates[-1][1] == pytest.approx(2.5e-4)


def test_rewards_are_scaled_by_car_when_they_are_drawn():
    buffer = ReplayBuffer(24, 2)
    fill(buffer, 4)
    seen = drawn(buffer, n_step=1, scale=np.array([1.0, 10.0]))
    assert seen[10][0] == 2.0 and seen[11][0] == 20.0


# -- driving -----------------------------------------------------------------------------------------------------------


def test_every_tick_reaches_the_buffer_as_it_was(tmp_path, monkeypatch):
    """In a real run: obs of a row are the next_obs of the row before, unless an episode ended there."""
    config, buffers = short_episodes(tmp_path, 90), []
    monkeypatch.setattr(sac_racer, "ReplayBuffer", lambda *a: buffers.append(ReplayBuffer(*a)) or buffers[-1])
    train(small(tmp_path, config_path=config, buffer_size=16_000, total_timesteps=8192))
    (buffer,) = buffers
    rows = slice(0, buffer.filled - 1)
    follows = (buffer.obs[1 : buffer.filled] == buffer.next_obs[rows]).all(-1)
    assert buffer.filled == 128 and buffer.ended[rows].sum() > 20 and torch.equal(~follows, buffer.ended[rows])
    assert buffer.actions[rows].abs().max() <= 1 and buffer.actions[rows].std() > 0.1


# -- updates -----------------------------------------------------------------------------------------------------------


def make_samples(count=6, size=32, seed=0) -> dict[str, torch.Tensor]:
    g, total = torch.Generator().manual_seed(seed), count * size
    samples = {"obs": torch.randn(total, OBS_SIZE, generator=g), "next_obs": torch.randn(total, OBS_SIZE, generator=g)}
    samples |= {"actions": torch.rand(total, 3, generator=g) * 2 - 1, "rewards": torch.randn(total, generator=g)}
    return {**samples, "discounts": torch.full((total,), 0.5)}


def run_update(agent, samples=None, optimizers=None, **changes):
    args = Args(**{"batch_size": 32, "updates": 6, **changes})
    optimizers = optimizers or make_optimizers(agent, args)
    return update(agent, *optimizers, samples or make_samples(args.updates), args, torch.Generator().manual_seed(0))


def test_the_actors_loss_leaves_the_critics_alone_and_theirs_the_actor():
    for frozen in (0, 1):
        torch.manual_seed(0)
        agent = Agent()
        optimizers = make_optimizers(agent, Args(learning_rate=1e-2, actor_learning_rate=1e-2))
        optimizers[frozen].step = lambda: None
        before = parameters(agent.actor), parameters(agent.critics)
        run_update(agent, optimizers=optimizers)
        after = parameters(agent.actor), parameters(agent.critics)
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [frozen == 0, frozen == 1]
        assert all(p.grad is None for p in agent.critic_targets.parameters())


def test_the_critics_learn_the_targets_and_the_actor_what_they_value():
    torch.manual_seed(0)
    agent, samples = Agent(init_alpha=1e-6), make_samples(count=30)
    samples["discounts"] = torch.zeros_like(samples["discounts"])
    samples["rewards"] = samples["actions"][:, 0] - samples["actions"][:, 1]  # steering right is good, throttle is bad
    optimizers = make_optimizers(agent, Args(learning_rate=3e-3, actor_learning_rate=3e-3))
    losses = [
        run_update(agent, samples, optimizers, updates=30, tau=1.0, autotune=False)["train/critic_loss"] for _ in range(15)
    ]
    assert losses[-1] < losses[0] / 10
    steer, throttle, _ = agent.drive(samples["obs"].numpy()).mean(0)
    assert steer > 0.9 and throttle < 0.1


def test_targets_follow_slowly_as_often_as_there_were_updates():
    torch.manual_seed(0)
    agent = Agent()
    before = parameters(agent.critic_targets)
    run_update(agent, tau=0.1)
    after, critics = parameters(agent.critic_targets), parameters(agent.critics)
    torch.testing.assert_close(after, before + (1 - 0.9**6) * (critics - before), rtol=1e-4, atol=1e-6)


def test_alpha_learns_only_with_autotune_and_the_actor_every_policy_frequency_th_update():
    for autotune in (True, False):
        torch.manual_seed(0)
        agent = Agent()
        run_update(agent, autotune=autotune)
        assert (agent.log_alpha.item() != pytest.approx(math.log(0.01), abs=1e-6)) == autotune
    steps = []
    for frequency in (1, 3):
        agent = Agent()
        optimizers = make_optimizers(agent, Args(learning_rate=1e-3, actor_learning_rate=1e-3))
        run_update(agent, optimizers=optimizers, policy_frequency=frequency)
        steps.append([int(list(o.state.values())[-1]["step"]) for o in optimizers])
    assert steps == [[6, 6], [2, 6]]


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_to_drive_laps(tmp_path):
    changes = {"total_timesteps": 120_000, "num_envs": 64, "updates": 8, "batch_size": 256, "log_every": 10_000}
    changes |= {"buffer_size": 30_000, "learning_starts": 5_000, "config_path": None}
    best = train(small(tmp_path, **changes))["best"]["results"][0]
    assert best["laps"] >= 1, best


def test_the_tags_of_a_real_run_are_the_promised_ones(tmp_path, monkeypatch):
    """The hand-written driver drives, so that there are laps at once."""
    real = RacerVectorEnv.step
    monkeypatch.setattr(RacerVectorEnv, "step", lambda envs, _: real(envs, full_throttle(envs.observations)))
    monkeypatch.setattr(Agent, "drive", lambda self, obs: full_throttle(obs))
    config = short_episodes(tmp_path, 1000)
    result = train(
        small(
            tmp_path,
            config_path=config,
            total_timesteps=16_384,
            action_repeat=1,
            learning_starts=14_000,
            log_every=4096,
        )
    )
    columns, promised = set(read_csv(Path(result["run_folder"]) / "metrics.csv")[0]), promised_tags("sac")
    assert columns >= promised, promised - columns


def test_learning_starts_when_the_buffer_is_full_at_the_latest(tmp_path):
    result = train(small(tmp_path, buffer_size=320, learning_starts=10**6, total_timesteps=2048))
    rows = read_csv(Path(result["run_folder"]) / "metrics.csv")
    assert not rows[0].get("train/critic_loss") and float(rows[-1]["train/critic_loss"]) > 0


def test_metrics_are_no_rarer_than_what_waits_for_them(tmp_path):
    result = train(small(tmp_path, log_every=10**6, total_timesteps=2048, checkpoint_every=1024, run_name="run"))
    assert result["steps"] == 2048 and len(read_csv(tmp_path / "run" / "metrics.csv")) == 2


def test_a_gentle_start_is_not_one_on_the_brake():
    _, throttle, brake = Agent(init_throttle=0.0).drive(np.full((1, OBS_SIZE), 0.3, np.float32))[0]
    assert throttle < 0.1 and brake < 0.1


@pytest.mark.slow
def test_an_error_while_driving_or_learning_ends_the_run_with_that_error(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("on purpose")

    for owner, name in ((sac_racer, "update"), (RacerVectorEnv, "step")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                train(small(tmp_path))


def test_the_networks_learn_while_the_cars_drive(tmp_path, monkeypatch):
    """Every step of the cars waits for the update beside it: one after the other they would wait for ever."""
    learned, waits = threading.Event(), []
    real_step, real_update = RacerVectorEnv.step, sac_racer.update

    def waiting_step(envs, actions):
        if envs.num_envs > 1:  # not in an evaluation
            waits.append(len(waits) < 8 or learned.wait(20))  # 8 actions of 64 steps before learning starts
            learned.clear()
        return real_step(envs, actions)

    def telling_update(*arguments):
        losses = real_update(*arguments)
        learned.set()
        return losses

    monkeypatch.setattr(RacerVectorEnv, "step", waiting_step)
    monkeypatch.setattr(sac_racer, "update", telling_update)
    train(small(tmp_path, total_timesteps=1024))
    assert len(waits) == 16 and all(waits)
