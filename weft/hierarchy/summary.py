"""Summaries: what a model reports about a step, beside plain numbers.

A module hands them to `add_summary`; as pytrees they leave the compiled step as its outputs; on the
host a summary writer turns each `value()` into what its destination shows. An evaler, which sees
many batches, first adds them up with `accumulate`.
"""

from collections.abc import Callable
from typing import Any, Self

import jax.numpy as jnp

from weft import struct
from weft.errors import SummaryValueError
from weft.typing import NestedTensor, Tensor


class Summary(struct.PyTreeNode):
    """Base of the summaries. A subclass defines `value`."""

    def value(self) -> NestedTensor | int | float | complex | str | None:
        """What is to be shown, None for nothing."""
        raise NotImplementedError(type(self))

    def accumulate(self, other: Self) -> Self:
        """The summary that stands for this one and a later one. By default, the first stays.

        Args:
            other: Of the same class, from a later batch.
        """
        del other
        return self

    def validate(self) -> None:
        """Checks shapes and dtypes; `add_summary` calls it, so the values may be traced.

        Raises:
            SummaryValueError: If a writer could not show the value.
        """


class ImageSummary(Summary):
    """Images, of which an evaler keeps those of the first batch.

    Args:
        _value: `[batch, height, width, channels]` or one image `[height, width, channels]`, with
            1, 3 or 4 channels; uint8, or floats between 0 and 1.

    >>> import numpy as np
    >>> ImageSummary(np.zeros((2, 8, 8, 3))).validate()
    """

    _value: Tensor

    def value(self) -> Tensor:
        return self._value

    def validate(self) -> None:
        shape, dtype = self._value.shape, self._value.dtype
        if len(shape) not in (3, 4) or shape[-1] not in (1, 3, 4):
            raise SummaryValueError(
                f"ImageSummary got an array of shape {tuple(shape)}; expected [batch, height, "
                "width, channels] or [height, width, channels] with 1, 3 or 4 channels. Write "
                "`x[..., None]` for gray images without a channel axis."
            )
        if dtype != jnp.uint8 and not jnp.issubdtype(dtype, jnp.floating):
            raise SummaryValueError(
                f"ImageSummary got an array of {dtype}; expected uint8, or floats between 0 and 1. "
                "Write `x.astype('uint8')`."
            )


class AudioSummary(Summary):
    """Sound, of which an evaler keeps that of the first batch.

    Args:
        _value: `[batch, time, channels]` or one clip `[time, channels]`; floats between -1 and 1.
        sample_rate: Samples in a second.

    >>> import numpy as np
    >>> AudioSummary(np.zeros((1, 16000, 1)), sample_rate=16000).validate()
    """

    _value: Tensor
    sample_rate: int = struct.field(pytree_node=False)

    def value(self) -> Tensor:
        return self._value

    def validate(self) -> None:
        shape, dtype = self._value.shape, self._value.dtype
        if len(shape) not in (2, 3) or not jnp.issubdtype(dtype, jnp.floating):
            raise SummaryValueError(
                f"AudioSummary got an array of shape {tuple(shape)} and {dtype}; expected floats "
                "between -1 and 1, [batch, time, channels] or [time, channels]. Write "
                "`x[..., None]` for a mono signal without a channel axis."
            )


class CallbackSummary(Summary):
    """A value that is computed on the host, when a writer is about to show it.

    Args:
        fn: Called as `fn(*args, **kwargs)`, with host arrays. A part of the compiled step's
            identity, so give a function that has a name, not a new lambda in each call.
        args: Positional arguments, of arrays.
        kwargs: Arguments by name, of arrays.

    >>> CallbackSummary("{:.1f} %".format, args=(12.34,)).value()
    '12.3 %'
    """

    fn: Callable[..., Any] = struct.field(pytree_node=False)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = struct.field(default_factory=dict)

    def value(self) -> Any:
        return self.fn(*self.args, **self.kwargs)
