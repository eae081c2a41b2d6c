"""Run a module-level function on W ranks: processes that live for the whole test run, a new group for every task.

Importing torch costs seconds, so one server imports it and rank processes are forked from there. They are reused by
every test and by every world size (a world of two uses the first two of them). What a task could leave behind is kept
away from the next one in two ways: every task gets a process group of its own, and a process that died, hung or did not
give its group back is replaced.

    pytest process                      rank process r
    TCPStore (server)  <--------------  group of the task: PrefixStore(task number), gloo over loopback
    pipe               -- task ------>  fn(*args, **kwargs)
                       <-- answer ----  ("value", bytes) or ("error", exception, traceback)
                       <-- "ready" ---  group destroyed, garbage collected
    file               <-- stderr ----  stack of every thread on SIGUSR1, when the time limit of a task is reached
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 20.0
TASK_LIMIT_S = 60.0
# A rank that answered has only its group to destroy. Longer than this means a collective is still stuck in it.
READY_LIMIT_S = 3.0
START_LIMIT_S = 60.0
STACK_LIMIT_S = 10.0


class RankDied(Exception):
    """A rank process ended while it had a task."""


class TaskTimeout(Exception):
    """A task reached its time limit; the text holds what every rank was doing."""


class RemoteTraceback(Exception):
    """Carries the text of what happened on the ranks; the ``__cause__`` of the exception that is raised here."""

    def __str__(self) -> str:
        """Return the text alone, set off from the local traceback."""
        return "\n" + "\n".join(str(part) for part in self.args)


class UnpicklableError(Exception):
    """Stands for an exception that can't travel between processes; the text is the original's."""


class _Answer(NamedTuple):
    kind: str  # "value", "error" or "died"
    payload: Any  # the value, or the exception
    text: str  # traceback on the rank
    time_s: float  # CLOCK_MONOTONIC, which all processes of a machine share


class _Task(NamedTuple):
    number: int
    world_size: int
    rank: int
    has_group: bool
    port: int
    call: bytes  # pickled (fn, args, kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# the rank process


def _encode_error(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(UnpicklableError(f"{type(error).__name__}: {error}"))
    return data


class _LooseErrors:
    """Collects what Python reports without raising: errors in destructors and in threads. A task with some fails."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        sys.unraisablehook = self._unraisable
        threading.excepthook = self._thread

    def _unraisable(self, args: Any) -> None:
        where = f"ignored in {args.object!r}: {args.err_msg or ''}"
        self.texts.append(where + "\n" + "".join(traceback.format_exception(args.exc_value)))

    def _thread(self, args: Any) -> None:
        self.texts.append(f"in thread {args.thread}\n" + "".join(traceback.format_exception(args.exc_value)))

    def take(self) -> str:
        text, self.texts = "\n".join(self.texts), []
        return text


@functools.cache
def _store(port: int) -> dist.TCPStore:
    # One connection for life: now and then the server misses, for 5 s, the greeting of a client that follows one
    # that left.
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=GROUP_TIMEOUT_S))


@contextlib.contextmanager
def _group(task: _Task) -> Iterator[None]:
    if not task.has_group:
        yield
        return
    store = dist.PrefixStore(f"task{task.number}", _store(task.port))
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=timeout)
    try:
        dist.barrier()  # a rank that leaves at once must not close connections that others are still making
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _perform(task: _Task, pipe: Connection, loose: _LooseErrors) -> None:
    fn = None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_group(task))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("error")
            # Dynamo's word on an old patch release of Python, not on what is compiled.
            warnings.filterwarnings("ignore", "Guards may run slower on Python", RuntimeWarning)
            fn, args, kwargs = pickle.loads(task.call)
            torch.manual_seed(1000 + task.rank)  # ranks differ unless a test makes them equal
            value = pickle.dumps(fn(*args, **kwargs))
            if leftover := loose.take():
                raise AssertionError(f"errors that Python only reports:\n{leftover}")
            answer = ("value", value, "")
        except BaseException as error:
            answer = ("error", _encode_error(error), traceback.format_exc() + loose.take())
            # The frames in the traceback hold the models of the task, and a model its group.
            traceback.clear_frames(error.__traceback__)
        pipe.send_bytes(pickle.dumps((*answer, time.monotonic())))
        fn = args = kwargs = value = answer = None
        gc.collect()
    gc.freeze()  # what outlives a task, modules above all, need not be looked at in the next one: zero_shard does, too
    pipe.send_bytes(b"ready")


def _watch_parent() -> None:
    """End this process when the pytest process is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _show_stacks_on_sigusr1() -> None:
    """Register anew for each task: Lightning, when it ends, sets every signal to what Python's own table has for it."""
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def serve(pipe: Connection, output: str) -> None:
    """Take tasks from the pipe until it says stop; the main function of a rank process. Doesn't return."""
    # Append mode: parent and child must not share a position in the file.
    with open(output, "ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has put into the background
    threading.Thread(target=_watch_parent, daemon=True).start()
    torch.set_num_threads(1)
    loose = _LooseErrors()
    gc.freeze()  # everything that torch imported stays for ever: collecting after each task needn't look at it
    with contextlib.suppress(EOFError, OSError):
        pipe.send_bytes(b"ready")
        while message := pipe.recv_bytes():
            _show_stacks_on_sigusr1()
            _perform(pickle.loads(message), pipe, loose)
    # Some gloo programs abort in static destructors after their work is done.
    os._exit(0)


# ---------------------------------------------------------------------------------------------------------------------
# the pytest process

_CONTEXT = multiprocessing.get_context("forkserver")
# What most tasks need sooner or later. Nothing of the package: the server may have another path.
_CONTEXT.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"])
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class _Rank:
    """One rank process, the pipe to it and the file it prints to."""

    def __init__(self) -> None:
        with mock.patch.dict(os.environ, _ENVIRONMENT):
            forkserver.ensure_running()
        self.pipe, theirs = _CONTEXT.Pipe(duplex=True)
        self._output = tempfile.NamedTemporaryFile(prefix="rank-")
        self.process = _CONTEXT.Process(target=serve, args=(theirs, self._output.name))
        self.process.start()
        theirs.close()
        self.is_ready = False
        self._is_closed = False

    def become_ready(self, limit_s: float) -> bool:
        """Wait until the process can take a task; False if it ended or is stuck."""
        with contextlib.suppress(EOFError, OSError):
            while not self.is_ready and not self._is_closed and self.pipe.poll(limit_s):
                self.is_ready = self.pipe.recv_bytes() == b"ready"
        return self.is_ready and not self._is_closed and self.process.is_alive()

    def send(self, task: _Task) -> None:
        """Start a task; a process that is gone shows when the answer is read."""
        self.is_ready = False
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(pickle.dumps(task))

    def receive(self) -> _Answer:
        """Block until the task's answer is there, or the process has ended."""
        try:
            kind, payload, text, time_s = pickle.loads(self.pipe.recv_bytes())
            return _Answer(kind, pickle.loads(payload), text, time_s)
        except (EOFError, OSError):
            self.process.join()
            error = RankDied(f"the rank process ended with exit code {self.process.exitcode}")
            return _Answer("died", error, self.output(), time.monotonic())

    def output(self, start: int = 0) -> str:
        """Return what the process has printed (stdout and stderr) from byte ``start`` on."""
        with open(self._output.name, "rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def stacks(self) -> str:
        """Return the stack of every thread of the process, by a signal that works when it hangs in C++."""
        start = os.path.getsize(self._output.name)
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        give_up_s = time.monotonic() + STACK_LIMIT_S
        while not self.output(start) and time.monotonic() < give_up_s:
            time.sleep(0.1)
        time.sleep(0.3)  # the rest of it
        return self.output(start)

    def end(self) -> None:
        """Ask the process to leave if it listens, kill it otherwise."""
        if self._is_closed:
            return
        with contextlib.suppress(OSError):
            if self.is_ready:
                self.pipe.send_bytes(b"")
                self.process.join(READY_LIMIT_S)
        self._is_closed = True
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        self._output.close()


class Pool:
    """Rank processes for worlds of any size; see the module's docstring."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        # Hosted here, so that there is no port to race for and the store outlives a rank that dies.
        self._server: dist.TCPStore | None = None
        self._num_tasks = 0

    def answers(self, world_size: int, call: bytes, name: str, limit_s: float, has_group: bool) -> list[_Answer]:
        """Perform one pickled call on ``world_size`` ranks and return every rank's answer.

        Raises:
            TaskTimeout: A rank has no answer after ``limit_s`` seconds. All its ranks are killed.
        """
        if self._server is None:
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = self._ready_ranks(world_size)
        self._num_tasks += 1
        for index, rank in enumerate(ranks):
            rank.send(_Task(self._num_tasks, world_size, index, has_group, self._server.port, call))
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < world_size:
            waiting = {rank.pipe: index for index, rank in enumerate(ranks) if index not in answers}
            arrived = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not arrived:
                raise self._timeout(name, limit_s, ranks, answers)
            for pipe in arrived:
                index = waiting[pipe]  # type: ignore[index]
                answers[index] = ranks[index].receive()
        return [answers[index] for index in range(world_size)]

    def close(self) -> None:
        """End every rank process. The pool can be used again afterwards."""
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()

    def _ready_ranks(self, world_size: int) -> list[_Rank]:
        for index in range(min(world_size, len(self._ranks))):
            if not self._ranks[index].become_ready(READY_LIMIT_S):
                self._ranks[index].end()
                self._ranks[index] = _Rank()
        while len(self._ranks) < world_size:
            self._ranks.append(_Rank())
        for rank in self._ranks[:world_size]:
            if not rank.become_ready(START_LIMIT_S):
                raise RankDied(f"a rank process did not start:\n{rank.output()}")
        return self._ranks[:world_size]

    def _timeout(self, name: str, limit_s: float, ranks: list[_Rank], answers: dict[int, _Answer]) -> TaskTimeout:
        lines = [f"{name} on {len(ranks)} ranks has no result after {limit_s:g} s"]
        for index, rank in enumerate(ranks):
            if index in answers:
                lines.append(f"rank {index} had answered: {answers[index].kind}\n{answers[index].text}")
            else:
                lines.append(f"rank {index} was doing:\n{rank.stacks()}")
        for rank in ranks:
            rank.is_ready = False
            rank.end()
        return TaskTimeout("\n".join(lines))


_POOL = Pool()


@atexit.register  # else multiprocessing would wait for them
def close() -> None:
    """End the rank processes of this test run."""
    _POOL.close()


def run(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    limit_s: float = TASK_LIMIT_S,
    fresh: bool = False,
    has_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank of a new gloo group and return the values in rank order.

    Args:
        world_size: W, the number of ranks.
        fn: A module-level function; it asks ``torch.distributed`` for its rank. Warnings are errors in it.
        limit_s: Reaching it kills the ranks and fails the task.
        fresh: Use processes that have done nothing before and end afterwards; for tests that read resident memory.
        has_group: False leaves ``torch.distributed`` uninitialised; only sensible for one rank.
    Raises:
        Exception: The exception of the rank that failed first, with the tracebacks of all ranks as its cause and a list
            ``errors`` (an exception or None per rank).
        TaskTimeout: The limit was reached.
    """
    answers = _perform_on_ranks(world_size, fn, args, kwargs, limit_s, fresh, has_group)
    failed = [(answer.time_s, rank) for rank, answer in enumerate(answers) if answer.kind != "value"]
    if not failed:
        return [answer.payload for answer in answers]
    texts = [f"--- rank {rank}, {answers[rank].kind}:\n{answers[rank].text}" for _, rank in sorted(failed)]
    first = answers[min(failed)[1]].payload
    first.errors = _errors(answers)
    raise first from RemoteTraceback(*texts)


def run_expecting_errors(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    limit_s: float = TASK_LIMIT_S,
    fresh: bool = False,
    has_group: bool = True,
    **kwargs: Any,
) -> list[BaseException | None]:
    """Do what :func:`run` does, but return each rank's exception (:class:`RankDied` for a process that ended), or None.

    Raises:
        TaskTimeout: The limit was reached: a hang is never an expected error.
    """
    return _errors(_perform_on_ranks(world_size, fn, args, kwargs, limit_s, fresh, has_group))


def _errors(answers: list[_Answer]) -> list[BaseException | None]:
    return [None if answer.kind == "value" else answer.payload for answer in answers]


def _perform_on_ranks(
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit_s: float,
    fresh: bool,
    has_group: bool,
) -> list[_Answer]:
    call = pickle.dumps((fn, args, kwargs))
    name = f"{fn.__module__}.{fn.__qualname__}{args}{kwargs or ''}"
    pool = Pool() if fresh else _POOL
    try:
        return pool.answers(world_size, call, name[:500], limit_s, has_group)
    finally:
        if fresh:
            pool.close()
