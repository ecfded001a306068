"""Counts and traces of one step, as the command line asks for them."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from click.testing import CliRunner

import cli
from tuner import executed, gpu, machine, space, verify
from tuner.errors import MissingTool, RequestError


@pytest.fixture
def contract(tmp_path: Path) -> str:
    return tiny.write(tmp_path)


def said(*arguments: str) -> str:
    done = CliRunner().invoke(cli.main, arguments)
    if "NVRTC" in done.output and done.exit_code:
        pytest.skip(done.output.strip())
    assert done.exit_code == 0, done.output
    return done.output


def test_inspect_shows_what_the_machine_code_did_beside_the_budget(contract: str) -> None:
    told = json.loads(said("inspect", "--contract", contract, "--concurrency", "2", "--executed", "--json"))
    (found,) = told["executed"]
    assert found["tokens"] == 2
    assert found["ok"] and found["source_bits"]
    assert found["stage"] == "op"
    assert sum(found["classes"].values()) == found["instructions"]
    assert found["per_eight"] > 0
    assert found["budget"] > 0
    assert "executed as sm_70 code on CPU, uniform routing" in said(
        "inspect", "--contract", contract, "--concurrency", "2", "--executed"
    )


def test_instructions_for_eight_weights_are_those_of_the_active_experts(tmp_path: Path) -> None:
    one = tiny.load(tmp_path)
    try:
        step = executed.step(verify.Layers(one), space.default(one), 2, "fused", "single-hot")
    except MissingTool as error:
        pytest.skip(str(error))
    assert step.active == 1
    (told,) = executed.count(one, {2: space.default(one)}, machine.DEVICE, "single-hot")
    weights = one.w13.k * one.w13.n + one.w2.k * one.w2.n
    assert told.counts.per_eight == told.counts.instructions * 32 * 8 / weights
    v100 = gpu.device(machine.DEVICE)
    nbytes = told.counts.budget or 0
    lanes_a_byte = v100.sms * v100.issue_per_clock * 32 * v100.clock_mhz * 1e6 / (v100.bandwidth_gbs * 1e9)
    assert 4 <= nbytes / lanes_a_byte <= 6  # eight weights are 4 bytes, and their statistics


def test_a_gpu_that_runs_other_code_is_refused(tmp_path: Path) -> None:
    one = tiny.load(tmp_path)
    with pytest.raises(RequestError, match="--executed runs sm_70 code, and H200 runs other"):
        list(executed.count(one, {2: space.default(one)}, "H200", "uniform"))


def test_trace_writes_a_folder_and_reads_it_back(contract: str, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    told = said("trace", "--contract", contract, "--concurrency", "2", "--plan", "staged", "--output", str(folder))
    assert "read back: the same instructions, masks and addresses" in told
    names = ["kernel-1.traceg.gz", "kernel-2.traceg.gz", "kernel-3.traceg.gz", "kernelslist.g"]
    assert sorted(path.name for path in folder.iterdir()) == names
    again = CliRunner().invoke(
        cli.main, ("trace", "--contract", contract, "--concurrency", "2", "--output", str(folder))
    )
    assert again.exit_code == 2
    several = CliRunner().invoke(
        cli.main, ("trace", "--contract", contract, "--concurrency", "1-2", "--output", str(tmp_path / "other"))
    )
    assert several.exit_code == 2
    assert "expected one, such as 4" in several.output


def test_verify_executes_machine_code_and_compares_it_with_its_source(contract: str) -> None:
    given = (
        "verify",
        "--contract",
        contract,
        "--concurrency",
        "1",
        "--executor",
        "sass",
        "--no-gate",
        "--replays",
        "1",
    )
    told = said(*given)
    assert "executed as sm_70 code on CPU" in told
    assert "same bits on the CPU" in told
    verdicts = json.loads(said(*given, "--json").split("right, executed")[-1].split("\n", 1)[-1])["verdicts"]
    assert np.all([each["ok"] for each in verdicts])
