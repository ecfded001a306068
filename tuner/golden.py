"""Weights and a step that any machine makes to the same bits, for golden outputs. Imports NumPy alone: an exported
folder's tests hold this file as it stands.

`contract` is the structure of a contract's TOML, as manifests have it; a number is a hash of its place.
"""

from typing import Any

import numpy as np

ROWS = 12  # tokens whose outputs are recorded


def weights(contract: dict[str, Any]) -> dict[str, np.ndarray]:
    """The op's weight tensors by name, in the contract's layout; words are int32."""
    experts, hidden = contract["experts"], contract["hidden"]
    own = contract["intermediate"] // contract["tensor_parallel"]
    layout, group = contract["weights"], contract["quantization"]["group"]
    found: dict[str, np.ndarray] = {}
    for seed, (name, k, n) in enumerate((("w13", hidden, 2 * own), ("w2", own, hidden))):
        found[f"{name}_q"] = _words((experts, k, n // 8), 4 * seed).view(np.int32)
        bits = _words((experts, k // group, n), 4 * seed + 1)
        # Two octaves, so low that K products of weight and a unit input sum to about 1.
        octave = 15 - int(np.ceil(np.log2(15.6 * np.sqrt(k))))
        scales = ((octave << 10) + (bits & 2047)).astype(np.uint16).view(np.float16)
        zeros = (bits >> 16 & 15).astype(np.uint8)
        if layout["layout"] == "awq":
            found[f"{name}_scales"] = scales
            found[f"{name}_zeros"] = _words((experts, k // group, n // 8), 4 * seed + 2).view(np.int32)
        elif layout["stats_bytes"] == 3:
            halves = scales.view(np.uint8).reshape(*scales.shape, 2)
            found[f"{name}_scales"] = np.concatenate((halves, zeros[..., None]), -1)
        else:
            bias = -(zeros.astype(np.float32) * scales.astype(np.float32)).astype(np.float16)
            found[f"{name}_scales"] = np.stack((scales, bias), -1).view(np.int32)[..., 0]
    return found


def step(contract: dict[str, Any], tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x f16 [M, H], topk_ids int32 [M, k] with a -1 here and there, topk_weights f32 [M, k]; token t is t % ROWS's."""
    k, experts = contract["top_k"], contract["experts"]
    x = (_words((ROWS, contract["hidden"]), 101) >> 20).astype(np.float32) / 1024 - 2
    ids = _words((ROWS, 1), 102) % experts + np.arange(k, dtype=np.uint32) * 37
    ids = np.where(_words((ROWS, k), 103) % 16 == 0, -1, (ids % experts).astype(np.int32))
    shares = (_words((ROWS, k), 104) >> 8).astype(np.float32) / np.float32(1 << 23) / np.float32(k)
    which = np.arange(tokens) % ROWS
    return x.astype(np.float16)[which], ids.astype(np.int32)[which], shares[which]


def _words(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """uint32: a mix of each place's number and the seed."""
    count = int(np.prod(shape))
    words = np.arange(count, dtype=np.uint32)
    words += np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words ^= words >> np.uint32(shift)
        words *= np.uint32(factor)
    words ^= words >> np.uint32(16)
    return words.reshape(shape)
