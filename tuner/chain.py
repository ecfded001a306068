"""A file of records, one JSON object a line, each of which names the one before by its digest.

A line is {"n": its number from 0, "before": the digest of the line before or "", "kind": text, ..., "digest": sha256 of
the line without it}. A line is on the disk before the next is begun, and the last is of the kind "end". So a line that
was changed, taken out, put elsewhere or put in shows; what stops early shows too. There is no key in it: who makes a
whole new chain makes a sound one, so that a chain says that a file is whole, and not whose it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tuner.errors import RequestError

END = "end"
LONGEST = 4 << 20  # bytes of a line
MOST = 256 << 20  # bytes of a file
_OWN = ("n", "before", "kind", "digest")


class Writer:
    """A new file at `path`. Raises RequestError where there is one."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("xb")
        except FileExistsError as error:
            raise RequestError(f"{path} is there already: give another file") from error
        self._count, self._before = 0, ""

    def write(self, kind: str, **content: Any) -> None:
        """One record, which is on the disk when this returns."""
        line = {"n": self._count, "before": self._before, "kind": kind, **content}
        self._before = digest(line)
        self._file.write(_text(line | {"digest": self._before}) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._count += 1

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


@dataclass(frozen=True)
class Chain:
    """A file's records, (kind, content) each. whole: it comes to its end, and does not break off."""

    records: tuple[tuple[str, Mapping[str, Any]], ...]
    whole: bool


def read(path: Path) -> Chain:
    """The records of a file, which may be anyone's; what a line without its end was to be is left out.

    Raises RequestError for a line that is none, or that is not the next of its chain.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST + 1)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MOST:
        raise RequestError(f"{path} is longer than {MOST >> 20} MB: it is no probe's file")
    *lines, broken = data.split(b"\n")
    records: list[tuple[str, Mapping[str, Any]]] = []
    before = ""
    for n, line in enumerate(lines):
        content, given, own = _line(path, n, line)
        if content.get("n") != n or type(content["n"]) is not int or content.get("before") != before:
            raise RequestError(f"{path}, line {n + 1}: not the next line of its file: lines were moved or taken out")
        if given != own:
            raise RequestError(f"{path}, line {n + 1}: its digest differs: it was changed after it was written")
        if records and records[-1][0] == END:
            raise RequestError(f"{path}, line {n + 1}: it stands after the file's end")
        kind = content["kind"] if isinstance(content.get("kind"), str) else ""
        records.append((kind, {name: value for name, value in content.items() if name not in _OWN}))
        before = own
    return Chain(tuple(records), bool(records) and records[-1][0] == END and not broken)


def _line(path: Path, n: int, line: bytes) -> tuple[dict[str, Any], object, str]:
    """A line's content, the digest that stands in it, and the one it has."""
    try:
        if len(line) > LONGEST:
            raise ValueError(f"longer than {LONGEST >> 20} MB")
        content = json.loads(line, parse_constant=_no_number, object_pairs_hook=_once)
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        given = content.pop("digest", None)
        return content, given, digest(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}, line {n + 1}: not a record ({error})") from None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def digest(content: Mapping[str, Any]) -> str:
    """64 hex digits of a record's content."""
    return hashlib.sha256(_text(content)).hexdigest()


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()
