"""Tables of objects: inputs and outputs of method calls, and variables.

The model runs abstractly, on a copy with observed methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from weft.core import display as tables
from weft.core import meta, tracing
from weft.errors import GraphStructureError, ModuleAttributeNotFoundError
from weft.nnx import filters, pytree, rngs, split_merge
from weft.nnx.intercept import intercept_calls, iter_objects, original_class
from weft.nnx.variables import Variable

_PLACE = "_place"
"""Attribute with an object's path; static, so that it passes through transformations."""


@dataclasses.dataclass
class CallInfo:
    """Call of a method.

    Attributes:
        path: path of the object, and the method's name unless it is `__call__`.
        outputs: result, with `jax.ShapeDtypeStruct` for arrays.
        flops: XLA's FLOP count of the call, if requested.
        vjp_flops: XLA's FLOP count of the call and its gradient, if requested.
    """

    object_id: int
    call_order: int
    type: type
    path: filters.Path
    inputs_repr: str
    outputs: Any
    flops: int | None = None
    vjp_flops: int | None = None


@dataclasses.dataclass
class _Run:
    """Records of a model run: calls, and paths of the objects whose methods are running."""

    counts: list[str]
    ids: dict[filters.Path, int]
    calls: list[tuple[filters.Path, CallInfo]] = dataclasses.field(default_factory=list)
    open: list[filters.Path] = dataclasses.field(default_factory=list)
    token: object = dataclasses.field(default_factory=object)
    seen: set[filters.Path] = dataclasses.field(default_factory=set)


_RUNS = tracing.ThreadStack[_Run | None]()


def without_streams(call: CallInfo) -> bool:
    """Returns whether a call is not of a PRNG stream."""
    return not issubclass(call.type, rngs.Rngs | rngs.RngStream)


def tabulate(
    obj: object,
    *input_args: object,
    depth: int | None = None,
    method: str = "__call__",
    row_filter: Callable[[CallInfo], bool] = without_streams,
    table_kwargs: Mapping[str, Any] = {},
    column_kwargs: Mapping[str, Any] = {},
    console_kwargs: Mapping[str, Any] = {},
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **input_kwargs: object,
) -> str:
    """Returns a table of a model's modules with one row per method, for its first call.

    Args:
        *input_args: arguments of the method; `jax.ShapeDtypeStruct` may replace arrays.
        row_filter: selects calls to show; by default omits those of PRNG streams.
        table_kwargs, column_kwargs, console_kwargs: for `rich.table.Table`, its columns, and
            `rich.console.Console`, such as `width`.
        compute_flops, compute_vjp_flops: whether to count the FLOPs of calls, of their gradients.

    Raises:
        GraphStructureError: if `obj` is not an object.
        ModuleAttributeNotFoundError: if it has no such method.

    >>> layer, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 3))
    >>> "kernel: float32[3,2]" in tabulate(layer, x, console_kwargs={"width": 80})
    True
    """
    if not isinstance(obj, pytree.Pytree):
        raise GraphStructureError(
            f"tabulate was given a {type(obj).__name__}; give an nnx.Module or nnx.Pytree."
        )
    if not callable(getattr(obj, method, None)):
        raise ModuleAttributeNotFoundError(
            f"{type(obj).__name__} has no method {method!r} to tabulate; give its name as method=."
        )
    counts = ["flops"] * compute_flops + ["vjp_flops"] * compute_vjp_flops
    run = _Run(counts, {path: id(x) for path, x in iter_objects(obj)})
    _call_abstractly(obj, method, input_args, input_kwargs, run)
    there, variables = dict(iter_objects(obj)), dict(sorted(_by_kind(obj).items()))
    rows = [
        _row(call, there[path], list(variables), counts)
        for path, call in run.calls
        if (depth is None or len(path) <= depth) and row_filter(call)
    ]
    names = ["path", "type", "inputs", "outputs", *counts]
    return tables.render_table(
        obj, names, variables, rows, table_kwargs, column_kwargs, console_kwargs
    )


def _call_abstractly(
    obj: pytree.Pytree, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: _Run
) -> None:
    graphdef, state = split_merge.split(obj)
    arrays, fill = tables.split_arrays((state, args, kwargs))

    def call(arrays: list[Any]) -> Any:
        state, args, kwargs = fill(arrays)
        copy = split_merge.merge(graphdef, state, copy=True)
        for path, x in list(iter_objects(copy)):
            # Unique per run: calls compiled in an earlier run would not be recorded again.
            vars(x)[_PLACE] = (run.token, path)
            intercept_calls(x, _note)
        getattr(copy, method)(*args, **kwargs)

    with _RUNS.push(run):
        jax.eval_shape(call, arrays)


def _note(
    x: object, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Records the first call of each method, except calls by the object itself."""
    run = _RUNS.top
    _, path = vars(x).get(_PLACE, (None, None))
    if run is None or path is None or run.open[-1:] == [path]:
        return method(*args, **kwargs)
    where = path if name == "__call__" else (*path, name)
    before = tables.to_shapes(split_merge.split(x)) if run.counts else ()
    call = None
    if where not in run.seen:
        run.seen.add(where)
        inputs = tables.format_inputs(*tables.to_shapes((args, kwargs))) if args or kwargs else ""
        call = CallInfo(run.ids[path], len(run.calls), original_class(x), where, inputs, None)
        run.calls.append((path, call))
    run.open.append(path)
    try:
        result = method(*args, **kwargs)
    finally:
        run.open.pop()
    if call is not None:
        call.outputs = tables.to_shapes(result)
        # Afterwards: functions compiled here earlier would hide their calls.
        for count in run.counts:
            setattr(call, count, _flops(before, name, args, kwargs, count == "vjp_flops"))
    return result


def _flops(
    before: tuple[Any, ...], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], vjp: bool
) -> int:
    graphdef, state = before
    arrays, fill = tables.split_arrays(tables.to_shapes((state, args, kwargs)))

    def run(arrays: list[Any]) -> Any:
        state, args, kwargs = fill(arrays)
        return getattr(split_merge.merge(graphdef, state, copy=True), name)(*args, **kwargs)

    with _RUNS.push(None):
        return tables.flops(run, arrays, with_vjp=vjp)


def _row(call: CallInfo, x: pytree.Pytree, kinds: list[str], counts: list[str]) -> list[str]:
    own: dict[str, dict[str, Any]] = {}
    for name, value in x._items():
        if isinstance(value, Variable):
            own.setdefault(_kind(value), {})[str(name)] = _with_layout(value)
    below = _by_kind(x)
    cells = []
    for kind in kinds:
        lines = tables.format_tree(own[kind]) + "\n\n" if kind in own else ""
        cells.append(lines + tables.format_size(below[kind]) if kind in below else "")
    flops = [str(getattr(call, count)) for count in counts]
    path, outputs = "/".join(map(str, call.path)), tables.format_tree(call.outputs)
    return [path, call.type.__name__, call.inputs_repr, outputs, *flops, *cells]


def _with_layout(variable: Variable[Any]) -> Any:
    names = variable.get_metadata("out_sharding", None)
    value = tables.to_shapes(variable.get_raw_value())
    return meta.Partitioned(value, names) if isinstance(names, tuple) and names else value


def _by_kind(x: object) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for _, variable in pytree.iter_graph(x):
        if isinstance(variable, Variable):
            found.setdefault(_kind(variable), []).append(variable.get_raw_value())
    return found


def _kind(variable: Variable[Any]) -> str:
    classes = [c for c in type(variable).__mro__ if issubclass(c, Variable) and c is not Variable]
    return classes[-1].__name__ if classes else Variable.__name__
