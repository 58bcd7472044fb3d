"""Loops with carried, sliced, shared or forked state: scan, while_loop and fori_loop.

carry, ys = init, []
for i in range(length):
    carry, y = body(carry, xs[i])
    ys.append(y)

`CARRY` state and arguments are the carry, those with an axis are the `xs` (and returned as `ys`
along that axis), `FORK` keys are split into one per iteration; all iterations share the others.

carry = init
while cond(carry):
    carry = body(carry)

The length of such a loop is unknown, so `FORK` keys are folded with the index of the iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.core
import jax.numpy as jnp

from weft.errors import CarryStructureError, RoleError
from weft.lifting import axes, state_creation, trace_cache
from weft.lifting import kind as kind_lib
from weft.lifting.kind import Kind, PureResults, StateNode, Static, Units
from weft.lifting.roles import CARRY, FORK, Role, Roles, changed_shared_message, is_role
from weft.lifting.signature import named_after
from weft.typing import ArrayLike, Fn

CarryStructures = tuple[Any, ...]


def scan(
    kind: Kind,
    fn: Fn,
    *,
    in_axes: object,
    out_axes: object,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    split_transpose: bool = False,
    metadata: axes.Metadata | None = None,
    of_carriers: Roles | None = None,
) -> Fn:
    """Applies `jax.lax.scan` to a function that takes carriers.

    Args:
        in_axes: a prefix of the arguments: CARRY, an axis, None, or `Roles` for a carrier.
        out_axes: a prefix of the results: CARRY or the axis along which they are stacked. The n-th
            CARRY result is the n-th CARRY argument of the next iteration.
        of_carriers: the roles of carriers to which `in_axes` gives None.

    Raises:
        AxisSizeError: if the scanned axes do not agree, or nothing determines the length.
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        RoleError: for an unsupported role.
    """
    metadata = metadata or {}
    options = {"reverse": reverse, "unroll": unroll, "_split_transpose": split_transpose}

    def pure(static: tuple[int, CarryStructures], units: Units) -> PureResults:
        n, trees = static
        index = n - 1 if reverse and n else 0

        def first(body: LoopBody) -> tuple[Any, Any]:
            # Even without iterations there are keys for one, and zeros for all other values.
            return body.carry, [x[index] if x.shape[0] else _zeros_like_slice(x) for x in body.xs]

        make = functools.partial(LoopBody, fn, out_axes, trees)
        body, step, created = state_creation.body_with_state(make, units, first)
        xs = body.xs if n else [x[:0] for x in body.xs]
        carry, ys = jax.lax.scan(named_after(fn, step), body.carry, xs, length=n, **options)
        return state_creation.final_results(kind, body.results(carry, ys), created)

    looped = trace_cache.jit_outside_traces(fn, pure)

    def call(*args: object) -> Any:
        outer, pure_args = kind_lib.split_args(
            kind, args, in_axes, of_carriers=of_carriers, call=call
        )
        units = Units.of_pure_args(kind, pure_args)
        axes.check_roles(units, "scan", (CARRY, FORK))
        # Even without iterations there are keys for one, see `first` above.
        n, entered = axes.enter_axis(units, length, "scan", metadata, at_least_keys=1)
        results = looped((n, carry_structures_of_args(in_axes, pure_args.packed)), entered)
        return kind_lib.commit_results(
            kind, outer, axes.leave_axis(units, results, out_axes, metadata)
        )

    return call


class LoopBody:
    """Body of a loop as a function of the leaves of the carry and of an iteration's slices.

    Leaves instead of trees, since JAX flattens its arguments repeatedly. The results are known only
    after the trace of the body; only their structure is stored.

    Attributes:
        carry, xs: the initial carry, and the stacked slices.
        same: for each leaf of the carry, whether the body returns it unchanged.
        collected: the static half of the results.
        created: the state that a run has created and that must exist before the loop.
    """

    transformation = "scan"

    def __init__(self, fn: Fn, out_axes: object, trees: CarryStructures, units: Units):
        self.fn, self.kind, self.static = fn, units.kind, units.static
        self._out_axes, self._trees, self._units = out_axes, trees, units
        leaves, self._carry_tree = jax.tree.flatten(units.values_with_role(CARRY))
        # JAX carries no references; all iterations use the same ones.
        self._refs = [x if isinstance(x, jax.Ref) else None for x in leaves]
        self.carry = _without_refs(leaves)
        self.xs, self._xs_tree = jax.tree.flatten(
            [_move_axis_to_front(v, r) for v, r in units.pairs() if _is_sliced(r)]
        )
        self.created: state_creation.CreatedState | None = None

    def inside(self, carry: list[Any], xs: object) -> Units:
        """Returns the state with which an iteration begins."""
        sliced, carried = self._xs_tree.unflatten(xs), self._carried(carry)
        return _with_slices(self._units, sliced).with_role_replaced(CARRY, carried)

    def __call__(self, carry: list[Any], xs: object) -> Any:
        """Returns the next carry and slices of the results, or created state."""
        units = self.inside(carry, xs)
        results = kind_lib.call_pure(self.kind, self.fn, units.pure_args(), self._out_axes)
        returned = units.of_results(results, self._out_axes)
        self.collected = results.static
        new = state_creation.created_groups(units, results)
        # Values that did not change complete the carried groups, which come first.
        for i, (before, after, role) in enumerate(
            state_creation.groups_before_and_after(units, results)
        ):
            if role is CARRY:
                returned.values[i] = self.kind.union(before, after)
        if new is not None:
            leaves, tree = jax.tree.flatten(new)
            self.created = state_creation.CreatedState(tree, self.collected.value)
            return leaves, jax.tree.leaves(returned.values)
        _check_shared(self.transformation, units, returned)
        _check_carry(self.transformation, units, returned)
        after = carry_structures(self._out_axes, results.packed)
        _check_carry_structures(self.transformation, self._trees, after)
        new_carry = _without_refs(jax.tree.leaves(returned.values_with_role(CARRY)))
        ys, self._ys_tree = jax.tree.flatten([v for v, r in returned.pairs() if _is_sliced(r)])
        self._returned = returned.mapped(lambda value, role: value if role is None else None)
        self.same = [a is b for a, b in zip(carry, new_carry, strict=True)]
        return new_carry, ys

    @property
    def has_refs(self) -> bool:
        """True if the carry has references."""
        return any(ref is not None for ref in self._refs)

    def _carried(self, leaves: Iterable[Any]) -> list[Any]:
        """Returns the carried values from their leaves without references."""
        rest = iter(leaves)
        return self._carry_tree.unflatten(next(rest) if ref is None else ref for ref in self._refs)

    def results(self, carry: list[Any], ys: list[Any]) -> PureResults:
        """Returns the results of the loop; unchanged leaves of the carry are the initial values."""
        final_carry: list[Any] = []
        for initial, final, is_same in zip(self.carry, carry, self.same, strict=True):
            final_carry.append(initial if is_same and isinstance(initial, jax.Array) else final)
        stacked = _with_slices(self._returned, self._ys_tree.unflatten(ys), stacked=True)
        merged = stacked.with_role_replaced(CARRY, self._carried(final_carry))
        return PureResults(self.collected, *merged.packed())


def carry_structures(prefix: object, packed: object) -> CarryStructures:
    """Returns the structure of each carried part of arguments or results, without its carriers."""
    parts: list[Any] = []

    def note(role: object, part: object) -> None:
        if role is CARRY:
            parts.append(part)

    jax.tree.map(note, prefix, packed, is_leaf=is_role)
    # The kind handles results for a carrier, which need not be carriers.
    is_left_out = lambda x: isinstance(x, StateNode | Static)  # noqa: E731
    return tuple(
        jax.tree.structure(
            jax.tree.map(lambda x: None if is_left_out(x) else 0, part, is_leaf=is_left_out)
        )
        for part in parts
    )


def carry_structures_of_args(in_axes: object, args: tuple[Any, ...]) -> CarryStructures:
    """Returns the `carry_structures` of each argument."""
    return carry_structures((in_axes,) * len(args) if is_role(in_axes) else in_axes, args)


def _check_carry_structures(
    transformation: str, given: CarryStructures, returned: CarryStructures
) -> None:
    if len(given) != len(returned) == 1:
        returned = tuple(returned[0].children())
    for before, after in zip(given, returned, strict=False):
        if before != after:
            raise CarryStructureError(
                f"{transformation}: the body returns a carry of another structure than it was "
                f"given: {_describe_structures(before, after)}"
            )


def _describe_structures(given: object, returned: object) -> str:
    return f"given {given}, returned {returned}."


def _zeros_like_slice(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.zeros_like(jax.random.key_data(x), shape=jax.random.key_data(x).shape[1:])
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.zeros_like(x, shape=x.shape[1:])


def _without_refs(leaves: Iterable[Any]) -> list[Any]:
    return [x for x in leaves if not isinstance(x, jax.Ref)]


def _is_sliced(role: Role) -> bool:
    return role is FORK or isinstance(role, int)


def _move_axis_to_front(value: Any, role: Any) -> Any:
    # `moveaxis` costs a separate trace even if no axis moves.
    if role is FORK or role == 0:
        return value
    return jax.tree.map(lambda x: jnp.moveaxis(x, role, 0), value)


def _with_slices(units: Units, sliced: Sequence[Any], stacked: bool = False) -> Units:
    """Returns the units with slices or, if `stacked`, stacked values inserted."""
    rest = iter(sliced)

    def pick(value: Any, role: Any) -> Any:
        if not _is_sliced(role):
            return value
        slice_ = next(rest)
        if stacked and role is not FORK and role != 0:
            return jax.tree.map(lambda y: jnp.moveaxis(y, 0, role), slice_)
        return slice_

    return units.mapped(pick)


def _check_shared(transformation: str, units: Units, returned: Units) -> None:
    shared = {
        id(leaf) for value, role in units.pairs() if role is None for leaf in jax.tree.leaves(value)
    }
    for i, (value, role) in enumerate(returned.pairs()):
        for number, leaf in enumerate(jax.tree.leaves(value)) if role is None else ():
            # Other values that are not of the trace existed before it.
            if isinstance(leaf, jax.core.Tracer) and id(leaf) not in shared:
                at = returned.location(i, number, of_results=True)
                raise RoleError(changed_shared_message(transformation, at))


def _check_carry(transformation: str, units: Units, returned: Units) -> None:
    """Raises CarryStructureError if the body returns a carry that differs from its input."""
    trees = [jax.tree.structure(of.values_with_role(CARRY)) for of in (units, returned)]
    if trees[0] != trees[1]:
        raise CarryStructureError(
            f"{transformation}: the body returns a carry of another structure than it was given: "
            + (_first_difference(units, returned) or _describe_structures(*trees))
        )
    carried = units.indices_with_role(CARRY)
    for i, before, after in zip(
        carried, units.values_with_role(CARRY), returned.values_with_role(CARRY), strict=True
    ):
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        for number, (old, new) in enumerate(pairs):
            if isinstance(old, jax.Ref) and old is not new:
                raise CarryStructureError(
                    f"{transformation}: the body replaces the reference at "
                    f"{units.location(i, number)}; write its value instead."
                )
            old_type, new_type = jax.typeof(old), jax.typeof(new)
            # Python numbers have weak types, which `jax.lax.scan` promotes.
            same_dtype = old_type.dtype == new_type.dtype or old_type.weak_type
            if old_type.shape != new_type.shape or not same_dtype:
                raise CarryStructureError(
                    f"{transformation}: the carry at {units.location(i, number)} is given as "
                    f"{old_type.str_short()} and returned as {new_type.str_short()}; a "
                    "carry keeps its shape and dtype in every iteration."
                )


def _first_difference(units: Units, returned: Units) -> str:
    """Describes entries that only one of two carries has; empty for other differences."""
    carried, after = units.indices_with_role(CARRY), returned.values_with_role(CARRY)
    if len(carried) != len(after):
        return ""
    both = units, units.with_role_replaced(CARRY, after)
    for i in carried:
        mine, theirs = (
            [path for path, _ in jax.tree_util.tree_leaves_with_path(of.values[i])] for of in both
        )
        for of, own, other, what in (
            (both[0], mine, theirs, "was given and is not returned"),
            (both[1], theirs, mine, "is returned and was not given"),
        ):
            if only := [number for number, path in enumerate(own) if path not in other]:
                return f"{of.location(i, only[0])} {what}."
    return ""


def while_loop(kind: Kind, cond_fn: Fn, body_fn: Fn, *, in_axes: object) -> Fn:
    """Applies `jax.lax.while_loop` to functions that take carriers.

    The result returns the last values of the carried arguments; changes by `cond_fn` are dropped.

    Args:
        body_fn: takes the arguments and returns the next values of the carried ones.
        in_axes: a prefix of the arguments: CARRY, None, or `Roles` of a carrier, FORK for keys.

    Raises:
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        RoleError: for an unsupported role, or a condition that reads references (`jax.Ref`).
    """

    def pure(trees: CarryStructures, units: Units) -> PureResults:
        make = functools.partial(_WhileBody, body_fn, CARRY, trees)
        body, step, created = state_creation.body_with_state(
            make, units, lambda body: (body.carry, jnp.int32(0))
        )

        def is_on(state: tuple[Any, list[Any]]) -> Any:
            i, carry = state
            inside = body.inside(carry, i).with_static(units.static)
            return kind_lib.call_pure(kind, cond_fn, inside.pure_args()).packed

        def iteration(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            i, carry = state
            return i + 1, step(carry, i)[0]

        named_after(cond_fn, is_on)
        named_after(body_fn, iteration)
        start = jnp.int32(0), body.carry
        if body.has_refs and jax.make_jaxpr(is_on)(start).effects:
            raise RoleError(
                "while_loop: the condition reads a jax.Ref (a variable with ref=True), and JAX "
                "does not show it what the body writes there; carry the value that it reads."
            )
        _, carry = jax.lax.while_loop(is_on, iteration, start)
        return state_creation.final_results(kind, body.results(carry, []), created)

    looped = trace_cache.jit_outside_traces(body_fn, pure)

    def call(*args: object) -> Any:
        outer, pure_args = kind_lib.split_args(kind, args, in_axes, call=call)
        units = Units.of_pure_args(kind, pure_args)
        axes.check_roles(units, "while_loop", (CARRY, FORK))
        if any(isinstance(role, int) for role in units.roles):
            raise RoleError("while_loop: its length is unknown, so it has no axis; give CARRY.")

        results = looped(carry_structures_of_args(in_axes, pure_args.packed), units)
        return kind_lib.commit_results(kind, outer, results)

    return call


class _WhileBody(LoopBody):
    """Body whose slices are the iteration's index, which is folded into keys."""

    transformation = "while_loop"

    def inside(self, carry: list[Any], xs: object) -> Units:
        def folded_keys(value: Any, role: Any) -> Any:
            return kind_lib.fold_keys(value, xs) if role is FORK else value

        folded = self._units.mapped(folded_keys)
        return folded.with_role_replaced(CARRY, self._carried(carry))


def fori_loop(
    kind: Kind,
    lower: ArrayLike,
    upper: ArrayLike,
    body_fn: Fn,
    *,
    in_axes: object,
    unroll: int | bool | None = None,
) -> Fn:
    """Applies `jax.lax.fori_loop` to a function that takes carriers; see `while_loop`.

    Args:
        upper: the index after the last. Reverse differentiation requires a Python number.
        body_fn: `body_fn(i, *args)` returns the next values of the carried arguments.
        unroll: number of iterations to unroll, if both bounds are Python numbers.
    """

    def body(i: Any, *args: Any) -> tuple[Any, Any]:
        return i + 1, body_fn(i, *args)

    named_after(body_fn, body)

    def call(*args: object) -> Any:
        roles = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        if isinstance(lower, int) and isinstance(upper, int):
            loop = scan(
                kind,
                named_after(body_fn, lambda *args: (body(*args), None)),
                in_axes=(CARRY, *roles),
                out_axes=(CARRY, None),
                length=max(upper - lower, 0),
                unroll=1 if unroll is None else unroll,
            )
            return loop(jnp.int32(lower), *args)[0][1]
        loop = while_loop(kind, lambda i, *_: i < upper, body, in_axes=(CARRY, *roles))
        return loop(jnp.asarray(lower, jnp.int32), *args)[1]

    return call
