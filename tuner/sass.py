"""Reads sm_70 machine code: the instructions of a cubin's kernel, each decoded as far as the project's checks need.

A Volta instruction is 128 bits, little-endian. NVIDIA publishes no description of them; what stands here was found from
how `nvdisasm` 12.8 prints the project's own kernels, a probe of atomics, fences and conversions, and each arithmetic
instruction in each form of its operands. `tests/test_sass.py` holds it to that print. An opcode the print never showed
is refused, not guessed.

  bits 0-11    opcode: what it does, and whether its operands are registers, a constant or an immediate
  bits 12-15   guard predicate: 0-6, or 7 for always; bit 15 negates it
  bits 16-23   the register written; 24-31, 32-39 and 64-71 the registers read, as the opcode has them; 255 is zero
  bits 34-81   a branch's distance from the next instruction in units of 4 bytes, signed; 32-33 which kind of branch
  bits 40-53   a constant's offset in units of 4 bytes; 54-58 its bank
  bits 81-83   the predicate written, 84-86 a second one; 7 is none
  bits 73-75   type of a memory access, which gives its width
"""

import struct
from dataclasses import dataclass

from tuner.build import Image
from tuner.errors import BuildFailed, UnknownInstruction

ARCH = "sm_70"
SIZE = 16  # bytes of an instruction
ZERO = 255  # the register that reads as zero and holds nothing
ALWAYS = 7  # the predicate that is always true
PARAMETERS = 0x160  # where a kernel's parameters begin in constant bank 0

# Name, then opcode:fields for each form. Fields: d is written, a (bits 24-31), b (32-39) and c (64-71) are registers
# read, k is a constant read.
_TABLE = """
ATOM 38a:dab
ATOMG 3a8:dab 3a9:dabc
ATOMS 38c:dab 38d:dabc
B2R 31c:d
BAR b1d:-
BMOV 355:d 356:b
BRA 947:-
BREAK 942:-
BREV 301:db 901:d b01:dk
BSSY 945:-
BSYNC 941:-
CALL 944:-
CCTL 98f:a
CS2R 805:d
ERRBAR 9ab:-
EXIT 94d:-
F2F 304:db 904:d b04:dk
F2I 305:db 905:d b05:dk
FADD 221:dab 421:da 621:dak
FCHK 302:ab 902:a b02:ak
FFMA 223:dabc 423:dac 623:dack 823:dac a23:dack
FLO 300:db 900:d b00:dk
FMNMX 209:dab 809:da a09:dak
FMUL 220:dab 820:da a20:dak
FRND 307:db 907:d b07:dk
FSEL 208:dab 808:da a08:dak
FSETP 20b:ab 80b:a a0b:ak
HADD2 230:dab 430:da 630:dak
HFMA2 231:dabc 431:dac 631:dack 831:dac a31:dack
HMMA.884 236:dabc
HMUL2 232:dab 832:da a32:dak
I2F 306:db 906:d b06:dk
IABS 213:db 813:d a13:dk
IADD3 210:dabc 810:dac a10:dack
IMAD 224:dabc 225:dabc 424:dac 624:dack 625:dack 824:dac 825:dac a24:dack a25:dack
ISETP 20c:ab 80c:a a0c:ak
LD 980:da
LDC b82:da
LDG 381:da
LDL 983:da
LDS 984:da
LEA 211:dabc 411:dac 811:dac a11:dack
LOP3 212:dabc 812:dac a12:dack
MATCH 3a1:da
MEMBAR 992:-
MOV 202:db 802:d a02:dk
MUFU 308:db 908:d b08:dk
NANOSLEEP 95d:- b5d:k
NOP 918:-
P2R 803:da
PLOP3 81c:-
POPC 309:db 909:d b09:dk
PRMT 216:dabc 416:dac 616:dack 816:dac a16:dack
R2P 804:a
RED 98e:ab
RET 950:a
S2R 919:d
SEL 207:dab 807:da a07:dak
SHF 219:dabc 419:dac 619:dack 819:dac a19:dack
SHFL 389:dabc 589:dab 989:dac f89:da
ST 385:ac
STG 386:ab
STL 387:ab
STS 388:ab
VOTE 806:d
WARPSYNC 348:b 948:-
YIELD 946:-
"""
_OPCODES = {
    int(form.split(":")[0], 16): (name, form.split(":")[1].strip("-"))
    for name, *forms in map(str.split, _TABLE.strip().splitlines())
    for form in forms
}
_FIELDS = {"a": 24, "b": 32, "c": 64}
_LOADS_AND_STORES = {"LD", "LDC", "LDG", "LDL", "LDS", "ST", "STG", "STL", "STS"}
_ATOMICS = {"ATOM", "ATOMG", "ATOMS", "RED"}
_TYPE_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 8, 6: 16}  # u8 s8 u16 s16 32 64 128
_ATOMIC_WIDTHS = {0: 4, 1: 4, 2: 8, 3: 4, 6: 8}  # u32 s32 u64 f32 f64
_WIDTHS = {name: _TYPE_WIDTHS for name in _LOADS_AND_STORES} | {name: _ATOMIC_WIDTHS for name in _ATOMICS}
_TARGETED = {"BRA", "CALL", "BSSY"}
_WIDE_ADDRESS = {"ATOM", "ATOMG", "CCTL", "LD", "LDG", "RED", "RET", "ST", "STG"}  # of 64 bits, in two registers
_ONE_PREDICATE = {"ATOM", "ATOMG", "B2R", "FCHK", "FLO", "IMAD", "LDG", "LEA", "LOP3", "MATCH", "SHFL", "VOTE"}
_TWO_PREDICATES = {"FSETP", "IADD3", "ISETP", "PLOP3"}
_WIDE_IMAD = 0x25  # the opcode's low nine bits
_LAST_READ_FIRST = (2, 3)  # its upper three, where c is the second operand, and the third an immediate or a constant


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    pc: byte offset in its kernel. opcode: nvdisasm's name up to the first dot, but HMMA.884. width_bytes: what a thread
    reads or writes, of a memory access. target: pc that a BRA or CALL goes to, or where a BSSY's threads meet again.
    bits: all 128.
    """

    pc: int
    opcode: str
    width_bytes: int | None
    target: int | None
    bits: int

    @property
    def guard(self) -> int:
        """0-7: the predicate that must be true; +8: that must be false. ALWAYS for no condition."""
        return self.bits >> 12 & 15

    @property
    def written(self) -> tuple[int, ...]:
        """General registers written, without ZERO."""
        if "d" not in _OPCODES[self.bits & 0xFFF][1]:
            return ()
        return _registers(self.bits >> 16 & 255, self._written_registers())

    def _written_registers(self) -> int:
        if self.width_bytes is not None:
            return max(1, self.width_bytes // 4)
        wide = self.opcode == "HMMA.884" or self.bits & 0x1FF == _WIDE_IMAD
        return 2 if wide or (self.opcode == "CS2R" and self.bits >> 80 & 1) else 1

    @property
    def read(self) -> tuple[int, ...]:
        """General registers read, addresses among them, without ZERO."""
        found: tuple[int, ...] = ()
        for field in _OPCODES[self.bits & 0xFFF][1]:
            if field in _FIELDS:
                found += _registers(self.bits >> _FIELDS[field] & 255, self.registers_at(field))
        return found

    @property
    def sources(self) -> tuple[int, ...]:
        """The first register of each operand read, without ZERO."""
        places = (_FIELDS[field] for field in _OPCODES[self.bits & 0xFFF][1] if field in _FIELDS)
        return tuple(register for place in places if (register := self.bits >> place & 255) != ZERO)

    def registers_at(self, field: str) -> int:
        """How many registers, from the one named there on, an operand in field a, b or c is."""
        if self.opcode == "HMMA.884":
            return 2
        if field == "c" and self.bits & 0x1FF == _WIDE_IMAD:  # the addend, if it is no factor that stands there
            return 1 if self.bits >> 9 & 7 in _LAST_READ_FIRST else 2
        if field == "a":
            return 2 if self.opcode in _WIDE_ADDRESS else 1
        if self.width_bytes is not None:  # the data of a store or an atomic
            return max(1, self.width_bytes // 4)
        return 1

    @property
    def predicates_written(self) -> tuple[int, ...]:
        """Predicates 0-6 written. R2P may write any."""
        if self.opcode == "R2P":
            return tuple(range(ALWAYS))
        one, two = self.bits >> 81 & 7, self.bits >> 84 & 7
        fields = (one, two) if self.opcode in _TWO_PREDICATES else (one,) if self.opcode in _ONE_PREDICATE else ()
        return tuple(predicate for predicate in fields if predicate != ALWAYS)

    @property
    def constant(self) -> tuple[int, int] | None:
        """(bank, byte offset) of the constant read, or None."""
        if "k" not in _OPCODES[self.bits & 0xFFF][1]:
            return None
        return self.bits >> 54 & 31, (self.bits >> 40 & 0x3FFF) * 4


def instructions(image: Image) -> tuple[Instruction, ...]:
    """The instructions of the image's kernel, out-of-line parts and the padding at its end included.

    Raises UnknownInstruction for another architecture, or with the opcode's bits and the pc of what is not in the
    table; BuildFailed for a cubin without the kernel.
    """
    if image.arch != ARCH:
        raise UnknownInstruction(f"{image.kernel} is built for {image.arch}: only {ARCH} code is read; build for that")
    code = text(image)
    return tuple(
        decode(int.from_bytes(code[pc : pc + SIZE], "little"), pc, image.kernel) for pc in range(0, len(code), SIZE)
    )


def decode(bits: int, pc: int, kernel: str = "") -> Instruction:
    """One instruction. Raises UnknownInstruction."""
    if bits & 0xFFF not in _OPCODES:
        raise UnknownInstruction(
            f"{kernel} pc {pc:#x}: opcode {bits & 0xFFF:#05x} of {bits:#034x} is not known: compare with nvdisasm, and "
            "add it to the table of tuner/sass.py and to what tests/test_sass.py reads"
        )
    name, _ = _OPCODES[bits & 0xFFF]
    width = None
    if name in _WIDTHS:
        width = _WIDTHS[name].get(bits >> 73 & 7)
        if width is None:
            raise UnknownInstruction(
                f"{kernel} pc {pc:#x}: {name} ({bits:#034x}) has memory type {bits >> 73 & 7}: expected one of "
                f"{sorted(_WIDTHS[name])}"
            )
    target = None
    if name in _TARGETED:
        distance = bits >> 34 & (1 << 48) - 1
        target = pc + SIZE + 4 * (distance - (distance >> 47 << 48))
    return Instruction(pc, name, width, target, bits)


def known(opcode: int) -> bool:
    """Whether `decode` takes an instruction with these 12 bits."""
    return opcode in _OPCODES


def text(image: Image) -> bytes:
    """The kernel's machine code. Raises BuildFailed for a cubin without it."""
    return section(image, f".text.{image.kernel}")


def section(image: Image, name: str) -> bytes:
    """The bytes of a cubin's section, by the ELF64 headers. Raises BuildFailed where it is not there."""
    begin, entry, count, names = struct.unpack_from("<40xQ10xHHH", image.cubin)
    sections = [struct.unpack_from("<I4x16xQQ", image.cubin, begin + i * entry) for i in range(count)]
    _, strings, _ = sections[names]
    for at, offset, size in sections:
        end = image.cubin.index(b"\0", strings + at)
        if image.cubin[strings + at : end].decode() == name:
            return image.cubin[offset : offset + size]
    raise BuildFailed(f"the cubin of {image.kernel} has no section {name}: it is damaged; delete it from the cache")


def _registers(first: int, count: int) -> tuple[int, ...]:
    return () if first == ZERO else tuple(range(first, first + count))
