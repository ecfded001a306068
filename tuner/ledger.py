"""The append-only record of a tuning run: one JSON object a line, on disk before the next trial starts.

The ledger is the truth of a search. Its first line says what it is for (contract digest, target) and carries a random
id; every other row carries the digest of what its result depends on (space, toolchain, evaluator ...), so that rows
made under other circumstances are kept and never used as answers. Each line ends with a checksum of itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tuner.errors import RequestError, VoltuneError

VERSION = 1
_CHECK = "check"

Row = dict[str, Any]


class LedgerFull(VoltuneError):
    """A row could not be written, for want of space or rights; nothing of it stays in the file."""


class Ledger:
    """An open ledger, held by this process alone. Make one with `Ledger.open`, close it or use it in a `with`."""

    def __init__(
        self, path: Path, descriptor: int, rows: list[Row], circumstances: Mapping[str, str], notes: tuple[str, ...]
    ) -> None:
        self.path = path
        self.notes = notes
        self.circumstances = dict(circumstances)
        self.fingerprint = digest(circumstances)
        self._descriptor = descriptor
        self._rows = rows

    @classmethod
    def open(cls, path: Path, *, contract: str, target: str, circumstances: Mapping[str, str]) -> Ledger:
        """The ledger at `path` for the contract of that digest and that target, made where there is none.

        `circumstances` names what results depend on, value by value. A torn last line, which a killed process leaves,
        is moved to `<path>.torn` and said in `notes`. Raises RequestError: not to be opened, held by another process,
        made for something else, of another version, or damaged before its last line.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RequestError(
                f"the ledger {path} cannot be opened ({error.strerror}): it must be a file in a folder that can be "
                "written; give another --output, or move away what is in its place"
            ) from error
        try:
            _lock(descriptor, path)
            rows, notes = _recover(descriptor, path)
            ledger = cls(path, descriptor, rows, circumstances, notes)
            if not rows:
                ledger._write(
                    {
                        "kind": "header",
                        "version": VERSION,
                        "ledger": str(uuid.uuid4()),
                        "contract": contract,
                        "target": target,
                    }
                )
                _sync_folder(path.parent)
            ledger._check_header(contract, target)
            if not any(row["kind"] == "circumstances" for row in ledger.rows()):
                ledger.append("circumstances", **ledger.circumstances)
        except BaseException:
            os.close(descriptor)
            raise
        return ledger

    @property
    def id(self) -> str:
        """The random id this ledger was born with; winners carry it."""
        return str(self._rows[0]["ledger"])

    def rows(self, kind: str | None = None) -> Iterator[Row]:
        """Rows made under the present circumstances, oldest first."""
        for row in self._rows:
            if row.get("fingerprint") == self.fingerprint and kind in (None, row["kind"]):
                yield row

    def append(self, kind: str, **values: Any) -> Row:
        """Write a row and return it once it is on disk. Raises LedgerFull."""
        return self._write({"kind": kind, "fingerprint": self.fingerprint, **values})

    def close(self) -> None:
        """Let the file and its lock go; closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, row: Row) -> Row:
        line = _encode(row)
        end = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            if written == len(line):
                os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise LedgerFull(
                f"{self.path}: cannot write a row: {error.strerror}; make room and run the same command again"
            ) from error
        if written != len(line):
            os.ftruncate(self._descriptor, end)
            raise LedgerFull(
                f"{self.path}: only {written} of a row's {len(line)} bytes could be written; "
                "make room and run the same command again"
            )
        # What a resumed run would read, so that both runs see the same values (tuples become lists and so on).
        stored = _decode(line)
        assert stored is not None
        self._rows.append(stored)
        return stored

    def _check_header(self, contract: str, target: str) -> None:
        header = self._rows[0]
        if header.get("kind") != "header":
            raise RequestError(
                f"{self.path}: line 1 is not a ledger's header; give another --output, or move the file away"
            )
        expected = {"version": VERSION, "contract": contract, "target": target}
        for key, value in expected.items():
            if header.get(key) != value:
                rename = "give the contract another name, " if key == "contract" else ""
                raise RequestError(
                    f"{self.path}: made for {key} {header.get(key)!r}, not {value!r}; "
                    f"give another --output, {rename}or move the file away"
                )


def digest(values: Mapping[str, str]) -> str:
    """16 hex digits of a mapping, whatever its order."""
    return hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:16]


def _encode(row: Row) -> bytes:
    text = json.dumps(row, sort_keys=True, allow_nan=False, separators=(",", ":"))
    check = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f'{text[:-1]},"{_CHECK}":"{check}"}}\n'.encode()


def _decode(line: bytes) -> Row | None:
    """The row of a whole line, or None for one that is torn or altered."""
    tail = len(f',"{_CHECK}":"01234567"}}')
    text = line.rstrip(b"\n")
    body = text[:-tail] + b"}"
    if text[-tail:] != f',"{_CHECK}":"{hashlib.sha256(body).hexdigest()[:8]}"}}'.encode():
        return None
    row: Row = json.loads(body)
    return row


def _lock(descriptor: int, path: Path) -> None:
    try:
        # The kernel lets go when the process ends in whatever way, so that a killed run leaves nothing to clean up.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(
            f"{path}: another process is tuning with this ledger; wait for it, stop it, or give another --output"
        ) from None


def _recover(descriptor: int, path: Path) -> tuple[list[Row], tuple[str, ...]]:
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        row = _decode(line)
        if row is not None:
            rows.append(row)
            continue
        if number < len(lines):
            what, remedy = "", "delete that line to measure its trial again"
            if number == 1:
                what, remedy = ", its header,", "move the file away to measure every trial again"
            raise RequestError(
                f"{path}: line {number} of {len(lines)}{what} is damaged (its checksum does not fit): "
                f"restore the file from a copy, or {remedy}"
            )
        torn = path.with_name(path.name + ".torn")
        with torn.open("ab") as aside:
            aside.write(line.rstrip(b"\n") + b"\n")
        os.ftruncate(descriptor, len(content) - len(line))
        return rows, (f"{path}: the last line was torn; it is in {torn.name} now and its trial runs again",)
    if content and not content.endswith(b"\n"):
        os.write(descriptor, b"\n")  # whole but for its end: the process died between two bytes
    return rows, ()


def _sync_folder(folder: Path) -> None:
    """Make a new file's name itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
