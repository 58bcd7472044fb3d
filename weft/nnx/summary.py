"""Tables of objects: inputs and outputs of method calls, and variables.

The model runs abstractly, on a copy with observed methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from weft.core import display as tables
from weft.core import meta, tracing
from weft.errors import GraphStructureError, ModuleAttributeNotFoundError
from weft.nnx import pytree, rngs, split_merge
from weft.nnx.filters import Path
from weft.nnx.intercept import intercept_calls, iter_objects, original_class
from weft.nnx.variables import Variable
from weft.typing import PyTree

R = TypeVar("R")

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
    path: Path
    inputs_repr: str
    outputs: PyTree
    flops: int | None = None
    vjp_flops: int | None = None


@dataclasses.dataclass
class _Run:
    """Records of a model run.

    Attributes:
        counts: the counts of FLOPs to make, attributes of `CallInfo`.
        ids: the ids of the model's objects.
        calls: the first call of each method, each with the path of its object.
        running: paths of the objects whose methods are running, outermost first.
        recorded: the paths of the calls.
        token: unique for the run.
    """

    counts: list[str]
    ids: dict[Path, int]
    calls: list[tuple[Path, CallInfo]] = dataclasses.field(default_factory=list)
    running: list[Path] = dataclasses.field(default_factory=list)
    recorded: set[Path] = dataclasses.field(default_factory=set)
    token: object = dataclasses.field(default_factory=object)


_RUNS = tracing.ThreadStack[_Run | None]()


def without_streams(call: CallInfo) -> bool:
    """Returns whether a call is not of a PRNG stream."""
    return not issubclass(call.type, rngs.Rngs | rngs.RngStream)


def tabulate(
    obj: pytree.Pytree,
    *input_args: PyTree,
    depth: int | None = None,
    method: str = "__call__",
    row_filter: Callable[[CallInfo], bool] = without_streams,
    table_kwargs: Mapping[str, Any] = {},
    column_kwargs: Mapping[str, Any] = {},
    console_kwargs: Mapping[str, Any] = {},
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **input_kwargs: PyTree,
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
    counts: list[str] = []
    if compute_flops:
        counts.append("flops")
    if compute_vjp_flops:
        counts.append("vjp_flops")
    run = _Run(counts, {path: id(x) for path, x in iter_objects(obj)})
    _call_abstractly(obj, method, input_args, input_kwargs, run)
    object_by_path = dict(iter_objects(obj))
    values_by_class = dict(sorted(_values_by_class(obj).items()))
    rows: list[list[str]] = []
    for path, call in run.calls:
        is_shown = depth is None or len(path) <= depth
        if is_shown and row_filter(call):
            x = object_by_path[path]
            rows.append(_row(call, x, list(values_by_class), counts))
    return tables.render_table(
        obj,
        ["path", "type", "inputs", "outputs", *counts],
        values_by_class,
        rows,
        table_kwargs,
        column_kwargs,
        console_kwargs,
    )


def _call_abstractly(
    obj: pytree.Pytree,
    method: str,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    run: _Run,
) -> None:
    """Calls a method of a copy of the model without computing, and records the calls in `run`."""
    graphdef, state = split_merge.split(obj)
    arrays, fill = tables.split_arrays((state, args, kwargs))

    def call(arrays: list[jax.Array]) -> None:
        state, args, kwargs = fill(arrays)
        model = split_merge.merge(graphdef, state, copy=True)
        for path, x in list(iter_objects(model)):
            # Calls compiled in an earlier run, with another token, would not be recorded again.
            vars(x)[_PLACE] = (run.token, path)
            intercept_calls(x, _record_call)
        getattr(model, method)(*args, **kwargs)

    with _RUNS.push(run):
        jax.eval_shape(call, arrays)


def _record_call(
    x: pytree.Pytree,
    name: str,
    method: Callable[..., R],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> R:
    """Records the first call of each method, except calls by the object itself."""
    run = _RUNS.top
    _, path = vars(x).get(_PLACE, (None, None))
    # Within `_flops` there is no run, and an object made by the method has no place.
    if run is None or path is None or run.running[-1:] == [path]:
        return method(*args, **kwargs)
    call_path = path if name == "__call__" else (*path, name)
    if call_path in run.recorded:
        return _run_method(run, path, method, args, kwargs)
    run.recorded.add(call_path)
    inputs_repr = ""
    if args or kwargs:
        inputs_repr = tables.format_inputs(*tables.to_shapes((args, kwargs)))
    call = CallInfo(
        object_id=run.ids[path],
        call_order=len(run.calls),
        type=original_class(x),
        path=call_path,
        inputs_repr=inputs_repr,
        outputs=None,
    )
    run.calls.append((path, call))
    # FLOPs are those of a call before which nothing has changed the object.
    graphdef_and_state = None
    if run.counts:
        graphdef_and_state = tables.to_shapes(split_merge.split(x))
    result = _run_method(run, path, method, args, kwargs)
    call.outputs = tables.to_shapes(result)
    # Afterwards: functions compiled here earlier would hide their calls.
    for count in run.counts:
        with_vjp = count == "vjp_flops"
        flops = _flops(graphdef_and_state, name, args, kwargs, with_vjp)
        setattr(call, count, flops)
    return result


def _run_method(
    run: _Run,
    path: Path,
    method: Callable[..., R],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> R:
    run.running.append(path)
    try:
        return method(*args, **kwargs)
    finally:
        run.running.pop()


def _flops(
    graphdef_and_state: PyTree,
    name: str,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    with_vjp: bool,
) -> int:
    graphdef, state = graphdef_and_state
    arrays, fill = tables.split_arrays(tables.to_shapes((state, args, kwargs)))

    def call(arrays: list[jax.Array]) -> PyTree:
        state, args, kwargs = fill(arrays)
        x = split_merge.merge(graphdef, state, copy=True)
        return getattr(x, name)(*args, **kwargs)

    with _RUNS.push(None):
        return tables.flops(call, arrays, with_vjp=with_vjp)


def _row(
    call: CallInfo, x: pytree.Pytree, class_names: list[str], counts: list[str]
) -> list[str]:
    """Returns the cells of a call; a class of variables has those of the object, and a total."""
    own_by_class: dict[str, dict[str, PyTree]] = {}
    for name, value in x._items():
        if isinstance(value, Variable):
            own_variables = own_by_class.setdefault(_class_name(value), {})
            own_variables[str(name)] = _with_layout(value)
    values_by_class = _values_by_class(x)
    cells: list[str] = []
    for class_name in class_names:
        cell = ""
        if class_name in own_by_class:
            cell = tables.format_tree(own_by_class[class_name]) + "\n\n"
        if class_name in values_by_class:
            cell += tables.format_size(values_by_class[class_name])
        cells.append(cell)
    flops = [str(getattr(call, count)) for count in counts]
    path = "/".join(map(str, call.path))
    outputs = tables.format_tree(call.outputs)
    return [path, call.type.__name__, call.inputs_repr, outputs, *flops, *cells]


def _with_layout(variable: Variable[Any]) -> PyTree:
    """Returns the shapes in a variable, with the names of its axes if it has these."""
    axis_names = variable.get_metadata("out_sharding", None)
    value = tables.to_shapes(variable.get_raw_value())
    if isinstance(axis_names, tuple) and axis_names:
        return meta.Partitioned(value, axis_names)
    return value


def _values_by_class(x: pytree.Pytree) -> dict[str, list[PyTree]]:
    values_by_class: dict[str, list[PyTree]] = {}
    for _, variable in pytree.iter_graph(x):
        if isinstance(variable, Variable):
            values = values_by_class.setdefault(_class_name(variable), [])
            values.append(variable.get_raw_value())
    return values_by_class


def _class_name(variable: Variable[Any]) -> str:
    """Returns the name of a variable's column: of its base class right below `Variable`.

    A class derived from `Param` counts as `Param`.
    """
    name = Variable.__name__
    for cls in type(variable).__mro__:
        if issubclass(cls, Variable) and cls is not Variable:
            name = cls.__name__
    return name
