"""Test kernels made of the template headers alone: one value in, one out, on the CPU or on a GPU."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tuner import contract, host, space
from tuner.plan import Buffer, Launch, Linear, Plan
from tuner.render import TEMPLATES, Source

_CTYPES = {"uint16": "unsigned short", "uint32": "unsigned", "float32": "float"}
_CONTRACT = contract.load("qwen38-tp4")
_BLOCKS, _THREADS = 8, 64


@dataclass(frozen=True)
class Primitive:
    """A function of the headers, applied to each element. Results are told by their bits, as uint32."""

    name: str
    inputs: tuple[tuple[str, str], ...]  # name, numpy dtype
    body: str  # an expression of the inputs, an unsigned; it may use their arrays, `results` and i, the element's index
    headers: tuple[str, ...] = ("half", "silu")


HALF_TO_FLOAT = Primitive("half_to_float", (("half", "uint16"),), "__float_as_uint(half_to_float(half))")
FLOAT_TO_HALF = Primitive("float_to_half", (("value", "float32"),), "float_to_half(value)")
HALF_DEQUANTISE = Primitive(
    "half_dequantise",
    (("nibble", "uint16"), ("scale", "uint16"), ("bias", "uint16")),
    "__float_as_uint(half_dequantise(nibble, scale, bias))",
)
RECIPROCAL = Primitive("reciprocal", (("value", "float32"),), "__float_as_uint(reciprocal(value))")
ROUND_TO_HALF = Primitive("round_to_half", (("value", "float32"),), "__float_as_uint(round_to_half(value))")
EXP_NEGATIVE = Primitive("exp_negative", (("value", "float32"),), "__float_as_uint(exp_negative(value))")
SILU = Primitive("silu", (("value", "float32"),), "__float_as_uint(silu(value))")

_TENSOR = ("half", "segments", "exchange", "int4", "tensor")
DIFFERENCES = Primitive(
    "differences",
    (("word", "uint32"), ("low", "uint32"), ("pair", "uint16")),
    "[&] { unsigned pairs[4]; differences(pairs, word, low); return pairs[pair]; }()",
    _TENSOR,
)
# Their complement, since all bits set would look unwritten.
PUBLISHED_BITS = Primitive("published_bits", (("value", "float32"),), "~published_bits(value)", _TENSOR)
DEQUANTISED = Primitive(
    "dequantised",
    (("word", "uint32"), ("scale", "uint16"), ("bias", "uint16"), ("pair", "uint16")),
    "[&] { unsigned pairs[4]; dequantised(pairs, word, scale * 0x00010001u, bias * 0x00010001u); "
    "return pairs[pair]; }()",
    _TENSOR,
)
PUBLISHED_VALUE = Primitive(
    "published_value", (("value", "float32"),), "__float_as_uint(published_value(published_bits(value)))", _TENSOR
)
LOAD_ONCE = Primitive(
    "load_once",
    (("word", "uint32"),),
    "[&] { const uint4 v = load_once(reinterpret_cast<const uint4*>(words) + i / 4); "
    "return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w; }()",
    _TENSOR,
)
RELAXED = Primitive(
    "relaxed",
    (("word", "uint32"),),
    "(store_relaxed(results + i, load_relaxed(words + i)), load_relaxed(results + i))",
    _TENSOR,
)


@lru_cache
def source(primitive: Primitive, plain: bool = False) -> Source:
    """The kernel; `plain`: with the C++ twins in place of PTX."""
    parameters = "".join(f"const {_CTYPES[dtype]}* {name}s, " for name, dtype in primitive.inputs)
    loads = " ".join(f"const {_CTYPES[dtype]} {name} = {name}s[i];" for name, dtype in primitive.inputs)
    text = "\n".join(
        (
            *(["#define VOLTUNE_PLAIN"] if plain else []),
            *((TEMPLATES / f"{header}.cuh").read_text() for header in primitive.headers),
            f'extern "C" __global__ void voltune_{primitive.name}({parameters}const int* counts, unsigned* results) {{',
            "  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < *counts; i += gridDim.x * blockDim.x) {",
            f"    {loads}",
            f"    results[i] = {primitive.body};",
            "  }\n}\n",
        )
    )
    return Source(f"voltune_{primitive.name}", "test", text)


def plan_of(primitive: Primitive, count: int, blocks: int = _BLOCKS, threads: int = _THREADS) -> Plan:
    """The launch of a primitive over `count` elements, at one token."""
    buffers = [Buffer(f"{name}s", dtype, (Linear(count),), "input") for name, dtype in primitive.inputs]
    buffers += [
        Buffer("counts", "int32", (Linear(1),), "input"),
        Buffer("results", "uint32", (Linear(count),), "output"),
    ]
    launch = Launch(
        stage="test",
        template=primitive.name,
        grid=(Linear(blocks), Linear(1)),
        block=threads,
        shared=Linear(0),
        arguments=tuple(buffer.name for buffer in buffers),
        constants={},
    )
    return Plan("fused", _CONTRACT, space.default(_CONTRACT), (launch,), tuple(buffers))


def operands_of(primitive: Primitive, inputs: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    named = {f"{name}s": array for (name, _), array in zip(primitive.inputs, inputs, strict=True)}
    return named | {"counts": np.array([len(inputs[0])], np.int32)}


def on_cpu(primitive: Primitive, *inputs: np.ndarray) -> np.ndarray:
    """uint32 [n]: the primitive of each element on the CPU executor, which takes the plain twins."""
    made = plan_of(primitive, len(inputs[0]))
    outputs = host.execute(made, {"test": source(primitive)}, operands_of(primitive, inputs), 1)
    return outputs.buffers["results"]


ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)


def floats(count: int, seed: int = 0) -> np.ndarray:
    """float32 [count]: random bit patterns, and every value within 3 float steps of an f16 number or of halfway between
    two, where rounding is decided."""
    rng = np.random.default_rng(seed)
    halves = ALL_HALVES[(ALL_HALVES & 0x7FFF) < 0x7C00].view(np.float16).astype(np.float32)
    positive = np.unique(np.abs(halves))
    middles = np.append((positive[1:] + positive[:-1]) / 2, np.float32(65520))
    centres = np.concatenate([positive, middles]).view(np.uint32)
    near = (centres[:, None].astype(np.int64) + np.arange(-3, 4)).ravel()
    near = near[near >= 0].astype(np.uint32)
    special = np.array([0x7F800000, 0x7F7FFFFF, 0x7FC00000, 0x7F800001, 1, 0x007FFFFF, 0x00800000], np.uint32)
    bits = np.concatenate([near, special])
    bits = np.concatenate([bits, bits | np.uint32(1 << 31)])
    assert len(bits) < count
    drawn = rng.integers(0, 1 << 32, count - len(bits), np.uint32)
    return np.concatenate([bits, drawn]).view(np.float32)


def dequantisations(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """uint16 [count] each, finite: all nibbles times scales, each other with an engine's bias f16(-z * s), else any."""
    rng = np.random.default_rng(seed)
    pairs = count // 16
    scale = rng.integers(0, 0x7C00, pairs, np.uint16) | (rng.integers(0, 2, pairs, np.uint16) << np.uint16(15))
    with np.errstate(over="ignore"):
        engine = (-(rng.integers(0, 16, pairs) * scale.view(np.float16).astype(np.float32))).astype(np.float16)
    bias = rng.integers(0, 0x7C00, pairs, np.uint16) | (rng.integers(0, 2, pairs, np.uint16) << np.uint16(15))
    bias = np.where((np.arange(pairs) % 2 == 0) & np.isfinite(engine), engine.view(np.uint16), bias)
    nibble = np.tile(np.arange(16, dtype=np.uint16), pairs)
    return nibble, np.repeat(scale, 16), np.repeat(bias, 16)


def nibbles() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `differences` takes: each nibble at each place beside each zero point, other nibbles random, and each pair.

    uint32 words, uint32 -(1024 + z) as half2, uint16 pairs.
    """
    z, q, place, pair = (grid.ravel().astype(np.uint32) for grid in np.meshgrid(*map(np.arange, (16, 16, 8, 4))))
    drawn = np.random.default_rng(0).integers(0, 1 << 32, len(z), np.uint32)
    words = drawn & ~(np.uint32(15) << 4 * place) | q << 4 * place
    return words, z * np.uint32(0x00010001) | np.uint32(0xE400E400), pair.astype(np.uint16)


def engine_words(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What `dequantised` takes: random words, scales and biases as `dequantisations` has them, and pairs."""
    _, scale, bias = dequantisations(count)
    rng = np.random.default_rng(1)
    return rng.integers(0, 1 << 32, len(scale), np.uint32), scale, bias, rng.integers(0, 4, len(scale), np.uint16)
