"""Long short-term memory cells, dense and convolutional."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from weft import functional
from weft.functional.initializers import lecun_normal, orthogonal, zeros
from weft.functional.recurrent import lstm_step
from weft.linen.cells import Activation, RNNCellBase, linear_maps
from weft.linen.conv import Conv
from weft.linen.dtypes import promote_dtype
from weft.linen.initializers import Initializer
from weft.linen.methods import compact, nowrap
from weft.linen.module import Module
from weft.typing import DType

__all__ = ["ConvLSTMCell", "LSTMCell", "OptimizedLSTMCell"]

Carry = tuple[Float[Array, "*batch state"], Float[Array, "*batch state"]]
GATES = "ifgo"


class LSTMCell(RNNCellBase):
    """Long short-term memory cell, `functional.lstm_step` (Hochreiter and Schmidhuber, 1997).

    The submodules are `ii`, `if`, `ig`, `io` for the input and `hi`, `hf`, `hg`, `ho` for the
    state: input gate, forget gate, candidate and output gate. See `SimpleCell` for the other
    attributes.

    Attributes:
        gate_fn: activation of the gates.
        activation_fn: activation of the candidate and of the output.
        bias_init: initializer of the biases of the state's maps; the input's maps have none.
        carry_init: initializer of the first memory and output, each with its own key.

    Example:
        >>> from weft import linen as nn
        >>> cell, x = nn.LSTMCell(4), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
        >>> ((c, h), y), _ = cell.init_with_output(jax.random.key(1), carry, x)
        >>> c.shape, y.shape
        ((2, 4), (2, 4))
    """

    features: int
    gate_fn: Activation = jax.nn.sigmoid
    activation_fn: Activation = jnp.tanh
    kernel_init: Initializer = lecun_normal()
    recurrent_kernel_init: Initializer = orthogonal()
    bias_init: Initializer = zeros
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    carry_init: Initializer = zeros

    @compact
    def __call__(
        self, carry: Carry, inputs: Float[Array, "*batch input"]
    ) -> tuple[Carry, Float[Array, "*batch state"]]:
        """Computes one step from memory and output to the next, and returns the output again."""
        functional.check_sizes(type(self).__name__, features=self.features)
        c, h = carry
        of_input, of_state = linear_maps(self)
        of_input = functools.partial(of_input, use_bias=False)
        of_state = functools.partial(of_state, use_bias=True, bias_init=self.bias_init)
        gates = [of_input(name=f"i{g}")(inputs) + of_state(name=f"h{g}")(h) for g in GATES]
        c, h = lstm_step(c, *gates, gate_fn=self.gate_fn, activation_fn=self.activation_fn)
        return (c, h), h

    @nowrap
    def initialize_carry(self, rng: Array, input_shape: tuple[int, ...]) -> Carry:
        return _two_states(self, rng, (*input_shape[:-1], self.features))

    @property
    def num_feature_axes(self) -> int:
        return 1


class OptimizedLSTMCell(RNNCellBase):
    """`LSTMCell` with the linear maps merged into one of the input and one of the state.

    Two large multiplications are faster than eight small ones. Attributes, variables and values are
    those of `LSTMCell`.

    Example:
        >>> from weft import linen as nn
        >>> x = jnp.ones((2, 5, 3))
        >>> variables = nn.RNN(nn.OptimizedLSTMCell(4)).init(jax.random.key(0), x)
        >>> y = nn.RNN(nn.LSTMCell(4)).apply(variables, x)
        >>> bool(jnp.allclose(y, nn.RNN(nn.OptimizedLSTMCell(4)).apply(variables, x), atol=1e-6))
        True
    """

    features: int
    gate_fn: Activation = jax.nn.sigmoid
    activation_fn: Activation = jnp.tanh
    kernel_init: Initializer = lecun_normal()
    recurrent_kernel_init: Initializer = orthogonal()
    bias_init: Initializer = zeros
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    carry_init: Initializer = zeros

    @compact
    def __call__(
        self, carry: Carry, inputs: Float[Array, "*batch input"]
    ) -> tuple[Carry, Float[Array, "*batch state"]]:
        functional.check_sizes(type(self).__name__, features=self.features)
        c, h = carry
        params = functools.partial(
            _LinearParams, features=self.features, param_dtype=self.param_dtype
        )
        of_input, of_state = self.kernel_init, self.recurrent_kernel_init
        size, width = inputs.shape[-1], h.shape[-1]
        kernels = [params(kernel_init=of_input, name=f"i{g}")(size)[0] for g in GATES]
        maps = [
            params(kernel_init=of_state, bias_init=self.bias_init, name=f"h{g}")(width)
            for g in GATES
        ]
        recurrent, biases = zip(*maps, strict=True)
        from_input = functional.dense(
            *promote_dtype(inputs, jnp.concatenate(kernels, -1), dtype=self.dtype)
        )
        from_state = functional.dense(
            *promote_dtype(
                h, jnp.concatenate(recurrent, -1), jnp.concatenate(biases), dtype=self.dtype
            )
        )
        gates = jnp.split(from_input + from_state, 4, -1)
        c, h = lstm_step(c, *gates, gate_fn=self.gate_fn, activation_fn=self.activation_fn)
        return (c, h), h

    @nowrap
    def initialize_carry(self, rng: Array, input_shape: tuple[int, ...]) -> Carry:
        return _two_states(self, rng, (*input_shape[:-1], self.features))

    @property
    def num_feature_axes(self) -> int:
        return 1


class ConvLSTMCell(RNNCellBase):
    """Convolutional long short-term memory cell (Shi et al., 2015).

    The convolutions are the submodules `ih` of the input and `hh` of the state. Their output
    channels are those of the input gate, the candidate, the forget gate (to which 1 is added) and
    the output gate. See `Conv` and `LSTMCell` for the attributes; `features` are the channels of
    memory and output.

    Example:
        >>> from weft import linen as nn
        >>> frames = jnp.ones((2, 7, 8, 3))  # batch, time, width, channels
        >>> layer = nn.RNN(nn.ConvLSTMCell(4, (3,)))
        >>> layer.init_with_output(jax.random.key(0), frames)[0].shape
        (2, 7, 8, 4)
    """

    features: int
    kernel_size: Sequence[int]
    strides: Sequence[int] | None = None
    padding: str | Sequence[tuple[int, int]] = "SAME"
    use_bias: bool = True
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    carry_init: Initializer = zeros

    @compact
    def __call__(
        self, carry: Carry, inputs: Float[Array, "*batch_and_space channels"]
    ) -> tuple[Carry, Float[Array, "*batch_and_space features"]]:
        functional.check_sizes(
            type(self).__name__, features=self.features, kernel_size=self.kernel_size
        )
        c, h = carry
        conv = functools.partial(
            Conv,
            features=4 * self.features,
            kernel_size=self.kernel_size,
            strides=self.strides,
            padding=self.padding,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )
        i, g, f, o = jnp.split(conv(name="ih")(inputs) + conv(name="hh")(h), 4, -1)
        c, h = lstm_step(c, i, f + 1, g, o)
        return (c, h), h

    @nowrap
    def initialize_carry(self, rng: Array, input_shape: tuple[int, ...]) -> Carry:
        return _two_states(self, rng, (*input_shape[:-1], self.features))

    @property
    def num_feature_axes(self) -> int:
        return len(self.kernel_size) + 1


class _LinearParams(Module):
    """Parameters of a linear map, without the map."""

    features: int
    param_dtype: DType
    kernel_init: Initializer
    bias_init: Initializer | None = None

    @compact
    def __call__(self, size: int) -> tuple[Array, Any]:
        functional.check_sizes(type(self).__name__, features=self.features)
        kernel = self.param("kernel", self.kernel_init, (size, self.features), self.param_dtype)
        if self.bias_init is None:
            return kernel, None
        return kernel, self.param("bias", self.bias_init, (self.features,), self.param_dtype)


def _two_states(cell: Any, rng: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    first, second = jax.random.split(rng)
    make = cell.carry_init
    return make(first, shape, cell.param_dtype), make(second, shape, cell.param_dtype)
