"""Kernels broken on purpose: each break of a template must be found, by the check that its row names.

A mutation changes the text of the rendered sources that hold `old`. They then go through what `verify` runs (references
and three orders of threads and CTAs, then odd calls on every plan), and, where these pass, a count of the work and
every plan in every order. CONTRIBUTING.md lists what finds which, and is held to it here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from small import LAYOUTS, SMALL, work_counts

from tuner import host, plan, render, verify
from tuner.cases import make_case
from tuner.contract import Contract
from tuner.plan import PLANS, Outputs, Plan
from tuner.render import Source
from tuner.space import Config, W2Config, W13Config
from tuner.verify import Layers, Subject, Verdict

FOUR_BYTES = LAYOUTS["sm70-u4 4-byte concatenated"]
AWQ = LAYOUTS["awq"]
MANY = replace(SMALL, experts=40)  # more than a word of bits has
ENGINE = replace(SMALL, numerics="engine", tolerance=2e-3)

# Split K, a ring that turns, several tiles a CTA; one row a pass, which is quicker to compile than several.
CONFIG = Config(W13Config(tiles=2, split_k=2, unroll=2, rows=1), W2Config(segments=4, split_k=1, unroll=1, rows=1))
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
        "fmaf(-half_to_float(stats.engine_bias)",
        "fmaf(half_to_float(stats.engine_bias)",
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
        "step * 4 + (lane_id() >> 3)",
        "step * 4 + (lane_id() & 3)",
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
    Mutation("steps half as far apart", "words[step * 32]", "words[step * 16]", FLOAT64, stages=W13_ONLY),
    Mutation(
        "rows of awq half as far apart",
        "words[(step * 32 + k) * (N / 8)]",
        "words[(step * 32 + k) * (N / 16)]",
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
        "stats + (first_step + step) /",
        "stats + step /",
        FLOAT64,
        stages=W13_ONLY,
    ),
    Mutation(
        "group index of awq counted from the warp's own first step",
        "group = (first_step + step) /",
        "group = step /",
        FLOAT64,
        AWQ,
        stages=W13_ONLY,
    ),
    Mutation(
        "every step its own group",
        "stats + (first_step + step) / (C::kGroup / 32)",
        "stats + (first_step + step)",
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
        "ring of weights read a step late",
        "base + u + C::kUnroll);",
        "base + u + C::kUnroll - 1);",
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
        "i < kRows * C::kTiles",
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
    Mutation("row mask of W2: rows past the last not masked", "if (r >= count) break;", "", COUNT, config=FOUR_ROWS),
    Mutation(
        "row mask of W2: last row masked too",
        "if (r >= count) break;",
        "if (r + 1 >= count) break;",
        FLOAT64,
        config=FOUR_ROWS,
    ),
    Mutation("rows past the last are no rows", ": r == 0 ? -1 : slots[r - 1];", ": -1;", REPORT, config=FOUR_ROWS),
    Mutation(
        "rows of W13 put into the first one's place", "slot = r == s ? slots[s] : slot;", ";", FLOAT64, config=FOUR_ROWS
    ),
    # Barriers
    Mutation(
        "barrier after W13's staging of experts", "experts = shared;\n    __syncthreads();", "experts = shared;", REPORT
    ),
    Mutation(
        "barrier before W13 adds the parts",
        "    __syncthreads();\n    for (int i = threadIdx.x; i < count",
        "    for (int i = threadIdx.x; i < count",
        FLOAT64,
    ),
    Mutation(
        "barrier after W13 has added the parts", "= value;\n    }\n    __syncthreads();", "= value;\n    }", ORDERS
    ),
    Mutation(
        "barrier that one warp of W13 does not reach",
        "    __syncthreads();\n    for (int i = threadIdx.x; i < count",
        "    if (warp_id() > 0) __syncthreads();\n    for (int i = threadIdx.x; i < count",
        REPORT,
    ),
    Mutation(
        "warp's barrier between staging and multiplying", "    __syncwarp();\n    float sums", "    float sums", FLOAT64
    ),
    Mutation(
        "barrier before W2 combines",
        "    __syncthreads();\n    for (int i = threadIdx.x; i < tokens",
        "    for (int i = threadIdx.x; i < tokens",
        FLOAT64,
    ),
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
        "part < C::kSplitK; ++part) route",
        "part < C::kSplitK - 1; ++part) route",
        FLOAT64,
        config=W2_SPLIT,
    ),
    Mutation("gate and up swapped", "value = silu(gate) * up;", "value = silu(up) * gate;", FLOAT64),
    Mutation(
        "gate and up swapped where they are concatenated",
        "group < 4 ? 0 : C::kIntermediate",
        "group < 4 ? C::kIntermediate : 0",
        FLOAT64,
        FOUR_BYTES,
    ),
    Mutation(
        "SiLU without its clamp",
        "fminf(fmaxf(x * -1.44269504f, -126.0f), 126.0f)",
        "x * -1.44269504f",
        edge("activations far out on SiLU"),
    ),
    Mutation("SiLU's series a term short", "fmaf(p, f, 9.61812911e-3f)", "9.61812911e-3f", FLOAT64),
    Mutation("routing weight left out", "fmaf(topk_weights[slot], route, sum)", "sum + route", FLOAT64),
    Mutation(
        "routing weight of the token's first expert", "topk_weights[slot]", "topk_weights[token * C::kTopK]", FLOAT64
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
        "warp's barrier before staging",
        "    __syncwarp();\n#pragma unroll",
        "#pragma unroll",
        "the pass before ended in shuffles of what its lanes had read; CUDA's memory model still asks for it",
    ),
    Mutation(
        "second barrier of listed segments",
        "experts[rows[i]] = 0;\n    __syncthreads();",
        "experts[rows[i]] = 0;",
        "W2 has a barrier of its own before it combines, and W13 reads no experts from a list",
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

    What `verify` runs, at 12 tokens and the odd calls at 2, the count, and every plan in every order. The fused plan
    alone comes first, to spare compiling.
    """
    checked = layers(mutation.contract), mutation.config, Mutant(mutation)
    levels: dict[str, Any] = {"tokens": (12,), "routings": ("uniform", "single-hot"), "inputs": ("gaussian",)}
    fused = chain(verify.verify(*checked, **levels), verify.verify_edges(*checked, plans=("fused",)))
    wrong = next((named(verdict, mutation) for verdict in fused if not verdict.ok), None)
    if wrong is None and not counts_are_right(mutation):
        wrong = COUNT
    plans = chain(verify.verify_edges(*checked), every_plan_in_every_order(mutation))
    return wrong or next((named(verdict, mutation) for verdict in plans if not verdict.ok), None)


def every_plan_in_every_order(mutation: Mutation) -> Iterator[Verdict]:
    subject = Subject(mutation.config, Mutant(mutation), layers(mutation.contract))
    case = make_case(mutation.contract, 12, "uniform", "gaussian")
    yield subject.judge(0, case, [(name, order) for name in PLANS for order in range(3)])


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


@pytest.mark.parametrize(("contract", "config"), [(ENGINE, CONFIG), (MANY, CONFIG)])
def test_templates_that_are_not_broken_leave_every_check_content(contract: Contract, config: Config) -> None:
    assert found_by(Mutation("none", "\0", "\0", "", contract, config)) is None
