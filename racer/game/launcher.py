"""Starts the real game's bridges from its folder, keeps them running, and ends them: what `--game DIR` does.

    urls = start_bridges(Path("../top-down-racer-02"), 2)      # on free ports; returns when both listen
    envs = RacerVectorEnv(8, bridge_url=urls)
    end_bridges()

A bridge reads a pipe from this process and ends when it closes (END_WITH_PIPE). The operating system closes it when this process
is gone, also after kill -9, and on Windows as elsewhere, so that no bridge stays behind. A bridge that ends by itself is started
again on its port; RacerVectorEnv reconnects meanwhile if it has retries.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from racer.game.bridge import BridgeError, retry_pause_s
from racer.game.checks import UserError, quote

SCRIPT = Path("src", "ai", "run-bridge.ts")
GAME_ASSETS = Path("public", "assets")  # where the browser game loads its driver from
WHERE = "it is projects/top-down-racer-02 of https://github.com/mbriggsy/ai-learning-journey"
# For every Node.js process of a bridge: end when the pipe on the standard input ends. Only in main threads: Node.js imports this
# in worker threads too (tsx compiles in one), whose standard input is at its end from the start.
END_WITH_PIPE = (
    "--import=data:text/javascript,import{isMainThread}from'node:worker_threads';"
    "isMainThread&&process.stdin.on('end',()=>process.exit(1)).resume().unref()"
)
SLOW_START_S, START_TIMEOUT_S = 10.0, 60.0
STOP_TIMEOUT_S = 3.0
MAX_RESTARTS = 10  # in a row
HEALTHY_S = 60.0  # a bridge that ran for so long has not failed to start

logger = logging.getLogger(__name__)
_running: GameBridges | None = None


def start_bridges(folder: Path, count: int) -> tuple[str, ...]:
    """The URLs of the game's bridges, started unless they run already. They run until `end_bridges` or the end of this process."""
    global _running
    wanted = Path(folder).resolve(), count
    if _running is None or (_running.folder, len(_running.bridges)) != wanted or _running.given_up:
        end_bridges()
        check_folder(wanted[0])
        check_packages(wanted[0])
        _running = GameBridges(*wanted)
    return tuple(bridge.url for bridge in _running.bridges)


def end_bridges() -> None:
    """Idempotent."""
    global _running
    if _running is not None:
        _running.close()
    _running = None


atexit.register(end_bridges)


def check_folder(folder: Path) -> None:
    """UserError if the game is not there, with what to do."""
    if not folder.is_dir():
        raise UserError(f"--game is {folder}, and there is no such folder; give the game's: {WHERE}")
    if not (folder / SCRIPT).is_file():
        raise UserError(f"--game is {folder}, which is not the game's folder, since it has no {SCRIPT}: {WHERE}")


def check_packages(folder: Path) -> None:
    """UserError if the game cannot be started, with what to do."""
    if not shutil.which("npx"):
        raise UserError("--game needs Node.js 20 or later, and there is no npx on the PATH; get it from https://nodejs.org")
    for package in ("tsx", "ws"):
        if not any((parent / "node_modules" / package).exists() for parent in (folder, *folder.parents)):
            manager = "pnpm" if shutil.which("pnpm") and (folder / "pnpm-lock.yaml").exists() else "npm"
            raise UserError(
                f"the game's packages are not installed (no {package}); type: cd {quote(folder)} && {manager} install"
            )


class GameBridges:
    """Some bridges of one game, and a thread that watches them."""

    def __init__(self, folder: Path, count: int):
        self.folder, self._ending = folder, threading.Event()
        self.bridges: list[Bridge] = []
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        try:
            for _ in range(count):
                self.bridges.append(Bridge(folder))
            for bridge in self.bridges:
                bridge.wait_until_it_listens()
        except BaseException:  # also Ctrl+C
            self.close()
            raise
        self._watcher.start()

    @property
    def given_up(self) -> bool:
        """Whether one of the bridges has ended too often to be started again."""
        return any(bridge.restarts > MAX_RESTARTS for bridge in self.bridges)

    def _watch(self) -> None:
        while not self._ending.wait(0.2):
            for bridge in self.bridges:
                bridge.restart_if_due()

    def close(self) -> None:
        self._ending.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for bridge in self.bridges:
            bridge.hang_up()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for bridge in self.bridges:
            bridge.close(deadline_s)


class Bridge:
    """One bridge: a process on a port of its own."""

    def __init__(self, folder: Path):
        self.folder, self.restarts, self._due_s, self._failure = folder, 0, None, ""
        self.output = self.process = None
        self._start(free_port())

    def _start(self, port: int) -> None:
        if self.process:  # the one before
            self.hang_up()
            self.output.close()
        self.port, self.url, self._began_s = port, f"ws://127.0.0.1:{port}", time.monotonic()
        self.output = tempfile.TemporaryFile("a+b")  # noqa: SIM115  what it says goes to the end, wherever we read
        options = f"{os.environ.get('NODE_OPTIONS', '')} {END_WITH_PIPE}".strip()
        environment = {**os.environ, "BRIDGE_PORT": str(port), "NODE_OPTIONS": options}
        # In a group of its own, so that Ctrl+C reaches the trainer alone, which still needs it.
        new_group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if os.name == "nt" else {"start_new_session": True}
        self.process = subprocess.Popen(
            [shutil.which("npx") or "npx", "tsx", str(SCRIPT)],
            cwd=self.folder, env=environment, stdin=subprocess.PIPE, stdout=self.output, stderr=subprocess.STDOUT, **new_group,
        )  # fmt: skip
        self._group_ended = False

    def wait_until_it_listens(self) -> None:
        slow_s = self._began_s + SLOW_START_S
        while not self._listens():
            ended, now = self.process.poll() is not None, time.monotonic()
            if ended and "EADDRINUSE" in self.last_lines():  # somebody else was faster
                self._start(free_port())
            elif ended:
                raise BridgeError(f"the game's bridge ended at once, with:\n{self.last_lines()}")
            elif now > self._began_s + START_TIMEOUT_S:
                problem = f"the game's bridge does not listen on port {self.port} after {START_TIMEOUT_S:g} s"
                by_hand = f"To see why, start it by hand: cd {quote(self.folder)} && npx tsx {SCRIPT.as_posix()}"
                raise BridgeError(f"{problem}:\n{self.last_lines()}\n{by_hand}")
            elif now > slow_s:
                slow_s = math.inf
                logger.warning(f"Still waiting for the game's bridge on port {self.port} (up to {START_TIMEOUT_S:g} s)")
            time.sleep(0.05)

    def _listens(self) -> bool:
        if f"listening on {self.url}" not in self.last_lines():  # if anybody listens there, it is somebody else
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def restart_if_due(self) -> None:
        """Call this every now and then. While it keeps failing, pauses become longer, and in the end it is given up."""
        now = time.monotonic()
        if self.restarts > MAX_RESTARTS or (not self._failure and self.process.poll() is None):
            return
        if self._due_s is None:  # it has just ended, or could not be started
            self._end_group()
            self.restarts = 1 if now - self._began_s > HEALTHY_S else self.restarts + 1
            self._due_s = now + retry_pause_s(self.restarts - 1)
            what = "starting it again" if self.restarts <= MAX_RESTARTS else f"it was restarted {MAX_RESTARTS} times"
            why = self._failure or f"has ended ({self.last_lines(1)})"
            logger.warning(f"The game's bridge at {self.url} {why}; {what}")
        elif now >= self._due_s:
            self._due_s, self._failure = None, ""
            try:
                self._start(self.port)
            except OSError as error:  # the folder is gone
                self._failure = f"cannot be started ({error})"

    def last_lines(self, count: int = 8) -> str:
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").split("\n")
        return "\n".join([line for line in lines if line.strip()][-count:]) or "no output"

    def hang_up(self) -> None:
        """Close the pipe, which ends the bridge."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def close(self, deadline_s: float) -> None:
        """After `hang_up`: end all its processes, also those that hang."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline_s - time.monotonic()))
        self._end_group()
        self.process.wait()
        self.output.close()

    def _end_group(self) -> None:
        """End what the process has started, once: later its number may be somebody else's."""
        if self._group_ended:
            return
        self._group_ended = True
        if os.name != "nt":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        elif self.process.poll() is None:
            subprocess.run(["taskkill", "/T", "/F", "/PID", str(self.process.pid)], capture_output=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
