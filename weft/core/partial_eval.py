"""Evaluation of those results of a function that do not depend on unknown values.

Unknown are arguments given only by shape, or all values that a JAX transformation transforms.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.core
from jax.interpreters.partial_eval import dce_jaxpr_consts

from weft.core import display
from weft.errors import LazyInitError
from weft.lifting import kind, state_creation, traces


def partial_eval(fn: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Computes `fn(*args, **kwargs)` where some arguments are known only by shape and dtype.

    Args:
        fn: the function, which is traced; only operations that its results need are computed.
        *args: pytrees whose leaves are arrays, `jax.ShapeDtypeStruct`, or static values.

    Raises LazyInitError if a result depends on the value of a `jax.ShapeDtypeStruct`.
    """
    trace = _Trace(fn, args, kwargs)
    unknown = trace.needs_unknown()
    if any(unknown):
        path = trace.paths[unknown.index(True)]
        raise LazyInitError(jax.tree_util.keystr(path, simple=True, separator="/"))
    return trace.evaluate(unknown)


def partial_eval_or_shapes(fn: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Returns the result of `partial_eval`, with `jax.ShapeDtypeStruct` for unknown values.

    >>> x = jax.ShapeDtypeStruct((2,), "float32")
    >>> partial_eval_or_shapes(lambda x, y: (x + y, y + 1), x, jax.numpy.float32(2))
    (ShapeDtypeStruct(shape=(2,), dtype=float32), Array(3., dtype=float32))
    """
    trace = _Trace(fn, args, kwargs)
    return trace.evaluate(trace.needs_unknown())


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
    inside = _Trace(fn, (), {})
    every = range(len(inside.paths))
    values = _outputs_outside(trace, inside, every)
    if values is None:
        (path, *_) = (inside.paths[i] for i in every if not _outputs_outside(trace, inside, [i]))
        raise error(path)
    return inside.results.replace(values)


def _outputs_outside(
    trace: jax.core.Trace, inside: "_Trace", outputs: Sequence[int]
) -> list[Any] | None:
    """Returns some results, computed in an outer trace, or None if it does not have the inputs."""
    used = [i in outputs for i in range(len(inside.paths))]
    closed = state_creation.without_debugging(inside.traced.closed)
    jaxpr, used_consts, _ = dce_jaxpr_consts(closed.jaxpr, used)
    consts = [x for x, is_used in zip(closed.consts, used_consts, strict=True) if is_used]
    with traces.at_trace(trace):
        if not traces.is_tracing() and any(isinstance(x, jax.core.Tracer) for x in consts):
            return None
        try:
            # Constants are arrays of NumPy, which are mutable.
            return list(map(jax.numpy.asarray, jax.core.eval_jaxpr(jaxpr, consts)))
        except jax.errors.UnexpectedTracerError:
            return None


class _Trace:
    """Function that was traced once, with arrays or their shapes among its arguments.

    Attributes:
        results: the result, in which those in the trace can be replaced.
        paths: their paths.
    """

    results: kind.SelectedLeaves
    paths: list[jax.tree_util.KeyPath]

    def __init__(self, fn: Callable[..., Any], args: object, kwargs: object):
        given = kind.SelectedLeaves.of((args, kwargs), display.is_array, None)

        def of_arrays(*arrays: object) -> list[Any]:
            args, kwargs = given.replace(arrays)
            out = fn(*args, **kwargs)
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(out)]
            self.results = kind.SelectedLeaves.of(
                out, lambda x: isinstance(x, jax.core.Tracer), None
            )
            self.paths = [paths[i] for i in self.results.indices]
            traced = self.results.selected
            for i in self.results.indices:
                self.results.leaves[i] = None  # tracers do not outlive their trace
            return traced

        self.arrays = given.selected
        self.traced = state_creation.TracedFunction(fn, of_arrays, *self.arrays)

    def needs_unknown(self) -> list[bool]:
        """Returns for each result in the trace whether it depends on unknown values."""
        missing = [isinstance(x, jax.ShapeDtypeStruct) for x in self.arrays]

        def needs_missing(outputs: Sequence[int]) -> bool:
            used = self.traced.used_inputs(outputs)
            return any(n and m for n, m in zip(used, missing, strict=True))

        every = range(len(self.paths))
        is_any = needs_missing(every)
        return [is_any and needs_missing([i]) for i in every]

    def evaluate(self, unknown: Sequence[bool]) -> Any:
        """Returns the result, with shapes for unknown values."""
        known = iter(self.traced.only([i for i, u in enumerate(unknown) if not u], *self.arrays))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.traced.shapes]
        pairs = zip(shapes, unknown, strict=True)
        return self.results.replace([s if u else next(known) for s, u in pairs])
