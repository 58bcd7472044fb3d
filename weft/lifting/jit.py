"""jit: compiled once for equal structure.

All that is not an array crosses as the structure of a pytree, which is part of JAX's cache key.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from weft.lifting.crossing import Cargo, Kind, Results, commit, depart, run


class Jitted:
    """A function of carriers under `jax.jit`; made by `jit`."""

    def __init__(
        self, kind: Kind, fn: Callable[..., Any], donate_argnums: Sequence[int], **kwargs: Any
    ):
        def pure(static: Any, *packed: Any) -> Results:
            return run(kind, lambda args: fn(*args), Cargo(static, packed))

        self._kind = kind
        self._jitted = jax.jit(pure, donate_argnums=[i + 1 for i in donate_argnums], **kwargs)

    def __call__(self, *args: Any) -> Any:
        outer, cargo = depart(self._kind, args, None)
        return commit(self._kind, outer, self._jitted(cargo.static, *cargo.packed))

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """As `jax.jit(...).lower`; nothing is committed."""
        _, cargo = depart(self._kind, args, None)
        return self._jitted.lower(cargo.static, *cargo.packed)


def jit(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    inline: bool = False,
) -> Jitted:
    """`jax.jit` of a function that takes carriers.

    Args:
        kind: whose carriers cross.
        fn: the function, traced once for each structure of its arguments and carriers.
        in_shardings: a prefix of the arguments, one entry per argument.
        out_shardings: a prefix of the results.
        donate_argnums: the arguments whose arrays, also those of carriers, may be used for the
            results.
        inline: whether an enclosing trace sees the function's operations instead of one call.
    """
    donate = [donate_argnums] if isinstance(donate_argnums, int) else donate_argnums
    shardings: dict[str, Any] = {}
    if in_shardings is not None:
        shardings["in_shardings"] = (None, *in_shardings)
    if out_shardings is not None:
        shardings["out_shardings"] = Results(None, None, out_shardings)  # pyright: ignore[reportArgumentType]
    return Jitted(kind, fn, donate, inline=inline, **shardings)
