"""Kernels broken on purpose: each break of a template must be found, by the check that its row names.

A mutation changes the text of the rendered sources that hold `old`. They then go through what `verify` runs (references
and three orders of threads and CTAs, then odd calls on every plan), and, before the plans other than the fused one, a
count of the work. CONTRIBUTING.md lists what finds which, and is held to it here.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from small import LAYOUTS, SMALL, TENSOR, work_counts

from tuner import host, plan, render, verify
from tuner.cases import make_case
from tuner.contract import Contract
from tuner.plan import PLANS, Outputs, Plan
from tuner.render import Source
from tuner.space import Config, W2Config, W13Config
from tuner.verify import Layers, Verdict

FOUR_BYTES = LAYOUTS["sm70-u4 4-byte concatenated"]
AWQ = LAYOUTS["awq"]
MANY = replace(SMALL, experts=40)  # more than a word of bits has
LONE = replace(SMALL, top_k=1)  # one slot a token
ENGINE = replace(SMALL, numerics="engine", tolerance=2e-3)

# Split K, a ring that turns, several tiles a CTA; one row a pass, which is quicker to compile than several.
CONFIG = Config(W13Config("simt", 2, 2, 2, 1), W2Config("simt", 4, 1, 1, 1))
FOUR_ROWS = Config(replace(CONFIG.w13, rows=4), replace(CONFIG.w2, rows=4))
W2_SPLIT = replace(CONFIG, w2=replace(CONFIG.w2, split_k=2))

FLOAT64 = "float64 reference"
ENGINE_REFERENCE = "engine-numerics reference"
REPORT = "fault report"
ORDERS = "bits in another order"
PLAN = "another plan"
COUNT = "count of the work"


def edge(name: str) -> str:
    return f"odd call: {name}"


W13_ONLY, W2_ONLY = ("w13",), ("w2",)


@dataclass(frozen=True)
class Mutation:
    name: str
    old: str
    new: str
    found_by: str
    contract: Contract = SMALL
    config: Config = CONFIG
    stages: tuple[str, ...] = ("compact", "w13", "w2")  # whose kernels are changed: one, where that spares compiling


MUTATIONS = (
    # Weights
    Mutation(
        "zero point of 3-byte statistics left out",
        "zero = triple >> 16 & 0xfu;",
        "zero = 0;",
        FLOAT64,
        stages=W13_ONLY,
    ),
    Mutation(
        "zero point of 3-byte statistics one up, as GPTQ has it",
        "zero = triple >> 16 & 0xfu;",
        "zero = (triple >> 16 & 0xfu) + 1;",
        FLOAT64,
        stages=W2_ONLY,
    ),
    Mutation(
        "zero point of 4-byte statistics cut instead of rounded",
        "0x1.8p23f)) & 0xfu",
        "0x1.7ffffep23f)) & 0xfu",
        FLOAT64,
        FOUR_BYTES,
        stages=W13_ONLY,
    ),
    Mutation(
        "zero points of 4-byte statistics with the bias's sign",
        "fmaf(-half_to_float(found.bias)",
        "fmaf(half_to_float(found.bias)",
        FLOAT64,
        FOUR_BYTES,
        stages=W2_ONLY,
    ),
    Mutation(
        "zero point of awq taken from the word's first column",
        "field_of(f.zeros, c)",
        "field_of(f.zeros, 0)",
        FLOAT64,
        AWQ,
        stages=W13_ONLY,
    ),
    Mutation(
        "nibble order: halves of a word swapped",
        "index & 1 ? word >> 16 : word",
        "index & 1 ? word : word >> 16",
        FLOAT64,
        stages=W2_ONLY,
    ),
    Mutation(
        "nibble order: plain ascending",
        "return index / 2; }",
        "return index % 4; }",
        FLOAT64,
        stages=W13_ONLY,
    ),
    Mutation(
        "nibble order of awq: halves of a word swapped",
        "index & 1 ? word >> 16 : word",
        "index & 1 ? word : word >> 16",
        FLOAT64,
        AWQ,
        stages=W2_ONLY,
    ),
    Mutation(
        "nibble's place not taken back from activations",
        "inverse_place(k % 8)",
        "1.0f",
        FLOAT64,
        stages=W13_ONLY,
    ),
    Mutation(
        "nibble's place not taken back from awq's scales",
        "half_to_float(stats.engine_scale) * inverse_place(c)",
        "half_to_float(stats.engine_scale)",
        FLOAT64,
        AWQ,
        stages=W2_ONLY,
    ),
    Mutation(
        "octet taken from the wrong lanes",
        "first * 4 + (lane_id() >> 3)",
        "first * 4 + (lane_id() & 3)",
        FLOAT64,
        stages=W13_ONLY,
    ),
    Mutation(
        "octets a word too near",
        "octet) * 32 + column % 32",
        "octet) * 31 + column % 32",
        REPORT,
        stages=W2_ONLY,
    ),
    Mutation("steps half as far apart", "words += 32;", "words += 16;", FLOAT64, stages=W13_ONLY),
    Mutation(
        "rows of awq half as far apart",
        "words[k * (N / 8)]",
        "words[k * (N / 16)]",
        FLOAT64,
        AWQ,
        stages=W2_ONLY,
    ),
    Mutation(
        "scale and zero of the neighbouring column",
        "R::column(fragment, c)",
        "R::column(fragment, c ^ 1)",
        FLOAT64,
        stages=W13_ONLY,
    ),
    Mutation(
        "scale and zero of awq's neighbouring column",
        "R::column(fragment, c)",
        "R::column(fragment, c ^ 1)",
        FLOAT64,
        AWQ,
        stages=W2_ONLY,
    ),
    Mutation(
        "second column's 3 bytes read from a byte on",
        "s[0] >> 24 | s[1] << 8",
        "s[1] >> 8",
        FLOAT64,
        stages=W13_ONLY,
    ),
    Mutation(
        "group index counted from the warp's own first step",
        " + first / kGroupSteps<C>;",
        ";",
        FLOAT64,
        stages=W13_ONLY,
    ),
    Mutation(
        "group index of awq counted from the warp's own first step",
        " + first / kGroupSteps<C>)",
        ")",
        FLOAT64,
        AWQ,
        stages=W13_ONLY,
    ),
    Mutation(
        "every step its own group",
        "if (++step % kGroupSteps<C> == 0) stats",
        "stats",
        REPORT,
        LAYOUTS["sm70-u4 group 64"],
        stages=W2_ONLY,
    ),
    Mutation(
        "expert 0's words for every expert",
        "t.q + (long long)expert * (K * (N / 8))",
        "t.q + (long long)expert * 0",
        FLOAT64,
        stages=W13_ONLY,
    ),
    Mutation(
        "ring of weights read a place too far",
        "(ring[u], octet",
        "(ring[(u + 1) % C::kUnroll], octet",
        FLOAT64,
        stages=W13_ONLY,
    ),
    Mutation(
        "ring of weights filled past the warp's share",
        "if (base + u + C::kUnroll < kSteps) ",
        "",
        REPORT,
        stages=W13_ONLY,
    ),
    Mutation(
        "one octet left out of the warp's sum",
        "sums[r][c] += __shfl_xor_sync(0xffffffffu, sums[r][c], 16);",
        "",
        FLOAT64,
        stages=W2_ONLY,
    ),
    # Rows
    Mutation(
        "activations of another token",
        "(slots[r] / C::kTopK) * kK",
        "(slots[r] % C::kTopK) * kK",
        FLOAT64,
        config=FOUR_ROWS,
    ),
    Mutation(
        "row mask of W13: rows past the last not masked",
        "i < count * C::kTiles",
        "i < F::kPassRows * C::kTiles",
        COUNT,
        config=FOUR_ROWS,
    ),
    Mutation(
        "row mask of W13: last row masked too",
        "i < count * C::kTiles",
        "i < (count - 1) * C::kTiles",
        FLOAT64,
        config=FOUR_ROWS,
    ),
    Mutation(
        "row mask of W2: rows past the last not masked",
        "if (r >= count) break;",
        "",
        FLOAT64,
        config=FOUR_ROWS,
        stages=W2_ONLY,
    ),
    Mutation(
        "row mask of W2: last row masked too",
        "if (r >= count) break;",
        "if (r + 1 >= count) break;",
        FLOAT64,
        config=FOUR_ROWS,
        stages=W2_ONLY,
    ),
    Mutation(
        "rows of W13 put into the first one's place",
        "arena.partial[split][r]",
        "arena.partial[split][0]",
        FLOAT64,
        config=FOUR_ROWS,
    ),
    Mutation(
        "rows of W13 begun at the first warp's share", "* kK + step * 32; },", "* kK; },", FLOAT64, stages=W13_ONLY
    ),
    # Barriers
    Mutation(
        "barrier after W13's staging of experts", "experts = shared;\n    __syncthreads();", "experts = shared;", REPORT
    ),
    Mutation(
        "barrier before W13 adds the parts",
        "__syncthreads();\n      finish(",
        "finish(",
        FLOAT64,
    ),
    Mutation("barrier after W13 has added the parts", "count);\n      __syncthreads();", "count);", ORDERS),
    Mutation(
        "barrier that one warp of W13 does not reach",
        "__syncthreads();\n      finish(",
        "if (warp_id() > 0) __syncthreads();\n      finish(",
        REPORT,
    ),
    Mutation(
        "warp's barrier between staging and multiplying", "    __syncwarp();\n    float sums", "    float sums", FLOAT64
    ),
    Mutation(
        "warp's barrier before a pass's slots in W2",
        "__syncwarp();  // the rows before these are done with",
        "",
        FLOAT64,
        stages=W2_ONLY,
    ),
    Mutation("warp's barrier after a pass's slots", "__syncwarp();\n  return count;", "return count;", REPORT),
    Mutation("barrier before W2 combines", "__syncthreads();\n    combine(", "combine(", FLOAT64),
    Mutation("barrier of the compaction after ids", "(arena.experts);\n  __syncthreads();", "(arena.experts);", PLAN),
    Mutation("barrier of the compaction after first slots", "= slot;\n  }\n  __syncthreads();", "= slot;\n  }", PLAN),
    Mutation(
        "barrier of the sorted compaction",
        "arena.occupied[word] = mask;\n  }\n  __syncthreads();",
        "arena.occupied[word] = mask;\n  }",
        PLAN,
        MANY,
    ),
    Mutation(
        "barrier of W2's listed segments", "experts[slot] = -1;\n    __syncthreads();", "experts[slot] = -1;", PLAN
    ),
    # Sums
    Mutation(
        "split-K part of W13 left out",
        "part < C::kSplitK; ++part) {\n        gate",
        "part < C::kSplitK - 1; ++part) {\n        gate",
        FLOAT64,
    ),
    Mutation(
        "split-K part of W2 left out",
        "part < C::kSplitK; ++part) {\n          route",
        "part < C::kSplitK - 1; ++part) {\n          route",
        FLOAT64,
        config=W2_SPLIT,
    ),
    Mutation("gate and up swapped", "return silu(gate) * up;", "return silu(up) * gate;", FLOAT64),
    Mutation(
        "gate and up swapped where they are concatenated",
        "group < 4 ? 0 : C::kIntermediate",
        "group < 4 ? C::kIntermediate : 0",
        FLOAT64,
        FOUR_BYTES,
    ),
    Mutation(
        "SiLU without its clamp",
        "fminf(fmaxf(-x, -87.3365448f), 87.3365448f)",
        "-x",
        edge("activations far out on SiLU"),
    ),
    Mutation("SiLU's series cut off after its third power", "fmaf(p, f, 5.55041087e-2f)", "5.55041087e-2f", FLOAT64),
    Mutation("routing weight left out", "fmaf(arena.route_weights[slot], route, sum)", "sum + route", FLOAT64),
    Mutation(
        "routing weight of the token's first expert",
        "fmaf(arena.route_weights[slot],",
        "fmaf(arena.route_weights[token * C::kTopK],",
        FLOAT64,
    ),
    Mutation("slots without an expert combined", "if (arena.experts[slot] < 0) continue;", "", edge("ids below 0")),
    Mutation(
        "token's last slot left out",
        "slot < (token + 1) * C::kTopK; ++slot",
        "slot < (token + 1) * C::kTopK - 1; ++slot",
        FLOAT64,
    ),
    Mutation(
        "rounding of SiLU to f16 left out",
        "round_to_half(silu(round_to_half(gate)))",
        "silu(round_to_half(gate))",
        ENGINE_REFERENCE,
        ENGINE,
    ),
    Mutation("rounding of W2's rows to f16 left out", "route = round_to_half(route);", ";", ENGINE_REFERENCE, ENGINE),
    Mutation(
        "rounding of weights to f16 left out",
        "weight = weight_of<C, R>(fragment, stats, c, k);",
        "weight = stats.scale * inverse_place(k) *"
        " (above_2_23(field_of(R::word(fragment, c, k), k)) - stats.zeros[k / 2]);",
        ENGINE_REFERENCE,
        ENGINE,
    ),
    # Tensor cores
    Mutation(
        "tensor cores: octet taken from the wrong lanes",
        "int octet() { return quadpair(); }",
        "int octet() { return lane_id() & 3; }",
        FLOAT64,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: columns taken from the wrong lanes",
        "(lane_id() & 3) | (lane_id() >> 4) << 2;",
        "lane_id() & 7;",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: rows of the sums mistaken",
        "(i >> 1) * 4 + (lane_id() & 2)",
        "(i >> 1) * 4 + (lane_id() & 1) * 2",
        FLOAT64,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: columns of the sums mistaken",
        "(lane_id() & 1) + (i & 2) +",
        "(lane_id() & 1) * 2 + (i >> 1 & 1) +",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: scales of a lane one away",
        "__shfl_xor_sync(0xffffffffu, s[c], 2)",
        "__shfl_xor_sync(0xffffffffu, s[c], 1)",
        FLOAT64,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: scales of the two indexes swapped",
        "i & 2 ? second : first",
        "i & 2 ? first : second",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: quadpairs of the other half not added",
        " + __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[16 + i], 8)",
        "",
        FLOAT64,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: neighbouring quadpair gives the half it keeps",
        "odd ? half[i] : half[8 + i], 4)",
        "odd ? half[8 + i] : half[i], 4)",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: zero point one up",
        "statistics.zero * 0x00010001u + 0x64006400u",
        "(statistics.zero + 1) * 0x00010001u + 0x64006400u",
        FLOAT64,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: nibbles of a word in plain order",
        ">> (4 * i) & 0x000f000fu",
        ">> (4 * (3 - i)) & 0x000f000fu",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: words of the neighbouring octet",
        "octet) * 32 + column % 32",
        "(octet ^ 1)) * 32 + column % 32",
        FLOAT64,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: groups half as far apart",
        "stats += N / 4 * C::kStatsBytes;",
        "stats += N / 8 * C::kStatsBytes;",
        FLOAT64,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: statistics of columns a word apart",
        "(group * N + column) / 4 * C::kStatsBytes",
        "(group * N + column) / 4",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: rows advanced by half a step",
        "row += 4;",
        "row += 2;",
        FLOAT64,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: columns of W2 advanced by half a step",
        "planes += 4;",
        "planes += 2;",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: ring read a place too far",
        "accumulate(ring[u], sums);",
        "accumulate(ring[(u + 1) % C::kUnroll], sums);",
        FLOAT64,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: ring filled past the warp's share",
        "if (base + u + C::kUnroll < kSteps) ",
        "",
        REPORT,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: rows past the last looked up",
        "row_of(min(TensorLanes::index(), count - 1))",
        "row_of(TensorLanes::index())",
        REPORT,
        LONE,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: row mask of W13: last row masked too",
        "if (row < count) put",
        "if (row < count - 1) put",
        FLOAT64,
        config=TENSOR,
        stages=W13_ONLY,
    ),
    Mutation(
        "tensor cores: row mask of W2: rows past the last not masked",
        "else if (row / 2 < count)",
        "else",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: warp's barrier between splitting and multiplying",
        "      __syncwarp();\n    }\n    float sums",
        "    }\n    float sums",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: row's scale not taken back",
        "(rounded + sum) * shared.unscale[row / 2]",
        "(rounded + sum)",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: row's scale taken from the first row",
        "shared.unscale[row / 2]",
        "shared.unscale[0]",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: what rounding left not added",
        "(rounded + sum) *",
        "rounded *",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: what rounding left taken from the wrong side",
        "value - half_to_float(rounded)",
        "half_to_float(rounded) - value",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: row scaled by a lane's own largest",
        "largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));",
        "",
        FLOAT64,
        config=TENSOR,
        stages=W2_ONLY,
    ),
    # Routing
    Mutation(
        "padding tokens routed",
        "slot < live_slots ? expert_of<C>(slot) : -1",
        "expert_of<C>(slot)",
        edge("no live token"),
    ),
    Mutation(
        "live tokens not held to the step's",
        "min(max(*live_tokens, 0), tokens)",
        "*live_tokens",
        edge("a negative count of live tokens"),
    ),
    Mutation(
        "ids below 0 taken", "id >= 0 && id < C::kExperts ?", "id < C::kExperts ?", edge("int64 ids past 32 bits")
    ),
    Mutation("ids that name no expert taken for expert 0", "(int)id : -1;", "(int)id : 0;", edge("ids below 0")),
    Mutation(
        "ids past the last expert taken", "id >= 0 && id < C::kExperts ?", "id >= 0 ?", edge("ids past the last expert")
    ),
    Mutation("int64 ids read as int32", "id_bytes == 8 ?", "id_bytes == 0 ?", edge("int64 ids")),
    Mutation(
        "int64 ids cut to 32 bits",
        "? static_cast<const long long*>(ids)[slot]",
        "? (int)static_cast<const long long*>(ids)[slot]",
        edge("int64 ids past 32 bits"),
    ),
    Mutation("expert map ignored", "if (expert_map != nullptr)", "if (false)", edge("expert map")),
    Mutation(
        "ids past the map looked up",
        "id >= 0 && id < map_size ?",
        "id >= 0 ?",
        edge("expert map shorter than the experts"),
    ),
    Mutation(
        "segment's first slot not told from the others",
        "return (rest & ((1u << (slot - base)) - 1u)) == 0;",
        "return true;",
        COUNT,
    ),
    Mutation("slots past the first 32 not looked at", "if (base >= count()) return -1;", "return -1;", FLOAT64),
    Mutation(
        "earlier slots than the last 32 not looked at", "if (peers(base) != 0) return false;", "peers(base);", COUNT
    ),
    # Compaction
    Mutation(
        "compaction's positions one off", "(e >= 0 && e < expert) || same", "(e >= 0 && e <= expert) || same", PLAN
    ),
    Mutation(
        "compaction's segment begins one off",
        "const bool below = e >= 0 && e < expert;",
        "const bool below = e >= 0 && e <= expert;",
        PLAN,
    ),
    Mutation(
        "compaction's list not closed", "slot <= slots; slot += blockDim.x", "slot < slots; slot += blockDim.x", PLAN
    ),
    Mutation("compaction lists an expert at each of its slots", "expert >= 0 && earlier == 0", "expert >= 0", PLAN),
    Mutation(
        "compaction counts slots without an expert",
        "position += (e >= 0 && e < expert)",
        "position += (e < expert)",
        PLAN,
    ),
    Mutation(
        "compaction of all experts counts slots without one",
        "begin += arena.experts[slot] >= 0 && arena.experts[slot] < expert",
        "begin += arena.experts[slot] < expert",
        PLAN,
    ),
    Mutation(
        "sorted compaction lists experts without rows",
        "offsets[expert + 1] > offsets[expert]",
        "offsets[expert + 1] >= offsets[expert]",
        PLAN,
        MANY,
    ),
    Mutation(
        "sorted compaction forgets the words before", "word < expert / 32; ++word", "word < 0; ++word", PLAN, MANY
    ),
    Mutation(
        "sorted compaction counts the expert itself", "(1u << (expert % 32)) - 1u)", "(2u << (expert % 32)) - 1u)", PLAN
    ),
    Mutation(
        "listed segments end a slot early", "end = segment_begin[i + 1];", "end = segment_begin[i + 1] - 1;", PLAN
    ),
)

# What no check finds, since the result stays right; for each, why.
EQUIVALENT = (
    Mutation(
        "warp's barrier before a pass's slots in W13",
        "__syncwarp();  // the rows before these are done with",
        "",
        "there the whole block has a barrier after each pass",
        stages=W13_ONLY,
    ),
    Mutation(
        "rows past the last read as shared memory has them",
        "min(r, count - 1) * kShare",
        "r * kShare",
        "their sums are not used",
        config=FOUR_ROWS,
    ),
    Mutation(
        "tensor cores: columns of W2 past the last row read as shared memory has them",
        "min(TensorLanes::index(), 2 * count - 1)",
        "TensorLanes::index()",
        "an mma keeps its columns apart, and these are not used",
        config=TENSOR,
        stages=W2_ONLY,
    ),
    Mutation(
        "tensor cores: row mask of W13",
        "if (row < count) put",
        "put",
        "parts of rows past the last have a place of their own, and W13's end does not add them",
        config=TENSOR,
        stages=W13_ONLY,
    ),
)

GUIDE = Path(__file__).parent.parent / "CONTRIBUTING.md"


@dataclass(frozen=True)
class Mutant:
    """The CPU executor over broken templates."""

    mutation: Mutation

    name = "mutant, emulated on CPU"

    def text(self, source: Source) -> str:
        """The source's, broken where it has the text."""
        chosen = source.stage in self.mutation.stages
        return source.text.replace(self.mutation.old, self.mutation.new) if chosen else source.text

    def run(self, made: Plan, operands: verify.Operands, tokens: int, order: int) -> Outputs:
        sources = {stage: replace(source, text=self.text(source)) for stage, source in render.render(made).items()}
        return host.execute(made, sources, operands, tokens, order=order, timeout_s=20)


@lru_cache
def layers(contract: Contract) -> Layers:
    return Layers(contract)


def counts_are_right(mutation: Mutation) -> bool:
    """Whether each routed row is multiplied once and no other is."""
    case = make_case(mutation.contract, 12, "uniform", "gaussian")
    hidden, rows = work_counts(mutation.contract, case.ids, mutation.config, Mutant(mutation).text)
    return bool((hidden == 1).all() and (rows == mutation.contract.top_k * mutation.config.w2.split_k).all())


def found_by(mutation: Mutation) -> str | None:
    """What finds the mutation first, in the table's words; None when nothing does.

    What `verify` runs, at 12 tokens and the odd calls at 2, and the count. The fused plan alone comes first, to spare
    compiling.
    """
    checked = layers(mutation.contract), mutation.config, Mutant(mutation)
    levels: dict[str, Any] = {"tokens": (12,), "routings": ("uniform", "single-hot"), "inputs": ("gaussian",)}
    fused = chain(verify.verify(*checked, **levels), verify.verify_edges(*checked, plans=("fused",)))
    wrong = next((named(verdict, mutation) for verdict in fused if not verdict.ok), None)
    if wrong is None and not counts_are_right(mutation):
        wrong = COUNT
    plans = verify.verify_edges(*checked)
    return wrong or next((named(verdict, mutation) for verdict in plans if not verdict.ok), None)


def named(verdict: Verdict, mutation: Mutation) -> str:
    reason, odd = verdict.reasons[0], verdict.case.removeprefix("rank 0, C2, ")
    if " plan, order " in reason and not reason.startswith("fused"):
        return PLAN
    if odd != verdict.case:
        return edge(odd)
    if "has other bits" in reason:
        return ORDERS
    if "kernel voltune" in reason:
        return REPORT
    return ENGINE_REFERENCE if mutation.contract.numerics == "engine" else FLOAT64


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_template_is_found_by_what_the_guide_names(mutation: Mutation) -> None:
    assert found_by(mutation) == mutation.found_by
    assert f"| {mutation.name} | {mutation.found_by} |" in GUIDE.read_text()


@pytest.mark.parametrize("mutation", EQUIVALENT, ids=lambda mutation: mutation.name)
def test_what_the_guide_calls_harmless_leaves_every_check_content(mutation: Mutation) -> None:
    assert found_by(mutation) is None
    assert f"| {mutation.name} | nothing: {mutation.found_by} |" in GUIDE.read_text()


@pytest.mark.parametrize("mutation", MUTATIONS + EQUIVALENT, ids=lambda mutation: mutation.name)
def test_every_mutation_still_changes_a_kernel(mutation: Mutation) -> None:
    made = [plan.make(mutation.contract, mutation.config, name) for name in PLANS]
    sources = [source for one in made for source in render.render(one).values()]
    assert any(Mutant(mutation).text(source) != source.text for source in sources)


def test_the_guide_names_no_mutation_that_is_not_tried() -> None:
    table = GUIDE.read_text().split("| broken | found by |\n| --- | --- |\n")[1].split("\n\n")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
    assert rows == [mutation.name for mutation in MUTATIONS + EQUIVALENT]


@pytest.mark.parametrize(("contract", "config"), [(ENGINE, CONFIG), (MANY, CONFIG), (SMALL, TENSOR)])
def test_templates_that_are_not_broken_leave_every_check_content(contract: Contract, config: Config) -> None:
    assert found_by(Mutation("none", "\0", "\0", "", contract, config)) is None
