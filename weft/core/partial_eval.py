"""Evaluation of those results of a function that do not depend on unknown values.

Unknown are arguments given only by shape, or all values that a JAX transformation transforms.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import jax.core
from jax.interpreters.partial_eval import dce_jaxpr_consts
from jax.tree_util import KeyPath

from weft.core.display import is_array
from weft.errors import LazyInitError
from weft.lifting.kind import SelectedLeaves
from weft.lifting.state_creation import TracedFunction, without_debugging
from weft.lifting.traces import at_trace, is_tracing
from weft.typing import PyTree, Tensor


def partial_eval(
    fn: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """Computes `fn(*args, **kwargs)` where some arguments are known only by shape and dtype.

    Args:
        fn: the function, which is traced; only operations that its results need are computed.
        *args: pytrees whose leaves are arrays, `jax.ShapeDtypeStruct`, or static values.

    Raises LazyInitError if a result depends on the value of a `jax.ShapeDtypeStruct`.
    """
    trace = _Trace(fn, args, kwargs)
    is_unknown = trace.depends_on_unknown()
    if any(is_unknown):
        path = trace.paths[is_unknown.index(True)]
        raise LazyInitError(
            jax.tree_util.keystr(path, simple=True, separator="/")
        )
    return trace.evaluate(is_unknown)


def partial_eval_or_shapes(
    fn: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """Returns the result of `partial_eval`, with `jax.ShapeDtypeStruct` for unknown values.

    >>> x = jax.ShapeDtypeStruct((2,), "float32")
    >>> partial_eval_or_shapes(lambda x, y: (x + y, y + 1), x, jax.numpy.float32(2))
    (ShapeDtypeStruct(shape=(2,), dtype=float32), Array(3., dtype=float32))
    """
    trace = _Trace(fn, args, kwargs)
    return trace.evaluate(trace.depends_on_unknown())


def evaluate_outside(
    trace: jax.core.Trace,
    fn: Callable[[], PyTree],
    error: Callable[[KeyPath], Exception],
) -> PyTree:
    """Computes `fn()` in an outer trace, although `fn` runs in the present one.

    Args:
        trace: the outer trace, which is running.
        fn: the function, which is traced; only operations that its results need are computed.
        error: returns the exception for the path of a result that depends on a value which exists
            only in the present trace.
    """
    inside = _Trace(fn, (), {})
    outputs = range(len(inside.paths))
    values = _outputs_outside(trace, inside, outputs)
    if values is not None:
        return inside.results.replace(values)
    for i in outputs:
        if not _outputs_outside(trace, inside, [i]):
            raise error(inside.paths[i])
    raise AssertionError("one of the results is not known outside")


def _outputs_outside(
    trace: jax.core.Trace, inside: "_Trace", outputs: Sequence[int]
) -> list[Tensor] | None:
    """Returns some results, computed in an outer trace, or None if it does not have the inputs."""
    is_output = [i in outputs for i in range(len(inside.paths))]
    closed = without_debugging(inside.traced.closed)
    jaxpr, is_used, _ = dce_jaxpr_consts(closed.jaxpr, is_output)
    used_consts = list(itertools.compress(closed.consts, is_used))
    with at_trace(trace):
        has_tracers = any(
            isinstance(const, jax.core.Tracer) for const in used_consts
        )
        if has_tracers and not is_tracing():
            return None
        try:
            values = jax.core.eval_jaxpr(jaxpr, used_consts)
        except jax.errors.UnexpectedTracerError:
            return None
        # Constants are arrays of NumPy, which are mutable.
        return list(map(jax.numpy.asarray, values))


class _Trace:
    """Function that was traced once, with arrays or their shapes among its arguments.

    Attributes:
        arrays: the arrays and shapes among the arguments.
        results: the result, in which those in the trace can be replaced.
        paths: their paths.
    """

    results: SelectedLeaves
    paths: list[KeyPath]

    def __init__(
        self,
        fn: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ):
        arg_leaves = SelectedLeaves.of((args, kwargs), is_array, None)

        def of_arrays(*arrays: Tensor) -> list[Tensor]:
            args, kwargs = arg_leaves.replace(arrays)
            result = fn(*args, **kwargs)
            self.results = SelectedLeaves.of(result, _is_tracer, None)
            result_paths = [
                path for path, _ in jax.tree_util.tree_leaves_with_path(result)
            ]
            self.paths = [result_paths[i] for i in self.results.indices]
            tracers = self.results.selected
            for i in self.results.indices:
                self.results.leaves[i] = (
                    None  # tracers do not outlive their trace
                )
            return tracers

        self.arrays: list[Tensor | jax.ShapeDtypeStruct] = arg_leaves.selected
        self.traced = TracedFunction(fn, of_arrays, *self.arrays)

    def depends_on_unknown(self) -> list[bool]:
        """Returns for each result in the trace whether it depends on unknown values."""
        outputs = range(len(self.paths))
        if not self._depends_on_unknown(outputs):
            return [
                False for _ in outputs
            ]  # most often, without a look at each
        return [self._depends_on_unknown([i]) for i in outputs]

    def _depends_on_unknown(self, outputs: Sequence[int]) -> bool:
        inputs = zip(self.traced.used_inputs(outputs), self.arrays, strict=True)
        return any(
            is_used and isinstance(x, jax.ShapeDtypeStruct)
            for is_used, x in inputs
        )

    def evaluate(self, is_unknown: Sequence[bool]) -> PyTree:
        """Returns the result, with shapes for unknown values."""
        return self.results.replace(self._values_or_shapes(is_unknown))

    def _values_or_shapes(
        self, is_unknown: Sequence[bool]
    ) -> Iterator[Tensor | jax.ShapeDtypeStruct]:
        outputs = [
            i
            for i, is_unknown_value in enumerate(is_unknown)
            if not is_unknown_value
        ]
        values = iter(self.traced.only(outputs, *self.arrays))
        for is_unknown_value, result_type in zip(
            is_unknown, self.traced.shapes, strict=True
        ):
            if is_unknown_value:
                yield jax.ShapeDtypeStruct(result_type.shape, result_type.dtype)
            else:
                yield next(values)


def _is_tracer(x: PyTree) -> bool:
    return isinstance(x, jax.core.Tracer)
