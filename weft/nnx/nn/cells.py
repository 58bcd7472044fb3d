"""Recurrent cells: layers that go from a state and an input to the next state and an output.

A cell is one step of a loop. `RNN` (`weft.nnx.nn.recurrent`) runs it over sequences; others make
the first state with `initialize_carry` and hand each state on. The steps themselves are
`weft.functional.recurrent`.
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
    """An orthogonal matrix; one of lower precision than float32 is drawn in that.

    Args:
        key: draws it.
        shape: of the matrix.
        dtype: of the matrix.
    """
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
        """The state before the first input.

        Args:
            input_shape: the shape of one input, batch axes included.
            rngs: its stream `carry` gives keys to draw it with, or a stream that gives them.
            carry_init: makes it.
        """
        raise _undefined(self, "initialize_carry")

    def __call__(self, carry: Any, inputs: Array) -> tuple[Any, Array]:
        """One step; returns the next state and the output.

        Args:
            carry: the state.
            inputs: the input.
        """
        raise _undefined(self, "__call__")

    @property
    def num_feature_axes(self) -> int:
        """How many axes of an input are not batch axes."""
        raise _undefined(self, "num_feature_axes")


def _undefined(cell: RNNCellBase, name: str) -> CellDefinitionError:
    return CellDefinitionError(
        f"{type(cell).__name__} does not define {name}; a cell has initialize_carry, __call__ and "
        "num_feature_axes."
    )


class SimpleCell(RNNCellBase):
    """One linear map of input and state and an activation (Elman, 1990).

    `h' = act(dense_i(x) + dense_h(h))`, with the layers `dense_i` and `dense_h`.

    Args:
        in_features: the size of the input.
        hidden_features: the size of the state.
        dtype: of the computation.
        param_dtype: of the parameters and of the first state.
        carry_init: makes the first state; zeros by default.
        residual: whether the state is added before the activation.
        activation_fn: the activation.
        kernel_init: makes the kernel of the map of the input.
        recurrent_kernel_init: makes the kernel of the map of the state.
        bias_init: makes the bias.
        promote_dtype: gives input and parameters the dtype of the computation.
        keep_rngs: whether the cell has a PRNG stream of its own to draw its first state with.
        rngs: its stream `params` gives a key for each parameter, `carry` one for that stream.
        kernel_metadata: of the variable of the input's kernel.
        recurrent_kernel_metadata: of that of the state's.
        bias_metadata: of that of the bias.

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
        """One step; returns the next state twice, as state and output.

        Args:
            carry: the state.
            inputs: the input.
        """
        new = self.dense_i(inputs) + self.dense_h(carry)
        carry = self.activation_fn(new + carry if self.residual else new)
        return carry, carry

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Streams = None,
        carry_init: Initializer | None = None,
    ) -> Float[Array, "*batch state"]:
        """The state before the first input; see `RNNCellBase`."""
        return first_states(self, input_shape, rngs, carry_init, 1)[0]

    @property
    def num_feature_axes(self) -> int:
        """1."""
        return 1


class GRUCell(RNNCellBase):
    """The gated recurrent unit, `functional.gru_step` (Cho et al., 2014).

    Its linear maps are the layers `dense_i` of the input and `dense_h` of the state. Their results
    are for the gate that resets, the one that keeps, and the new value, one after the other.

    Args:
        in_features: the size of the input.
        hidden_features: the size of the state.
        gate_fn: the activation of the gates.
        activation_fn: that of the new value.
        kernel_init: see `SimpleCell`, as for all that follow.
        recurrent_kernel_init: makes the kernel of the map of the state.
        bias_init: makes the bias.
        dtype: of the computation; by default the one to which input and parameters promote.
        param_dtype: of the parameters and of the first state.
        carry_init: makes the first state; zeros by default.
        promote_dtype: gives input and parameters the dtype of the computation.
        keep_rngs: whether the cell has a PRNG stream of its own.
        rngs: its stream `params` gives a key for each parameter.
        kernel_metadata: of the variable of the input's kernel.
        recurrent_kernel_metadata: of that of the state's.
        bias_metadata: of that of the bias.

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
        """One step; see `SimpleCell`."""
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
        """The state before the first input; see `RNNCellBase`."""
        return first_states(self, input_shape, rngs, carry_init, 1)[0]

    @property
    def num_feature_axes(self) -> int:
        """1."""
        return 1


def linear_maps(
    cell: Any, rngs: Rngs, size: int
) -> tuple[Callable[..., Linear], Callable[..., Linear]]:
    """What makes the linear maps of a cell's input and of its state, with results of a size."""
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
    """The stream of a cell that keeps one."""
    return kept_stream(rngs, "carry", type(cell).__name__) if keeps else None


def first_states(
    cell: Any,
    input_shape: tuple[int, ...],
    rngs: Streams,
    carry_init: Initializer | None,
    n: int,
) -> list[Array]:
    """The arrays of a state before the first input, each drawn with a key of its own.

    Args:
        cell: has `hidden_features`, `param_dtype`, `carry_init` and `rngs`.
        input_shape: of one input.
        rngs: streams, or a stream; by default the cell's own.
        carry_init: makes them; by default the cell's `carry_init`, or else they are zeros.
        n: how many there are.

    Raises:
        InvalidRngError: if there is nothing to draw them with.
        RngArgumentError: if `rngs` is something else.
    """
    name = type(cell).__name__
    stream = rngs.carry if isinstance(rngs, Rngs) else cell.rngs if rngs is None else rngs
    given = carry_init or cell.carry_init
    make: Initializer = given or zeros
    if stream is None and given is not None:
        raise InvalidRngError(
            f"{name} draws its first state, and has no PRNG stream; give "
            "initialize_carry(..., rngs=nnx.Rngs(carry=0)), or make the cell with keep_rngs=True."
        )
    if not (stream is None or isinstance(stream, RngStream)):
        raise not_streams(rngs, name)
    shape = (*input_shape[:-1], cell.hidden_features)
    keys = [None if stream is None else stream() for _ in range(n)]
    return [make(key, shape, cell.param_dtype) for key in keys]
