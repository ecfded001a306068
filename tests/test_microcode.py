"""The full decoder against nvdisasm's print, and what it refuses rather than guess."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from assembly import instruction
from small import LAYOUTS, TENSOR
from test_sass import NVDISASM, disassembled, kept

from tuner import build, microcode, plan, render, sass, space
from tuner.errors import UnknownInstruction
from tuner.microcode import Micro

# 128 bits and what nvdisasm 12.8 prints of them: each opcode in each form, with each value of each modifier, and with
# the operands R16, R8, R12 and R20 and different predicates, as far as an opcode has them.
PRINTED = Path(__file__).parent / "sm70_mnemonics.txt"
DOCUMENT = Path(__file__).parent.parent / "docs" / "verification.md"
# nvdisasm's names for an IMAD with certain operands.
ALIAS = re.compile(r"^IMAD\.(MOV|SHL|IADD)")
REGISTERS = {"a": 8, "x": 12, "y": 20}


def lines() -> Iterator[tuple[int, str]]:
    for line in PRINTED.read_text(encoding="utf-8").splitlines():
        bits, text = line.split(" ", 1)
        yield int(bits, 16), text


def mnemonic(text: str) -> str:
    return ALIAS.sub("IMAD", re.sub(r"^@!?P\w+ ", "", text).split()[0])


def decode(bits: int) -> Micro:
    return microcode.micro(sass.decode(bits, 0x40), 64, "voltune_k")


def test_every_mnemonic_is_as_nvdisasm_printed_it() -> None:
    assert {text: decode(bits).mnemonic for bits, text in lines() if decode(bits).mnemonic != mnemonic(text)} == {}


def test_every_operation_and_every_suffix_has_been_printed() -> None:
    """What a prefetch has instead of an address is printed without one, and stands in sm70_nvdisasm.txt."""
    seen: dict[str, set[tuple[str, int]]] = {}
    for bits, _ in lines():
        row = microcode._rows()[bits & 0x1FF]
        seen.setdefault(row.name, set()).update((f.name, f.of(bits)) for f in row.fields)
    for row in microcode._rows().values():
        told = {(f.name, n) for f in row.fields if f.suffixes for n, s in enumerate(f.suffixes) if s != "?"}
        assert {each for each in told - seen.get(row.name, set()) if row.name != "CCTL"} == set(), row.name


def test_signs_and_magnitudes_are_the_printed_ones() -> None:
    for bits, text in lines():
        each = decode(bits)
        for source, number in (("a", 0), ("b", 1), ("c", 2)):
            register = each.fields.get(source, sass.ZERO)
            if register == sass.ZERO or each.mnemonic.startswith(("ST", "ATOM", "RED", "SHFL")):
                continue
            minus = re.search(rf"[-~]\|?R{register}\b", text) is not None
            size = f"|R{register}|" in text
            assert minus == bool(each.fields.get("signs", 0) >> number & 1), text
            assert size == bool(each.fields.get("magnitudes", 0) >> number & 1), text


def test_predicates_are_the_printed_ones() -> None:
    for bits, text in lines():
        each = decode(bits)
        names = [name for name in ("pd", "pd2", "ps", "ps2", "ps3") if each.fields.get(name, 7) not in (7, 15)]
        told = [f"P{each.fields[name]}" for name in names]
        printed = [p for p in re.findall(r"\bP\d\b", re.sub(r"^@!?P\w+ ", "", text))]
        assert printed == told or each.mnemonic.startswith("SHFL"), text


def test_every_instruction_of_the_machines_tests_is_decoded_or_refused_never_else() -> None:
    """Those that a compiler made all have a meaning, but for what only a probe used."""
    refused = set()
    for line in kept():
        try:
            each = microcode.micro(sass.decode(line.bits, line.pc), sass.ZERO)
        except UnknownInstruction as error:
            refused.add(line.text.split()[line.text.startswith("@")].split(".")[0])
            assert f"pc {line.pc:#x}" in str(error)
        else:
            assert each.mnemonic == mnemonic(line.text)
    assert {"ATOMG", "RED", "BAR", "B2R", "HMMA", "MUFU"} <= refused


def test_a_bit_whose_meaning_is_not_known_is_refused_with_opcode_modifiers_and_place() -> None:
    add = instruction(0x221, d=16, a=8, b=12, ftz=1)
    with pytest.raises(UnknownInstruction, match=r"voltune_k pc 0x40: FADD\.FTZ \(0x\w+\): bit 74 is set"):
        decode(add | 1 << 74)
    with pytest.raises(
        UnknownInstruction, match=r"pc 0x40: FMUL \(0x\w+\): bits from 84 on are 5, and only 4 is known"
    ):
        decode(instruction(0x220, d=16, a=8, b=12) | 1 << 84)
    with pytest.raises(UnknownInstruction, match=r"pc 0x40: BAR \(0x\w+\): bits from 77 on are 2, which is not known"):
        decode(instruction(0xB1D) | 2 << 77)
    with pytest.raises(UnknownInstruction, match="it names R64, but a thread has 64 registers"):
        decode(instruction(0x221, d=64, a=8, b=12))


def test_every_bit_of_an_instruction_is_read_or_must_be_zero() -> None:
    """Turned, a bit changes what the machine is given, or is refused; bits from 105 on only schedule."""
    ignored = {
        "CCTL": set(range(24, 81)) | set(range(87, 91)),  # prefetches and invalidations change no result
        "NANOSLEEP": set(range(32, 64)) | {85},
        "MEMBAR": {79},
        "LDG": {84, 85, 86},
        "YIELD": set(),
    }
    for bits, text in lines():
        each = decode(bits)
        name = each.instruction.opcode
        for bit in range(12, 105):
            try:
                other = decode(bits ^ 1 << bit)
            except UnknownInstruction:
                continue
            same = other.fields == each.fields and other.constant == each.constant
            assert not same or other.mnemonic != each.mnemonic or bit in ignored.get(name, ()), (text, bit)


@pytest.mark.skipif(NVDISASM is None, reason="no nvdisasm; VOLTUNE_NVDISASM names one that reads sm_70 (CUDA 12.8)")
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_mnemonic_of_a_layouts_kernels_is_nvdisasms(layout: str, tmp_path: Path) -> None:
    contract = LAYOUTS[layout]
    for config in [space.default(contract), *([TENSOR] if contract.layout != "awq" else [])]:
        for source in render.render(plan.make(contract, config)).values():
            image = build.build(source)
            for line, each in zip(disassembled(image, tmp_path), microcode.decode(image), strict=True):
                assert each.mnemonic == mnemonic(line.text)


def test_the_document_holds_the_table_of_what_is_executed() -> None:
    assert microcode.supported() in DOCUMENT.read_text(encoding="utf-8")
