"""Kernels as sm_70 code: their bits are the source's, their counts add up, their traces read back as executed."""

import gzip
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import small
from assembly import EXIT, RZ, const, image, instruction, plan_of, prologue
from small import LAYOUTS, SMALL, TENSOR

from tuner import build, cases, contract, counts, gpu, host, machine, plan, render, space, trace, verify, winners
from tuner.build import Image
from tuner.contract import Contract
from tuner.errors import LaunchFailed, MissingTool, RequestError
from tuner.machine import Executed
from tuner.space import Config


def made_for_sm_70(*sources: render.Source) -> list[Image]:
    try:
        return [build.build(source) for source in sources]
    except MissingTool as error:
        pytest.skip(str(error))


ENGINE = space.parse("tensor-t2-k2-u2-r8+tensor-t4-k1-u1-r8+m512")


def executed(
    small_one: Contract,
    config: Config,
    name: plan.PlanName,
    orders: Sequence[int],
    counted: list[Executed] | None = None,
) -> tuple[plan.Outputs, list[plan.Outputs]]:
    """(the source's, the machine code's in each order) of a step."""
    made = plan.make(small_one, config, name)
    sources = render.render(made)
    images = dict(zip(sources, made_for_sm_70(*sources.values()), strict=True))
    case = cases.make_case(small_one, 5, "uniform", "gaussian", 3)
    operands = verify.operands(made, small.weights(small_one), case)
    told = host.execute(made, sources, operands, case.tokens)
    runs = [machine.execute(made, images, operands, case.tokens, order=order, counted=counted) for order in orders]
    return told, runs


@pytest.mark.parametrize("numerics", ["exact", "engine"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_machine_code_gives_the_sources_bits_in_every_order(layout: str, numerics: str) -> None:
    """Simt families to the bit; of tensor cores, whose sums may round otherwise, to the verdict's limits."""
    one = replace(LAYOUTS[layout], numerics=numerics)
    tensor = [TENSOR if numerics == "exact" else ENGINE] if one.layout != "awq" else []
    for config in [space.default(one), *tensor]:
        told, runs = executed(one, config, "fused", (0, 1, 2, 3))
        for found in runs:
            assert found.out.tobytes() == runs[0].out.tobytes()
        if config.portable_bits:
            assert runs[0].out.tobytes() == told.out.tobytes()
        else:
            error = runs[0].out.astype(np.float64) - told.out.astype(np.float64)
            assert np.linalg.norm(error) <= 1e-4 * np.linalg.norm(told.out.astype(np.float64))


@pytest.mark.parametrize("name", [name for name in plan.PLANS if name != "fused"])
def test_machine_code_of_the_other_plans_gives_the_sources_bits_and_hidden_rows(name: plan.PlanName) -> None:
    told, (found, again) = executed(SMALL, space.default(SMALL), name, (0, 1))
    for buffer in ("OUT", "HIDDEN"):
        assert found.buffers[buffer].tobytes() == told.buffers[buffer].tobytes() == again.buffers[buffer].tobytes()


def test_verdicts_of_the_machine_say_what_ran_and_agree_with_float64() -> None:
    made_for_sm_70(*render.render(plan.make(SMALL, space.default(SMALL))).values())
    layers = verify.Layers(SMALL)
    found = list(verify.verify_edges(layers, space.default(SMALL), verify.MachineExecutor()))
    assert [each.reasons for each in found if not each.ok] == []
    assert {each.executor for each in found} == {"executed as sm_70 code on CPU"}


def test_counts_are_the_same_in_every_run_and_add_up() -> None:
    first, second = list[Executed](), list[Executed]()
    for counted in (first, second):
        executed(SMALL, space.default(SMALL), "staged", (0,), counted)
    for a, b in zip(first, second, strict=True):
        assert a.tallies.tobytes() == b.tallies.tobytes()
        assert a.tallies["issued"].sum() == a.instructions
        found = counts.count(a, 1, 1.0, gpu.device(machine.DEVICE))
        assert sum(found.classes.values()) == a.instructions
        assert 0 < found.lanes <= 32
        assert found.missed <= found.touched
        assert found.chain >= 1
    w13 = next(each for each in first if each.launch.stage == "w13")
    warps = w13.grid[0] * w13.grid[1] * w13.launch.block // 32
    assert w13.tallies["issued"][0] == warps


def test_requests_sectors_and_conflicts_are_those_of_the_addresses() -> None:
    given = np.arange(32 * 40, dtype=np.uint32)
    for stride, sectors, conflicts in ((4, 4, 0), (8, 8, 1), (128, 32, 31), (0, 1, 0)):
        bases = [const(0xA02, 0x160 // 4 + i, d=14 + i) for i in range(2)]
        at = instruction(0x825, d=2, a=0, imm=stride, c=14, sign=1)
        shared = instruction(0x825, d=30, a=0, imm=stride, c=RZ, sign=1)
        reads = [instruction(0x381, d=8, a=2, type=4, order=1, scope=3), instruction(0x984, d=9, a=30, type=4)]
        code = [*prologue()[:1], *bases, at, shared, *reads, EXIT]
        found: list[Executed] = []
        machine.execute(plan_of(32, len(given), 1, 4096), {"k": image(code)}, {"IN": given}, 1, counted=found)
        load, local = found[0].tallies[5], found[0].tallies[6]
        assert int(load["sectors"]) in (sectors, sectors + 1)  # where IN begins within a sector
        assert (load["requests"], load["bytes"], found[0].chain) == (1, 128, 1)
        assert int(local["wavefronts"] - local["least_wavefronts"]) == conflicts


# ---- traces ---------------------------------------------------------------------------------------------------------
def traced(folder: Path) -> trace.Traced:
    made = plan.make(SMALL, space.default(SMALL), "staged")
    sources = render.render(made)
    images = dict(zip(sources, made_for_sm_70(*sources.values()), strict=True))
    case = cases.make_case(SMALL, 2, "uniform", "gaussian", 3)
    return trace.write(made, images, verify.operands(made, small.weights(SMALL), case), case.tokens, folder)


def test_a_trace_reads_back_as_what_was_executed_in_few_bytes_a_line(tmp_path: Path) -> None:
    done = traced(tmp_path / "made")
    trace.check(done)
    assert sum(done.sizes) <= trace.MOST_BYTES * sum(each.instructions for each in done.launches)
    names = (done.folder / trace.LIST).read_text().split()
    assert sorted(path.name for path in done.folder.iterdir()) == sorted([trace.LIST, *(f"{n}.gz" for n in names)])
    again = traced(tmp_path / "again")
    for name, each in zip(names, done.launches, strict=True):
        assert (done.folder / f"{name}.gz").read_bytes() == (again.folder / f"{name}.gz").read_bytes()
        text = gzip.decompress((done.folder / f"{name}.gz").read_bytes()).decode()
        assert f"-kernel name = {each.launch.kernel}\n" in text
        assert text.count("#BEGIN_TB") == text.count("#END_TB") == each.grid[0] * each.grid[1]
        assert sum(map(int, re.findall(r"insts = (\d+)", text))) == each.instructions


@pytest.mark.parametrize(
    ("broken", "replaced"),
    [
        (r"(\n[0-9a-f]{4} )ffffffff( .* LDG)", r"\g<1>7fffffff\2"),
        (r"(\n\S+ f{8} 1 R\d+ LDG\S* .* 0x\w+)\w( )", r"\g<1>d\2"),
        (r"\n([0-9a-f]{4} \w{8} 1) R(\d+) ", r"\n\1 R1\2 "),
        (r"\n[0-9a-f]{4} \w{8} .* IADD3 .*", ""),
        (r"thread block = 1,0,0", "thread block = 2,0,0"),
        (r"-nregs = \d+", "-nregs = 1"),
        (r"\n([0-9a-f]{4} [^\n]*)\n([0-9a-f]{4} [^\n]*)", r"\n\2\n\1"),
        (r"insts = \d+", "insts = many"),
        (r"(?s)#END_TB\s*\Z", ""),
    ],
    ids=["mask", "address", "register", "line", "block", "head", "order", "count", "end"],
)
def test_a_changed_trace_is_refused(broken: str, replaced: str, tmp_path: Path) -> None:
    done = traced(tmp_path / "made")
    path = done.folder / f"{trace.file_name(1)}.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    changed = re.sub(broken, replaced, text, count=1)
    assert changed != text
    path.write_bytes(gzip.compress(changed.encode()))
    if broken.startswith("(?s)"):
        path.write_bytes(gzip.compress(text.encode())[:-20])
    with pytest.raises(LaunchFailed, match=r"kernel-2\.traceg"):
        trace.check(done)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(RequestError, match="holds something already: name a new folder"):
        traced(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# ---- the checked-in winners -----------------------------------------------------------------------------------------
MAIN = contract.load("qwen38-tp4")
SET = Path(__file__).parent.parent / "generated" / "qwen38-tp4" / "v100-predicted"


@lru_cache(maxsize=1)
def main_layers() -> verify.Layers:
    return verify.Layers(MAIN)


def agrees(level: int, routed: str, orders: Sequence[int]) -> None:
    config = winners.read(SET).levels[level].config
    made = plan.make(MAIN, config)
    made_for_sm_70(*render.render(made).values())
    case = cases.make_case(MAIN, level, routed, "gaussian", 0)
    operands, local = verify.operands(made, main_layers().weights(0), case), case.local(MAIN.experts)
    told = verify.HostExecutor().run(made, operands, level, 0)
    for order in orders:
        found = verify.MachineExecutor().run(made, operands, level, order)
        assert verify.check_output(MAIN, main_layers().expected(0, case), local, found.out)[2] == []
        if config.portable_bits:
            assert found.out.tobytes() == told.out.tobytes()


def test_the_main_contracts_winner_for_two_tokens_is_right_as_machine_code() -> None:
    agrees(2, "uniform", (0,))


@pytest.mark.lab
@pytest.mark.parametrize("routed", verify.ROUTINGS)
@pytest.mark.parametrize("level", MAIN.levels)
def test_the_main_contracts_winners_are_right_as_machine_code(level: int, routed: str) -> None:
    agrees(level, routed, (0, 1))
