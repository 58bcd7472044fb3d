"""What of a function's results can be computed from those arguments that are known."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.interpreters.partial_eval import dce_jaxpr

from weft.errors import LazyInitError

_TRACED: Any = object()


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

    results: list[tuple[Any, Any]] = []  # the path of each, and its value if that needs no trace
    structure: list[Any] = []

    def of_arrays(*arrays: Any) -> list[Any]:
        all_leaves = list(leaves)
        for i, array in zip(at, arrays, strict=True):
            all_leaves[i] = array
        args, kwargs = tree.unflatten(all_leaves)
        found, out = jax.tree_util.tree_flatten_with_path(fn(*args, **kwargs))
        traced = [isinstance(x, jax.core.Tracer) for _, x in found]
        results[:] = [
            (path, _TRACED if t else x) for (path, x), t in zip(found, traced, strict=True)
        ]
        structure[:] = [out]
        return [x for (_, x), t in zip(found, traced, strict=True) if t]

    arrays = [leaves[i] for i in at]
    closed = jax.make_jaxpr(of_arrays)(*arrays)
    unknown = [isinstance(x, jax.ShapeDtypeStruct) for x in arrays]
    paths = [path for path, x in results if x is _TRACED]

    def needs(used: list[bool]) -> tuple[Any, list[bool]]:
        jaxpr, inputs = dce_jaxpr(closed.jaxpr, used)
        return jaxpr, inputs

    jaxpr, inputs = needs([True] * len(paths))
    if any(needed and not_known for needed, not_known in zip(inputs, unknown, strict=True)):
        for i, path in enumerate(paths):
            _, inputs = needs([i == j for j in range(len(paths))])
            if any(n and u for n, u in zip(inputs, unknown, strict=True)):
                raise LazyInitError(jax.tree_util.keystr(path, simple=True, separator="/"))
    given = [x for x, needed in zip(arrays, inputs, strict=True) if needed]
    values = iter(jax.core.eval_jaxpr(jaxpr, closed.consts, *given))
    return structure[0].unflatten(next(values) if x is _TRACED else x for _, x in results)
