"""Layers of no family: PReLU, dropout, chains of layers, and a wrapper for several batch axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from weft import errors, functional
from weft.functional.dropout import keep_mask
from weft.linen.apply import merge_param
from weft.linen.linear import path_of
from weft.linen.methods import compact
from weft.linen.module import Module
from weft.typing import DType, PyTree


class PReLU(Module):
    """Leaky ReLU with a learned slope (He et al., 2015): `x` if positive, else `slope * x`.

    The parameter `negative_slope` is a scalar.

    >>> y, variables = PReLU().init_with_output(jax.random.key(0), jnp.array([-1.0, 2.0]))
    >>> y, variables
    (Array([-0.01,  2.  ], dtype=float32),
     {'params': {'negative_slope': Array(0.01, dtype=float32)}})
    """

    param_dtype: DType = jnp.float32
    negative_slope_init: float = 0.01

    @compact
    def __call__(
        self, inputs: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        slope = self.param(
            "negative_slope",
            lambda _: jnp.asarray(self.negative_slope_init, self.param_dtype),
        )
        inputs = jnp.asarray(inputs)
        return jax.nn.leaky_relu(inputs, slope.astype(inputs.dtype))


class Dropout(Module):
    """Dropout with probability `rate`, scaling the other elements up (Srivastava et al., 2014).

    `apply` needs a key for the PRNG stream: `rngs={"dropout": key}`.

    Attributes:
        rate: probability of zero, in `[0, 1]`.
        broadcast_dims: axes whose elements are dropped together.
        deterministic: whether to return the input unchanged; set here or in the call.

    >>> layer, rngs = Dropout(0.5, broadcast_dims=(1,)), {"dropout": jax.random.key(2)}
    >>> layer.apply({}, jnp.ones((1, 3)), deterministic=False, rngs=rngs).tolist()
    [[2.0, 2.0, 2.0]]
    """

    rate: float
    broadcast_dims: Sequence[int] = ()
    deterministic: bool | None = None
    rng_collection: str = "dropout"

    @compact
    def __call__(
        self,
        inputs: Float[Array, "*shape"],
        deterministic: bool | None = None,
        rng: Key[Array, ""] | None = None,
    ) -> Float[Array, "*shape"]:
        """Drops elements.

        Args:
            deterministic: overrides the attribute; exactly one of the two must be set.
            rng: key to use instead of the stream.

        Raises:
            ParameterGivenTwiceError: if `deterministic` is given twice or not at all.
            ArgumentValueError: if the rate is not in `[0, 1]`, or an axis does not exist.
            InvalidRngError: if there is no stream.
        """
        deterministic = merge_param(
            "deterministic", self.deterministic, deterministic
        )
        if self.rate == 0 or deterministic:
            return inputs
        if self.rate == 1:
            return jnp.zeros_like(inputs)
        # Only here, so that a call without randomness needs no stream.
        key = self.make_rng(self.rng_collection) if rng is None else rng
        mask = keep_mask(key, self.rate, inputs.shape, self.broadcast_dims)
        return functional.dropout(inputs, rate=self.rate, mask=mask)


class Sequential(Module):
    """Layer that applies layers in sequence.

    A tuple returned by a layer becomes the next layer's arguments, a dict its keyword arguments.
    Modules among the layers are named `layers_{i}` by their position.

    Raises ArgumentValueError if `layers` is not a sequence, or is empty in a call.

    >>> model = Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
    >>> sorted(model.init(jax.random.key(0), jnp.ones((1, 3)))["params"])
    ['layers_0', 'layers_2']
    """

    layers: Sequence[Callable[..., Any]]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence):
            raise errors.ArgumentValueError(
                f"Sequential was given layers={type(self.layers).__name__}(...); expected a list "
                "of layers: Sequential([layer])."
            )
        super().__post_init__()

    @compact
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if not self.layers:
            raise errors.ArgumentValueError(
                f"Sequential {path_of(self)} has no layers; expected at least one."
            )
        y = self.layers[0](*args, **kwargs)
        for layer in self.layers[1:]:
            if isinstance(y, tuple):
                y = layer(*y)
            elif isinstance(y, dict):
                y = layer(**y)
            else:
                y = layer(y)
        return y


class BatchApply:
    """Wrapper that merges the first axes of arrays, calls a function, and splits them again.

    Args:
        f: a function or module of arrays with one batch axis.
        num_dims: number of axes to merge; arrays with fewer are passed unchanged.

    >>> BatchApply(lambda x: x.sum(axis=1), num_dims=2)(jnp.ones((2, 3, 4))).shape
    (2, 3)
    """

    def __init__(self, f: Callable[..., Any], num_dims: int = 2) -> None:
        self.f = f
        self.num_dims = num_dims

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the function with pytrees of arrays.

        Raises ArgumentShapeError if no array has `num_dims` axes, or a result lacks the batch axis.
        """
        num_dims = self.num_dims
        shapes = [jnp.shape(x) for x in jax.tree.leaves((args, kwargs))]
        batch_shapes = [
            shape[:num_dims] for shape in shapes if len(shape) >= num_dims
        ]
        if not batch_shapes:
            raise errors.ArgumentShapeError(
                f"BatchApply merges {num_dims} axes, but no argument has that many: the shapes are "
                f"{shapes}."
            )
        batch_shape = batch_shapes[0]
        batch_size = math.prod(batch_shape)

        def merge_axes(x: Array) -> Array:
            return (
                jnp.reshape(x, (-1, *x.shape[num_dims:]))
                if jnp.ndim(x) >= num_dims
                else x
            )

        def split_axis(y: Array) -> Array:
            if jnp.shape(y)[:1] != (batch_size,):
                raise errors.ArgumentShapeError(
                    f"BatchApply's function returned an array of shape {jnp.shape(y)}; expected "
                    f"its first axis to have size {batch_size}, for the batch axes {batch_shape}."
                )
            return jnp.reshape(y, (*batch_shape, *y.shape[1:]))

        args, kwargs = jax.tree.map(merge_axes, (args, kwargs))
        return jax.tree.map(split_axis, self.f(*args, **kwargs))
