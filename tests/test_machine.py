"""Memory, lanes and control of the machine: what right code does with them, and how wrong code shows."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from assembly import (
    EXIT,
    RZ,
    const,
    instruction,
    lanes,
    load_words,
    predicate_to_register,
    prologue,
    run,
    store_words,
)

from tuner.errors import LaunchFailed, TrialTimeout

M32 = 0xFFFFFFFF
NOTHING = np.zeros(32, np.uint32)
THREADS = np.arange(32, dtype=np.uint32)
SYNC = instruction(0xB1D)


def branch(opcode: int, by: int, **fields: int) -> int:
    """To the instruction `by` places on, from this one."""
    return instruction(opcode, **fields) | ((by - 1) * 4 & (1 << 48) - 1) << 34


# ---- memory ---------------------------------------------------------------------------------------------------------
WIDTHS = [(0, 1, False), (1, 1, True), (2, 2, False), (3, 2, True), (4, 4, False)]


@pytest.mark.parametrize("space_of", ["global", "shared", "local"])
@pytest.mark.parametrize(("kind", "size", "sign"), WIDTHS)
def test_each_width_is_stored_and_read_back_with_its_sign(space_of: str, kind: int, size: int, sign: bool) -> None:
    given = np.random.default_rng(kind).integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32)
    four = instruction(0x825, d=20, a=0, imm=4, c=RZ, sign=1)
    if space_of == "global":
        ends = [store_words(8, 1, type=kind), instruction(0x381, d=16, a=4, offset=128, type=kind, order=1, scope=3)]
    elif space_of == "shared":
        ends = [four, instruction(0x388, b=8, a=20, type=kind), instruction(0x984, d=16, a=20, type=kind)]
    else:
        ends = [instruction(0x387, b=8, a=RZ, offset=8, type=kind), instruction(0x983, d=16, a=RZ, offset=8, type=kind)]
    code = [*prologue(), load_words(8, 0), *ends, store_words(16, 0), EXIT]
    found = run(code, given, 64, shared=128, local_bytes=16)[:32]
    part = given.astype(np.int64) & (1 << 8 * size) - 1
    told = np.where(part >> (8 * size - 1) & 1, part - (1 << 8 * size), part) if sign else part
    assert (found == (told & M32).astype(np.uint32)).all()


@pytest.mark.parametrize(("kind", "words"), [(5, 2), (6, 4)])
def test_wide_accesses_move_registers_side_by_side(kind: int, words: int) -> None:
    given = np.arange(32 * words, dtype=np.uint32) * 0x01010101
    where = [instruction(0x825, d=2 * i, a=0, imm=4 * words, c=12 + 2 * i, sign=1) for i in (1, 2)]
    bases = [const(0xA02, 0x160 // 4 + i, d=14 + i) for i in range(4)]
    shared = instruction(0x825, d=30, a=0, imm=4 * words, c=RZ, sign=1)
    code = [
        *(prologue()[:1] + bases + where + [shared]),
        instruction(0x381, d=8, a=2, type=kind, order=1, scope=3),
        instruction(0x388, b=8, a=30, type=kind),
        instruction(0x984, d=20, a=30, type=kind),
        instruction(0x386, b=20, a=4, type=kind, order=1, scope=3),
        EXIT,
    ]
    assert (run(code, given, 32 * words, shared=512) == given).all()


def test_a_constant_is_read_by_an_index() -> None:
    code = [instruction(0xB82, d=16, a=8, type=4) | 0x160 << 38, instruction(0xB82, d=17, a=8, type=4) | 0x164 << 38]
    low, high = lanes(code, NOTHING + 8, results=2)
    low_in, _ = lanes([instruction(0xB82, d=16, a=8, type=4) | 0x160 << 38] * 2, NOTHING, results=2)
    assert len({int(low[0]), int(high[0]), int(low_in[0])}) == 3
    assert (low == low[0]).all()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (load_words(8, 1), r"illegal read of 4 bytes at IN \(an input\), byte 128 of 128"),
        (store_words(8, -1), r"illegal write of 4 bytes at SLOTS, byte -128 of 128"),
        (instruction(0x386, b=8, a=2, type=4, order=1, scope=3), r"illegal write at IN \(an input\)"),
        (instruction(0x381, d=8, a=2, offset=2, type=4, order=1, scope=3), "misaligned read of 4 bytes"),
        (instruction(0x984, d=8, a=RZ, offset=64, type=4), "illegal read of 4 bytes at shared memory, byte 64 of 64"),
        (instruction(0x983, d=8, a=RZ, offset=16, type=4), "illegal read at byte 16 of a thread's 8 of local memory"),
        (instruction(0x381, d=8, a=RZ, type=4, order=1, scope=3), "a null pointer"),
        (instruction(0x919, d=8, kind=0x50), "special register 0x50 is not known"),
        (branch(0x947, 100), "a jump out of the kernel"),
    ],
)
def test_a_fault_is_told_with_block_thread_and_place(what: int, message: str) -> None:
    with pytest.raises(LaunchFailed, match=rf"kernel voltune_k, block \(0,0\), thread \d+, pc 0x.*{message}"):
        run([*prologue(), what, store_words(8, 0), EXIT], NOTHING, 32, shared=64, local_bytes=8)


ATOMIC: dict[int, Callable[[int, int], int]] = {
    0: lambda old, x: old + x,
    1: min,
    2: max,
    3: lambda old, x: 0 if old >= x else old + 1,
    4: lambda old, x: x if old == 0 or old > x else old - 1,
    5: lambda old, x: old & x,
    6: lambda old, x: old | x,
    7: lambda old, x: old ^ x,
    8: lambda old, x: x,
}


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ATOMIC)
def test_atomics_take_lanes_one_after_another(kind: int, shared: bool, order: int) -> None:
    given = np.random.default_rng(kind).integers(0, 9, 32, dtype=np.uint32)
    place = [const(0xA02, 0x160 // 4 + 2, d=20), const(0xA02, 0x160 // 4 + 3, d=21)]
    if shared:
        begin = [instruction(0x388, b=RZ, a=RZ, type=4), instruction(0x38C, d=16, a=RZ, b=8, kind=kind)]
        end = [instruction(0x984, d=17, a=RZ, type=4)]
    else:
        scope = {"order": 2, "scope": 2}
        begin = [instruction(0x386, b=RZ, a=20, type=4, order=1, scope=3)]
        begin += [instruction(0x3A8, d=16, a=20, b=8, kind=kind, **scope)]
        end = [instruction(0x381, d=17, a=20, type=4, **scope)]
    code = [*prologue(), *place, load_words(8, 0), *begin, *end, store_words(16, 1), store_words(17, 2), EXIT]
    found = run(code, given, 96, shared=16, order=order)
    value, olds = 0, [0] * 32
    for lane in reversed(range(32)) if order else range(32):
        olds[lane] = value
        value = ATOMIC[kind](value, int(given[lane])) & M32
    assert found[32:64].tolist() == olds
    assert (found[64:] == value).all()


def test_compare_and_swap_and_reductions() -> None:
    scope = {"order": 2, "scope": 2}
    place = [const(0xA02, 0x160 // 4 + 2, d=20), const(0xA02, 0x160 // 4 + 3, d=21)]
    clear = instruction(0x386, b=RZ, a=20, type=4, order=2, scope=2)
    swap = [instruction(0x810, d=9, a=8, imm=1, c=RZ), instruction(0x3A9, d=16, a=20, b=8, c=9, type=0, **scope)]
    code = [*prologue(), *place, load_words(8, 0), clear, *swap, store_words(16, 1), EXIT]
    found = run(code, THREADS, 64)
    assert found[0] == 32  # lane n finds n and leaves n + 1
    assert found[32:].tolist() == list(range(32))
    code = [*prologue(), *place, load_words(8, 0), clear, instruction(0x98E, a=20, b=8, kind=0, **scope), EXIT]
    assert run(code, THREADS, 64)[0] == sum(range(32))
    shared = [
        instruction(0x388, b=RZ, a=RZ, type=4),
        instruction(0x810, d=9, a=8, imm=1, c=RZ),
        instruction(0x38D, d=16, a=RZ, b=8, c=9),
    ]
    code = [*prologue(), load_words(8, 0), *shared, store_words(16, 1), EXIT]
    assert run(code, THREADS, 64, shared=16)[32:].tolist() == list(range(32))


# ---- lanes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "clamp"), [(0, 31), (1, 0), (2, 31), (3, 31)])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles_read_the_lane_that_the_programming_guide_says(kind: int, clamp: int, width: int) -> None:
    given = np.random.default_rng(1).integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32)
    for by in (0, 1, 5, 8, 16, 31):
        held = NOTHING + ((32 - width) << 8 | clamp)
        code = [instruction(0x389, d=16, a=8, b=9, c=10, kind=kind, pd=0), predicate_to_register(0, 17)]
        found, inside = lanes(code, given, NOTHING + by, held, results=2)
        for lane in range(32):
            begin = lane // width * width
            source = {0: begin + by % width, 1: lane - by, 2: lane + by, 3: lane ^ by}[kind]
            within = begin <= source < begin + width if kind != 3 else source < begin + width
            assert found[lane] == given[source if within else lane], (kind, by, lane)
            assert inside[lane] == within


def test_votes_and_matches_see_the_lanes_that_take_part() -> None:
    given = (THREADS % 5).astype(np.uint32)
    ask = instruction(0x80C, a=8, imm=2, compare=1, sign=0, pd=0)
    half = instruction(0x80C, a=0, imm=16, compare=1, sign=0, pd=1)
    told = sum(1 << i for i in range(16) if i % 5 < 2)
    code = [ask, half, instruction(0x806, d=16, ps=0, kind=1, pd=2, guard=1), predicate_to_register(2, 17)]
    ballot, some = lanes(code, given, results=2)
    assert (ballot[:16] == told).all()
    assert (some[:16] == 1).all()
    for kind, answer in ((0, 0), (1, 1), (2, 0)):
        code = [ask, instruction(0x806, d=17, ps=0, kind=kind, pd=2), predicate_to_register(2, 16)]
        assert (lanes(code, given)[0] == answer).all()
    (same,) = lanes([instruction(0x3A1, d=16, a=8, kind=1)], given)
    assert same.tolist() == [sum(1 << j for j in range(32) if j % 5 == i % 5) for i in range(32)]


def test_special_registers() -> None:
    masks = {0x38: lambda i: 1 << i, 0x39: lambda i: (1 << i) - 1, 0x3A: lambda i: (2 << i) - 1}
    masks |= {0x3B: lambda i: M32 - (2 << i) + 1, 0x3C: lambda i: M32 - (1 << i) + 1, 0x00: lambda i: i}
    for kind, told in masks.items():
        (found,) = lanes([instruction(0x919, d=16, kind=kind)], NOTHING)
        assert found.tolist() == [told(i) & M32 for i in range(32)]
    (zero,) = lanes([instruction(0x805, d=16, high=1)], NOTHING)
    assert not zero.any()
    code = [*prologue(), instruction(0x919, d=8, kind=0x25), instruction(0x225, d=12, a=8, b=8, c=RZ), EXIT]
    block = [const(0xA02, 0x160 // 4 + 2, d=20), const(0xA02, 0x160 // 4 + 3, d=21)]
    at = instruction(0x825, d=4, a=8, imm=4, c=20, sign=1)
    code = [*code[:-2], *block, at, instruction(0x386, b=8, a=4, type=4, order=1, scope=3), EXIT]
    assert run(code, NOTHING, 4, ctas=4).tolist() == [0, 1, 2, 3]


# ---- control --------------------------------------------------------------------------------------------------------
ALL = 0xFFFFFFFF
WARPSYNC = instruction(0x948, imm=ALL) | 7 << 87


@pytest.mark.parametrize("order", range(4))
def test_threads_that_parted_meet_where_they_must(order: int) -> None:
    """Both ways of a branch write; after BSYNC, or WARPSYNC, a vote sees all of them."""
    less = instruction(0x80C, a=0, imm=9, compare=1, sign=0, pd=0)
    arms = [
        branch(0x947, 3, guard=0),
        instruction(0x802, d=16, imm=1),
        branch(0x947, 2),
        instruction(0x802, d=16, imm=2),
    ]
    vote = [instruction(0x806, d=17, ps=7, kind=1), store_words(16, 0), store_words(17, 1), EXIT]
    begin = [*prologue(), less]
    for code in (
        [*begin, branch(0x945, 5, lut=3), *arms, instruction(0x941, lut=3), *vote],
        [*begin, *arms, WARPSYNC, *vote],
        [*begin, *arms, instruction(0x802, d=20, imm=-1), instruction(0x348, b=20), *vote],
    ):
        found = run(code, NOTHING, 64, order=order)
        assert found[:32].tolist() == [2] * 9 + [1] * 23
        assert (found[32:] == ALL).all()


@pytest.mark.parametrize("order", range(4))
def test_threads_may_meet_in_groups_each_by_its_own_mask(order: int) -> None:
    """As after a match: nine lanes meet, and the others; then all of them."""
    less = instruction(0x80C, a=0, imm=9, compare=1, sign=0, pd=0)
    masks = [instruction(0x802, d=20, imm=0x1FF, guard=0), instruction(0x802, d=20, imm=-0x200, guard=8)]
    vote = [instruction(0x806, d=17, ps=7, kind=1), store_words(20, 0), store_words(17, 1), EXIT]
    found = run([*prologue(), less, *masks, instruction(0x348, b=20), WARPSYNC, *vote], NOTHING, 64, order=order)
    assert found[:32].tolist() == [0x1FF] * 9 + [0xFFFFFE00] * 23
    assert (found[32:] == ALL).all()


def test_a_loop_whose_threads_leave_at_different_turns_and_break_or_exit() -> None:
    """Thread n turns n times; BREAK lets those that left wait no longer, and EXIT those that ended."""
    turn = [
        instruction(0x20C, a=0, b=8, compare=3, sign=0, pd=0),  # thread <= turns
        branch(0x947, 4, guard=0),
        instruction(0x810, d=8, a=8, imm=1, c=RZ),
        instruction(0x918),
        branch(0x947, -4),
    ]
    loop = [branch(0x945, 6, lut=0), *turn, instruction(0x941, lut=0)]
    code = [*prologue(), instruction(0x202, d=8, b=RZ), *loop, instruction(0x806, d=9, ps=7, kind=1)]
    found = run([*code, store_words(8, 0), store_words(9, 1), EXIT], NOTHING, 64)
    assert found[:32].tolist() == list(range(32))
    assert (found[32:] == ALL).all()
    some = instruction(0x80C, a=0, imm=4, compare=1, sign=0, pd=1)
    for gone in (instruction(0x94D, guard=1), None):
        leave = [gone] if gone else [instruction(0x942, lut=0, guard=1), branch(0x947, 3, guard=1)]
        rest = [instruction(0x802, d=16, imm=7), instruction(0x941, lut=0), store_words(16, 0), EXIT]
        code = [*prologue(), some, instruction(0x202, d=16, b=RZ), branch(0x945, len(leave) + 2, lut=0), *leave, *rest]
        found = run(code, NOTHING, 32)
        assert found[4:].tolist() == [7] * 28
        assert (found[:4] == (ALL if gone else 0)).all()


def test_a_convergence_barrier_is_kept_in_a_register_meanwhile() -> None:
    code = [
        *prologue(),
        branch(0x945, 5, lut=0),
        instruction(0x355, d=20, lut=0, kind=1),
        instruction(0x355, d=21, lut=0),
        instruction(0x356, b=20, lut=0),
        instruction(0x355, d=22, lut=0),
        instruction(0x941, lut=0),
        *(store_words(20 + i, i) for i in range(3)),
        EXIT,
    ]
    found = run(code, NOTHING, 96)
    assert (found[:32] == ALL).all()
    assert (found[32:64] == 0).all()
    assert (found[64:] == ALL).all()


def test_a_call_returns_to_the_address_in_a_register() -> None:
    begin = prologue()
    call = [
        instruction(0x802, d=20, imm=16 * (len(begin) + 3)),
        instruction(0x202, d=21, b=RZ),
        branch(0x944, 4, kind=2),
        store_words(16, 0),
        EXIT,
        instruction(0x918),
        instruction(0x810, d=16, a=0, imm=100, c=RZ),
    ]
    back = branch(0x950, -(len(begin) + len(call)), a=20, kind=2)
    assert run([*begin, *call, back], NOTHING, 32).tolist() == list(range(100, 132))


@pytest.mark.parametrize("apart", [False, True])
def test_the_two_branches_that_ask_whether_a_warp_is_together(apart: bool) -> None:
    """In both, the thread writes 1 where it did not jump."""
    for kind, jumps in ((2, apart), (3, not apart)):
        part = branch(0x947, 4, guard=0) if apart else instruction(0x918)
        jump = [branch(0x947, 2, kind=kind), instruction(0x802, d=16, imm=1), store_words(16, 0), EXIT]
        less = instruction(0x80C, a=0, imm=4, compare=1, sign=0, pd=0)
        found = run([*prologue(), less, instruction(0x202, d=16, b=RZ), part, *jump, EXIT], NOTHING, 32)
        assert (found[8:] == (0 if jumps else 1)).all()


def test_what_never_ends_is_stopped_and_what_cannot_go_on_is_told() -> None:
    with pytest.raises(TrialTimeout, match=r"had not ended after 0\.2 s"):
        run([branch(0x947, 0), EXIT], NOTHING, 32, timeout_s=0.2)
    half = instruction(0x80C, a=0, imm=32, compare=1, sign=0, pd=0)
    stuck = [branch(0x945, 2, lut=0), instruction(0xB1D, guard=0), branch(0x947, 1), EXIT]
    apart = [branch(0x947, 2, guard=0), instruction(0x941, lut=1), SYNC, EXIT]
    assert run([*prologue(), half, *stuck], NOTHING, 32, threads=64) is not None  # the others have left
    assert run([*prologue(), half, *apart], NOTHING, 32, threads=64) is not None
    lost = [half, branch(0x947, 2, guard=8), WARPSYNC, instruction(0x948, imm=0xFFFF)]
    with pytest.raises(LaunchFailed, match="lanes meet with the mask 0x0000ffff, which lacks this one"):
        run([*prologue(), *lost, EXIT], NOTHING, 32, threads=32)


def test_fences_prefetches_and_pauses_change_no_register() -> None:
    idle = [instruction(0x992, order=1, scope=2), instruction(0x9AB), instruction(0x946), instruction(0x95D, kind=0)]
    idle += [instruction(0x98F, a=2, kind=4), instruction(0x918)]
    (found,) = lanes([instruction(0x202, d=16, b=8), *idle], THREADS)
    assert (found == THREADS).all()


# ---- what memory may do ---------------------------------------------------------------------------------------------
def handed_over(between: Sequence[int], strong: bool) -> list[int]:
    """CTA 0 stores a value and then raises a flag; CTA 1 awaits the flag and passes on what it finds of the value."""
    base = [const(0xA02, 0x160 // 4 + 2, d=20), const(0xA02, 0x160 // 4 + 3, d=21)]
    scope = {"type": 4, "order": 2, "scope": 2}
    plain = scope if strong else {"type": 4, "order": 1, "scope": 3}
    second = instruction(0x80C, a=8, imm=1, compare=2, sign=0, pd=0)
    sends = [instruction(0x802, d=9, imm=5), instruction(0x386, b=9, a=20, **plain), *between]
    sends += [instruction(0x386, b=9, a=20, offset=4, **scope), EXIT]
    await_ = [
        instruction(0x381, d=10, a=20, offset=4, **scope),
        instruction(0x80C, a=10, imm=5, compare=5, sign=0, pd=1),
        branch(0x947, -2, guard=1),
        instruction(0x381, d=11, a=20, **scope),
        instruction(0x386, b=11, a=20, offset=8, **scope),
        EXIT,
    ]
    begin = [instruction(0x919, d=8, kind=0x25), *base, second, branch(0x947, len(sends) + 1, guard=0)]
    return [*begin, *sends, *await_]


@pytest.mark.parametrize("order", [0, 2, 3])
def test_a_plain_store_is_seen_by_others_after_a_fence_alone(order: int) -> None:
    fence = [instruction(0x992, order=1, scope=2)]
    narrow = [instruction(0x992, order=1, scope=0)]
    for between, strong, seen in (((), False, ALL), (narrow, False, ALL), (fence, False, 5), ((), True, 5)):
        found = run(handed_over(between, strong), NOTHING, 4, threads=1, ctas=2, order=order)
        assert found[2] == seen
        assert found[0] == 5  # when the launch is over


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (instruction(0x388, b=0, a=RZ, type=4), instruction(0x984, d=8, a=RZ, type=4)),
        (instruction(0x984, d=8, a=RZ, type=4), instruction(0x388, b=0, a=RZ, type=4)),
        (instruction(0x388, b=0, a=RZ, type=4), instruction(0x388, b=0, a=RZ, type=4)),
        (instruction(0x38C, d=RZ, a=RZ, b=0), instruction(0x984, d=8, a=RZ, type=4)),
    ],
    ids=["read after write", "write after read", "write after write", "read after an atomic"],
)
def test_shared_memory_used_by_two_warps_wants_a_barrier_between(first: int, second: int) -> None:
    one, other = (instruction(0x80C, a=0, imm=place, compare=2, sign=0, pd=p) for p, place in ((0, 0), (1, 40)))
    guarded = [first & ~(15 << 12), second & ~(15 << 12) | 1 << 12]
    code = [*prologue(), one, other, guarded[0], SYNC, guarded[1], EXIT]
    for order in range(4):
        run(code, NOTHING, 64, threads=64, shared=64, order=order)
        with pytest.raises(LaunchFailed, match="shared memory, byte 0 of 64, used by"):
            run([each for each in code if each != SYNC], NOTHING, 64, threads=64, shared=64, order=order)
    both = instruction(0x38C, d=RZ, a=RZ, b=0)
    run([*prologue(), both, EXIT], NOTHING, 64, threads=64, shared=64)


def test_a_global_word_that_another_warp_stored_wants_a_barrier_too() -> None:
    word = [const(0xA02, 0x160 // 4 + 2, d=20), const(0xA02, 0x160 // 4 + 3, d=21)]
    one, other = (instruction(0x80C, a=0, imm=place, compare=2, sign=0, pd=p) for p, place in ((0, 0), (1, 40)))
    put = instruction(0x386, b=0, a=20, type=4, order=1, scope=3, guard=0)
    get = instruction(0x381, d=8, a=20, type=4, order=1, scope=3, guard=1)
    code = [*prologue(), *word, one, other, put, SYNC, get, EXIT]
    run(code, NOTHING, 64, threads=64)
    with pytest.raises(LaunchFailed, match="stored by warp 0 since the last barrier"):
        run([each for each in code if each != SYNC], NOTHING, 64, threads=64)
