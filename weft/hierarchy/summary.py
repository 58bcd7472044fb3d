"""Summaries: reports of a training or evaluation step other than plain numbers.

Modules pass them to `add_summary`. As pytrees they are outputs of the compiled step; on the host, a
summary writer renders each `value()`. An evaler first merges those of all batches by `accumulate`.
"""

from collections.abc import Callable
from typing import Any, Self

import jax.numpy as jnp

from weft import struct
from weft.errors import SummaryValueError
from weft.typing import NestedTensor, Tensor


class Summary(struct.PyTreeNode):
    """Base of summaries. A subclass defines `value`."""

    def value(self) -> NestedTensor | int | float | complex | str | None:
        """Returns the value to show, None for nothing."""
        raise NotImplementedError(type(self))

    def accumulate(self, other: Self) -> Self:
        """Returns a summary of this and a later one; by default, keeps the first."""
        del other
        return self

    def validate(self) -> None:
        """Checks shapes and dtypes; called by `add_summary`, possibly on tracers.

        Raises SummaryValueError if a writer could not show the value.
        """


class ImageSummary(Summary):
    """Images; an evaler keeps those of the first batch.

    Args:
        _value: `[batch, height, width, channels]` or one image `[height, width, channels]`, with
            1, 3 or 4 channels; uint8, or floats between 0 and 1.

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
    """Audio; an evaler keeps that of the first batch.

    Args:
        _value: `[batch, time, channels]` or one clip `[time, channels]`; floats between -1 and 1.
        sample_rate: in Hz.

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
    """Value that is computed on the host when a writer shows it.

    Args:
        fn: called as `fn(*args, **kwargs)` with host arrays. It is static in the compiled step, so
            pass a named function; a new lambda per call triggers recompilation.

    >>> CallbackSummary("{:.1f} %".format, args=(12.34,)).value()
    '12.3 %'
    """

    fn: Callable[..., Any] = struct.field(pytree_node=False)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = struct.field(default_factory=dict)

    def value(self) -> Any:
        return self.fn(*self.args, **self.kwargs)
