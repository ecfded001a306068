"""The process pool, with stand-in jobs that fail in every way a compiler or a kernel may."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.errors import BuildFailed, LaunchFailed, TrialTimeout, VoltuneError, WrongResult
from tuner.worker import Worker, run_all

ROOT = Path(__file__).parent.parent
ENOUGH = 60.0


def double(value: int) -> int:
    return 2 * value


def process_id() -> int:
    return os.getpid()


def refuse(text: str) -> None:
    raise WrongResult(text)


def stumble() -> None:
    raise ValueError("a mistake in the job")


def leave() -> None:
    print("last words", flush=True)
    os._exit(3)


def segfault() -> None:
    ctypes.string_at(0)


def hang() -> None:
    time.sleep(600)


def by_value(value: int) -> int:
    """Fails in another way for each of 1, 2, 3."""
    if value == 1:
        os._exit(1)
    if value == 2:
        refuse("two")
    if value == 3:
        hang()
    return double(value)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(LaunchFailed) as made:
        yield made


def test_a_worker_keeps_its_process_from_job_to_job(worker: Worker) -> None:
    assert worker.call(double, 21, timeout_s=ENOUGH) == 42
    first = worker.call(process_id, timeout_s=ENOUGH)
    assert first != os.getpid()
    assert worker.call(process_id, timeout_s=ENOUGH) == first


def test_a_voltune_error_comes_back_with_its_class_and_text_and_the_process_stays(worker: Worker) -> None:
    before = worker.call(process_id, timeout_s=ENOUGH)
    with pytest.raises(WrongResult, match=r"^element 7 is off$"):
        worker.call(refuse, "element 7 is off", timeout_s=ENOUGH)
    assert worker.call(process_id, timeout_s=ENOUGH) == before


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (stumble, r"status 1 before answering(.|\n)*ValueError: a mistake in the job"),
        (leave, r"status 3 before answering(.|\n)*last words"),
        (segfault, "SIGSEGV"),
    ],
)
def test_a_job_that_ends_its_process_is_a_typed_failure_and_the_next_job_works(
    worker: Worker, job: object, said: str
) -> None:
    with pytest.raises(LaunchFailed, match=said):
        worker.call(job, timeout_s=ENOUGH)  # type: ignore[arg-type]
    assert worker.call(double, 1, timeout_s=ENOUGH) == 2


def test_a_job_that_hangs_is_a_timeout_and_its_process_is_gone_and_the_next_job_works(worker: Worker) -> None:
    hung = worker.call(process_id, timeout_s=ENOUGH)
    with pytest.raises(TrialTimeout, match=r"hang did not end within 0\.3 s"):
        worker.call(hang, timeout_s=0.3)
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)
    assert worker.call(double, 1, timeout_s=ENOUGH) == 2


def test_what_a_job_prints_does_not_reach_the_callers_stdout(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    worker.call(print, "in the way of --json", timeout_s=ENOUGH)
    assert capfd.readouterr().out == ""


def test_a_worker_ends_when_its_caller_is_killed() -> None:
    script = (
        "import os, signal, sys; sys.path.insert(0, 'tests'); import test_worker; from tuner.worker import Worker; "
        "print(Worker().call(test_worker.process_id, timeout_s=60), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    child = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_of_jobs_run_in_parallel_each_gets_its_own_outcome() -> None:
    jobs = [(value,) for value in range(6)]
    outcomes = dict(run_all(by_value, jobs, workers=2, timeout_s=4.0, crash=BuildFailed))
    assert [outcomes[index] for index in (0, 4, 5)] == [0, 8, 10]
    assert [type(outcomes[index]) for index in (1, 2, 3)] == [BuildFailed, WrongResult, TrialTimeout]
    assert all(isinstance(outcomes[index], VoltuneError) for index in (1, 2, 3))


def test_leaving_a_parallel_run_early_ends_its_processes() -> None:
    run = run_all(by_value, [(0,), (3,)], workers=2, timeout_s=ENOUGH, crash=BuildFailed)
    assert next(run) == (0, 0)
    begun = time.monotonic()
    run.close()  # type: ignore[attr-defined]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert time.monotonic() - begun < 10
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not [command for command in commands if b"tuner.worker" in command]
