"""Kernels broken on purpose: each break of a template must be found, by the check that its row names.

A mutation changes the text of the rendered sources that hold `old`. They then go through what `verify` runs: references
and three orders of threads and CTAs, then odd calls on every plan; and, before the plans other than the fused one, a
count of the work. CONTRIBUTING.md lists what finds which, and is held to it here.

One worker runs CTA after CTA, so that what a mutant does is the same each time.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
from small import LAYOUTS, SMALL, TENSOR, work_counts

from tuner import host, plan, render, space, verify
from tuner.cases import make_case
from tuner.contract import Contract
from tuner.plan import PLANS, Outputs, Plan
from tuner.render import Source
from tuner.space import Config
from tuner.verify import Layers, Subject, Verdict

FOUR_BYTES = LAYOUTS["sm70-u4 4-byte concatenated"]
AWQ = LAYOUTS["awq"]
MANY = replace(SMALL, experts=40)  # more than a word of bits has
CROWD = replace(SMALL, experts=1056)  # more words of bits than a warp has lanes
LONE = replace(SMALL, top_k=1)  # one slot a token
WIDE = replace(MANY, top_k=20)  # more routes of a token than are combined at once
LONG = replace(SMALL, intermediate=288)  # more K of W2 than a warp loads at once, and nine steps
NARROW = replace(SMALL, hidden=320)  # columns that a CTA's threads do not divide
ENGINE = replace(SMALL, numerics="engine", tolerance=2e-3)
# Values enough that one of them, rounded the other way, does not break a limit: tensor cores add in another order.
ENGINE_128 = replace(ENGINE, intermediate=128)

# Split K, a ring that turns, several tiles a CTA; one row a pass, which is quicker to compile than several.
CONFIG = space.parse("simt-t2-k2-u2-r1+simt-t4-k1-u1-r1+m512")
FOUR_ROWS = space.parse("simt-t2-k2-u2-r4+simt-t4-k1-u1-r4+m512")
W2_SPLIT = space.parse("simt-t2-k2-u2-r1+simt-t2-k2-u1-r1+m512")
HALVES = space.parse("simt-t2-k2-u1-r1+simt-t2-k2-u1-r1+m512")
UNSPLIT = space.parse("simt-t1-k1-u1-r1+simt-t1-k1-u1-r1+m512")
TENSOR_ENGINE = replace(TENSOR, w2=replace(TENSOR.w2, rows=8))
TENSOR_UNSPLIT = space.parse("tensor-t1-k1-u1-r8+tensor-t1-k1-u1-r4+m512")

FLOAT64 = "float64 reference"
ENGINE_REFERENCE = "engine-numerics reference"
REPORT = "fault report"
ORDERS = "bits in another order"
TIMEOUT = "time-out"
PLAN = "another plan"
COUNT = "count of the work"


def edge(name: str) -> str:
    return f"odd call: {name}"


@dataclass(frozen=True)
class Mutation:
    name: str
    old: str
    new: str
    found_by: str
    contract: Contract = SMALL
    config: Config = CONFIG
    also: tuple[tuple[str, str], ...] = ()  # other changes with it
    hangs: bool = False  # a time-out finds it, whatever its row says: of another plan, or in an odd call

    @property
    def timeout_s(self) -> float:
        """Of a mutant's run, which takes a tenth of a second on an idle machine."""
        return 2.0 if self.hangs or self.found_by == TIMEOUT else 20.0


W2_FIRST = (
    "return arena.tickets[turn];",
    "const int drawn = arena.tickets[turn];\n"
    "      const int items = segments.count() * (First::kItems + Second::kItems);\n"
    "      return drawn < items ? items - 1 - drawn : drawn;",
)

MUTATIONS = (
    # Weights
    Mutation("zero point of 3-byte statistics left out", "zero = triple >> 16 & 0xfu;", "zero = 0;", FLOAT64),
    Mutation(
        "zero point of 3-byte statistics one up, as GPTQ has it",
        "zero = triple >> 16 & 0xfu;",
        "zero = (triple >> 16 & 0xfu) + 1;",
        FLOAT64,
    ),
    Mutation(
        "zero point of 4-byte statistics cut instead of rounded",
        "0x1.8p23f)) & 0xfu",
        "0x1.7ffffep23f)) & 0xfu",
        FLOAT64,
        FOUR_BYTES,
    ),
    Mutation(
        "zero points of 4-byte statistics with the bias's sign",
        "fmaf(-half_to_float(found.bias)",
        "fmaf(half_to_float(found.bias)",
        FLOAT64,
        FOUR_BYTES,
    ),
    Mutation(
        "zero point of awq taken from the word's first column",
        "field_of(f.zeros, c)",
        "field_of(f.zeros, 0)",
        FLOAT64,
        AWQ,
    ),
    Mutation(
        "nibble order: halves of a word swapped",
        "index & 1 ? word >> 16 : word",
        "index & 1 ? word : word >> 16",
        FLOAT64,
    ),
    Mutation("nibble order: plain ascending", "return index / 2; }", "return index % 4; }", FLOAT64),
    Mutation(
        "nibble order of awq: halves of a word swapped",
        "index & 1 ? word >> 16 : word",
        "index & 1 ? word : word >> 16",
        FLOAT64,
        AWQ,
    ),
    Mutation("nibble's place not taken back from activations", "inverse_place(k % 8)", "1.0f", FLOAT64),
    Mutation(
        "nibble's place not taken back from W2's activations",
        "__uint_as_float((127u - 4u * (k % 8 / 2)) << 23)",
        "1.0f",
        FLOAT64,
    ),
    Mutation(
        "nibble's place not taken back from awq's scales",
        "half_to_float(stats.engine_scale) * inverse_place(c)",
        "half_to_float(stats.engine_scale)",
        FLOAT64,
        AWQ,
    ),
    Mutation("octet taken from the wrong lanes", "lane_id() >> 3; }", "lane_id() & 3; }", FLOAT64),
    Mutation("octets a word too near", "octet) * 32 + column % 32", "octet) * 31 + column % 32", REPORT),
    Mutation("steps half as far apart", "words += 32;", "words += 16;", FLOAT64),
    Mutation("rows of awq half as far apart", "words[k * (N / 8)]", "words[k * (N / 16)]", FLOAT64, AWQ),
    Mutation(
        "scale and zero of the neighbouring column", "R::column(fragment, c)", "R::column(fragment, c ^ 1)", FLOAT64
    ),
    Mutation(
        "scale and zero of awq's neighbouring column",
        "R::column(fragment, c)",
        "R::column(fragment, c ^ 1)",
        FLOAT64,
        AWQ,
    ),
    Mutation("second column's 3 bytes read from a byte on", "0x0543u", "0x0654u", FLOAT64),
    Mutation("third column's 3 bytes read from a byte on", "0x0432u", "0x0543u", FLOAT64),
    Mutation("fourth column's 3 bytes read from a byte before", "s[2] >> 8", "s[2]", FLOAT64),
    Mutation("group index counted from the warp's own first step", " + first / kGroupSteps<C>;", ";", FLOAT64),
    Mutation(
        "group index of awq counted from the warp's own first step", " + first / kGroupSteps<C>)", ")", FLOAT64, AWQ
    ),
    Mutation(
        "every step its own group",
        "if (++step % kGroupSteps<C> == 0) stats",
        "stats",
        REPORT,
        LAYOUTS["sm70-u4 group 64"],
    ),
    Mutation(
        "expert 0's words for every expert",
        "t.q + (long long)expert * (K * (N / 8))",
        "t.q + (long long)expert * 0",
        FLOAT64,
    ),
    Mutation(
        "gate and up columns counted from each other's place",
        "(index < 4 ? 0 : apart)",
        "(index < 4 ? apart : 0)",
        FLOAT64,
        FOUR_BYTES,
    ),
    Mutation(
        "up columns a tile's half too far",
        "C::kIntermediate - kTilePairs",
        "C::kIntermediate",
        REPORT,
        FOUR_BYTES,
    ),
    Mutation(
        "ring of weights read a place too far",
        "(stream.ring[u], octet",
        "(stream.ring[(u + 1) % C::kUnroll], octet",
        FLOAT64,
    ),
    Mutation("ring of weights filled past the warp's share", "if (base + u + C::kUnroll < kSteps) ", "", REPORT),
    Mutation(
        "one octet left out of the warp's sum",
        "sums[r][c] += __shfl_xor_sync(0xffffffffu, sums[r][c], 16);",
        "",
        FLOAT64,
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
        "octets staged in another's place",
        "const int at = base + i * blockDim.x;\n        if (at < octets) store",
        "const int at = base + (3 - i) * blockDim.x;\n        if (at < octets) store",
        FLOAT64,
        config=FOUR_ROWS,
    ),
    Mutation(
        "fp32 rows staged past their end",
        "if (base + i * 32 < K) rows.values[r][k]",
        "rows.values[r][k]",
        REPORT,
        LONG,
        UNSPLIT,
    ),
    Mutation(
        "row mask of W13: rows past the last not masked",
        "i < count * C::kTiles",
        "i < F::kPassRows * C::kTiles",
        edge("ids below 0"),
        config=FOUR_ROWS,
    ),
    Mutation(
        "row mask of W13: last row masked too",
        "i < count * C::kTiles",
        "i < (count - 1) * C::kTiles",
        TIMEOUT,
        config=FOUR_ROWS,
    ),
    Mutation("row mask of W2: rows past the last not masked", "if (r >= count) break;", "", FLOAT64, config=FOUR_ROWS),
    Mutation(
        "row mask of W2: last row masked too",
        "if (r >= count) break;",
        "if (r + 1 >= count) break;",
        TIMEOUT,
        config=FOUR_ROWS,
    ),
    Mutation(
        "rows of W13 put into the first one's place",
        "stage.sums[r][c] = sum; }",
        "stage.sums[0][c] = sum; }",
        FLOAT64,
        config=FOUR_ROWS,
    ),
    Mutation(
        "rows begun at the first warp's share",
        "&rows.values[0][split * kSteps * 32 + ",
        "&rows.values[0][",
        FLOAT64,
    ),
    Mutation("rows of a pass one off", "int found = -from;", "int found = 1 - from;", REPORT),
    Mutation(
        "rows of a pass taken again by the next",
        "from += F::kPassRows",
        "from += F::kPassRows / 2",
        COUNT,
        config=FOUR_ROWS,
    ),
    Mutation(
        "rows past a segment's first not looked at",
        "slot != kEnd; slot = arena->next[slot]",
        "slot != kEnd; slot = kEnd",
        TIMEOUT,
    ),
    Mutation(
        "columns of a CTA's first tile for all of W13's",
        "columns_of(item * C::kTiles + tile)",
        "columns_of(item * C::kTiles)",
        FLOAT64,
    ),
    Mutation(
        "columns of a CTA's first tile for all of W2's",
        "item * kColumns + tile * F::kTileColumns",
        "item * kColumns",
        TIMEOUT,
    ),
    # Barriers
    Mutation(
        "barrier of the segments after ids", "(shared.experts);\n    __syncthreads();", "(shared.experts);", REPORT
    ),
    Mutation(
        "barrier of the segments after experts",
        "1u << e % 32);\n    }\n    __syncthreads();",
        "1u << e % 32);\n    }",
        REPORT,
    ),
    Mutation(
        "barrier between W13's staging and multiplying",
        "F::stage(arena.rows, count, row_of);\n        __syncthreads();",
        "F::stage(arena.rows, count, row_of);",
        REPORT,
    ),
    Mutation("barrier before W13 adds the parts", "__syncthreads();\n      finish(", "finish(", REPORT),
    Mutation(
        "barrier after W13 has added the parts, where no rows are staged",
        "if (!F::kStages && left > F::kPassRows) __syncthreads();",
        "",
        REPORT,
        config=TENSOR,
    ),
    Mutation(
        "barrier that one warp of W13 does not reach",
        "__syncthreads();\n      finish(",
        "if (warp_id() > 0) __syncthreads();\n      finish(",
        REPORT,
    ),
    Mutation(
        "barrier between W2's staging and multiplying",
        "F::stage_fp32(arena.rows, count, load);\n      __syncthreads();",
        "F::stage_fp32(arena.rows, count, load);",
        REPORT,
    ),
    Mutation(
        "barrier before W2 adds the parts",
        "__syncthreads();\n        finish(",
        "finish(",
        REPORT,
        config=W2_SPLIT,
    ),
    Mutation(
        "barrier before W2 stages the next rows",
        "__syncthreads();  // the next pass stages",
        "// the next pass stages",
        REPORT,
    ),
    Mutation(
        "barrier after a ticket",
        "arena.tickets[turn] = next;\n      __syncthreads();",
        "arena.tickets[turn] = next;",
        TIMEOUT,
    ),
    Mutation("tickets in one place instead of two in turn", "arena.tickets[turn]", "arena.tickets[0]", PLAN),
    Mutation("warp's barrier after a pass's slots", "__syncwarp();\n    return found;", "return found;", REPORT),
    Mutation(
        "warp's barrier before a pass's slots",
        "__syncwarp();  // the rows before these are done with\n    int found",
        "int found",
        TIMEOUT,
    ),
    Mutation(
        "warp's barrier before a pass's listed slots",
        "__syncwarp();  // the rows before these are done with\n    const int left",
        "const int left",
        PLAN,
    ),
    Mutation("warp's barrier after a pass's listed slots", "__syncwarp();\n    return left;", "return left;", PLAN),
    Mutation("barrier of the compaction after ids", "(arena.experts);\n  __syncthreads();", "(arena.experts);", PLAN),
    Mutation(
        "barrier of the compaction after ranks",
        "rank_slots(arena, slots);\n  __syncthreads();",
        "rank_slots(arena, slots);",
        PLAN,
        MANY,
    ),
    Mutation(
        "barrier of the compaction after a word's sums", "= sum;\n  }\n  __syncthreads();", "= sum;\n  }", PLAN, MANY
    ),
    Mutation(
        "barrier of the compaction after all sums",
        "= Below::slots(carried);\n    }\n  }\n  __syncthreads();",
        "= Below::slots(carried);\n    }\n  }",
        PLAN,
        MANY,
    ),
    Mutation(
        "barrier of the sorted compaction",
        "arena.occupied[word] = mask;\n  }\n  __syncthreads();",
        "arena.occupied[word] = mask;\n  }",
        PLAN,
        MANY,
    ),
    Mutation(
        "barrier of the listed segments before slots are routed",
        "shared.routed[slot] = 0;\n    __syncthreads();",
        "shared.routed[slot] = 0;",
        PLAN,
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
        "part < C::kSplitK; ++part) route",
        "part < C::kSplitK - 1; ++part) route",
        FLOAT64,
        config=W2_SPLIT,
    ),
    Mutation(
        "split-K part of W2 added twice",
        "route += warps[part]",
        "route += warps[0]",
        FLOAT64,
        config=W2_SPLIT,
    ),
    Mutation(
        "split-K parts of W2's first tile for every tile",
        "column / F::kTileColumns * C::kSplitK",
        "0",
        FLOAT64,
        config=W2_SPLIT,
    ),
    Mutation("gate and up swapped", "return silu(gate) * up;", "return silu(up) * gate;", FLOAT64),
    Mutation(
        "SiLU without its clamp",
        "fminf(fmaxf(-x, -87.3365402f), 87.3365402f)",
        "-x",
        edge("activations far out on SiLU"),
    ),
    Mutation("SiLU's series cut off after its third power", "fmaf(p, f, 5.55041087e-2f)", "5.55041087e-2f", FLOAT64),
    Mutation("routing weight left out", "sum = fmaf(factor,", "sum = fmaf(1.0f,", FLOAT64),
    Mutation(
        "routing weight of the token's first expert",
        "__shfl_sync(0xffffffffu, weight, c)",
        "__shfl_sync(0xffffffffu, weight, 0)",
        FLOAT64,
    ),
    Mutation("slots without an expert combined", "segments.routed(slot);", "true;", edge("ids below 0"), hangs=True),
    Mutation(
        "token's last slot left out",
        "const int end = (token + 1) * C::kTopK;",
        "const int end = (token + 1) * C::kTopK - 1;",
        REPORT,
    ),
    Mutation(
        "token without a routed slot left as it was",
        "if (column < kN) out[",
        "if (column < kN && sum != 0.0f) out[",
        edge("no live token"),
    ),
    Mutation("columns past the last combined", "if (column < kN) out[", "out[", REPORT, NARROW, HALVES),
    Mutation(
        "token's last columns left out",
        "(kN + C::kThreads - 1) / C::kThreads",
        "kN / C::kThreads",
        REPORT,
        NARROW,
        HALVES,
    ),
    Mutation(
        "routes of a token cleared from its first on",
        "routes.clear((long long)(base + c) * kN",
        "routes.clear((long long)(token * C::kTopK + c) * kN",
        REPORT,
        WIDE,
    ),
    Mutation(
        "rounding of SiLU to f16 left out",
        "round_to_half(silu(round_to_half(gate)))",
        "silu(round_to_half(gate))",
        ENGINE_REFERENCE,
        ENGINE,
    ),
    Mutation(
        "rounding of W2's rows to f16 left out",
        "C::kEngineNumerics ? round_to_half(values[c]) : values[c]",
        "values[c]",
        ENGINE_REFERENCE,
        ENGINE,
    ),
    Mutation(
        "rounding of weights to f16 left out",
        "weight = weight_of<C, R>(fragment, stats, c, k);",
        "weight = stats.scale * inverse_place(k) *"
        " (above_2_23(field_of(R::word(fragment, c, k), k)) - stats.zeros[k / 2]);",
        ENGINE_REFERENCE,
        ENGINE,
    ),
    # One launch
    Mutation(
        "W2 before W13",
        *W2_FIRST,
        TIMEOUT,
    ),
    Mutation("first item of a segment for all", "ticket % First::kItems", "0", TIMEOUT),
    Mutation(
        "values taken before they are there",
        "while (missing);",
        "while (false);",
        REPORT,  # and no time-out, as W2 before W13 gives where values are awaited
        also=(W2_FIRST,),
    ),
    Mutation(
        "values published as they are, zero too",
        "0x80000000u : ~bits;",
        "0x80000000u : bits;",
        edge("a token of zeros"),
        also=(
            ("__uint_as_float(~bits)", "__uint_as_float(bits)"),
            ("bits[i] = kPublished ? published_bits(0.0f) : 0u;", "bits[i] = 1u;"),
        ),
        hangs=True,
    ),
    Mutation(
        "values published and taken as they are",
        "if constexpr (kPublished) store_relaxed(words + at, published_bits(value));",
        "if constexpr (kPublished) store_relaxed(words + at, __float_as_uint(value));",
        FLOAT64,
    ),
    Mutation("hidden rows not cleared", "hidden.clear((long long)slot * W2<C>::kK + k);", ";", REPORT),
    Mutation("half of each hidden row not cleared", "k < W2<C>::kK; k += 32", "k < W2<C>::kK / 2; k += 32", REPORT),
    Mutation(
        "hidden rows of each item's first warp alone cleared",
        "item * kWarps + warp_id(); choice",
        "item * kWarps; choice",
        TIMEOUT,
    ),
    Mutation(
        "one reader of a pass counted",
        "if (threadIdx.x < count) atomicAdd(readers",
        "if (threadIdx.x < 1) atomicAdd(readers",
        TIMEOUT,
        config=FOUR_ROWS,
    ),
    Mutation("readers of hidden rows not counted anew", "readers[slot] = 0;", ";", REPORT),
    Mutation("routes not cleared", "routes.clear((long long)(base + c) * kN + column);", "", REPORT),
    Mutation("ticket counter not closed", "*counters = 0u;", ";", REPORT),
    Mutation("ticket counter closed by the first to find no work", "past == (int)gridDim.x - 1", "past == 0", REPORT),
    # Tensor cores
    Mutation(
        "tensor cores: octet taken from the wrong lanes",
        "int octet() { return quadpair(); }",
        "int octet() { return lane_id() & 3; }",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: columns taken from the wrong lanes",
        "(lane_id() & 3) | (lane_id() >> 4) << 2;",
        "lane_id() & 7;",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: rows of the sums mistaken",
        "(i >> 1) * 4 + (lane_id() & 2)",
        "(i >> 1) * 4 + (lane_id() & 1) * 2",
        TIMEOUT,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: columns of the sums mistaken",
        "(lane_id() & 1) + (i & 2) +",
        "(lane_id() & 1) * 2 + (i >> 1 & 1) +",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: scales of a lane one away",
        "__shfl_xor_sync(0xffffffffu, scales[at], 2)",
        "__shfl_xor_sync(0xffffffffu, scales[at], 1)",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: scales of the two indexes swapped",
        "i & 2 ? second : first",
        "i & 2 ? first : second",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: quadpairs of the other half not added",
        " + __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[16 + i], 8)",
        "",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: neighbouring quadpair gives the half it keeps",
        "odd ? half[i] : half[8 + i], 4)",
        "odd ? half[8 + i] : half[i], 4)",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: zero point of 3-byte statistics one up",
        "__byte_perm(triple, 0xe4e4e4e4u, 0x4242u)",
        "__byte_perm(triple, 0xe4e4e4e4u, 0x4242u) + 0x00010001u",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: zero point of 4-byte statistics one up",
        "statistics.zero * 0x00010001u",
        "(statistics.zero + 1) * 0x00010001u",
        FLOAT64,
        FOUR_BYTES,
        TENSOR,
    ),
    Mutation(
        "tensor cores: nibbles of a word in plain order",
        "half(i) | half(i + 4) << 16",
        "half(2 * i) | half(2 * i + 1) << 16",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: words of the neighbouring octet",
        "octet) * 32 + column % 32",
        "(octet ^ 1)) * 32 + column % 32",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: groups half as far apart",
        "stats += N / 4 * C::kStatsBytes;",
        "stats += N / 8 * C::kStatsBytes;",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: statistics of columns a word apart",
        "(group * N + column) / 4 * C::kStatsBytes",
        "(group * N + column) / 4",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: rows advanced by half a step",
        "stream.row[4 * next_row]",
        "stream.row[2 * next_row]",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: columns of W2 advanced by half a step",
        "planes[4 * (base + u)]",
        "planes[2 * (base + u)]",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: ring of weights read a place too far",
        "accumulate(stream.ring[u], stream.rows",
        "accumulate(stream.ring[(u + 1) % C::kUnroll], stream.rows",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: ring of rows read a place too far",
        "stream.rows[u % kRowSteps], sums",
        "stream.rows[(u + 1) % kRowSteps], sums",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: ring filled past the warp's share",
        "if (base + u + C::kUnroll < kSteps) ",
        "",
        REPORT,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: rows past the last looked up",
        "row_of(min(Lanes::index(), count - 1))",
        "row_of(Lanes::index())",
        REPORT,
        LONE,
        TENSOR,
    ),
    Mutation(
        "tensor cores: row mask of W13: last row masked too",
        "if (row < count) put",
        "if (row < count - 1) put",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: row mask of W2: rows past the last not masked",
        "else if (row / 2 < count)",
        "else",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: barrier between W2's staging and multiplying",
        "F::stage_fp32(arena.rows, count, load);\n      __syncthreads();",
        "F::stage_fp32(arena.rows, count, load);",
        REPORT,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: row's scale not taken back",
        "(rounded + sum) * rows.unscale[row / 2]",
        "(rounded + sum)",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: row's scale taken from the first row",
        "rows.unscale[row / 2]",
        "rows.unscale[0]",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation("tensor cores: what rounding left not added", "(rounded + sum) *", "rounded *", FLOAT64, config=TENSOR),
    Mutation(
        "tensor cores: what rounding left taken from the wrong side",
        "value - half_to_float(rounded)",
        "half_to_float(rounded) - value",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: row scaled by a lane's own largest",
        "largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));",
        "",
        FLOAT64,
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: rows of several batches split from the last alone",
        "if constexpr (kPlanes == 1 || K > 32 * kBatch) load(",
        "if constexpr (false) load(",
        FLOAT64,
        LONG,
        TENSOR_UNSPLIT,
    ),
    Mutation(
        "tensor cores: bias of an engine's weights left out",
        "statistics.bias * 0x00010001u",
        "0u",
        ENGINE_REFERENCE,
        ENGINE_128,
        TENSOR_ENGINE,
    ),
    # Routing
    Mutation("padding tokens routed", "slot < live_slots ? expert : -1", "expert", PLAN),
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
    Mutation("segments begun at their last slot", "shared.first[e] != slot", "shared.next[slot] != kEnd", TIMEOUT),
    Mutation("experts' slots that end in slot 0", "shared.first[e] = kEnd;", "shared.first[e] = 0;", TIMEOUT),
    Mutation("experts' bits begun with all", "shared.present[word] = 0u;", "shared.present[word] = ~0u;", REPORT),
    Mutation(
        "segments of the first 32 experts alone counted", "below(shared, kWords)", "below(shared, 1)", TIMEOUT, MANY
    ),
    Mutation(
        "segment's number not counted on from word to word", "below(shared, e / 32) + lower", "lower", REPORT, MANY
    ),
    Mutation("a word's segments in one place", "((1u << e % 32) - 1u)", "0u", REPORT),
    Mutation(
        "slots of padding tokens among a small step's",
        "lane_id() < routing.live() * C::kTopK ? routed_to : -1",
        "routed_to",
        edge("ids below 0"),
    ),
    Mutation(
        "segments of a small step not handed on",
        "if (leads) shared.segments",
        "if (false) shared.segments",
        edge("ids below 0"),
        hangs=True,
    ),
    Mutation(
        "slots of a small step not linked",
        "above == 0u ? kEnd : __ffs(above) - 1",
        "kEnd",
        edge("int64 ids"),
        hangs=True,
    ),
    Mutation(
        "experts of a small step not handed on",
        "shared.experts[lane_id()] = expert;",
        "",
        edge("ids below 0"),
        hangs=True,
    ),
    # Compaction
    Mutation(
        "compaction's ranks one off",
        "const int earlier = __popc(same & ((1u << lane_id()) - 1u));",
        "const int earlier = __popc(same & ((2u << lane_id()) - 1u));",
        PLAN,
    ),
    Mutation(
        "compaction's ranks begun anew in each word",
        "arena.before[expert] = before + __popc(same);",
        "arena.before[expert] = __popc(same);",
        PLAN,
    ),
    Mutation(
        "compaction's sums with the expert itself",
        "arena.before[expert] = sum - own;",
        "arena.before[expert] = sum;",
        PLAN,
    ),
    Mutation("compaction's sums without the words before", " + arena.words[expert / 32]", "", PLAN, MANY),
    Mutation(
        "compaction's sums without the 32 words before",
        "int sum = carried + inclusive",
        "int sum = inclusive",
        PLAN,
        CROWD,
    ),
    Mutation("compaction counts experts without slots", "slots << 16 | (slots > 0)", "slots << 16 | 1", PLAN),
    Mutation("compaction's list not closed", "list.segment_begin[segments] = Below::slots(carried);", "", PLAN),
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
        "listed segments end a slot early",
        "end = segment_begin[i + 1];",
        "end = segment_begin[i + 1] - 1;",
        PLAN,
        hangs=True,
    ),
    Mutation(
        "listed rows of a later pass taken from the first",
        "listed[first + from + lane_id()]",
        "listed[first + lane_id()]",
        PLAN,
        hangs=True,
    ),
    Mutation("listed slots all routed", "shared.routed[slot] = 0;", "shared.routed[slot] = 1;", PLAN, hangs=True),
)

# What no check finds, since the result stays right; for each, why.
EQUIVALENT = (
    Mutation(
        "hidden rows cleared a reader early",
        "< W2<C>::kItems) {",
        "< W2<C>::kItems - 1) {",
        "one worker brings W2's items to their end before any token's; on a GPU they overlap",
    ),
    Mutation(
        "tokens' outputs past the first CTAs' left out",
        "item += gridDim.x) {",
        "item += 1 << 20) {",
        "there is a CTA for each item here; where a GPU holds fewer, a CTA makes several outputs",
    ),
    Mutation(
        "rows past the last read as shared memory has them",
        "min(r, count - 1) * K",
        "r * K",
        "their sums are not used",
        config=FOUR_ROWS,
    ),
    Mutation(
        "routes added from the last to the first",
        "const float factor = __shfl_sync(0xffffffffu, weight, c);\n",
        "const float factor = __shfl_sync(0xffffffffu, weight, kLoads - 1 - c);\n",
        "every plan adds them so, and fp32 sums in another order are as near to float64",
        also=(
            (
                "if (!(present >> c & 1u) || column >= kN) continue;",
                "if (!(present >> (kLoads - 1 - c) & 1u)) continue;",
            ),
            ("routes.clear((long long)(base + c) * kN", "routes.clear((long long)(base + kLoads - 1 - c) * kN"),
            ("round_to_half(values[c]) : values[c]", "0.0f : values[kLoads - 1 - c]"),
        ),
    ),
    Mutation(
        "tensor cores: columns of W2 past the last row read as shared memory has them",
        "min(Lanes::index(), kPlanes * count - 1)",
        "Lanes::index()",
        "an mma keeps its columns apart, and these are not used",
        config=TENSOR,
    ),
    Mutation(
        "tensor cores: row mask of W13",
        "if (row < count) put",
        "put",
        "parts of rows past the last have a place of their own, and W13's end does not add them",
        config=TENSOR,
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
        text = source.text
        for old, new in ((self.mutation.old, self.mutation.new), *self.mutation.also):
            text = text.replace(old, new)
        return text

    def run(self, made: Plan, operands: verify.Operands, tokens: int, order: int) -> Outputs:
        sources = {stage: replace(source, text=self.text(source)) for stage, source in render.render(made).items()}
        return host.execute(made, sources, operands, tokens, order=order, timeout_s=self.mutation.timeout_s)


@pytest.fixture(autouse=True)
def _quick_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant is compiled for a few runs of a tenth of a second."""
    monkeypatch.setattr(host, "_FLAGS", tuple("-Og" if flag == "-O2" else flag for flag in host._FLAGS))


@lru_cache
def layers(contract: Contract) -> Layers:
    return Layers(contract)


def counts_are_right(mutation: Mutation) -> bool:
    """Whether each element of a routed row is put once and no other is."""
    case = make_case(mutation.contract, 12, "uniform", "gaussian")
    counts = work_counts(mutation.contract, case.ids, mutation.config, Mutant(mutation).text)
    return all((count == 1).all() for count in counts)


def verdicts(mutation: Mutation) -> Iterator[Verdict]:
    """What `verify` runs, at 12 tokens, and the odd calls at 2; first of all on the fused plan, to spare compiling."""
    of = layers(mutation.contract), mutation.config, Mutant(mutation)
    subject = Subject(mutation.config, Mutant(mutation), layers(mutation.contract))
    for routed in ("uniform", "single-hot"):
        case = make_case(mutation.contract, 12, routed, "gaussian")
        yield subject.judge(0, case, [("fused", order) for order in range(3)])
    yield from verify.verify_edges(*of, plans=("fused",))


def other_verdicts(mutation: Mutation) -> Iterator[Verdict]:
    """The rest of what `verify` runs."""
    of = layers(mutation.contract), mutation.config, Mutant(mutation)
    yield from verify.verify(*of, tokens=(12,), routings=("uniform", "single-hot"), inputs=("gaussian",), orders=(0,))
    yield from verify.verify_edges(*of)


def found_by(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What finds the mutation first, in the table's words; None when nothing does."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    wrong = next((named(verdict, mutation) for verdict in verdicts(mutation) if not verdict.ok), None)
    if wrong is None and not counts_are_right(mutation):
        wrong = COUNT
    return wrong or next((named(verdict, mutation) for verdict in other_verdicts(mutation) if not verdict.ok), None)


def named(verdict: Verdict, mutation: Mutation) -> str:
    reason, odd = verdict.reasons[0], verdict.case.removeprefix("rank 0, C2, ")
    if reason.startswith(("staged plan", "sorted plan", "all-experts plan", "hidden")):
        return PLAN
    if odd != verdict.case:
        return edge(odd)
    if "had not ended" in reason:
        return TIMEOUT
    if "has other bits" in reason:
        return ORDERS
    if reason.startswith("fused plan"):  # LaunchFailed
        return REPORT
    return ENGINE_REFERENCE if mutation.contract.numerics == "engine" else FLOAT64


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_template_is_found_by_what_the_guide_names(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_by(mutation, monkeypatch) == mutation.found_by
    assert f"| {mutation.name} | {mutation.found_by} |" in GUIDE.read_text()


@pytest.mark.parametrize("mutation", EQUIVALENT, ids=lambda mutation: mutation.name)
def test_what_the_guide_calls_harmless_leaves_every_check_content(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_by(mutation, monkeypatch) is None
    assert f"| {mutation.name} | nothing: {mutation.found_by} |" in GUIDE.read_text()


@pytest.mark.parametrize("mutation", MUTATIONS + EQUIVALENT, ids=lambda mutation: mutation.name)
def test_every_mutation_still_changes_a_kernel(mutation: Mutation) -> None:
    made = [plan.make(mutation.contract, mutation.config, name) for name in PLANS]
    texts = [source.text for one in made for source in render.render(one).values()]
    for old, _ in ((mutation.old, mutation.new), *mutation.also):
        assert any(old in text for text in texts), old


def test_the_guide_names_no_mutation_that_is_not_tried() -> None:
    table = GUIDE.read_text().split("| broken | found by |\n| --- | --- |\n")[1].split("\n\n")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
    assert rows == [mutation.name for mutation in MUTATIONS + EQUIVALENT]


@pytest.mark.parametrize(
    ("contract", "config"),
    [
        (ENGINE, CONFIG),
        (MANY, CONFIG),
        (WIDE, CONFIG),
        (NARROW, HALVES),
        (LONG, TENSOR_UNSPLIT),
        (SMALL, TENSOR),
        (ENGINE_128, TENSOR_ENGINE),
    ],
)
def test_templates_that_are_not_broken_leave_every_check_content(
    contract: Contract, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_by(Mutation("none", "\0", "\0", "", contract, config), monkeypatch) is None
