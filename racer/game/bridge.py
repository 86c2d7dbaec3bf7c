"""The real game, driven over its WebSocket bridge: a connection for every car.

    cars = BridgeCars(8, ["track-01"], DEFAULT_CONFIG, ["ws://localhost:9876", "ws://localhost:9877"])
    observations, info = cars.reset(np.arange(8))
    for observations, rewards, terminated, truncated, info in cars.step(np.tile([0.0, 1.0, 0.0], (8, 1)), ticks=4):
        ...

A fault of the bridge raises BridgeError, which names the connection and what is wrong with the reply. RacerVectorEnv, in
racer_env.py, reconnects.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np
import websocket

from racer.game.checks import excerpt, is_finite
from racer.game.observations import ARC, CENTRELINE, OBS_HIGH, OBS_LOW, OBS_NAMES, OBS_SIZE
from racer.game.rules import CENTRELINE_RANGE, GAME_INFO, NUM_RAYS, RESET_INFO
from racer.game.tracks import TRACKS, load_track

# == Limits ===========================================================================================================

OBS_RANGES = [(low - 1e-6, high + 1e-6) for low, high in zip(OBS_LOW.tolist(), OBS_HIGH.tolist(), strict=True)]
CONNECT_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 30.0
MAX_REPLY_BYTES = 65_536
LONGEST_PAUSE_S = 30.0  # between two attempts to reconnect
BRIDGE_HINT = (
    "Start the game's bridge (in the game's folder: npx tsx src/ai/run-bridge.ts) and check the URL, "
    "or leave it out to drive on the embedded engine (with --resume: --bridge-url none)."
)


class BridgeError(RuntimeError):
    """The bridge failed: no connection, a lost one, or a reply that is not what the protocol says."""


class BridgeUrlError(BridgeError, ValueError):
    """A malformed bridge URL."""


class GameRefusal(BridgeError):
    """The game answered with an error, for example because it does not have the track. Asking again would change nothing."""


def retry_pause_s(failures: int) -> float:
    """How long to wait before the next attempt to reconnect, after this many failures in a row."""
    return min(2.0 ** min(failures, 100), LONGEST_PAUSE_S)


# == One connection ==================================================================================================


class _DeadlineSocket(socket.socket):
    """A socket whose reads share one deadline and one allowance of bytes: a reply can neither trickle forever nor fill memory."""

    deadline = math.inf
    allowance = math.inf
    buffer = b""  # received data: one system call brings a complete reply, which is then read in small pieces

    def expect(self, seconds: float, allowance: float) -> None:
        self.deadline, self.allowance = time.monotonic() + seconds, allowance

    def recv(self, size: int, *flags) -> bytes:
        if size > self.allowance:
            raise _TooLong
        if not self.buffer:
            remaining = self.deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("timed out")
            self.settimeout(remaining)
            self.buffer = super().recv(65_536)
        data, self.buffer = self.buffer[:size], self.buffer[size:]
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
        try:
            plain = socket.create_connection((host, port), CONNECT_TIMEOUT_S)  # tries all addresses of the name
            sock = _DeadlineSocket(fileno=plain.detach())
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.expect(CONNECT_TIMEOUT_S, MAX_REPLY_BYTES)
            options = {"socket": sock, "redirect_limit": 0, "skip_utf8_validation": True}  # decoding a reply checks it
            self.websocket = websocket.create_connection(url, timeout=CONNECT_TIMEOUT_S, **options)
        except Exception as error:  # a dozen kinds for a dozen kinds of wrong server; the library has closed the socket
            raise BridgeError(f"no game bridge at {url}: {self._connect_problem(error)}. {BRIDGE_HINT}") from error

    @staticmethod
    def _parse(url: str) -> tuple[str, int]:
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:
            scheme, host, port = "", None, None
        if scheme != "ws" or not host or port == 0:
            raise BridgeUrlError(f"{url!r} is not a bridge URL; it must look like ws://localhost:9876. {BRIDGE_HINT}")
        return host, port or 80

    @staticmethod
    def _connect_problem(error: Exception) -> str:
        if isinstance(error, (TimeoutError, websocket.WebSocketTimeoutException)):
            return f"no answer within {CONNECT_TIMEOUT_S:g} s"
        if isinstance(error, ConnectionRefusedError):
            return "nothing listens there (connection refused)"
        if isinstance(error, OSError) and not isinstance(error, websocket.WebSocketException):
            return f"the connection failed ({error.strerror or error})"
        return f"what listens there is not a WebSocket server ({excerpt(str(error) or type(error).__name__)})"

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _fail(self, problem: str, shown: bool = False, kind: type[BridgeError] = BridgeError) -> BridgeError:
        """Close the connection and say what happened; nothing that arrives later could be matched to a request.

        shown: show the reply's beginning.
        """
        self.close()
        reply = f": {excerpt(self._data.decode(errors='replace'))}" if shown else ""
        return kind(f"bridge connection {self.number} ({self.url}), after {self.steps} steps: {problem}{reply}")

    def _send(self, message: dict) -> None:
        if self.websocket is None:
            name = f"bridge connection {self.number} ({self.url})"
            raise BridgeError(f"{name} is closed; make a new environment")
        try:
            self.websocket.sock.settimeout(REPLY_TIMEOUT_S)
            self.websocket.send(json.dumps(message, allow_nan=False, separators=(",", ":")))
        except (OSError, websocket.WebSocketException) as error:
            problem = f"the game is gone, a {message['type']} could not be sent ({error}). {BRIDGE_HINT}"
            raise self._fail(problem) from error

    def _receive(self, expected: str) -> dict:
        """The next reply, checked to be a JSON object of the expected type."""
        try:
            self.websocket.sock.expect(REPLY_TIMEOUT_S, MAX_REPLY_BYTES + 64)  # and some for frame headers and pings
            opcode, data = self.websocket.recv_data()
            if len(data) > MAX_REPLY_BYTES:
                raise _TooLong
        except _TooLong as error:
            begin = b"".join(self.websocket.frame_buffer.recv_buffer)[:80].decode("utf-8", errors="replace")
            raise self._fail(f"the reply is longer than {MAX_REPLY_BYTES:,} bytes: {excerpt(begin)}") from error
        except (TimeoutError, websocket.WebSocketTimeoutException) as error:
            problem = f"no reply within {REPLY_TIMEOUT_S:g} s; the game stalls or has stopped. {BRIDGE_HINT}"
            raise self._fail(problem) from error
        except (websocket.WebSocketProtocolException, websocket.WebSocketPayloadException, UnicodeError) as error:
            raise self._fail(f"the reply is not a text frame of WebSocket ({excerpt(str(error))})") from error
        except (OSError, websocket.WebSocketException, ValueError, AttributeError) as error:
            problem = f"the connection was lost ({excerpt(str(error) or type(error).__name__)}). {BRIDGE_HINT}"
            raise self._fail(problem) from error
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            code = int.from_bytes(data[:2], "big") if len(data) >= 2 else "none"
            raise self._fail(f"the server closed the connection (code {code}). {BRIDGE_HINT}")
        if opcode != websocket.ABNF.OPCODE_TEXT:
            raise self._fail(f"the reply is binary ({len(data)} bytes, {data[:20]!r}), it must be JSON text")
        self._data = data
        try:
            reply = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise self._fail(f"the reply is not JSON ({excerpt(str(error))})", shown=True) from error
        if not isinstance(reply, dict):
            raise self._fail("the reply is not a JSON object", shown=True)
        if reply.get("type") == "error":
            answer = f"the game answered with an error: {excerpt(str(reply.get('message')), 300)}"
            raise self._fail(answer, kind=GameRefusal)
        if reply.get("type") != expected:
            what = f"the reply's type is {excerpt(reply.get('type'))!r}, expected {expected!r}"
            raise self._fail(what, shown=True)
        return reply

    def _field(self, container: dict, key: str, kind: type, where: str = ""):
        """container[key] as a float, int or bool: a finite number is a number, 1 is not True, "1" is nothing."""
        if key not in container:
            raise self._fail(f"the reply has no {where}{key}", shown=True)
        value = container[key]
        if kind is bool:
            fits = isinstance(value, bool)
        else:
            fits = is_finite(value) and (kind is float or (value == int(value) and abs(value) < 2**53))
        if not fits:
            wanted = {float: "a finite number", int: "a whole number", bool: "true or false"}[kind]
            raise self._fail(f"{where}{key} is {excerpt(json.dumps(value))}, it must be {wanted}", shown=True)
        return kind(value)

    def _observation(self, reply: dict) -> list[float]:
        values = reply.get("observation")
        if not isinstance(values, list) or len(values) != OBS_SIZE:
            what = f"has {len(values)} elements" if isinstance(values, list) else f"is {excerpt(json.dumps(values))}"
            raise self._fail(f"observation {what}, it must be a list of {OBS_SIZE} numbers", shown=True)
        for i, (value, (low, high)) in enumerate(zip(values, OBS_RANGES, strict=True)):
            if not (is_finite(value) and low <= value <= high):
                what = f"observation[{i}] ({OBS_NAMES[i]}) is {excerpt(json.dumps(value))}"
                raise self._fail(f"{what}, it must be a number in [{OBS_LOW[i]:g}, {OBS_HIGH[i]:g}]", shown=True)
        return values

    def _info(self, reply: dict, kinds: dict[str, type]) -> dict:
        info = reply.get("info")
        if not isinstance(info, dict):
            raise self._fail(f"info is {excerpt(json.dumps(info))}, it must be an object", shown=True)
        return {key: self._field(info, key, kind, "info.") for key, kind in kinds.items()}

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
        observation, reward = self._observation(reply), self._field(reply, "reward", float)
        ends = [self._field(reply, key, bool) for key in ("terminated", "truncated")]
        step = observation, reward, *ends, self._info(reply, GAME_INFO)
        self.steps += 1
        return step

    def close(self) -> None:
        """Say goodbye if that is possible at once, and close. Idempotent; never waits for the other side."""
        connection, self.websocket = self.websocket, None
        if connection is None or connection.sock is None:
            return
        with contextlib.suppress(OSError, websocket.WebSocketException, ValueError):
            connection.sock.settimeout(0.2)
            connection.send_close()
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply
        connection.shutdown()


# == Many cars =======================================================================================================


class BridgeCars:
    """N cars in the real game, one connection each, spread over the URLs. All requests go out before the first reply is read.

    An error closes all connections, since replies may be outstanding on the others, and says which one failed.
    """

    def __init__(self, num_cars: int, track_ids: Sequence[str], config: dict, urls: Sequence[str], first_car: int = 0):
        self.track_ids = [track_ids[(first_car + i) % len(track_ids)] for i in range(num_cars)]
        self.config, self._last_step = config, None
        self._lap, self._lap_began = np.ones(num_cars, np.int64), np.zeros(num_cars, np.int64)  # step counts
        self.connections: list[BridgeConnection] = []
        with self._closing_on_error():
            for i in range(num_cars):
                self.connections.append(BridgeConnection(urls[i % len(urls)], i))

    def reset(self, cars: np.ndarray, seeds: Sequence[int] | None = None):
        chosen = [self.connections[i] for i in cars]  # the real game has one start and no seeds
        with self._closing_on_error():
            for i, connection in zip(cars, chosen, strict=True):
                connection.send_reset(self.track_ids[i], self.config)
            observations, infos = zip(*(connection.receive_reset() for connection in chosen), strict=True)
        info = {key: np.array([i[key] for i in infos], np.int64) for key in RESET_INFO}
        self._lap[cars], self._lap_began[cars] = info["lap"], 0
        return np.array(observations, np.float32).clip(OBS_LOW, OBS_HIGH), info

    def step(self, actions: np.ndarray, ticks: int = 1, observing: bool = True):
        with self._closing_on_error():  # all replies arrive before the first tick is yielded: a fault moves no car
            for connection, action in zip(self.connections, actions, strict=True):
                for _ in range(ticks):
                    connection.send_step(action)
            replies = [[connection.receive_step() for _ in range(ticks)] for connection in self.connections]
        for tick in zip(*replies, strict=True):
            observations, rewards, terminated, truncated, infos = zip(*tick, strict=True)
            # An int has 32 bits on Windows with NumPy 1.
            kinds = {key: np.int64 if kind is int else kind for key, kind in GAME_INFO.items()}
            info = {key: np.array([i[key] for i in infos], kind) for key, kind in kinds.items()}
            finished = info["lap"] > self._lap
            info["lapTicks"] = np.where(finished, info["stepCount"] - self._lap_began, 0)
            self._lap_began = np.where(finished, info["stepCount"], self._lap_began)
            observations = np.array(observations, np.float32).clip(OBS_LOW, OBS_HIGH)
            self._lap, self._last_step = info["lap"].copy(), (observations, info["offTrack"])
            yield observations, np.array(rewards, float), np.array(terminated), np.array(truncated), info

    def observe(self, cars: np.ndarray) -> np.ndarray:
        return self._last_step[0][cars]

    @property
    def off_road(self) -> np.ndarray:
        observations, penalties = self._last_step
        off_road = penalties != 0  # the best guess on a track that only the real game knows
        for i, track_id in enumerate(self.track_ids):
            if track_id in TRACKS:
                track = load_track(track_id)
                half_width = track.half_width(observations[i, ARC] * track.length)
                off_road[i] = observations[i, CENTRELINE] * CENTRELINE_RANGE > half_width
        return off_road

    def places(self, cars=slice(None), observations=None):
        """The game sends how far a car is from the centreline, and not on which side: there the wall beside it is nearer."""
        seen = self.observe(cars) if observations is None else observations
        s, x, y = np.zeros((3, len(seen)))
        tracks = np.array(self.track_ids)[cars]
        for track_id in np.unique(tracks):
            on, track = tracks == track_id, load_track(track_id)
            s[on] = seen[on, ARC] * track.length
            right, left = seen[on, 0], seen[on, NUM_RAYS - 1]
            aside = np.copysign(seen[on, CENTRELINE] * CENTRELINE_RANGE, right - left)
            centre, tangent = track.position(s[on]), track.tangent(s[on])
            x[on], y[on] = centre[:, 0] - aside * tangent[:, 1], centre[:, 1] + aside * tangent[:, 0]
        return s, x, y

    @contextlib.contextmanager
    def _closing_on_error(self):
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
