"""Typed failures. Every text names the value, what was expected, and what to do.

`exit_status` is what the command line returns: 2 for a wrong request, 1 for work that failed.
"""


class VoltuneError(Exception):
    """Root of every failure Voltune raises on purpose."""

    exit_status = 1


class RequestError(VoltuneError):
    """The request was wrong: an unknown name, a value out of range, a set that is not ours to overwrite."""

    exit_status = 2


class ContractError(RequestError):
    """A shape contract that cannot be read or does not divide."""


class CheckpointError(RequestError):
    """A checkpoint that is not AWQ GEMM 4-bit, or does not fit the contract."""


class InvalidConfig(VoltuneError):
    """A tile configuration that cannot run under its contract on the given device."""


class MissingTool(VoltuneError):
    """Something this machine lacks: a compiler, a GPU, a package; the text carries the command that mends it."""


class BuildFailed(VoltuneError):
    """A compiler refused a rendered source; the text carries its log."""


class UnknownInstruction(VoltuneError):
    """Machine code that is not understood; the text names opcode bits and place."""


class CodeFault(VoltuneError):
    """Machine code that is not what is demanded of it, or worse than recorded."""


class WrongResult(VoltuneError):
    """A kernel ran and its output is not right."""


class LaunchFailed(VoltuneError):
    """A kernel faulted: out-of-bounds access, divergent barrier, unwritten output, a CUDA error."""


class TrialTimeout(VoltuneError):
    """A kernel or a worker did not end within its time."""
