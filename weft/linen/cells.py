"""Recurrent cells: layers that go from a state and an input to the next state and an output.

A cell is one step of a loop. `RNN` runs it over sequences; its own users make the first state with
`initialize_carry` and hand each state on. The steps themselves are `weft.functional.recurrent`.
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
        """The state before the first input.

        Args:
            rng: a PRNG key.
            input_shape: the shape of one input, batch axes included.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define initialize_carry.")

    @property
    def num_feature_axes(self) -> int:
        """How many axes of an input are not batch axes."""
        raise NotImplementedError(f"{type(self).__name__} does not define num_feature_axes.")


class SimpleCell(RNNCellBase):
    """One linear map of input and state and an activation (Elman, 1990).

    `h' = act(i(x) + h(h))`, with the layers `i` and `h` as submodules.

    Attributes:
        features: the size of the state.
        activation_fn: the activation.
        kernel_init: makes the kernel of the map of the input.
        recurrent_kernel_init: makes the kernel of the map of the state.
        bias_init: makes the bias.
        dtype: of the computation; by default promoted from inputs and parameters.
        param_dtype: of the parameters and of the first state.
        carry_init: makes the first state.
        residual: whether the state is added before the activation.

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
        """One step; returns the next state twice, as state and output.

        Args:
            carry: the state.
            inputs: the input.
        """
        functional.check_sizes(type(self).__name__, features=self.features)
        of_input, of_state = linear_maps(self)
        new = of_input(name="i")(inputs) + of_state(name="h")(carry)
        carry = self.activation_fn(new + carry if self.residual else new)
        return carry, carry

    @nowrap
    def initialize_carry(self, rng: Array, input_shape: tuple[int, ...]) -> Array:
        """The state before the first input; see `RNNCellBase`."""
        return self.carry_init(rng, (*input_shape[:-1], self.features), self.param_dtype)

    @property
    def num_feature_axes(self) -> int:
        """1."""
        return 1


class GRUCell(RNNCellBase):
    """The gated recurrent unit, `functional.gru_step` (Cho et al., 2014).

    Its linear maps are the submodules `ir`, `iz`, `in` of the input and `hr`, `hz`, `hn` of the
    state, for the gate that resets, the one that keeps, and the new value.

    Attributes:
        features: the size of the state.
        gate_fn: the activation of the gates.
        activation_fn: that of the new value.
        kernel_init: see `SimpleCell`, as for the other attributes.
        recurrent_kernel_init: makes the kernels of the maps of the state.
        bias_init: makes the biases.
        dtype: of the computation.
        param_dtype: of the parameters and of the first state.
        carry_init: makes the first state.

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
        """One step; see `SimpleCell`."""
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
        """The state before the first input; see `RNNCellBase`."""
        return self.carry_init(rng, (*input_shape[:-1], self.features), self.param_dtype)

    @property
    def num_feature_axes(self) -> int:
        """1."""
        return 1


class MGUCell(RNNCellBase):
    """The minimal gated unit, `functional.mgu_step` (Zhou et al., 2016).

    Its linear maps are the submodules `if`, `in` of the input and `hf`, `hn` of the state, for the
    gate that forgets and the new value.

    Attributes:
        features: the size of the state.
        gate_fn: the activation of the gate.
        activation_fn: that of the new value.
        kernel_init: see `SimpleCell`, as for the other attributes.
        recurrent_kernel_init: makes the kernels of the maps of the state.
        forget_bias_init: makes the bias of the gate.
        activation_bias_init: makes the biases of the new value.
        dtype: of the computation.
        param_dtype: of the parameters and of the first state.
        carry_init: makes the first state.
        reset_gate: whether the gate is applied to the state's part of the new value as well.

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
        """One step; see `SimpleCell`."""
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
        """The state before the first input; see `RNNCellBase`."""
        return self.carry_init(rng, (*input_shape[:-1], self.features), self.param_dtype)

    @property
    def num_feature_axes(self) -> int:
        """1."""
        return 1


def linear_maps(
    cell: Any, bias_init: Initializer | None = None
) -> tuple[Callable[..., Dense], Callable[..., Dense]]:
    """What makes the linear maps of the input, which have a bias, and of the state."""
    dense = functools.partial(
        Dense, features=cell.features, dtype=cell.dtype, param_dtype=cell.param_dtype
    )
    return (
        functools.partial(
            dense, kernel_init=cell.kernel_init, bias_init=bias_init or cell.bias_init
        ),
        functools.partial(dense, kernel_init=cell.recurrent_kernel_init, use_bias=False),
    )
