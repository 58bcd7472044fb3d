"""Changes of tensor layout between Hugging Face and Weft.

A `Change` goes both ways: `to_theirs(to_ours(x))` is `x`. Kernels of torch's Linear are
`(outputs, inputs)`, those of GPT-2's Conv1D `(inputs, outputs)` as in Weft, where heads have a
separate axis: `(model_dim, num_heads, per_head_dim)`.

Rotary pair `i` is `(i, i + dim / 2)` in Hugging Face's files and `(2 i, 2 i + 1)` in Weft's layers,
so query and key kernels get their dimensions permuted; inner products do not change.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Change(NamedTuple):
    """A change of layout and its inverse, of NumPy arrays and JAX tracers."""

    to_ours: Callable[[Any], Any]
    to_theirs: Callable[[Any], Any]


class Entry(NamedTuple):
    """A tensor under both names.

    Attributes:
        theirs: name in Hugging Face's files, with `{}` for the layer number.
        ours: path in Weft's parameters, relative to the layer if it belongs to one.
        change: of its layout.
    """

    theirs: str
    ours: str
    change: Change


SAME = Change(lambda x: x, lambda x: x)
"""Vectors, tables, and kernels of the same layout."""

TRANSPOSED = Change(lambda x: x.T, lambda x: x.T)
"""Kernels of torch's Linear."""

POSITIONS = Change(lambda x: x[None], lambda x: x[0])
"""A table of learned positions."""


def _interleaved(dim: int) -> np.ndarray:
    """Returns which dimension of theirs each of ours is."""
    return np.arange(dim).reshape(2, -1).T.ravel()


def _to_interleaved(x: Any) -> Any:
    return x[..., _interleaved(x.shape[-1])]


def _to_halves(x: Any) -> Any:
    return x[..., np.argsort(_interleaved(x.shape[-1]))]


ROTARY = Change(_to_interleaved, _to_halves)
"""A vector for the dimensions of a head that is rotated."""


def input_heads(num_heads: int, *, rotary: bool = False) -> Change:
    """Returns the change of a kernel `(heads × dim, model_dim)` to (perhaps rotary) heads.

    >>> x = np.arange(8.0).reshape(4, 2)
    >>> change = input_heads(1, rotary=True)
    >>> change.to_ours(x)[:, 0].tolist()
    [[0.0, 4.0, 2.0, 6.0], [1.0, 5.0, 3.0, 7.0]]
    >>> bool((change.to_theirs(change.to_ours(x)) == x).all())
    True
    """
    turn = ROTARY if rotary else SAME

    def to_ours(x: Any) -> Any:
        return turn.to_ours(x.T.reshape(x.shape[1], num_heads, -1))

    def to_theirs(x: Any) -> Any:
        return turn.to_theirs(x).reshape(x.shape[0], -1).T

    return Change(to_ours, to_theirs)


def head_biases(num_heads: int, *, rotary: bool = False) -> Change:
    """Returns the change of the bias `(heads × dim,)` of `input_heads`."""
    turn = ROTARY if rotary else SAME
    return Change(
        lambda x: turn.to_ours(x.reshape(num_heads, -1)),
        lambda x: turn.to_theirs(x).reshape(-1),
    )


def output_heads(num_heads: int) -> Change:
    """Returns the change of a kernel `(model_dim, heads × dim)` from heads to the model."""
    return Change(
        lambda x: x.reshape(x.shape[0], num_heads, -1), lambda x: x.reshape(x.shape[0], -1)
    )


def output_heads_of_conv(num_heads: int) -> Change:
    """Returns the change of a Conv1D kernel `(heads × dim, model_dim)`."""
    inner = output_heads(num_heads)
    return Change(lambda x: inner.to_ours(x.T), lambda x: inner.to_theirs(x).T)


def fused_heads_of_conv(num_heads: int) -> Change:
    """Returns the change of a kernel `(model_dim, 3 × heads × dim)` to queries, keys and values."""
    return Change(
        lambda x: x.reshape(x.shape[0], 3, num_heads, -1).transpose(1, 0, 2, 3),
        lambda x: x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1),
    )


def fused_head_biases(num_heads: int) -> Change:
    """Returns the change of the bias `(3 × heads × dim,)` of `fused_heads_of_conv`."""
    return Change(lambda x: x.reshape(3, num_heads, -1), lambda x: x.reshape(-1))
