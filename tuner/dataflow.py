"""What a kernel's machine code does with its parameters: which pointer each global load goes through, and how many
instructions stand around the loads of one.

Registers are followed through every path. A value made from a pointer parameter carries that pointer's mark; a value
that a load brings carries the load's; what is unpacked from it carries another, which counts where a tensor core reads
it. What goes through memory loses its marks: a load that nothing marks is shown as such, never taken for another's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.sass import ALWAYS, PARAMETERS, ZERO, Instruction

GLOBAL_LOADS = ("LDG", "LD")
# What makes a tensor core's operands of packed weights.
_UNPACKING = ("LOP3", "SHF", "PRMT", "HADD2", "HFMA2")
TENSOR = "HMMA.884"
_NEGATED = 8  # in a guard
_IF_PARTED, _IF_TOGETHER = 2, 3  # kinds of BRA: BRA.DIV and BRA.CONV; the others go by their predicates


@dataclass(frozen=True)
class Load:
    """A global load; `operands` are those whose pointers its address was made from: one, if all is well."""

    instruction: Instruction
    operands: frozenset[str]


@dataclass(frozen=True)
class Stretch:
    """The instructions in which a thread reads one operand and uses what it read, if its warp stays together.

    Where loads and uses turn in a loop of their own, it is that loop. Else it is what lies between the first and the
    last of them, in whole basic blocks. code: those instructions; one in a loop inside stands once. working: those
    of them that work on what was read: the loop, or else the basic blocks with a use of it.
    """

    operand: str
    loop: bool
    code: tuple[Instruction, ...]
    working: tuple[Instruction, ...]
    nbytes: int  # that a thread reads of the operand in it


class Dataflow:
    """`code` is one kernel's; `pointers` gives the operand of each parameter that is a pointer, by byte offset."""

    def __init__(self, code: Sequence[Instruction], pointers: Mapping[int, str]) -> None:
        self._code = code
        self._names = tuple(pointers.values())
        self._marks = {PARAMETERS + offset: 1 << i for i, offset in enumerate(pointers)}
        self._all_pointers = (1 << len(pointers)) - 1
        self._index = {each.pc: i for i, each in enumerate(code)}
        self._blocks = self._split()
        self._block_at = {block[0]: number for number, block in enumerate(self._blocks)}
        self._next = [self._successors(block, together=True) for block in self._blocks]
        self._together = _reached([0], dict(enumerate(self._next)))
        self._loops = _loops(self._next)
        self._loads: dict[int, int] = {}  # instruction -> pointer marks of its address
        self._uses: dict[int, set[int]] = defaultdict(set)  # load -> instructions that read what it brought
        self._follow()

    @property
    def loads(self) -> tuple[Load, ...]:
        """Every global load, in the code's order."""
        return tuple(Load(self._code[i], self._operands(marks)) for i, marks in sorted(self._loads.items()))

    def stretches(self, operand: str) -> tuple[Stretch, ...]:
        """The stretches that read the operand, in the code's order; of alternatives, such as one row and many, each."""
        loads = [i for i, marks in sorted(self._loads.items()) if operand in self._operands(marks)]
        groups = _connected([{self._block_of(j) for j in (i, *self._uses[i])} & self._together for i in loads])
        found = {}
        for members in groups:
            loading = members & {self._block_of(i) for i in loads}
            for region, loop in self._regions(members, loading):
                read = sum(self._code[i].width_bytes or 0 for i in loads if self._block_of(i) in region)
                using = region if loop else region & {self._block_of(j) for i in loads for j in self._uses[i]}
                code, working = (
                    tuple(self._code[i] for number in sorted(some) for i in self._blocks[number])
                    for some in (region, using)
                )
                found[region] = Stretch(operand, loop, code, working, read)
        return tuple(sorted(found.values(), key=lambda stretch: stretch.code[0].pc))

    def _operands(self, marks: int) -> frozenset[str]:
        return frozenset(name for i, name in enumerate(self._names) if marks >> i & 1)

    def _regions(self, members: set[int], loading: set[int]) -> Iterator[tuple[frozenset[int], bool]]:
        """Blocks of each loop, or else stretch, of blocks that load and use the same; and whether it is a loop."""
        around = [body for body in self._loops.values() if members <= body]
        whole = min(around, key=len) if around else self._together
        header = next((head for head, body in self._loops.items() if body == whole), None)
        following = {block: {n for n in self._next[block] if n in whole and n != header} for block in whole}
        before: dict[int, set[int]] = {block: set() for block in whole}
        for block, nexts in following.items():
            for each in nexts:
                before[each].add(block)
        onwards = _reached(members, following)
        # Of members that lead to no further one: each such end is an alternative.
        ends = [m for m in members if all(m in _reached([n], following) for n in _reached([m], following) & members)]
        ways = {frozenset(_reached([end], before) & onwards) for end in ends}
        if len(ways) > 1:
            for way in ways:
                yield from self._regions(members & way, loading & way)
            return
        inner = [body for body in self._loops.values() if body < whole and body & loading and not members <= body]
        inner = [body for body in inner if not any(other < body for other in inner)]
        if inner:
            yield from ((frozenset(body), True) for body in inner)
        elif loading:
            yield ways.pop(), False

    def _split(self) -> list[range]:
        """Basic blocks, as ranges of instructions."""
        starts = {0}
        for i, instruction in enumerate(self._code):
            if instruction.target is not None and instruction.opcode != "BSSY":
                starts.add(self._index[instruction.target])
            if instruction.opcode in ("BRA", "CALL", "RET", "EXIT"):
                starts.add(i + 1)
        ordered = [*sorted(start for start in starts if start < len(self._code)), len(self._code)]
        return [range(first, end) for first, end in itertools.pairwise(ordered)]

    def _block_of(self, instruction: int) -> int:
        while instruction not in self._block_at:
            instruction -= 1
        return self._block_at[instruction]

    def _successors(self, block: range, together: bool) -> tuple[int, ...]:
        """Blocks that may follow; together: while the warp's threads go the same way. A call is taken to return."""
        last = self._code[block[-1]]
        after = (block[-1] + 1,) if block[-1] + 1 < len(self._code) else ()
        ends: tuple[int, ...] = after
        if last.opcode == "BRA" and last.target is not None:
            there = (self._index[last.target],)
            kind = last.bits >> 32 & 3
            if kind in (_IF_PARTED, _IF_TOGETHER):
                taken = kind == _IF_TOGETHER
                ends = (there if taken else after) if together else after + there
            else:
                always = last.guard == ALWAYS and last.bits >> 87 & 15 == ALWAYS
                ends = there if always else after + there
        elif last.opcode in ("EXIT", "RET") and last.guard == ALWAYS:
            ends = ()
        return tuple(self._block_at[i] for i in ends)

    def _follow(self) -> None:
        """Marks of every register at every instruction reached: fills `_loads` and `_uses`."""
        following = [self._successors(block, together=False) for block in self._blocks]
        states: dict[int, list[int]] = {0: [0] * ZERO}
        waiting = [0]
        while waiting:
            number = waiting.pop()
            state = self._through(self._blocks[number], list(states[number]))
            for each in following[number]:
                known = states.get(each)
                joined = state if known is None else [a | b for a, b in zip(known, state, strict=True)]
                if joined != known:
                    states[each] = list(joined)
                    waiting.append(each)
        for i, instruction in enumerate(self._code):
            if instruction.opcode in GLOBAL_LOADS:
                self._loads.setdefault(i, 0)  # an unreached one too

    def _through(self, block: range, state: list[int]) -> list[int]:
        registers = _Registers(state)
        for i in block:
            each = self._code[i]
            marks = 0
            for register in each.read:
                marks |= registers.read(register, each.guard)
            loads = marks >> len(self._names) & (1 << len(self._code)) - 1
            unpacked = marks >> len(self._names) + len(self._code)
            for load in _bits(loads | unpacked if each.opcode == TENSOR else loads):
                self._uses[load].add(i)
            if each.opcode == "CALL" and each.target is not None:
                for register in self._overwritten(self._index[each.target]):
                    registers.write(register, 0, ALWAYS)
                registers.forget(range(ALWAYS))
            value = marks & self._all_pointers
            if each.constant is not None and each.constant[0] == 0:
                offset = each.constant[1]
                value |= self._marks.get(offset, 0) | self._marks.get(offset - 4, 0)  # either half of a pointer
            if each.opcode in GLOBAL_LOADS:
                self._loads[i] = self._loads.get(i, 0) | value
                value = 1 << len(self._names) + i
            elif each.width_bytes is not None:
                value = 0  # from memory, or an atomic's former value
            elif _copies(each):
                value |= marks
            elif each.opcode in _UNPACKING:
                value |= (loads | unpacked) << len(self._names) + len(self._code)
            for register in each.written:
                registers.write(register, value, each.guard)
            registers.forget(each.predicates_written)
        return registers.marks

    def _overwritten(self, first: int) -> set[int]:
        """Registers that a function called may write; of those it calls in turn too."""
        written: set[int] = set()
        waiting, seen = [self._block_at[first]], set[int]()
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            for i in self._blocks[number]:
                written.update(self._code[i].written)
                target = self._code[i].target
                if self._code[i].opcode == "CALL" and target is not None:
                    waiting.append(self._block_at[self._index[target]])
            waiting += self._successors(self._blocks[number], together=False)
        return written


class _Registers:
    """Marks that each register may carry, within a block; under a guard, what was written under it alone counts."""

    def __init__(self, marks: list[int]) -> None:
        self.marks = marks
        self._guarded: dict[int, dict[int, int]] = defaultdict(dict)

    def read(self, register: int, guard: int) -> int:
        return self._guarded[guard].get(register, self.marks[register])

    def write(self, register: int, marks: int, guard: int) -> None:
        opposite = self._guarded[guard ^ _NEGATED].get(register)
        for other, held in self._guarded.items():
            if other != guard ^ _NEGATED:
                held.pop(register, None)
        if guard == ALWAYS:
            self.marks[register] = marks
        else:
            self._guarded[guard][register] = marks
            self.marks[register] = marks | (self.marks[register] if opposite is None else opposite)

    def forget(self, predicates: Iterable[int]) -> None:
        """These predicates have a new value."""
        for predicate in predicates:
            self._guarded.pop(predicate, None)
            self._guarded.pop(predicate | _NEGATED, None)


def _copies(each: Instruction) -> bool:
    """Whether it moves a register as it is, which compilers also write as a product with zero, plus the register."""
    return each.opcode == "MOV" or (each.opcode == "IMAD" and each.bits >> 24 & 255 == ZERO)


def _bits(marks: int) -> Iterable[int]:
    while marks:
        lowest = marks & -marks
        yield lowest.bit_length() - 1
        marks ^= lowest


def _connected(sets: Iterable[set[int]]) -> list[set[int]]:
    """The sets joined where they meet."""
    found: list[set[int]] = []
    for each in sets:
        meeting = [other for other in found if other & each]
        found = [other for other in found if not other & each]
        found.append(each.union(*meeting))
    return found


def _reached(starts: Iterable[int], following: Mapping[int, Iterable[int]]) -> set[int]:
    reached: set[int] = set()
    waiting = list(starts)
    while waiting:
        each = waiting.pop()
        if each not in reached:
            reached.add(each)
            waiting += following[each]
    return reached


def _loops(following: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Header -> blocks of each natural loop: of edges to a block that every path from the kernel's begin passes."""
    reached = sorted(_reached([0], dict(enumerate(following))))
    before: dict[int, set[int]] = {block: set() for block in reached}
    for block in reached:
        for each in following[block]:
            before[each].add(block)
    dominators = {block: set(reached) for block in reached} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for block in reached[1:]:
            new = {block} | set.intersection(*(dominators[each] for each in before[block]))
            if new != dominators[block]:
                dominators[block], changed = new, True
    loops: dict[int, set[int]] = {}
    for block in reached:
        for header in following[block]:
            if header in dominators[block]:
                body = {header} | _reached([block], {**before, header: set()})
                loops[header] = loops.get(header, set()) | body
    return loops
