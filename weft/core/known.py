"""What of a function's results can be computed from those arguments that are known."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.interpreters.partial_eval import dce_jaxpr

from weft.errors import LazyInitError


def known_part(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Computes `fn(*args, **kwargs)` where of some arguments only shape and dtype are known.

    Args:
        fn: the function. It is traced, and of the trace only what its results need is computed.
        *args: pytrees whose leaves are arrays, `jax.ShapeDtypeStruct`, or anything that is static.
        **kwargs: likewise.

    Raises:
        LazyInitError: if a result depends on the value of a `jax.ShapeDtypeStruct`.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]

    def of_arrays(*arrays: Any) -> Any:
        all_leaves = list(leaves)
        for i, array in zip(at, arrays, strict=True):
            all_leaves[i] = array
        args, kwargs = tree.unflatten(all_leaves)
        return fn(*args, **kwargs)

    arrays = [leaves[i] for i in at]
    closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
    unknown = [isinstance(x, jax.ShapeDtypeStruct) for x in arrays]
    results = jax.tree_util.tree_leaves_with_path(shapes)

    def needs(used: list[bool]) -> tuple[Any, list[bool]]:
        jaxpr, inputs = dce_jaxpr(closed.jaxpr, used)
        return jaxpr, inputs

    jaxpr, inputs = needs([True] * len(results))
    if any(needed and not_known for needed, not_known in zip(inputs, unknown, strict=True)):
        for i, (path, _) in enumerate(results):
            _, inputs = needs([i == j for j in range(len(results))])
            if any(n and u for n, u in zip(inputs, unknown, strict=True)):
                raise LazyInitError(jax.tree_util.keystr(path, simple=True, separator="/"))
    given = [x for x, needed in zip(arrays, inputs, strict=True) if needed]
    values = jax.core.eval_jaxpr(jaxpr, closed.consts, *given)
    return jax.tree.unflatten(jax.tree.structure(shapes), values)
