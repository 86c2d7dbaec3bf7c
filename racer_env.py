"""The racing game as a Gymnasium environment: on the embedded engine, or on the real game behind its WebSocket bridge.

    import gymnasium as gym
    import racer_env                                                         # registers TopDownRacer-v0

    env = gym.make("TopDownRacer-v0")                                        # one car, embedded engine
    env = racer_env.RacerEnv(bridge_url="ws://localhost:9876")               # one car in the real game
    envs = racer_env.RacerVectorEnv(num_envs=256)                            # 256 cars, one batched engine
    envs = racer_env.RacerVectorEnv(8, bridge_url=["ws://localhost:9876", "ws://localhost:9877"])

Both backends give the same spaces, the same info, the same numbers; `RacerEnv` is the contract, its docstring the spec.

    1  the contract     spaces, names, the config file
    2  embedded cars    racer_sim behind a small interface
    3  bridge cars      the same interface over WebSocket connections to the game
    4  RacerEnv         one car
    5  RacerVectorEnv   N cars, same-step autoreset, episode statistics
    6  Painter          pictures of a track with cars on it

What the caller did wrong raises ValueError; what the wire did raises BridgeError. Both leave an environment that can be closed.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np
import websocket
from gymnasium.vector import AutoresetMode

from racer_sim import (
    DEFAULT_CONFIG,
    NUM_RAYS,
    OBS_SIZE,
    REWARD_PARTS,
    SHOULDER_WIDTH,
    STARTS,
    TICKS_PER_SECOND,
    TRACKS,
    RacerSim,
    Track,
)

# ======================================================================================================================
# 1  The contract
# ======================================================================================================================

OBS_NAMES = (*(f"ray{i}" for i in range(NUM_RAYS)), "speed", "yawRate", "steer", "arc", "centreline")
OBS_LOW = np.array([0.0] * NUM_RAYS + [0.0, -1.0, -1.0, 0.0, 0.0], dtype=np.float32)
OBS_HIGH = np.ones(OBS_SIZE, dtype=np.float32)
ACTION_NAMES = ("steer", "throttle", "brake")
ACTION_LOW = np.array([-1.0, 0.0, 0.0], dtype=np.float32)
ACTION_HIGH = np.array([1.0, 1.0, 1.0], dtype=np.float32)

# What info holds after a step, with its type: the game's keys, in the game's order.
STEP_INFO: dict[str, type] = {
    **dict.fromkeys(REWARD_PARTS, float),
    "tick": int,
    "rawSpeed": float,
    "lap": int,
    "checkpoint": int,
    "stepCount": int,
    "wallContact": bool,
    "stillnessCounter": int,
}
RESET_INFO = ("lap", "checkpoint", "stepCount")

ENV_ID = "TopDownRacer-v0"
DEFAULT_CONFIG_PATH = Path(__file__).with_name("ai-config.json")
NO_LIMIT = np.int64(2**62)
STAGGER_STRIDE = 7919  # a prime: with it, cars that are neighbours are far apart in the order of first endings
DEFAULT_BRIDGE_URL = "ws://localhost:9876"
CONNECT_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 30.0
MAX_REPLY_BYTES = 65_536
BRIDGE_HINT = (
    "Start the game's bridge (in the game's folder: npx tsx src/ai/run-bridge.ts) and check the URL, "
    "or leave the bridge URL out to drive on the embedded engine."
)


class BridgeError(RuntimeError):
    """The wire or the game behind it failed: no connection, a lost one, or a reply that is not what the protocol says."""


class BridgeUrlError(BridgeError, ValueError):
    """A bridge URL that cannot be one."""


def observation_space() -> gym.spaces.Box:
    return gym.spaces.Box(OBS_LOW, OBS_HIGH, dtype=np.float32)


def action_space() -> gym.spaces.Box:
    return gym.spaces.Box(ACTION_LOW, ACTION_HIGH, dtype=np.float32)


def load_config(config_path: str | Path | None = None) -> dict:
    """Reward weights and episode limits in the game's own schema, whole and checked. None: ai-config.json beside this file.

    Nothing is filled in: the game accepts a config with missing parts and then sends rewards that are not numbers.
    """
    if config_path is not None and not isinstance(config_path, (str, Path)):
        raise ValueError(f"config_path is {_start_of(config_path)}; it must be the path of a JSON file")
    path = Path(config_path) if config_path is not None else DEFAULT_CONFIG_PATH
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"config file {path} does not exist; leave config_path out for {DEFAULT_CONFIG_PATH.name}"
        ) from error
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config file {path} is not JSON: {error}") from error
    check_config(config, f"config file {path}")
    return config


def check_config(config, source: str = "config") -> None:
    """A ValueError that names the key, if this is not a whole config in the game's schema."""
    _check_keys(config, DEFAULT_CONFIG, source, "")
    for section, defaults in DEFAULT_CONFIG.items():
        _check_keys(config[section], defaults, source, f"{section}.")
        for key, value in config[section].items():
            name = f"{source}: {section}.{key}"
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value):
                raise ValueError(f"{name} is {_start_of(value)}; it must be a finite number, e.g. {defaults[key]}")
            if section == "episode" and (not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"{name} is {_start_of(value)}; it must be a whole number of ticks, 1 or more, e.g. {defaults[key]}"
                )
            if key == "stillnessSpeedThreshold" and value < 0:
                raise ValueError(
                    f"{name} is {value}; a speed is never negative, so it must be 0 or more, e.g. {defaults[key]}"
                )


def _check_keys(found, expected: dict, source: str, prefix: str) -> None:
    if not isinstance(found, dict):
        what = f"{prefix[:-1]} is" if prefix else "it is"
        raise ValueError(
            f"{source}: {what} {_start_of(found)}; it must be an object with the keys {', '.join(expected)}"
        )
    for key in found:
        if key not in expected:
            near = difflib.get_close_matches(str(key), expected, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(expected)}"
            raise ValueError(f"{source}: unknown key {prefix}{key}; {hint}")
    for key in expected:
        if key not in found:
            raise ValueError(
                f"{source}: {prefix}{key} is missing; the game needs the config whole, e.g. {json.dumps(expected[key])}"
            )


def _finite(value) -> bool:
    try:
        return math.isfinite(value)
    except (OverflowError, TypeError):
        return False


def _start_of(value, length: int = 80) -> str:
    """The beginning of anything, for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= length else text[:length] + "..."


def check_actions(actions, shape: tuple[int, ...]) -> np.ndarray:
    """Actions as finite float64 of that shape, or a ValueError that names the value. The box is not enforced: the game clamps."""
    try:
        array = np.asarray(actions)
    except ValueError as error:
        raise ValueError(f"action is ragged: {_start_of(actions)}; it must have shape {shape}") from error
    if array.dtype.kind not in "fiu":
        raise ValueError(
            f"action has dtype {array.dtype}: {_start_of(actions)}; it must be numbers {list(ACTION_NAMES)}"
        )
    if array.shape != shape:
        raise ValueError(
            f"action has shape {array.shape}; it must have shape {shape}: {list(ACTION_NAMES)}"
            + (" per car" * (len(shape) > 1))
        )
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        car = f" of car {where[0]}" if len(where) > 1 else ""
        raise ValueError(
            f"action{car}: {ACTION_NAMES[where[-1]]} is {array[where]}; the game takes finite numbers only"
        )
    return array


# ======================================================================================================================
# 2  Embedded cars
# ======================================================================================================================


class EmbeddedCars:
    """N cars on the embedded engine.

    The interface both backends have, arrays over cars throughout:
        reset(cars, seeds) -> observations (n, 14), info     cars: indices; seeds: one per car, or None to go on
        step(actions)      -> observations (N, 14), rewards, terminated, truncated, info
        check()            raises if the backend cannot serve a run; close() is idempotent and never hangs
    """

    def __init__(self, num_cars: int, track_ids: Sequence[str], config: dict, start: str, first_car: int = 0):
        self.sim = RacerSim(num_cars, track_ids, config, start, first_car=first_car)

    def check(self) -> None:
        pass

    def reset(self, cars: np.ndarray, seeds: Sequence[int] | None = None):
        if seeds is not None:
            self.sim.seed_cars(cars, seeds)
        observations = self.sim.reset(cars).astype(np.float32)
        sim = self.sim
        return observations, {
            "lap": sim.lap[cars],
            "checkpoint": sim.checkpoint[cars],
            "stepCount": sim.step_count[cars],
        }

    def step(self, actions: np.ndarray):
        sim = self.sim
        observations, rewards, terminated, truncated = sim.step(actions)
        info = {  # copies: what a user writes into infos is no business of the cars
            **sim.parts,
            "tick": sim.step_count.copy(),
            "rawSpeed": sim.speed.copy(),
            "lap": sim.lap.copy(),
            "checkpoint": sim.checkpoint.copy(),
            "stepCount": sim.step_count.copy(),
            "wallContact": sim.wall_contact.copy(),
            "stillnessCounter": sim.stillness.copy(),
        }
        return observations.astype(np.float32), rewards, terminated, truncated, info

    def close(self) -> None:
        pass


# ======================================================================================================================
# 3  Bridge cars
# ======================================================================================================================


class _DeadlineSocket(socket.socket):
    """A socket whose reads share one deadline and one allowance of bytes, so that a reply can neither drip in nor flood."""

    deadline = math.inf
    allowance = math.inf

    def expect(self, seconds: float, allowance: float) -> None:
        self.deadline, self.allowance = time.monotonic() + seconds, allowance

    def recv(self, size: int, *flags) -> bytes:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        if size > self.allowance:
            raise _TooLong
        self.settimeout(remaining)
        data = super().recv(size, *flags)
        self.allowance -= len(data)
        return data


class _TooLong(Exception):
    pass


class BridgeConnection:
    """One car in the real game. Requests go out with `send_*`, replies come in with `receive_*`, strictly in turn."""

    def __init__(self, url: str, number: int = 0):
        self.url, self.number, self.steps = url, number, 0
        self.websocket: websocket.WebSocket | None = None
        host, port = self._parse(url)
        sock = None
        try:
            deadline = time.monotonic() + CONNECT_TIMEOUT_S  # for all addresses of the name and the handshake together
            sock = self._connect(host, port, deadline)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.expect(deadline - time.monotonic(), MAX_REPLY_BYTES)
            self.websocket = websocket.create_connection(url, timeout=CONNECT_TIMEOUT_S, socket=sock, redirect_limit=0)
        except Exception as error:  # the library raises a dozen kinds for a dozen kinds of wrong server
            if sock is not None:
                sock.close()
            raise BridgeError(f"no game bridge at {url}: {self._connect_problem(error)}. {BRIDGE_HINT}") from error

    @staticmethod
    def _parse(url: str) -> tuple[str, int]:
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except (ValueError, AttributeError, TypeError):
            scheme, host, port = "", None, None
        if scheme != "ws" or not host or port == 0:
            raise BridgeUrlError(f"{url!r} is not a bridge URL; it must look like {DEFAULT_BRIDGE_URL}. {BRIDGE_HINT}")
        return host, port or 80

    @staticmethod
    def _connect(host: str, port: int, deadline: float) -> _DeadlineSocket:
        """The first address of the host that answers. localhost, say, is ::1 and 127.0.0.1."""
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for i, (*_, address) in enumerate(addresses):
            try:
                plain = socket.create_connection(address[:2], timeout=max(deadline - time.monotonic(), 0.01))
                return _DeadlineSocket(fileno=plain.detach())
            except OSError:
                if i + 1 == len(addresses) or time.monotonic() >= deadline:
                    raise
        raise OSError("the name has no address")

    @staticmethod
    def _connect_problem(error: Exception) -> str:
        if isinstance(error, (TimeoutError, websocket.WebSocketTimeoutException)):
            return f"no answer within {CONNECT_TIMEOUT_S:g} s"
        if isinstance(error, ConnectionRefusedError):
            return "nothing listens there (connection refused)"
        if isinstance(error, OSError) and not isinstance(error, websocket.WebSocketException):
            return f"the connection failed ({error.strerror or error})"
        return f"what listens there is not a WebSocket server ({_start_of(str(error) or type(error).__name__)})"

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _fail(self, problem: str, cause: BaseException | None = None) -> BridgeError:
        """Close the connection and say what happened; nothing that arrives later could be matched to a request."""
        self.close()
        return BridgeError(f"bridge connection {self.number} ({self.url}), after {self.steps} steps: {problem}")

    def _send(self, message: dict) -> None:
        if self.websocket is None:
            raise BridgeError(
                f"bridge connection {self.number} ({self.url}) is closed; make a new environment to go on"
            )
        try:
            self.websocket.sock.settimeout(REPLY_TIMEOUT_S)
            self.websocket.send(json.dumps(message, allow_nan=False, separators=(",", ":")))
        except (OSError, websocket.WebSocketException) as error:
            raise self._fail(
                f"the game is gone, a {message['type']} could not be sent ({error}). {BRIDGE_HINT}", error
            ) from error

    def _receive(self, expected: str) -> dict:
        """The next reply, checked to be a JSON object of the expected type."""
        if self.websocket is None:
            raise BridgeError(
                f"bridge connection {self.number} ({self.url}) is closed; make a new environment to go on"
            )
        try:
            self.websocket.sock.expect(REPLY_TIMEOUT_S, MAX_REPLY_BYTES + 64)  # and some for frame headers and pings
            opcode, data = self.websocket.recv_data()
            if len(data) > MAX_REPLY_BYTES:
                raise _TooLong
        except _TooLong as error:
            begin = b"".join(self.websocket.frame_buffer.recv_buffer)[:80].decode("utf-8", errors="replace")
            raise self._fail(f"the reply is longer than {MAX_REPLY_BYTES:,} bytes: {_start_of(begin)}") from error
        except (TimeoutError, websocket.WebSocketTimeoutException) as error:
            raise self._fail(
                f"no reply within {REPLY_TIMEOUT_S:g} s; the game stalls or has stopped. {BRIDGE_HINT}"
            ) from error
        except (websocket.WebSocketProtocolException, websocket.WebSocketPayloadException, UnicodeError) as error:
            raise self._fail(f"the reply is not a text frame of WebSocket ({_start_of(str(error))})") from error
        except (OSError, websocket.WebSocketException, ValueError, AttributeError) as error:
            raise self._fail(
                f"the connection was lost ({_start_of(str(error) or type(error).__name__)}). {BRIDGE_HINT}"
            ) from error
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            code = int.from_bytes(data[:2], "big") if len(data) >= 2 else "none"
            raise self._fail(f"the server closed the connection (code {code}). {BRIDGE_HINT}")
        if opcode != websocket.ABNF.OPCODE_TEXT:
            raise self._fail(f"the reply is binary ({len(data)} bytes, {data[:20]!r}), it must be JSON text")
        text = data.decode("utf-8", errors="replace")
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._fail(f"the reply is not JSON ({_start_of(str(error))}): {_start_of(text)}") from error
        if not isinstance(reply, dict):
            raise self._fail(f"the reply is not a JSON object: {_start_of(text)}")
        if reply.get("type") == "error":
            raise self._fail(f"the game answered with an error: {_start_of(str(reply.get('message')), 300)}")
        if reply.get("type") != expected:
            raise self._fail(
                f"the reply's type is {_start_of(reply.get('type'))!r}, expected {expected!r}: {_start_of(text)}"
            )
        self._text = text
        return reply

    def _field(self, container: dict, key: str, kind: type, name: str):
        """container[key] as a float, int or bool: a finite number is a number, 1 is not True, "1" is nothing."""
        if key not in container:
            raise self._fail(f"the reply lacks {name}: {_start_of(self._text)}")
        value = container[key]
        if kind is bool:
            if isinstance(value, bool):
                return value
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and _finite(value):
            if kind is float:
                return float(value)
            if value == int(value) and abs(value) < 2**53:
                return int(value)
        wanted = {float: "a finite number", int: "a whole number", bool: "true or false"}[kind]
        raise self._fail(f"{name} is {_start_of(json.dumps(value))}, it must be {wanted}: {_start_of(self._text)}")

    def _observation(self, reply: dict) -> np.ndarray:
        values = reply.get("observation")
        if not isinstance(values, list) or len(values) != OBS_SIZE:
            what = f"has {len(values)} elements" if isinstance(values, list) else f"is {_start_of(json.dumps(values))}"
            raise self._fail(f"observation {what}, it must be a list of {OBS_SIZE} numbers: {_start_of(self._text)}")
        observation = np.array(
            [self._field(dict(enumerate(values)), i, float, f"observation[{i}]") for i in range(OBS_SIZE)]
        )
        outside = np.flatnonzero((observation < OBS_LOW - 1e-6) | (observation > OBS_HIGH + 1e-6))
        if len(outside):
            i = int(outside[0])
            raise self._fail(
                f"observation[{i}] ({OBS_NAMES[i]}) is {observation[i]:g}, it must be in [{OBS_LOW[i]:g}, {OBS_HIGH[i]:g}]: "
                f"{_start_of(self._text)}"
            )
        return np.clip(observation, OBS_LOW, OBS_HIGH)

    def _info(self, reply: dict, kinds: dict[str, type]) -> dict:
        info = reply.get("info")
        if not isinstance(info, dict):
            raise self._fail(f"info is {_start_of(json.dumps(info))}, it must be an object: {_start_of(self._text)}")
        return {key: self._field(info, key, kind, f"info.{key}") for key, kind in kinds.items()}

    # -- the protocol --------------------------------------------------------------------------------------------------

    def send_reset(self, track_id: str, config: dict) -> None:
        self._send({"type": "reset", "trackId": track_id, "config": config})

    def receive_reset(self):
        reply = self._receive("reset_result")
        return self._observation(reply), self._info(reply, dict.fromkeys(RESET_INFO, int))

    def send_step(self, action: np.ndarray) -> None:
        self._send({"type": "step", "action": action.tolist()})

    def receive_step(self):
        reply = self._receive("step_result")
        observation, reward = self._observation(reply), self._field(reply, "reward", float, "reward")
        terminated, truncated = (self._field(reply, key, bool, key) for key in ("terminated", "truncated"))
        info = self._info(reply, STEP_INFO)
        self.steps += 1
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Say goodbye if that is possible at once, and close. Idempotent; never waits for the other side."""
        connection, self.websocket = self.websocket, None
        if connection is None or connection.sock is None:
            return
        try:
            connection.sock.settimeout(0.2)
            connection.send_close()
        except (OSError, websocket.WebSocketException, ValueError):
            pass
        connection.shutdown()


class BridgeCars:
    """N cars in the real game, one connection each, spread over the URLs. All requests go out before the first reply is read.

    A lost reply cannot be made up, so nothing is retried: an error closes all connections and says which one failed.
    """

    def __init__(self, num_cars: int, track_ids: Sequence[str], config: dict, urls: Sequence[str], first_car: int = 0):
        self.track_ids = [track_ids[(first_car + i) % len(track_ids)] for i in range(num_cars)]
        self.config = config
        self.connections: list[BridgeConnection] = []
        try:
            for i in range(num_cars):
                self.connections.append(BridgeConnection(urls[i % len(urls)], i))
        except BridgeError:
            self.close()
            raise

    def check(self) -> None:
        """One reset on every connection: fails now rather than after an expensive start."""
        self.reset(np.arange(len(self.connections)))

    def reset(self, cars: np.ndarray, seeds: Sequence[int] | None = None):
        chosen = [self.connections[i] for i in cars]  # the real game has one start and no seeds
        with self._closing_on_error():
            for i, connection in zip(cars, chosen, strict=True):
                connection.send_reset(self.track_ids[i], self.config)
            observations, infos = zip(*(connection.receive_reset() for connection in chosen), strict=True)
        info = {key: np.array([i[key] for i in infos], np.int64) for key in RESET_INFO}
        return np.array(observations, np.float32), info

    def step(self, actions: np.ndarray):
        with self._closing_on_error():
            for connection, action in zip(self.connections, actions, strict=True):
                connection.send_step(action)
            results = [connection.receive_step() for connection in self.connections]
        observations, rewards, terminated, truncated, infos = zip(*results, strict=True)
        info = {
            key: np.array([i[key] for i in infos], np.int64 if kind is int else kind) for key, kind in STEP_INFO.items()
        }
        return np.array(observations, np.float32), np.array(rewards), np.array(terminated), np.array(truncated), info

    def _closing_on_error(self):
        return _CloseOnError(self)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


class _CloseOnError:
    """After a failure in mid-flight replies are outstanding on other connections; none of them may be used again."""

    def __init__(self, cars: BridgeCars):
        self.cars = cars

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.cars.close()


def as_names(value, argument: str, hint: str) -> list[str]:
    """One name or a list of names -> a list of names."""
    names = [value] if isinstance(value, (str, Path)) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, (str, Path)) for name in names):
        raise ValueError(f"{argument} is {_start_of(value)}; it must be a text, or a list of at least one. {hint}")
    return [str(name) for name in names]


def make_cars(num_cars: int, track_id, config: dict, bridge_url, start: str, first_car: int = 0):
    """The backend for N cars: embedded, or on one or several bridges if a URL is given. All checks of what the user gave."""
    if isinstance(num_cars, bool) or not isinstance(num_cars, (int, np.integer)) or num_cars < 1:
        raise ValueError(f"num_envs is {num_cars!r}; it must be a whole number, 1 or more")
    if start not in STARTS:
        raise ValueError(f"unknown start {start!r}. Available: {', '.join(STARTS)}")
    track_ids = as_names(track_id, "track_id", f"Available: {', '.join(TRACKS)}")
    if bridge_url is None:
        return EmbeddedCars(int(num_cars), track_ids, config, start, first_car)
    urls = as_names(bridge_url, "bridge_url", "Leave it out to drive on the embedded engine")
    if start != "grid":
        raise ValueError(f"start is {start!r}, but the real game always starts on the grid; leave it out with a bridge")
    for track in track_ids:
        if track.lower().endswith(".json"):
            raise ValueError(
                f"track {track!r} is a file, but the real game has only its own tracks, e.g. {', '.join(TRACKS)}"
            )
    return BridgeCars(int(num_cars), track_ids, config, urls, first_car)


# ======================================================================================================================
# 4  RacerEnv
# ======================================================================================================================


class RacerEnv(gym.Env):
    """One car on a closed track, seen from above. 60 ticks a second, one action a tick, deterministic.

    ## Action: Box([-1, 0, 0], [1, 1, 1], float32)

    | i | action   | range   |                                            |
    |---|----------|---------|--------------------------------------------|
    | 0 | steer    | [-1, 1] | positive is to the right                   |
    | 1 | throttle | [0, 1]  |                                            |
    | 2 | brake    | [0, 1]  |                                            |

    Finite values outside of the box are clamped; NaN, infinities and wrong shapes raise ValueError.

    ## Observation: Box(14, float32)

    | i    | observation                                                     | range   |
    |------|-----------------------------------------------------------------|---------|
    | 0-8  | distance to the nearest wall / 200, at -90, -67.5, ... +90      | [0, 1]  |
    |      | degrees from the heading (positive is counter-clockwise: left)  |         |
    | 9    | speed / 160                                                     | [0, 1]  |
    | 10   | yaw rate / 5 rad/s, clamped                                     | [-1, 1] |
    | 11   | steer as the car has smoothed it                                | [-1, 1] |
    | 12   | arc length along the centreline / length of the track           | [0, 1]  |
    | 13   | distance from the centreline / 80, clamped                      | [0, 1]  |

    ## Reward: the sum of six parts, weighted by the config file (`ai-config.json`, section "weights")

    | part       | value each tick                                                      | default weight |
    |------------|----------------------------------------------------------------------|----------------|
    | progress   | arc length gained / length of the track (a clean lap sums to 1)      | 1.0            |
    | speed      | speed / 160                                                          | 0.0            |
    | wall       | 1 while a wall is nearer than 2 units                                | -0.002         |
    | offTrack   | 1 while off the road                                                 | -0.001         |
    | backward   | 1 while arc length falls                                             | 0.0            |
    | stillness  | 1 while slower than stillnessSpeedThreshold                          | -0.001         |

    ## Start and end

    start="grid" is the game's: standing on the start line. start="anywhere" (embedded engine only): somewhere along the
    track, off the middle, not quite straight, at some speed; seeded by reset(seed=...). Only a whole lap from line to line
    counts as a lap, wherever the car began.

    terminated: slower than stillnessSpeedThreshold for stillnessTimeoutTicks in a row (180). truncated: maxSteps (3000).
    A finished lap or a crash ends nothing.

    ## Info

    After a step the game's keys: the six parts by name, `tick rawSpeed lap checkpoint stepCount wallContact
    stillnessCounter`; after a reset `lap checkpoint stepCount`. `lap` starts at 1 and grows when a lap is completed;
    `checkpoint` is the last of the 30 gates crossed; `speed` is the reward part, `rawSpeed` the speed.

    ## Arguments

    track_id     "track-01", "track-02", "track-03", or the path of a JSON file {"name", "control_points": [[x, y, half_width]]}
    config_path  reward weights and limits in the game's schema; default ai-config.json
    bridge_url   drive in the real game behind this URL, e.g. "ws://localhost:9876"; default: the embedded engine
    start        "grid" or "anywhere"
    render_mode  None or "rgb_array": the track, the car and its trail as (H, W, 3) uint8
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": TICKS_PER_SECOND}

    def __init__(
        self,
        track_id: str = "track-01",
        config_path: str | Path | None = None,
        bridge_url: str | None = None,
        start: str = "grid",
        render_mode: str | None = None,
    ):
        _check_render_mode(render_mode, track_id, bridge_url)
        self.observation_space, self.action_space = observation_space(), action_space()
        self.render_mode = render_mode
        self._state = "new"  # -> "running" <-> "ended", -> "closed"
        for argument, value in (("track_id", track_id), ("bridge_url", bridge_url)):
            if isinstance(value, (list, tuple)):
                raise ValueError(
                    f"{argument} is a list: {_start_of(value)}; one car takes one, RacerVectorEnv takes several"
                )
        self.config = load_config(config_path)
        self._cars = make_cars(1, track_id, self.config, bridge_url, start)
        self._camera = _Camera(self._cars, track_id, self.config) if render_mode else None
        # What gym.make would note: with it, Gymnasium's tools can make another one like this.
        self.spec = copy.deepcopy(gym.spec(ENV_ID))
        arguments = {"track_id": track_id, "config_path": config_path, "bridge_url": bridge_url, "start": start}
        self.spec.kwargs = {**arguments, "render_mode": render_mode}

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        _check_open(self._state)
        super().reset(seed=seed)
        seeds = None
        if seed is not None or self._state == "new":
            seeds = [self.np_random_seed if seed is None else seed]
        self._state = "new"
        observations, info = self._cars.reset(np.array([0]), seeds)
        self._state = "running"
        if self._camera:
            self._camera.reset(np.array([0]))
        return observations[0], {key: int(value[0]) for key, value in info.items()}

    def step(self, action):
        _check_open(self._state)
        if self._state != "running":
            what = "the episode has ended" if self._state == "ended" else "the car is not on the track yet"
            raise ValueError(f"step called, but {what}: call reset() first")
        actions = check_actions(action, (3,))[None]
        observations, rewards, terminated, truncated, info = self._cars.step(actions)
        if terminated[0] or truncated[0]:
            self._state = "ended"
        if self._camera:
            self._camera.follow(actions)
        info = {key: kind(info[key][0]) for key, kind in STEP_INFO.items()}
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self):
        if self._camera is None:
            gym.logger.warn('nothing to render: make the environment with render_mode="rgb_array"')
            return None
        return self._camera.picture(0)

    def close(self) -> None:
        self._state = "closed"
        if hasattr(self, "_cars"):
            self._cars.close()


def _check_render_mode(render_mode, track_id, bridge_url) -> None:
    modes = RacerEnv.metadata["render_modes"]
    if render_mode is not None and render_mode not in modes:
        raise ValueError(f"unknown render_mode {render_mode!r}. Available: {', '.join(modes)}")
    if render_mode is None or bridge_url is None:
        return
    if not set(as_names(track_id, "track_id", "")) <= set(TRACKS):
        raise ValueError(
            f"render_mode with a bridge works on the tracks known here ({', '.join(TRACKS)}), not on {track_id!r}"
        )


def _check_open(state: str) -> None:
    if state == "closed":
        raise ValueError("this environment is closed; make a new one")


# ======================================================================================================================
# 5  RacerVectorEnv
# ======================================================================================================================


class RacerVectorEnv(gym.vector.VectorEnv):
    """N cars at once, each as in RacerEnv. Embedded: one batched engine. Bridge: N connections with all requests in flight.

    Same-step autoreset: when an episode ends, step returns the first observation of the next one, and
    infos["final_obs"], infos["final_info"] with their masks `_final_obs`, `_final_info` hold the end of the last, as in
    Gymnasium's own vector environments. infos["episode"] = {"r" return, "l" length, "t" seconds} with mask `_episode`
    comes along (episode_statistics=False leaves it out, for gymnasium.wrappers.vector.RecordEpisodeStatistics).

    Arguments as in RacerEnv, and
        num_envs     number of cars
        track_id     one track, or several: car i drives track_id[i % len(track_id)]
        bridge_url   one URL, or several: car i connects to bridge_url[i % len(bridge_url)]
        stagger      cut the first episodes short (truncated), each at another time, so that with many cars not all episodes
                     end in the same tick; infos["episode"]["cut"] marks these
        first_car    for a fleet that several processes share: car i of this environment is car first_car + i of the fleet,
                     which decides its track and its seed
    reset(seed=s) seeds car i with s + i; options={"reset_mask": mask} resets some cars only. After a BridgeError,
    reconnect() begins anew.
    """

    metadata = {**RacerEnv.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
    OWN_STATE = ("returns", "lengths", "limits")

    def __init__(
        self,
        num_envs: int = 64,
        track_id: str | Sequence[str] = "track-01",
        config_path: str | Path | None = None,
        bridge_url: str | Sequence[str] | None = None,
        start: str = "grid",
        render_mode: str | None = None,
        episode_statistics: bool = True,
        stagger: bool = False,
        first_car: int = 0,
    ):
        _check_render_mode(render_mode, track_id, bridge_url)
        self.render_mode = render_mode
        self.first_car = first_car
        self.episode_statistics = episode_statistics
        self.starts_on_line = start == "grid"
        self._state = "new"
        self.config = load_config(config_path)
        self._make_cars = lambda: make_cars(num_envs, track_id, self.config, bridge_url, start, first_car)
        self._cars = self._make_cars()
        self.num_envs = int(num_envs)
        self.single_observation_space, self.single_action_space = observation_space(), action_space()
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)
        self._camera = _Camera(self._cars, track_id, self.config) if render_mode else None
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._stagger = stagger
        self._set_limits()
        self._started_s = np.zeros(self.num_envs)
        self._everyone = np.ones(self.num_envs, bool)

    def _set_limits(self) -> None:
        self._limits = np.full(self.num_envs, NO_LIMIT)
        if self._stagger:
            places = np.arange(self.num_envs) * STAGGER_STRIDE % self.num_envs  # neighbours end at different times
            self._limits = np.ceil((places + 1) / self.num_envs * self.config["episode"]["maxSteps"]).astype(np.int64)

    def check(self) -> None:
        """Raise now if a bridge cannot serve this run."""
        self._cars.check()

    @property
    def under_way(self) -> bool:
        """Whether any car has driven a step of its episode."""
        return bool((self._lengths > 0).any())

    def reconnect(self):
        """After a BridgeError: new connections, and new episodes on all of them. -> observations, infos, as from reset()

        The step that failed has not happened to anybody. The episodes it cut off are in infos["episode"], as `cut`.
        BridgeError again if the bridge is still not there.
        """
        _check_open(self._state)
        self._cars.close()
        self._cars = self._make_cars()
        everyone = np.arange(self.num_envs)
        observations, info = self._cars.reset(everyone)
        underway = self._lengths > 0
        infos = _with_masks(info, self._everyone)
        infos["episode"] = {
            "r": self._returns.copy(),
            "l": self._lengths.copy(),
            "cut": underway,
            "t": np.zeros(len(everyone)),
        }
        infos["_episode"] = underway
        self._state = "running"
        self._set_limits()
        self._begin_episodes(everyone)
        self._observations = observations
        return observations.copy(), infos

    # -- state in, state out (embedded engine): what an exact resume needs ---------------------------------------------

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything the next step depends on, as plain arrays."""
        if not isinstance(self._cars, EmbeddedCars):
            raise ValueError(
                "the state of the real game cannot be read; only the embedded engine can be saved and put back"
            )
        return {**self._cars.sim.get_state(), **{name: getattr(self, f"_{name}").copy() for name in self.OWN_STATE}}

    def set_state(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Continue from get_state(), bit for bit. -> the observations at that point (N, 14)"""
        _check_open(self._state)
        if not isinstance(self._cars, EmbeddedCars):
            raise ValueError("the real game cannot be put into a state; only the embedded engine can")
        for name in self.OWN_STATE:
            value, own = np.asarray(state.get(name)), getattr(self, f"_{name}")
            if value.shape != own.shape or value.dtype != own.dtype:
                raise ValueError(
                    f"environment state {name!r} is {value.dtype} {value.shape}, expected {own.dtype} {own.shape}"
                )
        self._cars.sim.set_state(state)
        for name in self.OWN_STATE:
            setattr(self, f"_{name}", np.array(state[name]))
        self._started_s = np.full(self.num_envs, time.perf_counter())
        self._state = "running"
        self._observations = self._cars.sim.observe().astype(np.float32)
        if self._camera:
            self._camera.reset(np.arange(self.num_envs))
        return self._observations.copy()

    # -- the Gymnasium interface ---------------------------------------------------------------------------------------

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict | None = None):
        _check_open(self._state)
        mask = self._reset_mask(options)
        cars = np.flatnonzero(mask)
        seeds = self._seeds(seed)
        self._state = "new" if len(cars) == self.num_envs else self._state
        observations, info = self._cars.reset(cars, None if seeds is None else [seeds[i] for i in cars])
        self._state = "running"
        self._begin_episodes(cars)
        if len(cars) == self.num_envs:
            self._observations = observations
            return observations.copy(), _with_masks(info, self._everyone)
        self._observations = self._observations.copy()
        self._observations[cars] = observations
        full = {key: np.zeros(self.num_envs, value.dtype) for key, value in info.items()}
        for key, value in info.items():
            full[key][cars] = value
        return self._observations.copy(), _with_masks(full, mask)

    def _reset_mask(self, options) -> np.ndarray:
        mask = (options or {}).get("reset_mask")
        if mask is None:
            return self._everyone
        mask = np.asarray(mask)
        if mask.shape != (self.num_envs,) or mask.dtype != bool or not mask.any():
            raise ValueError(
                f"reset_mask must be {self.num_envs} booleans with at least one True, got {_start_of(mask.tolist())}"
            )
        if self._state == "new":
            raise ValueError("reset_mask used before the first reset: call reset() for all cars first")
        return mask

    def _seeds(self, seed):
        """One seed per car, None to go on with the random numbers as they are (fresh ones on the first reset)."""
        if seed is None and self._state == "new":
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        if seed is None:
            return None
        if isinstance(seed, (int, np.integer)):
            super().reset(seed=int(seed))
            return [int(seed) + self.first_car + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"seed is a list of {len(seed)}; it needs one per car, {self.num_envs}")
        for i, value in enumerate(seed):
            if value is not None and (not isinstance(value, (int, np.integer)) or value < 0):
                raise ValueError(f"seed of car {i} is {value!r}; it must be a whole number, 0 or more, or None")
        if self._state == "new":  # a car without a seed starts with a fresh one, not with everybody's first
            fresh = np.random.SeedSequence().generate_state(self.num_envs)
            return [int(fresh[i]) if value is None else int(value) for i, value in enumerate(seed)]
        return list(seed)

    def step(self, actions):
        _check_open(self._state)
        if self._state != "running":
            raise ValueError("step called, but the cars are not on the track yet: call reset() first")
        actions = check_actions(actions, (self.num_envs, 3))
        observations, rewards, terminated, truncated, info = self._cars.step(actions)
        self._returns += rewards
        self._lengths += 1
        cut = self._lengths >= self._limits
        truncated = truncated | cut
        if self._camera:
            self._camera.follow(actions)
        done = terminated | truncated
        if not done.any():
            infos = _with_masks(info, self._everyone)
        else:
            try:
                observations, infos = self._restart(np.flatnonzero(done), done, cut, observations, info)
            except BridgeError:  # then this step has not happened
                self._returns -= rewards
                self._lengths -= 1
                raise
        self._observations = observations
        return observations.copy(), rewards, terminated, truncated, infos

    def _restart(self, cars, done, cut, observations, info):
        """Same-step autoreset of the cars whose episode is done. -> observations and infos as SyncVectorEnv gives them"""
        final_obs = np.full(self.num_envs, None, dtype=object)
        for i in cars:
            final_obs[i] = observations[i].copy()
        infos = {
            "final_obs": final_obs,
            "_final_obs": done.copy(),
            "final_info": _with_masks(
                {key: np.where(done, value, value.dtype.type(0)) for key, value in info.items()}, done
            ),
            "_final_info": done.copy(),
        }
        if self.episode_statistics:
            elapsed = time.perf_counter() - self._started_s
            infos["episode"] = {
                "r": np.where(done, self._returns, 0.0),
                "l": np.where(done, self._lengths, 0),
                "t": np.where(done, elapsed, 0.0),
            }
            if (self._limits < NO_LIMIT).any():
                infos["episode"]["cut"] = cut & (self._lengths < self.config["episode"]["maxSteps"])
            infos["_episode"] = done.copy()
        self._limits[cars] = NO_LIMIT
        first, reset_info = self._cars.reset(cars)
        self._begin_episodes(cars)
        observations = observations.copy()
        observations[cars] = first
        for key, value in info.items():
            if key in reset_info:
                value = value.copy()
                value[cars] = reset_info[key]
                infos[key], infos[f"_{key}"] = value, self._everyone.copy()
            elif not done.all():
                infos[key], infos[f"_{key}"] = np.where(done, value.dtype.type(0), value), ~done
        return observations, infos

    def _begin_episodes(self, cars) -> None:
        self._returns[cars], self._lengths[cars], self._started_s[cars] = 0.0, 0, time.perf_counter()
        if self._camera:
            self._camera.reset(cars)

    def render(self):
        if self._camera is None:
            gym.logger.warn('nothing to render: make the environment with render_mode="rgb_array"')
            return None
        return tuple(self._camera.picture(i) for i in range(self.num_envs))

    def close_extras(self, **_) -> None:
        self._state = "closed"
        if hasattr(self, "_cars"):
            self._cars.close()


def _with_masks(info: dict[str, np.ndarray], mask: np.ndarray) -> dict:
    """Gymnasium's form of vector infos: every key with a mask that says which cars have it."""
    infos = {}
    for key, value in info.items():
        infos[key], infos[f"_{key}"] = value, mask.copy()
    return infos


# ======================================================================================================================
# 6  Painter
# ======================================================================================================================

PICTURE_SIZE = 800  # pixels along the longer side of a track
TRAIL_TICKS = 150
COLOURS = {
    "ground": (52, 84, 58),
    "runoff": (196, 178, 132),
    "shoulder": (156, 148, 124),
    "road": (62, 64, 70),
    "edge": (238, 238, 232),
    "centreline": (96, 98, 104),
    "wall": (178, 52, 46),
    "car": (255, 206, 40),
    "outline": (24, 24, 26),
    "trail": (255, 226, 130),
}


class Painter:
    """Pictures of one track: runoff, shoulder, road, walls, start line; and what is drawn on it. Needs Pillow.

    Drawn at twice the size and reduced at the end, so that lines are smooth. y points up, as in the game.
    """

    SCALE = 2

    def __init__(self, track: Track, size: int = PICTURE_SIZE):
        from PIL import Image, ImageDraw  # TensorBoard brings it; the environment itself does without

        self._image, self._image_draw = Image, ImageDraw
        self.track = track
        low, high = track.outer.min(0) - 20, track.outer.max(0) + 20
        self._low, self._high = low, high
        self._zoom = self.SCALE * size / float((high - low).max())
        width, height = (math.ceil(v / self.SCALE) * self.SCALE for v in (high - low) * self._zoom)
        self._base = Image.new("RGB", (width, height), COLOURS["ground"])
        draw = ImageDraw.Draw(self._base)
        self._paint_surfaces(draw)
        self._paint_lines(draw)

    def to_pixels(self, points) -> list[tuple[float, float]]:
        points = np.asarray(points, dtype=np.float64).reshape(-1, 2)
        return list(
            zip((points[:, 0] - self._low[0]) * self._zoom, (self._high[1] - points[:, 1]) * self._zoom, strict=True)
        )

    def _paint_surfaces(self, draw) -> None:
        track = self.track
        draw.polygon(self.to_pixels(track.outer), fill=COLOURS["runoff"])
        s = np.linspace(0, track.length, math.ceil(track.length / 3))
        centre, tangent = track.position(s), track.tangent(s)
        left, right = (
            np.interp(s, track.wall_s, edge, period=track.length) for edge in (track.road_left, track.road_right)
        )
        normal = np.stack([-tangent[:, 1], tangent[:, 0]], axis=1)
        for name, extra in (("shoulder", SHOULDER_WIDTH), ("edge", 1.5), ("road", 0.0)):
            edges = [
                self.to_pixels(centre + side * (width + extra)[:, None] * normal)
                for side, width in ((1, left), (-1, right))
            ]
            for a, b, c, d in zip(edges[0], edges[0][1:], edges[1][1:], edges[1], strict=False):
                draw.polygon([a, b, c, d], fill=COLOURS[name])
        draw.polygon(self.to_pixels(self.track.inner), fill=COLOURS["ground"])
        # What the wide brush spilled over the outer wall is ground again.
        outside = self._image.new("L", self._base.size, 255)
        self._image_draw.Draw(outside).polygon(self.to_pixels(self.track.outer), fill=0)
        self._base.paste(COLOURS["ground"], mask=outside)

    def _paint_lines(self, draw) -> None:
        track, thick = self.track, self.SCALE
        s = np.arange(0, track.length, 12.0)
        for begin in s:
            draw.line(
                self.to_pixels(track.position(begin + np.linspace(0, 5, 4))), fill=COLOURS["centreline"], width=thick
            )
        for wall in (track.outer, track.inner):
            line = self.to_pixels(np.append(wall, wall[:1], axis=0))
            draw.line(line, fill=COLOURS["wall"], width=round(2.2 * thick), joint="curve")
        self._paint_start(draw)

    def _paint_start(self, draw) -> None:
        """A chequered line across the road."""
        centre, tangent = self.track.position(np.array(0.0)), self.track.tangent(np.array(0.0))
        normal = np.array([-tangent[1], tangent[0]])
        half = float(self.track.half_width(0.0))
        squares, rows = 12, 3
        side = 2 * half / squares
        for i in range(squares):
            for j in range(rows):
                corner = centre + normal * (i * side - half) + tangent * (j - rows / 2) * side
                square = [
                    corner,
                    corner + normal * side,
                    corner + normal * side + tangent * side,
                    corner + tangent * side,
                ]
                draw.polygon(self.to_pixels(square), fill=(245, 245, 245) if (i + j) % 2 else (20, 20, 20))

    def smaller(self, size: int) -> Painter:
        return Painter(self.track, size)

    def canvas(self):
        """A fresh image of the track at SCALE times its size, and a pen to draw on it."""
        image = self._base.copy()
        return image, self._image_draw.Draw(image)

    def picture(self, x: float, y: float, heading: float, trail=()) -> np.ndarray:
        """The track with a car on it and the way it came. -> (H, W, 3) uint8"""
        image, draw = self.canvas()
        way = self.to_pixels(trail) if len(trail) > 1 else []
        for i, (a, b) in enumerate(zip(way, way[1:], strict=False)):
            fade = (i + 1) / len(way)
            colour = tuple(round(r + (t - r) * fade) for r, t in zip(COLOURS["road"], COLOURS["trail"], strict=True))
            draw.line((*a, *b), fill=colour, width=round((1 + 1.5 * fade) * self.SCALE))
        self.paint_car(image, x, y, heading)
        return np.array(image.reduce(self.SCALE))

    def paint_car(self, image, x: float, y: float, heading: float) -> None:
        """Larger than life (the car is a disc of radius 1), so that it can be seen: an arrowhead along the heading."""
        draw = self._image_draw.Draw(image)
        unit = 7.0 * self.SCALE / self._zoom
        along, left = (
            np.array([math.cos(heading), math.sin(heading)]),
            np.array([-math.sin(heading), math.cos(heading)]),
        )
        for grow, colour in ((1.35, "outline"), (1.0, "car")):
            shape = [(2.0, 0.0), (-1.3, 1.15), (-0.7, 0.0), (-1.3, -1.15)]
            corners = [np.array([x, y]) + unit * grow * (a * along + b * left) for a, b in shape]
            draw.polygon(self.to_pixels(corners), fill=COLOURS[colour])


def drive_again(track_id: str, config: dict, actions: np.ndarray):
    """Drive recorded actions (T, 3) on the embedded engine from the grid. -> the track's Painter; x, y, heading, speed (T + 1,)

    For pictures of laps: infos do not say where a car is, and the bridge does not know.
    """
    sim = RacerSim(1, [track_id], config)
    places = [(sim.x[0], sim.y[0], sim.heading[0], sim.speed[0])]
    for action in actions:
        sim.step(action[None])
        places.append((sim.x[0], sim.y[0], sim.heading[0], sim.speed[0]))
    return Painter(sim.world.tracks[0]), *np.array(places).T


class _Camera:
    """Where the cars are and have been, for render(). The bridge does not tell positions: there, an embedded twin drives along."""

    def __init__(self, cars, track_id, config: dict):
        self.cars = cars
        self.twin = None
        if isinstance(cars, BridgeCars):
            self.twin = RacerSim(len(cars.connections), as_names(track_id, "track_id", ""), config)
        self.sim = self.twin or cars.sim
        self.painters: dict[int, Painter] = {}
        self.trails: list[list[tuple[float, float]]] = [[] for _ in range(self.sim.num_cars)]

    def reset(self, cars) -> None:
        if self.twin:
            self.twin.reset(cars)
        for i in cars:
            self.trails[i] = [(self.sim.x[i], self.sim.y[i])]

    def follow(self, actions) -> None:
        if self.twin:
            self.twin.step(actions)
        for trail, x, y in zip(self.trails, self.sim.x, self.sim.y, strict=True):
            trail.append((x, y))
            del trail[:-TRAIL_TICKS]

    def picture(self, car: int) -> np.ndarray:
        number = int(self.sim.track[car])
        if number not in self.painters:
            self.painters[number] = Painter(self.sim.world.tracks[number])
        return self.painters[number].picture(self.sim.x[car], self.sim.y[car], self.sim.heading[car], self.trails[car])


gym.register(id=ENV_ID, entry_point="racer_env:RacerEnv", vector_entry_point="racer_env:RacerVectorEnv")
