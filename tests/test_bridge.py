"""The bridge client on a real socket, to a server in its own process: the same numbers as embedded, and every fault named."""

from __future__ import annotations

import re
import socket
import time
import warnings

import gymnasium as gym
import numpy as np
import pytest
from bridge_server import BAD_REPLIES, RAW_FRAMES
from conftest import drive, short_episodes
from gymnasium.utils.env_checker import check_env

import racer_env
from racer.game import bridge as racer_bridge
from racer.game.bridge import BridgeCars, BridgeError
from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS
from racer.training.evaluation import COMPARED_TICKS, why_not_like_engine
from racer_env import RacerEnv, RacerVectorEnv

GO = np.array([0.0, 1.0, 0.0])


@pytest.fixture
def short_timeouts(monkeypatch):
    monkeypatch.setattr(racer_bridge, "REPLY_TIMEOUT_S", 1.5)
    monkeypatch.setattr(racer_bridge, "CONNECT_TIMEOUT_S", 1.5)


def test_the_promised_timeouts():
    assert (racer_bridge.CONNECT_TIMEOUT_S, racer_bridge.REPLY_TIMEOUT_S) == (10.0, 30.0)


# -- the same environment ----------------------------------------------------------------------------------------------


def test_one_car_drives_the_same_on_both_backends(good_bridge):
    bridge, embedded = RacerEnv("track-02", bridge_url=good_bridge.url), RacerEnv("track-02")
    (a, info_a), (b, info_b) = bridge.reset(seed=1), embedded.reset(seed=1)
    np.testing.assert_array_equal(a, b)
    assert info_a == info_b
    for _ in range(300):
        action = drive(a[None])[0].astype(np.float32)
        (a, *x), (b, *y) = bridge.step(action), embedded.step(action)
        np.testing.assert_array_equal(a, b)
        assert x == y
        assert {k: type(v) for k, v in x[3].items()} == {k: type(v) for k, v in y[3].items()}
    bridge.close()


def test_check_env_passes_without_warnings_on_the_bridge(good_bridge):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for env in (
            RacerEnv(bridge_url=good_bridge.url),
            gym.make(racer_env.ENV_ID, bridge_url=good_bridge.url),
        ):
            check_env(env.unwrapped)
            env.close()


def test_many_cars_on_two_bridges_equal_the_embedded_ones(good_bridge, bridge, tmp_path):
    path = short_episodes(tmp_path, 40, stillnessTimeoutTicks=25)
    urls, tracks = [good_bridge.url, bridge().url], ["track-01", "track-03", "track-02"]
    mine = RacerVectorEnv(5, tracks, path, bridge_url=urls)
    embedded = RacerVectorEnv(5, tracks, path)
    a, b = mine.reset(seed=0), embedded.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(100):
        np.testing.assert_array_equal(a[0], b[0])
        for infos in (a[-1], b[-1]):
            infos.get("episode", {}).pop("t", None)  # seconds
        assert str(a[-1]) == str(b[-1])
        actions = rng.uniform([-1, 0, 0], 1, (5, 3))
        actions[2] = 0
        a, b = mine.step(actions), embedded.step(actions)
        for x, y in zip(a[1:4], b[1:4], strict=True):
            np.testing.assert_array_equal(x, y)
    mine.close()


def test_all_requests_are_sent_before_the_first_reply_is_read(bridge, short_timeouts):
    """A server that answers nobody before it has heard from everybody: only requests in flight together get through."""
    envs = RacerVectorEnv(4, bridge_url=bridge("--together", "4").url)
    envs.reset(seed=0)
    for _ in range(3):
        envs.step(np.tile(GO, (4, 1)))
    envs.close()


def test_the_config_goes_with_every_reset_and_acts(good_bridge, tmp_path):
    path = short_episodes(tmp_path, 3000, speedBonus=1.5)
    env = RacerEnv(bridge_url=good_bridge.url, config_path=path)
    for _ in range(2):
        env.reset()
        for _ in range(10):
            info = env.step(GO)[4]
        assert info["speed"] == pytest.approx(1.5 * info["rawSpeed"] / 160)
    env.close()


# -- no bridge ---------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_no_server_says_which_url_and_what_to_do():
    url = f"ws://127.0.0.1:{free_port()}"
    for make in (lambda: RacerEnv(bridge_url=url), lambda: RacerVectorEnv(3, bridge_url=url)):
        with pytest.raises(BridgeError) as error:
            make()
        message = str(error.value)
        assert url in message and "connection refused" in message
        assert "npx tsx src/ai/run-bridge.ts" in message and "embedded engine" in message


@pytest.mark.parametrize(
    "url", ["http://localhost:9876", "localhost:9876", "wss://localhost:1", "ws://", "ws://h:99999", "ws://:80", ""]
)
def test_a_url_that_cannot_be_one_is_refused(url):
    with pytest.raises(BridgeError, match="not a bridge URL; it must look like ws://localhost:9876") as error:
        RacerEnv(bridge_url=url)
    assert isinstance(error.value, ValueError) and repr(url) in str(error.value)


@pytest.mark.parametrize("kind", ["http", "forbidden", "garbage"])
def test_a_server_that_is_no_websocket_server(bridge, kind):
    url = bridge("--raw", kind).url
    with pytest.raises(BridgeError, match="not a WebSocket server") as error:
        RacerEnv(bridge_url=url)
    assert url in str(error.value)


def test_a_server_that_accepts_and_says_nothing(bridge, short_timeouts):
    with pytest.raises(BridgeError, match=r"no answer within 1\.5 s"):
        RacerEnv(bridge_url=bridge("--raw", "silent").url)


def test_one_dead_bridge_of_two_closes_the_connections_to_the_other(good_bridge):
    with pytest.raises(BridgeError, match="connection refused"):
        RacerVectorEnv(4, bridge_url=[good_bridge.url, f"ws://127.0.0.1:{free_port()}"])


# -- faults in mid-run -------------------------------------------------------------------------------------------------


def run_into_fault(url: str, steps: int, cars: int = 1) -> str:
    """Drive into a fault. -> the message; and after it: every call says closed, closing works."""
    envs = RacerVectorEnv(cars, bridge_url=url)
    envs.reset(seed=0)
    for _ in range(steps):
        envs.step(np.tile(GO, (cars, 1)))
    with pytest.raises(BridgeError) as error:
        envs.step(np.tile(GO, (cars, 1)))
    for call in (lambda: envs.step(np.tile(GO, (cars, 1))), envs.reset):
        with pytest.raises(BridgeError, match="closed; make a new environment"):
            call()
    envs.close()
    envs.close()
    assert url in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("die", "(connection was lost|game is gone)"),
        ("cut", "(connection was lost|game is gone)"),
        ("close", r"the server closed the connection \(code 1001\)"),
        ("stall", r"no reply within 1\.5 s"),
        pytest.param("drip", r"no reply within 1\.5 s", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_fails_in_mid_step(bridge, short_timeouts, fault, message):
    begun = time.monotonic()
    said = run_into_fault(bridge("--fault", fault, "--after", "5").url, 5, cars=3)
    assert re.search(message, said), said
    assert re.search(r"bridge connection \d", said) and "after 5 steps" in said
    assert time.monotonic() - begun < 30, "it hung"


NAMED = {
    "not-json": "the reply is not JSON .*: steer left",
    "not-object": r"the reply is not a JSON object: \[1, 2, 3\]",
    "deep-json": "the reply is not JSON",
    "wrong-type": "the reply's type is 'reset_result', expected 'step_result'",
    "no-observation": "observation is null, it must be a list of 14 numbers",
    "no-reward": "the reply has no reward",
    "no-info": "info is null, it must be an object",
    "no-lap": r"the reply has no info\.lap",
    "13-numbers": "observation has 13 elements, it must be a list of 14 numbers",
    "nan-ray": r"observation\[0\] \(ray0\) is NaN, it must be a number in \[0, 1\]",
    "far-ray": r"observation\[0\] \(ray0\) is 7\.25, it must be a number in \[0, 1\]",
    "number-terminated": "terminated is 0, it must be true or false",
    "half-lap": r"info\.lap is 1\.5, it must be a whole number",
    "binary": "the reply is binary",
    "too-long": r"longer than 65,536 bytes: .*\{",
    "long": "longer than 65,536 bytes",
    "bad-utf8": "the reply is not a text frame of WebSocket|the reply is not JSON",
    "bad-frame": "the reply is not a text frame of WebSocket",
    "error": "the game answered with an error: engine exploded",
}


@pytest.mark.parametrize("fault", [*BAD_REPLIES, *RAW_FRAMES])
def test_a_bad_reply_is_named_and_shown(good_bridge, fault):
    said = run_into_fault(f"{good_bridge.url}/?fault={fault}&after=2", 2)
    assert re.search(NAMED[fault], said), said
    assert "bridge connection 0" in said and "after 2 steps" in said


def test_the_game_s_own_errors_come_through(good_bridge):
    env = RacerEnv("track-77", bridge_url=good_bridge.url)
    with pytest.raises(BridgeError, match=r'Unknown track "track-77"\. Available: track-01, track-02, track-03'):
        env.reset()
    env.close()


def test_a_request_too_long_for_the_game_is_an_error_not_a_hang(good_bridge, short_timeouts):
    env = RacerEnv("x" * 70_000, bridge_url=good_bridge.url)
    with pytest.raises(BridgeError, match=r"closed the connection \(code 1009\)|connection was lost|game is gone"):
        env.reset()
    env.close()


def test_close_does_not_wait_for_a_stalled_server(bridge):
    """The default reply timeout is 30 s; a close that waited for the server would run into the test's own limit."""
    env = RacerEnv(bridge_url=bridge("--fault", "stall").url)
    env.reset()
    connection = env._fleet.cars.connections[0]
    connection.send_step(GO)
    begun = time.monotonic()
    env.close()
    env.close()
    assert time.monotonic() - begun < 15


# -- the twin ----------------------------------------------------------------------------------------------------------


def test_the_game_and_the_embedded_engine_are_compared_into_a_wall(good_bridge, bridge):
    for track in TRACKS:
        assert why_not_like_engine(track, None, good_bridge.url) is None
        sim = RacerSim(1, [track])
        touched = [
            sim.step(np.array([[0.3 * np.sin(t / 5), 1.0, 0.0]])) and sim.wall_contact[0] for t in range(1, COMPARED_TICKS + 1)
        ]
        assert any(touched), "the wall is a part of the comparison"
    other = bridge("--engine-force", "56000").url
    said = why_not_like_engine("track-01", None, other)
    assert re.fullmatch(r"\w+ on track-01 is \S+ after \d+ ticks, \S+ on the embedded engine", said), said
    assert why_not_like_engine("track-77", None, good_bridge.url) == "track-77 is not known here"


def test_a_large_reward_weight_hides_no_other_engine(bridge, tmp_path):
    config = short_episodes(tmp_path, 3000, progress=20_000.0)
    assert why_not_like_engine("track-01", config, bridge().url) is None
    assert why_not_like_engine("track-01", config, bridge("--engine-force", "56000").url)


@pytest.mark.parametrize(("name", "place", "value"), [("reward", 1, 5.0), ("terminated", 2, True), ("lap", -1, 7)])
def test_rewards_ends_and_infos_are_compared_too(good_bridge, monkeypatch, name, place, value):
    real = RacerEnv.step

    def other(self, action):
        result = list(real(self, action))
        if isinstance(self._fleet.cars, BridgeCars) and self._fleet.cars.connections[0].steps == 30:
            result[place] = {**result[-1], "lap": value} if name == "lap" else value
        return result

    monkeypatch.setattr(RacerEnv, "step", other)
    assert why_not_like_engine("track-01", None, good_bridge.url).startswith(f"{name} on track-01 is ")


# -- after a fault -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(racer_bridge, "LONGEST_PAUSE_S", 0.0)


def test_with_retries_a_fault_ends_all_episodes_as_truncated_where_they_truly_were(bridge, tmp_path, no_pauses, caplog):
    config = short_episodes(tmp_path, 3000)
    server = bridge("--fault", "cut", "--after", "5")
    envs = RacerVectorEnv(2, config_path=config, bridge_url=server.url, retries=2)
    first, _ = envs.reset(seed=1)
    for _ in range(5):
        last, *_, before = envs.step(np.tile(GO, (2, 1)))
    config.write_text("somebody is editing this")
    observations, rewards, terminated, truncated, infos = envs.step(np.tile(GO, (2, 1)))
    np.testing.assert_array_equal(observations, first)
    np.testing.assert_array_equal(np.stack(infos["final_obs"]), last)
    assert truncated.all() and not terminated.any() and not rewards.any(), "the step that was lost moved nobody"
    assert infos["final_info"]["stepCount"].tolist() == [5, 5] and not infos["final_info"]["progress"].any()
    assert infos["final_info"]["checkpoint"].tolist() == before["checkpoint"].tolist()
    assert infos["episode"]["l"].tolist() == [5, 5] and infos["episode"]["cut"].all() and infos["_episode"].all()
    assert (infos["episode"]["r"] != 0).all() and infos["stepCount"].tolist() == [0, 0] and envs.bridge_faults == 1
    assert "Reconnecting (attempt 1 of 2)" in caplog.text
    for _ in range(5):
        envs.step(np.tile(GO, (2, 1)))
    assert envs.step(np.tile(GO, (2, 1)))[3].all() and envs.bridge_faults == 2, "the count of retries starts again"
    server.kill()
    with pytest.raises(BridgeError, match="no game bridge at"):
        envs.step(np.tile(GO, (2, 1)))
    assert "(attempt 2 of 2)" in caplog.text and "(attempt 3" not in caplog.text
    envs.close()


def test_a_fault_between_two_episodes_keeps_the_step_that_was_driven(good_bridge, tmp_path, no_pauses, monkeypatch):
    """One car's episode ends, and the bridge dies before the next one begins: the other car is cut off after this step."""
    short = short_episodes(tmp_path, 8)
    envs, twin = (
        RacerVectorEnv(2, config_path=short, bridge_url=url, retries=1, stagger=True) for url in (good_bridge.url, None)
    )
    envs.reset(), twin.reset()
    for _ in range(3):
        envs.step(np.tile(GO, (2, 1))), twin.step(np.tile(GO, (2, 1)))
    real = BridgeCars.reset

    def gone(cars, which, seeds=None):
        monkeypatch.setattr(BridgeCars, "reset", real)
        raise BridgeError("gone")

    monkeypatch.setattr(BridgeCars, "reset", gone)
    a, b = envs.step(np.tile(GO, (2, 1))), twin.step(np.tile(GO, (2, 1)))
    assert b[3].tolist().count(True) == 1 and a[3].all() and not a[2].any()
    np.testing.assert_array_equal(a[1], b[1])
    (other,) = np.flatnonzero(~b[3])
    np.testing.assert_array_equal(a[4]["final_obs"][other], b[0][other])
    assert a[4]["episode"]["l"].tolist() == [4, 4] and a[4]["episode"]["cut"].all()
    envs.close()


def test_a_fault_in_a_reset_is_retried_and_before_the_first_tick_no_episode_has_ended(bridge, no_pauses):
    server = bridge("--fault", "cut")
    envs = RacerVectorEnv(1, bridge_url=server.url, retries=2)
    envs.reset()
    infos = envs.step(GO[None])[4]
    assert infos["_final_info"].all() and not infos["_episode"].any()
    envs._fleet.cars.close()
    assert envs.reset()[0].shape == (1, 14) and envs.bridge_faults == 2
    envs.close()


def test_whoever_sets_retries_to_0_does_not_wait_any_longer(bridge, monkeypatch):
    """As a signal's handler does in the middle of a pause of 30 s."""
    server = bridge("--fault", "die")
    envs = RacerVectorEnv(1, bridge_url=server.url, retries=5)
    monkeypatch.setattr(racer_bridge, "LONGEST_PAUSE_S", 1e9)
    envs._failures_in_a_row = 4  # a pause of 16 s
    envs.reset()
    envs._failures_in_a_row = 4
    monkeypatch.setattr(racer_env.time, "sleep", lambda seconds: setattr(envs, "retries", 0))
    with pytest.raises(BridgeError):
        envs.step(GO[None])
    envs.close()


def test_the_state_of_the_real_game_is_empty(good_bridge):
    envs = RacerVectorEnv(2, bridge_url=good_bridge.url)
    envs.reset()
    assert envs.get_state() == {}
    with pytest.raises(ValueError, match="the state of the real game"):
        envs.set_state({})
    envs.close()


def test_after_a_fault_the_episodes_are_staggered_again(good_bridge, no_pauses, monkeypatch, tmp_path):
    """Otherwise all cars would end together for the rest of the run."""
    envs = RacerVectorEnv(4, config_path=short_episodes(tmp_path, 20), bridge_url=good_bridge.url, retries=1, stagger=True)
    envs.reset()
    real, ends = BridgeCars.step, []

    def gone(cars, actions, *how):
        monkeypatch.setattr(BridgeCars, "step", real)
        raise BridgeError("gone")

    for tick in range(90):
        if tick == 50:
            monkeypatch.setattr(BridgeCars, "step", gone)
        ended = envs.step(np.tile(GO, (4, 1)))[3]
        ends += [(tick, car) for car in np.flatnonzero(ended)]
    later = [tick for tick, _ in ends if tick > 50]
    assert [car for tick, car in ends if tick == 50] == [0, 1, 2, 3] and len(later) == len(set(later)) >= 4
    envs.close()
