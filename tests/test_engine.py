"""How a V100 engine's own ops are called: with its schemas, on the CPU. The engine itself has never been met."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_engine import NEWER, OLDER, FakeEngine
from small import LAYOUTS, SMALL, inputs, references, weights

from tuner import engine, reference, routing, tensors, verify
from tuner.contract import Contract
from tuner.engine import GROUPED, QPN, ROUTES, SINGLE
from tuner.errors import LaunchFailed, MissingTool

torch = pytest.importorskip("torch")
U4 = {name: contract for name, contract in LAYOUTS.items() if contract.layout == "sm70-u4"}

Start = Callable[..., FakeEngine]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    made: list[FakeEngine] = []

    def begin(contract: Contract = SMALL, schemas: dict[str, str] = NEWER) -> FakeEngine:
        """In the place of the one before."""
        while made:
            made.pop().forget()
        made.append(FakeEngine(contract, schemas))
        made[0].register(monkeypatch)
        return made[0]

    monkeypatch.setattr(tensors, "load", lambda: torch)
    monkeypatch.setattr(tensors, "views", lambda torch, held: dict(held))
    yield begin
    for each in made:
        each.forget()


def held(contract: Contract) -> dict[str, Any]:
    """The weights as tensors, words signed."""
    found = {}
    for prefix, part in (("W13", weights(contract).w13), ("W2", weights(contract).w2)):
        for name, array in (("Q", part.q), ("SCALES", part.scales)):
            signed = array.view(np.int32) if array.dtype == np.uint32 else array
            found[f"{prefix}_{name}"] = torch.from_numpy(signed)
    return found


def step(contract: Contract, tokens: int, seed: int = 0) -> tensors.Step:
    made = routing.make("uniform", contract, tokens, seed)
    return inputs(contract, tokens), made.ids, made.weights


def opened(contract: Contract) -> engine.Engine:
    return engine.Engine(contract, engine.sample(contract, weights(contract)))


@pytest.mark.parametrize("layout", U4)
@pytest.mark.parametrize("version", ["newer", "older"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_every_route_gives_the_layer_with_the_engines_roundings(
    start: Start, layout: str, version: str, tokens: int
) -> None:
    small, schemas = U4[layout], {"newer": NEWER, "older": OLDER}[version]
    start(small, schemas)
    given, held_here = step(small, tokens), opened(small)
    expected = references(small).engine(*given).output
    for route in engine.routes(tokens):
        if (route == QPN and version == "older") or (route != GROUPED and not small.interleaved):
            with pytest.raises(MissingTool):
                held_here.run(route, held(small), given)
            continue
        found = reference.compare(held_here.run(route, held(small), given), expected)
        assert found.relative_l2 <= verify.ENGINE_L2 and found.max_scaled_ulp <= verify.ENGINE_ULPS


BANK = ["awq_sm70_prepare_compact", "awq_moe_build_strided_ptrs"] * 2


@pytest.mark.parametrize(
    ("route", "schemas", "order"),
    [
        (QPN, NEWER, [*BANK, "awq_moe_qpn_m1_sm70_out"]),
        (SINGLE, NEWER, [*BANK, "awq_moe_single_token_sm70_out"]),
        (
            GROUPED,
            NEWER,
            [
                *BANK,
                "moe_permute_sort_workspace_size",
                "moe_permute_with_scratch",
                "awq_moe_gemm_sm70_per_expert_dispatch_out",
                "silu_and_mul_interleaved",
                "awq_moe_gemm_sm70_per_expert_dispatch_out",
                "moe_unpermute",
            ],
        ),
        (
            GROUPED,
            OLDER,
            [
                *[name.removesuffix("_compact") for name in BANK],
                *("moe_permute", "awq_moe_gemm_sm70_out", "awq_moe_gemm_sm70_out", "moe_unpermute"),
            ],
        ),
    ],
)
def test_the_ops_are_called_in_the_engines_order(
    start: Start, route: str, schemas: dict[str, str], order: list[str]
) -> None:
    fake = start(SMALL, schemas)
    opened(SMALL).run(route, held(SMALL), step(SMALL, 1))
    assert fake.names() == order


def test_weights_are_read_in_place_and_3_byte_statistics_made_4_byte_ones_only_where_the_engine_has_no_others(
    start: Start,
) -> None:
    for schemas, kind in ((NEWER, torch.uint8), (OLDER, torch.int32)):
        fake, given = start(SMALL, schemas), held(SMALL)
        opened(SMALL).run(GROUPED, given, step(SMALL, 1))
        built = [each for name, each in fake.calls if name == "awq_moe_build_strided_ptrs"]
        for prefix, each in zip(("W13", "W2"), built, strict=True):
            assert each["tm_weights"].data_ptr() == given[f"{prefix}_Q"].data_ptr()
            same = each["tm_scales"].data_ptr() == given[f"{prefix}_SCALES"].data_ptr()
            assert (each["tm_scales"].dtype, same) == (kind, kind == torch.uint8)
            assert (each["q_ld"] < 0) == (kind == torch.uint8)


def test_a_graph_takes_steps_and_copies_of_the_weights_in_turn(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = start()
    layers = [held(SMALL), {name: each.clone() for name, each in held(SMALL).items()}]
    steps = [step(SMALL, 1, seed) for seed in range(3)]
    monkeypatch.setattr(tensors, "capture", lambda torch, first, calls: [call() for call in calls])
    opened(SMALL).capture(QPN, layers, steps, 6)
    done = [each for name, each in fake.calls if name == "awq_moe_qpn_m1_sm70_out"]
    assert [each["w2"].data_ptr() for each in done] == [layers[i % 2]["W2_Q"].data_ptr() for i in range(6)]
    assert [each["ids"].tolist() for each in done] == [steps[i % 3][1].tolist() for i in range(6)]


@pytest.mark.parametrize("route", ROUTES)
def test_an_op_that_is_missing_or_of_another_version_is_a_reason_that_names_it(start: Start, route: str) -> None:
    fake, given = start(), (held(SMALL), step(SMALL, 1))
    opened(SMALL).run(route, *given)
    used = {name: schema for name, schema in NEWER.items() if name.split(".")[1] in fake.names()}
    for name, schema in used.items():
        start(SMALL, NEWER | {name: schema.replace("(", "(int unheard_of, ", 1)})
        with pytest.raises(MissingTool, match=r"another than is known here, see unheard_of"):
            opened(SMALL).run(route, *given)
    name = list(used)[-1]
    start(SMALL, {key: schema for key, schema in NEWER.items() if key != name})
    with pytest.raises(MissingTool, match=r"the engine here has no "):
        opened(SMALL).run(route, *given)


def test_an_engine_that_packs_an_expert_otherwise_is_not_given_ours(start: Start) -> None:
    start()
    one = engine.sample(SMALL, weights(SMALL))
    q, scales, zeros = one["w2"]
    other = engine.Engine(SMALL, {**one, "w2": (q ^ 1, scales, zeros)})
    with pytest.raises(MissingTool, match=r"makes other bytes of an expert's w2 than sm70-u4 has"):
        other.run(GROUPED, held(SMALL), step(SMALL, 1))


def test_what_an_op_raises_is_a_failed_launch_in_its_words(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("awq_qpn_m1 requires SM70")

    monkeypatch.setattr(FakeEngine, "awq_moe_qpn_m1_sm70_out", refuses)
    start()
    with pytest.raises(LaunchFailed, match=r"running engine:qpn-m1: awq_qpn_m1 requires SM70"):
        opened(SMALL).run(QPN, held(SMALL), step(SMALL, 1))


def test_without_the_engine_or_its_layout_it_says_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm._C", None)
    with pytest.raises(MissingTool, match=r"vllm\._C cannot be imported"):
        opened(SMALL)
    awq_order = LAYOUTS["awq"]
    with pytest.raises(MissingTool, match=r"read sm70-u4, and small has awq"):
        engine.Engine(replace(awq_order), engine.sample(awq_order, weights(awq_order)))
