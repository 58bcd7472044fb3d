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
    rngs: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = {},
    mutable: Filter = state.ALL_BUT_INTERMEDIATES,
    show_repeated: bool = False,
) -> tuple[list[RecordedCall], dict[str, Any]]:
    """Returns the calls that `init` of a module makes, in order, and the variables by shape.

    Arrays in the arguments may be `jax.ShapeDtypeStruct`; `kwargs` may contain `method`.
    """
    calls: list[RecordedCall] = []
    seen: set[Path] = set()

    def watch(
        next_fun: Callable[..., Any], args: Any, kwargs: Any, context: state.InterceptorContext
    ) -> Any:
        path = context.module._bound("the path was requested").path
        if context.method_name == "setup" or (path in seen and not show_repeated):
            return next_fun(*args, **kwargs)
        seen.add(path)
        shapes_in = tables.to_shapes((tuple(args), dict(kwargs)))
        module = context.module.clone(_reset_names=True)
        call = RecordedCall(module, path, context.method_name, *shapes_in, fn=_method(context))
        calls.append(call)
        result = next_fun(*args, **kwargs)
        call.outputs, call.variables = tables.to_shapes((result, context.module.variables))
        return result

    arrays, fill = tables.split_arrays((rngs, args, dict(kwargs)))

    def initialize(arrays: list[Any]) -> dict[str, Any]:
        rngs, args, kwargs = fill(arrays)
        with state.intercept_methods(watch):
            return module.init(rngs, *args, mutable=mutable, **kwargs)

    return calls, jax.eval_shape(initialize, arrays)


def _method(context: state.InterceptorContext) -> Callable[..., Any]:
    fn = context.orig_method.__func__  # pyright: ignore[reportFunctionMemberAccess]
    if not context.module._state.in_compact:
        return methods.wrap_method(fn)

    @functools.wraps(fn)
    def run(module: state.ModuleVariables, *args: object, **kwargs: object) -> Any:
        return fn(module, *args, **kwargs)

    return methods.wrap_method(methods.compact(run))  # it may be a helper of a compact method


def without_transforms(module: Any) -> Any:
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

    def tabulated(*args: object, **more: object) -> str:
        every = {**kwargs, **more}
        calls, variables = record_calls(module, rngs, args, every, mutable, show_repeated)
        cols = sorted(variables, key=lambda col: (col != "params", col))
        variables = {col: variables[col] for col in cols}
        counts = ["flops"] * compute_flops + ["vjp_flops"] * compute_vjp_flops
        rows = []
        seen: set[Path] = set()
        for call in calls:
            if depth is not None and len(call.path) > depth:
                continue
            flops = [_flops(call, rngs, with_vjp="vjp" in name) for name in counts]
            of_cols = [
                "" if call.path in seen else _variables_text(collection, call, calls, depth)
                for collection in variables.values()
            ]
            seen.add(call.path)
            inputs = tables.format_inputs(call.args, call.kwargs)
            shown = [inputs, tables.format_tree(call.outputs), *map(str, flops), *of_cols]
            rows.append(["/".join(call.path), call.title, *shown])
        names = ["path", "module", "inputs", "outputs", *counts]
        return tables.render_table(
            module, names, variables, rows, table_kwargs, column_kwargs, console_kwargs
        )

    return tabulated


def _variables_text(
    collection: object, call: RecordedCall, calls: list[RecordedCall], depth: int | None
) -> str:
    below = _at(collection, call.path)
    names = {c.path[len(call.path)] for c in calls if _is_child(c.path, call.path)}
    own = {name: value for name, value in below.items() if name not in names}
    is_last = depth is not None and len(call.path) == depth
    counted = below if is_last else own
    if not jax.tree.leaves(counted):
        return ""
    lines = tables.format_tree(dict(sorted(own.items()))) + "\n\n" if own else ""
    return lines + tables.format_size(counted)


def _is_child(path: Path, above: Path) -> bool:
    return len(path) > len(above) and path[: len(above)] == above


def _at(collection: object, path: Path) -> Mapping[str, Any]:
    for name in path:
        collection = collection.get(name, {}) if isinstance(collection, Mapping) else {}
    return collection if isinstance(collection, Mapping) else {}


def _flops(call: RecordedCall, rngs: RngKeys, with_vjp: bool) -> int:
    """Returns XLA's FLOP count of a call, or of a call and the gradient of all inputs."""
    arrays, fill = tables.split_arrays((call.args, call.kwargs))

    def run(variables: object, arrays: list[Any]) -> Any:
        args, kwargs = fill(arrays)
        options = {"rngs": rngs, "mutable": True, "method": call.fn}
        return call.module.apply(variables, *args, **options, **kwargs)

    return tables.flops(run, call.variables, arrays, with_vjp=with_vjp)
