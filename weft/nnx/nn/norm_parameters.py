"""Shared parts of norms: scale and bias, and the dtype of the output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from weft.errors import ArgumentShapeError
from weft.nnx.nn.dtypes import canonicalize_dtype, promote_dtype
from weft.nnx.nn.parameters import Initializer, Metadata, new_param
from weft.nnx.rngs import Rngs
from weft.typing import DType


def optional_param(
    use: bool, init: Initializer, rngs: Rngs, size: int, dtype: DType, metadata: Metadata
) -> Any:
    """Returns a parameter of shape `(size,)` if `use`, else None.

    Example:
        >>> import jax
        >>> optional_param(True, jax.nn.initializers.ones, Rngs(0), 2, "float32", {}).shape
        (2,)
    """
    return new_param(init, rngs, (size,), dtype, metadata) if use else None


def promoted(layer: Any, x: Array, *others: Array | None) -> tuple[Any, tuple[Array | None, ...]]:
    """Returns a layer's output dtype, and its parameters as `layer.promote_dtype` casts them.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> layer = nnx.Module()
        >>> layer.dtype, layer.promote_dtype = None, promote_dtype
        >>> promoted(layer, jnp.ones(1, "bfloat16"), jnp.ones(1, "float32"))[0].name
        'float32'
    """
    if layer.promote_dtype is promote_dtype:
        return canonicalize_dtype(x, *others, dtype=layer.dtype), others
    x, *others_ = layer.promote_dtype((x, *others), dtype=layer.dtype)
    return x.dtype, tuple(others_)


def along(
    layer: Any, values: Array | None, axes: Sequence[int], x: Array, num_features: int
) -> Any:
    """Reshapes values of shape `(num_features,)`, or None, to broadcast to the input.

    Args:
        layer: layer to name in errors.
        axes: axes of the features, in increasing order.

    Raises:
        ArgumentShapeError: if the input has a different number of features.

    Example:
        >>> import jax.numpy as jnp
        >>> along(None, jnp.ones(6), (1, 2), jnp.ones((4, 2, 3, 5)), 6).shape
        (1, 2, 3, 1)
    """
    if values is None:
        return None
    sizes = [x.shape[a] for a in axes]
    if math.prod(sizes) != num_features:
        raise ArgumentShapeError(
            f"{type(layer).__name__} with num_features={num_features} was given an input of shape "
            f"{x.shape}, whose features (axis {', '.join(map(str, axes))}) are "
            f"{math.prod(sizes)}; make the layer with num_features={math.prod(sizes)}, or set its "
            "feature axis."
        )
    if tuple(axes) == (x.ndim - 1,):
        return values
    return values.reshape([size if a in axes else 1 for a, size in enumerate(x.shape)])
