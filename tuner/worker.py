"""A process of our own that runs jobs, and that may be killed and replaced.

A kernel that faults leaves its CUDA context unusable and a compiler may crash: neither runs in the caller's process.
The child is a fresh interpreter: no state of the caller is inherited and the caller's main module is not run again.
Jobs and answers cross one pipe. What a job prints goes to a scratch file and is quoted when the process dies, so that
nothing but the caller writes to the caller's stdout.
"""

import collections
import contextlib
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, Any

from tuner import errors
from tuner.errors import LaunchFailed, TrialTimeout, VoltuneError

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from tuner.worker import serve; serve(int(sys.argv[1]))"
)
_TAIL = 4000  # bytes of a dead child's output that its error quotes
_GRACE_S = 30.0  # a job left running by a caller that was itself killed ends this long after its time
_REAP_S = 10.0


class Worker:
    """One child process, started by its first job and again by the next one after it died.

    crash: the class raised when the process ends before it answers, or when a job raises anything but a VoltuneError;
    the process is gone in both cases, since what such a job left behind cannot be trusted.
    """

    def __init__(self, crash: type[VoltuneError] = LaunchFailed) -> None:
        self._crash = crash
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: multiprocessing.connection.Connection[Any, Any] | None = None
        self._output: IO[bytes] | None = None
        self._job = ""
        self._ends = 0.0

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        """Runs function(*arguments) in the child and returns its value.

        function must be importable by name; arguments and value must pickle. timeout_s counts the child's start too.
        Raises the VoltuneError the job raised (same class and text), TrialTimeout when it did not end in time (the
        child is then killed), or the class `crash` with the tail of the child's output when the child ended.
        """
        self.submit(function, *arguments, timeout_s=timeout_s)
        return self.collect()

    def submit(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> None:
        """Starts a job; `collect` waits for it. At most one job is in flight."""
        if self._job:
            raise RuntimeError(f"{self._job} is still running in this worker; collect it before submitting another job")
        if self._process is None or self._process.poll() is not None:
            self.kill()
            self._start()
        assert self._pipe is not None
        with contextlib.suppress(OSError):  # a child that died just now: collect reads the closed pipe and says so
            self._pipe.send((function, arguments, timeout_s))
        self._job = getattr(function, "__qualname__", repr(function))
        self._ends = time.monotonic() + timeout_s
        self._timeout_s = timeout_s

    def collect(self) -> Any:
        """Waits for the submitted job; returns and raises as `call` does."""
        assert self._pipe is not None and self._job, "no job was submitted"
        job, self._job = self._job, ""
        try:
            if not self._pipe.poll(max(0.0, self._ends - time.monotonic())):
                self.kill()
                raise TrialTimeout(f"{job} did not end within {self._timeout_s:g} s; its process was killed")
            answer = self._pipe.recv()
        except (EOFError, OSError) as closed:
            raise self._crash(self._epitaph(job)) from closed
        except BaseException:
            # Ctrl-C in the middle of a job: the answer would be taken for the next job's.
            self.kill()
            raise
        if answer[0] == "value":
            return answer[1]
        raise _rebuild(answer[1], answer[2])

    @property
    def pipe(self) -> "multiprocessing.connection.Connection[Any, Any]":
        """Ready to read when the submitted job has ended, for multiprocessing.connection.wait."""
        assert self._pipe is not None, "no job was submitted"
        return self._pipe

    @property
    def remaining_s(self) -> float:
        """Seconds the submitted job still has."""
        return max(0.0, self._ends - time.monotonic())

    def kill(self) -> None:
        """Ends the child at once; the next job starts a fresh one. Harmless when there is none."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            # A process stuck in the GPU's driver may outlive SIGKILL for a while: do not hang on it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
        for resource in (self._pipe, self._output):
            if resource is not None:
                resource.close()
        self._process = self._pipe = self._output = None
        self._job = ""

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (kill closes it)
        command = [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output
        )
        theirs.close()  # else the child's death would not close the pipe
        self._pipe = ours

    def _epitaph(self, job: str) -> str:
        assert self._process is not None and self._output is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        status = self._process.returncode
        how = f"by {signal.Signals(-status).name}" if status is not None and status < 0 else f"with status {status}"
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace").strip()
        self.kill()
        return f"{job} ended its process {how} before answering" + (f"; its last output:\n{tail}" if tail else "")


def run_all(
    function: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    *,
    workers: int,
    timeout_s: float,
    crash: type[VoltuneError],
) -> Iterator[tuple[int, Any]]:
    """Runs function(*job) for every job on `workers` processes; yields (index, value or VoltuneError) as each one ends.

    A job that fails, crashes or outlasts timeout_s is its own outcome and harms no other. Closing the iterator, Ctrl-C
    included, kills the processes.
    """
    waiting = collections.deque(enumerate(jobs))
    running: dict[Worker, int] = {}
    idle = [Worker(crash) for _ in range(min(workers, len(jobs)))]
    try:
        while waiting or running:
            while waiting and idle:
                worker = idle.pop()
                index, job = waiting.popleft()
                worker.submit(function, *job, timeout_s=timeout_s)
                running[worker] = index
            multiprocessing.connection.wait([w.pipe for w in running], min(w.remaining_s for w in running))
            for worker in [w for w in running if w.remaining_s == 0.0 or w.pipe.poll()]:
                index = running.pop(worker)
                idle.append(worker)
                outcome: Any
                try:
                    outcome = worker.collect()
                except VoltuneError as error:
                    outcome = error
                yield index, outcome
    finally:
        for worker in [*idle, *running]:
            worker.kill()


def serve(descriptor: int) -> None:
    """The child's side: answers jobs from the pipe until it closes. Anything but a VoltuneError ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the caller decides what ends
    faulthandler.enable()
    pipe: multiprocessing.connection.Connection[Any, Any] = multiprocessing.connection.Connection(descriptor)
    while True:
        try:
            function, arguments, timeout_s = pipe.recv()
        except EOFError:
            return
        # A C thread's timer: it fires even when the job never gives the interpreter back.
        faulthandler.dump_traceback_later(timeout_s + _GRACE_S, exit=True)
        answer: tuple[Any, ...]
        try:
            answer = ("value", function(*arguments))
        except VoltuneError as error:
            answer = ("error", type(error).__name__, str(error))
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


def _rebuild(name: str, text: str) -> VoltuneError:
    kind = getattr(errors, name, VoltuneError)
    return kind(text) if isinstance(kind, type) and issubclass(kind, VoltuneError) else VoltuneError(text)
