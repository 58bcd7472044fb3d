"""Modules that hold others: a chain of layers, and a layer over several batch axes at once."""

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
    """Applies layers one after the other.

    A layer that returns a tuple gives the next one several arguments; one that returns a dict gives
    it keyword arguments.

    Attributes:
        layers: modules and functions. The modules are named `layers_0`, `layers_1`, ..., by their
            places.

    Raises:
        ArgumentValueError: if `layers` is no sequence, or an empty one is called.

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
        """Applies the layers.

        Args:
            *args: for the first layer.
            **kwargs: likewise.
        """
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
    """Makes the first axes of arrays one axis, calls a function, and makes them several again.

    Args:
        f: a function, or a module, of arrays with one batch axis.
        num_dims: how many axes become one. What has fewer is passed as it is.

    Example:
        >>> BatchApply(lambda x: x.sum(axis=1), num_dims=2)(jnp.ones((2, 3, 4))).shape
        (2, 3)
    """

    def __init__(self, f: Callable[..., Any], num_dims: int = 2) -> None:
        self.f = f
        self.num_dims = num_dims

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function.

        Args:
            *args: pytrees of arrays.
            **kwargs: likewise.

        Raises:
            ArgumentShapeError: if no array has `num_dims` axes, or a result has not the batch axis.
        """
        n = self.num_dims
        leaves = jax.tree.leaves((args, kwargs))
        shapes = [jnp.shape(x) for x in leaves]
        batch = next((shape[:n] for shape in shapes if len(shape) >= n), None)
        if batch is None:
            raise ArgumentShapeError(
                f"BatchApply makes {n} axes one, but no argument has so many: their shapes are "
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
