"""What only a GPU can show: PTX against its plain C++ twins, and the whole op's bits against the CPU executor's."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numerics import (
    ALL_HALVES,
    DEQUANTISED,
    DIFFERENCES,
    EXP_NEGATIVE,
    FLOAT_TO_HALF,
    HALF_DEQUANTISE,
    HALF_TO_FLOAT,
    LOAD_ONCE,
    PUBLISHED_BITS,
    PUBLISHED_VALUE,
    RECIPROCAL,
    RELAXED,
    SILU,
    Primitive,
    dequantisations,
    engine_words,
    floats,
    nibbles,
    on_cpu,
    operands_of,
    plan_of,
    source,
)
from small import LAYOUTS, TENSOR, inputs, references, run, weights

from tuner import awq, build, device, plan, reference, render, routing, space
from tuner.contract import Contract
from tuner.device import Call, Gpu
from tuner.errors import MissingTool
from tuner.plan import Outputs, Plan

HAS_GPU, WHY_NOT = device.available()
pytestmark = pytest.mark.skipif(not HAS_GPU, reason=WHY_NOT)

TOKENS = 12


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    yield Gpu()


def on_gpu(gpu: Gpu, primitive: Primitive, *given: np.ndarray, plain: bool = False) -> np.ndarray:
    """uint32 [n]: the primitive of each element, in a build for this GPU."""
    made = plan_of(primitive, len(given[0]), blocks=1024, threads=256)
    images = {"test": build.build(source(primitive, plain), gpu.info.arch)}
    return gpu.execute(made, images, operands_of(primitive, given), 1, "cubin").buffers["results"]


def assert_all_three_agree(gpu: Gpu, primitive: Primitive, *given: np.ndarray) -> None:
    """PTX on the GPU, its twin on the GPU and its twin on the CPU: the same bits, and a NaN for a NaN."""
    cpu = on_cpu(primitive, *given)
    for plain in (True, False):
        got = on_gpu(gpu, primitive, *given, plain=plain)
        nan = np.isnan(cpu.view(np.float32))
        assert np.isnan(got.view(np.float32))[nan].all()
        np.testing.assert_array_equal(got[~nan], cpu[~nan], err_msg=f"plain: {plain}")


def test_each_of_the_65536_halves_converts_alike(gpu: Gpu) -> None:
    assert_all_three_agree(gpu, HALF_TO_FLOAT, ALL_HALVES)


def test_4_million_floats_round_to_the_same_halves_nan_to_the_same_nan_too(gpu: Gpu) -> None:
    # Halves in an unsigned are no float's NaN: every bit is compared.
    assert_all_three_agree(gpu, FLOAT_TO_HALF, floats(1 << 22))


def test_4_million_weights_dequantise_alike(gpu: Gpu) -> None:
    assert_all_three_agree(gpu, HALF_DEQUANTISE, *dequantisations(1 << 22))


def test_every_nibble_less_every_zero_point_is_the_same_half_at_every_place(gpu: Gpu) -> None:
    given = nibbles()
    cpu = on_cpu(DIFFERENCES, *given)
    for plain in (True, False):
        np.testing.assert_array_equal(on_gpu(gpu, DIFFERENCES, *given, plain=plain), cpu, err_msg=f"plain: {plain}")


def test_4_million_weights_of_an_engine_dequantise_alike_in_words(gpu: Gpu) -> None:
    given = engine_words(1 << 22)
    cpu = on_cpu(DEQUANTISED, *given)
    for plain in (True, False):
        np.testing.assert_array_equal(on_gpu(gpu, DEQUANTISED, *given, plain=plain), cpu, err_msg=f"plain: {plain}")


@pytest.mark.parametrize("primitive", [PUBLISHED_BITS, PUBLISHED_VALUE], ids=lambda primitive: primitive.name)
def test_4_million_floats_are_published_alike(gpu: Gpu, primitive: Primitive) -> None:
    x = np.concatenate([np.array([0xFFFFFFFF], np.uint32).view(np.float32), floats(1 << 22)])
    np.testing.assert_array_equal(on_gpu(gpu, primitive, x), on_cpu(primitive, x))


@pytest.mark.parametrize("primitive", [LOAD_ONCE, RELAXED], ids=lambda primitive: primitive.name)
def test_accesses_past_the_first_cache_carry_every_bit(gpu: Gpu, primitive: Primitive) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    np.testing.assert_array_equal(on_gpu(gpu, primitive, words), words)


@pytest.mark.parametrize("primitive", [EXP_NEGATIVE, SILU], ids=lambda primitive: primitive.name)
def test_silu_gives_the_cpus_bits_for_4_million_floats(gpu: Gpu, primitive: Primitive) -> None:
    drawn = np.random.default_rng(2).uniform(-100, 100, 1 << 21).astype(np.float32)
    given = np.concatenate([floats(1 << 21), drawn])
    # A minimum of a signalling NaN differs (seen on an H200); SiLU, its one user, gives NaN all the same.
    given = given if primitive is SILU else given[~np.isnan(given)]
    assert_all_three_agree(gpu, primitive, given)


def test_reciprocals_of_normal_floats_are_within_1_spacing(gpu: Gpu) -> None:
    # rcp.approx.f32 is specified to 1 ulp, so it may differ from the twin, which rounds to nearest; where it is used, a
    # zero point within a hundredth of an integer is rounded to it. What f16 scales can hold is asked for.
    halves = ALL_HALVES.view(np.float16).astype(np.float32)
    x = halves[np.isfinite(halves) & (halves != 0)]
    ptx, twin = (on_gpu(gpu, RECIPROCAL, x, plain=plain).astype(np.int64) for plain in (False, True))
    assert np.abs(ptx - twin).max() <= 1
    np.testing.assert_array_equal(twin, on_cpu(RECIPROCAL, x))


def operands(small: Contract, ids: np.ndarray, route_weights: np.ndarray) -> dict[str, np.ndarray | None]:
    held = weights(small)
    return {
        "X": inputs(small, len(ids)),
        "TOPK_IDS": ids,
        "TOPK_WEIGHTS": route_weights,
        "W13_Q": held.w13.q,
        "W13_SCALES": held.w13.scales,
        "W13_ZEROS": held.w13.zeros,
        "W2_Q": held.w2.q,
        "W2_SCALES": held.w2.scales,
        "W2_ZEROS": held.w2.zeros,
    }


def images(gpu: Gpu, made: Plan, code: str) -> dict[str, build.Image]:
    """sm_70 code for "cubin" on a V100 and for "ptx", this GPU's own for "native"."""
    arch = gpu.info.arch if code == "native" else "sm_70"
    try:
        return {stage: build.build(one, arch) for stage, one in render.render(made).items()}
    except MissingTool as error:
        pytest.skip(str(error))


def replayed(
    gpu: Gpu,
    small: Contract,
    config: space.Config,
    drawn: routing.Routing,
    code: str,
    name: plan.PlanName = "fused",
) -> Outputs:
    """What the plan gives at first and, to the bit, in 20 replays of it."""
    made = plan.make(small, config, name)
    kernels = gpu.load(made, images(gpu, made, code), "ptx" if code == "ptx" else "cubin")
    step = gpu.step(made, operands(small, drawn.ids, drawn.weights), TOKENS)
    call = Call(made, kernels, step)
    gpu.launch(call)
    first = gpu.outputs(step)
    replay = gpu.capture([call])
    for _ in range(20):
        gpu.poison(step)
        assert replay.time_us() > 0
        again = gpu.outputs(step)
        assert again.out.tobytes() == first.out.tobytes() and again.hidden.tobytes() == first.hidden.tobytes()
    for _ in range(20):  # on what the run before has left
        replay.time_us()
    assert gpu.outputs(step).out.tobytes() == first.out.tobytes()
    return first


@pytest.mark.parametrize("code", ["native", "ptx"])
@pytest.mark.parametrize("numerics", ["exact", "engine"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_op_gives_the_cpus_bits_in_20_replays(gpu: Gpu, layout: str, numerics: str, code: str) -> None:
    small = replace(LAYOUTS[layout], numerics=numerics)
    drawn = routing.make("uniform", small, TOKENS, 3)
    cpu = run(small, inputs(small, TOKENS), drawn.ids, drawn.weights, name="staged")
    fused = replayed(gpu, small, space.default(small), drawn, code)
    np.testing.assert_array_equal(fused.out.view(np.uint16), cpu.out.view(np.uint16))
    staged = replayed(gpu, small, space.default(small), drawn, code, "staged")
    np.testing.assert_array_equal(staged.out.view(np.uint16), cpu.out.view(np.uint16))
    np.testing.assert_array_equal(staged.hidden.view(np.uint32), cpu.hidden.view(np.uint32))


def leeway(small: Contract, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """float64 [S, I]: how far apart hidden may be when gate and up are within 2^-20 of their sums of |products|."""
    half = small.local_intermediate
    bounds = np.empty((ids.size, half))
    for slot, expert in enumerate(ids.ravel()):
        one = awq.integers(small, weights(small), "w13", int(expert))
        q, z, s = (np.asarray(part, np.float64) for part in (one.q, one.z, one.s))
        weight = (q - np.repeat(z, small.group, 0)) * np.repeat(s, small.group, 0)
        row = x[slot // small.top_k].astype(np.float64)
        value, error = row @ weight, 2.0**-20 * (np.abs(row) @ np.abs(weight))
        gate, up, gate_error, up_error = value[:half], value[half:], error[:half], error[half:]
        silu = gate / (1 + np.exp(-gate))
        # SiLU's slope is at most 1.1 (1.0998); 2^-21 of the result for its own roundings, and those of the product.
        bounds[slot] = 1.1 * gate_error * (np.abs(up) + up_error) + np.abs(silu) * (up_error + 2.0**-21 * np.abs(up))
    return bounds


@pytest.mark.parametrize("code", ["native", "ptx"])
@pytest.mark.parametrize("layout", [layout for layout, small in LAYOUTS.items() if "tensor" in space.families(small)])
def test_tensor_cores_come_near_the_cpus_bits_and_keep_their_own_in_20_replays(
    gpu: Gpu, layout: str, code: str
) -> None:
    small = LAYOUTS[layout]
    drawn = routing.make("uniform", small, TOKENS, 3)
    assert (drawn.ids >= 0).all()  # so every row of hidden is one
    x = inputs(small, TOKENS)
    first = replayed(gpu, small, TENSOR, drawn, code)
    staged = replayed(gpu, small, TENSOR, drawn, code, "staged")
    assert staged.out.tobytes() == first.out.tobytes()
    cpu = run(small, x, drawn.ids, drawn.weights, config=TENSOR, name="staged")
    apart = np.abs(staged.hidden.astype(np.float64) - cpu.hidden.astype(np.float64))
    assert (apart <= leeway(small, x, drawn.ids)).all()
    difference = reference.compare(first.out, references(small).exact(x, drawn.ids, drawn.weights).output)
    assert difference.nonfinite == difference.missing_inf == 0
    assert difference.relative_l2 < 2.4e-4 and difference.max_scaled_ulp < 0.6
