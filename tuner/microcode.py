"""Decodes sm_70 instructions in full, into the micro-operations that `machine.cpp` executes.

`_ROWS` says for each opcode where its operands and modifiers stand and which values are known; every other bit must be
zero. So an opcode, a modifier or a value that nobody looked at is refused with its place, never executed as something
like it. Where a field stands was found by setting each bit in turn and reading what `nvdisasm` 12.8 printed; suffixes
are its own, and `tests/test_microcode.py` holds whole mnemonics to its print.

A row: the opcode's low nine bits (the three above say which operand is a register, an immediate or a constant), what
the machine calls the operation, its operands, then fields:

  operands               d is written; a, x, y are read: bits 24-31, 32-63 and 64-71; o is an address offset from bit 40
                         on, O one from bit 32 on
  a- a| x- x| y- y|      an operand's sign and magnitude bits
  name@bit.width:S,S,..  suffixes by value; `?` marks one that is not supported, as are all past the last; `*`: any
  =bit.width=value       the only value supported
  pd pd2 ps ps2 ps3      predicates written, and read (bit 3 negates)
"""

import operator
import struct
from dataclasses import dataclass
from functools import cache, cached_property

from tuner import sass
from tuner.build import Image
from tuner.errors import UnknownInstruction
from tuner.sass import ALWAYS, SIZE, ZERO, Instruction

_F32 = "ftz@80:,.FTZ round@78.2:,.RM,.RP,.RZ sat@77:,.SAT"
_COMPARE = ".F,.LT,.EQ,.LE,.GT,.NE,.GE"
_UNORDERED = ".NUM,.NAN,.LTU,.EQU,.LEU,.GTU,.NEU,.GEU,.T"
_COMBINE = "combine@74.2:.AND,.OR,.XOR"
_H2 = "a- a| swizzle_a@74.2:,?,, x- x| swizzle_x@60.2:,?,,"
_TYPE = "type@73.3:.U8,.S8,.U16,.S16,,.64,.128"
_CACHE = "cache@84.3:.EF,,?,.LU,?,.NA"
_SCOPE = "scope@77.2:.CTA,?,.GPU,.SYS"
_LOAD = f"wide@72:?,.E {_CACHE} {_TYPE} order@79.2:.CONSTANT,,.STRONG {_SCOPE}"
_STORE = f"wide@72:?,.E {_CACHE} {_TYPE} order@79.2:?,,.STRONG {_SCOPE}"
_ATOMIC = f"{_CACHE} type@73.3:,.S32,.64 order@79.2:?,?,.STRONG {_SCOPE}"
_ATOMS = ".ADD,.MIN,.MAX,.INC,.DEC,.AND,.OR,.XOR"
_ROWS = f"""
021 FADD dax a- a| x- x| {_F32}
020 FMUL dax a- a| x- x| {_F32} =84.3=4
023 FFMA daxy a- a| x- x| y- y| {_F32}
009 FMNMX dax a- a| x- x| ftz@80:,.FTZ ps
008 FSEL dax a- a| x- x| ftz@80:,.FTZ ps
00b FSETP ax a- a| x- x| compare@76.4:{_COMPARE},{_UNORDERED} ftz@80:,.FTZ {_COMBINE} pd pd2 ps
102 FCHK ax a- a| x- x| pd
108 MUFU dx x- x| kind@74.4:.COS,.SIN,.EX2,.LG2,.RCP,.RSQ,?,?,.SQRT
030 HADD2 dax {_H2} high@78:,.F32 ftz@80:,.FTZ sat@77:,.SAT
032 HMUL2 dax {_H2} ftz@80:,.FTZ sat@77:,.SAT
031 HFMA2 daxy {_H2} y-@84 y|@83 swizzle_y@81.2:,?,, ftz@80:,.FTZ sat@77:,.SAT
036 HMMA daxy =74=1 =76=1 =78=1 kind@79.2:.F32.F32.STEP0,.F32.F32.STEP1,.F32.F32.STEP2,.F32.F32.STEP3
010 IADD3 daxy a- x- y- extended@74:,.X pd pd2 ps ps2
024 IMAD daxy sign@73:.U32, extended@74:,.X y- =81.3=7 ps
025 IMAD_WIDE daxy sign@73:.U32, extended@74:,.X y- pd ps
013 IABS dx
00c ISETP ax compare@76.3:{_COMPARE},.T sign@73:.U32, {_COMBINE} extended@72:,.EX pd pd2 ps ps3
012 LOP3 daxy kind@80:.LUT pd ps lut@72.8:*
01c PLOP3 - kind@67:.LUT lut@72.5:* lut_low@64.3:* lut2@16.8:* pd pd2 ps ps2 ps3
007 SEL dax ps
002 MOV dx =72.4=15
019 SHF daxy right@76:.L,.R wrap@75:,.W type@73.2:.S64,.U64,.S32,.U32 high@80:,.HI
011 LEA daxy a- x- high@80:,.HI extended@74:,.X sign@73:,.SX32 shift@75.5:* pd ps
016 PRMT daxy
109 POPC dx x-
100 FLO dx sign@73:.U32, x- kind@74:,.SH =81.3=7
101 BREV dx
106 I2F dx kind@75.2:?,.F16, type@84.2:?,?, sign@74:.U32, round@78.2:,.RM,.RP,.RZ
105 F2I dx x- x| ftz@80:,.FTZ sign@72:.U32, round@78.2:,.FLOOR,.CEIL,.TRUNC =75.2=2 kind@77:?,.NTZ =84.2=2
104 F2F dx x- x| ftz@80:,.FTZ kind@75.2:?,.F16 type@84.2:?,?,.F32 round@78.2:,.RM,.RP,.RZ
107 FRND dx x- x| ftz@80:,.FTZ round@78.2:,.FLOOR,.CEIL,.TRUNC =75.2=2 =84.2=2
119 S2R d kind@72.8:*
005 CS2R d =72.8=255 high@80:.32,
003 P2R dax =81.3=0
004 R2P ax
006 VOTE d kind@72.2:.ALL,.ANY,.EQ pd ps
189 SHFL d kind@58.2:.IDX,.UP,.DOWN,.BFLY pd
1a1 MATCH da kind@79:?,.ANY =81.3=7
181 LDG dao {_LOAD} =81.3=7
180 LD daO {_LOAD}
184 LDS dao kind@76:,.U {_TYPE}
183 LDL dao {_CACHE} {_TYPE}
182 LDC da type@73.3:.U8,.S8,.U16,.S16,,.64 kind@54.5:* offset@38.16:*
186 STG axo {_STORE}
185 ST ayO {_STORE}
188 STS axo {_TYPE}
187 STL axo {_CACHE} {_TYPE}
1a8 ATOMG daxo wide@72:?,.E =81.3=7 kind@87.4:{_ATOMS},.EXCH {_ATOMIC}
1a9 ATOMG_CAS daxyo wide@72:?,.E kind@87:.CAS =81.3=7 {_ATOMIC}
18a ATOM daxo wide@72:?,.E =81.3=7 kind@87.4:{_ATOMS},.EXCH {_ATOMIC}
18e RED axo wide@72:?,.E kind@87.3:{_ATOMS} {_ATOMIC}
18c ATOMS daxo kind@87.4:{_ATOMS},.EXCH type@73.3:,.S32,.64
18d ATOMS_CAS daxyo kind@87:.CAS type@73.3:,.S32,.64
192 MEMBAR - order@79.2:.SC,.ALL scope@76.3:.CTA,?,.GPU,.SYS
1ab ERRBAR -
18f CCTL aO wide@72:,.E kind@87.4:.PF1,.PF2,.WB,?,.IVALL order@78.3:*
11d BAR - kind@77.3:.SYNC =54.4=0 =42.12=0
155 BMOV d kind@84:.32,.32.CLEAR lut@24.4:*
156 BMOV_SET x kind@84:.32 lut@24.4:*
145 BSSY - lut@16.4:* =87.4=7
141 BSYNC - lut@16.4:* =87.4=7
142 BREAK - lut@16.4:* ps
147 BRA - kind@32.2:,.U,.DIV,.CONV =85.2=0 ps
144 CALL - kind@85.2:?,?,.REL.NOINC =87.4=7
150 RET a kind@85.2:?,?,.REL.NODEC =87.4=7
14d EXIT - =84.3=0 =87.4=7
146 YIELD - =87.4=7
148 WARPSYNC - =87.4=7
118 NOP -
15d NANOSLEEP - kind@85.2:,.WARP =87.4=7
"""
_SIGNS = {"a-": 72, "a|": 73, "x-": 63, "x|": 62, "y-": 75, "y|": 74}
_PREDICATES = {"pd": (81, 3), "pd2": (84, 3), "ps": (87, 4), "ps2": (77, 4), "ps3": (68, 4)}
_SCHEDULE = 105  # bits from here on: stalls, barriers of the scoreboard and operand reuse, which change no result
_CONTROL = {"BRA", "CALL", "BSSY", "RET"}  # bits 34-81 are a distance
_IMMEDIATE, _CONSTANT = (2, 4), (3, 5)  # an opcode's bits 9-11: what stands in bits 32-63, if no register
_LAST = (2, 3)  # those where it is the last operand, and bits 64-71 the one before

#: What `machine.cpp` reads of an instruction, in this order; H, B, I, i, Q are struct's letters.
LAYOUT = (
    *(("op", "H"), ("guard", "B"), ("d", "B"), ("a", "B"), ("b", "B"), ("c", "B"), ("values", "B")),
    *(("value", "I"), ("value_high", "I"), ("target", "i"), ("offset", "i"), ("signs", "B"), ("magnitudes", "B")),
    *((name, "B") for name in ("pd", "pd2", "ps", "ps2", "ps3", "bytes", "kind", "type", "sign", "round", "ftz")),
    *((name, "B") for name in ("sat", "compare", "combine", "extended", "high", "right", "wrap", "shift", "lut")),
    *((name, "B") for name in ("lut2", "swizzle_a", "swizzle_b", "swizzle_c", "order", "scope")),
    *((name, "B") for name in ("reads_a", "reads_b", "reads_c", "writes")),  # registers of each operand
)
_STRUCT = struct.Struct("<" + "".join(letter for _, letter in LAYOUT))
_IN_ORDER = operator.itemgetter(*(name for name, _ in LAYOUT))
_ABSENT = {name: ALWAYS if name in _PREDICATES else 0 for name, _ in LAYOUT}  # of fields that an instruction lacks


@dataclass(frozen=True)
class _Field:
    name: str
    bit: int
    width: int
    suffixes: tuple[str, ...] | None  # None: any value, without a suffix
    only: int | None = None

    @property
    def mask(self) -> int:
        return ((1 << self.width) - 1) << self.bit

    def of(self, bits: int) -> int:
        return (bits & self.mask) >> self.bit


@dataclass(frozen=True)
class _Row:
    name: str
    operands: str
    fields: tuple[_Field, ...]


@cache
def _rows() -> dict[int, _Row]:
    found = {}
    for line in _ROWS.strip().splitlines():
        code, name, operands, *tokens = line.split()
        found[int(code, 16)] = _Row(name, operands.strip("-"), tuple(_field(token) for token in tokens))
    return found


def _field(token: str) -> _Field:
    if token in _PREDICATES:
        return _Field(token, *_PREDICATES[token], None)
    if token[:2] in _SIGNS:
        return _Field(token[:2], int(token[3:] or _SIGNS[token[:2]]), 1, None)
    if token.startswith("="):
        place, value = token[1:].split("=")
        bit, _, width = place.partition(".")
        return _Field("", int(bit), int(width or 1), None, int(value))
    name, place = token.split("@")
    place, _, suffixes = place.partition(":")
    bit, _, width = place.partition(".")
    return _Field(name, int(bit), int(width or 1), None if suffixes == "*" else tuple(suffixes.split(",")))


#: What the machine can do, by the number that stands in a micro-operation.
OPERATIONS = tuple(row.name for row in _rows().values())


@dataclass(frozen=True)
class Micro:
    """One instruction for the machine. mnemonic: as nvdisasm has it, but for names it gives to special operands.

    fields: LAYOUT's values. constant: (bank, byte offset) to be read into `value` when the kernel is launched, or None.
    """

    instruction: Instruction
    mnemonic: str
    fields: dict[str, int]
    constant: tuple[int, int] | None

    def packed(self, value: int = 0) -> bytes:
        """The machine's form, with a constant's 64 bits put in where there is one."""
        if self.constant is None:
            return self._packed  # the same in every launch
        return self._form({"value": value & 0xFFFFFFFF, "value_high": value >> 32})

    @cached_property
    def _packed(self) -> bytes:
        return self._form({})

    def _form(self, constant: dict[str, int]) -> bytes:
        return _STRUCT.pack(*_IN_ORDER({**_ABSENT, **self.fields, **constant}))


def decode(image: Image) -> tuple[Micro, ...]:
    """Every instruction of the image's kernel. Raises UnknownInstruction with opcode, modifiers and pc."""
    return tuple(micro(each, image.registers, image.kernel) for each in sass.instructions(image))


def supported() -> str:
    """The table of what is executed, as Markdown: opcode, its forms' bits, and each modifier's values, `-` for none."""
    lines = ["| opcode | modifiers |", "| --- | --- |"]
    for code, row in _rows().items():
        told = (("/".join(s or "-" for s in f.suffixes if s != "?")) for f in row.fields if f.suffixes)
        forms = ", ".join(f"{high << 9 | code:03x}" for high in range(8) if sass.known(high << 9 | code))
        lines.append(f"| {row.name} ({forms}) | {' '.join(f'`{each}`' for each in told if each.strip('-/'))} |")
    return "\n".join(lines) + "\n"


def micro(instruction: Instruction, registers: int = ZERO, kernel: str = "") -> Micro:
    """One instruction's micro-operation; `registers` is how many a thread of its kernel has.

    Raises UnknownInstruction for a modifier or a bit that is not in the table, or a register that the thread lacks.
    """
    return _Decoder(instruction, kernel).micro(registers)


class _Decoder:
    """Fills the fields of one instruction, and keeps account of the bits that it has read."""

    def __init__(self, instruction: Instruction, kernel: str) -> None:
        self._instruction = instruction
        self._kernel = kernel
        self._bits = instruction.bits
        self._form = instruction.bits >> 9 & 7
        self._read = 0xFFFF | -1 << _SCHEDULE
        code = instruction.bits & 0x1FF
        if code not in _rows():
            raise self._unknown("what it does is not known")
        self._row = _rows()[code]
        self._fields = {"op": OPERATIONS.index(self._row.name), "guard": instruction.guard}
        self._mnemonic = "IMAD.WIDE" if self._row.name == "IMAD_WIDE" else instruction.opcode

    def micro(self, registers: int) -> Micro:
        names = self._row.operands
        self._last = self._form in _LAST and "y" in names
        for field in self._row.fields:
            self._take(field)
        for operand, bit in (("d", 16), ("a", 24)):
            self._fields[operand] = self._place(bit, operand in names)
        self._sources()
        self._rest()
        left = self._bits & ~self._read
        if left:
            raise self._unknown(f"bit {(left & -left).bit_length() - 1} is set, whose meaning is not known")
        for register in (*self._instruction.written, *self._instruction.read):
            if register >= registers:
                raise self._unknown(f"it names R{register}, but a thread has {registers} registers")
        constant = self._instruction.constant if self._form in _CONSTANT and "x" in names else None
        return Micro(self._instruction, self._mnemonic, self._fields, constant)

    def _unknown(self, why: str) -> UnknownInstruction:
        each = self._instruction
        name = getattr(self, "_mnemonic", each.opcode)
        return UnknownInstruction(
            f"{self._kernel} pc {each.pc:#x}: {name} ({each.bits:#034x}): {why}; the machine would have to guess: "
            "find out what it does, and add it to tuner/microcode.py and machine.cpp"
        )

    def _field(self, bit: int, width: int) -> int:
        mask = (1 << width) - 1
        self._read |= mask << bit
        return self._bits >> bit & mask

    def _place(self, bit: int, used: bool) -> int:
        """A register's place. One that is not used holds 0 or RZ, if nothing else stands there."""
        if not used:
            if self._bits >> bit & 255 == ZERO:
                self._read |= 255 << bit
            return ZERO
        return self._field(bit, 8)

    def _slot(self, operand: str) -> str:
        """Which source x or y is to the machine."""
        if "x" not in self._row.operands:
            return "b"
        return "b" if (operand == "x") != self._last else "c"

    def _take(self, field: _Field) -> None:
        name = field.name
        if self._form in _IMMEDIATE and name in ("x-", "x|", "swizzle_x") and "x" in self._row.operands:
            return  # these bits are the immediate's
        value = self._field(field.bit, field.width)
        if field.only is not None:
            if value != field.only:
                raise self._unknown(f"bits from {field.bit} on are {value}, and only {field.only} is known")
            return
        if field.suffixes is not None:
            if value >= len(field.suffixes) or field.suffixes[value] == "?":
                raise self._unknown(f"bits from {field.bit} on are {value}, which is not known")
            self._mnemonic += field.suffixes[value]
        if name[1:] in ("-", "|"):
            source = "abc".index("a" if name[0] == "a" else self._slot(name[0]))
            kind = "signs" if name[1] == "-" else "magnitudes"
            self._fields[kind] = self._fields.get(kind, 0) | value << source
        elif name in ("swizzle_x", "swizzle_y"):
            self._fields[f"swizzle_{self._slot(name[-1])}"] = value
        else:
            self._fields[name] = value

    def _sources(self) -> None:
        """Operands b and c: registers, or the one value that an instruction may hold."""
        names, fields = self._row.operands, self._fields
        fields["b"] = fields["c"] = ZERO
        if "y" in names:
            fields[self._slot("y")] = self._place(64, True)
        else:
            self._place(64, False)
        if "o" in names:
            offset = self._field(40, 24)
            fields["offset"] = offset - (offset >> 23 << 24)
        if "O" in names:
            offset = self._field(32, 32)
            fields["offset"] = offset - (offset >> 31 << 32)
        if "x" not in names:
            return
        slot = self._slot("x")
        if self._form in _IMMEDIATE and "o" not in names:
            fields["value"] = self._field(32, 32)
            fields["values"] = 1 if slot == "b" else 2
        elif self._form in _CONSTANT:
            self._field(40, 19)
            fields["values"] = 1 if slot == "b" else 2
        else:
            fields[slot] = self._field(32, 8)

    def _rest(self) -> None:
        """What only one opcode or a few have."""
        name, fields, pc = self._row.name, self._fields, self._instruction.pc
        if name in _CONTROL:
            distance = self._field(34, 48)
            target = pc + SIZE + 4 * (distance - (distance >> 47 << 48))
            if target % SIZE:
                raise self._unknown(f"its target {target:#x} is no instruction's place")
            fields["target"] = target // SIZE
        elif name == "SHFL":
            fields["values"] = {1: 0, 2: 2, 4: 1, 7: 3}[self._form]
            fields["a"] = self._field(24, 8)
            if fields["values"] & 1:
                fields["value"] = self._field(53, 5)
            else:
                fields["b"] = self._field(32, 8)
            if fields["values"] & 2:
                fields["offset"] = self._field(40, 13)
            else:
                fields["c"] = self._field(64, 8)
        elif name == "WARPSYNC":
            fields["values"] = int(self._form == 4)
            fields["value"] = self._field(32, 32) if self._form == 4 else 0
            fields["b"] = ZERO if self._form == 4 else self._field(32, 8)
        elif name == "NANOSLEEP":
            self._field(32, 32)
        elif name == "HADD2" and fields["high"] and 0 in (fields["swizzle_a"], fields.get("swizzle_b", 0)):
            raise self._unknown("an f32 sum of two pairs of halves is not known")
        elif name == "LEA" and fields["high"] and fields.get("signs"):
            raise self._unknown("the high part of a negated operand is not known")
        elif name == "LEA" and self._last and not (fields["high"] and not fields["sign"]):
            raise self._unknown("this order of operands is known of LEA.HI alone")
        elif name.startswith("IMAD") and self._last and fields.get("signs"):
            raise self._unknown("a negated addend that is no register is not known")
        elif name == "I2F" and fields["kind"] == 1 and fields["round"]:
            raise self._unknown("rounding to f16 otherwise than to the nearest is not known")
        elif name == "LOP3" and fields["pd"] != ALWAYS and fields["ps"] != ALWAYS + 8:
            raise self._unknown("a result's predicate together with another is not known")
        elif name == "PLOP3":
            fields["lut"] = fields["lut"] << 3 | fields["lut_low"]
        elif name == "LDC" and fields["kind"]:
            raise self._unknown("an indexed constant of another bank than 0 is not known")
        each = self._instruction
        if each.width_bytes is not None:
            fields["bytes"] = each.width_bytes
        fields["writes"] = len(each.written)
        for source, place in (("a", "a"), (self._slot("x"), "b"), (self._slot("y"), "c")):
            if fields.get(source, ZERO) != ZERO:
                fields[f"reads_{source}"] = each.registers_at(place)
