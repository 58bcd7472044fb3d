"""Tables of modules: what goes into each call, what comes out, and the variables it uses.

The model is run abstractly, so that nothing is computed; each call of a method is seen by an
interceptor. FLOPs are those that XLA counts in the lowered call, and nothing is compiled for them.
"""

import dataclasses
import io
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.core import meta
from weft.core.filters import Filter
from weft.linen.running import InterceptorContext, intercept_methods
from weft.linen.variables import BUT_INTERMEDIATES

if TYPE_CHECKING:
    from weft.linen.module import Module

Path = tuple[str, ...]


@dataclasses.dataclass
class Call:
    """One call of a method.

    Attributes:
        module: whose method it is, not bound.
        path: of the module.
        method: the method's name.
        args: the arguments; arrays are `jax.ShapeDtypeStruct`.
        kwargs: those with a name.
        outputs: the result, likewise.
    """

    module: "Module"
    path: Path
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any = None

    @property
    def title(self) -> str:
        name = type(self.module).__name__
        return name if self.method == "__call__" else f"{name} ({self.method})"

    @property
    def inputs(self) -> Any:
        """The arguments, without a list around a single one."""
        every = [*self.args, self.kwargs] if self.kwargs else list(self.args)
        return every[0] if len(every) == 1 else every


def calls_of(
    module: "Module",
    rngs: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = {},
    mutable: Filter = BUT_INTERMEDIATES,
    show_repeated: bool = False,
) -> tuple[list[Call], dict[str, Any]]:
    """The calls that `init` of a module makes, in their order, and the variables by shape.

    Args:
        module: the module.
        rngs: see `Module.init`.
        args: of its method; `jax.ShapeDtypeStruct` will do for arrays.
        kwargs: of its method, and `method` itself.
        mutable: the collections that are made.
        show_repeated: whether also the calls of a module that was called before.
    """
    calls: list[Call] = []
    seen: set[Path] = set()

    def watch(
        next_fun: Callable[..., Any], args: Any, kwargs: Any, context: InterceptorContext
    ) -> Any:
        path = context.module._bound("the path was asked for").path
        if context.method_name == "setup" or (path in seen and not show_repeated):
            return next_fun(*args, **kwargs)
        seen.add(path)
        shapes_in = _abstract((tuple(args), dict(kwargs)))
        module = context.module.clone(_reset_names=True)
        call = Call(module, path, context.method_name, *shapes_in)
        calls.append(call)
        result = next_fun(*args, **kwargs)
        call.outputs = _abstract(result)
        return result

    leaves, tree = jax.tree.flatten((rngs, args, dict(kwargs)))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]

    def initialize(arrays: list[Any]) -> dict[str, Any]:
        rest = iter(arrays)
        filled = [next(rest) if a else x for x, a in zip(leaves, is_array, strict=True)]
        rngs, args, kwargs = tree.unflatten(filled)
        with intercept_methods(watch):
            return module.init(rngs, *args, mutable=mutable, **kwargs)

    arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]
    return calls, jax.eval_shape(initialize, arrays)


def module_paths(
    module: "Module",
    rngs: Any,
    show_repeated: bool,
    mutable: Filter,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, "Module"]:
    """See `Module.module_paths`."""
    calls, _ = calls_of(module, rngs, args, kwargs, mutable, show_repeated)
    return {"/".join(call.path): call.module for call in calls}


def tabulate(
    module: "Module",
    rngs: Any,
    depth: int | None = None,
    show_repeated: bool = False,
    mutable: Filter = BUT_INTERMEDIATES,
    console_kwargs: Mapping[str, Any] | None = None,
    table_kwargs: Mapping[str, Any] = {},
    column_kwargs: Mapping[str, Any] = {},
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **kwargs: Any,
) -> Callable[..., str]:
    """A function from a module's arguments to a table of the modules that the call uses.

    Args:
        module: the module.
        rngs: see `Module.init`.
        depth: how far down modules have a line of their own; the variables of those further down
            are counted in the last line above them.
        show_repeated: whether a module has a line for each call.
        mutable: the collections that are made.
        console_kwargs: for `rich.console.Console`, such as `width`.
        table_kwargs: for `rich.table.Table`.
        column_kwargs: for each of its columns.
        compute_flops: whether to count the FLOPs of each call.
        compute_vjp_flops: whether to count those of a gradient of each call.
        **kwargs: of the method, and `method` itself.

    Example:
        >>> from weft import linen as nn
        >>> table = nn.tabulate(nn.Dense(2), jax.random.key(0), console_kwargs={"width": 80})
        >>> "6 (24 B)" in table(jnp.ones((4, 2)))
        True
    """

    def tabulated(*args: Any, **more: Any) -> str:
        every = {**kwargs, **more}
        calls, variables = calls_of(module, rngs, args, every, mutable, show_repeated)
        cols = sorted(variables, key=lambda col: (col != "params", col))
        counts = ["flops"] * compute_flops + ["vjp_flops"] * compute_vjp_flops
        rows = []
        seen: set[Path] = set()
        for call in calls:
            if depth is not None and len(call.path) > depth:
                continue
            flops = [_flops(call, variables, rngs, with_vjp="vjp" in name) for name in counts]
            of_cols = [
                "" if call.path in seen else _variables_text(variables[col], call, calls, depth)
                for col in cols
            ]
            seen.add(call.path)
            shown = [_text(call.inputs), _text(call.outputs), *map(str, flops), *of_cols]
            rows.append(["/".join(call.path), call.title, *shown])
        names = ["path", "module", "inputs", "outputs", *counts, *cols]
        footers = [""] * (3 + len(counts)) + ["Total", *(_size(variables[col]) for col in cols)]
        options = {
            "title": f"{type(module).__name__} Summary",
            "caption": f"\nTotal Parameters: {_size(variables)}",
            **table_kwargs,
        }
        return _drawn(names, rows, footers, options, column_kwargs, console_kwargs)

    return tabulated


def _drawn(
    names: list[str],
    rows: list[list[str]],
    footers: list[str],
    options: dict[str, Any],
    column_kwargs: Mapping[str, Any],
    console_kwargs: Mapping[str, Any] | None,
) -> str:
    # Here, since rich takes longer to import than all modules of this package.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    defaults = {"show_header": True, "show_lines": True, "show_footer": True}
    table = Table(**{**defaults, **options})
    for name, footer in zip(names, footers, strict=True):
        total = Text(footer, justify="right" if footer == "Total" else "default")
        table.add_column(name, footer=total, **column_kwargs)
    for row in rows:
        table.add_row(*map(Text, row))
    terminal = {"force_terminal": True, "force_jupyter": False, **(console_kwargs or {})}
    console = Console(file=io.StringIO(), **terminal)
    console.print(table)
    return "\n" + console.file.getvalue() + "\n"  # pyright: ignore[reportAttributeAccessIssue]


def _abstract(tree: Any) -> Any:
    def one(x: Any) -> Any:
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x

    return jax.tree.map(one, tree)


def _text(value: Any) -> str:
    """A tree of shapes in lines: `name: value` in dicts, `- value` in lists."""
    if isinstance(value, Mapping):
        items = ((f"{name}:", v) for name, v in value.items())
        return "\n".join(_entry(mark, v) for mark, v in items) or "{}"
    if isinstance(value, list | tuple):
        return "\n".join(_entry("-", v) for v in value) or "[]"
    if isinstance(value, meta.AxisMetadata):
        names = getattr(value, "names", None)
        where = f" P({', '.join(map(str, names))})" if names else f" {type(value).__name__}"
        return _text(value.unbox()) + where
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return getattr(value, "__name__", None) or str(value)


def _entry(mark: str, value: Any) -> str:
    text = _text(value)
    nested = isinstance(value, Mapping | list | tuple) and bool(value)
    if mark == "-":
        return "- " + text.replace("\n", "\n  ")
    if not nested:
        return f"{mark} {text}"
    step = "" if isinstance(value, list | tuple) else "  "
    return f"{mark}\n{step}" + text.replace("\n", f"\n{step}")


def _variables_text(collection: Any, call: Call, calls: list[Call], depth: int | None) -> str:
    """The variables of a call's module in one collection, and how many there are."""
    below = _at(collection, call.path)
    names = {c.path[len(call.path)] for c in calls if _is_child(c.path, call.path)}
    own = {name: value for name, value in below.items() if name not in names}
    is_last = depth is not None and len(call.path) == depth
    counted = below if is_last else own
    if not jax.tree.leaves(counted):
        return ""
    lines = _text(dict(sorted(own.items()))) + "\n\n" if own else ""
    return lines + _size(counted)


def _is_child(path: Path, above: Path) -> bool:
    return len(path) > len(above) and path[: len(above)] == above


def _at(collection: Any, path: Path) -> Mapping[str, Any]:
    for name in path:
        collection = collection.get(name, {}) if isinstance(collection, Mapping) else {}
    return collection if isinstance(collection, Mapping) else {}


def _size(tree: Any) -> str:
    """How many numbers there are in a tree, and their bytes."""
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape") and hasattr(x, "dtype")]
    numbers = sum(math.prod(x.shape) for x in leaves)
    size = sum(math.prod(x.shape) * jnp.dtype(_bits(x)).itemsize for x in leaves)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{numbers:,} ({size if unit == 'B' else f'{size:.1f}'} {unit})"


def _bits(x: Any) -> Any:
    """The dtype of the numbers that a value is made of."""
    return jnp.uint32 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype


def _flops(call: Call, variables: dict[str, Any], rngs: Any, with_vjp: bool) -> int:
    """The FLOPs that XLA counts in a call, or in a call and the gradient of all that goes in."""
    given = {col: dict(below) for col, v in variables.items() if (below := _at(v, call.path))}
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)]

    def run(variables: Any, arrays: list[Any]) -> Any:
        filled = list(leaves)
        for i, x in zip(at, arrays, strict=True):
            filled[i] = x
        args, kwargs = tree.unflatten(filled)
        options = {"rngs": rngs, "mutable": True, "method": call.method}
        result, changed = call.module.apply(variables, *args, **options, **kwargs)
        return [x for x in jax.tree.leaves((result, changed)) if hasattr(x, "dtype")]

    def backward(variables: Any, arrays: list[Any]) -> Any:
        def f(floats: Any) -> Any:
            return run(*_joined(floats, rest))

        floats, rest = _parted((variables, arrays))
        out, pullback = jax.vjp(f, floats)
        return pullback(jax.tree.map(_cotangent, out))

    lowered = jax.jit(backward if with_vjp else run).lower(given, [leaves[i] for i in at])
    cost: Any = lowered.cost_analysis() or {}
    return int(cost.get("flops", 0))


def _cotangent(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return x if is_float else np.zeros(x.shape, jax.dtypes.float0)


def _parted(tree: Any) -> tuple[Any, Any]:
    """A tree with what has gradients, and one with the rest."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
    floats = jax.tree.map(lambda x: x if is_float(x) else None, tree)
    return floats, jax.tree.map(lambda x: None if is_float(x) else x, tree)


def _joined(a: Any, b: Any) -> Any:
    is_none = lambda x: x is None  # noqa: E731
    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=is_none)
