"""What single executed items say of a kernel is what whole steps of it do."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import small

from tuner import build, contract, evidence, items, machine, model, plan, render, routing, space, verify
from tuner.cases import make_case
from tuner.contract import Contract
from tuner.errors import CodeFault, MissingTool
from tuner.machine import Executed
from tuner.model import Resources
from tuner.space import Config
from tuner.work import Work, assumed

V100 = model.device(machine.DEVICE)
#: qwen38-tp4's own sizes with fewer experts, so that some have several rows.
QWEN = replace(contract.load("qwen38-tp4"), experts=24)
TENSOR = space.parse("tensor-t1-k8-u2-r8+tensor-t8-k1-u5-r4+m512")
FEW_WARPS = space.parse("tensor-t1-k4-u2-r8+tensor-t4-k1-u5-r4+m512")
UNROLLED = space.parse("tensor-t1-k8-u10-r8+tensor-t8-k1-u5-r4+m384")
ROWS = space.parse("simt-t1-k8-u5-r4+simt-t8-k1-u5-r4+m256")


def image(of: Contract, config: Config) -> build.Image:
    try:
        return build.build(render.render_op(of, config))
    except MissingTool as error:
        pytest.skip(str(error))


def whole(of: Contract, config: Config, tokens: int, routed: str) -> tuple[Executed, float]:
    """A step executed whole, by one SM's CTAs one after another, so that none polls; and what their starts take."""
    made, case = plan.make(of, config), make_case(of, tokens, routed, "gaussian")
    given = verify.operands(made, verify.Layers(of).weights(0), case)
    built, done = {"op": image(of, config)}, list[Executed]()
    machine.execute(made, built, given, tokens, order=1, device=replace(V100, sms=1), counted=done)
    started = machine.start(made, built["op"], given, tokens).tallies["issued"].sum()
    return done[0], float(started) * done[0].grid[0]


def predicted(of: Contract, config: Config, tokens: int, routed: str, work: Work) -> Mapping[str, float]:
    made, built = plan.make(of, config), image(of, config)
    rows = routing.make(routed, of, tokens, 0).rows_per_segment
    resources = Resources.of(built, made.launch("op"), tokens)
    return model.predict(of, made, resources, rows, tokens, V100, work=work).parts


@pytest.mark.parametrize(
    ("config", "tokens", "routed"),
    [
        (FEW_WARPS, 4, "uniform"),
        (TENSOR, 1, "uniform"),
        (UNROLLED, 2, "single-hot"),
        (space.default(QWEN), 4, "uniform"),
        (ROWS, 4, "uniform"),
        (ROWS, 8, "hot"),
    ],
    ids=lambda value: value.key() if isinstance(value, Config) else str(value),
)
def test_instructions_of_a_whole_step_are_those_of_its_items(config: Config, tokens: int, routed: str) -> None:
    done, started = whole(QWEN, config, tokens, routed)
    found = predicted(QWEN, config, tokens, routed, items.work(QWEN, config, image(QWEN, config)))["instructions"]
    print(f"off by {found / (done.instructions - started) - 1:+.2%}")
    assert found == pytest.approx(done.instructions - started, rel=0.02)


@pytest.mark.parametrize("name", sorted(small.LAYOUTS))
def test_every_layout_is_counted(name: str) -> None:
    of = small.LAYOUTS[name]
    for config in [space.default(of), *([small.TENSOR] if "tensor" in space.families(of) else [])]:
        work = items.work(of, config, image(of, config))
        done, started = whole(of, config, 12, "uniform")
        found = predicted(of, config, 12, "uniform", work)["instructions"]
        assert found == pytest.approx(done.instructions - started, rel=0.05), config.key()


def test_a_step_is_what_its_loop_holds() -> None:
    built, made = image(QWEN, TENSOR), plan.make(QWEN, TENSOR)
    work = items.work(QWEN, TENSOR, built)
    (loop,) = (s for s in evidence.examine(made, made.launch("op"), built, 4, V100).streams if s.operand == "W13_Q")
    assert loop.loop
    # The last turns of the loop skip the loads that refill the ring.
    assert loop.instructions / TENSOR.w13.unroll == pytest.approx(work.w13.lone.total, rel=0.02)
    assert work.w13.full == work.w13.lone
    # A step and column takes two mma of four instructions each, whichever loop the compiler made.
    assert work.w2.lone.total == pytest.approx(work.w13.lone.total, rel=0.06)


def test_sectors_of_an_item_are_at_least_those_of_its_weights() -> None:
    work = items.work(QWEN, TENSOR, image(QWEN, TENSOR))
    for stage, steps in (("w13", 10), ("w2", 5)):
        gemm, of = QWEN.gemm(stage), work.stage(stage)  # type: ignore[arg-type]
        an_item = model.expert_bytes(QWEN, gemm) / 10 / 32 / 8  # ten items a segment, eight warps
        asked = (of.lone * steps + of.one + of.item).sectors
        assert an_item <= asked < 2 * an_item


def test_what_a_call_hands_on_is_awaited_by_no_item() -> None:
    # A W2 item, whose rows another CTA would write, ends; and the same item gives the same counts.
    made, built = plan.make(QWEN, TENSOR), image(QWEN, TENSOR)
    given = verify.operands(made, verify.Layers(QWEN).weights(0), make_case(QWEN, 2, "uniform", "gaussian"))
    segments = len(routing.make("uniform", QWEN, 2, 0).rows_per_segment)
    first = segments * plan.items(QWEN, "w13", TENSOR.w13)
    one, two = (machine.item(made, built, given, 2, ticket) for ticket in (first, first + 1))
    assert one.tallies["issued"].sum() == two.tallies["issued"].sum() > 8 * 5 * 100
    assert {each.instruction.opcode for each, n in zip(one.code, one.tallies["issued"], strict=True) if n} >= {
        "HMMA.884"
    }


def test_outputs_are_counted_to_the_end_of_the_step() -> None:
    made, built = plan.make(QWEN, TENSOR), image(QWEN, TENSOR)
    given = verify.operands(made, verify.Layers(QWEN).weights(0), make_case(QWEN, 1, "uniform", "gaussian"))
    segments = len(routing.make("uniform", QWEN, 1, 0).rows_per_segment)
    work = sum(segments * plan.items(QWEN, stage, TENSOR.stage(stage)) for stage in space.STAGES)
    last = work + -(-QWEN.hidden // TENSOR.w13.threads) - 1
    counts = [machine.item(made, built, given, 1, ticket).tallies["issued"].sum() / 8 for ticket in (last - 1, last)]
    assert counts[0] == pytest.approx(2 * counts[1], rel=0.1)


def test_code_in_which_no_step_is_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items.Dataflow, "stretches", lambda self, operand: ())
    with pytest.raises(CodeFault, match="no load of W13_Q was found"):
        items.work(QWEN, TENSOR, image(QWEN, TENSOR))


def test_a_warps_pipes_are_of_instructions_that_the_machine_executes() -> None:
    known = {each.split(".")[0] for each in np.unique([row.split("_")[0] for row in machine.microcode.OPERATIONS])}
    assert {*items._FP32, *items._INTEGER} <= known
    assert not set(items._FP32) & set(items._INTEGER)


@pytest.mark.parametrize("name", sorted(small.LAYOUTS))
def test_what_is_assumed_of_sm_70_is_near_what_is_counted(name: str) -> None:
    # What guesses rest on, which choose what is built.
    of = replace(small.LAYOUTS[name], hidden=2560, intermediate=192)
    tensor = space.parse("tensor-t1-k8-u2-r8+tensor-t8-k1-u3-r4+m384")
    for config in [space.default(of), *([tensor] if "tensor" in space.families(of) else [])]:
        counted = items.work(of, config, image(of, config))
        supposed = assumed(of, config, V100, model.FITTED.instructions)
        for stage in space.STAGES:
            mine, theirs = supposed.stage(stage), counted.stage(stage)
            assert mine.lone.total == pytest.approx(theirs.lone.total, rel=0.2), (config.key(), stage)
            assert mine.full.total == pytest.approx(theirs.full.total, rel=0.2), (config.key(), stage)
