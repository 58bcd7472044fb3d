"""The long short-term memory, with a linear map for each gate or with one for all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from weft import functional
from weft.functional.initializers import zeros
from weft.functional.recurrent import lstm_step
from weft.nnx.nn.cells import (
    Activation,
    RNNCellBase,
    Streams,
    first_states,
    linear_maps,
    own_stream,
    recurrent_kernel_init,
)
from weft.nnx.nn.dtypes import PromoteDtype, promote_dtype
from weft.nnx.nn.parameters import NO_METADATA, Initializer, Metadata, default_kernel_init
from weft.nnx.rngs import Rngs
from weft.typing import DType

__all__ = ["LSTMCell", "OptimizedLSTMCell"]

Carry = tuple[Float[Array, "*batch state"], Float[Array, "*batch state"]]


class LSTMCell(RNNCellBase):
    """The long short-term memory, `functional.lstm_step` (Hochreiter and Schmidhuber, 1997).

    Its linear maps are the layers `ii`, `if_`, `ig`, `io` of the input and `hi`, `hf`, `hg`, `ho`
    of the state, for the gate of the input, the one that forgets, what is remembered, and the gate
    of the output.

    Args:
        in_features: the size of the input.
        hidden_features: the size of the memory and of the output.
        gate_fn: the activation of the gates.
        activation_fn: that of what is remembered and put out.
        kernel_init: makes the kernels of the maps of the input.
        recurrent_kernel_init: makes the kernels of the maps of the state.
        bias_init: makes the biases, which the maps of the state have.
        dtype: of the computation; by default the one to which input and parameters promote.
        param_dtype: of the parameters and of the first state.
        carry_init: makes the first memory and output, each with a key of its own; zeros by default.
        promote_dtype: gives input and parameters the dtype of the computation.
        keep_rngs: whether the cell has a PRNG stream of its own to draw its first state with.
        rngs: its stream `params` gives a key for each parameter, `carry` one for that stream.
        kernel_metadata: of the variables of the input's kernels.
        recurrent_kernel_metadata: of those of the state's.
        bias_metadata: of those of the biases.

    Example:
        >>> from weft import nnx
        >>> cell = LSTMCell(3, 4, rngs=nnx.Rngs(0))
        >>> (c, h), y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
        >>> c.shape, y.shape
        ((2, 4), (2, 4))
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
        of_input, of_state = linear_maps(self, rngs, hidden_features)
        options: dict[str, Any] = {
            "use_bias": False,
            "kernel_init": kernel_init,
            "kernel_metadata": kernel_metadata,
        }
        self.ii = of_input(**options)
        self.if_ = of_input(**options)
        self.ig = of_input(**options)
        self.io = of_input(**options)
        options = {
            "kernel_init": recurrent_kernel_init,
            "bias_init": bias_init,
            "kernel_metadata": recurrent_kernel_metadata,
            "bias_metadata": bias_metadata,
        }
        self.hi = of_state(**options)
        self.hf = of_state(**options)
        self.hg = of_state(**options)
        self.ho = of_state(**options)

    def __call__(
        self, carry: Carry, inputs: Float[Array, "*batch input"]
    ) -> tuple[Carry, Float[Array, "*batch state"]]:
        """One step.

        Args:
            carry: memory and output.
            inputs: the input.

        Returns:
            The next memory and output, and the output.
        """
        c, h = carry
        c, h = lstm_step(
            c,
            self.ii(inputs) + self.hi(h),
            self.if_(inputs) + self.hf(h),
            self.ig(inputs) + self.hg(h),
            self.io(inputs) + self.ho(h),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return (c, h), h

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Streams = None,
        carry_init: Initializer | None = None,
    ) -> Carry:
        """The memory and output before the first input; see `RNNCellBase`."""
        c, h = first_states(self, input_shape, rngs, carry_init, 2)
        return c, h

    @property
    def num_feature_axes(self) -> int:
        """1."""
        return 1


class OptimizedLSTMCell(RNNCellBase):
    """`LSTMCell` with one linear map of the input, `dense_i`, and one of the state, `dense_h`.

    Two large multiplications are faster than eight small ones. The results of a map are those for
    the gate of the input, the one that forgets, what is remembered and the gate of the output.

    Args:
        in_features: see `LSTMCell`.
        hidden_features: see `LSTMCell`.
        gate_fn: see `LSTMCell`.
        activation_fn: see `LSTMCell`.
        kernel_init: makes the kernel of the map of the input as a whole.
        recurrent_kernel_init: makes that of the map of the state as a whole.
        bias_init: see `LSTMCell`.
        dtype: see `LSTMCell`.
        param_dtype: see `LSTMCell`.
        carry_init: see `LSTMCell`.
        promote_dtype: see `LSTMCell`.
        keep_rngs: see `LSTMCell`.
        rngs: see `LSTMCell`.
        kernel_metadata: see `LSTMCell`.
        recurrent_kernel_metadata: see `LSTMCell`.
        bias_metadata: see `LSTMCell`.

    Example:
        >>> from weft import nnx
        >>> cell = OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
        >>> cell.dense_i.kernel.shape, cell.dense_h.kernel.shape
        ((3, 16), (4, 16))
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
        of_input, of_state = linear_maps(self, rngs, 4 * hidden_features)
        self.dense_i = of_input(
            use_bias=False, kernel_init=kernel_init, kernel_metadata=kernel_metadata
        )
        self.dense_h = of_state(
            kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
            kernel_metadata=recurrent_kernel_metadata,
            bias_metadata=bias_metadata,
        )

    def __call__(
        self, carry: Carry, inputs: Float[Array, "*batch input"]
    ) -> tuple[Carry, Float[Array, "*batch state"]]:
        """One step; see `LSTMCell`."""
        c, h = carry
        gates = jnp.split(self.dense_i(inputs) + self.dense_h(h), 4, -1)
        c, h = lstm_step(c, *gates, gate_fn=self.gate_fn, activation_fn=self.activation_fn)
        return (c, h), h

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Streams = None,
        carry_init: Initializer | None = None,
    ) -> Carry:
        """The memory and output before the first input; see `RNNCellBase`."""
        c, h = first_states(self, input_shape, rngs, carry_init, 2)
        return c, h

    @property
    def num_feature_axes(self) -> int:
        """1."""
        return 1
