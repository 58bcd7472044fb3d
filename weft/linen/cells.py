"""Recurrent cells: layers from a state and an input to the next state and an output.

A cell is one step of a loop; `RNN` applies it to sequences. To use a cell directly, create the
first state with `initialize_carry`. The formulas are in `weft.functional.recurrent`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from weft import functional
from weft.functional.initializers import lecun_normal, ones, orthogonal, zeros
from weft.functional.recurrent import gru_step, mgu_step
from weft.linen.initializers import Initializer
from weft.linen.linear import Dense
from weft.linen.methods import compact, nowrap
from weft.linen.module import Module
from weft.typing import DType

__all__ = ["GRUCell", "MGUCell", "RNNCellBase", "SimpleCell"]

Activation = Callable[..., Any]


class RNNCellBase(Module):
    """Base class of cells: `cell(carry, inputs) -> (carry, output)`.

    Example:
        >>> from weft import linen as nn
        >>> class Sum(nn.RNNCellBase):
        ...     num_feature_axes = 0
        ...     def initialize_carry(self, rng, input_shape):
        ...         return jnp.zeros(input_shape)
        ...     def __call__(self, carry, x):
        ...         return carry + x, carry + x
        >>> nn.RNN(Sum()).apply({}, jnp.arange(5.0)).tolist()
        [0.0, 1.0, 3.0, 6.0, 10.0]
    """

    @nowrap
    def initialize_carry(self, rng: Array, input_shape: tuple[int, ...]) -> Any:
        """Returns the state before the first input.

        Args:
            input_shape: shape of one input, including batch axes.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define initialize_carry.")

    @property
    def num_feature_axes(self) -> int:
        """The number of axes of an input that are not batch axes."""
        raise NotImplementedError(f"{type(self).__name__} does not define num_feature_axes.")


class SimpleCell(RNNCellBase):
    """Recurrent cell with one linear map of input and state (Elman, 1990).

    `h' = act(i(x) + h(h))`, with the submodules `i` and `h`.

    Attributes:
        kernel_init, recurrent_kernel_init: initializers of the kernels of input and state.
        dtype: dtype of the computation; by default promoted from inputs and parameters.
        param_dtype: dtype of the parameters and of the first state.
        carry_init: initializer of the first state.
        residual: whether to add the state before the activation.

    Example:
        >>> from weft import linen as nn
        >>> cell, x = nn.SimpleCell(4), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
        >>> (carry, y), _ = cell.init_with_output(jax.random.key(1), carry, x)
        >>> y.shape
        (2, 4)
    """

    features: int
    activation_fn: Activation = jnp.tanh
    kernel_init: Initializer = lecun_normal()
    recurrent_kernel_init: Initializer = orthogonal()
    bias_init: Initializer = zeros
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    carry_init: Initializer = zeros
    residual: bool = False

    @compact
    def __call__(
        self, carry: Float[Array, "*batch state"], inputs: Float[Array, "*batch input"]
    ) -> tuple[Float[Array, "*batch state"], Float[Array, "*batch state"]]:
        """Computes one step; returns the next state twice, as state and output."""
        functional.check_sizes(type(self).__name__, features=self.features)
        of_input, of_state = linear_maps(self)
        new = of_input(name="i")(inputs) + of_state(name="h")(carry)
        carry = self.activation_fn(new + carry if self.residual else new)
        return carry, carry

    @nowrap
    def initialize_carry(self, rng: Array, input_shape: tuple[int, ...]) -> Array:
        return self.carry_init(rng, (*input_shape[:-1], self.features), self.param_dtype)

    @property
    def num_feature_axes(self) -> int:
        return 1


class GRUCell(RNNCellBase):
    """Gated recurrent unit, `functional.gru_step` (Cho et al., 2014).

    The submodules are `ir`, `iz`, `in` for the input and `hr`, `hz`, `hn` for the state, for the
    reset gate, the update gate and the candidate; `activation_fn` is for the candidate. See
    `SimpleCell` for the other attributes.

    Example:
        >>> from weft import linen as nn
        >>> variables = nn.RNN(nn.GRUCell(4)).init(jax.random.key(0), jnp.ones((2, 5, 3)))
        >>> sorted(variables["params"]["cell"])
        ['hn', 'hr', 'hz', 'in', 'ir', 'iz']
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
        self, carry: Float[Array, "*batch state"], inputs: Float[Array, "*batch input"]
    ) -> tuple[Float[Array, "*batch state"], Float[Array, "*batch state"]]:
        functional.check_sizes(type(self).__name__, features=self.features)
        of_input, of_state = linear_maps(self)
        new_of_state = of_state(use_bias=True, bias_init=self.bias_init, name="hn")
        carry = gru_step(
            carry,
            [of_input(name=name)(inputs) for name in ("ir", "iz", "in")],
            [of_state(name="hr")(carry), of_state(name="hz")(carry), new_of_state(carry)],
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return carry, carry

    @nowrap
    def initialize_carry(self, rng: Array, input_shape: tuple[int, ...]) -> Array:
        return self.carry_init(rng, (*input_shape[:-1], self.features), self.param_dtype)

    @property
    def num_feature_axes(self) -> int:
        return 1


class MGUCell(RNNCellBase):
    """Minimal gated unit, `functional.mgu_step` (Zhou et al., 2016).

    The submodules are `if`, `in` for the input and `hf`, `hn` for the state, for the forget gate
    and the candidate. See `SimpleCell` for the other attributes.

    Attributes:
        gate_fn, forget_bias_init: activation and bias initializer of the gate.
        activation_fn, activation_bias_init: activation and bias initializer of the candidate.
        reset_gate: whether the gate also applies to the state's part of the candidate.

    Example:
        >>> from weft import linen as nn
        >>> variables = nn.RNN(nn.MGUCell(4)).init(jax.random.key(0), jnp.ones((2, 5, 3)))
        >>> variables["params"]["cell"]["if"]["bias"].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    features: int
    gate_fn: Activation = jax.nn.sigmoid
    activation_fn: Activation = jnp.tanh
    kernel_init: Initializer = lecun_normal()
    recurrent_kernel_init: Initializer = orthogonal()
    forget_bias_init: Initializer = ones
    activation_bias_init: Initializer = zeros
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    carry_init: Initializer = zeros
    reset_gate: bool = True

    @compact
    def __call__(
        self, carry: Float[Array, "*batch state"], inputs: Float[Array, "*batch input"]
    ) -> tuple[Float[Array, "*batch state"], Float[Array, "*batch state"]]:
        functional.check_sizes(type(self).__name__, features=self.features)
        new_bias = self.activation_bias_init
        of_input, of_state = linear_maps(self, self.forget_bias_init)
        new_of_input = of_input(bias_init=new_bias, name="in")
        new_of_state = of_state(use_bias=self.reset_gate, bias_init=new_bias, name="hn")
        carry = mgu_step(
            carry,
            [of_input(name="if")(inputs), new_of_input(inputs)],
            [of_state(name="hf")(carry), new_of_state(carry)],
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
            reset_gate=self.reset_gate,
        )
        return carry, carry

    @nowrap
    def initialize_carry(self, rng: Array, input_shape: tuple[int, ...]) -> Array:
        return self.carry_init(rng, (*input_shape[:-1], self.features), self.param_dtype)

    @property
    def num_feature_axes(self) -> int:
        return 1


def linear_maps(
    cell: Any, bias_init: Initializer | None = None
) -> tuple[Callable[..., Dense], Callable[..., Dense]]:
    """Returns factories of the linear maps of the input, which have a bias, and of the state."""
    dense = functools.partial(
        Dense, features=cell.features, dtype=cell.dtype, param_dtype=cell.param_dtype
    )
    return (
        functools.partial(
            dense, kernel_init=cell.kernel_init, bias_init=bias_init or cell.bias_init
        ),
        functools.partial(dense, kernel_init=cell.recurrent_kernel_init, use_bias=False),
    )
