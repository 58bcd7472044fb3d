"""Rematerialization in the backward pass: remat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from weft.lifting.crossing import Cargo, Kind, Results, commit, depart, run
from weft.lifting.functions import shared_by_equal_functions
from weft.lifting.names import named_after


def remat(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
    in_axes: Any = None,
) -> Callable[..., Any]:
    """Applies `jax.checkpoint` to a function that takes carriers.

    `in_axes` is a prefix of the arguments, of whose `Roles` only the filters are used.
    """

    def pure(cargo: Cargo) -> Results:
        return run(kind, lambda args: fn(*args), cargo)

    traced = shared_by_equal_functions(
        (fn, kind, prevent_cse, policy),
        lambda: jax.checkpoint(named_after(fn, pure), prevent_cse=prevent_cse, policy=policy),  # pyright: ignore[reportArgumentType]
    )

    def call(*args: Any) -> Any:
        outer, cargo = depart(kind, args, in_axes)
        return commit(kind, outer, traced(cargo))

    return call
