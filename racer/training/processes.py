"""One run in several processes, on one machine or several: torchrun starts them, gloo connects them.

Every process drives its share of the cars and takes optimiser steps on what they did. After every update, networks and optimiser
states are averaged over all processes, so that all begin the next one equal; process 0 evaluates, logs and writes. With a single
process, every function here just calls or returns.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from racer.game.bridge import CONNECT_TIMEOUT_S, LONGEST_PAUSE_S, BridgeError
from racer.game.checks import UserError
from racer.training.terminal import print_safely

ANSWER_TIMEOUT_S = 45.0  # a process that has not answered for this long is considered dead
RANK_SEED_STRIDE = 1_000_003  # between the random seeds of the processes of a run

_store: dist.Store | None = None  # torchrun's key-value store, which survives a restart of the processes
_group: dist.ProcessGroup | None = None  # all processes; None: the default group


class ProcessError(RuntimeError):
    """Another process of the run has died or does not answer."""


class SharedError(Exception):
    """An error in one process that all processes of the run know about. `error` is the original one."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def world_size() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """The number of this process. Process 0 evaluates, logs and writes."""
    return int(os.environ.get("RANK") or 0) if world_size() > 1 else 0


def init_processes() -> None:
    """Connect to the other processes that torchrun has started, if there are any."""
    global _store
    if world_size() == 1:
        return
    env, timeout = os.environ, timedelta(seconds=ANSWER_TIMEOUT_S)
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]:
        found = f"WORLD_SIZE is {world_size()}, but {', '.join(missing)} is not set"
        raise UserError(f"{found}; start several processes with torchrun, or unset WORLD_SIZE")
    is_master = rank() == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    with _others_must_answer():
        _store = dist.TCPStore(*address, is_master=is_master, timeout=timeout, use_libuv=sys.platform != "win32")
        # After a restart the store still holds the addresses of dead processes, so every attempt has a prefix of its own.
        attempt = dist.PrefixStore(f"attempt-{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", _store)
        dist.init_process_group("gloo", store=attempt, rank=rank(), world_size=world_size(), timeout=timeout)


def extend_timeout(bridge_retries: int) -> None:
    """From now on, wait as long as another process may be reconnecting to its bridge."""
    global _group
    if bridge_retries and dist.is_initialized():
        seconds = ANSWER_TIMEOUT_S + bridge_retries * (LONGEST_PAUSE_S + CONNECT_TIMEOUT_S)
        _group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def remember(key: str, value: str) -> None:
    """Store a value for the next attempt, should torchrun restart the processes."""
    if _store is not None:
        _store.set(key, value)


def remembered(key: str) -> str | None:
    return _store.get(key).decode() if _store is not None and _store.check([key]) else None


@contextlib.contextmanager
def _others_must_answer():
    try:
        yield
    except RuntimeError as error:
        found = f"process {rank()} of {world_size()}: another process of this run has died or does not answer"
        raise ProcessError(f"{found} ({str(error).strip()[:160]})") from error


# -- values ----------------------------------------------------------------------------------------------------------------


def all_gather(value) -> list:
    """The value of every process, in order. If one sends an exception, all raise it."""
    if not dist.is_initialized():
        if isinstance(value, Exception):
            raise value
        return [value]
    values = [value] * world_size()
    with _others_must_answer():
        dist.all_gather_object(values, value, group=_group)
    for error in values:
        if isinstance(error, Exception):
            raise SharedError(error)
    return values


def gather_on_rank0(value) -> list | None:
    """The value of every process, in order, on process 0. None elsewhere."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size() if rank() == 0 else None
    with _others_must_answer():
        dist.gather_object(value, values, dst=0, group=_group)
    return values


def run_on_all(function: Callable, *arguments, **named):
    """Every process calls the function. An error in one is raised by all."""
    result = _result_or_error(function, *arguments, **named)
    all_gather(result if isinstance(result, Exception) else None)
    return result


def broadcast_from_rank0(function: Callable, *arguments):
    """Only process 0 calls the function. All get its result, or raise its error."""
    return all_gather(_result_or_error(function, *arguments) if rank() == 0 else None)[0]


def _result_or_error(function: Callable, *arguments, **named):
    try:
        return function(*arguments, **named)
    except (BridgeError, UserError, OSError) as error:
        return error


def average_over_processes(module: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """After some optimiser steps of its own: give every process the mean of all networks and of all optimiser states."""
    if dist.is_initialized():
        states = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values())
        tensors = [*(parameter.data for parameter in module.parameters()), *states]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with _others_must_answer():
            dist.all_reduce(flat, group=_group)
        parts = (flat / world_size()).split([tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, parts, strict=True):
            tensor.copy_(mean.view_as(tensor))


def process_seed(seed: int) -> int:
    """The random seed of this process, of a run with this one."""
    return seed + RANK_SEED_STRIDE * rank()


def exit_process(code: int, wait_for_others: bool = False) -> None:
    """End the process at once, for scripts only: Python's own clean-up takes half a second, and gloo's threads can abort it.

    wait_for_others: every process ends here too, and torchrun ends all as soon as one has failed.
    """
    if wait_for_others:
        with contextlib.suppress(RuntimeError):
            all_gather(None)
    for stream in ("stdout", "stderr"):
        print_safely("", end="", to=stream)  # flushes it
    os._exit(code)
