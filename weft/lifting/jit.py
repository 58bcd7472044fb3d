"""Functions that are compiled once for equal structure, and abstract or checked calls.

Static values cross as the structure of a pytree, which is part of JAX's cache key. A stage of
ahead-of-time compilation wraps JAX's stage of the pure function, with its attributes; carriers
cross in calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from weft.lifting import roles
from weft.lifting.kind import (
    Kind,
    PureArgs,
    PureResults,
    Static,
    call_pure,
    commit_results,
    split_args,
)
from weft.lifting.signature import as_tuple, named_after
from weft.lifting.static_keys import jax_products
from weft.typing import Fn

RunCompiled = Callable[[jax.stages.Compiled, tuple[Any, ...], dict[str, Any]], Any]


class Stage:
    """Wrapper of a stage of JAX, with its attributes; `run` calls the compiled function."""

    def __init__(self, stage: Any, run: RunCompiled):
        self._stage, self._run = stage, run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._stage!r})"


class Traced(Stage):
    """Traced function, with the attributes of `jax.stages.Traced`."""

    def lower(self, **options: Any) -> "Lowered":
        return Lowered(self._stage.lower(**options), self._run)


class Lowered(Stage):
    """Lowered function, with the attributes of `jax.stages.Lowered`."""

    def compile(self, *args: Any, **options: Any) -> "Compiled":
        return Compiled(self._stage.compile(*args, **options), self._run)


class Compiled(Stage):
    """Compiled function, with the attributes of `jax.stages.Compiled`."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._stage, args, kwargs)


class CacheKey(NamedTuple):
    """JAX's cache key of a call: static values, and the type of each array by location."""

    static: Any
    arrays: dict[str, str]

    @classmethod
    def of(cls, static: object, packed: object) -> "CacheKey":
        leaves = jax.tree_util.tree_leaves_with_path(packed)
        arrays = {jax.tree_util.keystr(path): jax.typeof(x).str_short() for path, x in leaves}
        return cls((static, jax.tree.structure(packed)), arrays)


def cache_key_differences(before: CacheKey, after: CacheKey) -> list[str]:
    """Returns the differences between two traces, one line each."""
    lines = []
    for place in dict.fromkeys((*before.arrays, *after.arrays)):
        old, new = before.arrays.get(place), after.arrays.get(place)
        if old != new:
            lines.append(f"the array at {place}: {old or 'not there'} before, {new or 'not there'}")
    of_static = list(_static_differences("", before.static[0], after.static[0]))
    if not lines and not of_static and before.static[1] != after.static[1]:
        of_static = [f"the arguments: {before.static[1]} before, {after.static[1]}"]
    return lines + of_static


def _static_differences(where: str, old: object, new: object) -> Iterator[str]:
    if old == new:
        return
    a, b = _fields_of(old), _fields_of(new)
    if type(old) is type(new) and a is not None and b is not None and a.keys() == b.keys():
        for name in a:
            yield from _static_differences(f"{where}.{name}", a[name], b[name])
        return
    yield f"the static value at {where.lstrip('.')}: {old!r} before, {new!r}"


def _fields_of(x: Any) -> dict[str, Any] | None:
    if isinstance(x, type):
        return None
    if dataclasses.is_dataclass(x):
        return {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.compare}
    if isinstance(x, Mapping):
        return {str(k): v for k, v in x.items()}
    if hasattr(x, "_asdict"):
        return x._asdict()
    if isinstance(x, tuple | list):
        return {str(i): v for i, v in enumerate(x)}
    return None


class Jitted:
    """Function of carriers under `jax.jit`, as returned by `jit`."""

    def __init__(
        self,
        kind: Kind,
        fn: Fn,
        of_carriers: roles.Roles | None,
        static: tuple[frozenset[int], frozenset[str]],
        **kwargs: Any,
    ):
        def pure(products: Static, static: Any, *packed: Any, **packed_kwargs: Any) -> PureResults:
            self._traces = [
                *self._traces[-1:],
                CacheKey.of(static.value[0], (packed, packed_kwargs)),
            ]

            def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                named = {name: _unwrap_static(x) for name, x in kwargs.items()}
                return fn(*map(_unwrap_static, args), **named)

            return call_pure(kind, call, PureArgs(static, (packed, packed_kwargs)))

        self._traces: list[CacheKey] = []
        self._kind = kind
        self._of_carriers = of_carriers
        self._static_argnums, self._static_argnames = static
        self._jitted = jax.jit(named_after(fn, pure, leading=("products", "static")), **kwargs)

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        return self._run(self._jitted, args, kwargs)

    def _run(self, jitted: Fn, args: tuple[Any, ...], kwargs: Any) -> Any:
        call = functools.partial(self._run, jitted)
        outer, pure_args = self._split_args(args, kwargs, call)
        packed, packed_kwargs = pure_args.packed
        results = jitted(Static(jax_products()), pure_args.static, *packed, **packed_kwargs)
        return commit_results(self._kind, outer, results)

    def lower(self, /, *args: object, **kwargs: object) -> Lowered:
        """Lowers as `jax.jit(...).lower`; changes of state are written only by compiled calls."""
        _, pure_args = self._split_args(args, kwargs)
        packed, packed_kwargs = pure_args.packed
        products = Static(jax_products())
        lowered = self._jitted.lower(products, pure_args.static, *packed, **packed_kwargs)
        return Lowered(lowered, self._run)

    def explain_recompile(self) -> str:
        """Describes the differences that caused the last trace."""
        if len(self._traces) < 2:
            times = "once" if self._traces else "not yet"
            return f"traced {times}, so nothing was compiled again."
        return "compiled again, since these differ: " + "; ".join(
            cache_key_differences(*self._traces)
        )

    def _split_args(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Fn | None = None
    ) -> tuple[Any, PureArgs]:
        if self._static_argnums and args:
            static = {i + len(args) if i < 0 else i for i in self._static_argnums}
            args = tuple(_wrap_static(x) if i in static else x for i, x in enumerate(args))
        if self._static_argnames:
            names = self._static_argnames
            kwargs = {k: _wrap_static(x) if k in names else x for k, x in kwargs.items()}
        return split_args(
            self._kind, (args, kwargs), None, of_carriers=self._of_carriers, call=call
        )


def _wrap_static(x: Any) -> Static:
    return x if isinstance(x, Static) else Static(x)  # a second run has wrapped arguments


def _unwrap_static(x: object) -> Any:
    return x.value if isinstance(x, Static) else x


def jit(
    kind: Kind,
    fn: Fn,
    *,
    of_carriers: roles.Roles | None = None,
    in_shardings: Any = None,
    out_shardings: object = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    inline: bool = False,
) -> Jitted:
    """Applies `jax.jit` to a function that takes carriers.

    Args:
        of_carriers: filters of the crossing parts of each carrier; by default everything.
        in_shardings: a prefix of the arguments, one entry per argument.
        static_argnums: arguments that are hashable values, not arrays.
        donate_argnums: arguments, also carriers, whose buffers may be reused for the results.
        inline: whether an enclosing trace contains the function's operations instead of one call.
    """
    options: dict[str, Any] = {"inline": inline}
    if in_shardings is not None:
        options["in_shardings"] = (None, None, *in_shardings)
    if out_shardings is not None:
        options["out_shardings"] = PureResults(None, None, out_shardings)  # pyright: ignore[reportArgumentType]
    # The products and the static half come before the arguments.
    options["donate_argnums"] = tuple(i + 2 for i in as_tuple(donate_argnums))
    static = frozenset(as_tuple(static_argnums)), frozenset(as_tuple(static_argnames))
    return Jitted(kind, fn, of_carriers, static, **options)


def eval_shape(kind: Kind, fn: Fn, *, in_axes: object = None) -> Fn:
    """Applies `jax.eval_shape` to a function that takes carriers; changed state becomes shapes.

    Of the `Roles` in `in_axes`, only the filters are used.
    """

    def call(*args: object) -> Any:
        outer, pure_args = split_args(kind, args, in_axes, call=call)
        return commit_results(kind, outer, jax.eval_shape(_pure(kind, fn), pure_args))

    return call


def checkify(
    kind: Kind, fn: Fn, *, errors: Any = None, in_axes: object = None
) -> Callable[..., tuple[Any, Any]]:
    """Applies `jax.experimental.checkify.checkify` to a function that takes carriers.

    `errors` are the enabled checks, by default `checkify.user_checks`.
    """
    from jax.experimental import checkify as jax_checkify  # imported only if used

    errors = jax_checkify.user_checks if errors is None else errors
    checked = jax_checkify.checkify(_pure(kind, fn), errors=errors)

    def call(*args: object) -> tuple[Any, Any]:
        outer, pure_args = split_args(kind, args, in_axes, call=call)
        error, results = checked(pure_args)
        return error, commit_results(kind, outer, results)

    return call


def _pure(kind: Kind, fn: Fn) -> Callable[[PureArgs], PureResults]:
    return named_after(fn, lambda pure_args: call_pure(kind, fn, pure_args))
