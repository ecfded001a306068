"""The build: it registers the ops, and refuses what it cannot run."""

import pytest
import torch
from conftest import CONTRACT, SPEC


def test_the_ops_are_registered(package):
    for name in SPEC["ops"]:
        assert str(getattr(package.ops, name).default._schema).startswith(f"{SPEC['namespace']}::{name}(")


def test_a_cpu_tensor_is_refused(package):
    tensors = [
        torch.zeros(
            [constant + per_token for constant, per_token in each["shape"]], dtype=getattr(torch, each["types"][0])
        )
        for each in SPEC["ops"]["compact_sorted"]["operands"]
    ]
    with pytest.raises(RuntimeError, match="expected a CUDA tensor"):
        package.ops.compact_sorted(*tensors)


def test_weights_that_do_not_fit_are_a_reason(package):
    with pytest.warns(UserWarning, match="is not used"):
        bound, reason = package.bind({}, interleaved=CONTRACT["weights"]["interleaved"], top_k=CONTRACT["top_k"])
    assert bound is None
    assert reason.startswith("weights []: expected a tensor for each of [")
