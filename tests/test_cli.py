"""The command line as a person meets it: what it writes, its exit statuses, and what it says when things go wrong."""

import datetime
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from click.testing import CliRunner, Result

import cli
from tuner import evaluate, jobs, options, plan, render, space, winners
from tuner.errors import RequestError
from tuner.plan import Outputs
from tuner.verify import HostExecutor

ROOT = Path(__file__).parent.parent
TARGET = "tiny/v100-predicted"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(each) for each in arguments])


def good(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(status: int, *arguments: object) -> str:
    """stderr of a command that ends with the status, prints nothing on stdout, and says why in one line."""
    result = run(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.lower().startswith("error: ")]
    assert len(lines) == 1
    assert result.stderr.endswith(lines[0] + "\n")
    return lines[0]


def tune(contract: str, output: Path, *more: object) -> Result:
    return good("tune", "--contract", contract, "--evaluator", "model", "--trials", 3, "--output", output, *more)


def rows(output: Path, kind: str = "trial") -> list[dict[str, Any]]:
    file = output / f"{TARGET}.jsonl"
    content = file.read_text().splitlines() if file.exists() else []
    return [row for row in map(json.loads, content) if row["kind"] == kind]


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write(tmp_path_factory.mktemp("contract"))


@pytest.fixture(scope="module")
def finished(contract: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    output = tmp_path_factory.mktemp("finished")
    return output, tune(contract, output)


@pytest.fixture
def output(finished: tuple[Path, Result], tmp_path: Path) -> Path:
    """A finished run's own copy."""
    return Path(shutil.copytree(finished[0], tmp_path / "output"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from any tuned/ that this checkout may hold."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


# What it says to a wrong request: status 2


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("top_k = 2", "topk = 2", ("unknown key topk", "did you mean", "top_k")),
        ("top_k = 2", "top_k = 9", ("top_k <= experts", "nearest valid: top_k = 8")),
        ("hidden = 128", "hidden = 'big'", ("hidden = 'big'", "expected an integer")),
        (
            "tensor_parallel = 1\nexperts = 8\ntop_k = 2\nhidden = 128\nintermediate = 64",
            "tensor_parallel = 8\nexperts = 512\ntop_k = 10\nhidden = 2560\nintermediate = 640",
            ("(intermediate / tensor_parallel) % group", "80 % 32", "640 / 8 = 80 a rank", "nearest valid"),
        ),
        (
            "tensor_parallel = 1\nexperts = 8\ntop_k = 2\nhidden = 128\nintermediate = 64\n\n"
            "[quantization]\ncheckpoint_group = 32",
            "tensor_parallel = 4\nexperts = 512\ntop_k = 10\nhidden = 2560\nintermediate = 640\n\n"
            "[quantization]\ncheckpoint_group = 128",
            ("(intermediate / tensor_parallel) % group", "160 % 128", "nearest valid", "group = 32"),
        ),
    ],
    ids=["misspelt key", "more top-k than experts", "wrong type", "TP8 leaves 80 at g32", "160 at g128"],
)
def test_a_contract_that_cannot_be_is_refused_with_the_rule_and_a_way_out(
    tmp_path: Path, old: str, new: str, words: tuple[str, ...]
) -> None:
    assert tiny.TOML.count(old) == 1
    file = tiny.write(tmp_path, tiny.TOML.replace(old, new))
    result = run("contracts", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert [word for word in words if word not in result.stderr.replace('"', "'")] == []
    assert run("tune", "--contract", file).stderr == result.stderr


def test_a_misspelt_contract_gets_the_name_that_was_meant() -> None:
    assert "no built-in contract 'qwen38-tp'; did you mean qwen38-tp4?" in refused(2, "contracts", "qwen38-tp")
    assert "gone.toml: no such file" in refused(2, "inspect", "--contract", "gone.toml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tune", "--concurrency", "three"), ("concurrency 'three'", "such as 8, 2-8 or 1,2,4")),
        (("tune", "--concurrency", "3"), ("concurrency '3'", "has the levels 1, 2")),
        (("tune", "--budget", "10"), ("budget '10'", "90s, 10m or 2h")),
        (("tune", "--evaluator", "model", "--gpu", "V101"), ("no description of device 'V101'", "V100-PCIE-32GB")),
        (("tune", "--evaluator", "device", "--gpu", "H200"), ("--gpu H200", "leave one of them out")),
        (("tune", "--evaluator", "model", "--code", "ptx"), ("--code ptx", "leave it out")),
        (("tune", "--trials", "0"), ("--trials", "x>=1")),
        (("tune", "--seed", "-1"), ("--seed", "x>=0")),
        (("inspect", "--gpu", "V101"), ("no description of device 'V101'", "V100-PCIE-32GB")),
        (("inspect", "--config", "t1-k4"), ("config 't1-k4'", "simt-t1-k8-u5-r2+simt-t8-k1-u5-r2+m512")),
        (
            ("inspect", "--config", "simt-t1-k3-u1-r1+simt-t3-k1-u1-r1+m512"),
            ("w13 config simt-t1-k3-u1-r1", "must divide the 4 steps"),
        ),
        (("inspect", "--set", "gone"), ("no manifest.json in gone", "give another folder")),
        (("inspect", "--set", "gone", "--config", tiny.KEY), ("--config", "--set", "give one of them")),
        (("verify", "--code", "ptx"), ("--code ptx", "--executor device")),
        (("verify", "--against-host"), ("--against-host", "--executor device")),
        (("verify", "--concurrency", "1-9"), ("concurrency '1-9'", "has the levels 1, 2")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_wrong_option_is_refused_with_its_value_and_what_was_expected(
    contract: str, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    command, *more = arguments
    message = refused(2, command, "--contract", contract, *more)
    assert [word for word in words if word not in message] == []
    assert list(Path.cwd().iterdir()) == []


def test_a_set_of_another_contract_is_refused_with_both_digests(contract: str) -> None:
    folder = ROOT / "generated/qwen38-tp4/v100-predicted"
    message = refused(2, "render", "--contract", contract, "--set", folder)
    assert "89504e567faa4d7e" in message
    assert tiny.load(Path.cwd()).digest() in message


def checkpoint(folder: Path, method: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    return folder


def test_a_checkpoint_that_holds_compressed_tensors_is_refused_with_the_word_it_has(
    contract: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "Model-AWQ", "compressed-tensors")
    message = refused(2, "contracts", contract, "--checkpoint", folder)
    assert f"{folder}/config.json" in message
    assert 'quant_method = "compressed-tensors": expected "awq"' in message
    assert "take a checkpoint in AutoAWQ's GEMM version" in message


def test_a_checkpoint_is_checked_against_a_contract_that_is_named(contract: str, tmp_path: Path) -> None:
    assert "name the contract" in refused(2, "contracts", "--checkpoint", tmp_path)
    assert "expected a Hugging Face checkpoint's folder" in refused(2, "contracts", contract, "--checkpoint", tmp_path)


def test_a_checkpoint_that_fits_is_said_to_fit(contract: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    tensors = {}
    for expert in range(8):
        for name, (k, n) in {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}.items():
            stem = f"model.layers.5.mlp.experts.{expert}.{name}"
            tensors[f"{stem}.qweight"] = np.zeros((k, n // 8), np.int32)
            tensors[f"{stem}.qzeros"] = np.zeros((k // 32, n // 8), np.int32)
            tensors[f"{stem}.scales"] = np.ones((k // 32, n), np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    said = good("contracts", contract, "--checkpoint", tmp_path).stdout
    assert "fits: AWQ GEMM, experts in 1 layers from model.layers.5.mlp.experts" in said
    found = json.loads(good("contracts", contract, "--checkpoint", tmp_path, "--json").stdout)
    assert found["checkpoint"] == {"path": "model.layers.5.mlp.experts", "layers": [5]}


# What it prints


def test_every_command_prints_one_json_object_and_nothing_else(contract: str, output: Path) -> None:
    of = ("--contract", contract, "--json")
    for arguments in (
        ("contracts", "--json"),
        ("contracts", contract, "--json"),
        ("tune", *of, "--evaluator", "model", "--trials", 3, "--output", output),
        ("render", *of),
        ("render", *of, "--output", output / "kernels"),
        ("inspect", *of),
        ("verify", *of, "--no-edges", "--no-gate", "--replays", 1),
        ("doctor", "--json"),
    ):
        found = json.loads(run(*arguments).stdout)
        assert isinstance(found, dict), arguments
        assert found, arguments


def test_the_list_and_a_contract_show_what_they_are() -> None:
    assert "qwen38-tp4" in good("contracts").stdout
    shown = good("contracts", "qwen38-tp4").stdout
    assert "89504e567faa4d7e" in shown
    assert "160 of 640 intermediate a rank" in shown


def test_tune_prints_a_row_a_level_and_says_that_it_predicts(finished: tuple[Path, Result]) -> None:
    output, result = finished
    first, headers, *table = result.stdout.splitlines()
    assert "PREDICTED for V100-PCIE-32GB by a model; nothing here was measured" in first
    assert "built for sm_70 by NVRTC 12" in first
    assert "emulation on the CPU" in first
    assert headers.split()[:5] == ["tokens", "W13", "W2", "resident", "us"]
    assert "all experts us" not in headers  # nothing was measured
    assert [line.split()[0] for line in table[:2]] == ["1", "2"]
    assert all("ok 2/2" in line for line in table[:2])
    ambiguous = any(line.endswith("AMBIGUOUS") for line in table[:2])
    assert table[2].startswith("AMBIGUOUS: ") == ambiguous
    assert table[2 + ambiguous] == f"Winners: {output}/{TARGET}; every trial: {output}/{TARGET}.jsonl"


def test_tune_writes_a_set_of_verified_winners_of_three_trials_a_level(finished: tuple[Path, Result]) -> None:
    made = winners.read(finished[0] / TARGET)
    assert made.word == "predicted"
    assert set(made.levels) == {1, 2}
    assert all(len(level.verdicts) == 2 and all(v["ok"] for v in level.verdicts) for level in made.levels.values())
    assert [row["tokens"] for row in rows(finished[0])] == [1, 1, 1, 2, 2, 2]


def test_tune_tries_64_configurations_a_level_where_nobody_says_how_many(
    contract: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[jobs.Request] = []

    def note(request: jobs.Request, show: jobs.Show) -> None:
        asked.append(request)
        raise RequestError("enough")

    monkeypatch.setattr(jobs, "tune", note)
    refused(2, "tune", "--contract", contract)
    refused(2, "tune", "--contract", contract, "--trials", 1000)
    assert [request.trials for request in asked] == [32, 1000]


SET = "generated/qwen38-tp4/h200-measured"


def test_inspect_of_a_kernel_that_spills_on_a_v100_is_a_fault_and_status_1() -> None:
    of = ("inspect", "--contract", "qwen38-tp4", "--set", ROOT / SET, "--concurrency", 4)
    for more in ((), ("--json",)):
        done = run(*of, *more)
        assert done.exit_code == 1
        assert "spills" in done.stdout
    assert run(*of, "--gpu", "H200").exit_code == 0


def test_inspect_shows_registers_spills_occupancy_bytes_and_floor_of_each_kernel(contract: str, output: Path) -> None:
    of = ("--contract", contract, "--set", output / TARGET)
    shown = good("inspect", *of).stdout.splitlines()
    assert f"winners of {output / TARGET}" in shown[0]
    for header in ("registers", "spill B", "shared B", "CTAs/SM", "warps/SM", "weight MB", "floor us"):
        assert header in shown[1]
    assert [line.split()[:2] for line in shown[2:4]] == [["1", "op"], ["2", "op"]]
    kernels = json.loads(good("inspect", *of, "--json").stdout)["kernels"]
    made = winners.read(output / TARGET)
    assert [kernel["registers"] for kernel in kernels] == [made.levels[tokens].registers for tokens in (1, 2)]


def test_inspect_shows_what_the_machine_code_does_for_eight_weights_and_records_it_in_the_set(tmp_path: Path) -> None:
    ours = Path(__file__).parent.parent / "generated" / "qwen38-tp4" / "v100-predicted"
    folder = Path(shutil.copytree(ours, tmp_path / "set"))
    (folder / "evidence.json").unlink()
    of = ("--contract", "qwen38-tp4", "--set", folder)
    shown = good("inspect", *of).stdout
    for word in ("machine code, built for sm_70", "instr/8 w", "budget", "code B", "W13_Q", "W2_Q", "LOP3"):
        assert word in shown
    assert "FAULT" not in shown
    found = json.loads(good("inspect", *of, "--json").stdout)["code"]
    assert not (folder / "evidence.json").exists()
    assert f"recorded in {folder}/evidence.json" in good("inspect", *of, "--record").stdout
    recorded = json.loads((folder / "evidence.json").read_text())["levels"]
    assert {(str(each["tokens"]), each["stage"]) for each in found} == {(n, s) for n in recorded for s in recorded[n]}
    assert all(recorded[str(each["tokens"])][each["stage"]]["streams"] == each["streams"] for each in found)
    assert winners.read(folder).levels  # the set is one still


def test_inspect_records_only_a_whole_set_for_a_v100(contract: str, output: Path) -> None:
    of = ("inspect", "--contract", contract, "--record")
    assert "give --set" in refused(2, *of, "--config", tiny.KEY)
    assert "leave --concurrency out" in refused(2, *of, "--concurrency", 1)
    assert "give a V100 as --gpu" in refused(2, *of, "--set", output / TARGET, "--gpu", "H200")
    assert not (output / TARGET / "evidence.json").exists()


def test_render_prints_the_kernels_of_the_levels_asked_for(contract: str, tmp_path: Path) -> None:
    made = plan.make(tiny.load(tmp_path), space.parse(tiny.KEY), "staged")
    of = ("--contract", contract, "--config", tiny.KEY, "--plan", "staged")
    shown = good("render", *of).stdout
    assert shown == "\n".join(source.text for source in render.render(made).values()) + "\n"


def test_render_writes_whole_files_or_none(contract: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "b"
    of = ("--contract", contract, "--config", tiny.KEY, "--output", folder)
    names = good("render", *of).stdout.split()
    sources = render.render(plan.make(tiny.load(tmp_path), space.parse(tiny.KEY)))
    assert {Path(name).name: Path(name).read_text() for name in names} == {
        source.file_name: source.text for source in sources.values()
    }
    assert sorted(map(str, folder.iterdir())) == sorted(names)
    shutil.rmtree(folder)

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", full)
    assert "No space left on device" in refused(1, "render", *of)
    assert list(folder.iterdir()) == []


def test_render_refuses_a_file_as_its_folder(contract: str, tmp_path: Path) -> None:
    assert "is a file" in refused(2, "render", "--contract", contract, "--output", contract)
    assert "nothing can be written there" in refused(
        2, "render", "--contract", contract, "--output", f"{contract}/kernels"
    )
    assert Path(contract).read_text() == tiny.TOML


class Wrong(HostExecutor):
    """Adds 1 to one element of the output."""

    def run(self, *arguments: Any) -> Outputs:
        outputs = super().run(*arguments)
        out = outputs.out.copy()
        out[0, 5] += 1
        return Outputs({**outputs.buffers, "OUT": out})


def test_verify_shows_cases_edges_and_gate_and_ends_well_for_right_kernels(contract: str) -> None:
    of = ("--contract", contract, "--config", tiny.KEY)
    shown = good("verify", *of, "--replays", 2)
    assert "rank 0, C2, uniform, gaussian" in shown.stdout
    assert "int64 ids past 32 bits" in shown.stdout
    assert "W13+SiLU" in shown.stdout
    summary = shown.stdout.splitlines()[-1]
    done, cases = summary.split(" cases right")[0].split(" of ")
    assert done == cases
    assert int(cases) > 16


def test_verify_ends_with_1_when_a_kernel_is_wrong(contract: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "HostExecutor", Wrong)
    of = ("--contract", contract, "--config", tiny.KEY, "--no-edges", "--no-gate", "--replays", 1)
    result = run("verify", *of)
    assert result.exit_code == 1
    assert "WRONG  output: relative L2" in result.stdout
    assert "0 of 8 cases right" in result.stdout
    result = run("verify", *of, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["ok"]
    assert "f16 spacings" in " ".join(found["verdicts"][0]["reasons"])
    assert "WRONG" in result.stderr  # progress, while stdout waits for the object


def test_the_version_is_the_newest_one_of_the_changelog() -> None:
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert good("--version").stdout == f"voltune {newest.split()[1].rstrip(',')}\n"


# tune, again and again


def test_more_trials_add_to_what_is_known_and_say_how_long_they_take(contract: str, output: Path) -> None:
    said = tune(contract, output, "--trials", 5).stderr
    assert "C1 search: 3/5, best predicted" in said
    # Eight trials are known by then.
    assert re.search(r"C2 search: 3/5, best predicted \d+\.\d\d us, about 0:00:\d\d left", said)
    assert [row["tokens"] for row in rows(output)] == [1, 1, 1, 2, 2, 2, 1, 1, 2, 2]


def test_a_second_run_answers_from_the_ledger_and_leaves_every_byte_of_the_set(
    contract: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(datetime.date):
        @classmethod
        def today(cls) -> "Later":
            return cls(2099, 1, 1)

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("the ledger knows this")

    monkeypatch.setattr(datetime, "date", Later)
    monkeypatch.setattr(evaluate.ModelEvaluator, "evaluate", never)
    monkeypatch.setattr(HostExecutor, "run", never)
    before = {path: path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}
    tune(contract, output)
    assert {path: path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()} == before


def test_levels_tuned_apart_join_in_one_set(contract: str, output: Path, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    tune(contract, apart, "--concurrency", 1)
    assert set(winners.read(apart / TARGET).levels) == {1}
    said = tune(contract, apart, "--concurrency", 2).stdout
    assert set(winners.read(apart / TARGET).levels) == {1, 2}
    together = json.loads((output / TARGET / winners.MANIFEST).read_text())
    joined = json.loads((apart / TARGET / winners.MANIFEST).read_text())
    assert joined["levels"][0] == together["levels"][0]
    assert len([line for line in said.splitlines() if line.lstrip().startswith(("1 ", "2 "))]) == 2


def test_levels_tuned_with_other_templates_leave_the_set_and_that_is_said(
    contract: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "templates_digest", lambda: "0123456789abcdef")
    said = tune(contract, output, "--concurrency", 2).stderr
    assert "its levels 1 were tuned under other circumstances (templates) and leave the set" in said
    assert set(winners.read(output / TARGET).levels) == {2}


def test_a_damaged_set_is_made_anew(contract: str, output: Path) -> None:
    before = {path.name: path.read_bytes() for path in (output / TARGET).iterdir()}
    kernel = next((output / TARGET).glob("op_*.cu"))
    kernel.write_text("not what was tuned")
    assert "altered" in refused(2, "inspect", "--contract", contract, "--set", output / TARGET)
    assert "it is made anew" in tune(contract, output).stderr
    assert {path.name: path.read_bytes() for path in (output / TARGET).iterdir()} == before


def test_a_budget_leaves_a_trial_of_each_level(contract: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    good("tune", "--contract", contract, "--evaluator", "model", "--budget", "0.001s", "--output", output)
    default = space.default(tiny.load(tmp_path)).key()
    assert [(row["tokens"], row["key"]) for row in rows(output)] == [(1, default), (2, default)]


def test_a_set_of_another_ledger_is_refused_before_the_search(contract: str, output: Path) -> None:
    ledger = output / f"{TARGET}.jsonl"
    ledger.unlink()
    message = refused(2, "tune", "--contract", contract, "--evaluator", "model", "--output", output)
    assert "it is not overwritten" in message
    assert rows(output) == []


def test_an_output_that_cannot_be_written_is_said_before_the_search(contract: str, tmp_path: Path) -> None:
    of = ("--contract", contract, "--evaluator", "model", "--output")
    assert "is a file" in refused(2, "tune", *of, contract)
    message = refused(2, "tune", *of, f"{contract}/below")
    assert "cannot be opened (Not a directory)" in message
    assert "C1 search" not in message  # no line of a search's progress


@pytest.mark.parametrize("command", [("render",), ("export",), ("trace", "--concurrency", "1")])
def test_a_folder_that_cannot_be_made_is_a_wrong_request(command: tuple[str, ...], contract: str) -> None:
    found = run(*command, "--contract", contract, "--output", "/proc/there")
    assert found.exit_code == 2
    assert "--output /proc/there: nothing can be written there" in found.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_readonly_output_is_said_before_the_search(contract: str, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    message = refused(2, "tune", "--contract", contract, "--evaluator", "model", "--output", tmp_path / "locked")
    assert "Permission denied" in message


def test_a_second_run_at_once_on_one_ledger_is_refused(contract: str, output: Path) -> None:
    before = (output / f"{TARGET}.jsonl").read_bytes()
    with (output / f"{TARGET}.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        message = refused(2, "tune", "--contract", contract, "--evaluator", "model", "--output", output)
    assert "another process is tuning with this ledger" in message
    assert (output / f"{TARGET}.jsonl").read_bytes() == before


# Processes: signals, pipes, and machines that lack something

SLOWLY = """
import sys, time
from tuner import evaluate
real = evaluate.ModelEvaluator.evaluate
def slowly(*arguments):
    time.sleep(0.2)
    return real(*arguments)
evaluate.ModelEvaluator.evaluate = slowly
import cli
cli.main()
"""


def command(*arguments: object, program: tuple[str, ...] = ("cli.py",)) -> list[str]:
    first = (str(ROOT / "cli.py"),) if program == ("cli.py",) else program
    return [sys.executable, *first, *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **changes}


def stopped(contract: str, output: Path, stop: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str, str]:
    """A run that is stopped after its second trial of six: status, stdout, stderr."""
    of = ("tune", "--contract", contract, "--evaluator", "model", "--trials", 3, "--output", output)
    with subprocess.Popen(
        command(*of, program=("-c", SLOWLY)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        ends = time.monotonic() + 60
        ledger = output / f"{TARGET}.jsonl"
        while not ledger.exists() or ledger.read_bytes().count(b'"kind":"trial"') < 2:
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.02)
        stop(process)
        said, errors = process.communicate(timeout=60)
    return process.returncode, said, errors


def check_resumed(contract: str, output: Path, whole: Path) -> None:
    """No trial of the stopped run runs again, and the set is that of a run that was never stopped."""
    before = [row["check"] for row in rows(output)]
    assert 2 <= len(before) < 6
    assert not (output / TARGET).exists()
    tune(contract, output)
    assert [row["check"] for row in rows(output)][: len(before)] == before
    assert len(rows(output)) == 6
    sets = [json.loads((each / TARGET / winners.MANIFEST).read_text()) for each in (output, whole)]
    for content in sets:
        del content["ledger"], content["date"]
    assert sets[0] == sets[1]


def test_ctrl_c_keeps_every_trial_and_says_how_to_go_on(
    contract: str, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    status, said, errors = stopped(contract, output, lambda process: process.send_signal(signal.SIGINT))
    assert (status, said) == (1, "")
    assert "Traceback" not in errors
    last = errors.splitlines()[-1]
    assert f"new results are in {output}/{TARGET}.jsonl" in last
    assert "run the same command to go on" in last
    check_resumed(contract, output, finished[0])


SWALLOWS = """
import time
print("loading", flush=True)
try:
    time.sleep(60)
except BaseException:
    pass
"""


def test_ctrl_c_while_modules_load_ends_a_command_as_it_does_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.contracts, "builtin", interrupted)
    later = run("contracts")
    # As C extensions do, this module makes of an interrupt whatever it likes.
    (tmp_path / "optuna.py").write_text(SWALLOWS)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    with subprocess.Popen(
        command("contracts"),
        env=environment(PYTHONPATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert (
        (process.returncode, said, errors) == (later.exit_code, later.stdout, later.stderr) == (1, "", "\nAborted!\n")
    )


def test_ctrl_c_that_the_caller_ignores_is_ignored_while_modules_load(tmp_path: Path) -> None:
    (tmp_path / "optuna.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT); raise SystemExit(7)")
    done = subprocess.run(
        command("contracts"),
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        check=False,
    )
    assert done.returncode == 7


def test_numpys_generators_which_lose_a_ctrl_c_that_meets_their_loading_load_with_the_modules() -> None:
    program = "import cli, sys; sys.exit('numpy.random' not in sys.modules)"
    assert subprocess.run(command(program=("-c", program)), env=environment(), check=False).returncode == 0


def test_a_killed_run_resumes(contract: str, finished: tuple[Path, Result], tmp_path: Path) -> None:
    output = tmp_path / "output"
    status, _, _ = stopped(contract, output, subprocess.Popen.kill)
    assert status == -signal.SIGKILL
    check_resumed(contract, output, finished[0])


@pytest.mark.parametrize("arguments", [("contracts",), ("render", "--contract", "qwen38-tp4")])
def test_a_reader_that_stops_reading_causes_no_traceback(arguments: tuple[str, ...]) -> None:
    with subprocess.Popen(
        command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""


def test_a_folder_whose_name_is_no_text_is_written_and_shown(contract: str, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    of = ("tune", "--contract", contract, "--evaluator", "model", "--trials", 3, "--output", folder)
    for more in ((), ("--json",)):
        done = subprocess.run(command(*of, *more), env=environment(PYTHONUTF8="1"), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert b"caf\\udce9" in done.stdout
    assert set(winners.read(folder / TARGET).levels) == {1, 2}


@pytest.mark.parametrize("arguments", [("tune", "--evaluator", "model", "--output", "out"), ("verify",)])
def test_without_a_c_compiler_it_says_so_at_once(contract: str, arguments: tuple[str, ...]) -> None:
    of = command(*arguments, "--contract", contract)
    done = subprocess.run(of, env=environment(PATH=""), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: g++ was not found")
    assert "apt-get install g++" in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("out").exists()


def test_without_a_cuda_compiler_tune_says_so_at_once(contract: str) -> None:
    program = "import sys; sys.modules['cupy_backends.cuda.libs'] = None; import cli; cli.main()"
    of = command("tune", "--contract", contract, "--evaluator", "model", "--output", "out", program=("-c", program))
    done = subprocess.run(of, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: CuPy cannot be imported")
    assert "pip install cupy-cuda12x" in done.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [(("tune", "--evaluator", "device"), "--evaluator model"), (("verify", "--executor", "device"), "--executor host")],
)
def test_without_a_gpu_a_measurement_is_refused_with_what_works_instead(
    contract: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], way_out: str
) -> None:
    for module in (jobs, options):
        monkeypatch.setattr(module, "available", lambda: (False, "no GPU: none is there"))
    assert way_out in refused(1, *arguments, "--contract", contract)
