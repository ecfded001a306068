"""A content-addressed cache of built files, safe with many processes.

An entry is one file, `<kind>/<digest>.<check><suffix>`, where `check` is the start of the SHA-256 of its own bytes:
one atomic rename publishes bytes and checksum together, and an entry that was truncated or changed on disk no longer
fits its name and is built again.
"""

import contextlib
import functools
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tuner.errors import RequestError

_CHECK_DIGITS = 32
_STALE_S = 3600.0


def cache_dir() -> Path:
    """The cache's folder: `VOLTUNE_CACHE_DIR`, or `~/.cache/voltune`. It need not exist yet."""
    named = os.environ.get("VOLTUNE_CACHE_DIR")
    return Path(named).expanduser() if named else Path("~/.cache/voltune").expanduser()


def get_or_make(kind: str, digest: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The path of the file that belongs to (kind, digest, suffix), built by `make` if no sound one is there.

    `make` gets the path of an empty file in the cache and writes the content there; whatever it raises passes through
    and leaves nothing behind; what a killed process leaves, a later one removes. `digest` must name everything the
    content depends on. Several processes may make the same entry at once: each ends with a sound file. The file must
    not be changed; it may be mapped or dlopened, since a published file is never written again, only replaced.

    Raises RequestError when the cache's folder cannot be written or read.
    """
    folder = cache_dir() / kind
    try:
        found = _sound(folder, digest, suffix)
        if found is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        handle, name = tempfile.mkstemp(prefix=f".making-{os.getpid()}-", suffix=suffix, dir=folder)
        os.close(handle)
    except OSError as error:
        raise RequestError(
            f"the cache folder {folder} cannot be used ({error.strerror or error}): "
            "set VOLTUNE_CACHE_DIR to a folder that can be written"
        ) from error
    making = Path(name)
    try:
        make(making)
        entry = folder / f"{digest}.{_check(making)}{suffix}"
        making.replace(entry)
    finally:
        making.unlink(missing_ok=True)
    return entry


def _sound(folder: Path, digest: str, suffix: str) -> Path | None:
    """The first entry whose bytes fit its name; those that do not are removed."""
    for entry in sorted(folder.glob(f"{digest}.{'?' * _CHECK_DIGITS}{suffix}")):
        try:
            if entry.name == f"{digest}.{_check(entry)}{suffix}":
                return entry
        except FileNotFoundError:  # another process found it broken too, and removed it first
            continue
        entry.unlink(missing_ok=True)
    return None


@functools.cache  # once a process: a folder may hold thousands of entries
def _sweep(folder: Path) -> None:
    """Removes what killed processes left half made: untouched for an hour, and of no process that is seen here.

    The hour is for processes that are not: those of another machine or container that shares the folder.
    """
    for left in folder.glob(".making-*"):
        named = re.match(r"\.making-(\d+)-", left.name)
        with contextlib.suppress(OSError):  # another process removed or published it first, or it is another user's
            if time.time() - left.stat().st_mtime > _STALE_S and not (named and _lives(int(named[1]))):
                left.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _check(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_CHECK_DIGITS]
