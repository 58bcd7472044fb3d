"""Evaluation of those results of a function that do not depend on unknown values.

Unknown are arguments given only by shape, or all values that a JAX transformation transforms.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
from jax.interpreters.partial_eval import dce_jaxpr, dce_jaxpr_consts

from weft.core.tracing import at_trace, is_tracing
from weft.errors import LazyInitError
from weft.lifting.state_creation import without_debugging

_TRACED: Any = object()


def partial_eval(fn: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Computes `fn(*args, **kwargs)` where some arguments are known only by shape and dtype.

    Args:
        fn: the function, which is traced; only operations that its results need are computed.
        *args: pytrees whose leaves are arrays, `jax.ShapeDtypeStruct`, or static values.

    Raises LazyInitError if a result depends on the value of a `jax.ShapeDtypeStruct`.
    """
    trace = _trace(fn, args, kwargs)
    unknown = _needs_unknown(trace)
    if any(unknown):
        path = trace.paths[unknown.index(True)]
        raise LazyInitError(jax.tree_util.keystr(path, simple=True, separator="/"))
    return _evaluate(trace, unknown)


def partial_eval_or_shapes(fn: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Returns the result of `partial_eval`, with `jax.ShapeDtypeStruct` for unknown values.

    >>> x = jax.ShapeDtypeStruct((2,), "float32")
    >>> partial_eval_or_shapes(lambda x, y: (x + y, y + 1), x, jax.numpy.float32(2))
    (ShapeDtypeStruct(shape=(2,), dtype=float32), Array(3., dtype=float32))
    """
    trace = _trace(fn, args, kwargs)
    return _evaluate(trace, _needs_unknown(trace))


def evaluate_outside(
    trace: jax.core.Trace, fn: Callable[[], Any], error: Callable[[Any], Exception]
) -> Any:
    """Computes `fn()` in an outer trace, although `fn` runs in the present one.

    Args:
        trace: the outer trace, which is running.
        fn: the function, which is traced; only operations that its results need are computed.
        error: returns the exception for the path of a result that depends on a value which exists
            only in the present trace.
    """
    inside = _trace(fn, (), {})
    every = range(len(inside.paths))
    values = _outputs_outside(trace, inside, every)
    if values is None:
        (path, *_) = (inside.paths[i] for i in every if not _outputs_outside(trace, inside, [i]))
        raise error(path)
    return inside.restored(values)


def _outputs_outside(
    trace: jax.core.Trace, inside: "_Trace", outputs: Sequence[int]
) -> list[Any] | None:
    """Returns some results, computed in an outer trace, or None if it does not have the inputs."""
    used = [i in outputs for i in range(len(inside.paths))]
    jaxpr, used_consts, _ = dce_jaxpr_consts(inside.closed.jaxpr, used)
    consts = [x for x, is_used in zip(inside.closed.consts, used_consts, strict=True) if is_used]
    with at_trace(trace):
        if not is_tracing() and any(isinstance(x, jax.core.Tracer) for x in consts):
            return None
        try:
            # Constants are arrays of NumPy, which are mutable.
            return list(map(jax.numpy.asarray, jax.core.eval_jaxpr(jaxpr, consts)))
        except jax.errors.UnexpectedTracerError:
            return None


class _Trace(NamedTuple):
    closed: Any
    arrays: list[Any]
    results: list[Any]
    paths: list[Any]  # of the results in the trace
    structure: Any

    def needs(self, used: list[bool]) -> tuple[Any, list[bool]]:
        """Returns the computation of the used results, and which arrays it needs."""
        jaxpr, inputs = dce_jaxpr(self.closed.jaxpr, used)
        return jaxpr, inputs

    def restored(self, values: Sequence[Any]) -> Any:
        """Returns the function's result, with values for those in the trace."""
        rest = iter(values)
        return self.structure.unflatten(next(rest) if x is _TRACED else x for x in self.results)


def _trace(fn: Callable[..., Any], args: object, kwargs: object) -> _Trace:
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]
    found: list[Any] = []

    def of_arrays(*arrays: object) -> list[Any]:
        all_leaves = list(leaves)
        for i, array in zip(at, arrays, strict=True):
            all_leaves[i] = array
        args, kwargs = tree.unflatten(all_leaves)
        with_paths, out = jax.tree_util.tree_flatten_with_path(fn(*args, **kwargs))
        traced = [isinstance(x, jax.core.Tracer) for _, x in with_paths]
        pairs = list(zip(with_paths, traced, strict=True))
        results = [_TRACED if is_traced else x for (_, x), is_traced in pairs]
        found[:] = [results, [path for (path, _), is_traced in pairs if is_traced], out]
        return [x for (_, x), is_traced in pairs if is_traced]

    arrays = [leaves[i] for i in at]
    with jax.disable_jit(False):
        closed = without_debugging(jax.make_jaxpr(of_arrays)(*arrays))
    return _Trace(closed, arrays, *found)


def _needs_unknown(trace: _Trace) -> list[bool]:
    missing = [isinstance(x, jax.ShapeDtypeStruct) for x in trace.arrays]

    def needs_missing(used: list[bool]) -> bool:
        _, inputs = trace.needs(used)
        return any(n and m for n, m in zip(inputs, missing, strict=True))

    n = len(trace.paths)
    if not needs_missing([True] * n):
        return [False] * n
    return [needs_missing([i == j for j in range(n)]) for i in range(n)]


def _evaluate(trace: _Trace, unknown: list[bool]) -> Any:
    jaxpr, inputs = trace.needs([not u for u in unknown])
    given = [x for x, needed in zip(trace.arrays, inputs, strict=True) if needed]
    # Constants are arrays of NumPy, which are mutable.
    known = map(jax.numpy.asarray, jax.core.eval_jaxpr(jaxpr, trace.closed.consts, *given))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in trace.closed.out_avals]
    return trace.restored([s if u else next(known) for s, u in zip(shapes, unknown, strict=True)])
