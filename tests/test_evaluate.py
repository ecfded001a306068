"""The model's evaluator builds for real and predicts over the contract's own routings."""

from dataclasses import replace

import pytest
from small import SMALL

from tuner import evaluate, model, routing, space
from tuner.errors import BuildFailed
from tuner.evaluate import ModelEvaluator

V100 = model.device("V100-PCIE-32GB")
MIXED = replace(SMALL, routings=(("single-hot", 0.25), ("uniform", 0.75)))


@pytest.fixture(scope="module")
def evaluator() -> ModelEvaluator:
    return ModelEvaluator(MIXED, V100)


def test_a_prediction_says_so_and_names_the_gpu_and_what_bounds_it(evaluator: ModelEvaluator) -> None:
    found = evaluator.evaluate("w2", space.default(MIXED).w2, 5).to_dict()
    assert (found["word"], found["device"]) == ("predicted", "V100-PCIE-32GB")
    assert found["details"]["bound"] in model.TERMS
    assert found["us"] > V100.launch_us
    assert found["samples"] == ()


def test_a_prediction_is_repeatable(evaluator: ModelEvaluator) -> None:
    default = space.default(MIXED)
    evaluator.prefetch("w2", [default.w2])
    assert evaluator.evaluate("w2", default.w2, 5) == ModelEvaluator(MIXED, V100).evaluate("w2", default.w2, 5)


def test_the_image_is_of_the_devices_architecture(evaluator: ModelEvaluator) -> None:
    image = evaluator.image("w2", space.default(MIXED).w2)
    assert image.arch == "sm_70"
    assert image.registers > 0


def test_the_floor_is_of_the_same_routings_by_their_weights() -> None:
    drawn = [routing.make("uniform", MIXED, 5, seed).active for seed in evaluate.SEEDS]
    active = 0.25 * 1 + 0.75 * sum(drawn) / len(drawn)
    # W2 of the small contract: 64 x 256 nibbles, 2 groups of 2.5 bytes a column.
    assert evaluate.floor(MIXED, "w2", 5, V100) == pytest.approx(active * (64 * 256 / 2 + 2 * 256 * 2.5) / 900e3)


def test_a_configuration_that_does_not_build_raises_its_own_error(
    evaluator: ModelEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = evaluate.render.render

    def broken(plan):  # type: ignore[no-untyped-def]
        return {stage: replace(source, text="not CUDA") for stage, source in real(plan).items()}

    monkeypatch.setattr(evaluate.render, "render", broken)
    with pytest.raises(BuildFailed):
        evaluator.evaluate("w13", space.default(MIXED).w13, 1)


def test_the_fingerprint_changes_with_the_seeds(evaluator: ModelEvaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    before = evaluator.fingerprint
    assert before == ModelEvaluator(SMALL, V100).fingerprint
    monkeypatch.setattr(evaluate, "SEEDS", (7, 8))
    assert evaluator.fingerprint != before
