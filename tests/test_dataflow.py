"""Which pointer a load goes through, and the code around it, on programs assembled here and worked out by hand."""

from collections.abc import Callable

from tuner import sass
from tuner.dataflow import Dataflow, Stretch
from tuner.sass import Instruction

POINTERS = {0: "W", 8: "S", 16: "X"}  # parameters from c[0x0][0x160] on
W, S = 0x160, 0x168
Line = Callable[[int], int]  # pc -> bits


def op(code: int, *, d: int = 255, a: int = 255, b: int = 255, c: int = 255, guard: int = 7, writes: int = 7) -> Line:
    """An instruction of these fields; `writes` is the predicate it writes."""
    fields = guard << 12 | d << 16 | a << 24 | b << 32 | c << 64 | writes << 81 | 7 << 84 | 7 << 87
    return lambda pc: code | fields


def constant(code: int, offset: int, *, d: int, a: int = 255, c: int = 255) -> Line:
    return lambda pc: op(code, d=d, a=a, b=0, c=c)(pc) | offset // 4 << 40


def branch(code: int, place: int, *, guard: int = 7, kind: int = 0) -> Line:
    """To the instruction `place`."""
    return lambda pc: op(code, b=0, guard=guard)(pc) & ~(0xFF << 64 | 0x7F << 80) | to(place * 16 - pc - 16, kind)


def to(distance: int, kind: int) -> int:
    return (distance // 4 & (1 << 48) - 1) << 34 | kind << 32


def load(d: int, a: int, *, guard: int = 7, kind: int = 4) -> Line:
    """LDG of 32 bits, or with kind 6 of 128."""
    return lambda pc: op(0x381, d=d, a=a, b=0, guard=guard)(pc) & ~(7 << 73) | kind << 73


def pointer(d: int, offset: int) -> list[Line]:
    """The parameter into d and d + 1."""
    return [constant(0xA02, offset, d=d), constant(0xA02, offset + 4, d=d + 1)]


def add(d: int, a: int, b: int) -> Line:
    return op(0x210, d=d, a=a, b=b)


def compare(predicate: int) -> Line:
    return op(0x20C, a=1, b=2, writes=predicate)


def use(register: int) -> Line:
    return op(0x212, d=100, a=register, b=255)


NOP, EXIT = op(0x918), op(0x94D)
IF_PARTED = 2


def assembled(*parts: Line | list[Line]) -> tuple[Instruction, ...]:
    lines = [line for part in parts for line in (part if isinstance(part, list) else [part])]
    return tuple(sass.decode(line(16 * i), 16 * i) for i, line in enumerate(lines))


def operands(*parts: Line | list[Line]) -> list[set[str]]:
    return [set(each.operands) for each in Dataflow(assembled(*parts, EXIT), POINTERS).loads]


def stretches(*parts: Line | list[Line]) -> list[Stretch]:
    return list(Dataflow(assembled(*parts, EXIT), POINTERS).stretches("W"))


def test_a_load_belongs_to_the_pointer_that_its_address_was_made_from() -> None:
    # W + R8, then S + 16 * R8 by a wide multiply-add with the constant as addend
    assert operands(pointer(4, W), add(6, 4, 8), add(7, 5, 255), load(10, 6)) == [{"W"}]
    assert operands(constant(0x625, S, d=6, a=8, c=9), load(10, 6)) == [{"S"}]


def test_an_index_that_was_loaded_does_not_carry_its_pointer_on() -> None:
    found = operands(pointer(4, W), load(8, 4), pointer(6, S), add(10, 6, 8), add(11, 7, 255), load(12, 10))
    assert found == [{"W"}, {"S"}]


def test_a_wide_multiplys_factor_is_one_register_beside_a_pointer() -> None:
    """R9 is the factor; R10 holds the other pointer."""
    assert operands(pointer(10, W), constant(0x625, S, d=6, a=8, c=9), load(12, 6)) == [{"S"}]


def test_an_address_that_may_be_either_pointer_shows_both() -> None:
    either = [*pointer(4, W), compare(0), branch(0x947, 6, guard=0), *pointer(4, S)]
    assert operands(either, load(10, 4)) == [{"W", "S"}]


def test_under_one_guard_only_what_was_written_under_it_counts() -> None:
    other = [op(0x202, d=4, b=6, guard=0), op(0x202, d=5, b=7, guard=0)]
    begin = [*pointer(4, W), *pointer(6, S), compare(0)]
    assert operands(begin, other, load(10, 4, guard=0)) == [{"S"}]
    assert operands(begin, other, load(10, 4)) == [{"W", "S"}]
    assert operands(begin, other, load(10, 4, guard=8)) == [{"W", "S"}]  # a superset: nothing says it is W alone
    # and no longer once the predicate has another value
    assert operands(begin, other, compare(0), load(10, 4, guard=0)) == [{"W", "S"}]


def test_two_opposite_guards_write_a_register_for_good() -> None:
    first = [op(0x202, d=register, b=register + 2, guard=0) for register in (4, 5)]
    second = [op(0x202, d=register, b=register + 2, guard=8) for register in (4, 5)]
    assert operands(pointer(4, W), pointer(6, S), compare(0), first, second, load(10, 4)) == [{"S"}]


def test_an_address_through_memory_is_no_ones() -> None:
    store = lambda pc: op(0x387, a=1, b=4)(pc) & ~(7 << 73) | 4 << 73  # noqa: E731
    reload = lambda pc: op(0x983, d=4, a=1)(pc) & ~(7 << 73) | 4 << 73  # noqa: E731
    assert operands(pointer(4, W), op(0x802, d=5), store, reload, load(10, 4)) == [set()]


def test_a_call_takes_the_marks_of_what_the_function_writes_and_no_others() -> None:
    body = [branch(0x944, 6), load(10, 4), EXIT, op(0x802, d=8), op(0x950, a=20)]
    assert operands(pointer(4, W), body) == [{"W"}]
    body[3] = op(0x802, d=4)
    assert operands(pointer(4, W), NOP, branch(0x944, 6), load(10, 4), EXIT, op(0x802, d=4), op(0x950, a=20)) == [{"W"}]
    both = [branch(0x944, 5), load(10, 4), EXIT, op(0x802, d=4), op(0x802, d=5), op(0x950, a=20)]
    assert operands(pointer(4, W), both) == [set()]


def test_code_that_reads_and_uses_in_turn_is_a_loop() -> None:
    """A ring: one load before, and in each turn a use and the next load."""
    (found,) = stretches(
        pointer(4, W),  # 0, 1
        load(12, 4, kind=6),  # 2
        use(12),  # 3: the loop
        NOP,
        load(12, 4, kind=6),
        compare(0),
        branch(0x947, 3, guard=0),  # 7
        use(12),
    )
    assert found.loop
    assert [each.pc // 16 for each in found.code] == [3, 4, 5, 6, 7]
    assert found.nbytes == 16


def test_code_without_such_a_loop_is_a_stretch_of_whole_blocks_from_first_load_to_last_use() -> None:
    (found,) = stretches(
        *(pointer(4, W), compare(0), branch(0x947, 5, guard=0), NOP),  # 0-4
        load(12, 4, kind=6),  # 5: a block's begin
        load(16, 4, kind=6),
        compare(1),  # 7: a loop that stages something else, in a block of its own
        branch(0x947, 7, guard=1),
        use(12),  # 9
        use(16),
        branch(0x947, 5, guard=0),  # 11: the loop over passes, which holds the whole stretch
        NOP,
    )
    assert not found.loop
    assert [each.pc // 16 for each in found.code] == [5, 6, 7, 8, 9, 10, 11]
    assert found.nbytes == 32


def test_alternatives_that_share_a_load_are_stretches_of_their_own() -> None:
    """A load before the branch serves both sides."""
    first, second = stretches(
        *(pointer(4, W), load(12, 4, kind=6), compare(0), branch(0x947, 8, guard=0)),  # 0-4
        *(use(12), NOP, branch(0x947, 11)),  # 5-7
        *(load(16, 4, kind=6), use(12), use(16)),  # 8-10
    )
    assert [each.pc // 16 for each in first.code] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [each.pc // 16 for each in second.code] == [0, 1, 2, 3, 4, 8, 9, 10]
    assert (first.nbytes, second.nbytes) == (16, 32)


def test_what_only_parted_threads_come_through_is_not_counted() -> None:
    (found,) = stretches(
        *(pointer(4, W), load(12, 4, kind=6), branch(0x947, 6, kind=IF_PARTED)),  # 0-3
        *(use(12), EXIT),  # 4, 5
        *(use(12), branch(0x947, 4)),  # 6, 7
    )
    assert [each.pc // 16 for each in found.code] == [0, 1, 2, 3, 4, 5]
