"""Every exception and warning that eformer raises.

All of them derive from `EformerError` or `EformerWarning`, and from the builtin type that fits, so that both
`except EformerError` and `except ValueError` catch them.

>>> import jax.numpy as jnp
>>> from jax.sharding import PartitionSpec
>>> import eformer as ef
>>> try:
...     ef.quantize(jnp.ones((64, 32)), dtype="nf4").with_sharding(PartitionSpec(None, None, "x"))
... except ef.errors.EformerError as err:
...     print(type(err).__name__, isinstance(err, ValueError))
ShardingError True
"""

from __future__ import annotations

import plum


class EformerError(Exception):
    """The base of every exception of this library."""


class EformerWarning(Warning):
    """The base of every warning of this library."""


class MaterializationWarning(EformerWarning, UserWarning):
    """An implicit array was converted to a dense one because no handler covers the operation."""


class HandlerResultWarning(EformerWarning, UserWarning):
    """A handler returned a scalar where an array was expected."""


class KernelFallbackWarning(EformerWarning, UserWarning):
    """Native kernels are installed but cannot be used; a slower path is taken."""


class UnusedRuleWarning(EformerWarning, UserWarning):
    """A rule matched nothing, or an earlier rule already decided everything it matched."""


class CalibrationWarning(EformerWarning, UserWarning):
    """Statistics are missing or too few for what they are meant for."""


class PackedTensorsWarning(EformerWarning, UserWarning):
    """A quantized checkpoint of another library was read as the plain tensors it is stored in."""


class UninitializedAval(EformerError):
    """`shape` or `dtype` was read before it could be known."""


class InvalidImplicitArrayError(EformerError, TypeError):
    """A subclass of `ImplicitArray`, or an instance of one, breaks a rule of the base class."""


class AvalMismatchError(EformerError, ValueError):
    """A declared shape or dtype disagrees with the children or with `materialize`."""


class SlicedBelowCoreError(EformerError, ValueError):
    """An implicit array lost leading axes that it needs."""


class MaterializationError(EformerError, RuntimeError):
    """`materialize` failed, or the policy in force refused it."""


class ForgottenImplicitError(EformerError, TypeError):
    """A function outside `implicit` takes an implicit array apart, and cannot go on with its parts."""


class AmbiguousHandlerError(EformerError, plum.AmbiguousLookupError):
    """Several handlers match and none is more specific than the others."""

    def __init__(self, message: str):
        LookupError.__init__(self, message)

    __repr__ = __str__ = LookupError.__str__


class HandlerResultError(EformerError, TypeError):
    """A handler returned something that cannot be the result of its primitive."""


class HandlerSignatureError(EformerError, TypeError):
    """The signature of a handler does not allow it to be registered or called."""


class UnknownPrimitiveError(EformerError, ValueError):
    """`register` was given a name that no JAX primitive has."""


class AlreadyQuantizedError(EformerError, ValueError):
    """A quantized array was to be quantized again in another way, which would round it twice."""

    def __init__(self, what: str, found: str, asked: str, fix: str):
        super().__init__(
            f"{what} is already quantized, with {found}, but {asked} was requested. Nothing is quantized twice: {fix}"
        )
        self.what, self.found, self.asked = what, found, asked


class QuantizedGradientError(EformerError, TypeError):
    """A gradient was requested with respect to the stored codes or scales of a quantized array."""


class ShardingError(EformerError, ValueError):
    """A sharding does not fit the array, or would split a block."""


class ProcessError(EformerError, RuntimeError):
    """The processes of a program disagree, or one of them did not answer in time."""


class CheckpointError(EformerError, ValueError):
    """A file cannot be read or written. The message names the file, the tensor, the problem and the fix."""

    def __init__(self, what: str, *, file: object = None, tensor: str | None = None, fix: str = ""):
        where = [str(file)] if file is not None else []
        if tensor is not None:  # a name from a file, which may be absurdly long
            cut = "" if len(tensor) <= 200 else f"... ({len(tensor)} characters)"
            where.append(f"tensor {tensor[:200]!r}{cut}")
        super().__init__(": ".join([*where, f"{what} {fix}".rstrip()]))
        self.file, self.tensor, self.what, self.fix = file, tensor, what, fix


class CalibrationError(EformerError, ValueError):
    """The statistics of a model cannot be computed, read or used. The message names the leaf where there is one."""


class CommandError(EformerError):
    """A command of `eformer` cannot do what was asked; the message is the one line the user sees."""

    status = 1  # of the process


class CommandUsageError(CommandError):
    """The arguments of a command do not fit together."""

    status = 2
