"""Long short-term memory cells, with one linear map per gate or a fused one."""

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
    """Long short-term memory, `functional.lstm_step` (Hochreiter and Schmidhuber, 1997).

    The linear maps are the layers `ii`, `if_`, `ig`, `io` of the input and `hi`, `hf`, `hg`, `ho`
    of the state: input gate, forget gate, candidate and output gate.

    Args:
        in_features: size of the input.
        hidden_features: size of the memory and of the output.
        gate_fn: activation of the gates.
        activation_fn: activation of the candidate and of the output.
        kernel_init: initializer of the input's kernels, with `kernel_metadata`.
        recurrent_kernel_init: initializer of the state's kernels, with `recurrent_kernel_metadata`.
        bias_init: initializer of the biases, which the maps of the state have.
        dtype: computation dtype; by default promoted from input and parameters.
        param_dtype: dtype of the parameters and of the first state.
        carry_init: initializer of the first memory and output, each with its own key; zeros by
            default.
        promote_dtype: casts input and parameters to `dtype`.
        keep_rngs: whether the cell keeps its own PRNG stream to draw first states.
        rngs: stream `params`, and `carry` with `keep_rngs`.

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
        """Applies one step.

        Args:
            carry: memory and output.

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
        c, h = first_states(self, input_shape, rngs, carry_init, 2)
        return c, h

    @property
    def num_feature_axes(self) -> int:
        return 1


class OptimizedLSTMCell(RNNCellBase):
    """`LSTMCell` with one linear map of the input, `dense_i`, and one of the state, `dense_h`.

    Two large products are faster than eight small ones. Each map returns input gate, forget gate,
    candidate and output gate, concatenated; `kernel_init` and `recurrent_kernel_init` draw the
    concatenated kernels. Arguments as for `LSTMCell`.

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
        c, h = first_states(self, input_shape, rngs, carry_init, 2)
        return c, h

    @property
    def num_feature_axes(self) -> int:
        return 1
