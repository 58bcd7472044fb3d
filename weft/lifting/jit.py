"""Compilation once for equal structure: jit.

Static values cross as the structure of a pytree, which is part of JAX's cache key. Redefined
functions with the same code and equal values share one compiled function, see
`weft.lifting.functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from weft.lifting.crossing import Cargo, Kind, Results, Static, commit, depart, run
from weft.lifting.functions import AtFirstCall
from weft.lifting.names import named_after
from weft.lifting.recompiles import Trace, differences
from weft.lifting.roles import Roles
from weft.lifting.stack import with_room
from weft.lifting.stages import Lowered


class Jitted:
    """Function of carriers under `jax.jit`, as returned by `jit`."""

    def __init__(self, shared: "AtFirstCall[_Shared]"):
        self._shared = shared

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._shared.value(*args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Lowers as `jax.jit(...).lower`; changes of state are written only by compiled calls."""
        return self._shared.value.lower(*args, **kwargs)

    def explain_recompile(self) -> str:
        """Describes the differences that caused the last trace."""
        return self._shared.value.explain_recompile()


class _Shared:
    """State shared by all equal functions."""

    def __init__(
        self,
        kind: Kind,
        fn: Callable[..., Any],
        of_carriers: Roles | None,
        static_argnums: frozenset[int],
        static_argnames: frozenset[str],
        **kwargs: Any,
    ):
        def pure(static: Any, *packed: Any, **packed_kwargs: Any) -> Results:
            self._traces = [*self._traces[-1:], Trace.of(static.value[0], (packed, packed_kwargs))]

            def call(args: tuple[Any, Any]) -> Any:
                named = {name: _unwrapped(x) for name, x in args[1].items()}
                return fn(*map(_unwrapped, args[0]), **named)

            return with_room(run, kind, call, Cargo(static, (packed, packed_kwargs)))

        self._traces: list[Trace] = []
        self._kind = kind
        self._of_carriers = of_carriers
        self._static_argnums, self._static_argnames = static_argnums, static_argnames
        self._jitted = jax.jit(named_after(fn, pure, leading=("static",)), **kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._jitted, args, kwargs)

    def _run(self, jitted: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        outer, cargo = self._depart(args, kwargs)
        packed, packed_kwargs = cargo.packed
        return commit(self._kind, outer, jitted(cargo.static, *packed, **packed_kwargs))

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        _, cargo = self._depart(args, kwargs)
        packed, packed_kwargs = cargo.packed
        return Lowered(self._jitted.lower(cargo.static, *packed, **packed_kwargs), self._run)

    def explain_recompile(self) -> str:
        if len(self._traces) < 2:
            times = "once" if self._traces else "not yet"
            return f"traced {times}, so nothing was compiled again."
        return "compiled again, since these differ: " + "; ".join(differences(*self._traces))

    def _depart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Cargo]:
        if self._static_argnums and args:
            static = {i + len(args) if i < 0 else i for i in self._static_argnums}
            args = tuple(Static(x) if i in static else x for i, x in enumerate(args))
        if self._static_argnames:
            kwargs = {k: Static(x) if k in self._static_argnames else x for k, x in kwargs.items()}
        return depart(self._kind, (args, kwargs), None, of_carriers=self._of_carriers)


def _unwrapped(x: Any) -> Any:
    return x.value if isinstance(x, Static) else x


def jit(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    of_carriers: Roles | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    inline: bool = False,
) -> Jitted:
    """Applies `jax.jit` to a function that takes carriers.

    Args:
        fn: the function, traced once for each structure of its arguments and carriers.
        of_carriers: filters of the crossing parts of each carrier; by default everything.
        in_shardings: a prefix of the arguments, one entry per argument.
        out_shardings: a prefix of the results.
        static_argnums: arguments that are hashable values, not arrays.
        static_argnames: static arguments given by name.
        donate_argnums: arguments whose buffers, including those of carriers, may be reused for the
            results.
        inline: whether an enclosing trace contains the function's operations instead of one call.
    """
    shardings: dict[str, Any] = {}
    if in_shardings is not None:
        shardings["in_shardings"] = (None, *in_shardings)
    if out_shardings is not None:
        shardings["out_shardings"] = Results(None, None, out_shardings)  # pyright: ignore[reportArgumentType]
    donated = tuple(i + 1 for i in _as_tuple(donate_argnums))
    static = frozenset(_as_tuple(static_argnums)), frozenset(_as_tuple(static_argnames))

    def make() -> _Shared:
        return _Shared(
            kind, fn, of_carriers, *static, donate_argnums=donated, inline=inline, **shardings
        )

    options = (kind, of_carriers, *static, donated, inline, in_shardings, out_shardings)
    return Jitted(AtFirstCall((fn, options), make))


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, int | str) else tuple(x)
