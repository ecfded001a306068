"""Writes what a plan's kernels did as traces for Accel-Sim, and reads such traces back.

A text file a launch, as its NVBit tracer of version 4 writes them, gzipped, and `kernelslist.g`, which names them in
launch order without the `.gz` (the simulator reads them unpacked): a head of `-name = value` lines; for each CTA its
place, and for each of its warps how many instructions it executed and a line for each,

    PC mask dests [R..] opcode sources [R..] width [0 addresses.. | 1 base stride | 2 base steps..] immediate

with PC and mask in hexadecimal, and of each operand its first register. Width is what a lane accesses, in bytes, 0
where none accesses memory; base and stride where the lanes that do are neighbours evenly apart, else the steps from
one lane's address to the next's, or where those do not fit 32 bits the addresses. The immediate is always 0: no timing
hangs on it. Operands lie one after another, so that a step always gives the same trace; shared addresses count from
the block's own begin.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from tuner import machine
from tuner.build import Image
from tuner.errors import LaunchFailed, RequestError
from tuner.machine import Executed, Sink
from tuner.memory import Operands
from tuner.microcode import Micro
from tuner.plan import Launch, Outputs, Plan

LIST = "kernelslist.g"
SHARED_BASE, LOCAL_BASE = 0x00007F0000000000, 0x00007F1000000000
MOST_BYTES = 48  # of a line, on average, before it is packed
_LEVEL = 1  # of gzip: three times as fast as its default, a tenth larger


@dataclass(frozen=True, eq=False)
class Traced:
    """What was written: the folder, each launch as executed, and bytes and sha256 of its text before packing."""

    folder: Path
    launches: tuple[Executed, ...]
    sizes: tuple[int, ...]
    digests: tuple[str, ...]
    outputs: Outputs


def write(
    plan: Plan, images: Mapping[str, Image], operands: Operands, tokens: int, folder: Path, timeout_s: float = 600.0
) -> Traced:
    """Executes the plan and writes its trace to `folder`, which is made, or must be empty.

    The folder appears whole or not at all. Raises RequestError for a folder that holds something, and what
    machine.execute raises.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} holds something already: name a new folder for the trace")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as making:
        done: list[Executed] = []
        files: list[_File] = []

        def sink(launch: Launch, image: Image, code: tuple[Micro, ...], grid: tuple[int, int], shared: int) -> Sink:
            files.append(_File(Path(making) / f"{file_name(len(files))}.gz"))
            files[-1].write(_head(len(files), launch, image, grid, shared).encode())
            return Sink(tuple(_pieces(each) for each in code), files[-1].write)

        try:
            outputs = machine.execute(plan, images, operands, tokens, timeout_s=timeout_s, counted=done, trace=sink)
        finally:
            for file in files:
                file.close()
        names = "".join(f"{file_name(i)}\n" for i in range(len(files)))
        (Path(making) / LIST).write_text(names, encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for path in sorted(Path(making).iterdir()):
            os.replace(path, folder / path.name)
    sizes, digests = tuple(file.size for file in files), tuple(file.digest.hexdigest() for file in files)
    return Traced(folder, tuple(done), sizes, digests, outputs)


def file_name(launch: int) -> str:
    """The name that the list gives to the launch with this number, from 0."""
    return f"kernel-{launch + 1}.traceg"


class _File:
    """A gzip file that counts what goes in. No time stands in its head: the same trace gives the same file."""

    def __init__(self, path: Path) -> None:
        self._raw: IO[bytes] = path.open("wb")
        self._packed = gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=self._raw, mtime=0)
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.size += len(data)
        self.digest.update(data)
        self._packed.write(data)

    def close(self) -> None:
        self._packed.close()
        self._raw.close()


def _head(number: int, launch: Launch, image: Image, grid: tuple[int, int], shared: int) -> str:
    values = {
        "kernel name": launch.kernel,
        "kernel id": number,
        "grid dim": f"({grid[0]},{grid[1]},1)",
        "block dim": f"({launch.block},1,1)",
        "shmem": shared,
        "nregs": image.registers,
        "binary version": 70,
        "cuda stream id": 0,
        "shmem base_addr": f"{SHARED_BASE:#018x}",
        "local mem base_addr": f"{LOCAL_BASE:#018x}",
        "nvbit version": "1.5.5",
        "accelsim tracer version": 4,
    }
    fields = "[line_num] PC mask dest_num [reg_dests] opcode src_num [reg_srcs] mem_width [adrrescompress?] "
    lines = "".join(f"-{name} = {value}\n" for name, value in values.items())
    return f"{lines}\n#traces format = {fields}[mem_addresses] immediate\n\n"


def _pieces(each: Micro) -> tuple[str, str]:
    """What stands before and after an instruction's mask, up to the width."""
    written, read = each.instruction.written[:1], each.instruction.sources
    told = [str(len(written)), *(f"R{r}" for r in written), each.mnemonic, str(len(read)), *(f"R{r}" for r in read)]
    return f"{each.instruction.pc:04x} ", " " + " ".join(told)


# ---- reading back --------------------------------------------------------------------------------------------------
_LINE = re.compile(
    r"(?P<pc>[0-9a-f]{4,}) (?P<mask>[0-9a-f]{8}) (?P<dests>\d+)(?P<written>(?: R\d+)*) (?P<opcode>[A-Z][\w.]*) "
    r"(?P<sources>\d+)(?P<read>(?: R\d+)*) (?P<width>\d+)"
    r"(?: (?P<form>[012]) (?P<base>0x[0-9a-f]+)(?P<rest>(?: [-0-9a-fx]+)*?))? 0"
)


def check(traced: Traced) -> None:
    """Reads the files back and holds them to what was executed, instruction by instruction.

    For every instruction of a kernel the lines must be as many as were issued, their masks must have as many lanes, and
    the requests, bytes and addresses must be the same; opcodes and registers must be the code's own. And the whole text
    must be what was written, heads and order too. Raises LaunchFailed for a file that says anything else, or that is no
    trace.
    """
    try:
        names = (traced.folder / LIST).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchFailed(f"{traced.folder / LIST} cannot be read: {error}") from None
    if names != [file_name(i) for i in range(len(traced.launches))]:
        raise LaunchFailed(f"{traced.folder / LIST} names {names}: expected {len(traced.launches)} launches in order")
    for name, done, digest in zip(names, traced.launches, traced.digests, strict=True):
        path = traced.folder / f"{name}.gz"
        text = hashlib.sha256()
        found = _read(path, done, text)
        for field in ("issued", "lanes", "requests", "bytes", "addresses"):
            wrong = np.flatnonzero(found[field] != done.tallies[field])
            if len(wrong):
                pc, there, told = 16 * int(wrong[0]), found[field][wrong[0]], done.tallies[field][wrong[0]]
                raise LaunchFailed(f"{path}: {field} of pc {pc:#06x} come to {there} in the trace, executed to {told}")
        if text.hexdigest() != digest:
            raise LaunchFailed(f"{path}: its heads or the order of its lines are not those that were written")


def _read(path: Path, done: Executed, text: hashlib._Hash) -> np.ndarray:
    """TALLY of each instruction, from the file's text, which goes into `text` as well."""
    found = np.zeros(len(done.code), machine.TALLY)
    pieces = [_pieces(each) for each in done.code]
    seen: dict[str, int] = {}  # different lines, each looked at once
    blocks: list[str] = []
    left = 0
    number = 0
    for number, line in enumerate(_lines(path, text), 1):
        if left:
            left -= 1
            if line in seen:
                seen[line] += 1
                continue
            seen[line] = 1
            if len(seen) > 1 << 18:
                _add(path, number, seen, pieces, done, found)
                seen = {}
        elif line.startswith("insts = "):
            if not line[8:].isdecimal():
                raise LaunchFailed(f"{path}, line {number}: {line[:80]!r} counts nothing")
            left = int(line[8:])
        elif line.startswith("thread block = "):
            blocks.append(line[15:])
    _add(path, number, seen, pieces, done, found)
    expected = [f"{x},{y},0" for y in range(done.grid[1]) for x in range(done.grid[0])]
    if blocks != expected or left:
        raise LaunchFailed(f"{path}: its blocks are not the {len(expected)} of the grid in order, or it is cut off")
    return found


def _lines(path: Path, text: hashlib._Hash) -> Iterator[str]:
    try:
        with gzip.open(path, "rb") as file:
            for line in file:
                text.update(line)
                yield line.decode("ascii").rstrip("\n")
    except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        raise LaunchFailed(f"{path} is no whole trace: {error}") from None


def _add(
    path: Path,
    number: int,
    seen: Mapping[str, int],
    pieces: list[tuple[str, str]],
    done: Executed,
    found: np.ndarray,
) -> None:
    """Counts each different line as often as it stood there."""
    for line, times in seen.items():
        match = _LINE.fullmatch(line)
        index = int(match["pc"], 16) // 16 if match else len(pieces)
        if match is None or index >= len(pieces):
            raise LaunchFailed(f"{path}, near line {number}: {line[:80]!r} is no instruction of the kernel")
        before, after = pieces[index]
        if not line.startswith(f"{before}{match['mask']}{after} "):
            raise LaunchFailed(f"{path}, near line {number}: {line[:80]!r}: expected {before}<mask>{after}")
        mask, width, tally = int(match["mask"], 16), int(match["width"]), found[index]
        lanes = [lane for lane in range(32) if mask >> lane & 1]
        tally["issued"] += times
        tally["lanes"] += times * len(lanes)
        if not width:
            continue
        if width != done.code[index].fields["bytes"]:
            raise LaunchFailed(f"{path}, near line {number}: {line[:80]!r}: the code's access has another width")
        addresses = _addresses(match["form"], int(match["base"], 16), match["rest"].split(), len(lanes))
        if len(addresses) != len(lanes):
            raise LaunchFailed(f"{path}, near line {number}: {len(addresses)} addresses of {len(lanes)} lanes")
        total = sum(address * (2 * lane + 1) for lane, address in zip(lanes, addresses, strict=True))
        tally["addresses"] = (int(tally["addresses"]) + times * total) & (1 << 64) - 1
        if done.code[index].instruction.opcode not in ("LDL", "STL"):
            tally["requests"] += times
            tally["bytes"] += times * width * len(lanes)


def _addresses(form: str, base: int, rest: list[str], lanes: int) -> list[int]:
    if form == "0":
        return [base, *(int(place, 16) for place in rest)]
    if form == "1":
        return [base + n * int(rest[0]) for n in range(lanes)]
    return [base + total for total in itertools.accumulate(map(int, rest), initial=0)]
