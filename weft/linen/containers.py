"""Containers: a chain of layers, and a wrapper for several batch axes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.linen.linear import path_of
from weft.linen.methods import compact
from weft.linen.module import Module

__all__ = ["BatchApply", "Sequential"]


class Sequential(Module):
    """Layer that applies layers in sequence.

    A tuple returned by a layer becomes the next layer's arguments, a dict its keyword arguments.
    Modules among the layers are named `layers_{i}` by their position.

    Raises:
        ArgumentValueError: if `layers` is not a sequence, or is empty in a call.

    Example:
        >>> from weft import linen as nn
        >>> model = Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
        >>> sorted(model.init(jax.random.key(0), jnp.ones((1, 3)))["params"])
        ['layers_0', 'layers_2']
    """

    layers: Sequence[Callable[..., Any]]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence):
            raise ArgumentValueError(
                f"Sequential was given layers={type(self.layers).__name__}(...); expected a list "
                "of layers: Sequential([layer])."
            )
        super().__post_init__()

    @compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.layers:
            raise ArgumentValueError(
                f"Sequential {path_of(self)} has no layers; expected at least one."
            )
        first, *others = self.layers
        y = first(*args, **kwargs)
        for layer in others:
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

    Example:
        >>> BatchApply(lambda x: x.sum(axis=1), num_dims=2)(jnp.ones((2, 3, 4))).shape
        (2, 3)
    """

    def __init__(self, f: Callable[..., Any], num_dims: int = 2) -> None:
        self.f = f
        self.num_dims = num_dims

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with pytrees of arrays.

        Raises:
            ArgumentShapeError: if no array has `num_dims` axes, or a result lacks the batch axis.
        """
        n = self.num_dims
        leaves = jax.tree.leaves((args, kwargs))
        shapes = [jnp.shape(x) for x in leaves]
        batch = next((shape[:n] for shape in shapes if len(shape) >= n), None)
        if batch is None:
            raise ArgumentShapeError(
                f"BatchApply merges {n} axes, but no argument has that many: the shapes are "
                f"{shapes}."
            )

        def flat(x: Any) -> Any:
            return jnp.reshape(x, (-1, *x.shape[n:])) if jnp.ndim(x) >= n else x

        def unflat(y: Any) -> Any:
            if jnp.shape(y)[:1] != (math.prod(batch),):
                raise ArgumentShapeError(
                    f"BatchApply's function returned an array of shape {jnp.shape(y)}; expected "
                    f"its first axis to have size {math.prod(batch)}, for the batch axes {batch}."
                )
            return jnp.reshape(y, (*batch, *y.shape[1:]))

        args, kwargs = jax.tree.map(flat, (args, kwargs))
        return jax.tree.map(unflat, self.f(*args, **kwargs))
