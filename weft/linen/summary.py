"""Tables of modules: inputs, outputs and variables of each call.

The model runs abstractly, with an interceptor that records method calls. FLOPs are counted by XLA
in the lowered call, without compilation.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from weft.core import display as tables
from weft.core.filters import Filter
from weft.core.rngs import RngKeys
from weft.linen import methods, state
from weft.typing import PyTree, T

Path = tuple[str, ...]


@dataclasses.dataclass
class RecordedCall:
    """Recorded call of a method, with `jax.ShapeDtypeStruct` for arrays; `fn` is untransformed."""

    module: state.ModuleVariables
    path: Path
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fn: Callable[..., Any]
    outputs: Any = None
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        name = state.untransformed(type(self.module)).__name__
        return name if self.method == "__call__" else f"{name} ({self.method})"


def record_calls(
    module: state.ModuleVariables,
    rngs: RngKeys,
    args: tuple[PyTree, ...] = (),
    kwargs: Mapping[str, PyTree] = {},
    mutable: Filter = state.ALL_BUT_INTERMEDIATES,
    show_repeated: bool = False,
) -> tuple[list[RecordedCall], dict[str, Any]]:
    """Returns the calls that `init` of a module makes, in order, and the variables by shape.

    Arrays in the arguments may be `jax.ShapeDtypeStruct`; `kwargs` may contain `method`.
    """
    calls: list[RecordedCall] = []
    recorded_paths: set[Path] = set()

    def record(
        next_fun: Callable[..., T],
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        context: state.InterceptorContext,
    ) -> T:
        path = context.module._bound_scope("the path was requested").path
        is_repeated = path in recorded_paths and not show_repeated
        if context.method_name == "setup" or is_repeated:
            return next_fun(*args, **kwargs)
        recorded_paths.add(path)
        input_args, input_kwargs = tables.to_shapes((tuple(args), dict(kwargs)))
        module = context.module.clone(_reset_names=True)
        fn = _method(context)
        call = RecordedCall(
            module, path, context.method_name, input_args, input_kwargs, fn
        )
        calls.append(call)
        result = next_fun(*args, **kwargs)
        call.outputs, call.variables = tables.to_shapes(
            (result, context.module.variables)
        )
        return result

    arrays, fill = tables.split_arrays((rngs, args, dict(kwargs)))

    def initialize(arrays: list[jax.Array]) -> dict[str, Any]:
        rngs, args, kwargs = fill(arrays)
        with state.intercept_methods(record):
            return module.init(rngs, *args, mutable=mutable, **kwargs)

    return calls, jax.eval_shape(initialize, arrays)


def _method(context: state.InterceptorContext) -> Callable[..., PyTree]:
    """Returns the method of a recorded call, to be called alone on a copy of its module."""
    fn = context.orig_method.__func__  # pyright: ignore[reportFunctionMemberAccess]
    if not context.module._state.in_compact:
        return methods.wrap_method(fn)

    @functools.wraps(fn)
    def run(
        module: state.ModuleVariables, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        return fn(module, *args, **kwargs)

    return methods.wrap_method(
        methods.compact(run)
    )  # it may be a helper of a compact method


def without_transforms(module: state.ModuleVariables) -> Any:
    """Returns an unbound copy of a module, of its class before transformations."""
    fields = {name: getattr(module, name) for name in module._field_names}
    return state.untransformed(type(module))(**fields, parent=None)


def tabulate(
    module: state.ModuleVariables,
    rngs: RngKeys,
    depth: int | None = None,
    show_repeated: bool = False,
    mutable: Filter = state.ALL_BUT_INTERMEDIATES,
    console_kwargs: Mapping[str, Any] | None = None,
    table_kwargs: Mapping[str, Any] = {},
    column_kwargs: Mapping[str, Any] = {},
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **kwargs: object,
) -> Callable[..., str]:
    """Returns a function from a module's arguments to a table of the modules that the call uses.

    Args:
        rngs: see `Module.init`.
        depth: maximum depth of listed modules; variables of deeper ones count in the line above.
        show_repeated: whether each call of a module has a line.
        console_kwargs, table_kwargs: for rich's `Console`, such as `width`, and its `Table`.
        compute_flops, compute_vjp_flops: whether to count the FLOPs of each call, of its gradient.

    >>> table = nn.tabulate(nn.Dense(2), jax.random.key(0), console_kwargs={"width": 80})
    >>> "6 (24 B)" in table(jax.numpy.ones((4, 2)))
    True
    """

    def tabulated(*args: PyTree, **call_kwargs: PyTree) -> str:
        calls, variables = record_calls(
            module,
            rngs,
            args,
            {**kwargs, **call_kwargs},
            mutable,
            show_repeated,
        )
        # The parameters come first.
        collections = sorted(
            variables, key=lambda name: (name != "params", name)
        )
        variables = {name: variables[name] for name in collections}
        header = ["path", "module", "inputs", "outputs"]
        if compute_flops:
            header.append("flops")
        if compute_vjp_flops:
            header.append("vjp_flops")
        rows: list[list[str]] = []
        listed_paths: set[Path] = set()
        for call in calls:
            if depth is not None and len(call.path) > depth:
                continue
            row = [
                "/".join(call.path),
                call.title,
                tables.format_inputs(call.args, call.kwargs),
                tables.format_tree(call.outputs),
            ]
            if compute_flops:
                row.append(str(_flops(call, rngs, with_vjp=False)))
            if compute_vjp_flops:
                row.append(str(_flops(call, rngs, with_vjp=True)))
            for collection in variables.values():
                # The variables of a module called twice are shown and counted once.
                is_listed = call.path in listed_paths
                row.append(
                    ""
                    if is_listed
                    else _variables_text(collection, call, calls, depth)
                )
            listed_paths.add(call.path)
            rows.append(row)
        return tables.render_table(
            module,
            header,
            variables,
            rows,
            table_kwargs,
            column_kwargs,
            console_kwargs,
        )

    return tabulated


def _variables_text(
    collection: PyTree,
    call: RecordedCall,
    calls: list[RecordedCall],
    depth: int | None,
) -> str:
    """Returns a module's variables and their size; on the deepest level, that of all below it."""
    variables = _variables_at(collection, call.path)
    level = len(call.path)
    child_names: set[str] = set()
    for other in calls:
        if len(other.path) > level and other.path[:level] == call.path:
            child_names.add(other.path[level])
    own_variables: dict[str, PyTree] = {}
    for name in sorted(variables):
        if name not in child_names:
            own_variables[name] = variables[name]
    is_deepest = depth is not None and level == depth
    counted = variables if is_deepest else own_variables
    if not jax.tree.leaves(counted):
        return ""
    size = tables.format_size(counted)
    if not own_variables:
        return size
    return f"{tables.format_tree(own_variables)}\n\n{size}"


def _variables_at(collection: PyTree, path: Path) -> Mapping[str, PyTree]:
    for name in path:
        collection = (
            collection.get(name, {}) if isinstance(collection, Mapping) else {}
        )
    return collection if isinstance(collection, Mapping) else {}


def _flops(call: RecordedCall, rngs: RngKeys, with_vjp: bool) -> int:
    """Returns XLA's FLOP count of a call, or of a call and the gradient of all inputs."""
    arrays, fill = tables.split_arrays((call.args, call.kwargs))

    def run(variables: Mapping[str, Any], arrays: list[jax.Array]) -> PyTree:
        args, kwargs = fill(arrays)
        return call.module.apply(
            variables, *args, rngs=rngs, mutable=True, method=call.fn, **kwargs
        )

    return tables.flops(run, call.variables, arrays, with_vjp=with_vjp)
