"""The model's evaluator builds for real and predicts over the contract's own routings."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FEW, scattered
from small import SMALL

from tuner import contract, evaluate, items, model, plan, routing, space
from tuner.build import Ahead, Image
from tuner.errors import BuildFailed, InvalidConfig, UnknownInstruction
from tuner.evaluate import ModelEvaluator
from tuner.model import Prediction
from tuner.render import Source

V100 = model.device("V100-PCIE-32GB")
MIXED = replace(SMALL, routings=(("single-hot", 0.25), ("uniform", 0.75)))


@pytest.fixture(scope="module")
def evaluator() -> ModelEvaluator:
    return ModelEvaluator(MIXED, V100)


def test_a_prediction_says_so_and_names_the_gpu_and_what_bounds_it(evaluator: ModelEvaluator) -> None:
    found = evaluator.evaluate(space.default(MIXED), 5).to_dict()
    assert (found["word"], found["device"]) == ("predicted", "V100-PCIE-32GB")
    assert found["details"]["bound"] in model.TERMS
    assert found["us"] > V100.launch_us
    assert found["samples"] == ()


def test_a_prediction_for_sm_70_uses_what_its_code_did_and_says_so(
    evaluator: ModelEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = space.default(MIXED)
    details = evaluator.evaluate(default, 5).details
    assert details["instructions from"] == items.BASIS
    assert evaluator.work(default) is evaluator.work(default)
    monkeypatch.setattr(ModelEvaluator, "work", lambda self, config: None)
    assumed = evaluator.evaluate(default, 5).details
    assert assumed["instructions from"] == "counted from the data flow"
    assert assumed["instructions"] != details["instructions"]


def test_code_for_another_gpu_is_not_executed() -> None:
    assert ModelEvaluator(MIXED, model.device("H200")).work(space.default(MIXED)) is None


def test_a_kernel_with_an_instruction_that_is_not_known_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(of: contract.Contract, config: space.Config, image: Image) -> None:
        raise UnknownInstruction("voltune_op pc 0x10: not known")

    monkeypatch.setattr(items, "work", unknown)
    with pytest.raises(UnknownInstruction, match="pc 0x10"):
        ModelEvaluator(MIXED, V100).evaluate(space.default(MIXED), 1)


def test_a_prediction_is_repeatable(evaluator: ModelEvaluator) -> None:
    default = space.default(MIXED)
    evaluator.prefetch([default])
    assert evaluator.evaluate(default, 5) == ModelEvaluator(MIXED, V100).evaluate(default, 5)


def test_the_image_is_of_the_devices_architecture(evaluator: ModelEvaluator) -> None:
    image = evaluator.image(space.default(MIXED))
    assert image.arch == "sm_70"
    assert image.registers > 0


def test_the_floor_is_of_the_same_routings_by_their_weights() -> None:
    drawn = [routing.make("uniform", MIXED, 5, seed).active for seed in evaluate.SEEDS]
    active = 0.25 * 1 + 0.75 * sum(drawn) / len(drawn)
    # 64 x 256 nibbles and 2 groups of 2.5 bytes a column in W2, 256 x 128 and 8 groups in W13.
    expert = 64 * 256 / 2 + 2 * 256 * 2.5 + 256 * 128 / 2 + 8 * 128 * 2.5
    assert evaluate.floor(MIXED, 5, V100) == pytest.approx(active * expert / 900e3)


def test_a_configuration_that_does_not_build_raises_its_own_error(
    evaluator: ModelEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = evaluate.render.render

    def broken(plan):  # type: ignore[no-untyped-def]
        return {stage: replace(source, text="not CUDA") for stage, source in real(plan).items()}

    monkeypatch.setattr(evaluate.render, "render", broken)
    with pytest.raises(BuildFailed):
        evaluator.evaluate(space.default(MIXED), 1)


def test_the_fingerprint_changes_with_the_seeds(evaluator: ModelEvaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    before = evaluator.fingerprint
    assert before == ModelEvaluator(SMALL, V100).fingerprint
    monkeypatch.setattr(evaluate, "SEEDS", (7, 8))
    assert evaluator.fingerprint != before


@pytest.mark.parametrize("name", ["model.py", "work.py", "gpu.py", "devices.toml", "routing.py", *items.SOURCES])
def test_the_fingerprint_changes_with_the_model_the_gpus_and_the_routings(
    evaluator: ModelEvaluator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(Path(model.__file__).parent, tmp_path / "tuner"))
    before = evaluator.fingerprint
    monkeypatch.setattr(model, "__file__", str(folder / "model.py"))
    assert evaluator.fingerprint == before
    with (folder / name).open("a") as file:
        file.write("# changed")
    assert evaluator.fingerprint != before


def test_a_kernel_that_spills_is_refused_as_its_configurations_fault(
    evaluator: ModelEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = space.default(MIXED)
    spilling = replace(evaluator.image(default), spill_bytes=8)
    monkeypatch.setattr(ModelEvaluator, "image", lambda self, config: spilling)
    with pytest.raises(InvalidConfig, match=rf"{re.escape(default.key())} spills 8 bytes .* fewer resident threads"):
        evaluator.evaluate(default, 1)


def test_guesses_are_what_the_model_thinks_fastest_without_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Ahead, source: Source) -> Image:
        raise AssertionError("a guess builds nothing")

    def predicted(contract, plan, resources, pool, tokens, dev):  # type: ignore[no-untyped-def]
        assert resources.registers <= dev.registers_per_thread
        assert resources.registers * plan.config.w13.threads <= dev.registers_per_sm
        return Prediction(scattered(plan.config, tokens), {}, "memory")

    monkeypatch.setattr(Ahead, "image", never)
    monkeypatch.setattr(evaluate, "_registers", lambda stage, tile, dev: 32)
    monkeypatch.setattr(model, "predict_op", predicted)
    small = replace(V100, shared_per_block=4_400)
    fitting = [c for c in space.candidates(FEW) if plan.why_invalid(FEW, c, small) is None]
    assert 20 < len(fitting) < len(space.candidates(FEW))
    by_time = sorted(fitting, key=lambda config: scattered(config, 5))
    assert evaluate.guesses(FEW, 5, small) == tuple(by_time[: evaluate.GUESSES])
    assert evaluate.guesses(FEW, 5, small, 3) == tuple(by_time[:3])


def test_what_would_spill_is_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    # A V100's 65536 registers are 128 a thread for 512 threads of an SM, and 80 for 768.
    monkeypatch.setattr(evaluate, "_registers", lambda stage, tile, dev: 128 if tile.tiles == 4 else 64)
    found = evaluate.guesses(FEW, 5, V100, count=1000)
    assert all(config.w2.tiles == 4 for config in space.candidates(FEW))
    assert {config.resident for config in found} == {n for n in space.RESIDENT if n <= 512}


def test_the_registers_that_a_guess_supposes_let_every_kernel_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    of, asked = contract.load("qwen38-tp4"), []

    def placed(contract, plan, resources, pool, tokens, dev):  # type: ignore[no-untyped-def]
        asked.append(plan.config)
        model.occupancy(dev, plan.launch("op").block, resources)  # raises where not even one CTA fits
        return Prediction(1.0, {}, "memory")

    monkeypatch.setattr(model, "predict_op", placed)
    evaluate.guesses(of, of.max_tokens, V100)
    assert {config.w13.threads // 32 for config in asked} == set(space.WARPS)
