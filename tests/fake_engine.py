"""Ops of the schemas that a V100 engine registers, on CPU tensors: slow, by tuner/awq.py's integers, with the engine's
roundings; every call is kept. Two of its versions."""

import ctypes
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tuner import awq, reference
from tuner.contract import Contract

POLICY = ", str? native_policy=None"
_PERMUTE = (
    "(Tensor input, Tensor topk_ids, Tensor token_expert_indices, Tensor? expert_map, int n_expert, "
    "int n_local_expert, int topk, {}Tensor! permuted_input, Tensor! expert_first_token_offset, "
    "Tensor! inv_permuted_idx, Tensor! permuted_idx{}) -> ()"
)
_GEMM = (
    "(Tensor(a!) out, Tensor sorted_input, Tensor expert_offsets, Tensor strided_ptrs_w, Tensor strided_ptrs_s, "
    "int num_experts, int k, int n, int group_size, bool gated_silu{}) -> ()"
)
_SINGLE = (
    "(Tensor(a!) out, Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor src_w13_ptrs_w_rows, "
    "Tensor src_w13_ptrs_s_rows, Tensor src_w2_ptrs_w_rows, Tensor src_w2_ptrs_s_rows, Tensor(b!) compact_input, "
    "Tensor(c!) intermediate, Tensor(d!) sorted_output, {}Tensor(f!) dst_w13_ptrs_w_rows, "
    "Tensor(g!) dst_w13_ptrs_s_rows, Tensor(h!) dst_w2_ptrs_w_rows, Tensor(i!) dst_w2_ptrs_s_rows, "
    "Tensor(j!) expert_offsets, Tensor(k!) inv_permuted_idx, int w13_k, int w13_n, int w2_k, int w2_n, int group_size, "
    "int hidden_logical_size{}) -> ()"
)
_PREPARE = (
    "(Tensor _kernel, Tensor _scaling_factors, Tensor _zeros, int group_size, bool interleave_gated_silu{}) -> Tensor[]"
)
_POINTERS = "(Tensor tm_weights, Tensor tm_scales, int k_ld, int q_ld, int num_experts{}) -> Tensor[]"
_UNPERMUTE = (
    "(Tensor permuted_hidden_states, Tensor topk_weights, Tensor inv_permuted_idx, Tensor? expert_first_token_offset, "
    "int topk, Tensor! hidden_states{}) -> ()"
)
_SCRATCH = (
    ", Tensor! sort_workspace, Tensor! permuted_experts_id, Tensor! sorted_row_idx, Tensor! topk_ids_for_sort"
    ", str[]? native_policy=None"
)
NEWER = {
    "_C.awq_sm70_prepare": _PREPARE.format(POLICY),
    "_C.awq_sm70_prepare_compact": _PREPARE.format(POLICY),
    "_C.awq_moe_build_strided_ptrs": _POINTERS.format(POLICY),
    "_C.awq_moe_gemm_sm70_per_expert_dispatch_out": _GEMM.format(POLICY),
    "_C.awq_moe_single_token_sm70_out": _SINGLE.format("Tensor(e!) sorted_weights, ", POLICY),
    "_C.awq_moe_qpn_m1_sm70_out": (
        "(Tensor(a!) out, Tensor(b!) intermediate, Tensor input, Tensor w13, Tensor s13, Tensor w2, Tensor s2, "
        f"Tensor ids, Tensor topk{POLICY}) -> ()"
    ),
    "_C.silu_and_mul": "(Tensor! result, Tensor input) -> ()",
    "_C.silu_and_mul_interleaved": "(Tensor! result, Tensor input) -> ()",
    "_moe_C.moe_permute_with_scratch": _PERMUTE.format("", _SCRATCH),
    "_moe_C.moe_permute_sort_workspace_size": "(int num_expanded_rows, int n_expert) -> int",
    "_moe_C.moe_unpermute": _UNPERMUTE.format(", str[]? native_policy=None"),
}
OLDER = {
    "_C.awq_sm70_prepare": _PREPARE.format(""),
    "_C.awq_moe_build_strided_ptrs": _POINTERS.format(""),
    "_C.awq_moe_gemm_sm70_out": _GEMM.format(""),
    "_C.awq_moe_single_token_sm70_out": _SINGLE.format("", ""),
    "_C.silu_and_mul": "(Tensor! result, Tensor input) -> ()",
    "_moe_C.moe_permute": _PERMUTE.format("int? align_block_size, ", ", Tensor! m_indices"),
    "_moe_C.moe_unpermute": _UNPERMUTE.format(""),
}


class FakeEngine:
    """Registered from `register` to `forget`. calls: (op, its arguments by name) in order."""

    def __init__(self, contract: Contract, schemas: dict[str, str]) -> None:
        import torch

        self.torch, self.contract, self.schemas = torch, contract, schemas
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._libraries: dict[str, Any] = {}

    def register(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("vllm", "vllm._C", "vllm._moe_C"):
            patch.setitem(sys.modules, name, ModuleType(name))
        for name, schema in self.schemas.items():
            library, op = name.split(".")
            held = self._libraries.get(library) or self.torch.library.Library(library, "FRAGMENT")
            self._libraries[library] = held
            held.define(op + schema)
            held.impl(op, self._called(library, op), "CompositeExplicitAutograd")

    def forget(self) -> None:
        for library in self._libraries.values():
            library._destroy()

    def names(self) -> list[str]:
        """Ops in the order they were called in."""
        return [name for name, _ in self.calls]

    def _called(self, library: str, op: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            schema = getattr(getattr(self.torch.ops, library), op).default._schema
            given = dict(zip((each.name for each in schema.arguments), arguments, strict=False)) | named
            self.calls.append((op, given))
            given.pop("native_policy", None)
            return getattr(self, op.removesuffix("_with_scratch"))(**given)

        return call

    # Weights

    def awq_sm70_prepare(
        self, _kernel: Any, _scaling_factors: Any, _zeros: Any, stats_bytes: int = 4, **rest: Any
    ) -> Any:
        q, z = (awq.unpack_columns(part.numpy().view(np.uint32)) for part in (_kernel, _zeros))
        one = replace(
            self.contract, experts=1, interleaved=rest["interleave_gated_silu"], stats_bytes=stats_bytes, top_k=1
        )
        which = "w13" if len(q) == self.contract.hidden else "w2"
        packed = awq.pack(one, which, [awq.Integers(q, z, _scaling_factors.numpy())])
        k, n = q.shape
        stats = packed.scales if stats_bytes == 3 else packed.scales.view(np.int32)
        strides = [32 * k, -n if stats_bytes == 3 else n]
        found = packed.q[0].view(np.int32), stats[0], np.array(strides)
        return [self.torch.from_numpy(np.ascontiguousarray(part)) for part in found]

    def awq_sm70_prepare_compact(self, **given: Any) -> Any:
        return self.awq_sm70_prepare(**given, stats_bytes=3)

    def awq_moe_build_strided_ptrs(
        self, tm_weights: Any, tm_scales: Any, k_ld: int, q_ld: int, num_experts: int
    ) -> Any:
        found = []
        for tensor, stride in ((tm_weights, k_ld), (tm_scales, q_ld)):
            assert tensor.is_contiguous() and len(tensor) == num_experts
            rows = [(tensor[e].data_ptr(), stride) for e in range(num_experts)]
            found.append(self.torch.from_numpy(np.array(rows, np.int64).view(np.uint8).ravel()))
        return found

    def _matrix(self, which: str, words: int, stats: int, compact: bool) -> np.ndarray:
        """float64 [K, N] with the engine's rounding, from the memory at two addresses, columns as they are there."""
        shape = awq.gemm(self.contract, which)
        count, width = shape.k // shape.group * shape.n, 3 if compact else 4
        q = np.frombuffer((ctypes.c_char * (shape.k * shape.n // 2)).from_address(words), np.uint32)
        held = np.frombuffer((ctypes.c_char * (count * width)).from_address(stats), np.uint8 if compact else np.uint32)
        groups = shape.k // shape.group, shape.n
        held = held.reshape(1, *groups, 3) if compact else held.reshape(1, *groups)
        weights = awq.GemmWeights(q.reshape(1, shape.k, -1), held, None)
        plain = replace(self.contract, interleaved=False)
        one = awq.integers(plain, awq.LayerWeights(weights, weights), which, 0)
        return reference._engine_weights(one, self.contract.group).astype(np.float64)

    def _rows(self, which: str, pointers: Any, scales: Any, expert: int) -> np.ndarray:
        (words, k_ld), (stats, q_ld) = (
            each.numpy().view(np.int64).reshape(-1, 2)[expert] for each in (pointers, scales)
        )
        shape = awq.gemm(self.contract, which)
        assert (k_ld, abs(q_ld)) == (32 * shape.k, shape.n)
        return self._matrix(which, int(words), int(stats), q_ld < 0)

    # Steps

    def moe_permute_sort_workspace_size(self, num_expanded_rows: int, n_expert: int) -> int:
        return num_expanded_rows * n_expert

    def moe_permute(self, input: Any, topk_ids: Any, **out: Any) -> None:
        assert out["expert_map"] is None and out["n_expert"] == out["n_local_expert"] == self.contract.experts
        assert out["token_expert_indices"].flatten().tolist() == list(range(topk_ids.numel()))
        order = np.argsort(topk_ids.flatten().numpy(), kind="stable")
        counts = np.bincount(topk_ids.flatten().numpy(), minlength=self.contract.experts)
        out["permuted_input"].copy_(input[self.torch.from_numpy(order // out["topk"])])
        out["expert_first_token_offset"].copy_(self.torch.from_numpy(np.concatenate(([0], np.cumsum(counts)))))
        out["inv_permuted_idx"].view(-1)[self.torch.from_numpy(order)] = self.torch.arange(len(order)).int()

    def awq_moe_gemm_sm70_out(self, out: Any, sorted_input: Any, expert_offsets: Any, **given: Any) -> None:
        which = "w13" if given["k"] == self.contract.hidden else "w2"
        offsets = expert_offsets.tolist()
        for e, (begin, end) in enumerate(itertools.pairwise(offsets)):
            if begin < end:
                matrix = self._rows(which, given["strided_ptrs_w"], given["strided_ptrs_s"], e)
                found = self.torch.from_numpy(reference._half_product(sorted_input[begin:end].numpy(), matrix))
                if given["gated_silu"]:
                    self.silu_and_mul_interleaved(out[begin:end], found)
                else:
                    out[begin:end] = found

    awq_moe_gemm_sm70_per_expert_dispatch_out = awq_moe_gemm_sm70_out

    def silu_and_mul(self, result: Any, input: Any) -> None:
        gate, up = input.chunk(2, dim=1)
        result.copy_(self.torch.nn.functional.silu(gate.float()).half() * up)

    def silu_and_mul_interleaved(self, result: Any, input: Any) -> None:
        self.silu_and_mul(result, self.torch.cat((input[:, 0::2], input[:, 1::2]), dim=1))

    def moe_unpermute(self, permuted_hidden_states: Any, topk_weights: Any, inv_permuted_idx: Any, **out: Any) -> None:
        routes = permuted_hidden_states[inv_permuted_idx.long()].float()
        out["hidden_states"].copy_((routes * topk_weights[..., None]).sum(1).half())

    def awq_moe_single_token_sm70_out(self, out: Any, x: Any, topk_weights: Any, topk_ids: Any, **given: Any) -> None:
        assert given["expert_offsets"].tolist() == list(range(self.contract.top_k + 1))
        pointers = {
            f"{which}_{part}": given[f"src_{which}_ptrs_{part}_rows"] for which in ("w13", "w2") for part in ("w", "s")
        }
        self._one(out, x, topk_weights, topk_ids, lambda which, e: self._rows(which, *_pair(pointers, which), e))

    def awq_moe_qpn_m1_sm70_out(self, out: Any, input: Any, ids: Any, topk: Any, **given: Any) -> None:
        def matrix(which: str, e: int) -> np.ndarray:
            words, stats = given[which][e], given[which.replace("w", "s")][e]
            return self._matrix(which, words.data_ptr(), stats.data_ptr(), stats.dtype == self.torch.uint8)

        self._one(out, input, topk, ids, matrix)

    def _one(self, out: Any, x: Any, topk: Any, ids: Any, matrix: Callable[[str, int], np.ndarray]) -> None:
        total = self.torch.zeros(out.shape, dtype=self.torch.float32)
        inner = self.torch.empty((1, self.contract.w2.k), dtype=self.torch.float16)
        for e, share in zip(ids.flatten().tolist(), topk.flatten().tolist(), strict=True):
            both = self.torch.from_numpy(reference._half_product(x.numpy(), matrix("w13", e)))
            self.silu_and_mul_interleaved(inner, both)
            total += share * self.torch.from_numpy(reference._half_product(inner.numpy(), matrix("w2", e))).float()
        out.copy_(total.half())


def _pair(pointers: dict[str, Any], which: str) -> tuple[Any, Any]:
    return pointers[f"{which}_w"].flatten(), pointers[f"{which}_s"].flatten()
