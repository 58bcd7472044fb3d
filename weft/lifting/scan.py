"""Loops with carried, sliced, shared or forked state: scan.

carry, ys = init, []
for i in range(length):
    carry, y = body(carry, xs[i])
    ys.append(y)

`CARRY` state and arguments are the carry, those with an axis are the `xs` (and returned as `ys`
along that axis), `FORK` keys are split into one per iteration, and those with role None are shared
by all iterations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from weft.errors import CarryStructureError, RoleError
from weft.lifting import axes
from weft.lifting.creation import Made, body_with_state, created, groups, with_begun
from weft.lifting.crossing import (
    Kind,
    Parcel,
    Results,
    Static,
    Units,
    commit,
    depart,
    in_results,
    run,
)
from weft.lifting.names import named_after
from weft.lifting.roles import CARRY, FORK, Role, Roles, is_role
from weft.lifting.structure import traced_by_structure

Trees = tuple[Any, ...]


def scan(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    in_axes: Any,
    out_axes: Any,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    split_transpose: bool = False,
    metadata: axes.Metadata | None = None,
    of_carriers: Roles | None = None,
) -> Callable[..., Any]:
    """Applies `jax.lax.scan` to a function that takes carriers.

    Args:
        in_axes: a prefix of the arguments: CARRY, an axis, None, or `Roles` for a carrier.
        out_axes: a prefix of the results: CARRY or the axis along which they are stacked. The n-th
            CARRY result is the n-th CARRY argument of the next iteration.
        length: number of iterations, if no argument determines it.
        metadata: passed to axis metadata that gains or loses the axis.
        of_carriers: the roles of carriers to which `in_axes` gives None.

    Raises:
        AxisSizeError: if the scanned axes do not agree.
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        RoleError: for an unsupported role.
    """
    metadata = metadata or {}
    pure = _on_values(
        kind, fn, out_axes, reverse=reverse, unroll=unroll, _split_transpose=split_transpose
    )
    options = (kind, out_axes, reverse, unroll, split_transpose)
    looped = traced_by_structure(fn, options, pure)

    def call(*args: Any) -> Any:
        outer, cargo = depart(kind, args, in_axes, of_carriers=of_carriers)
        units = Units.of_cargo(cargo)
        axes.refuse_roles(units, "scan", (CARRY, FORK))
        # Even without iterations there are keys for one, see `first` below.
        n, entered = axes.enter_axis(kind, cargo, units, length, "scan", metadata, at_least_keys=1)
        static, _ = cargo.static.value
        results = looped((static, n, trees_of_arguments(in_axes, cargo.packed)), entered)
        return commit(kind, outer, axes.leave_axis(kind, cargo, results, out_axes, metadata))

    return call


def _on_values(
    kind: Kind, fn: Callable[..., Any], out_axes: Any, **of_loop: Any
) -> Callable[[Any, Units], Results]:
    """Returns the loop as a function of crossing values; `of_loop` is for `jax.lax.scan`."""

    def pure(static: Any, units: Units) -> Results:
        of_kind, n, trees = static
        index = n - 1 if of_loop["reverse"] and n else 0

        def first(body: _Body) -> tuple[Any, Any]:
            # Even without iterations there are keys for one, and zeros for all other values.
            return body.carry, [x[index] if x.shape[0] else _zero(x) for x in body.xs]

        make = functools.partial(_Body, kind, fn, out_axes, trees)
        body, run, made = body_with_state("scan", kind, make, of_kind, units, first)

        same: list[bool] = []

        def noted(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            new_carry, ys = run(carry, xs)
            same[:] = [a is b for a, b in zip(carry, new_carry, strict=True)]
            return new_carry, ys

        xs = body.xs if n else [x[:0] for x in body.xs]
        carry, ys = jax.lax.scan(named_after(fn, noted), body.carry, xs, length=n, **of_loop)
        carry = own_where_same(body.carry, carry, same)
        return with_begun(kind, body.results(carry, ys), made)

    return pure


class _Body:
    """Body as a function of the leaves of the carry and of slices.

    Leaves instead of trees, since JAX flattens its arguments repeatedly.
    """

    def __init__(
        self,
        kind: Kind,
        fn: Callable[..., Any],
        out_axes: Any,
        trees: Trees,
        of_kind: Any,
        units: Units,
    ):
        self._kind, self.fn, self._out_axes, self._trees = kind, fn, out_axes, trees
        self._static, self._units = of_kind, units
        self.carry, self._carry_tree = jax.tree.flatten(units.with_roles(CARRY))
        self.xs, self._xs_tree = jax.tree.flatten(
            [_front(v, r) for v, r in units.pairs() if _is_sliced(r)]
        )
        self.made: Made | None = None

    def inside(self, carry: list[Any], xs: list[Any]) -> Units:
        """Returns the state with which an iteration begins."""
        sliced, carried = self._xs_tree.unflatten(xs), self._carry_tree.unflatten(carry)
        return _filled(self._units, sliced).merged(CARRY, carried)

    def __call__(self, carry: list[Any], xs: list[Any]) -> Any:
        inside = self.inside(carry, xs)
        returned, self.collected, made = iteration(
            "scan", self._kind, self.fn, self._out_axes, self._trees, self._static, inside
        )
        if made is not None:
            leaves, tree = jax.tree.flatten(made)
            self.made = Made(tree, self.collected.value)
            return leaves
        # The results are known only after the trace of the body; only their structure is stored.
        new_carry = jax.tree.leaves(returned.with_roles(CARRY))
        ys, self._ys_tree = jax.tree.flatten([v for v, r in returned.pairs() if _is_sliced(r)])
        returned.values = [v if role is None else None for v, role in returned.pairs()]
        self._returned = returned
        return new_carry, ys

    def results(self, carry: list[Any], ys: list[Any]) -> Results:
        """Returns the results of the loop."""
        stacked = _filled(self._returned, self._ys_tree.unflatten(ys), stacked=True)
        merged = stacked.merged(CARRY, self._carry_tree.unflatten(carry))
        return Results(self.collected, *merged.packed())


def iteration(
    transformation: str,
    kind: Kind,
    fn: Callable[..., Any],
    out_axes: Any,
    trees: Trees,
    static: Any,
    units: Units,
) -> tuple[Units, Static, list[Any] | None]:
    """Runs a loop's body once; raises the errors of `scan`.

    Returns the results, their static half, and created state that must exist before the loop, or
    None. With created state, the results are unchecked.
    """
    cargo = units.cargo(static)
    results = run(kind, lambda args: fn(*args), cargo, out_axes)
    returned = in_results(cargo, results, out_axes)
    if (made := created(kind, units, results)) is not None:
        return returned, results.static, made
    _take_over_carry(kind, units, results, returned)
    _check_shared(transformation, kind, static, units, returned)
    _check_carry(transformation, kind, static, units, returned)
    _check_trees(transformation, trees, carried_trees(out_axes, results.packed))
    return returned, results.static, None


def carried_trees(prefix: Any, packed: Any) -> Trees:
    """Returns the structure of each carried part of arguments or results, without its carriers."""
    parts: list[Any] = []

    def note(role: Any, part: Any) -> None:
        if role is CARRY:
            parts.append(part)

    jax.tree.map(note, prefix, packed, is_leaf=is_role)
    # The kind handles results for a carrier, which need not be carriers.
    is_left_out = lambda x: isinstance(x, Parcel | Static)  # noqa: E731
    return tuple(
        jax.tree.structure(
            jax.tree.map(lambda x: None if is_left_out(x) else 0, part, is_leaf=is_left_out)
        )
        for part in parts
    )


def trees_of_arguments(in_axes: Any, args: tuple[Any, ...]) -> Trees:
    """Returns the `carried_trees` of each argument."""
    return carried_trees((in_axes,) * len(args) if is_role(in_axes) else in_axes, args)


def _check_trees(transformation: str, given: Trees, returned: Trees) -> None:
    """Raises CarryStructureError if leaves of the carry are returned in other containers."""
    if len(given) != len(returned) == 1:
        returned = tuple(returned[0].children())
    for before, after in zip(given, returned, strict=False):
        if before != after:
            raise CarryStructureError(
                f"{transformation}: the body returns a carry of another structure than it was "
                f"given: {_as_given(before, after)}"
            )


def _as_given(given: Any, returned: Any) -> str:
    return f"given {given}, returned {returned}."


def own_where_same(before: list[Any], after: list[Any], same: list[bool]) -> list[Any]:
    """Returns the leaves of the final carry; unchanged leaves are the original values."""
    return [
        b if is_same and isinstance(b, jax.Array) else a
        for b, a, is_same in zip(before, after, same, strict=True)
    ]


def _zero(x: Any) -> Any:
    """Returns zeros of the type that `x` has in an iteration."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.zeros_like(jax.random.key_data(x), shape=jax.random.key_data(x).shape[1:])
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.zeros_like(x, shape=x.shape[1:])


def _is_sliced(role: Role) -> bool:
    return role is FORK or isinstance(role, int)


def _front(value: Any, role: Any) -> Any:
    """Moves the scanned axis to the front, as `jax.lax.scan` requires."""
    # `moveaxis` costs a separate trace even if no axis moves.
    if role is FORK or role == 0:
        return value
    return jax.tree.map(lambda x: jnp.moveaxis(x, role, 0), value)


def _filled(units: Units, sliced: Sequence[Any], stacked: bool = False) -> Units:
    """Returns the units with slices or, if `stacked`, stacked values inserted."""
    rest = iter(sliced)

    def pick(value: Any, role: Any) -> Any:
        if not _is_sliced(role):
            return value
        slice_ = next(rest)
        if stacked and role is not FORK and role != 0:
            return jax.tree.map(lambda y: jnp.moveaxis(y, 0, role), slice_)
        return slice_

    return units.having([pick(value, role) for value, role in units.pairs()])


def _take_over_carry(kind: Kind, units: Units, results: Results, returned: Units) -> None:
    """Completes the carried groups that begin `returned` with values that did not change."""
    for i, (before, after, role) in enumerate(groups(units, results)):
        if role is CARRY:
            returned.values[i] = kind.union(before, after)


def _check_shared(
    transformation: str, kind: Kind, static: Any, units: Units, returned: Units
) -> None:
    """Raises RoleError if a body returns or changes a value with the role None."""
    shared = {
        id(leaf) for value, role in units.pairs() if role is None for leaf in jax.tree.leaves(value)
    }
    for i, (value, role) in enumerate(returned.pairs()):
        for number, leaf in enumerate(jax.tree.leaves(value)) if role is None else ():
            if not _is_same(leaf, shared):
                at = returned.place_in_results(kind, static, i, number)
                raise RoleError(changes_shared(transformation, at))


def changes_shared(transformation: str, at: str) -> str:
    """Returns the error message about a body that changes a value shared by all iterations."""
    return (
        f"{transformation}: the body returns or changes what is shared by all iterations (None), "
        f"at {at}; have it carried from one to the next, or give an axis along which to stack it."
    )


def _is_same(leaf: Any, shared: set[int]) -> bool:
    """Returns whether a value is from outside or existed before the trace."""
    return id(leaf) in shared or not isinstance(leaf, jax.core.Tracer)


def _check_carry(
    transformation: str,
    kind: Kind,
    static: Any,
    units: Units,
    returned: Units,
) -> None:
    """Raises CarryStructureError if the body returns a carry that differs from its input."""
    trees = [jax.tree.structure(of.with_roles(CARRY)) for of in (units, returned)]
    if trees[0] != trees[1]:
        raise CarryStructureError(
            f"{transformation}: the body returns a carry of another structure than it was given: "
            + (_first_difference(kind, static, units, returned) or _as_given(*trees))
        )
    carried = units.places(CARRY)
    for i, before, after in zip(
        carried, units.with_roles(CARRY), returned.with_roles(CARRY), strict=True
    ):
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        for number, (old, new) in enumerate(pairs):
            old_type, new_type = jax.typeof(old), jax.typeof(new)
            # Python numbers have weak types, which `jax.lax.scan` promotes.
            same_dtype = old_type.dtype == new_type.dtype or old_type.weak_type
            if old_type.shape != new_type.shape or not same_dtype:
                raise CarryStructureError(
                    f"{transformation}: the carry at {units.place(kind, static, i, number)} is "
                    f"given as {old_type.str_short()} and returned as {new_type.str_short()}; a "
                    "carry keeps its shape and dtype in every iteration."
                )


def _first_difference(kind: Kind, static: Any, units: Units, returned: Units) -> str:
    """Describes entries that only one of two carries has; empty for other differences."""
    carried, after = units.places(CARRY), returned.with_roles(CARRY)
    if len(carried) != len(after):
        return ""
    both = units, units.merged(CARRY, after)
    for i in carried:
        mine, theirs = (_leaf_paths(of.values[i]) for of in both)
        for of, own, other, what in (
            (both[0], mine, theirs, "was given and is not returned"),
            (both[1], theirs, mine, "is returned and was not given"),
        ):
            if only := [number for number, path in enumerate(own) if path not in other]:
                return f"{of.place(kind, static, i, only[0])} {what}."
    return ""


def _leaf_paths(tree: Any) -> list[Any]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
