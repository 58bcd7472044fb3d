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

from weft.lifting.kind import (
    Handle,
    Kind,
    PureArgs,
    PureResults,
    Static,
    StaticHalf,
    Structure,
    call_pure,
    commit_results,
    split_args,
)
from weft.lifting.roles import Roles
from weft.lifting.signature import as_tuple, named_after
from weft.lifting.static_keys import IdentityKey, jax_products
from weft.typing import Fn, PyTree

RunCompiled = Callable[
    [jax.stages.Compiled, tuple[Any, ...], dict[str, Any]], Any
]


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

    static: StaticHalf
    structure: Structure
    arrays: dict[str, str]

    @classmethod
    def of(cls, static: StaticHalf, packed: PyTree) -> "CacheKey":
        arrays: dict[str, str] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(packed):
            arrays[jax.tree_util.keystr(path)] = jax.typeof(leaf).str_short()
        return cls(static, jax.tree.structure(packed), arrays)


def cache_key_differences(previous: CacheKey, key: CacheKey) -> list[str]:
    """Returns the differences between two traces, one line each."""
    differences: list[str] = []
    for location in dict.fromkeys((*previous.arrays, *key.arrays)):
        old_type = previous.arrays.get(location, "not there")
        new_type = key.arrays.get(location, "not there")
        if old_type != new_type:
            differences.append(
                f"the array at {location}: {old_type} before, {new_type}"
            )
    differences += _static_differences("", previous.static, key.static)
    if not differences and previous.structure != key.structure:
        differences.append(
            f"the arguments: {previous.structure} before, {key.structure}"
        )
    return differences


def _static_differences(
    location: str, old: StaticHalf, new: StaticHalf
) -> Iterator[str]:
    """Yields a line for each part in which two static values differ."""
    if old == new:
        return
    old_fields, new_fields = _fields(old), _fields(new)
    has_same_fields = old_fields.keys() == new_fields.keys()
    if type(old) is type(new) and old_fields and has_same_fields:
        for name in old_fields:
            yield from _static_differences(
                f"{location}.{name}", old_fields[name], new_fields[name]
            )
        return
    yield f"the static value at {location.lstrip('.')}: {old!r} before, {new!r}"


def _fields(x: StaticHalf) -> Mapping[str, Any]:
    """Returns the parts of a static value by name or position; none of an indivisible one."""
    if isinstance(x, type):
        return {}
    if dataclasses.is_dataclass(x):
        names = [field.name for field in dataclasses.fields(x) if field.compare]
        return {name: getattr(x, name) for name in names}
    if isinstance(x, Mapping):
        return {str(key): value for key, value in x.items()}
    if hasattr(x, "_asdict"):
        return x._asdict()
    if isinstance(x, tuple | list):
        return {str(i): value for i, value in enumerate(x)}
    return {}


class CallStructure(NamedTuple):
    """Value of the static first argument of the function that JAX compiles; see `PureArgs`."""

    products: tuple[IdentityKey, ...]
    static: StaticHalf
    roles: tuple[Any, ...]


class Jitted:
    """Function of carriers under `jax.jit`, as returned by `jit`."""

    def __init__(
        self,
        kind: Kind,
        fn: Fn,
        default_roles: Roles | None,
        static_argnums: frozenset[int],
        static_argnames: frozenset[str],
        **options: Any,
    ):
        def pure(
            structure: Static, *packed: PyTree, **packed_kwargs: PyTree
        ) -> PureResults:
            _, static, roles = structure.value
            packed_args = packed, packed_kwargs
            self._last_traces = self._last_traces[-1:]
            self._last_traces.append(CacheKey.of(static, packed_args))

            def call(
                args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
            ) -> PyTree:
                kwargs = {name: _unwrap_static(x) for name, x in kwargs.items()}
                return fn(*map(_unwrap_static, args), **kwargs)

            return call_pure(
                kind, call, PureArgs(Static(static), Static(roles), packed_args)
            )

        self._last_traces: list[CacheKey] = []
        self._kind = kind
        self._default_roles = default_roles
        self._static_argnums = static_argnums
        self._static_argnames = static_argnames
        self._jitted = jax.jit(
            named_after(fn, pure, leading=("structure",)), **options
        )

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._run(self._jitted, args, kwargs)

    def _run(
        self, jitted: Fn, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> PyTree:
        call = functools.partial(self._run, jitted)
        outer, structure, (packed, packed_kwargs) = self._split_args(
            args, kwargs, call
        )
        results = jitted(structure, *packed, **packed_kwargs)
        return commit_results(self._kind, outer, results)

    def lower(self, /, *args: PyTree, **kwargs: PyTree) -> Lowered:
        """Lowers as `jax.jit(...).lower`; changes of state are written only by compiled calls."""
        _, structure, (packed, packed_kwargs) = self._split_args(args, kwargs)
        lowered = self._jitted.lower(structure, *packed, **packed_kwargs)
        return Lowered(lowered, self._run)

    def explain_recompile(self) -> str:
        """Describes the differences that caused the last trace."""
        if len(self._last_traces) < 2:
            times = "once" if self._last_traces else "not yet"
            return f"traced {times}, so nothing was compiled again."
        differences = cache_key_differences(*self._last_traces)
        return "compiled again, since these differ: " + "; ".join(differences)

    def _split_args(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        call: Fn | None = None,
    ) -> tuple[Handle, Static, PyTree]:
        """Returns the handle of `split_args`, and what JAX gets."""
        if self._static_argnums and args:
            positions = {
                i + len(args) if i < 0 else i for i in self._static_argnums
            }
            args = tuple(
                _wrap_static(x) if i in positions else x
                for i, x in enumerate(args)
            )
        if self._static_argnames:
            kwargs = dict(kwargs)
            for name in self._static_argnames & kwargs.keys():
                kwargs[name] = _wrap_static(kwargs[name])
        outer, pure_args = split_args(
            self._kind,
            (args, kwargs),
            None,
            default_roles=self._default_roles,
            call=call,
        )
        static, roles = pure_args.static.value, pure_args.roles.value
        structure = CallStructure(jax_products(), static, roles)
        return outer, Static(structure), pure_args.packed


def _wrap_static(x: Any) -> Static:
    return (
        x if isinstance(x, Static) else Static(x)
    )  # a second run has wrapped arguments


def _unwrap_static(x: PyTree) -> PyTree:
    return x.value if isinstance(x, Static) else x


def jit(
    kind: Kind,
    fn: Fn,
    *,
    default_roles: Roles | None = None,
    in_shardings: Sequence[PyTree] | None = None,
    out_shardings: PyTree = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    inline: bool = False,
) -> Jitted:
    """Applies `jax.jit` to a function that takes carriers.

    Args:
        default_roles: filters of the crossing parts of each carrier; by default everything.
        in_shardings: a prefix of the arguments, one entry per argument.
        static_argnums: arguments that are hashable values, not arrays.
        donate_argnums: arguments, also carriers, whose buffers may be reused for the results.
        inline: whether an enclosing trace contains the function's operations instead of one call.
    """
    options: dict[str, Any] = {"inline": inline}
    # The `CallStructure` comes before the arguments.
    options["donate_argnums"] = tuple(i + 1 for i in as_tuple(donate_argnums))
    if in_shardings is not None:
        options["in_shardings"] = (None, *in_shardings)
    if out_shardings is not None:
        options["out_shardings"] = PureResults(None, None, out_shardings)  # pyright: ignore[reportArgumentType]
    argnums = frozenset(as_tuple(static_argnums))
    argnames = frozenset(as_tuple(static_argnames))
    return Jitted(kind, fn, default_roles, argnums, argnames, **options)


def eval_shape(kind: Kind, fn: Fn, *, in_axes: PyTree = None) -> Fn:
    """Applies `jax.eval_shape` to a function that takes carriers; changed state becomes shapes.

    Of the `Roles` in `in_axes`, only the filters are used.
    """

    def call(*args: PyTree) -> PyTree:
        outer, pure_args = split_args(kind, args, in_axes, call=call)
        results = jax.eval_shape(_pure(kind, fn), pure_args)
        return commit_results(kind, outer, results)

    return call


def checkify(
    kind: Kind, fn: Fn, *, errors: Any = None, in_axes: PyTree = None
) -> Callable[..., tuple[Any, PyTree]]:
    """Applies `jax.experimental.checkify.checkify` to a function that takes carriers.

    `errors` are the enabled checks, by default `checkify.user_checks`.
    """
    from jax.experimental import (
        checkify as jax_checkify,
    )  # imported only if used

    if errors is None:
        errors = jax_checkify.user_checks
    checked = jax_checkify.checkify(_pure(kind, fn), errors=errors)

    def call(*args: PyTree) -> tuple[Any, PyTree]:
        outer, pure_args = split_args(kind, args, in_axes, call=call)
        error, results = checked(pure_args)
        return error, commit_results(kind, outer, results)

    return call


def _pure(kind: Kind, fn: Fn) -> Callable[[PureArgs], PureResults]:
    return named_after(fn, lambda pure_args: call_pure(kind, fn, pure_args))
