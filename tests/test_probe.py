"""The probe: one file that runs, here on a stand-in driver whose kernels the CPU executor computes; and its answer,
which is read as anyone's. No GPU: what this cannot show is whether the real driver behaves so."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fake_engine import NEWER, FakeEngine
from frozen_set import made
from small import SMALL, TENSOR

import cli
from tuner import answer as answers
from tuner import (
    build,
    calibrate,
    chain,
    contract,
    cuda,
    device,
    engine,
    host,
    measure,
    nvml,
    plan,
    probe,
    probed,
    probing,
    render,
    space,
    tensors,
    trial,
    winners,
)
from tuner.build import Image
from tuner.calibrate import Observation
from tuner.device import Resident
from tuner.engine import GROUPED, QPN, SINGLE
from tuner.errors import LaunchFailed, MissingTool, RequestError
from tuner.measure import DeviceExecutor
from tuner.model import FITTED
from tuner.render import Source

CONTRACT = replace(SMALL, name="few", tensor_parallel=2, intermediate=128, levels=(1, 4))
EXAMPLES = Path(__file__).parent.parent / "examples"
OP = plan.make(CONTRACT, space.default(CONTRACT)).launch("op")
CONFIGS = 2


class Record(ctypes.Structure):
    """fake_libcuda.c's record."""

    _fields_ = (
        *((name, ctypes.c_char * 64) for name in ("image", "name")),
        *((name, ctypes.c_uint * 3) for name in ("grid", "block")),
        *(("shared", ctypes.c_uint), ("arguments", ctypes.c_uint64 * 32)),
    )


class Driver:
    """The stand-in, with the kernels of these sources on the CPU executor."""

    Run = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.POINTER(Record), ctypes.c_int)

    def __init__(self, path: Path, sources: Sequence[Source]) -> None:
        self.library = ctypes.CDLL(str(path))
        self.sources = {source.digest: source for source in sources}
        self.library.fake_entry(OP.kernel.encode(), len(OP.arguments))
        for name in probing.BARE:
            self.library.fake_entry(f"voltune_{name}".encode(), 3)
        self._running = self.Run(lambda record, among: self.run(record.contents, among))
        self.library.fake_run(self._running)

    def run(self, record: Any, among: int) -> float:
        """Computes a launch, but for one `among` others in a graph, which only takes time: the microseconds."""
        if record.name != OP.kernel.encode():
            return float(1.0 + 16 * record.arguments[1] / 900e3)
        digest = record.image.removeprefix(b"\x7fELF").decode()
        us = 20.0 + zlib.crc32(digest.encode()) % 1000 / 100
        if among > 1:
            return us
        library = ctypes.CDLL(str(host.compile(self.sources[digest])))
        library.voltune_start.restype = ctypes.c_void_p
        library.voltune_report.restype = ctypes.POINTER(host._Report)
        slots = ctypes.addressof(record.arguments)
        run = ctypes.c_void_p(
            library.voltune_start(
                ctypes.byref(host._Launch(record.grid[0], record.grid[1], record.block[0], record.shared, 0, 1, slots))
            )
        )
        while not library.voltune_wait(run, 50):
            pass
        assert library.voltune_report(run).contents.fault == 0
        library.voltune_free(run)
        return us


def stand_in(sources: Sequence[Source], *_: object) -> list[Image]:
    """Images that only the stand-in driver takes."""

    def image(source: Source) -> Image:
        code, digest = b"\x7fELF" + source.digest.encode(), f"{source.kernel}-{source.digest}"
        return Image(source.kernel, "sm_70", code, b".target sm_70", 64, 0, 0, 0, (), "NVRTC 12.9.86", digest)

    return [image(source) for source in sources]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a probe, `probe.pyz`, and the answer it gave, `answer.jsonl`."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here")
    place = tmp_path_factory.mktemp("probe")
    first = made(CONTRACT)
    levels = {1: first.levels[1], 4: replace(first.levels[4], config=TENSOR)}
    winners.write(replace(first, levels=levels), place / "set")
    driver_c = Path(__file__).parent / "fake_libcuda.c"
    subprocess.run(["gcc", "-O1", "-fPIC", "-shared", "-o", str(place / "libcuda.so"), str(driver_c)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_many", stand_in)
        done = probe.make(CONTRACT, [place / "set"], place / "probe.pyz", CONFIGS)
        sources = [render.render(probing.plan_of(CONTRACT, name))["op"] for name in done.arms]
        driver = Driver(place / "libcuda.so", sources)
        answer(place, patch, "answer.jsonl")
        assert driver.library.fake_held() == 0
    yield place


def answer(place: Path, patch: pytest.MonkeyPatch, name: str, *arguments: str) -> int:
    """Runs the unpacked probe in this process, on the stand-in driver."""
    bound = cuda.Cuda(str(place / "libcuda.so"))

    def here(self: DeviceExecutor, function: Callable[..., Any], *given: Any, timeout_s: float) -> Any:
        for key in self._arrays.keys() - self._there:
            trial._session(0).held[key] = [trial._session(0).gpu.upload(self._arrays[key])]
            self._there.add(key)
        return function(0, *given)

    patch.setattr(device, "_bindings", lambda: (bound, bound))
    patch.setattr(DeviceExecutor, "_call", here)
    patch.setattr(trial, "_settle", lambda replay: None)
    patch.setattr(trial, "LAUNCHES", 2)
    patch.setattr(measure, "_BIG", 1 << 15)
    for name_of, value in (("ROUTINGS", 2), ("ROUNDS", 3), ("REPLAYS", 3), ("SIZES", (1 << 20, 1 << 21))):
        patch.setattr(probing, name_of, value)
    trial._session.cache_clear()
    with zipfile.ZipFile(place / "probe.pyz") as archive:
        archive.extractall(place / "unpacked")
    status = probing.main(str(place / "unpacked"), ["--output", str(place / name), *arguments])
    trial._session.cache_clear()
    return status


@pytest.fixture
def own(tools: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "build_many", stand_in)
    return tools


def records(place: Path) -> list[tuple[str, Any]]:
    return list(chain.read(place / "answer.jsonl").records)


# ---- the file that is made ----------------------------------------------------------------------------------------
def test_the_same_set_gives_the_same_bytes(own: Path) -> None:
    probe.make(CONTRACT, [own / "set"], own / "again.pyz", CONFIGS)
    assert (own / "again.pyz").read_bytes() == (own / "probe.pyz").read_bytes()


def test_it_carries_winners_default_their_loads_and_configurations_of_every_kind(own: Path) -> None:
    done = probe.make(CONTRACT, [own / "set"], own / "again.pyz", CONFIGS)
    default = space.default(CONTRACT).key()
    assert {default, TENSOR.key(), probing.LOADS + default, probing.LOADS + TENSOR.key()} < set(done.arms)
    chosen = probe.strata(CONTRACT, 40)
    assert len(set(chosen)) == 40
    assert {config.w13.family for config in chosen} == set(space.FAMILIES)
    assert len({(space.parameters(config)["multiply"], config.w13.threads) for config in chosen}) > 10
    assert probe.strata(CONTRACT, 40) == chosen


def test_it_runs_with_numpy_and_jinja2_alone_as_far_as_a_machine_without_a_driver_goes(tools: Path) -> None:
    there = tools / "packages"
    there.mkdir()
    for name in ("numpy", "jinja2", "markupsafe"):
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        (there / name).symlink_to(folder)
        if (folder.parent / f"{name}.libs").is_dir():
            (there / f"{name}.libs").symlink_to(folder.parent / f"{name}.libs")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(there), "HOME": str(tools)}
    command = [sys.executable, "-S", str(tools / "probe.pyz"), "--output", str(tools / "none.jsonl")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if nvml_there():
        pytest.skip("a driver is here")
    assert (done.returncode, (tools / "none.jsonl").exists()) == (1, False), done.stderr
    assert "error: no GPU: libcuda.so.1 cannot be loaded" in done.stderr
    assert "sends nothing" in done.stderr


def nvml_there() -> bool:
    try:
        cuda.Cuda()
    except MissingTool:
        return False
    return True


# ---- what it writes -----------------------------------------------------------------------------------------------
def test_the_answer_has_every_part_and_every_kernel_is_right(tools: Path) -> None:
    found = records(tools)
    kinds = [kind for kind, _ in found]
    assert (kinds[0], kinds[-1]) == ("header", chain.END)
    assert not {"fault", "skipped"} & set(kinds)
    assert {"board", "empty", "bandwidth", "verdict", "replays", "cell"} < set(kinds)
    verdicts = [each for kind, each in found if kind == "verdict"]
    assert all(each["ok"] for each in verdicts)
    assert {each["rank"] for each in verdicts} == {0, 1}
    titles = " ".join(each["case"] for each in verdicts)
    for word in (*probing.CASES, "live tokens", "ids below 0", "expert map"):
        assert word in titles
    assert all(each["runs"] == 3 and list(each["outputs"].values()) == [3] for kind, each in found if kind == "replays")


def test_kernels_are_timed_by_the_drivers_clock_and_loads_alone_beside_them(tools: Path) -> None:
    cells = [each for kind, each in records(tools) if kind == "cell"]
    assert {(each["tokens"], each["routing"]) for each in cells} == {
        (n, r) for n in (1, 4) for r in ("uniform", "zipf")
    }
    for each in cells:
        assert not each["wrong"]
        assert set(each["us"]) == {*records(tools)[0][1]["kit"]["kernels"], "copy"}
        for name, us in each["us"].items():
            if name != "copy":
                source = render.render(probing.plan_of(CONTRACT, name))["op"]
                assert us == [pytest.approx(20.0 + zlib.crc32(source.digest.encode()) % 1000 / 100, abs=0.01)] * 3
    (bandwidth,) = (each for kind, each in records(tools) if kind == "bandwidth")
    assert bandwidth["us"]["1048576"][0] == pytest.approx(1.0 + (1 << 20) / 900e3, abs=0.01)
    (empty,) = (each for kind, each in records(tools) if kind == "empty")
    assert empty["us"][0] == pytest.approx(2.0, abs=0.01)


def test_nothing_in_it_names_the_machine(tools: Path) -> None:
    text = (tools / "answer.jsonl").read_text()
    for private in (os.uname().nodename, str(tools), "01010101-0101"):
        assert private not in text


def test_a_file_that_is_there_is_not_overwritten(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (own / "answer.jsonl").read_bytes()
    assert answer(own, monkeypatch, "answer.jsonl") == 2
    assert (own / "answer.jsonl").read_bytes() == before


def test_an_answer_that_cannot_be_written_is_one_line(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(own, monkeypatch, "no folder/answer.jsonl") == 1
    assert "No such file or directory" in capsys.readouterr().err.splitlines()[-1]


def test_another_gpu_is_refused_unless_ptx_is_asked_for(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(str(own / "libcuda.so"))
    library.fake_capability(9, 0)
    assert answer(own, monkeypatch, "other.jsonl") == 2
    library.fake_capability(6, 1)
    assert answer(own, monkeypatch, "other.jsonl", "--ptx") == 2
    library.fake_capability(7, 0)
    assert not (own / "other.jsonl").exists()


def test_when_time_is_up_the_rest_is_said_to_be_skipped_and_the_board_still_looked_at(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(own, monkeypatch, "short.jsonl", "--minutes", "0") == 0
    found = chain.read(own / "short.jsonl")
    assert found.whole
    assert {kind for kind, _ in found.records[1:-2]} == {"skipped"}
    (last, board), (end, _) = found.records[-2:]
    assert (last, board["when"], end) == ("board", "after", chain.END)


def test_in_processes_of_its_own_kernels_that_write_nothing_are_recorded_as_wrong(own: Path) -> None:
    """The file as it is run by its owner; on the stand-in, whose kernels then do nothing."""
    there = own / "driver"
    there.mkdir()
    shutil.copy(own / "libcuda.so", there / "libcuda.so.1")
    command = [sys.executable, str(own / "probe.pyz"), "--output", str(own / "idle.jsonl"), "--minutes", "0.03"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(there)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"send {own / 'idle.jsonl'}" in done.stderr
    found = answers.read(own / "idle.jsonl", CONTRACT)
    assert any("were never written" in mark for mark in found.marks)
    assert any(mark.startswith("no time was left for") for mark in found.marks)
    assert (found.cells, probed.findings(found).proposals) == ((), ())


def test_the_driver_alone_has_all_that_the_executor_calls() -> None:
    called = set(re.findall(r"(?:_driver|_runtime|runtime)\.([A-Za-z]\w+)", Path(device.__file__).read_text()))
    assert len(called) > 30
    assert [name for name in sorted(called) if not hasattr(cuda.Cuda, name)] == []


# ---- an engine beside it ------------------------------------------------------------------------------------------
class EngineGraph:
    """Stands for a captured torch graph."""

    def __init__(self, calls: Sequence[Callable[[], Any]], us: float) -> None:
        self._us = us
        for call in calls:
            call()

    def time_us(self) -> float:
        if self._us < 0:
            raise LaunchFailed("torch, replaying: out of memory")
        return self._us


def view(held: Resident) -> Any:
    """The stand-in driver's memory is the CPU's."""
    torch = pytest.importorskip("torch")
    found = np.frombuffer((ctypes.c_char * held.nbytes).from_address(held.address), held.dtype).reshape(held.shape)
    return torch.from_numpy(found.view(np.int32) if found.dtype == np.uint32 else found)


@pytest.fixture
def beside(own: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """An engine that is installed; `us` a layer of it."""
    options = {"us": 33.0}
    torch = pytest.importorskip("torch")
    fake = FakeEngine(CONTRACT, NEWER)
    fake.register(monkeypatch)
    monkeypatch.setattr(probing, "engines", lambda: {"vllm": "0.9"})
    monkeypatch.setattr(tensors, "load", lambda: torch)
    monkeypatch.setattr(tensors, "views", lambda torch, held: {name: view(each) for name, each in held.items()})
    monkeypatch.setattr(tensors, "capture", lambda torch, first, calls: EngineGraph(calls, options["us"]))
    (own / "beside.jsonl").unlink(missing_ok=True)
    yield options
    fake.forget()


def test_an_engines_own_ops_are_judged_by_nobody_and_timed_in_the_same_rounds(
    own: Path, beside: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(own, monkeypatch, "beside.jsonl") == 0
    found = answers.read(own / "beside.jsonl", CONTRACT)
    told = [each for kind, each in found.records if kind == "engine"]
    assert {(each["arm"], each["tokens"]) for each in told} == {(QPN, 1), (SINGLE, 1), (GROUPED, 1), (GROUPED, 4)}
    assert max(each["engine_l2"] for each in told) < 2e-4 < min(each["relative_l2"] for each in told)
    for cell in found.cells:
        assert {name for name in cell.us if name.startswith("engine:")} == set(engine.routes(cell.tokens))
        assert all(list(cell.us[route]) == [33.0] * 3 for route in engine.routes(cell.tokens))
    assert found.marks == ()
    assert sum("relative L2" in line for line in found.told()) == 4
    before, after = (probed.findings(answers.read(own / name, CONTRACT)) for name in ("answer.jsonl", "beside.jsonl"))
    rows = [row for row in after.rows if str(row[2]).startswith("engine:")]
    assert [row[:5] for row in rows if row[:2] == (4, "zipf")] == [(4, "zipf", GROUPED, None, 33.0)]
    assert len(rows) == 2 * (3 + 1)
    assert (after.proposals, after.quality) == (before.proposals, before.quality)


def test_a_route_of_the_engine_that_fails_is_a_reason_and_all_else_is_there(
    own: Path, beside: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("requires another shape")

    monkeypatch.setattr(FakeEngine, "awq_moe_qpn_m1_sm70_out", refuses)
    assert answer(own, monkeypatch, "beside.jsonl") == 0
    found = answers.read(own / "beside.jsonl", CONTRACT)
    assert [each for kind, each in found.records if kind == "no engine"] == [
        {"arm": QPN, "reason": "C1: LaunchFailed: torch, running engine:qpn-m1: requires another shape"}
    ]
    assert [sorted({SINGLE, GROUPED, QPN} & set(cell.us)) for cell in found.cells if cell.tokens == 1] == [
        [GROUPED, SINGLE]
    ] * 2
    assert found.marks == ()


def test_an_engine_that_fails_in_the_rounds_leaves_the_kernels_their_times(
    own: Path, beside: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside["us"] = -1.0
    assert answer(own, monkeypatch, "beside.jsonl") == 0
    found = answers.read(own / "beside.jsonl", CONTRACT)
    first = found.cells[0]
    reasons = [each["reason"] for kind, each in found.records if kind == "no engine"]
    assert f"C{first.tokens} {first.routing}, beside the kernels: LaunchFailed: torch, replaying" in reasons[0]
    assert {name for cell in found.cells for name in cell.us} == {*found.kit.kernels, "copy"}
    assert len(found.cells) == 4


ENGINE_BAD: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a route for one token at four": ("cell", lambda each: each["us"].update({QPN: [1.0] * 3})),
    "a route that is none": ("engine", lambda each: each.update(arm="engine:other")),
    "an error that is a text": ("engine", lambda each: each.update(engine_l2="0")),
    "a reason of no route": ("no engine", lambda each: each.update(arm="default")),
    "a terminal's code in a reason": ("no engine", lambda each: each.update(reason="\x1b[2J")),
}


@pytest.mark.parametrize("what", ENGINE_BAD)
def test_a_sound_chain_of_what_no_engine_gives_is_refused(own: Path, what: str) -> None:
    where, change = ENGINE_BAD[what]
    said: dict[str, Any] = {"tokens": 1, "case": "a", "inputs": "b", "nonfinite": 0}
    said |= {"relative_l2": 3e-4, "engine_l2": 1e-4, "engine_ulps": 4.0}
    more = [("engine", {"arm": GROUPED, **said}), ("no engine", {"arm": QPN, "reason": "none"})]
    for changes in (False, True):
        path = own / "forged.jsonl"
        path.unlink(missing_ok=True)
        with chain.Writer(path) as writer:
            for kind, content in [records(own)[0], *more, *records(own)[1:]]:
                content = json.loads(json.dumps(content))
                if changes and kind == where:
                    change(content)
                writer.write(kind, **content)
        if not changes:
            answers.read(path, CONTRACT)
            continue
        with pytest.raises(RequestError):
            answers.read(path, CONTRACT)


# ---- what is read -------------------------------------------------------------------------------------------------
def test_the_answer_is_read_back_with_predictions_and_winners(own: Path) -> None:
    found = answers.read(own / "answer.jsonl", CONTRACT)
    assert found.marks == ()
    means = probed.findings(found)
    assert len(means.rows) == 4 + 2  # a winner or the default; both where they differ
    us = {
        name: each for name, each in found.cells[0].us.items() if name != "copy" and not name.startswith(probing.LOADS)
    }
    fastest = min(us, key=lambda name: us[name][0])
    for each in means.proposals:
        saved = 1 - us[fastest][0] / us[found.kit.default][0]
        assert each.config == (fastest if saved >= 0.03 else found.kit.default)
    assert [each.tokens for each in means.proposals] == [1, 4]


def timed(place: Path, truth: Callable[[Observation], float]) -> probed.Findings:
    """What follows from an answer with other times."""
    observed = probed.findings(answers.read(place / "answer.jsonl", CONTRACT)).observed
    us = {(o.level.tokens, o.level.routing, o.plan.config.key()): truth(o) for o in observed}

    def change(kind: str, content: dict[str, Any]) -> None:
        if kind == "cell":
            where = content["tokens"], content["routing"]
            content["us"] |= {n: [us[*where, n]] * 3 for n in content["us"] if (*where, n) in us}

    return probed.findings(answers.read(forged(place, change), CONTRACT))


OTHER_GPU = replace(FITTED, dram=FITTED.dram / 2, w13_clocks=2 * FITTED.w13_clocks)


def test_a_fit_that_also_predicts_what_it_has_not_seen_is_given(own: Path) -> None:
    means = timed(own, lambda one: one.predicted(OTHER_GPU))
    assert means.fit is not None
    assert [str(each.level) for each in means.refitted] == [str(each.level) for each in means.quality]
    for before, after in zip(means.quality, means.refitted, strict=True):
        assert after.error < before.error / 2


def test_a_fit_that_predicts_what_it_has_not_seen_no_better_than_the_model_is_not_given(own: Path) -> None:
    means = timed(own, lambda one: one.predicted(FITTED if one.level.held_out else OTHER_GPU))
    assert (means.fit, means.refitted) == (None, ())
    assert any(remark.startswith("no fit to this file: where not fitted") for remark in means.remarks)


@pytest.mark.parametrize("left", [(1, "uniform"), (4, "uniform"), (1, "zipf")])
def test_one_cell_is_not_fitted_to_and_one_fit_is_not_taken_without_another_cell_to_judge_it(
    own: Path, left: tuple[int, str]
) -> None:
    kept = [left] if left[1] == "uniform" else [left, (4, "uniform")]
    path = own / "cells.jsonl"
    path.unlink(missing_ok=True)
    with chain.Writer(path) as writer:
        for kind, content in records(own):
            if kind != "cell" or (content["tokens"], content["routing"]) in kept:
                writer.write(kind, **content)
    means = probed.findings(answers.read(path, CONTRACT))
    assert means.fit is None
    assert len(means.quality) == len(kept)
    assert any("a fit takes 2 of them and one to judge it by" in remark for remark in means.remarks)


def test_the_command_prints_it_and_writes_no_set(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.contracts, "load", lambda name: CONTRACT)
    before = sorted(own.iterdir())
    done = CliRunner().invoke(cli.main, ["probe", "--contract", "few", "--read", str(own / "answer.jsonl")])
    assert done.exit_code == 0, done.output
    assert "proposed v100-measured winners, by the file's word" in done.output
    done = CliRunner().invoke(cli.main, ["probe", "--contract", "few", "--json", "--read", str(own / "answer.jsonl")])
    assert json.loads(done.stdout)["proposed"][0]["tokens"] == 1
    assert sorted(own.iterdir()) == before


def test_its_timings_can_be_fitted_together_with_others(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answers.read(own / "answer.jsonl", CONTRACT)
    (own / "v100.csv").write_text(probed.measurements(found, probed.findings(found)))
    monkeypatch.setattr(calibrate.contract, "load", lambda name: {"few": CONTRACT}[name])
    observed = calibrate.read([own / "v100.csv"])
    assert {str(each.level) for each in observed} == {
        f"few, V100-PCIE-32GB, {n} tokens, {routed}" for n in (1, 4) for routed in ("uniform", "zipf")
    }
    assert [str(each) for each in calibrate.quality(observed)] == [str(e) for e in probed.findings(found).quality]


@pytest.mark.parametrize(
    "options", [("--read", "a", "--set", "b"), ("--read", "a", "--output", "b"), ("--measurements", "b")]
)
def test_options_that_do_not_go_together_are_a_wrong_request(options: tuple[str, ...]) -> None:
    assert CliRunner().invoke(cli.main, ["probe", "--contract", "qwen38-tp4", *options]).exit_code == 2


def test_the_command_makes_the_file_and_refuses_another_contracts_set(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["probe", "--set", str(own / "set"), "--output", str(own / "made.pyz"), "--contract"]
    monkeypatch.setattr(cli.contracts, "load", lambda name: CONTRACT if name == "few" else SMALL)
    assert CliRunner().invoke(cli.main, [*command, "other"]).exit_code == 2
    assert not (own / "made.pyz").exists()
    done = CliRunner().invoke(cli.main, [*command, "few", "--json"])
    assert json.loads(done.stdout)["nbytes"] == (own / "made.pyz").stat().st_size


def changed(place: Path, change: Callable[[list[bytes]], list[bytes]]) -> Path:
    path = place / "changed.jsonl"
    path.write_bytes(b"".join(change((place / "answer.jsonl").read_bytes().splitlines(keepends=True))))
    return path


def count(place: Path) -> int:
    return len(records(place))


def test_the_example_is_an_h200s_whole_answer_and_no_changed_one_passes_for_it(tmp_path: Path) -> None:
    example, qwen = EXAMPLES / "h200-probe.jsonl", contract.load("qwen38-tp4")
    found = answers.read(example, qwen)
    kinds = [kind for kind, _ in found.records]
    assert (found.gpu, found.code, found.v100) == ("NVIDIA H200", "ptx", False)
    assert len(found.cells) == len(qwen.levels) * len(qwen.routings) and kinds[-1] == "end" and "fault" not in kinds
    assert [each for kind, each in found.records if kind == "verdict" and not each["ok"]] == [] and not found.wrong
    assert [mark for mark in found.marks if "no V100" not in mark] == []
    lines = example.read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    for changed_lines in (
        [*lines[:middle], *lines[middle + 1 :]],
        [*lines[:middle], lines[middle + 1], lines[middle], *lines[middle + 2 :]],
        [line.replace(b'"ok":true', b'"ok":false') for line in lines],
    ):
        (tmp_path / "other.jsonl").write_bytes(b"".join(changed_lines))
        with pytest.raises(RequestError, match="line"):
            answers.read(tmp_path / "other.jsonl", qwen)
    (tmp_path / "other.jsonl").write_bytes(b"".join(lines[:-1]))
    assert "it breaks off before its end" in answers.read(tmp_path / "other.jsonl", qwen).marks[0]


def test_a_line_cut_anywhere_is_refused_and_a_file_cut_anywhere_is_marked(own: Path) -> None:
    for n in range(count(own)):
        with pytest.raises(RequestError, match=f"line {n + 1}: not a record"):
            answers.read(
                changed(own, lambda all, n=n: [*all[:n], all[n][: len(all[n]) // 2] + b"\n", *all[n + 1 :]]), CONTRACT
            )
        broken = changed(own, lambda all, n=n: [*all[: n + 1], all[n][:-1]])
        if n + 1 < count(own):
            assert "it breaks off before its end" in answers.read(broken, CONTRACT).marks[0]
    with pytest.raises(RequestError, match="no record in it"):
        answers.read(changed(own, lambda all: [all[0][:50]]), CONTRACT)


def test_lines_that_were_swapped_taken_out_or_doubled_are_refused(own: Path) -> None:
    for n in range(count(own) - 1):
        for change in (
            lambda all, n=n: [*all[:n], all[n + 1], all[n], *all[n + 2 :]],
            lambda all, n=n: [*all[:n], *all[n + 1 :]],
            lambda all, n=n: [*all[: n + 1], *all[n:]],
        ):
            with pytest.raises(RequestError, match=f"line {n + 1}|line {n + 2}"):
                answers.read(changed(own, change), CONTRACT)


def test_a_figure_that_was_edited_is_refused_wherever_it_stands(own: Path) -> None:
    for n in range(count(own)):
        line = json.loads((own / "answer.jsonl").read_bytes().splitlines()[n])
        name = next(name for name in sorted(line) if name not in ("n", "before", "digest", "kind"))
        edited = json.dumps(line | {name: "another"}).encode() + b"\n"
        with pytest.raises(RequestError, match=f"line {n + 1}: its digest differs"):
            answers.read(changed(own, lambda all, n=n, edited=edited: [*all[:n], edited, *all[n + 1 :]]), CONTRACT)


def forged(place: Path, change: Callable[[str, dict[str, Any]], None]) -> Path:
    """The answer with changed records in a chain that is sound again, as a forger would make it."""
    path = place / "forged.jsonl"
    path.unlink(missing_ok=True)
    with chain.Writer(path) as writer:
        for kind, content in records(place):
            content = json.loads(json.dumps(content))
            change(kind, content)
            writer.write(kind, **content)
    return path


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a time that is a text": ("cell", lambda each: each["us"].update(copy=["1"] * 3)),
    "a time below zero": ("cell", lambda each: each["us"].update(copy=[-1.0] * 3)),
    "a time that is true": ("cell", lambda each: each["us"].update(copy=[True] * 3)),
    "fewer rounds of one arm": ("cell", lambda each: each["us"].update(copy=[1.0])),
    "a kernel that is not carried": ("cell", lambda each: each["us"].update(other=[1.0] * 3)),
    "a kernel of which nothing is told": ("cell", lambda each: each["us"].pop(TENSOR.key())),
    "a level that is none": ("cell", lambda each: each.update(tokens=3)),
    "a routing that is none": ("cell", lambda each: each.update(routing="hot")),
    "a verdict of another kernel": ("verdict", lambda each: each.update(arm="other")),
    "a name that is unknown": ("board", lambda each: each.update(colour="red")),
    "a name that is missing": ("bandwidth", lambda each: each.pop("us")),
    "a terminal's code in a text": ("header", lambda each: each.update(numpy="\x1b[2J")),
    "a kit that is none": ("header", lambda each: each.update(kit={})),
    "a kernel's key that is none": ("header", lambda each: each["kit"]["kernels"].update(other="0")),
    "another contract": ("header", lambda each: each["kit"].update(contract_digest="0")),
    "a schema that is none": ("header", lambda each: each.update(schema=True)),
}


@pytest.mark.parametrize("what", BAD)
def test_a_sound_chain_of_what_no_probe_writes_is_refused(own: Path, what: str) -> None:
    where, change = BAD[what]
    path = forged(own, lambda kind, content: kind == where and change(content))  # type: ignore[arg-type,return-value]
    with pytest.raises(RequestError):
        answers.read(path, CONTRACT)


def test_the_answer_of_another_contract_is_refused(own: Path) -> None:
    with pytest.raises(RequestError, match="is of a contract"):
        answers.read(own / "answer.jsonl", replace(CONTRACT, levels=(1,)))


def test_what_was_timed_must_be_what_this_version_builds(own: Path) -> None:
    def change(kind: str, content: dict[str, Any]) -> None:
        if kind == "header":
            content["kit"]["kernels"] |= {content["kit"]["default"]: "0"}

    with pytest.raises(RequestError, match="timed other kernels than this version builds"):
        probed.findings(answers.read(forged(own, change), CONTRACT))


def test_a_wrong_kernel_and_one_whose_runs_differ_are_marked_and_never_proposed(own: Path) -> None:
    first = records(own)[0][1]["kit"]["default"]

    def change(kind: str, content: dict[str, Any]) -> None:
        if kind == "verdict" and content["arm"] == first:
            content |= {"ok": False, "reasons": ["0.9 ulp"]}
        if kind == "replays" and content["arm"] == TENSOR.key():
            content["outputs"] = {"a": 2, "b": 1}
        if kind == "cell":
            content["us"] |= {first: [1.0] * 3, TENSOR.key(): [1.0] * 3}

    found = answers.read(forged(own, change), CONTRACT)
    assert any(mark.startswith("WRONG on that GPU") for mark in found.marks)
    assert any(mark.startswith("runs differ") for mark in found.marks)
    assert not {first, TENSOR.key()} & {each.config for each in probed.findings(found).proposals}


def test_an_answer_without_verdicts_is_marked(own: Path) -> None:
    path = own / "bare.jsonl"
    with chain.Writer(path) as writer:
        for kind, content in records(own):
            if kind not in ("verdict", "replays"):
                writer.write(kind, **content)
    marks = answers.read(path, CONTRACT).marks
    assert [mark for mark in marks if mark.startswith("no verdict and no replays of")] == list(marks)
    assert len(marks) == 2


def test_a_kernel_that_was_not_fit_to_be_timed_once_is_not_proposed(own: Path) -> None:
    first = records(own)[0][1]["kit"]["default"]

    def change(kind: str, content: dict[str, Any]) -> None:
        if kind == "cell" and content["routing"] == "zipf":
            del content["us"][first]
            content["wrong"] = {first: "WrongResult: 0.9 ulp"}
        elif kind == "cell":
            content["us"][first] = [1.0] * 3

    found = answers.read(forged(own, change), CONTRACT)
    assert [mark for mark in found.marks if "not fit to be timed" in mark] == list(found.marks)
    assert first not in {each.config for each in probed.findings(found).proposals}


def test_another_gpus_answer_proposes_nothing_for_a_v100(own: Path) -> None:
    def change(kind: str, content: dict[str, Any]) -> None:
        if kind == "header":
            content["gpu"] |= {"name": "NVIDIA H200", "capability": [9, 0]}
            content["code"] = "ptx"
        if kind == "cell":
            content["us"] |= {name: [20.0] * 3 for name in content["us"]}

    found = answers.read(forged(own, change), CONTRACT)
    assert any("no V100's" in mark for mark in found.marks)
    means = probed.findings(found)
    assert means.proposals == ()
    tensor = {name for name in found.kit.kernels if "tensor" in name}
    assert found.imitated == tensor != set(found.kit.kernels)
    assert len(means.observed) == 4 * len([name for name in found.kit.kernels if name[:6] not in ("tensor", "loads:")])
    assert [row[2:5] for row in means.rows if row[3] is None] == [("winner of v100-predicted", None, 20.0)] * 2
    assert [remark for remark in means.remarks if "m8n8k4" in remark] == list(means.remarks[-1:])


# ---- NVML ---------------------------------------------------------------------------------------------------------
NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **h) { *h = (void *)1; return 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) { return 1; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { return 1; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { *mw = 61500; return 0; }
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *t) { *t = 41; return sensor; }
int nvmlDeviceGetMaxClockInfo(void *h, int type, unsigned *mhz) { *mhz = type == 1 ? 1380 : 877; return 0; }
int nvmlDeviceGetEccMode(void *h, unsigned *now, unsigned *pending) { *now = 1; *pending = 0; return 0; }
int nvmlDeviceGetTotalEccErrors(void *h, int kind, int ever, unsigned long long *n) { *n = 5; return kind - ever; }
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *mw) { return 3; }
"""


def test_power_temperature_and_ecc_are_read_from_nvml_and_none_where_it_refuses(tools: Path) -> None:
    (tools / "nvml.c").write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tools / "nvml.so"), str(tools / "nvml.c")], check=True)
    found = nvml.Nvml("0000:3B:00.0", str(tools / "nvml.so"))
    assert found.board() == nvml.Board(61.5, None, 41, 1380, 877, True, 5)
    assert nvml.Nvml("0000:3B:00.0", "absent.so").board() == nvml.Board()
