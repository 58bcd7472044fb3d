"""Mapped functions, with mapped, shared or forked state: vmap."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

from weft.errors import VariableAxisError
from weft.lifting import axes
from weft.lifting.crossing import (
    Cargo,
    Kind,
    Results,
    Units,
    commit,
    depart,
    in_results,
    run,
)
from weft.lifting.names import named_after
from weft.lifting.roles import FORK


def vmap(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_size: int | None = None,
    axis_name: Any = None,
    spmd_axis_name: Any = None,
    metadata: axes.Metadata | None = None,
) -> Callable[..., Any]:
    """Applies `jax.vmap` to a function that takes carriers.

    Args:
        in_axes: a prefix of the arguments: an axis, None, or `Roles` for a carrier.
        out_axes: a prefix of the results, in the same form. Input carriers keep their roles.
        axis_size: size of the new axis, if no argument determines it.
        axis_name: name of the new axis for collectives.
        spmd_axis_name: mesh axis over which the new axis is laid out.
        metadata: passed to axis metadata that gains or loses the axis.

    Raises:
        AxisSizeError: if the mapped axes do not agree.
        RoleError: for a role other than an axis, None or FORK.
        VariableAxisError: if a value with the axis None differs between indices.
    """
    metadata = metadata or {}

    def call(*args: Any) -> Any:
        outer, cargo = depart(kind, args, in_axes)
        units = Units.of_cargo(cargo)
        axes.refuse_roles(units, "vmap", (FORK,))
        n, entered = axes.enter_axis(kind, cargo, units, axis_size, "vmap", metadata)

        structure: list[Any] = []

        def mapped(packed: Any) -> Results:
            results = run(kind, lambda args: fn(*args), Cargo(cargo.static, packed), out_axes)
            structure[:] = [jax.tree.structure(results)]
            return results

        batched = jax.vmap(
            named_after(fn, mapped),
            in_axes=(units.having([0 if r is FORK else r for r in units.roles]).packed(),),
            out_axes=axes.results_prefix(cargo, out_axes, lambda r: None if r is FORK else r),
            axis_size=n,
            axis_name=axis_name,
            spmd_axis_name=spmd_axis_name,
        )
        try:
            results = batched(entered.packed())
        except ValueError as error:
            # JAX detects and locates it after the function ran.
            if found := re.search(r"out_axes(\..+?), got axis spec None but output", str(error)):
                at = _place(kind, cargo, out_axes, structure[0], found[1])
                raise VariableAxisError(
                    f"vmap: {at} is declared to be the same for all, with the axis None, but "
                    "it differs from one index to the next; give it an axis. A variable that is "
                    "made of random numbers is the same for all if its PRNG stream is not split."
                ) from None
            raise
        return commit(kind, outer, axes.leave_axis(kind, cargo, results, out_axes, metadata))

    return call


def _place(kind: Kind, cargo: Cargo, out_axes: Any, structure: Any, shown: str) -> str:
    """Returns the location of a value that JAX shows as a part of the `Results`."""
    results = structure.unflatten(range(structure.num_leaves))
    number = next(
        n
        for path, n in jax.tree_util.tree_leaves_with_path(results)
        if jax.tree_util.keystr(path) == shown
    )
    units = in_results(cargo, results, out_axes)
    i, leaf = next(
        (i, jax.tree.leaves(value).index(number))
        for i, value in enumerate(units.values)
        if number in jax.tree.leaves(value)
    )
    return units.place_in_results(kind, cargo.static.value[0], i, leaf)
