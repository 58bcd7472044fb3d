"""Recurrent cells: layers that map a state and an input to the next state and an output.

`RNN` (`weft.nnx.nn.recurrent`) runs a cell over sequences; in a custom loop, `initialize_carry`
makes the first state. The step functions are in `weft.functional.recurrent`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from weft import functional
from weft.errors import CellDefinitionError, InvalidRngError
from weft.functional.initializers import orthogonal, zeros
from weft.functional.recurrent import gru_step
from weft.nnx.module import Module
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.nnx.nn.linear import Linear
from weft.nnx.nn.modes import kept_stream, not_streams
from weft.nnx.nn.parameters import NO_METADATA, Initializer, Metadata, default_kernel_init
from weft.nnx.rngs import Rngs, RngStream
from weft.typing import DType

__all__ = ["GRUCell", "RNNCellBase", "SimpleCell"]

Activation = Callable[..., Any]
Streams = Rngs | RngStream | None


def recurrent_kernel_init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Draws an orthogonal matrix, in at least float32, and casts it to `dtype`."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return orthogonal()(key, shape, wide).astype(dtype)


class RNNCellBase(Module):
    """Base class of cells: `cell(carry, inputs) -> (carry, output)`.

    Example:
        >>> from weft import nnx
        >>> class Sum(RNNCellBase):
        ...     num_feature_axes = 0
        ...     def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        ...         return jnp.zeros(input_shape)
        ...     def __call__(self, carry, inputs):
        ...         return carry + inputs, carry + inputs
        >>> carry = Sum().initialize_carry(())
        >>> [float(carry := Sum()(carry, x)[0]) for x in (1.0, 2.0, 3.0)]
        [1.0, 3.0, 6.0]
    """

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Streams = None,
        carry_init: Initializer | None = None,
    ) -> Any:
        """Returns the state before the first input.

        Args:
            input_shape: shape of one input, batch axes included.
            rngs: streams with `carry`, or one stream.
            carry_init: initializer of the state.
        """
        raise _undefined(self, "initialize_carry")

    def __call__(self, carry: Any, inputs: Array) -> tuple[Any, Array]:
        """Applies one step; returns the next state and the output."""
        raise _undefined(self, "__call__")

    @property
    def num_feature_axes(self) -> int:
        """Number of axes of an input that are not batch axes."""
        raise _undefined(self, "num_feature_axes")


def _undefined(cell: RNNCellBase, name: str) -> CellDefinitionError:
    return CellDefinitionError(
        f"{type(cell).__name__} does not define {name}; a cell defines initialize_carry, __call__ "
        "and num_feature_axes."
    )


class SimpleCell(RNNCellBase):
    """Simple recurrent cell (Elman, 1990): `h' = act(dense_i(x) + dense_h(h))`.

    Args:
        in_features: size of the input.
        hidden_features: size of the state.
        param_dtype: dtype of the parameters and of the first state.
        carry_init: initializer of the first state; zeros by default.
        residual: whether to add the state before the activation.
        kernel_init: initializer of the kernel of `dense_i`, with `kernel_metadata`.
        recurrent_kernel_init: initializer of the kernel of `dense_h`, with
            `recurrent_kernel_metadata`.
        promote_dtype: casts input and parameters to `dtype`.
        keep_rngs: whether the cell keeps its own PRNG stream to draw first states.
        rngs: stream `params`, and `carry` with `keep_rngs`.

    Example:
        >>> from weft import nnx
        >>> cell = SimpleCell(3, 4, rngs=nnx.Rngs(0))
        >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
        >>> y.shape
        (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: DType = jnp.float32,
        param_dtype: DType = jnp.float32,
        carry_init: Initializer | None = None,
        residual: bool = False,
        activation_fn: Activation = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = recurrent_kernel_init,
        bias_init: Initializer = zeros,
        promote_dtype: PromoteDtype = promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(
            type(self).__name__, in_features=in_features, hidden_features=hidden_features
        )
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.residual = residual
        self.activation_fn = activation_fn
        self.promote_dtype = promote_dtype
        self.carry_init = carry_init
        self.rngs = own_stream(self, rngs, keep_rngs)
        of_input, of_state = linear_maps(self, rngs, hidden_features)
        self.dense_h = of_state(
            use_bias=False,
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
        )
        self.dense_i = of_input(
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )

    def __call__(
        self, carry: Float[Array, "*batch state"], inputs: Float[Array, "*batch input"]
    ) -> tuple[Float[Array, "*batch state"], Float[Array, "*batch state"]]:
        """Applies one step; returns the next state twice, as state and output."""
        new = self.dense_i(inputs) + self.dense_h(carry)
        carry = self.activation_fn(new + carry if self.residual else new)
        return carry, carry

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Streams = None,
        carry_init: Initializer | None = None,
    ) -> Float[Array, "*batch state"]:
        return first_states(self, input_shape, rngs, carry_init, 1)[0]

    @property
    def num_feature_axes(self) -> int:
        return 1


class GRUCell(RNNCellBase):
    """Gated recurrent unit, `functional.gru_step` (Cho et al., 2014).

    The layers `dense_i`, of the input, and `dense_h`, of the state, each return reset gate, update
    gate and candidate, concatenated.

    Args:
        gate_fn: activation of the gates.
        activation_fn: activation of the candidate.
        dtype: computation dtype; by default promoted from input and parameters.

    The other arguments are those of `SimpleCell`.

    Example:
        >>> from weft import nnx
        >>> cell = GRUCell(3, 4, rngs=nnx.Rngs(0))
        >>> cell.dense_i.kernel.shape, cell.dense_h.kernel.shape
        ((3, 12), (4, 12))
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Activation = jax.nn.sigmoid,
        activation_fn: Activation = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = recurrent_kernel_init,
        bias_init: Initializer = zeros,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtype = promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ):
        functional.check_sizes(
            type(self).__name__, in_features=in_features, hidden_features=hidden_features
        )
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.carry_init = carry_init
        self.rngs = own_stream(self, rngs, keep_rngs)
        of_input, of_state = linear_maps(self, rngs, 3 * hidden_features)
        self.dense_i = of_input(
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.dense_h = of_state(
            use_bias=False,
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
        )

    def __call__(
        self, carry: Float[Array, "*batch state"], inputs: Float[Array, "*batch input"]
    ) -> tuple[Float[Array, "*batch state"], Float[Array, "*batch state"]]:
        carry = gru_step(
            carry,
            jnp.split(self.dense_i(inputs), 3, -1),
            jnp.split(self.dense_h(carry), 3, -1),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return carry, carry

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Streams = None,
        carry_init: Initializer | None = None,
    ) -> Float[Array, "*batch state"]:
        return first_states(self, input_shape, rngs, carry_init, 1)[0]

    @property
    def num_feature_axes(self) -> int:
        return 1


def linear_maps(
    cell: Any, rngs: Rngs, size: int
) -> tuple[Callable[..., Linear], Callable[..., Linear]]:
    """Returns factories of the linear maps of a cell's input and state, with `size` outputs."""
    of = functools.partial(
        Linear,
        out_features=size,
        dtype=cell.dtype,
        param_dtype=cell.param_dtype,
        promote_dtype=cell.promote_dtype,
        rngs=rngs,
    )
    return functools.partial(of, cell.in_features), functools.partial(of, cell.hidden_features)


def own_stream(cell: Any, rngs: Rngs, keeps: bool) -> RngStream | None:
    return kept_stream(rngs, "carry", type(cell).__name__) if keeps else None


def first_states(
    cell: Any,
    input_shape: tuple[int, ...],
    rngs: Streams,
    carry_init: Initializer | None,
    n: int,
) -> list[Array]:
    """Returns the `n` arrays of a state before the first input, each drawn with its own key.

    Args:
        cell: layer with `hidden_features`, `param_dtype`, `carry_init` and `rngs`.
        rngs: streams, or a stream; by default the cell's own.
        carry_init: initializer; by default the cell's, or else zeros.

    Raises:
        InvalidRngError: if an initializer is given and there is no stream.
        RngArgumentError: if `rngs` has another type.
    """
    name = type(cell).__name__
    stream = rngs.carry if isinstance(rngs, Rngs) else cell.rngs if rngs is None else rngs
    given = carry_init or cell.carry_init
    make: Initializer = given or zeros
    if stream is None and given is not None:
        raise InvalidRngError(
            f"{name} draws its first state but has no PRNG stream; give "
            "initialize_carry(..., rngs=nnx.Rngs(carry=0)), or make the cell with keep_rngs=True."
        )
    if not (stream is None or isinstance(stream, RngStream)):
        raise not_streams(rngs, name)
    shape = (*input_shape[:-1], cell.hidden_features)
    keys = [None if stream is None else stream() for _ in range(n)]
    return [make(key, shape, cell.param_dtype) for key in keys]
