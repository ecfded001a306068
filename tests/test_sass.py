"""The decoder against how nvdisasm prints the same instructions, and what it refuses rather than guess."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from small import LAYOUTS, SMALL, TENSOR

from tuner import build, plan, render, sass, space
from tuner.errors import BuildFailed, UnknownInstruction
from tuner.sass import Instruction

# One line an instruction: pc, 128 bits, and what nvdisasm 12.8 prints of them, a label's name replaced by its pc. They
# are from this project's kernels, a probe of atomics, fences and conversions, and each arithmetic opcode in each form.
PRINTED = Path(__file__).parent / "sm70_nvdisasm.txt"
NVDISASM = os.environ.get("VOLTUNE_NVDISASM") or shutil.which("nvdisasm")
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "F64": 8, "128": 16}
CONSTANT = re.compile(r"c\[(0x\w+)\] ?\[([^]]+)\]")


@dataclass(frozen=True)
class Printed:
    """A line of nvdisasm, read without the decoder."""

    pc: int
    bits: int
    text: str

    @property
    def guard(self) -> int:
        match = re.match(r"@(!?)P(\d|T)", self.text)
        return 7 if match is None else int(match[2].replace("T", "7")) + (8 if match[1] else 0)

    @property
    def mnemonic(self) -> list[str]:
        return self.text.split()[self.text.startswith("@")].split(".")

    @property
    def opcode(self) -> str:
        return ".".join(self.mnemonic[: 2 if self.mnemonic[0] == "HMMA" else 1])

    @property
    def operands(self) -> list[str]:
        return [each.strip() for each in self.text.split(".".join(self.mnemonic), 1)[1].split(",") if each.strip()]

    @property
    def width(self) -> int | None:
        if not re.match(r"LD|ST|ATOM|RED", self.opcode):
            return None
        return next((WIDTHS[each] for each in self.mnemonic if each in WIDTHS), 4)

    @property
    def registers(self) -> set[int]:
        """The first of each operand's."""
        text = self.text if self.opcode == "LDC" else CONSTANT.sub("", self.text)
        return {int(each) for each in re.findall(r"\bR(\d+)\b", text)}

    @property
    def constant(self) -> tuple[int, int] | None:
        match = None if self.opcode == "LDC" else CONSTANT.search(self.text)
        return None if match is None else (int(match[1], 16), int(match[2], 16))

    @property
    def target(self) -> int | None:
        return int(self.text.split()[-1], 16) if self.opcode in ("BRA", "BSSY", "CALL") else None

    @property
    def predicates(self) -> set[int]:
        """Those written: they stand first, or after the register written."""
        if self.opcode == "BRA":
            return set()
        most = 2 if self.opcode in ("FSETP", "IADD3", "ISETP", "PLOP3") else 1
        first = 1 if self.operands and re.fullmatch(r"R\w+", self.operands[0]) else 0
        found: set[int] = set()
        for each in self.operands[first : first + most]:
            if not re.fullmatch(r"P[\dT]", each):
                break
            found |= {int(each[1])} if each != "PT" else set()
        return found


def kept() -> Iterator[Printed]:
    for line in PRINTED.read_text(encoding="utf-8").splitlines():
        pc, bits, text = line.split(" ", 2)
        yield Printed(int(pc, 16), int(bits, 16), text)


def differences(line: Printed, found: Instruction) -> dict[str, tuple[object, object]]:
    """What -> (decoded, printed)."""
    decoded = {*found.written, *found.read}
    both: dict[str, tuple[object, object]] = {
        "opcode": (found.opcode, line.opcode),
        "width": (found.width_bytes, line.width),
        "target": (found.target, line.target),
        "guard": (found.guard, line.guard),
        "constant": (found.constant, line.constant),
        "registers missed": (line.registers - decoded, set()),
        # an operand of up to four registers is printed by its first
        "registers made up": ({r for r in decoded if not {r, r - 1, r - 2, r - 3} & line.registers}, set()),
    }
    if found.written:
        both["register written"] = (f"R{found.written[0]}", next(o for o in line.operands if o.startswith("R")))
    if line.opcode != "R2P":  # its text does not say which
        both["predicates"] = (set(found.predicates_written), line.predicates)
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def test_every_instruction_kept_is_decoded_as_nvdisasm_printed_it() -> None:
    found = {line.text: differences(line, sass.decode(line.bits, line.pc)) for line in kept()}
    assert {text: wrong for text, wrong in found.items() if wrong} == {}


def test_every_opcode_that_is_known_has_been_printed() -> None:
    lines = list(kept())
    for bits in (bits for bits in range(4096) if bits not in {line.bits & 0xFFF for line in lines}):
        with pytest.raises(UnknownInstruction):
            sass.decode(bits, 0)


# How many registers an operand has is not printed; these are the rules of sm_70's 64-bit addresses and wide results.
@pytest.mark.parametrize(
    ("begins", "written", "read"),
    [
        ("LDG.E.128.SYS R24, [R100]", {24, 25, 26, 27}, {100, 101}),
        ("LDG.E.128.STRONG.GPU R12, [R6]", {12, 13, 14, 15}, {6, 7}),
        ("STG.E.64.SYS [R28+0x38], R18", set(), {28, 29, 18, 19}),
        ("@!P1 STS.128 [R25+0x1a0], R12", set(), {25, 12, 13, 14, 15}),
        ("LDS.U.S16 R9, [R19+0x102]", {9}, {19}),
        ("ATOMG.E.CAS.64.STRONG.GPU PT, R16, [R28+0x10], R8, R10", {16, 17}, {28, 29, 8, 9, 10, 11}),
        ("CS2R R12, SRZ", {12, 13}, set()),
        ("RET.REL.NODEC R52", set(), {52, 53}),
        ("HMMA.884.F32.F32.STEP2 R32, R34.reuse.ROW, R52.reuse.COL, RZ", {32, 33}, {34, 35, 52, 53}),
        # 64 bits are the addend's, wherever it stands, and the result's
        ("IMAD.WIDE.U32 R12, R11, R13, R10", {12, 13}, {10, 11, 13}),
        ("IMAD.WIDE.U32 R6, R6, 0x140, R8", {6, 7}, {6, 8, 9}),
        ("IMAD.WIDE.U32 R10, R9, c[0x0][0x188], R10", {10, 11}, {9, 10, 11}),
        ("IMAD.WIDE.U32 R98, R98, R99, c[0x0][0x1a8]", {98, 99}, {98, 99}),
    ],
)
def test_wide_operands_are_all_their_registers(begins: str, written: set[int], read: set[int]) -> None:
    line = next(line for line in kept() if line.text == begins)
    found = sass.decode(line.bits, line.pc)
    assert set(found.written) == written
    assert set(found.read) == read


def test_an_unknown_opcode_is_refused_with_its_bits_and_place() -> None:
    with pytest.raises(UnknownInstruction, match=r"voltune_w13 pc 0x1230: opcode 0x949 of 0x0+7949 is not known"):
        sass.decode(0x7949, 0x1230, "voltune_w13")


def test_an_unknown_width_is_refused() -> None:
    load = next(line.bits for line in kept() if line.text.startswith("LDG"))
    with pytest.raises(UnknownInstruction, match=r"LDG .* has memory type 7"):
        sass.decode(load | 7 << 73, 0)


@pytest.fixture(scope="module")
def image() -> build.Image:
    return build.build(render.render(plan.make(SMALL, space.default(SMALL), "staged"))["compact"])


def test_only_code_for_sm_70_is_read(image: build.Image) -> None:
    with pytest.raises(UnknownInstruction, match="built for sm_90: only sm_70"):
        sass.instructions(replace(image, arch="sm_90"))


def test_a_cubin_without_the_kernel_is_refused(image: build.Image) -> None:
    with pytest.raises(BuildFailed, match=r"no section \.text\.voltune_other"):
        sass.instructions(replace(image, kernel="voltune_other"))


def test_instructions_are_the_whole_kernel_in_order_and_branches_lead_into_it(image: build.Image) -> None:
    code = sass.instructions(image)
    assert [each.pc for each in code] == list(range(0, len(sass.text(image)), 16))
    assert "EXIT" in {each.opcode for each in code}
    places = {each.pc for each in code}
    assert {each.target for each in code if each.target is not None} <= places


def disassembled(image: build.Image, folder: Path) -> list[Printed]:
    """nvdisasm's print of a kernel, or a skip where this one knows no sm_70."""
    assert NVDISASM is not None
    (folder / "kernel.cubin").write_bytes(image.cubin)
    command = [NVDISASM, "-hex", "-c", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{NVDISASM} does not read sm_70: {done.stderr.strip()}")
    found: list[Printed] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    lines = done.stdout.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        label = re.match(r"(\.L_\w+|\$\S+):", line)
        if label:
            waiting.append(label[1])
        match = re.search(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/", line)
        if match:
            labels |= dict.fromkeys(waiting, int(match[1], 16))
            waiting = []
            upper = re.search(r"/\* 0x([0-9a-f]{16}) \*/", following)
            assert upper is not None
            found.append(Printed(int(match[1], 16), int(upper[1] + match[3], 16), match[2]))
    return [replace(each, text=re.sub(r"`\((.*?)\)", lambda m: hex(labels.get(m[1], 0)), each.text)) for each in found]


@pytest.mark.skipif(NVDISASM is None, reason="no nvdisasm; VOLTUNE_NVDISASM names one that reads sm_70 (CUDA 12.8)")
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_instruction_of_a_layouts_kernels_agrees_with_nvdisasm(layout: str, tmp_path: Path) -> None:
    contract = LAYOUTS[layout]
    configs = [space.default(contract), *([TENSOR] if "tensor" in space.families(contract) else [])]
    for config in configs:
        for name in plan.PLANS:
            for source in render.render(plan.make(contract, config, name)).values():
                image = build.build(source)
                code = sass.instructions(image)
                lines = disassembled(image, tmp_path)
                assert [each.bits for each in code] == [line.bits for line in lines]
                for line, each in zip(lines, code, strict=True):
                    assert differences(line, each) == {}, line.text
