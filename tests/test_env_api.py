"""RacerEnv and RacerVectorEnv as Gymnasium environments, on the embedded engine: the contract, and what bad input gets."""

from __future__ import annotations

import json
import pickle
import re
import warnings

import gymnasium as gym
import numpy as np
import pytest
from conftest import assert_same, make_config, short_episodes
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import ppo_racer
import racer_env
from ppo_racer import RewardScaler
from racer.game.config import DEFAULT_CONFIG_PATH, load_config
from racer.game.observations import OBS_NAMES, OBS_SIZE
from racer.game.rules import DEFAULT_CONFIG, STEP_INFO
from racer_env import RacerEnv, RacerVectorEnv

COAST = np.zeros(3, np.float32)
WEIGHTS = DEFAULT_CONFIG["weights"]


@pytest.fixture
def short(tmp_path):
    """A config whose episodes end soon, in both ways."""
    return short_episodes(tmp_path, 40, stillnessTimeoutTicks=25)


# -- one car -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"track_id": "track-03", "start": "anywhere"}, {"render_mode": "rgb_array"}])
def test_check_env_passes_without_warnings(arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(RacerEnv(**arguments))
        check_env(gym.make("TopDownRacer-v0", **arguments).unwrapped)


def test_spaces_are_the_documented_ones():
    env = RacerEnv()
    assert env.action_space == gym.spaces.Box(np.float32([-1, 0, 0]), np.float32([1, 1, 1]))
    low, high = env.observation_space.low, env.observation_space.high
    assert low.shape == (14,) and env.observation_space.dtype == np.float32
    assert low.tolist() == [0] * 9 + [0, -1, -1, 0, 0] and high.tolist() == [1] * 14
    assert len(OBS_NAMES) == OBS_SIZE


def test_docstring_states_the_numbers_that_act():
    text = RacerEnv.__doc__
    for key, value in DEFAULT_CONFIG["weights"].items():
        if key != "stillnessSpeedThreshold":
            assert f"| {value} " in text, key
    assert f"({DEFAULT_CONFIG['episode']['stillnessTimeoutTicks']})" in text
    assert f"({DEFAULT_CONFIG['episode']['maxSteps']})" in text


def test_info_has_the_game_s_keys_and_plain_types():
    env = RacerEnv()
    observation, info = env.reset(seed=1)
    assert observation.dtype == np.float32 and info == {"lap": 1, "checkpoint": 0, "stepCount": 0}
    _, reward, terminated, truncated, info = env.step(np.array([0, 1, 0], np.float32))
    assert list(info) == list(STEP_INFO)
    assert all(type(info[key]) is kind for key, kind in STEP_INFO.items())
    assert type(reward) is float and type(terminated) is bool and type(truncated) is bool
    assert info["tick"] == info["stepCount"] == 1
    assert reward == pytest.approx(
        sum(info[part] for part in ("progress", "speed", "wall", "offTrack", "backward", "stillness"))
    )


def test_same_seed_same_start_and_another_one_after_that():
    a, b = RacerEnv(start="anywhere"), RacerEnv(start="anywhere")
    np.testing.assert_array_equal(a.reset(seed=5)[0], b.reset(seed=5)[0])
    second = a.reset()[0]
    np.testing.assert_array_equal(second, b.reset()[0])
    assert not np.array_equal(second, a.reset(seed=5)[0])
    assert not np.array_equal(a.reset(seed=5)[0], a.reset(seed=6)[0])
    assert not np.array_equal(RacerEnv(start="anywhere").reset()[0], RacerEnv(start="anywhere").reset()[0])


def test_a_step_at_the_wrong_time_says_what_to_do(short):
    env = RacerEnv(config_path=short)
    with pytest.raises(ValueError, match=r"not on the track yet: call reset\(\) first"):
        env.step(COAST)
    env.reset()
    while not env.step(COAST)[2]:
        pass
    with pytest.raises(ValueError, match=r"the episode has ended: call reset\(\) first"):
        env.step(COAST)
    env.reset()
    env.step(COAST)
    env.close()
    env.close()
    for call in (lambda: env.step(COAST), env.reset):
        with pytest.raises(ValueError, match="closed; make a new one"):
            call()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ([0.0, float("nan"), 0.0], "throttle is nan"),
        ([0.0, 0.0, float("-inf")], "brake is -inf"),
        ([0.0, 1.0], r"shape \(2,\); it must have shape \(3,\)"),
        (0.5, r"shape \(\)"),
        ([[0.0, 1.0, 0.0]], r"shape \(1, 3\)"),
        (np.array([0.0, None, 1.0], dtype=object), "dtype object"),
        (["0", "1", "0"], "it must be numbers"),
        ([True, False, True], "dtype bool"),
        ([0.0, [1.0], 0.0], "action is ragged"),
    ],
)
def test_a_bad_action_is_named_and_nothing_moves(action, message):
    env = RacerEnv()
    env.reset()
    with pytest.raises(ValueError, match=message):
        env.step(action)
    assert env.step(COAST)[4]["stepCount"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"track_id": "track-9"}, "unknown track 'track-9'. Available: track-01, track-02, track-03"),
        ({"start": "pits"}, "unknown start 'pits'. Available: grid, anywhere"),
        ({"render_mode": "human"}, "unknown render_mode 'human'. Available: rgb_array"),
        ({"config_path": "nowhere.json"}, "config file nowhere.json cannot be read: No such file"),
        ({"bridge_url": "ws://localhost:1", "start": "anywhere"}, "the real game always starts on the grid"),
        ({"bridge_url": "ws://localhost:1", "track_id": "mine.json"}, "in the real game --track-id is one of track-01"),
        ({"bridge_url": "ws://localhost:1", "track_id": "random-1"}, "'random-1' exists only here"),
        ({"bridge_url": "ws://localhost:1", "render_mode": "rgb_array"}, "render_mode needs the embedded engine"),
        ({"track_id": "random-01"}, "unknown track 'random-01'"),
        ({"bridge_url": []}, "bridge_url is a list: \\[\\]; one car takes one"),
        ({"bridge_url": 7}, "bridge_url is 7; it must be a string"),
        ({"track_id": None}, "track_id is None; it must be a string"),
        ({"track_id": ["track-01", "track-02"]}, "one car takes one, RacerVectorEnv takes several"),
        ({"config_path": 7}, "config_path is 7; it must be the path"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RacerEnv(**arguments)


# -- the config file ---------------------------------------------------------------------------------------------------


def test_the_shipped_config_is_the_game_s_default():
    assert load_config() == DEFAULT_CONFIG
    assert json.loads(DEFAULT_CONFIG_PATH.read_text()) == DEFAULT_CONFIG


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{not json", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([1], "it must be an object with the keys weights, episode"),
        ({"weights": WEIGHTS}, "episode is missing"),
        ({**DEFAULT_CONFIG, "wieghts": {}}, "unknown key wieghts; did you mean weights?"),
        ({**DEFAULT_CONFIG, "episode": 3}, "episode is 3; it must be an object"),
        (
            {**DEFAULT_CONFIG, "weights": {**WEIGHTS, "progres": 1.0}},
            "unknown key weights.progres; did you mean weights.progress?",
        ),
        ({**DEFAULT_CONFIG, "weights": {**WEIGHTS, "qqq": 1.0}}, "unknown key weights.qqq; known keys: progress"),
        ({**DEFAULT_CONFIG, "weights": {"progress": 1.0, "speedBonus": 0.0}}, "weights.wallPenalty is missing"),
        (make_config(progress=float("nan")), "weights.progress is nan; it must be a finite number"),
        (make_config(progress=float("inf")), "weights.progress is inf"),
        (make_config(progress="1"), "weights.progress is '1'; it must be a finite number"),
        (make_config(progress=None), "weights.progress is None"),
        (make_config(progress=True), "weights.progress is True"),
        (make_config(stillnessSpeedThreshold=-1.0), "weights.stillnessSpeedThreshold is -1.0"),
        (make_config(maxSteps=-5), "episode.maxSteps is -5; it must be a whole number of ticks, 1 or more"),
        (make_config(maxSteps=0), "episode.maxSteps is 0"),
        (make_config(maxSteps=10.5), "episode.maxSteps is 10.5"),
        (make_config(stillnessTimeoutTicks=-1), "episode.stillnessTimeoutTicks is -1"),
        (make_config(maxSteps=10**400), "episode.maxSteps is 1000"),
    ],
)
def test_a_bad_config_names_the_key(tmp_path, config, message):
    path = tmp_path / "bad.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        RacerEnv(config_path=path)
    assert str(path) in str(error.value)


# -- many cars ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "everyone_at_once"), [("grid", True), ("grid", False), ("anywhere", False)])
def test_vector_env_is_a_sync_vector_env_of_single_ones(short, start, everyone_at_once):
    tracks = ["track-01", "track-03", "track-01", "track-03", "track-01"]
    makers = [lambda track=track: RacerEnv(track, config_path=short, start=start) for track in tracks]
    sync = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    mine = RacerVectorEnv(5, tracks[:2], short, start=start)
    assert mine.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert mine.single_action_space == sync.single_action_space and mine.action_space == sync.action_space
    assert mine.single_observation_space == sync.single_observation_space and mine.observation_space == sync.observation_space
    seeds = [3, 4, 5, 6, 7]
    for (a, info_a), (b, info_b) in [(mine.reset(seed=seeds), sync.reset(seed=seeds)), (mine.reset(), sync.reset())]:
        assert_same(a, b)
        assert_same(info_a, info_b)
    rng = np.random.default_rng(0)
    ended = 0
    for _ in range(130):
        actions = rng.uniform([-1, 0, 0], [1, 1, 0.2], (5, 3)).astype(np.float32)
        if not everyone_at_once:
            actions[1] = 0  # stands still: ends by stillness, at other times than the others
        a, b = mine.step(actions), sync.step(actions)
        for x, y in zip(a[:4], b[:4], strict=True):
            assert_same(x, y)
        for key in ("final_obs", "_final_obs", "final_info", "_final_info", "lap", "checkpoint", "stepCount"):
            assert (key in a[4]) == (key in b[4])
            assert_same(a[4].get(key), b[4].get(key))
        ended += int(a[2].sum() + a[3].sum())
    assert ended >= 10


def test_episode_statistics_are_the_sums_over_an_episode(short):
    envs = RacerVectorEnv(4, config_path=short, start="anywhere")
    envs.reset(seed=2)
    returns, lengths, seen = np.zeros(4), np.zeros(4, int), 0
    for t in range(120):
        actions = np.tile(np.float32([0, t % 2, 0]), (4, 1))
        actions[0] = 0
        _, rewards, terminated, truncated, infos = envs.step(actions)
        returns, lengths, done = returns + rewards, lengths + 1, terminated | truncated
        assert ("episode" in infos) == ("_episode" in infos) == done.any()
        if done.any():
            np.testing.assert_array_equal(infos["_episode"], done)
            np.testing.assert_array_equal(infos["episode"]["l"], np.where(done, lengths, 0))
            np.testing.assert_allclose(infos["episode"]["r"], np.where(done, returns, 0), atol=1e-12)
            assert ((infos["episode"]["t"] > 0) == done).all()
        seen += int(done.sum())
        returns[done], lengths[done] = 0, 0
    assert seen > 8


OBSERVATION_WRAPPERS = ["FlattenObservation", "NormalizeObservation"]


def test_wrappers_of_actions_and_rewards_work_and_those_of_observations_need_separate_environments(short):
    wrappers = gym.wrappers.vector
    for wrap in (
        wrappers.ClipAction,
        lambda envs: wrappers.RescaleAction(envs, np.float32(-1), np.float32(1)),
        lambda envs: wrappers.TransformReward(envs, lambda rewards: 2 * rewards),
    ):
        envs = wrap(RacerVectorEnv(2, config_path=short))
        envs.reset(seed=2)
        assert any("episode" in envs.step(np.zeros((2, 3), np.float32))[4] for _ in range(25))
    for name in OBSERVATION_WRAPPERS:
        with pytest.raises((ValueError, AssertionError)):
            getattr(wrappers, name)(RacerVectorEnv(2, config_path=short))
        envs = gym.make_vec("TopDownRacer-v0", num_envs=2, vectorization_mode="sync", config_path=short)
        envs = getattr(wrappers, name)(envs)
        envs.reset(seed=2)
        assert envs.step(envs.action_space.sample())[0].shape == (2, 14)


def test_a_vector_environment_can_be_pickled_and_continues(short):
    envs = RacerVectorEnv(3, config_path=short, start="anywhere", stagger=True)
    envs.reset(seed=1)
    copied = pickle.loads(pickle.dumps(envs))
    for _ in range(50):
        a, b = (e.step(np.tile([0.1, 1.0, 0.0], (3, 1))) for e in (envs, copied))
        for x, y in zip(a[:4], b[:4], strict=True):
            np.testing.assert_array_equal(x, y)


def test_two_seeds_share_no_starts():
    """Seed 1 of car 1 is not seed 2 of car 0, or ten seeds would try nearly the same starts."""
    starts = np.concatenate([RacerVectorEnv(8, start="anywhere").reset(seed=seed)[0] for seed in range(1, 6)])
    assert len(np.unique(starts[:, 12])) == 5 * 8


def test_staggered_first_episodes_end_at_different_times_and_say_so(short):
    envs = RacerVectorEnv(10, config_path=short, stagger=True)
    envs.reset(seed=0)
    ends, cuts = [[] for _ in range(10)], [[] for _ in range(10)]
    for t in range(1, 91):
        _, _, terminated, truncated, infos = envs.step(np.tile([0.0, 1.0, 0.0], (10, 1)))
        for i in np.flatnonzero(terminated | truncated):
            ends[i].append(t)
            cuts[i].append(bool(infos["episode"]["cut"][i]))
            assert infos["episode"]["l"][i] == (ends[i][0] if len(ends[i]) == 1 else 40)
    assert sorted(e[0] for e in ends) == list(range(4, 41, 4)), "evenly spread up to the limit"
    assert all(b - a == 40 for e in ends for a, b in zip(e, e[1:], strict=False)), "whole episodes from then on"
    assert [c[0] for c in cuts] == [e[0] < 40 for e in ends] and not any(any(c[1:]) for c in cuts)


def backward(cars: int) -> np.ndarray:
    """Full lock at full throttle: a car turns round and gets nowhere."""
    return np.tile([1.0, 1.0, 0.0], (cars, 1))


@pytest.mark.parametrize("on_bridge", [False, True])
def test_a_car_without_progress_is_truncated_with_its_true_last_observation(on_bridge, good_bridge):
    url = good_bridge.url if on_bridge else None
    envs, free = RacerVectorEnv(2, bridge_url=url, stuck_ticks=60), RacerVectorEnv(2)
    first, _ = envs.reset(seed=0)
    free.reset(seed=0)
    travelled, farthest, waited, stuck = 0.0, 0.0, 0, False
    for _ in range(400):
        actions = backward(2)
        actions[1] = [0.0, 1.0, 0.0] if not stuck else [0.0, 0.5, 0.0]
        last, observations = first[0][12], envs.observations
        a, b = envs.step(actions), free.step(actions)
        gain = b[0][0][12] - observations[0][12]
        travelled += gain - np.rint(gain)
        waited = 0 if travelled > farthest else waited + 1
        farthest, stuck = max(farthest, travelled), waited == 60
        assert a[3].tolist() == [stuck, False] and not a[2].any()
        if stuck:
            break
        np.testing.assert_array_equal(a[0], b[0])
    assert stuck and last == first[0][12]
    np.testing.assert_array_equal(a[4]["final_obs"][0], b[0][0])
    np.testing.assert_array_equal(a[0][0], first[0], err_msg="on the grid again")
    assert a[4]["episode"]["l"][0] > 60 and not a[4]["episode"]["cut"].any()
    envs.close()


def test_a_stuck_car_keeps_the_time_of_its_first_cut(short):
    """Otherwise all cars would be on the grid together, and then no more for a whole episode."""
    cuts = []
    for stuck_ticks in (0, 8):
        envs = RacerVectorEnv(4, config_path=short, stagger=True, stuck_ticks=stuck_ticks)
        envs.reset(seed=0)
        first = {}
        for tick in range(1, 25):
            infos = envs.step(np.zeros((4, 3)))[4]
            for i in np.flatnonzero(infos.get("episode", {}).get("cut", [])):
                first.setdefault(i, tick)
        cuts.append(first)
    assert cuts[0] == cuts[1] and sorted(cuts[0].values()) == [10, 20]


def test_a_car_stuck_in_the_tick_of_its_cut_begins_a_whole_episode(short):
    envs, lengths = RacerVectorEnv(4, config_path=short, stagger=True, stuck_ticks=10), []
    envs.reset(seed=0)
    for _ in range(60):
        infos = envs.step(np.zeros((4, 3)))[4]
        lengths += [int(n) for n in infos.get("episode", {}).get("l", []) if n]
    assert min(lengths) == 10, "not one of a single tick"


def test_one_car_is_stuck_after_the_same_time():
    env, envs = RacerEnv(stuck_ticks=60), RacerVectorEnv(1, stuck_ticks=60)
    env.reset(seed=0), envs.reset(seed=0)
    ticks = 0
    while ticks < 499:
        ticks += 1
        _, _, terminated, truncated, _ = env.step(backward(1)[0])
        assert truncated == envs.step(backward(1))[3][0] and not terminated
        if truncated:
            break
    assert 60 < ticks < 499
    with pytest.raises(ValueError, match="stuck_ticks is -1; it must be a number of ticks"):
        RacerEnv(stuck_ticks=-1)


@pytest.mark.parametrize("on_bridge", [False, True])
def test_an_action_is_held_for_some_ticks_and_nothing_after_an_end_counts(on_bridge, good_bridge, tmp_path):
    """Against single cars that are given the action in every tick. One is truncated, the other terminated, both within a step."""
    config = short_episodes(tmp_path, 10, stillnessTimeoutTicks=7)
    url = good_bridge.url if on_bridge else None
    envs = RacerVectorEnv(2, config_path=config, bridge_url=url, action_repeat=4, gamma=0.5)
    singles, actions, ends = [RacerEnv(config_path=config) for _ in range(2)], np.array([[0.1, 1, 0], [0, 0, 1.0]]), []
    envs.reset(seed=0), [single.reset(seed=0) for single in singles]
    for _ in range(12):
        observations, rewards, terminated, truncated, infos = envs.step(actions)
        for i, single in enumerate(singles):
            total, discount, ticks, wall = 0.0, 1.0, 0, 0.0
            for _ in range(4):
                last, reward, *end, info = single.step(actions[i])
                total, discount, ticks = total + discount * reward, discount * 0.5, ticks + 1
                wall += info["progress"]
                if any(end):
                    break
            assert rewards[i] == pytest.approx(total, abs=1e-12) and infos["progress"][i] == pytest.approx(wall, abs=1e-12)
            assert [terminated[i], truncated[i]] == end and infos["ticks"][i] == ticks
            assert infos["discount"][i] == (0 if end[0] else discount)
            if any(end):
                ends.append((i, *end, ticks))
                np.testing.assert_array_equal(infos["final_obs"][i], last)
                assert infos["final_info"]["stepCount"][i] == info["stepCount"] == infos["episode"]["l"][i]
                last, _ = single.reset()
            np.testing.assert_array_equal(observations[i], last)
    assert set(ends) == {(0, False, True, 2), (1, True, False, 3)}
    envs.close()


def test_what_infos_hold_is_the_user_s_own(short):
    """Writing into anything a step returned changes nothing in the cars."""
    a, b = (RacerVectorEnv(3, config_path=short) for _ in range(2))
    a.reset(seed=0), b.reset(seed=0)
    for _ in range(60):
        (*x, info_x), (*y, info_y) = (envs.step(np.tile([0.1, 1.0, 0.0], (3, 1))) for envs in (a, b))
        for p, q in zip(x, y, strict=True):
            np.testing.assert_array_equal(p, q)
        assert_same(info_x, info_y) if "episode" not in info_x else None
        for value in [*y, *info_y.values()]:
            if isinstance(value, np.ndarray) and value.dtype != object:
                value[:] = 1


def test_make_and_make_vec():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make("TopDownRacer-v0", track_id="track-02")
        env.reset(seed=0)
        assert env.unwrapped.spec.id == racer_env.ENV_ID
        envs = gym.make_vec("TopDownRacer-v0", num_envs=64)
        assert isinstance(envs, RacerVectorEnv) and envs.reset(seed=0)[0].shape == (64, 14)
        envs.close()
        for mode in ("sync", "async"):
            envs = gym.make_vec("TopDownRacer-v0", num_envs=2, vectorization_mode=mode, track_id="track-03")
            envs.reset(seed=0)
            envs.step(envs.action_space.sample())
            envs.close()


def test_a_state_that_does_not_fit_is_refused_whole(short):
    envs = RacerVectorEnv(2, config_path=short)
    envs.reset(seed=0)
    state = envs.get_state()
    envs.step(np.tile([0.0, 1.0, 0.0], (2, 1)))
    before = envs.get_state()
    for wrong, message in (
        ({k: v for k, v in state.items() if k != "returns"}, "environment state 'returns'"),
        ({**state, "returns": np.zeros(7)}, "environment state 'returns'"),
        (RacerVectorEnv(2, "track-02").get_state(), "other tracks"),
    ):
        with pytest.raises(ValueError, match=message):
            envs.set_state(wrong)
        assert all(np.array_equal(before[k], v) for k, v in envs.get_state().items())
    envs.set_state(state)
    envs.close()
    with pytest.raises(ValueError, match="closed"):
        envs.set_state(state)


def test_seeds_of_none_continue_or_are_fresh():
    def make():
        envs = RacerVectorEnv(2, start="anywhere")
        sync = SyncVectorEnv([lambda: RacerEnv(start="anywhere")] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        return envs, sync

    envs, sync = make()
    for seed in ([1, 2], [None, 5], [7, None], None):
        np.testing.assert_array_equal(envs.reset(seed=seed)[0], sync.reset(seed=seed)[0])
    first, second = (RacerVectorEnv(2, start="anywhere").reset(seed=[None, 5])[0] for _ in range(2))
    assert not np.array_equal(first[0], second[0]) and np.array_equal(first[1], second[1])
    with pytest.raises(ValueError, match=r"seed is \[1, -3\]; it must be 0 or more, or a list of 2"):
        envs.reset(seed=[1, -3])


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros((2, 3)), r"shape \(2, 3\); it must have shape \(4, 3\)"),
        (np.zeros(3), "per car"),
        (np.array([[0, 1, 0]] * 3 + [[0, np.nan, 0]]), "action of car 3: throttle is nan"),
        (np.full((4, 3), None), "dtype object"),
    ],
)
def test_bad_vector_actions_are_named(actions, message):
    envs = RacerVectorEnv(4)
    with pytest.raises(ValueError, match=r"call reset\(\) first"):
        envs.step(np.zeros((4, 3)))
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        envs.step(actions)
    envs.close()
    envs.close()
    with pytest.raises(ValueError, match="closed"):
        envs.step(np.zeros((4, 3)))


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "8"])
def test_a_bad_number_of_cars_is_refused(count):
    with pytest.raises(ValueError, match="num_envs is"):
        RacerVectorEnv(count)


# -- the scale of rewards ----------------------------------------------------------------------------------------------


def test_reward_scaler_divides_by_the_deviation_of_discounted_returns_and_resets_them_at_an_end():
    rng = np.random.default_rng(3)
    rewards, done = rng.normal(size=(30, 4)), rng.random((30, 4)) < 0.2
    scaler = RewardScaler(0.9, np.ones(4))
    for part in (slice(0, 10), slice(10, 30)):
        scaler.update(rewards[part], done[part])
    returns, seen = np.zeros(4), []
    for t in range(30):
        returns = 0.9 * returns + rewards[t]
        seen.append(returns)
        returns = np.where(done[t], 0.0, returns)
    np.testing.assert_allclose(1 / scaler.scale, np.std(seen), rtol=1e-4)
    never_reset = RewardScaler(0.9, np.ones(4))
    never_reset.update(rewards, np.zeros_like(done))
    assert np.abs(scaler.scale - never_reset.scale).min() > 1e-3
    np.testing.assert_array_equal(scaler.returns, np.where(done[-1], 0.0, seen[-1]))


def test_a_metre_pays_the_same_on_every_track_and_the_cars_of_other_processes_count(monkeypatch):
    """A lap pays 1 on any track, so a tick at the same speed pays less on a longer one, until it is scaled."""
    lengths, speed = np.array([1000.0, 2000.0, 4000.0, 1000.0]), np.random.default_rng(4).uniform(0, 2, (50, 4))
    rewards, done = speed / lengths, np.zeros((50, 4), bool)
    scaler = RewardScaler(0.9, lengths)
    scaler.update(rewards, done)
    scaled = rewards * scaler.scale
    np.testing.assert_allclose(scaled / speed, np.full_like(speed, scaled[0, 0] / speed[0, 0]))
    first, second = RewardScaler(0.9, lengths[:2]), RewardScaler(0.9, lengths[2:])
    everyone = []
    for part, cars in ((first, slice(0, 2)), (second, slice(2, 4))):
        monkeypatch.setattr(ppo_racer, "all_gather", lambda moments: everyone.append(moments) or [])
        part.update(rewards[:, cars], done[:, cars])
    monkeypatch.setattr(ppo_racer, "all_gather", lambda moments: everyone)
    first.update(rewards[:1, :2], done[:1, :2])
    np.testing.assert_allclose(first.moments, scaler.moments, rtol=1e-9)


def test_leaving_the_road_can_cost_more_than_the_config_says():
    usual, careful = RacerVectorEnv(4), RacerVectorEnv(4, off_road_penalty_scale=3)
    for envs in (usual, careful):
        envs.reset(seed=0)
    left = 0
    for _ in range(200):
        a, b = (envs.step(np.tile([0.4, 1.0, 0.0], (4, 1))) for envs in (usual, careful))
        np.testing.assert_allclose(b[1] - a[1], 2 * a[4]["offTrack"], atol=1e-15)
        left += (a[4]["offTrack"] < 0).sum()
    assert left > 10
