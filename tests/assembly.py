"""Machine code made for a test: instructions from the decoder's own fields, in a cubin that holds nothing else."""

import struct
from collections.abc import Sequence

import numpy as np

from tuner import machine, microcode
from tuner.build import Image
from tuner.contract import Contract, load
from tuner.plan import Buffer, Launch, Linear, Outputs, Plan
from tuner.space import default

CONTRACT: Contract = load("qwen38-tp4")
RZ, PT = 255, 7
PLACES = {"d": 16, "a": 24, "b": 32, "c": 64, "imm": 32, "offset": 40}
PARAMETER = 0x160 // 4


def instruction(opcode: int, *, guard: int = PT, **fields: int) -> int:
    """128 bits of an instruction with these 12 opcode bits. Fields: of PLACES, or of the decoder's row; others are 0.

    Predicates read or written that are not named are PT, those that would add a carry !PT.
    """
    row = microcode._rows()[opcode & 0x1FF]
    bits = opcode | guard << 12
    carries = row.name in ("IADD3", "IMAD", "IMAD_WIDE", "LEA", "LOP3")
    for field in row.fields:
        name = field.name
        if field.only is not None:
            value = field.only
        elif name in microcode._PREDICATES and name not in fields:
            value = PT + 8 if carries and name in ("ps", "ps2") else PT
        elif name not in fields and field.suffixes is not None:
            value = next(n for n, suffix in enumerate(field.suffixes) if suffix != "?")
            if name == "cache":
                value = 1
        else:
            value = fields.pop(name, 0)
        fields.pop(name, None)
        bits |= value << field.bit
    for name, value in fields.items():
        width = {"imm": 32, "offset": 24}.get(name, 8)
        bits |= (value & (1 << width) - 1) << PLACES[name]
    return bits


def image(code: Sequence[int], registers: int = 64, local_bytes: int = 0, parameters: int = 16) -> Image:
    """An Image whose kernel is this code, padded with branches to themselves as ptxas does."""
    text = b"".join(bits.to_bytes(16, "little") for bits in code)
    names = b"\0.shstrtab\0.text.k\0.nv.constant0.k\0"
    bodies = [names, text, bytes(0x160 + parameters)]
    starts, at = [], 64
    for body in bodies:
        starts.append(at)
        at += len(body)
    labels = [names.index(name) for name in (b".shstrtab", b".text.k", b".nv.constant0.k")]
    headers = [bytes(64)]
    for label, start, body in zip(labels, starts, bodies, strict=True):
        headers.append(struct.pack("<IIQQQQIIQQ", label, 1, 0, 0, start, len(body), 0, 0, 1, 0))
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01", 2, 190, 1, 0, 0, at, 0, 64, 0, 0, 64, len(headers), 1)
    cubin = head + b"".join(bodies) + b"".join(headers)
    return Image("k", "sm_70", cubin, b"", registers, 0, local_bytes, 0, (), "a test", "")


def plan_of(threads: int, words_in: int, words_out: int, shared: int = 0, ctas: int = 1) -> Plan:
    """One kernel k(const uint32 in[], uint32 out[])."""
    launch = Launch(
        stage="k",
        template="k",
        grid=(Linear(ctas), Linear(1)),
        block=threads,
        shared=Linear(shared),
        arguments=("IN", "SLOTS"),
        constants={},
    )
    buffers = (
        Buffer("IN", "uint32", (Linear(words_in),), "input"),
        Buffer("SLOTS", "uint32", (Linear(words_out),), "workspace"),
    )
    return Plan("fused", CONTRACT, default(CONTRACT), (launch,), buffers)


def run(
    code: Sequence[int],
    given: np.ndarray,
    words_out: int,
    *,
    threads: int = 32,
    shared: int = 0,
    ctas: int = 1,
    local_bytes: int = 0,
    order: int = 0,
    timeout_s: float = 20.0,
) -> np.ndarray:
    """u32 [words_out]: what the code left there. given: u32 [n]."""
    made = plan_of(threads, len(given), words_out, shared, ctas)
    outputs: Outputs = machine.execute(
        made,
        {"k": image(code, local_bytes=local_bytes)},
        {"IN": given.astype(np.uint32)},
        1,
        order=order,
        timeout_s=timeout_s,
    )
    return outputs.buffers["SLOTS"]


# ---- pieces of a program --------------------------------------------------------------------------------------------
def const(opcode: int, word: int, **fields: int) -> int:
    return instruction(opcode, **fields) | word << 40


THREAD = 0x21
EXIT = instruction(0x94D)


def prologue() -> list[int]:
    """R0 the thread; R2:R3 IN and R4:R5 SLOTS, each + 4 * thread."""
    return [
        instruction(0x919, d=0, kind=THREAD),
        const(0xA02, PARAMETER, d=2),
        const(0xA02, PARAMETER + 1, d=3),
        const(0xA02, PARAMETER + 2, d=4),
        const(0xA02, PARAMETER + 3, d=5),
        instruction(0x825, d=2, a=0, imm=4, c=2, sign=1),
        instruction(0x825, d=4, a=0, imm=4, c=4, sign=1),
    ]


def load_words(register: int, row: int, threads: int = 32) -> int:
    """IN[row * threads + thread] into a register."""
    return instruction(0x381, d=register, a=2, offset=4 * row * threads, type=4, order=1, scope=3)


def store_words(register: int, row: int, threads: int = 32, **fields: int) -> int:
    given = {"type": 4, "order": 1, "scope": 3} | fields
    return instruction(0x386, b=register, a=4, offset=4 * row * threads, **given)


def lanes(code: Sequence[int], *inputs: np.ndarray, results: int = 1, order: int = 0) -> list[np.ndarray]:
    """Runs `code` once a lane on R8, R9, ..: the inputs, u32 [n] each, n a multiple of 32. Results from R16 on.

    Every input is one register, so that a case a lane is tried.
    """
    count = len(inputs[0])
    out = [np.empty(count, np.uint32) for _ in range(results)]
    for begin in range(0, count, 1024):
        part = [np.ascontiguousarray(each[begin : begin + 1024]) for each in inputs]
        threads = len(part[0])
        program = [
            *prologue(),
            *(load_words(8 + i, i, threads) for i in range(len(part))),
            *code,
            *(store_words(16 + i, i, threads) for i in range(results)),
            EXIT,
        ]
        found = run(program, np.concatenate(part), results * threads, threads=threads, order=order)
        for i in range(results):
            out[i][begin : begin + threads] = found[i * threads : (i + 1) * threads]
    return out


def predicate_to_register(predicate: int, register: int) -> int:
    """SEL: 1 where it is true, else 0."""
    return instruction(0x807, d=register, a=RZ, imm=1, ps=predicate ^ 8)
