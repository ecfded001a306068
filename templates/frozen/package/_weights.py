"""An expert layer's weights: what the op takes in place, and how it is made from a checkpoint's tensors."""

from collections.abc import Mapping

import torch

from ._ops import SPEC

_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ keeps the j-th of eight columns, and sm70-u4 the j-th of eight rows
_CONTRACT = SPEC["contract"]
_RANKS, _EXPERTS, _HIDDEN = (_CONTRACT[key] for key in ("tensor_parallel", "experts", "hidden"))
_WHOLE = _CONTRACT["intermediate"]
_OWN = _WHOLE // _RANKS
_CHECKPOINT_GROUP, _GROUP = (_CONTRACT["quantization"][key] for key in ("checkpoint_group", "group"))
_LAYOUT = _CONTRACT["weights"]
_ALIGNMENT = 16

OPERANDS = {
    each["name"]: (each["types"][0], tuple(size[0] for size in each["shape"]))
    for each in SPEC["ops"]["moe_out"]["operands"]
    if each["name"].startswith(("w13_", "w2_"))
}


def check(tensors):
    """The weight tensors in the op's order, as the op takes them: the engine's own memory. Raises ValueError."""
    if not isinstance(tensors, Mapping) or set(tensors) != set(OPERANDS):
        given = sorted(map(str, tensors)) if isinstance(tensors, Mapping) else f"as {type(tensors).__name__}"
        raise ValueError(f"weights {given}: expected a tensor for each of {sorted(OPERANDS)}")
    taken = []
    for name, (kind, shape) in OPERANDS.items():
        given = tensors[name]
        if not isinstance(given, torch.Tensor):
            raise ValueError(f"{name} is {type(given).__name__}: expected a tensor")
        if given.device.type != SPEC.get("device_type", "cuda"):
            raise ValueError(f"{name} is on {given.device}: expected a CUDA device")
        wanted = (
            f"{name} is {str(given.dtype).removeprefix('torch.')} {list(given.shape)}: expected {kind} {list(shape)}"
        )
        if given.dtype == torch.uint32:
            given = given.view(torch.int32)
        if given.dtype != getattr(torch, kind) or tuple(given.shape) != shape:
            raise ValueError(wanted)
        if not given.is_contiguous() or given.data_ptr() % _ALIGNMENT:
            raise ValueError(f"{name} is not contiguous, or does not begin at a multiple of {_ALIGNMENT} bytes")
        if given.device != next(iter(tensors.values())).device:
            raise ValueError(f"{name} is on {given.device}: expected one device for all weights")
        taken.append(given.detach())
    return taken


def convert_weights(experts, rank=0, device=None):
    """The op's weight tensors, by name, on `device`, from a checkpoint's.

    experts: for each expert in order, a mapping of gate_proj, up_proj and down_proj to the checkpoint's whole
    (qweight int32 [K, N/8], qzeros int32 [K/g, N/8], scales f16 or bf16 [K/g, N]); the rank's slice is taken here. One
    expert at a time: give a generator, and no more than that is held besides the result. Raises ValueError.
    """
    if not 0 <= rank < _RANKS:
        raise ValueError(f"rank {rank}: expected 0 to {_RANKS - 1}")
    made = {
        name: torch.empty(shape, dtype=getattr(torch, kind), device=device) for name, (kind, shape) in OPERANDS.items()
    }
    own = slice(rank * _OWN, (rank + 1) * _OWN)
    count = 0
    for expert in experts:
        if count == _EXPERTS:
            raise ValueError(f"more than the contract's {_EXPERTS} experts")
        where = f"expert {count}"
        if not isinstance(expert, Mapping) or not {"gate_proj", "up_proj", "down_proj"} <= set(expert):
            raise ValueError(f"{where}: expected a mapping with gate_proj, up_proj and down_proj")
        halves = [
            _numbers(expert[name], _HIDDEN, _WHOLE, device, f"{where}, {name}") for name in ("gate_proj", "up_proj")
        ]
        # A rank has the same columns of both halves.
        w13 = [_side_by_side(gate[:, own], up[:, own]) for gate, up in zip(*halves, strict=True)]
        down = _numbers(expert["down_proj"], _WHOLE, _HIDDEN, device, f"{where}, down_proj")
        groups = slice(own.start // _GROUP, own.stop // _GROUP)
        w2 = [part[rows] for part, rows in zip(down, (own, groups, groups), strict=True)]
        for prefix, numbers in (("w13", w13), ("w2", w2)):
            for name, packed in _packed(*numbers, f"{where}, {prefix}").items():
                made[f"{prefix}_{name}"][count].copy_(packed)
        count += 1
    if count != _EXPERTS:
        raise ValueError(f"{count} experts: the contract has {_EXPERTS}")
    return made


def _numbers(tensors, k, n, device, where):
    """q uint8 [K, N], z uint8 [K/g, N], s f16 [K/g, N] with the group of the op."""
    if len(tensors) != 3:
        raise ValueError(f"{where}: {len(tensors)} tensors: expected qweight, qzeros and scales")
    groups = k // _CHECKPOINT_GROUP
    expected = (((k, n // 8), (torch.int32,)), ((groups, n // 8), (torch.int32,)))
    expected += (((groups, n), (torch.float16, torch.bfloat16)),)
    for name, given, (shape, kinds) in zip(("qweight", "qzeros", "scales"), tensors, expected, strict=True):
        if tuple(given.shape) != shape or given.dtype not in kinds:
            raise ValueError(f"{where}: {name} is {given.dtype} {list(given.shape)}: expected {kinds} {list(shape)}")
    q, z, scales = (tensor.to(device) for tensor in tensors)
    s = scales.half()
    if not torch.isfinite(s).all() or ((s == 0) & (scales != 0)).any():
        raise ValueError(f"{where}: a scale is not finite, or float16 cannot hold it")
    repeat = _CHECKPOINT_GROUP // _GROUP
    return _columns(q), _columns(z).repeat_interleave(repeat, 0), s.repeat_interleave(repeat, 0)


def _columns(words):
    """AWQ's words [R, N/8] -> 0..15 in [R, N]."""
    shifts = torch.tensor([4 * nibble for nibble in _NIBBLES], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).reshape(len(words), -1)


def _side_by_side(gate, up):
    if _LAYOUT["interleaved"]:
        return torch.stack((gate, up), -1).reshape(len(gate), -1)
    return torch.cat((gate, up), 1)


def _words(planes):
    """[8, ...] of 0..15 -> words [...], the i-th plane in nibble _NIBBLES[i]."""
    words = torch.zeros(planes.shape[1:], dtype=torch.int32, device=planes.device)
    for plane, nibble in zip(planes, _NIBBLES, strict=True):
        words |= plane.to(torch.int32) << (4 * nibble)
    return words


def _packed(q, z, s, where):
    k, n = q.shape
    if _LAYOUT["layout"] == "awq":
        return {name: _words(part.reshape(-1, n // 8, 8).movedim(2, 0)) for name, part in (("q", q), ("zeros", z))} | {
            "scales": s
        }
    words = _words(q.reshape(k // 8, 8, n // 32, 32).movedim(1, 0))
    found = {"q": words.transpose(0, 1).reshape(k, n // 8)}
    if _LAYOUT["stats_bytes"] == 3:
        halves = s.contiguous().view(torch.uint8).reshape(*s.shape, 2)
        return found | {"scales": torch.cat((halves, z[..., None]), -1)}
    bias = (-(z.float() * s.float())).half()
    if not torch.isfinite(bias).all():
        raise ValueError(f"{where}: z * s is beyond float16, which 4-byte statistics cannot hold")
    return found | {"scales": torch.stack((s, bias), -1).contiguous().view(torch.int32)[..., 0]}
