"""Conversion of gradients to the structure of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.errors import GradientStructureError
from weft.nnx.filters import Filter, Path, to_predicate
from weft.nnx.state import State, from_flat_state, shown_path
from weft.nnx.state_dict import leaves_of, raw
from weft.nnx.variables import Variable


def gradients_like(parameters: Mapping[Path, Any], grads: Any, wrt: Filter) -> State:
    """Returns the values of gradients, as a state with the paths of the parameters.

    `grads` is a state, nested dicts or a model; those that `wrt` does not match are ignored.

    Raises:
        GradientStructureError: if paths or shapes of gradients and parameters differ.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> w, grads = nnx.Param(jnp.ones(2)), {"w": jnp.zeros(2), "n": 1.0}
        >>> gradients_like({("w",): w}, grads, nnx.Param).to_pure_dict()
        {'w': Array([0., 0.], dtype=float32)}
    """
    given = leaves_of(grads)
    for path, x in parameters.items():
        _check(path, raw(x), raw(given.get(path)), wrt)
    matches = to_predicate(wrt)
    for path, x in given.items():
        if path not in parameters and isinstance(x, Variable) and matches(path, x):
            raise GradientStructureError(
                f"there is a gradient for {shown_path(path)!r}, but no parameter there, or the "
                "same one as at another path; give the gradients with respect to the variables of "
                "the model itself."
            )
    return from_flat_state((path, raw(given.get(path))) for path in parameters)


def _check(path: Path, parameter: Any, gradient: Any, wrt: Filter) -> None:
    if gradient is None and parameter is not None:
        name = wrt.__name__ if isinstance(wrt, type) else wrt
        raise GradientStructureError(
            f"there is no gradient for {shown_path(path)!r}, a parameter that the filter {name} "
            f"selects; take the gradients with argnums=nnx.DiffState(0, {name})."
        )
    shape, size = getattr(parameter, "shape", None), getattr(gradient, "shape", None)
    if shape is not None and size is not None and shape != size:
        raise GradientStructureError(
            f"the gradient for {shown_path(path)!r} has shape {size}, and the parameter {shape}; "
            "give the gradient of a scalar loss with respect to it."
        )
