"""A stand-in for the game's bridge: a real WebSocket server with the embedded engine behind it, and a switch for every fault.

    python tests/bridge_server.py                             # a well-behaved bridge on a free port; prints its URL
    python tests/bridge_server.py --port 9876                 # where the game's own would be
    python tests/bridge_server.py --fault stall --after 20    # the 21st step of each connection gets no reply
    python tests/bridge_server.py --tick-ms 0.5               # as slow as the game

It answers bad requests as the real server was seen to: see the branches of `answer`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import sys
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import websockets
from websockets.asyncio.server import serve as serve_websocket

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from racer.game import sim as racer_sim
from racer.game.rules import DEFAULT_CONFIG
from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS

# What is sent instead of a step's reply. A function of the proper reply (a dict) gives text or bytes.
BAD_REPLIES = {
    "not-json": lambda r: "steer left{",
    "not-object": lambda r: json.dumps([1, 2, 3]),
    "deep-json": lambda r: "[" * 30_000,
    "wrong-type": lambda r: json.dumps({**r, "type": "reset_result"}),
    "no-observation": lambda r: json.dumps({k: v for k, v in r.items() if k != "observation"}),
    "no-reward": lambda r: json.dumps({k: v for k, v in r.items() if k != "reward"}),
    "no-info": lambda r: json.dumps({k: v for k, v in r.items() if k != "info"}),
    "no-lap": lambda r: json.dumps({**r, "info": {k: v for k, v in r["info"].items() if k != "lap"}}),
    "13-numbers": lambda r: json.dumps({**r, "observation": r["observation"][:13]}),
    "nan-ray": lambda r: json.dumps({**r, "observation": [math.nan, *r["observation"][1:]]}),
    "far-ray": lambda r: json.dumps({**r, "observation": [7.25, *r["observation"][1:]]}),
    "number-terminated": lambda r: json.dumps({**r, "terminated": 0}),
    "half-lap": lambda r: json.dumps({**r, "info": {**r["info"], "lap": 1.5}}),
    "binary": lambda r: json.dumps(r).encode(),
    "too-long": lambda r: json.dumps({**r, "padding": "x" * 70_000}),
    "long": lambda r: json.dumps({**r, "padding": "x" * (65_560 - len(json.dumps({**r, "padding": ""})))}),
    "error": lambda r: json.dumps({"type": "error", "message": "engine exploded"}),
}
RAW_FRAMES = {"bad-utf8": b"\x81\x04\xff\xfe{}", "bad-frame": b"\xf1\x02{}"}  # text that is no text; reserved bits set
FAULTS = ("die", "stall", "cut", "close", "drip", *RAW_FRAMES, *BAD_REPLIES)
RAW = {  # servers that are no bridge at all: what they say to whoever connects
    "http": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "forbidden": b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
    "garbage": bytes(range(256)) * 4 + b"\r\n\r\n",
    "silent": b"",
}


def answer(session: dict, text) -> dict:
    """The game's reply to one request of one connection."""

    def error(message):
        return {"type": "error", "message": message}

    try:
        request = json.loads(text, parse_constant=lambda name: json.loads(f"<{name}>"))
    except ValueError as problem:
        return error(f"Unexpected token: {problem}")
    kind = request.get("type") if isinstance(request, dict) else None
    if kind == "reset":
        track = request.get("trackId", "track-01")
        if track not in TRACKS:
            return error(f'Unknown track "{track}". Available: {", ".join(TRACKS)}')
        session["sim"] = RacerSim(1, [track], request.get("config", DEFAULT_CONFIG))
        observation = session["sim"].observe()[0].tolist()
        return {
            "type": "reset_result",
            "observation": observation,
            "info": {"tick": 0, "speed": 0, "lap": 1, "checkpoint": 0, "stepCount": 0},
        }
    if kind == "step":
        if session.get("sim") is None:
            return error("Call reset before step")
        action = request.get("action")
        if not isinstance(action, list) or len(action) != 3:
            return error("action must be a 3-element array [steer, throttle, brake]")
        if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in action):
            return error("action elements must be finite numbers")
        return step_result(session["sim"], action)
    if kind == "close":
        session["sim"] = None
        return {"type": "close_result"}
    return error(f"Unknown message type {kind!r}")


def step_result(sim: RacerSim, action) -> dict:
    observations, rewards, terminated, truncated = sim.step(np.array([action]))
    info = {**sim.parts, "tick": sim.step_count, "rawSpeed": sim.speed, "lap": sim.lap, "checkpoint": sim.checkpoint}
    info |= {"stepCount": sim.step_count, "wallContact": sim.wall_contact, "stillnessCounter": sim.stillness}
    result = {"type": "step_result", "observation": observations[0].tolist(), "reward": rewards[0].item()}
    result |= {"terminated": terminated[0].item(), "truncated": truncated[0].item()}
    return {**result, "info": {key: values[0].item() for key, values in info.items()}}


async def serve_car(connection, options) -> None:
    session, steps = {}, 0
    # A fault for this connection alone: ws://host:port/?fault=cut&after=5
    asked = parse_qs(urlsplit(connection.request.path).query)
    fault, after = asked.get("fault", [options.fault])[0], int(asked.get("after", [options.after])[0])
    try:
        async for text in connection:
            reply = answer(session, text)
            if reply["type"] == "step_result":
                time.sleep(options.tick_ms / 1e3)  # one tick at a time, as the game computes them
            if reply["type"] == "step_result":
                if fault and steps >= after:
                    if not await misbehave(connection, fault, reply):
                        return
                    continue
                steps += 1
            held = options.held
            held.append((connection, json.dumps(reply)))
            if len(held) >= options.together:
                replies, options.held = held, []
                for other, text in replies:
                    await other.send(text)
    except websockets.ConnectionClosed:
        pass


async def misbehave(connection, fault: str, reply: dict) -> bool:
    """-> whether the connection stays open."""
    if fault == "die":
        os._exit(1)
    if fault == "stall":
        await asyncio.Event().wait()
    if fault == "cut":
        connection.transport.abort()
        return False
    if fault == "close":
        await connection.close(1001, "going away")
        return False
    if fault == "drip":  # a frame that never ends: its header, then one byte at a time
        connection.transport.write(b"\x81\x7e\xff\x00")
        while not connection.transport.is_closing():
            connection.transport.write(b" ")
            await asyncio.sleep(0.02)
        return False
    if fault in RAW_FRAMES:
        connection.transport.write(RAW_FRAMES[fault])
        return True
    await connection.send(BAD_REPLIES[fault](reply))
    return True


def serve_raw(port: int, reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        announce(server.getsockname()[1])
        open_connections = []
        while True:
            connection, _ = server.accept()
            open_connections.append(connection)
            if reply:
                connection.recv(4096)
                connection.sendall(reply)


def announce(port: int) -> None:
    print(f"[bridge] listening on ws://127.0.0.1:{port}", flush=True)


async def serve(options) -> None:
    async with serve_websocket(
        lambda connection: serve_car(connection, options),
        "127.0.0.1",
        options.port,
        max_size=65_536,
        compression=None,
        ping_interval=None,
        close_timeout=0.2,
    ) as server:
        announce(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--fault", choices=FAULTS, help="what to do instead of answering a step")
    parser.add_argument("--after", type=int, default=0, help="how many steps of a connection are served well first")
    parser.add_argument("--tick-ms", type=float, default=0.0, help="how long a step takes")
    parser.add_argument("--engine-force", type=float, help="be a game with other physics")
    parser.add_argument("--raw", choices=RAW, help="be a server of another kind")
    parser.add_argument("--end-with-input", action="store_true", help="end when the standard input ends")
    parser.add_argument("--together", type=int, default=1, help="answer nobody before this many requests are there")
    options = parser.parse_args()
    options.held = []
    if options.end_with_input:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    if options.engine_force:
        racer_sim.ENGINE_FORCE = options.engine_force
    if options.raw:
        serve_raw(options.port, RAW[options.raw])
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
