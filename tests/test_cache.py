"""The build cache: content, checksums, many processes, folders that cannot be written."""

import subprocess
import sys
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


def test_a_folder_that_cannot_be_written_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("VOLTUNE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(RequestError, match=r"file.*VOLTUNE_CACHE_DIR"):
        cache.get_or_make("build", "ab12", ".cubin", Maker(b"cubin"))
