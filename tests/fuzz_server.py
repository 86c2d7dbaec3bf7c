"""A bridge whose every reply is malformed in another way: real sockets, and as fast as they go.

python tests/fuzz_server.py SEED     # prints its URL; the n-th connection gets the n-th of replies(SEED)
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import socket
import struct
import sys

KINDS = {
    "progress": float, "speed": float, "wall": float, "offTrack": float, "backward": float, "stillness": float,
    "tick": int, "rawSpeed": float, "lap": int, "checkpoint": int, "stepCount": int, "wallContact": bool,
    "stillnessCounter": int,
}  # fmt: skip
LOW, HIGH = [0.0] * 10 + [-1.0, -1.0, 0.0, 0.0], [1.0] * 14
LONGEST = 65_536
ODD = [
    None, True, False, "", "0.5", [], {}, [1], -1, 0, 1, 1.5, 2.0, 1e308, -1e308, 2**53, 2**63, 10**400, 0.1, -0.0, "NaN",
]  # fmt: skip
ODD_TEXT = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nul", "tru", "'x'", "0x10", "01", "1.", ".5", "+1", "--1", "",
]  # fmt: skip


def proper(rng: random.Random) -> dict:
    """A reply as the game gives it."""
    info = {name: rng.random() if kind is float else rng.random() < 0.5 if kind is bool else rng.randrange(3000)
            for name, kind in KINDS.items()}  # fmt: skip
    observation = [rng.uniform(low, high) for low, high in zip(LOW, HIGH, strict=True)]
    result = {"type": "step_result", "observation": observation, "reward": rng.gauss(0, 1)}
    return {**result, "terminated": rng.random() < 0.1, "truncated": rng.random() < 0.1, "info": info}


def spots(value, path=()):
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from spots(item, (*path, key))


def change(rng: random.Random, reply: dict):
    """One place of it removed, replaced, doubled or moved."""
    path = rng.choice(list(spots(reply)))
    if not path:
        return rng.choice([*ODD, [reply], {"reply": reply}])
    holder = reply
    for key in path[:-1]:
        holder = holder[key]
    how = rng.randrange(4)
    if how == 0:
        del holder[path[-1]]
    elif how == 1 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), rng.choice(ODD))
    elif how == 2 and isinstance(holder, dict):
        holder[path[-1] + rng.choice(["x", " ", "\0"])] = holder.pop(path[-1])
    else:
        holder[path[-1]] = rng.choice(ODD)
    return reply


def replies(seed: int, count: int | None = None):
    """(bytes of the text message, None), or (raw bytes to send, how the connection then ends): malformed, most of them."""
    rng, made = random.Random(seed), 0
    while count is None or made < count:
        made += 1
        reply, how = proper(rng), rng.randrange(10)
        if how < 4:
            yield json.dumps(change(rng, reply)).encode(), None
        elif how == 4:  # a number that is none, in the text
            text = json.dumps(reply)
            number = rng.choice([str(v) for v in (*reply["observation"], reply["reward"])])
            yield text.replace(number, rng.choice(ODD_TEXT), 1).encode(), None
        elif how == 5:  # some bytes flipped, lost or doubled
            data = bytearray(json.dumps(reply).encode())
            for _ in range(rng.randrange(1, 4)):
                i = rng.randrange(len(data))
                data[i : i + rng.randrange(2)] = bytes([rng.randrange(256)]) * rng.randrange(3)
            yield bytes(data), None
        elif how == 6:  # a text cut off
            data = json.dumps(reply).encode()
            yield data[: rng.randrange(len(data))], None
        elif how == 7:
            yield bytes(rng.randrange(256) for _ in range(rng.randrange(200))), None
        elif how == 8:  # a frame that breaks off, or of a kind there is not, or longer than allowed
            data = frame(json.dumps(reply).encode())
            broken = [
                data[: rng.randrange(len(data))],
                bytes([rng.randrange(256) | 0x70]) + data[1:],
                b"\x82" + data[1:],
            ]
            broken += [
                b"\x81\x7f" + struct.pack(">Q", rng.randrange(LONGEST + 1, 2**62)) + data,
                b"\x88\x02\x03\xe8",
                b"\x01" + data[1:],
            ]
            yield rng.choice(broken), "closed"
        else:
            yield frame(json.dumps({**reply, "padding": "x" * rng.randrange(LONGEST, 2 * LONGEST)}).encode()), "closed"


def frame(data: bytes) -> bytes:
    """A text frame of WebSocket."""
    size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + struct.pack(">H", len(data)) if len(data) < 2**16 else None
    return b"\x81" + (size or b"\x7f" + struct.pack(">Q", len(data))) + data


def expected(data: bytes):
    """What a step's reply says, worked out apart from the client; None if it is malformed."""

    def no_constant(name):
        raise ValueError(name)

    def number(value) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        try:
            return math.isfinite(float(value))
        except OverflowError:
            return False

    try:
        reply = json.loads(data.decode("utf-8"), parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict) or reply.get("type") != "step_result" or len(data) > LONGEST:
        return None
    observation, info = reply.get("observation"), reply.get("info")
    if not isinstance(observation, list) or len(observation) != 14 or not isinstance(info, dict):
        return None
    if not all(map(number, observation)) or not number(reply.get("reward")):
        return None
    if any(not low - 1e-6 <= v <= high + 1e-6 for low, v, high in zip(LOW, observation, HIGH, strict=True)):
        return None
    if not all(isinstance(reply.get(key), bool) for key in ("terminated", "truncated")):
        return None
    values = {}
    for key, kind in KINDS.items():
        value = info.get(key)
        fits = isinstance(value, bool) if kind is bool else number(value) and (kind is float or value == int(value))
        if not fits or (kind is int and abs(value) >= 2**53):
            return None
        values[key] = kind(value)
    observation = [min(max(float(v), low), high) for low, v, high in zip(LOW, observation, HIGH, strict=True)]
    return observation, float(reply["reward"]), reply["terminated"], reply["truncated"], values


def serve(seed: int) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        print(f"ws://127.0.0.1:{server.getsockname()[1]}", flush=True)
        for data, closes in replies(seed):
            connection, _ = server.accept()
            try:
                shake_hands(connection)
                connection.recv(4096)  # the step
                connection.sendall(frame(data) if closes is None else data)
                if closes is not None:
                    connection.shutdown(socket.SHUT_WR)
                connection.recv(4096)  # until the client has gone
            except OSError:
                pass
            # Closed with a reset, which leaves no port waiting: 50,000 connections would use them all up.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()


def shake_hands(connection: socket.socket) -> None:
    request = b""
    while b"\r\n\r\n" not in request:
        request += connection.recv(4096)
    key = re.search(rb"(?i)sec-websocket-key: *(\S+)", request)[1]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    answer = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade"]
    connection.sendall(b"\r\n".join([*answer, b"Sec-WebSocket-Accept: " + accept, b"", b""]))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
