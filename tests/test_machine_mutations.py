"""One instruction of a right kernel is made wrong, and the machine must show it: a fault, a time-out, or other bits.

Which instruction is not written down, since kernels change: of those of a kind, the one that was executed most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
import small
from assembly import instruction
from small import SMALL, TENSOR

from tuner import build, cases, machine, microcode, plan, render, sass, space, verify
from tuner.build import Image
from tuner.errors import LaunchFailed, MissingTool, TrialTimeout, UnknownInstruction
from tuner.machine import Executed
from tuner.microcode import Micro

pytestmark = pytest.mark.lab

NOP = instruction(0x918)
TOKENS = 12  # more slots than a warp has lanes
ORDERS = (0, 1, 2, 3)
TIMEOUT_S = 5.0
ALWAYS = sass.ALWAYS
MEET_OR_JUMP = ("BAR", "SHFL", "VOTE", "MATCH", "BRA", "CALL", "RET", "EXIT", "BSYNC", "WARPSYNC", "HMMA")


@dataclass(frozen=True)
class Subject:
    """A kernel, what it does, and calls with their right outputs."""

    made: plan.Plan
    image: Image
    done: Executed
    calls: tuple[tuple[verify.Operands, int, bytes], ...]  # operands, tokens, output


@lru_cache(maxsize=2)
def subject(family: str) -> Subject:
    config = space.default(SMALL) if family == "simt" else TENSOR
    made = plan.make(SMALL, config)
    (source,) = render.render(made).values()
    try:
        image = build.build(source)
    except MissingTool as error:
        pytest.skip(str(error))
    counted: list[Executed] = []
    calls = []
    given = [cases.make_case(SMALL, TOKENS, routed, "gaussian", 3) for routed in ("uniform", "single-hot")]
    for case in (*given, *cases.edge_cases(SMALL, 2)):
        operands = verify.operands(made, small.weights(SMALL), case)
        right = machine.execute(made, {"op": image}, operands, case.tokens, counted=counted)
        calls.append((operands, case.tokens, right.out.tobytes()))
    return Subject(made, image, counted[0], tuple(calls))


def found_out(of: Subject, index: int, bits: int) -> str:
    """What shows that the instruction at this place has been replaced, or nothing."""
    text = sass.text(of.image)
    at = of.image.cubin.index(text) + index * sass.SIZE
    cubin = of.image.cubin[:at] + bits.to_bytes(sass.SIZE, "little") + of.image.cubin[at + sass.SIZE :]
    broken = replace(of.image, cubin=cubin)
    for operands, tokens, right in of.calls:
        for order in ORDERS:
            try:
                found = machine.execute(of.made, {"op": broken}, operands, tokens, order=order, timeout_s=TIMEOUT_S)
            except (LaunchFailed, TrialTimeout, UnknownInstruction) as error:
                return f"{type(error).__name__}: {error}"
            if found.out.tobytes() != right:
                return f"other bits in order {order}"
    return ""


Pick = Callable[[Micro], bool]
Change = Callable[[int], int]


def flip(*bits: int) -> Change:
    return lambda code: code ^ sum(1 << bit for bit in bits)


def add(bit: int, width: int, what: int) -> Change:
    """To a field, wrapping in it."""

    def change(code: int) -> int:
        mask = (1 << width) - 1
        value = (code >> bit & mask) + what & mask
        return code & ~(mask << bit) | value << bit

    return change


def named(start: str, form: int | None = None, guarded: bool | None = None) -> Pick:
    def pick(each: Micro) -> bool:
        bits = each.instruction.bits
        right_form = form is None or bits >> 9 & 7 == form
        return (
            each.mnemonic.startswith(start)
            and right_form
            and (guarded is None or (each.instruction.guard != ALWAYS) == guarded)
        )

    return pick


def writing(pick: Pick) -> Pick:
    """A register: a predicate alone may be of one lane of a warp, whose like does the same twice."""
    return lambda each: pick(each) and bool(each.instruction.written)


IMMEDIATE, REGISTER = 4, 1
MUTATIONS: dict[str, tuple[str, Pick, Change]] = {
    "an immediate factor of an address": ("simt", named("IMAD.WIDE", IMMEDIATE), add(32, 32, 1)),
    "an immediate compared with": ("simt", named("ISETP.NE", IMMEDIATE), add(32, 32, 1)),
    "an immediate mask": ("simt", writing(named("LOP3", IMMEDIATE)), flip(32)),
    "an immediate shift": ("simt", named("SHF.R", IMMEDIATE), add(32, 32, 1)),
    "an immediate factor": ("simt", named("FMUL", IMMEDIATE), flip(55)),
    "a shuffle's lane": ("simt", named("SHFL.BFLY", 7), flip(54)),
    "the address of a load of weights": ("simt", named("LDG.E.NA.128"), add(40, 24, 16)),
    "the address of a shared load": ("simt", named("LDS.U.128"), add(40, 24, 16)),
    "the address of a shared store": ("simt", named("STS"), add(40, 24, 4)),
    "a store's guard turned": ("simt", named("STG.E.SYS", guarded=True), flip(15)),
    "a branch's guard turned": ("simt", named("BRA", guarded=True), flip(15)),
    "a load's guard turned": ("simt", named("LDG.E.128.SYS", guarded=True), flip(15)),
    "a comparison turned": ("simt", named("ISETP.GE", REGISTER), flip(78)),
    "a choice turned": ("simt", named("SEL"), flip(90)),
    "a factor's register": ("simt", named("FFMA", REGISTER), add(32, 8, 1)),
    "an addend's register": ("simt", named("FADD", REGISTER), add(32, 8, 1)),
    "a stored register": ("simt", named("STG.E.STRONG"), add(32, 8, 2)),
    "the register that a load fills": ("simt", named("LDS.U.128"), add(16, 8, 4)),
    "a sum without its sign": ("simt", named("FFMA", REGISTER), flip(63)),
    "an atomic of another kind": ("simt", named("ATOMG.E.INC"), flip(88)),
    "a relaxed store made plain": ("simt", named("STG.E.STRONG"), add(79, 2, -1)),
    "a tensor core's step": ("tensor", named("HMMA.884.F32.F32.STEP1"), flip(79)),
    "a tensor core's operand": ("tensor", named("HMMA.884"), add(24, 8, 2)),
    "half of a pair": ("tensor", named("HADD2.F32"), flip(74)),
    "a permutation of bytes": ("tensor", named("PRMT", IMMEDIATE), flip(32)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_one_wrong_instruction_is_found_out(name: str) -> None:
    family, pick, change = MUTATIONS[name]
    of = subject(family)
    lanes = of.done.tallies["lanes"]
    places = [i for i, each in enumerate(of.done.code) if pick(each) and lanes[i]]
    assert places, "the kernel executes no such instruction"
    index = max(places, key=lambda i: (int(lanes[i]), -i))
    bits = of.done.code[index].instruction.bits
    assert found_out(of, index, change(bits)), f"{of.done.code[index].mnemonic} at pc {16 * index:#x}"


@pytest.mark.parametrize("family", space.FAMILIES)
def test_every_barrier_left_out_is_found_out(family: str) -> None:
    of = subject(family)
    issued = of.done.tallies["issued"]
    barriers = [i for i, each in enumerate(of.done.code) if each.mnemonic.startswith("BAR") and issued[i]]
    assert barriers
    assert [hex(16 * i) for i in barriers if not found_out(of, i, NOP)] == []


@pytest.mark.parametrize("family", space.FAMILIES)
def test_a_warpsync_left_out_is_found_out_or_had_nothing_to_do(family: str) -> None:
    """Whole warps came to it each time, or a barrier of the CTA stands next behind it."""
    of = subject(family)
    issued, lanes, code = of.done.tallies["issued"], of.done.tallies["lanes"], of.done.code
    for i, each in enumerate(code):
        if each.mnemonic == "WARPSYNC" and issued[i] and lanes[i] != 32 * issued[i]:
            following = next(later.mnemonic for later in code[i + 1 :] if later.mnemonic.startswith(MEET_OR_JUMP))
            assert following.startswith("BAR") or found_out(of, i, NOP), hex(16 * i)


def test_the_right_kernel_is_not_found_out() -> None:
    for family in space.FAMILIES:
        of = subject(family)
        assert found_out(of, 0, of.done.code[0].instruction.bits) == ""


def test_what_the_machine_does_not_know_is_refused_with_its_place() -> None:
    of = subject("simt")
    broken: Sequence[int] = (of.done.code[3].instruction.bits ^ 1 << 76, 0x2FF)
    for bits in broken:
        assert "pc 0x30" in found_out(of, 3, bits)
    assert microcode.decode(of.image) == of.done.code
    assert isinstance(of.done.tallies, np.ndarray)
