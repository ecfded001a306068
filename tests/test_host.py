"""The CPU executor on small kernels: CUDA's semantics, every kind of fault, memory, the cache."""

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tuner import contract, host, memory, space
from tuner.errors import BuildFailed, LaunchFailed, MissingTool, RequestError, TrialTimeout
from tuner.plan import Buffer, Launch, Linear, Outputs, Plan
from tuner.render import Source

CONTRACT = contract.load("qwen38-tp4")
FULL = "0xffffffffu"


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLTUNE_CACHE_DIR", str(shared_cache))


def run(
    body: str,
    inputs: Mapping[str, np.ndarray] | None = None,
    out: tuple[str, int] = ("int32", 32),
    *,
    grid: tuple[int, int] = (1, 1),
    block: int = 32,
    shared: int = 0,
    order: int = 0,
    before: str = "",
    timeout_s: float = 60.0,
) -> np.ndarray:
    """Runs one kernel whose parameters are the inputs and `out`, by those names; `body` starts at line 3."""
    inputs = inputs or {}
    types = {
        "int32": "int",
        "uint32": "unsigned",
        "float32": "float",
        "uint8": "unsigned char",
        "uint64": "unsigned long long",
    }
    parameters = [f"const {types[array.dtype.name]}* {name}" for name, array in inputs.items()] + [
        f"{types[out[0]]}* out"
    ]
    head = f'extern "C" __global__ void voltune_toy({", ".join(parameters)}) {{'
    text = f"{before}\n{head}\n{body}\n}}\n"
    buffers = [Buffer(name, a.dtype.name, tuple(map(Linear, a.shape)), "input") for name, a in inputs.items()]
    buffers.append(Buffer("out", out[0], (Linear(out[1]),), "output"))
    launch = Launch(
        stage="w13",
        template="toy",
        grid=(Linear(grid[0]), Linear(grid[1])),
        block=block,
        shared=Linear(shared),
        arguments=(*inputs, "out"),
        constants={},
    )
    plan = Plan("fused", CONTRACT, space.default(CONTRACT), (launch,), tuple(buffers))
    sources = {"w13": Source("voltune_toy", "w13", text)}
    return host.execute(plan, sources, inputs, 1, order=order, timeout_s=timeout_s).buffers["out"]


def fault(body: str, *args: object, **kwargs: object) -> str:
    """The text of the LaunchFailed that a kernel ends in; a sound kernel still runs afterwards."""
    with pytest.raises(LaunchFailed) as caught:
        run(body, *args, **kwargs)  # type: ignore[arg-type]
    assert run("out[threadIdx.x] = threadIdx.x;").tolist() == list(range(32))
    return str(caught.value)


# ---- semantics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_vectors_of_ragged_sizes_are_added(count: int, order: int) -> None:
    a = np.arange(count, dtype=np.float32)
    b = np.linspace(-3, 5, count, dtype=np.float32)
    body = f"int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < {count}) out[i] = a[i] + b[i];"
    out = run(body, {"a": a, "b": b}, ("float32", count), grid=(-(-count // 64), 1), block=64, order=order)
    assert out.tobytes() == (a + b).tobytes()


def test_indices_and_sizes_are_those_of_the_launch() -> None:
    body = """
    int cta = blockIdx.y * gridDim.x + blockIdx.x;
    out[cta * blockDim.x + threadIdx.x] = blockIdx.x + 10 * blockIdx.y + 100 * threadIdx.x + 10000 * gridDim.y
      + 100000 * blockDim.x + threadIdx.y + threadIdx.z + blockIdx.z + blockDim.y + blockDim.z + gridDim.z - 3;"""
    out = run(body, out=("int32", 3 * 2 * 5), grid=(3, 2), block=5)
    assert out.tolist() == [x + 10 * y + 100 * t + 20000 + 500000 for y in range(2) for x in range(3) for t in range(5)]


REDUCTION = """
  float* part = static_cast<float*>(voltune_shared_arena());
  const int t = threadIdx.x;
  part[t] = a[blockIdx.x * 128 + t];
  {barrier}
  for (int half = 64; half > 0; half /= 2) {{
    if (t < half) part[t] += part[t + half];
    {barrier}
  }}
  if (t == 0) out[blockIdx.x] = part[0];"""


def reduction(order: int, barrier: str) -> np.ndarray:
    a = np.random.default_rng(5).standard_normal(7 * 128).astype(np.float32)
    return run(
        REDUCTION.format(barrier=barrier), {"a": a}, ("float32", 7), grid=(7, 1), block=128, shared=512, order=order
    )


def test_a_block_reduction_gives_the_same_bits_in_every_order() -> None:
    part = np.random.default_rng(5).standard_normal(7 * 128).astype(np.float32).reshape(7, 128)
    while part.shape[1] > 1:
        part = part[:, : part.shape[1] // 2] + part[:, part.shape[1] // 2 :]
    assert {reduction(order, "__syncthreads();").tobytes() for order in range(5)} == {part.tobytes()}


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_missing_barrier_is_told_in_every_order(order: int) -> None:
    assert reduction(order, "__syncthreads();").tobytes() == reduction(0, "__syncthreads();").tobytes()
    with pytest.raises(
        LaunchFailed, match=r"line \d+: (read|write) of shared memory, byte \d+ of 512, used by warp \d"
    ):
        reduction(order, "")


@pytest.mark.parametrize("order", [0, 1])
def test_a_barrier_missing_before_memory_is_used_again_is_told_in_every_order(order: int) -> None:
    body = """
    int* box = static_cast<int*>(voltune_shared_arena());
    int sum = 0;
    for (int round = 0; round < 4; ++round) {
      if (threadIdx.x == 40) *box = round;
      __syncthreads();
      sum += *box;
    }
    out[threadIdx.x] = sum;"""
    assert "shared memory, byte 0 of 16, used by warp" in fault(
        body, out=("int32", 64), block=64, shared=16, order=order
    )


@pytest.mark.parametrize("order", [0, 1])
def test_shared_memory_is_poison_at_the_start_of_every_block(order: int) -> None:
    body = """
    unsigned* words = static_cast<unsigned*>(voltune_shared_arena());
    out[blockIdx.x * 32 + threadIdx.x] = ~words[threadIdx.x];
    words[threadIdx.x] = 7;"""
    assert run(body, out=("uint32", 96), grid=(3, 1), shared=128, order=order).tolist() == [0] * 96


LANE = "const int t = threadIdx.x;"


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (f"__shfl_sync({FULL}, t * 3, 5)", [15] * 32),
        (f"__shfl_sync({FULL}, t, 35)", [3] * 32),
        (f"__shfl_sync({FULL}, t, 1, 8)", [1] * 8 + [9] * 8 + [17] * 8 + [25] * 8),
        (f"__shfl_sync({FULL}, t, (t + 1) % 32)", [*range(1, 32), 0]),
        (f"__shfl_xor_sync({FULL}, t, 16)", [*range(16, 32), *range(16)]),
        (
            f"__shfl_xor_sync({FULL}, t, 4, 4)",
            [t & ~4 for t in range(32)],
        ),
        (f"__shfl_up_sync({FULL}, t, 2)", [0, 1, *range(30)]),
        (f"__shfl_up_sync({FULL}, t, 1, 16)", [0, *range(15), 16, *range(16, 31)]),
        (f"__shfl_down_sync({FULL}, t, 3)", [*range(3, 32), 29, 30, 31]),
        (f"__shfl_down_sync({FULL}, t, 1, 16)", [*range(1, 16), 15, *range(17, 32), 31]),
        (f"(int)__shfl_sync({FULL}, (float)t / 4.0f, 10)", [2] * 32),
        (f"(int)__shfl_sync({FULL}, 0x80000000u + t, 31)", [-0x7FFFFFE1] * 32),
        (f"(int)__ballot_sync({FULL}, t % 3 == 0)", [0x49249249] * 32),
        (f"__any_sync({FULL}, t == 9)", [1] * 32),
        (f"__any_sync({FULL}, t > 31)", [0] * 32),
        (f"__all_sync({FULL}, t >= 0)", [1] * 32),
        (f"__all_sync({FULL}, t != 9)", [0] * 32),
        (f"(int)__match_any_sync({FULL}, t / 2)", [(3 << (t // 2 * 2)) - (t > 29) * 2**32 for t in range(32)]),
        (
            f"(int)__match_any_sync({FULL}, (unsigned)(t % 16))",
            [(0x10001 << t % 16) - (t % 16 > 14) * 2**32 for t in range(32)],
        ),
    ],
)
def test_warp_collectives_follow_the_programming_guide(call: str, expected: list[int], order: int) -> None:
    assert run(f"{LANE} int value = {call}; out[t] = value == -1 ? 12345 : value;", order=order).tolist() == expected


def test_lanes_of_disjoint_masks_meet_apart() -> None:
    body = f"""{LANE}
    if (t < 10) out[t] = __ballot_sync(0x3ffu, t & 1);
    else out[t] = __shfl_down_sync(0xfffffc00u, t, 1) + __popc(__ballot_sync(0xfffffc00u, 1));"""
    assert run(body).tolist() == [0x2AA] * 10 + [t + 1 + 22 for t in range(10, 31)] + [31 + 22]


def test_a_shuffle_from_a_lane_outside_the_mask_returns_poison() -> None:
    body = f"{LANE} if (t < 16) out[t] = __shfl_down_sync(0xffffu, t, 8) & 0xffff; else out[t] = 0;"
    assert run(body).tolist() == [*range(8, 16)] + [0xFFFF] * 8 + [0] * 16


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_warp_barrier_orders_shared_memory_between_lanes(order: int) -> None:
    body = f"""{LANE}
    int* box = static_cast<int*>(voltune_shared_arena());
    box[t] = t * t;
    __syncwarp();
    out[t] = box[31 - t];"""
    assert run(body, shared=128, order=order).tolist() == [(31 - t) ** 2 for t in range(32)]


def mma_m8n8k4(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f32 [32, 8]: what every lane holds after mma.m8n8k4.row.col.f32.f16.f16.f32, from f16 [32, 4] of A and of B and
    f32 [32, 8] of C; by PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type"."""
    d = np.empty_like(c)
    for first in (0, 4, 8, 12):  # computation n of four: lanes 4n..4n+3 and 16+4n..16+4n+3
        lanes = [*range(first, first + 4), *range(first + 16, first + 20)]
        whole_a, whole_b, whole_c = np.zeros((8, 4)), np.zeros((4, 8)), np.zeros((8, 8))
        places = {}
        for lane in lanes:
            outer = lane % 4 if lane < 16 else lane % 4 + 4
            for i in range(4):
                whole_a[outer, i] = a[lane, i]
                whole_b[i, outer] = b[lane, i]
            for i in range(8):
                x = (lane & 0b1) + (i & 0b10)
                places[lane, i] = (x if lane < 16 else x + 4, (i & 0b100) + (lane & 0b10) + (i & 0b1))
                whole_c[places[lane, i]] = c[lane, i]
        assert len(set(places.values())) == 64
        product = whole_a @ whole_b + whole_c
        for at, place in places.items():
            d[at] = product[place]
    return d


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_twin_of_mma_m8n8k4_has_the_fragments_of_the_ptx_isa(order: int) -> None:
    rng = np.random.default_rng(order)
    # A: any finite f16 below 16, subnormals too. B: quarters. So the sums of products are exact in float64.
    a = rng.integers(0, 0x4C00, (32, 4, 8), np.uint16) | (rng.integers(0, 2, (32, 4, 8), np.uint16) << np.uint16(15))
    b = (rng.integers(-32, 33, (32, 8)) / 4).astype(np.float16)
    c = rng.standard_normal((32, 4, 8)).astype(np.float32)
    body = f"""{LANE}
    unsigned pairs[4][4], row[4];
    float d[32];
    for (int i = 0; i < 16; ++i) pairs[i / 4][i % 4] = a[t * 16 + i];
    for (int i = 0; i < 4; ++i) row[i] = b[t * 4 + i];
    for (int i = 0; i < 32; ++i) d[i] = c[t * 32 + i];
    voltune_mma_m8n8k4(d, pairs, row);
    for (int i = 0; i < 32; ++i) out[t * 32 + i] = d[i];"""
    given = {"a": a.view(np.uint32).reshape(512), "b": b.view(np.uint32).reshape(128), "c": c.reshape(1024)}
    got = run(body, given, ("float32", 1024), order=order).reshape(32, 4, 8)
    halves = a.view(np.float16)
    for column in range(4):
        # Eight k are two of its four; the twin rounds once, after both.
        low = mma_m8n8k4(halves[:, column, :4], b[:, :4], np.zeros((32, 8)))
        want = mma_m8n8k4(halves[:, column, 4:], b[:, 4:], low + c[:, column])
        assert got[:, column].tobytes() == want.astype(np.float32).tobytes()


def test_bits_and_numbers_are_converted_and_counted_as_on_a_gpu() -> None:
    words = {
        "__popc(0xf0f00001u)": 9,
        "__ffs(0)": 0,
        "__ffs(0x50)": 5,
        "__clz(0)": 32,
        "__clz(1)": 31,
        "__clz(-1)": 0,
        "(int)__brev(0x1u)": -(2**31),
        "(int)__brev(0x12345678u)": 0x1E6A2C48,
        "__float_as_int(-2.0f)": -(2**30),
        "(int)__float_as_uint(1.0f)": 0x3F800000,
        "(int)__uint_as_float(0x40e00000u)": 7,
        "(int)__int_as_float(0x41000000)": 8,
        "min(3, -4)": -4,
        "max(3u, 4u)": 4,
        "(int)max(-3.5f, -2.5f)": -2,
        "(int)min(7.0f, __uint_as_float(0x7fc00000u))": 7,
        "(int)__fdiv_rn(9.0f, 2.0f)": 4,
        "(int)rintf(2.5f)": 2,
        "(int)fabsf(-3.0f)": 3,
        "(int)(fminf(1.0f, 2.0f) + fmaxf(4.0f, 3.0f))": 5,
        "(int)(__fadd_rn(1.0f, 2.0f) * __fmul_rn(2.0f, 2.0f))": 12,
        "make_int4(1, 2, 3, 4).w + make_uint2(5, 6).x": 9,
        "(int)(make_float4(1, 2, 3, 4).z + make_float2(5, 6).y)": 9,
        "__ldg(a)": 77,
    }
    body = "\n".join(f"out[{i}] = {call};" for i, call in enumerate(words))
    found = run(body, {"a": np.array([77], np.int32)}, ("int32", len(words)), block=1)
    assert dict(zip(words, found.tolist(), strict=True)) == words


def test_only_written_fusions_are_fused() -> None:
    a = np.array(
        [1 + 2**-12, -(1 + 2**-11)], np.float32
    )  # the product's 2^-24 is lost when it is rounded before the sum
    out = run("out[0] = a[0] * a[0] + a[1]; out[1] = fmaf(a[0], a[0], a[1]);", {"a": a}, ("float32", 2), block=1)
    assert out.tolist() == [0.0, 2**-24]


# ---- many processes ------------------------------------------------------------------------------------------------


def test_atomics_count_every_thread_of_every_process() -> None:
    body = """
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(out, 1);
    atomicAdd(reinterpret_cast<unsigned*>(out) + 1, 2u);
    atomicMax(out + 2, t);
    atomicCAS(out + 3, -1, 0);
    atomicMax(reinterpret_cast<unsigned*>(out) + 3, 0xfffffffeu);
    atomicInc(reinterpret_cast<unsigned*>(out) + 4, 99u);
    if (t == 500) out[5] = atomicExch(out + 6, 17) + 1;
    if (t == 501) out[7] = atomicCAS(out + 8, -1, 5) + atomicCAS(out + 9, 3, 5) + 2;
    if (t == 501) out[9] = 3;
    atomicCAS(out + 10, -1, 0);
    atomicAdd(reinterpret_cast<float*>(out) + 10, 0.5f);"""
    out = run(body, out=("int32", 11), grid=(500, 1), block=96)
    # All from the poison -1. atomicInc: 2^32 - 1 is past its limit and gives 0 first, then 0 .. 99 again and again.
    assert out[:10].tolist() == [48000 - 1, 96000 - 1, 48000 - 1, -2, (48000 - 1) % 100, 0, 17, 0, 5, 3]
    assert out[10:].view(np.float32).tolist() == [24000.0]


def test_minima_and_bits_count_every_thread_of_every_process() -> None:
    body = """
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicMin(out, 7 - t);
    if (t == 500) out[1] = atomicMin(out + 2, -9) + atomicMin(out + 2, 4);
    atomicCAS(out + 3, -1, 0);
    if (t == 501) out[4] = atomicOr(out + 3, 5) + static_cast<int>(atomicOr(reinterpret_cast<unsigned*>(out) + 3, 2u));
    int* bits = out + 5 + t / 30;
    atomicCAS(bits, -1, 0);
    if (t % 2) atomicOr(bits, 1 << t % 30);
    else atomicOr(reinterpret_cast<unsigned*>(bits), 1u << t % 30);"""
    out = run(body, out=("int32", 5 + 1600), grid=(500, 1), block=96)
    # All from the poison -1, or from 0 by atomicCAS; the old value comes back. 48000 threads have 30 bits of a word.
    assert out[:5].tolist() == [7 - 47999, -1 - 9, -9, 7, 0 + 5]
    assert out[5:].tolist() == [(1 << 30) - 1] * 1600


@pytest.mark.parametrize("order", [0, 1, 2])
def test_atomics_on_shared_memory_count_every_thread_of_the_block(order: int) -> None:
    body = """
    int* box = static_cast<int*>(voltune_shared_arena());
    if (threadIdx.x < 3) box[threadIdx.x] = 100 * (threadIdx.x == 1);
    __syncthreads();
    atomicAdd(box, 2);
    atomicMin(box + 1, 80 - static_cast<int>(threadIdx.x));
    atomicOr(box + 2, 1 << threadIdx.x % 20);
    __syncthreads();
    if (threadIdx.x < 3) out[blockIdx.x * 3 + threadIdx.x] = box[threadIdx.x];"""
    out = run(body, out=("int32", 9), grid=(3, 1), block=64, shared=12, order=order)
    assert out.tolist() == [128, 17, (1 << 20) - 1] * 3


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_block_may_spin_until_the_block_with_the_ticket_before_its_own_has_set_a_flag(
    order: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(workers)))
    # One more than the poison -1 is ticket 0; a flag is -1 until it holds the sum of the tickets so far.
    body = """
    int* box = static_cast<int*>(voltune_shared_arena());
    volatile int* flags = out + 1;
    if (threadIdx.x == 40) {
      const int ticket = atomicAdd(out, 1) + 1;
      int sum = 0;
      if (ticket > 0) while ((sum = flags[ticket - 1]) == -1) {}
      box[0] = ticket;
      box[1] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 3) flags[box[0]] = box[0] + box[1];"""
    out = run(body, out=("int32", 61), grid=(20, 3), block=64, shared=8, order=order, timeout_s=20)
    assert out.tolist() == [59, *(t * (t + 1) // 2 for t in range(60))]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs: two blocks that wait for each other")
def test_blocks_run_in_several_processes_over_the_same_memory() -> None:
    body = """
    volatile int* flags = out;
    flags[blockIdx.x] = 1;
    __threadfence();
    while (flags[1 - blockIdx.x] != 1) {}"""
    assert run(body, out=("int32", 2), grid=(2, 1), block=1, timeout_s=20).tolist() == [1, 1]


def test_the_order_chooses_which_block_and_which_thread_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    body = "out[blockIdx.x * 64 + threadIdx.x] = atomicAdd(out + 256, 1) + 5;"
    ran = [run(body, out=("int32", 257), grid=(4, 1), block=64, order=o)[:256].tolist() for o in (0, 1, 2, 3)]
    natural = list(range(4, 260))
    assert ran[0] == natural
    assert ran[1] == natural[::-1]
    assert sorted(ran[2]) == sorted(ran[3]) == natural
    assert len({tuple(r) for r in ran}) == 4
    assert run(body, out=("int32", 257), grid=(4, 1), block=64, order=2)[:256].tolist() == ran[2]


def test_the_portable_context_switch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reduction(2, "__syncthreads();").tobytes()
    monkeypatch.setattr(host, "_FLAGS", (*host._FLAGS, "-DVOLTUNE_UCONTEXT"))
    assert reduction(2, "__syncthreads();").tobytes() == expected


# ---- the order of accesses -----------------------------------------------------------------------------------------

ARENA = f"{LANE} int* box = static_cast<int*>(voltune_shared_arena()); out[t] = 0;"
MEETINGS = [
    ("if (t == 0)\nbox[1] = 7;\nif (t == 40)\nout[t] = box[1];", "read", 4),
    ("if (t == 0)\nout[t] = box[1];\nif (t == 40)\nbox[1] = 7;", "write", 4),
    ("if (t == 0)\nbox[1] = 7;\nif (t == 40)\nbox[1] = 7;", "write", 4),
    ("if (t == 0)\natomicAdd(box + 1, 7);\nif (t == 40)\nout[t] = box[1];", "read", 4),
    ("if (t == 0)\nout[t] = box[1];\nif (t == 40)\natomicMax(box + 1, 7);", "write", 4),
    ("if (t == 0)\nbox[1] = 7;\nif (t == 40)\nbox[0] = __atomic_load_n(box + 1, __ATOMIC_RELAXED);", "read", 4),
    ("volatile int* at = box;\nif (t == 0) at[1] = 7;\nif (t == 40) out[t] = at[1];", "read", 4),
    (
        "if (t == 0)\nbox[1] = 7;\nif (t == 40)\n*reinterpret_cast<uint4*>(out + 60) = *reinterpret_cast<uint4*>(box);",
        "read",
        0,
    ),
    ("if (t == 0)\nbox[1] = 7;\nif (t == 40)\n*reinterpret_cast<uint4*>(box) = uint4{1, 2, 3, 4};", "write", 0),
    (
        "if (t == 0)\nbox[31] = 7;\nif (t == 40)\n{ struct B { int v[16]; }* b = (struct B*)box; b[0] = b[1]; }",
        "read",
        64,
    ),
    ("if (t == 0)\nbox[1] = 7;\nif (t == 40)\nout[t] = reinterpret_cast<char*>(box)[7];", "read", 7),
]


@pytest.mark.parametrize(("statement", "access", "byte"), MEETINGS)
def test_two_warps_that_meet_in_a_word_of_shared_memory_without_a_barrier_are_told(
    statement: str, access: str, byte: int
) -> None:
    places = {"read": ("read", "write"), "write": ("write", "read")}
    for order in (0, 1):
        text = fault(f"{ARENA}\n{statement}", out=("int32", 64), block=64, shared=128, order=order)
        first = access if order == 0 else "|".join(places[access])
        found = re.fullmatch(
            rf"kernel voltune_toy, block \(0,0\), thread (\d+), line (\d+): ({first}) of shared memory, "
            r"byte (\d+) of 128, used by warp ([01]) since the last barrier",
            text,
        )
        assert found, text
        thread, line, _, at, other = found.groups()
        assert (thread, other) in (("40", "0"), ("0", "1"))
        assert (int(at), thread) == (byte, "40") or order == 1
        assert 4 <= int(line) <= 7


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(
    "statement",
    [
        "if (t == 0) box[1] = 7; __syncthreads(); if (t == 40) out[t] = box[1] - 7;",
        "if (t == 0) out[t] = box[1] + 1; __syncthreads(); if (t == 40) box[1] = 7;",
        "atomicAdd(box + 1, 1); atomicMin(box + 2, t); __syncthreads(); out[t] = box[1] - 63;",
        "box[t] = t; __syncwarp(); out[t] = box[t ^ 31] - (t ^ 31);",
        "out[t] = box[t % 4] + box[1] + 2;",
        "if (t == 0) box[1] = 7; if (t == 40) box[2] = 7;",
        "reinterpret_cast<uint4*>(box)[t] = uint4{1, 2, 3, 4}; __syncthreads(); out[t] = box[4 * (63 - t)] - 1;",
    ],
)
def test_warps_that_a_barrier_parts_or_that_only_read_or_only_add_may_meet(statement: str, order: int) -> None:
    assert run(f"{ARENA} {statement}", out=("int32", 64), block=64, shared=1024, order=order).tolist() == [0] * 64


FLAGGED = "if (t == 0) *flag = 1;"
LOAD = "out[0] = work[0];"


def handed_on(store: str, load: str) -> str:
    """What is told of it when block 0 stores to `work`, which starts as -1, and block 1 loads once the flag is set.

    Empty when it came through, with 5 in `out[0]`.
    """
    text = f"""extern "C" __global__ void voltune_toy(int* work, int* out) {{
    {LANE} volatile int* flag = work + 64;
    if (blockIdx.x == 0) {{ {store} }}
    else if (t == 0) {{
      while (*flag != 1) {{}}
      {load} }} }}"""
    launch = Launch("w13", "toy", (Linear(2), Linear(1)), 64, Linear(0), ("WORK", "OUT"), {})
    buffers = (Buffer("WORK", "int32", (Linear(65),), "workspace"), Buffer("OUT", "int32", (Linear(1),), "output"))
    plan = Plan("fused", CONTRACT, space.default(CONTRACT), (launch,), buffers)
    try:
        found = host.execute(plan, {"w13": Source("voltune_toy", "w13", text)}, {}, 1, timeout_s=20)
    except LaunchFailed as error:
        return str(error)
    assert found.buffers["OUT"].tolist() == [5]
    return ""


UNFENCED = [
    (f"if (t == 0) work[0] = 5; {FLAGGED}", LOAD, "read", 0),
    (f"if (t == 0) work[0] = 5; {FLAGGED}", "out[0] = __atomic_load_n(work, __ATOMIC_RELAXED);", "read", 0),
    (f"if (t == 0) work[0] = 5; {FLAGGED}", "work[0] = 6; out[0] = 5;", "write", 0),
    (f"if (t == 0) work[0] = 5; {FLAGGED}", "out[0] = atomicExch(work, 6);", "write", 0),
    (f"if (t == 0) {{ work[0] = 5; __threadfence_block(); }} {FLAGGED}", LOAD, "read", 0),
    (f"if (t == 0) {{ __threadfence(); work[0] = 5; }} {FLAGGED}", LOAD, "read", 0),
    (f"if (t == 33) work[0] = 5; if (t == 0) __threadfence(); __syncthreads(); {FLAGGED}", LOAD, "read", 1),
    (f"if (t == 33) work[0] = 5; __syncthreads(); {FLAGGED}", LOAD, "read", 1),
    (
        "if (t == 0) { *reinterpret_cast<uint4*>(work) = uint4{5, 5, 5, 5}; atomicExch(work + 64, 1); }",
        "uint2 v = *reinterpret_cast<uint2*>(work + 2); work[8] = v.x + v.y;",
        "read",
        0,
    ),
]


@pytest.mark.parametrize(("store", "load", "access", "warp"), UNFENCED)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_plain_store_that_another_block_meets_before_a_fence_is_told(
    store: str, load: str, access: str, warp: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(workers)))
    byte = 8 if "uint4" in store else 0
    assert handed_on(store, load) == (
        f"kernel voltune_toy, block (1,0), thread 0, line 6: {access} at WORK, byte {byte} of 260, "
        f"stored by warp {warp} of block (0,0), which let no fence follow"
    )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("store", "load"),
    [
        (f"if (t == 0) {{ work[0] = 5; __threadfence(); }} {FLAGGED}", LOAD),
        (f"if (t == 0) {{ work[0] = 5; __threadfence_system(); }} {FLAGGED}", "work[0] = 6; out[0] = 5;"),
        ("if (t == 0) { work[0] = 5; __atomic_store_n(work + 64, 1, __ATOMIC_RELEASE); }", LOAD),
        (f"if (t == 0) {{ work[0] = 5; __atomic_thread_fence(__ATOMIC_RELEASE); }} {FLAGGED}", LOAD),
        (f"if (t == 33) work[0] = 5; __syncthreads(); if (t == 0) __threadfence(); {FLAGGED}", LOAD),
        (f"if (t == 33) {{ work[0] = 5; __threadfence(); }} __syncthreads(); {FLAGGED}", LOAD),
        (f"if (t == 3) work[0] = 5; __syncwarp(); if (t == 0) __threadfence(); {FLAGGED}", LOAD),
        (f"if (t == 0) __atomic_store_n(work, 5, __ATOMIC_RELAXED); {FLAGGED}", LOAD),
        (f"if (t == 0) atomicExch(work, 5); {FLAGGED}", LOAD),
        (f"if (t == 0) {{ work[0] = 4; atomicExch(work, 5); }} {FLAGGED}", LOAD),
        (f"if (t == 0) *(volatile int*)work = 5; {FLAGGED}", LOAD),
        (f"if (t == 0) {{ work[0] = work[2] = 5; work[0] += work[2] - 5; __threadfence(); }} {FLAGGED}", LOAD),
        # Bytes of one word, by two blocks.
        (
            f"if (t == 0) reinterpret_cast<short*>(work)[0] = 5; {FLAGGED}",
            "reinterpret_cast<short*>(work)[1] = 0; out[0] = 5;",
        ),
        (
            f"if (t == 0) reinterpret_cast<short*>(work)[0] = 5; {FLAGGED}",
            "out[0] = reinterpret_cast<short*>(work)[1] + 6;",
        ),
    ],
)
def test_a_store_that_a_fence_follows_or_that_is_seen_at_once_may_be_met(
    store: str, load: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(workers)))
    assert handed_on(store, load) == ""


def test_a_store_stays_without_a_fence_when_its_block_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    text = fault("out[blockIdx.x] = blockIdx.x == 0 ? 3 : out[0];", out=("int32", 2), grid=(2, 1), block=1)
    assert text.endswith("line 3: read at out, byte 0 of 8, stored by warp 0 of block (0,0), which let no fence follow")


@pytest.mark.parametrize("order", [0, 1])
def test_a_warp_that_reads_what_another_of_its_block_stored_without_a_barrier_is_told(order: int) -> None:
    body = f"{LANE} out[t] = t; {{between}}\nint other = out[t ^ 32];\n__syncthreads();\nout[t] = other;"
    text = fault(body.format(between=""), out=("int32", 64), block=64, order=order)
    assert re.search(r"line 4: read at out, byte \d+ of 256, stored by warp [01] since the last barrier$", text)
    assert run(body.format(between="__syncthreads();"), out=("int32", 64), block=64).tolist() == [
        t ^ 32 for t in range(64)
    ]
    fenced = f"{LANE} out[t] = t; __threadfence_block(); if (t >= 32) out[t] = out[t - 32];"
    assert run(fenced, out=("int32", 64), block=64).tolist() == [t % 32 for t in range(64)]
    alone = body.format(between="").replace("t ^ 32", "t ^ 31").replace("int other", "__syncwarp(); int other")
    assert run(alone, out=("int32", 64), block=64, order=order).tolist() == [t ^ 31 for t in range(64)]


def test_more_blocks_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(LaunchFailed, match=r"grid \(8192, 2048\), 32 threads; expected 1 up, 16777215 CTAs at most"):
        run("out[threadIdx.x] = 0;", grid=(8192, 2048))


def test_the_next_launch_may_read_what_any_block_stored() -> None:
    ran = two_launches(
        "work[blockIdx.x] = 5 + blockIdx.x;",
        "for (int i = 0; i < 4; ++i) out[blockIdx.x * 4 + i] = work[1 - blockIdx.x];",
        {"TOPK_IDS": IDS},
    )
    assert ran.buffers["OUT"].tolist() == [6] * 4 + [5] * 4


# ---- faults: each is reported with kernel, block and thread, and the caller goes on --------------------------------


@pytest.mark.parametrize(
    ("what", "access", "order", "place"),
    [
        ("out[t] = a[t + (t == 9 ? 91 : 0)];", "read", 0, "a (an input), byte 400 of 400"),
        ("out[t] = a[t - (t == 9 ? 10 : 0)];", "read", 1, "a (an input), byte -4 of 400"),
        ("out[t] = a[t + (t == 9 ? 20000000 : 0)];", "read", 2, "a (an input), byte 80000036 of 400"),
        ("out[t + (t == 9 ? 23 : 0)] = 1;", "write", 0, "out, byte 128 of 128"),
        ("out[t - (t == 9 ? 10 : 0)] = 1;", "write", 1, "out, byte -4 of 128"),
        ("{ out[t] = 1; if (t == 9) const_cast<int*>(a)[8] = 1; }", "write", 0, "a (an input), byte 32 of 400"),
    ],
)
def test_an_access_outside_a_buffer_or_a_write_to_an_input_is_told(
    what: str, access: str, order: int, place: str
) -> None:
    a = np.arange(100, dtype=np.int32)
    text = fault(f"{LANE}\nif (blockIdx.x == 2)\n{what}", {"a": a}, grid=(3, 1), order=order)
    assert text == f"kernel voltune_toy, block (2,0), thread 9, line 5: illegal {access} at {place}"


@pytest.mark.parametrize(("order", "index", "byte"), [(0, -1, -4), (1, 33, 132)])
def test_a_write_that_misses_the_guard_pages_is_told_after_the_launch(order: int, index: int, byte: int) -> None:
    text = fault(f"{LANE} out[t] = t; if (t == 3) out[{index}] = 5;", order=order)
    assert text == f"kernel voltune_toy wrote outside a buffer: out, byte {byte} of 128"


def test_a_use_of_an_absent_pointer_is_told() -> None:
    text = fault(f"{LANE} out[t] = *static_cast<int*>(voltune_shared_arena());")
    assert re.search(r"block \(0,0\), thread 0, line 3: illegal read at address 0x0, a null pointer", text)


@pytest.mark.parametrize(("order", "at"), [(0, "256"), (1, "-4")])
def test_an_access_outside_shared_memory_is_told(order: int, at: str) -> None:
    body = f"""{LANE}
    int* words = static_cast<int*>(voltune_shared_arena());
    out[t] = 0;
    words[t == 4 ? {int(at) // 4} : t] = 1;"""
    text = fault(body, block=32, shared=256, order=order)
    assert (
        text == f"kernel voltune_toy, block (0,0), thread 4, line 6: illegal write at shared memory, byte {at} of 256"
    )


def test_a_write_beside_shared_memory_that_misses_the_guard_pages_is_told() -> None:
    text = fault(f"{LANE} out[t] = 0; if (t == 0) static_cast<int*>(voltune_shared_arena())[-1] = 1;", shared=256)
    assert text == "kernel voltune_toy, block (0,0), some thread: wrote outside shared memory, byte -4 of 256"


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (
            "uint4 v = *reinterpret_cast<const uint4*>(a + t); out[t] = v.x + v.w;",
            "uint4' (16 bytes aligned) at a (an input), byte 4 of",
        ),
        ("out[t] = reinterpret_cast<const uint2*>(a + t)->x;", "uint2' (8 bytes aligned) at a (an input), byte 4 of"),
        (
            "float4 v = __ldg(reinterpret_cast<const float4*>(a + t)); out[t] = v.x;",
            "float4' (16 bytes aligned) at a (an input), byte 4 of",
        ),
        (
            "*reinterpret_cast<int4*>(out + 4 * t + (t == 1)) = make_int4(0, 0, 0, 0);",
            "int4' (16 bytes aligned) at out, byte 20 of",
        ),
    ],
)
def test_a_misaligned_vector_access_is_told(statement: str, told: str) -> None:
    text = fault(f"{LANE}\n{statement}", {"a": np.arange(64, dtype=np.int32)}, ("int32", 160))
    assert re.match(r"kernel voltune_toy, block \(0,0\), thread 1, line \d+: misaligned", text)
    assert told in text


def test_an_index_outside_a_local_array_and_a_shift_past_the_word_are_told() -> None:
    index = fault(f"{LANE} int v[4] = {{1, 2, 3, 4}};\nout[t] = v[a[t] & 7];", {"a": np.arange(64, dtype=np.int32)})
    assert index == "kernel voltune_toy, block (0,0), thread 4, line 4: index 4 is outside 'int [4]'"
    shift = fault(f"{LANE}\nout[t] = 1u << (t + 2);", out=("uint32", 32))
    assert shift == "kernel voltune_toy, block (0,0), thread 30, line 4: 'unsigned int' shifted by 32 bits"


def test_an_integer_division_by_zero_is_told() -> None:
    text = fault(f"{LANE}\nout[t] = 7 / (a[t] - 5);", {"a": np.arange(32, dtype=np.int32)})
    assert text.startswith("kernel voltune_toy, block (0,0), thread 5, line 4: ended by signal 8")


def test_a_stack_overflow_is_told() -> None:
    before = "__noinline__ int deep(int n) { volatile int v[64]; v[n % 64] = n; return deep(n + 1) + v[n % 64]; }"
    text = fault(f"{LANE} out[t] = t == 6 ? deep(0) : 0;", before=before)
    assert text.startswith("kernel voltune_toy, block (0,0), thread 6, line 1: stack overflow: a thread has 64 KB")
    before = (
        "__noinline__ int wide(int n, volatile int* out) { volatile int v[60000]; v[n] = n; return v[n] + out[0]; }"
    )
    assert "thread 6, line 1: stack overflow" in fault(f"{LANE} out[t] = t == 6 ? wide(0, out) : 0;", before=before)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_an_output_left_unwritten_is_told_with_its_index(order: int) -> None:
    text = fault(f"{LANE} if (t != 11 && t < 30) out[t] = t;", order=order)
    assert text == "unwritten output, still 0xFF bytes: out[11] and 2 more of 32 elements"


BARRIERS = [
    (
        "if (t < 40) __syncthreads();\nelse __syncthreads();",
        "divergent __syncthreads: others wait at line 4; threads 0 to 39 in __syncthreads (line 4)",
    ),
    (
        "if (t < 40) return;\n__syncthreads();",
        "divergent __syncthreads: not every thread of the block reaches it; threads 0 to 39 exited",
    ),
    (
        "if (t < 40) __syncthreads();",
        "divergent __syncthreads: not every thread of the block reaches it; threads 0 to 39 in",
    ),
    (
        "if (t == 40) __syncthreads();\nelse if (t > 31) __syncwarp();\nelse __syncthreads();",
        "thread 40 in __syncthreads (line 4)",
    ),
]


@pytest.mark.parametrize(("statement", "told"), BARRIERS)
def test_a_barrier_that_not_all_threads_reach_is_told(statement: str, told: str) -> None:
    text = fault(f"{LANE} out[t] = t;\n{statement}", out=("int32", 64), block=64)
    assert re.match(r"kernel voltune_toy, block \(0,0\), thread \d+, line \d: ", text)
    assert told in text


COLLECTIVES = [
    (
        f"if (t == 9) return;\nout[t] = __shfl_sync({FULL}, t, 0);",
        "__shfl_sync names thread 9, which has exited or does not exist",
    ),
    (f"if (t == 9) __syncthreads();\nelse out[t] = __any_sync({FULL}, t);", "thread 9 in __syncthreads (line 4)"),
    (
        f"if (t == 9) __syncwarp();\nelse out[t] = __any_sync({FULL}, t);",
        "meets another collective, mask or line in thread ",
    ),
    (
        f"if (t < 9) out[t] = __any_sync({FULL}, t);\nelse out[t] = __any_sync({FULL}, t);",
        "meets another collective, mask or line",
    ),
    (f"out[t] = __any_sync(t < 9 ? {FULL} : 0xffffff00u, t);", "mask 0xffffff00)"),
    ("out[t] = __any_sync(t < 9 ? 0x1ffu : 0xffffff00u, t);", "mask 0xffffff00)"),
    (
        "unsigned a[4][4] = {}, b[4] = {}; float d[32] = {};\nif (t != 9) voltune_mma_m8n8k4(d, a, b);",
        "mma.m8n8k4 names thread 9, which has exited or does not exist",
    ),
    ("out[t] = __ballot_sync(0xffu, 1);", "__ballot_sync with a mask that lacks the caller's own lane"),
]


@pytest.mark.parametrize(("statement", "told"), COLLECTIVES)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_warp_collective_that_not_all_lanes_of_its_mask_reach_is_told(statement: str, told: str, order: int) -> None:
    text = fault(f"{LANE} out[t] = t;\n{statement}", order=order)
    assert re.match(r"kernel voltune_toy, block \(0,0\), thread \d+, line [45]: ", text)
    assert told in text


def test_a_mask_that_names_lanes_past_the_end_of_the_block_is_told() -> None:
    text = fault(f"out[threadIdx.x] = __any_sync({FULL}, 1);", out=("int32", 48), block=48)
    assert "__any_sync names thread 48, which has exited or does not exist" in text


def test_an_endless_loop_is_ended_and_told_where_it_was() -> None:
    body = (
        f"{LANE} if (blockIdx.x == 1) out[t] = t;\nif (blockIdx.x == 1 && t == 7)\nwhile (out[7] == 7) __threadfence();"
    )
    told = r"voltune_toy, block \(1,0\), thread 7, line 5: had not ended after 0.3 s, 1 of 2 CTAs had: an endless loop"
    others = children()
    with pytest.raises(TrialTimeout, match=told):
        run(body, grid=(2, 1), timeout_s=0.3)
    assert children() == others


@pytest.mark.parametrize("workers", [1, 2])
def test_blocks_that_wait_for_the_ticket_after_their_own_are_ended_and_told_where(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(workers)))
    body = """
    volatile int* flags = out + 1;
    const int ticket = atomicAdd(out, 1) + 1;
    while (flags[ticket + 1] != 1) {}
    flags[ticket] = 1;"""
    told = r"block \([01],0\), thread 0, line 6: had not ended after 0.3 s, 0 of 4 CTAs had: .* wait for what none will"
    with pytest.raises(TrialTimeout, match=told):
        run(body, out=("int32", 6), grid=(4, 1), block=1, timeout_s=0.3)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def compiled_endless() -> str:
    """The body of a kernel that never ends, compiled already, so that the only children are workers."""
    body = "out[0] = 0; while (out[0] == 0) __threadfence();"
    with pytest.raises(TrialTimeout):
        run(body, block=1, timeout_s=0.0)
    return body


def test_an_interrupted_run_leaves_no_process_behind() -> None:
    body = compiled_endless()
    others = children()  # of an earlier test: what multiprocessing keeps for the process's life

    def interrupt(*_: object) -> None:
        if children() != others:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            run(body, block=1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert children() == others


def test_a_worker_that_is_killed_from_outside_is_told() -> None:
    body = compiled_endless()
    others = children()

    def kill() -> None:
        while children() == others:
            time.sleep(0.02)
        os.kill(next(pid for pid in children() if pid not in others), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(LaunchFailed, match=r"kernel voltune_toy: a worker was ended by SIGKILL"):
        run(body, block=1)
    killer.join()


# ---- operands ------------------------------------------------------------------------------------------------------


def two_launches(first: str, second: str, inputs: Mapping[str, np.ndarray | None], tokens: int = 2) -> Outputs:
    """Two kernels of a plan with ids, expert map, live tokens, scalars, a workspace [4 * tokens] and an output [8]."""
    parameters = (
        "const int* ids, int id_bytes, const int* map, int map_size, const int* live, int tokens, int* work, int* out"
    )
    buffers = (
        Buffer("TOPK_IDS", "int32", (Linear(0, 1), Linear(3)), "input"),
        Buffer("LIVE_TOKENS", "int32", (Linear(1),), "input", optional=True),
        Buffer("HIDDEN", "int32", (Linear(0, 4),), "workspace"),
        Buffer("OUT", "int32", (Linear(8),), "output"),
    )
    arguments = ("TOPK_IDS", "ID_BYTES", "EXPERT_MAP", "MAP_SIZE", "LIVE_TOKENS", "TOKENS", "HIDDEN", "OUT")
    launches, sources = [], {}
    for stage, body in (("w13", first), ("w2", second)):
        launches.append(Launch(stage, stage, (Linear(0, 1), Linear(1)), 1, Linear(0), arguments, {}))
        sources[stage] = Source(
            f"voltune_{stage}", stage, f'extern "C" __global__ void voltune_{stage}({parameters}) {{ {body} }}'
        )
    plan = Plan("fused", CONTRACT, space.default(CONTRACT), tuple(launches), buffers)
    return host.execute(plan, sources, inputs, tokens)


IDS = np.array([[4, 5, 6], [7, 8, 9]], np.int32)
SCALARS = (
    "if (blockIdx.x) return; "
    "out[0] = id_bytes; out[1] = map_size; out[2] = tokens; out[3] = map != nullptr; out[4] = live != nullptr;"
)
REST = "if (blockIdx.x) return; out[5] = gridDim.x; out[6] = ids[0]; out[7] = id_bytes == 8 ? ids[2] : ids[1];"


def counted(first: str, second: str, order: int) -> Outputs:
    """Two launches of four blocks over the counters [2, 3] and an output [4]."""
    parameters = "int* counters, int* out"
    launches, sources = [], {}
    for stage, body in (("w13", first), ("w2", second)):
        grid = (Linear(4), Linear(1))
        launches.append(Launch(stage, stage, grid, 1, Linear(0), ("COUNTERS", "OUT"), {}))
        text = f'extern "C" __global__ void voltune_{stage}({parameters}) {{ {body} }}'
        sources[stage] = Source(f"voltune_{stage}", stage, text)
    buffers = (
        Buffer("COUNTERS", "int32", (Linear(2), Linear(3)), "counters"),
        Buffer("OUT", "int32", (Linear(4),), "output"),
    )
    plan = Plan("fused", CONTRACT, space.default(CONTRACT), tuple(launches), buffers)
    return host.execute(plan, sources, {}, 1, order=order)


TICKET = "int ticket = atomicAdd(counters + 4, 1); out[ticket] = ticket; if (ticket == 3) counters[4] = 0;"


@pytest.mark.parametrize("order", [0, 1, 2])
def test_counters_start_at_zero_and_may_be_used_by_each_launch_that_leaves_them_zero(order: int) -> None:
    ran = counted(TICKET, TICKET, order)
    assert ran.buffers["OUT"].tolist() == [0, 1, 2, 3]
    assert ran.buffers["COUNTERS"].tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("order", [0, 1])
def test_a_counter_that_the_last_launch_does_not_leave_zero_is_told_with_its_element_and_value(order: int) -> None:
    with pytest.raises(LaunchFailed, match=r"^2 elements of the counters COUNTERS .* zero, first \[1, 0\]: 4"):
        counted(TICKET, "atomicAdd(counters + 3, 1); atomicAdd(counters + 5, -1); out[blockIdx.x] = 0;", order)


def test_counters_may_be_other_than_zero_between_launches() -> None:
    ran = counted("atomicAdd(counters + 2, 1);", "out[blockIdx.x] = 7; atomicAdd(counters + 2, -1);", 0)
    assert ran.buffers["OUT"].tolist() == [7] * 4


def test_launches_run_in_order_over_one_workspace_that_starts_as_poison() -> None:
    ran = two_launches(
        "work[blockIdx.x] = work[blockIdx.x] + ids[blockIdx.x];",
        "if (blockIdx.x == 0) for (int i = 0; i < 8; ++i) out[i] = 2 * work[i % 2];",
        {"TOPK_IDS": IDS},
    )
    assert ran.buffers["OUT"].tolist() == [6, 8] * 4
    assert ran.hidden.tolist() == [3, 4] + [-1] * 6


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ({"TOPK_IDS": IDS}, [4, 0, 2, 0, 0, 2, 4, 5]),
        ({"TOPK_IDS": IDS, "EXPERT_MAP": None, "LIVE_TOKENS": None}, [4, 0, 2, 0, 0, 2, 4, 5]),
        ({"TOPK_IDS": IDS.astype(np.int64)}, [8, 0, 2, 0, 0, 2, 4, 5]),
        (
            {"TOPK_IDS": IDS, "EXPERT_MAP": np.arange(7, dtype=np.int32), "LIVE_TOKENS": np.array([1], np.int32)},
            [4, 7, 2, 1, 1, 2, 4, 5],
        ),
        ({"TOPK_IDS": np.asfortranarray(IDS)}, [4, 0, 2, 0, 0, 2, 4, 5]),
    ],
)
def test_scalars_follow_from_the_operands_and_absent_ones_are_null(
    operands: dict[str, np.ndarray | None], expected: list[int]
) -> None:
    assert two_launches(SCALARS, REST, operands).buffers["OUT"].tolist() == expected


def test_an_operand_that_does_not_fit_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(RequestError, match=re.escape("operand TOPK_IDS is int32 [1, 3]: expected int32 or int64")):
        two_launches("no C++", "no C++", {"TOPK_IDS": IDS[:1]})


def test_a_kernel_whose_parameters_are_not_the_plans_arguments_is_refused() -> None:
    text = 'extern "C" __global__ void voltune_toy(int* out, int n, const float* a, float b, long long c) {}'
    launch = Launch("w13", "toy", (Linear(1), Linear(1)), 1, Linear(0), ("out",), {})
    buffers = (Buffer("out", "int32", (Linear(1),), "output"),)
    plan = Plan("fused", CONTRACT, space.default(CONTRACT), (launch,), buffers)
    with pytest.raises(LaunchFailed, match=r"takes 'pip\?\?' .* where the plan passes 'p': out"):
        host.execute(plan, {"w13": Source("voltune_toy", "w13", text)}, {}, 1)


# ---- guarded arrays ------------------------------------------------------------------------------------------------

ADDRESS = "reinterpret_cast<unsigned long long*>(out)[0] = reinterpret_cast<unsigned long long>(a);"


@pytest.mark.parametrize("order", [0, 1])
def test_a_guarded_array_is_used_in_place_and_any_other_is_copied(order: int) -> None:
    plain = np.arange(5000, dtype=np.int32)
    guarded = memory.guard(plain)
    where = {
        name: run(ADDRESS, {"a": a}, ("uint64", 1), block=1, order=order)[0]
        for name, a in (("plain", plain), ("guarded", guarded))
    }
    assert where["guarded"] == guarded.ctypes.data
    assert where["plain"] != plain.ctypes.data
    part = run(ADDRESS, {"a": guarded[:3000]}, ("uint64", 1), block=1, order=order)[0]
    assert part != guarded.ctypes.data  # its end would not be guarded


def test_a_guarded_array_holds_the_same_and_cannot_be_written() -> None:
    plain = np.random.default_rng(0).integers(0, 255, (3, 7, 11), np.uint8)
    guarded = memory.guard(plain)
    assert (guarded.dtype, guarded.shape, guarded.tobytes()) == (plain.dtype, plain.shape, plain.tobytes())
    with pytest.raises(ValueError, match="read-only"):
        guarded[0] = 1


@pytest.mark.parametrize("index", [1024, -1])
def test_a_guarded_array_of_whole_pages_is_guarded_at_both_ends(index: int) -> None:
    guarded = memory.guard(np.zeros(1024, np.int32))
    assert f"illegal read at a (an input), byte {index * 4} of 4096" in fault(
        f"out[threadIdx.x] = a[{index}];", {"a": guarded}
    )


def test_a_guarded_arrays_memory_is_freed_with_the_last_array_over_it() -> None:
    def mapped(address: int) -> bool:
        ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/maps").read_text(), re.MULTILINE)
        return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)

    guarded = memory.guard(np.zeros(100_000, np.int32))
    address, view = guarded.ctypes.data, guarded[50_000:]
    del guarded
    gc.collect()
    assert mapped(address)
    del view
    gc.collect()
    assert not mapped(address)


# ---- compiling -----------------------------------------------------------------------------------------------------


def toy(text: str) -> Source:
    return Source("voltune_toy", "w13", text)


EMPTY = 'extern "C" __global__ void voltune_toy() {}'


def test_a_source_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = host.compile(toy(EMPTY))

    def refuse(*_: object) -> None:
        raise AssertionError("g++ was called again")

    monkeypatch.setattr(host, "run_compiler", refuse)
    assert host.compile(toy(EMPTY)) == first
    with pytest.raises(AssertionError, match="g\\+\\+ was called again"):
        host.compile(toy(EMPTY + "//"))


def test_a_damaged_library_is_compiled_again() -> None:
    path = host.compile(toy(EMPTY + "// to be cut"))
    path.write_bytes(path.read_bytes()[:100])
    assert len(host.compile(toy(EMPTY + "// to be cut")).read_bytes()) > 1000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('extern "C" __global__ void voltune_toy(int* out) { out[0] = nothing; }', "'nothing' was not declared"),
        ("#include <cstdint>\n" + EMPTY, "no include path in which to search for cstdint"),
        ('extern "C" __global__ void another() {}', "'voltune_toy' was not declared"),
        ('extern "C" __global__ void voltune_toy(int* out) { __shared__ int box; }', "'__shared__' was not declared"),
        (
            'extern "C" __global__ void voltune_toy(char* out) { __atomic_fetch_add(out, 1, __ATOMIC_RELAXED); }',
            "undefined reference to `__tsan_atomic8_fetch_add'",
        ),
    ],
)
def test_a_source_that_gpp_refuses_fails_with_its_log(text: str, told: str) -> None:
    with pytest.raises(BuildFailed) as caught:
        host.compile(toy(text))
    assert told in str(caught.value)


def test_a_machine_without_gpp_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingTool, match=r"g\+\+ was not found.*apt-get install g\+\+"):
        host.compile(toy(EMPTY))
