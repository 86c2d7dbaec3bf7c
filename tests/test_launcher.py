"""`--game DIR`: bridges are started from a folder, kept running, and none stays behind.

The game's folder is one of the same shape, and `npx` on the PATH a script that runs tests/bridge_server.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, TESTS, args_of, evaluate_run, wait_for

import sac_racer
from racer.export import Args as ExportArgs
from racer.export import run_export
from racer.game import launcher
from racer.game.bridge import BridgeError, retry_pause_s
from racer.game.launcher import end_bridges, start_bridges
from racer_env import RacerVectorEnv

STANDS_IN = f'{sys.executable} {TESTS / "bridge_server.py"} --port "$BRIDGE_PORT" --end-with-input'
pytestmark = pytest.mark.skipif(os.name == "nt", reason="npx is a shell script here")


def make_npx(folder, monkeypatch, line: str) -> None:
    (folder / "npx").write_text(f"#!/bin/sh\n{line}\n")
    (folder / "npx").chmod(0o755)


@pytest.fixture
def game(tmp_path, monkeypatch):
    """The game's folder; bridges are the stand-in."""
    folder = tmp_path / "the game"
    for part in ("src/ai", "node_modules/tsx", "node_modules/ws"):
        (folder / part).mkdir(parents=True)
    (folder / "src/ai/run-bridge.ts").touch()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    make_npx(tmp_path / "bin", monkeypatch, f"exec {STANDS_IN}")
    yield folder
    end_bridges()


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) == 0


def wait_until_gone(urls) -> None:
    until = time.monotonic() + 20
    while any(map(listens, urls)):
        assert time.monotonic() < until, "a bridge was left behind"
        time.sleep(0.02)


def test_bridges_are_started_once_driven_and_ended(game):
    urls = start_bridges(game, 2)
    assert len(set(urls)) == 2 and all(map(listens, urls)) and start_bridges(game, 2) == urls
    envs, engine = RacerVectorEnv(4, bridge_url=urls), RacerVectorEnv(4)
    for cars in (envs, engine):
        cars.reset(seed=0)
    a, b = (cars.step(np.tile([0.1, 1.0, 0.0], (4, 1)))[0] for cars in (envs, engine))
    np.testing.assert_array_equal(a, b)
    envs.close()
    one = start_bridges(game, 1)
    assert not any(map(listens, urls)) and listens(*one), "another number: others"
    end_bridges(), end_bridges()
    assert not listens(*one)


def test_a_bridge_that_dies_is_started_again_and_the_cars_go_on(game):
    (url,) = start_bridges(game, 1)
    envs = RacerVectorEnv(2, bridge_url=url, retries=10)
    envs.reset(seed=0)
    bridge = launcher._running.bridges[0]
    first = bridge.process
    first.kill()
    first.wait()
    for _ in range(3):
        envs.step(np.tile([0.1, 1.0, 0.0], (2, 1)))
    assert envs.bridge_faults == 1 and bridge.process is not first and bridge.url == url
    envs.close()


def test_a_bridge_that_keeps_dying_is_given_up(game, monkeypatch, caplog):
    start_bridges(game, 1)
    launcher._running._ending.set()  # this test is the watcher
    launcher._running._watcher.join()
    monkeypatch.setattr(launcher, "retry_pause_s", lambda failures: 0.0)
    monkeypatch.setattr(launcher, "MAX_RESTARTS", 3)
    bridge, seen = launcher._running.bridges[0], set()
    for _ in range(20):
        bridge.process.kill()
        bridge.process.wait()
        seen.add(bridge.process.pid)
        bridge.restart_if_due()
    assert len(seen) == 4 and "restarted 3 times" in caplog.text
    assert start_bridges(game, 1) != (bridge.url,) and launcher._running.bridges[0] is not bridge, "not its dead URL"


def test_a_folder_that_goes_away_does_not_end_the_watcher(game, monkeypatch, caplog):
    start_bridges(game, 1)
    monkeypatch.setattr(launcher, "retry_pause_s", lambda failures: 0.0)
    monkeypatch.setattr(launcher, "MAX_RESTARTS", 3)
    game.rename(game.with_name("moved"))
    bridge = launcher._running.bridges[0]
    bridge.process.kill()
    until = time.monotonic() + 20
    while not launcher._running.given_up:
        assert time.monotonic() < until and launcher._running._watcher.is_alive()
        time.sleep(0.02)
    assert "cannot be started" in caplog.text


def test_pauses_have_an_end():
    assert retry_pause_s(0) == 1.0 and retry_pause_s(5000) == 30.0


def test_a_slow_start_is_said_and_one_that_never_ends_says_what_to_try(game, tmp_path, monkeypatch, caplog):
    make_npx(tmp_path / "bin", monkeypatch, "exec cat")
    monkeypatch.setattr(launcher, "SLOW_START_S", 0.05)
    monkeypatch.setattr(launcher, "START_TIMEOUT_S", 0.3)
    with pytest.raises(BridgeError, match=r"by hand: cd .* && npx tsx src/ai/run-bridge\.ts"):
        start_bridges(game, 1)
    assert caplog.text.count("Still waiting for the game's bridge") == 1


def test_what_is_missing_is_said_with_what_cures_it(game, tmp_path, monkeypatch):
    def refused() -> str:
        with pytest.raises(ValueError) as error:
            start_bridges(game, 1)
        return str(error.value)

    (game / "pnpm-lock.yaml").touch()
    shutil.rmtree(game / "node_modules" / "ws")
    manager = "pnpm" if shutil.which("pnpm") else "npm"
    assert re.search(rf"no ws\); type: cd .*the game.* && {manager} install", refused())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Node.js" in refused() and "nodejs.org" in refused()
    (game / "src/ai/run-bridge.ts").unlink()
    assert "not the game's folder" in refused() and "run-bridge.ts" in refused()
    shutil.rmtree(game)
    assert "no such folder" in refused()


def test_a_bridge_that_ends_at_once_shows_its_last_lines(game, tmp_path, monkeypatch):
    make_npx(tmp_path / "bin", monkeypatch, "echo first; echo SyntaxError: on purpose >&2; exit 1")
    with pytest.raises(BridgeError, match=r"ended at once.*\n?first\nSyntaxError: on purpose"):
        start_bridges(game, 2)
    assert launcher._running is None


def test_a_port_that_somebody_took_is_left_to_them(game, tmp_path, monkeypatch):
    make_npx(tmp_path / "bin", monkeypatch, f"{STANDS_IN} || echo EADDRINUSE; exit 1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], launcher.free_port()]
        monkeypatch.setattr(launcher, "free_port", lambda: ports.pop(0))
        (url,) = start_bridges(game, 1)
    assert not ports and listens(url)


TRAINER = """
import signal
from racer.game.launcher import start_bridges
signal.signal(signal.SIGINT, signal.SIG_DFL)
print(*start_bridges({game!r}, 2), flush=True)
input()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM] if os.name != "nt" else [])
def test_no_bridge_outlives_its_trainer(game, how):
    command = [sys.executable, "-c", TRAINER.format(game=str(game))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as trainer:
        urls = trainer.stdout.readline().split()
        assert len(urls) == 2 and all(map(listens, urls))
        trainer.send_signal(how)
        trainer.wait()
    wait_until_gone(urls)


def test_ctrl_c_while_the_bridges_start_ends_them(game, tmp_path, monkeypatch, start):
    pids = tmp_path / "pids"
    make_npx(tmp_path / "bin", monkeypatch, f'echo $$ >> "{pids}"; exec cat')
    trainer = start("sac", "--game", game, "--bridges", "2", "--run-dir", tmp_path)
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2, trainer)
    trainer.send_signal(signal.SIGINT)
    assert trainer.wait(30) == 130
    until = time.monotonic() + 20
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < until:
                os.kill(pid, 0)
                time.sleep(0.02)


def test_a_bridge_that_hangs_is_ended_too(game, tmp_path, monkeypatch):
    make_npx(tmp_path / "bin", monkeypatch, f"exec {STANDS_IN.replace('--end-with-input', '')}")
    monkeypatch.setattr(launcher, "STOP_TIMEOUT_S", 0.2)
    urls = start_bridges(game, 2)
    end_bridges()
    wait_until_gone(urls)


@pytest.mark.skipif(not shutil.which("node"), reason="needs Node.js")
@pytest.mark.skipif(os.name == "nt", reason="npx is a shell script here")
def test_a_bridge_of_node_ends_with_the_pipe(game, tmp_path, monkeypatch):
    """The stand-in watches its input by itself; the real game does so because of NODE_OPTIONS, also below a shell."""
    server = "require('net').createServer().listen(+process.env.BRIDGE_PORT, '127.0.0.1')"
    line = f"{server}; console.log('listening on ws://127.0.0.1:' + process.env.BRIDGE_PORT)"
    make_npx(tmp_path / "bin", monkeypatch, f'node -e "{line}"; exit 1')
    urls = start_bridges(game, 2)
    for bridge in launcher._running.bridges:
        bridge.hang_up()
    wait_until_gone(urls)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with the real tsx and ws, from npm."""
    if not shutil.which("npm"):
        pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("packages")
    done = subprocess.run(["npm", "install", "--no-save", "tsx", "ws"], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm has no tsx and ws: {done.stderr[-200:]}")
    return folder / "node_modules"


BRIDGE_IN_TYPESCRIPT = """
import { WebSocketServer } from "ws";
const port: number = Number(process.env.BRIDGE_PORT);
new WebSocketServer({ host: "127.0.0.1", port }).on("listening", () => console.log(`[bridge] listening on ws://127.0.0.1:${port}`));
"""


@pytest.mark.slow
def test_a_bridge_in_typescript_starts_on_a_machine_where_none_has_run(packages, tmp_path, monkeypatch):
    """tsx compiles in a worker thread, and keeps what it has compiled in the temporary folder: an empty one shows what breaks."""
    folder, caches = tmp_path / "game", tmp_path / "empty"
    (folder / "src" / "ai").mkdir(parents=True)
    (folder / "src" / "ai" / "run-bridge.ts").write_text(BRIDGE_IN_TYPESCRIPT)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "node_modules").symlink_to(packages)
    caches.mkdir()
    for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(caches))
    monkeypatch.setattr(launcher, "START_TIMEOUT_S", 20.0)
    urls = start_bridges(folder, 2)
    assert all(map(listens, urls))
    for bridge in launcher._running.bridges:
        bridge.hang_up()
    wait_until_gone(urls)
    end_bridges()


@pytest.mark.slow
def test_train_resume_elsewhere_and_evaluate_in_the_game(game, tmp_path):
    settings = {"run_dir": tmp_path, "run_name": "run", "log_every": 200, "learning_starts": 200, "batch_size": 16}
    args = args_of("sac", "--game", game, total_timesteps=400, **settings)
    assert args.bridge_retries == 10 and args.num_envs == 8 and args.bridges >= 1
    result = sac_racer.train(args)
    assert result["finished"]
    moved = game.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="no such folder"):
        sac_racer.train(args_of("sac", "--resume", tmp_path / "run", total_timesteps=800))
    again = sac_racer.train(args_of("sac", "--resume", tmp_path / "run", "--game", moved, total_timesteps=800))
    assert again["steps"] >= 800
    again = sac_racer.train(args_of("sac", "--resume", tmp_path / "run", "--bridge-url", "none", total_timesteps=1000))
    assert again["finished"] and launcher._running is None, "a run ends its bridges"
    (result,) = evaluate_run(tmp_path / "run", game=moved)
    assert launcher._running is None and result["episodes"] == 1


def test_an_export_goes_into_the_game_and_keeps_its_own_driver(game, tmp_path):
    pytest.importorskip("onnxruntime")
    settings = {"run_dir": tmp_path, "run_name": "run", "log_every": 200, "learning_starts": 200, "batch_size": 16}
    sac_racer.train(sac_racer.Args(total_timesteps=400, tensorboard=False, **settings))
    assets = game / "public" / "assets"
    assets.mkdir(parents=True)
    (assets / "model.onnx").write_text("the game's own")
    command = [sys.executable, "-m", "racer.export", str(tmp_path / "run"), "--game", str(game)]
    for _ in range(2):
        shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert "pnpm dev" in shown and str(game) in shown
    assert (assets / "model.onnx.old").read_text() == "the game's own" and (assets / "vecnorm_stats.json").exists()


def test_an_export_into_a_wrong_folder_is_refused(game, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        run_export(ExportArgs(tmp_path, game=tmp_path / "gane"))
    assert not (tmp_path / "gane").exists()


def test_game_and_bridge_url_exclude_each_other(game):
    with pytest.raises(ValueError, match="mutually exclusive"):
        sac_racer.Args(game=game, bridge_url="ws://localhost:9876")
