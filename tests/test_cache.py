"""The build cache: content, checksums, many processes, folders that cannot be written."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuner import cache
from tuner.errors import RequestError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VOLTUNE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Maker:
    """Writes its content and counts how often it was asked to."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.calls = 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(self.content)


def test_the_folder_is_the_environments_or_the_users_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_dir() == folder
    monkeypatch.delenv("VOLTUNE_CACHE_DIR")
    monkeypatch.setenv("HOME", "/nowhere/someone")
    assert cache.cache_dir() == Path("/nowhere/someone/.cache/voltune")


def test_an_entry_is_made_once_and_found_again() -> None:
    make = Maker(b"cubin")
    first = cache.get_or_make("build", "ab12", ".cubin", make)
    assert cache.get_or_make("build", "ab12", ".cubin", make) == first
    assert (make.calls, first.read_bytes(), first.suffix) == (1, b"cubin", ".cubin")


@pytest.mark.parametrize("other", [("build", "ab13", ".cubin"), ("host", "ab12", ".cubin"), ("build", "ab12", ".ptx")])
def test_kind_digest_and_suffix_each_name_another_entry(other: tuple[str, str, str]) -> None:
    cache.get_or_make("build", "ab12", ".cubin", Maker(b"one"))
    assert cache.get_or_make(*other, Maker(b"two")).read_bytes() == b"two"
    assert cache.get_or_make("build", "ab12", ".cubin", Maker(b"three")).read_bytes() == b"one"


@pytest.mark.parametrize(
    "damage", [b"", b"cub", b"cubiN", b"cubin\0"], ids=["emptied", "truncated", "flipped", "longer"]
)
def test_a_damaged_entry_is_made_again(damage: bytes) -> None:
    cache.get_or_make("build", "ab12", ".cubin", Maker(b"cubin")).write_bytes(damage)
    make = Maker(b"cubin")
    again = cache.get_or_make("build", "ab12", ".cubin", make)
    assert (make.calls, again.read_bytes()) == (1, b"cubin")


def test_an_empty_content_is_an_entry_like_any_other() -> None:
    make = Maker(b"")
    cache.get_or_make("build", "ab12", ".log", make)
    cache.get_or_make("build", "ab12", ".log", make)
    assert make.calls == 1


def test_a_maker_that_fails_leaves_nothing_behind(folder: Path) -> None:
    def make(path: Path) -> None:
        path.write_bytes(b"half")
        raise ValueError("the compiler said no")

    with pytest.raises(ValueError, match="the compiler said no"):
        cache.get_or_make("build", "ab12", ".cubin", make)
    assert list((folder / "build").iterdir()) == []


def test_a_made_entry_leaves_no_temporary_file(folder: Path) -> None:
    entry = cache.get_or_make("build", "ab12", ".cubin", Maker(b"cubin"))
    assert list((folder / "build").iterdir()) == [entry]


def test_processes_that_make_different_bytes_for_one_entry_all_succeed(folder: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from tuner import cache\n"
        "def make(path):\n"
        "    time.sleep(0.2)\n"
        "    path.write_bytes(b'%d' % os.getpid())\n"
        "print(cache.get_or_make('build', 'ab12', '.cubin', make).read_bytes().decode())\n"
    )
    root = Path(__file__).parents[1]
    running = [
        subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    said = [process.communicate(timeout=60)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0] * 4
    make = Maker(b"never")
    assert cache.get_or_make("build", "ab12", ".cubin", make).read_bytes().decode() in said
    assert make.calls == 0


def killed_while_making() -> Path:
    """What a process that was killed in the middle of a build left."""
    program = (
        "import time\n"
        "from tuner import cache\n"
        "def make(path):\n"
        "    path.write_bytes(b'half')\n"
        "    print(path, flush=True)\n"
        "    time.sleep(60)\n"
        "cache.get_or_make('build', 'cd34', '.cubin', make)\n"
    )
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        process.kill()
    assert left.read_bytes() == b"half"
    return left


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_what_a_killed_process_left_half_made_is_removed_by_the_next_build_after_an_hour() -> None:
    left = killed_while_making()
    nameless = left.with_name(".making-k3x_9ab2.cubin")  # as names were before they told the process
    nameless.write_bytes(b"half")
    for path in (left, nameless):
        age(path, 3700)
    entry = cache.get_or_make("build", "ab12", ".cubin", Maker(b"cubin"))
    assert list(entry.parent.iterdir()) == [entry]


def test_what_is_young_or_of_a_living_process_is_left_alone() -> None:
    young = killed_while_making()  # for all we see: it may live in another container that shares the folder
    age(young, 3500)

    def make(path: Path) -> None:
        age(path, 90000)  # stopped for a day
        program = (
            "from tuner import cache\ncache.get_or_make('build', 'ef56', '.cubin', lambda path: path.write_bytes(b''))"
        )
        subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], check=True)
        path.write_bytes(b"cubin")

    assert cache.get_or_make("build", "ab12", ".cubin", make).read_bytes() == b"cubin"
    assert young.exists()


def test_processes_that_remove_the_same_leftovers_at_once_all_succeed(folder: Path) -> None:
    (folder / "build").mkdir(parents=True)
    for i in range(2000):
        (folder / "build" / f".making-old{i:05}.cubin").touch()
        age(folder / "build" / f".making-old{i:05}.cubin", 7200)
    program = (
        "import sys, time\nfrom tuner import cache\ntime.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "cache.get_or_make('build', sys.argv[1], '.cubin', lambda path: path.write_bytes(b''))"
    )
    root, start = Path(__file__).parents[1], str(time.time() + 0.5)
    running = [subprocess.Popen([sys.executable, "-c", program, f"a{i}", start], cwd=root) for i in range(3)]
    assert [process.wait(60) for process in running] == [0] * 3
    assert sorted(path.name[:3] for path in (folder / "build").iterdir()) == ["a0.", "a1.", "a2."]


def test_a_folder_that_cannot_be_written_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("VOLTUNE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(RequestError, match=r"file.*VOLTUNE_CACHE_DIR"):
        cache.get_or_make("build", "ab12", ".cubin", Maker(b"cubin"))
