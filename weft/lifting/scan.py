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
from typing import NamedTuple

import jax.core
import jax.numpy as jnp
from jax.tree_util import tree_leaves_with_path

from weft.errors import CarryStructureError, ForkError, RoleError
from weft.lifting import axes
from weft.lifting.kind import (
    Group,
    Kind,
    PureResults,
    StateNode,
    Static,
    Structure,
    call_pure,
    commit_results,
    split_args,
)
from weft.lifting.roles import (
    CARRY,
    FORK,
    Role,
    Roles,
    changed_shared_message,
    is_role,
)
from weft.lifting.signature import named_after
from weft.lifting.state_creation import (
    FirstIteration,
    created_groups,
    final_results,
    prepare_loop,
)
from weft.lifting.trace_cache import jit_outside_traces
from weft.lifting.units import Units
from weft.typing import ArrayLike, Fn, PyTree, Tensor

CarryStructures = tuple[Structure, ...]


def scan(
    kind: Kind,
    fn: Fn,
    *,
    in_axes: PyTree,
    out_axes: PyTree,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    split_transpose: bool = False,
    metadata: axes.Metadata | None = None,
    default_roles: Roles | None = None,
) -> Fn:
    """Applies `jax.lax.scan` to a function that takes carriers.

    Args:
        in_axes: a prefix of the arguments: CARRY, an axis, None, or `Roles` for a carrier.
        out_axes: a prefix of the results: CARRY or the axis along which they are stacked. The n-th
            CARRY result is the n-th CARRY argument of the next iteration.
        default_roles: the roles of carriers to which `in_axes` gives None.

    Raises:
        AxisSizeError: if the scanned axes do not agree, or nothing determines the length.
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        RoleError: for an unsupported role.
    """
    metadata = metadata or {}

    def pure(static: tuple[int, CarryStructures], units: Units) -> PureResults:
        n, structures = static

        def first_inputs(body: LoopBody) -> tuple[list[Tensor], list[Tensor]]:
            index = n - 1 if reverse and n else 0
            x: list[Tensor] = []
            for leaf in body.xs:
                # Even without iterations there are keys for one, and zeros for all other values.
                x.append(
                    leaf[index] if leaf.shape[0] else _zeros_like_slice(leaf)
                )
            return body.carry, x

        make_body = functools.partial(LoopBody, fn, out_axes, structures)
        body, step, created = prepare_loop(make_body, units, first_inputs)
        xs = body.xs if n else [leaf[:0] for leaf in body.xs]
        carry, ys = jax.lax.scan(
            named_after(fn, step),
            body.carry,
            xs,
            length=n,
            reverse=reverse,
            unroll=unroll,
            _split_transpose=split_transpose,
        )
        return final_results(kind, body.results(carry, ys), created)

    looped = jit_outside_traces(fn, pure)

    def call(*args: PyTree) -> PyTree:
        outer, pure_args = split_args(
            kind, args, in_axes, default_roles=default_roles, call=call
        )
        units = Units.of_pure_args(kind, pure_args)
        axes.check_roles(units, "scan", (CARRY, FORK))
        # Even without iterations there are keys for one, see `first_inputs`.
        n, entered = axes.enter_axis(
            units, length, "scan", metadata, at_least_keys=1
        )
        structures = carry_structures_of_args(in_axes, pure_args.packed)
        results = looped((n, structures), entered)
        results = axes.leave_axis(units, results, out_axes, metadata)
        return commit_results(kind, outer, results)

    return call


class BodyOutcome(NamedTuple):
    """Description of a loop body's results, besides their arrays, by its trace.

    Attributes:
        static: the static half that the kind has collected.
        shared: the units of the results, with only the values that all iterations share.
        y_structure: the structure of the slices.
        is_unchanged: for each leaf of the carry, whether the body returns it as it was.
    """

    static: Static
    shared: Units
    y_structure: Structure
    is_unchanged: list[bool]


class LoopBody:
    """Body of a loop as a function of arrays, as `jax.lax.scan` takes it.

    An iteration fills arrays into the units of the arguments, calls the function on carriers that
    are merged from these, and takes the arrays of the next carry and of `y` from the units of the
    results. The arrays are leaves, not trees, since JAX flattens its arguments repeatedly.

    Attributes:
        carry, xs: the leaves of the initial carry, and of the values to slice, with the axis first.
        outcome: set when JAX has traced the body, as only then its results are known.
    """

    transformation = "scan"

    def __init__(
        self,
        fn: Fn,
        out_axes: PyTree,
        structures: CarryStructures,
        units: Units,
    ):
        self.fn = fn
        self.outcome: BodyOutcome | None = None
        self._out_axes = out_axes
        self._carry_structures = structures
        self._units = units
        carried = units.values_with_role(CARRY)
        leaves, self._carry_structure = jax.tree.flatten(carried)
        # JAX carries no references; all iterations use the same ones.
        self._refs = [
            leaf if isinstance(leaf, jax.Ref) else None for leaf in leaves
        ]
        self.carry: list[Tensor] = _without_refs(leaves)
        stacked: list[PyTree] = []
        for unit, value in units.items():
            if _is_sliced(unit.role):
                stacked.append(_move_axis_to_front(value, unit.role))
        self.xs: list[Tensor]
        self.xs, self._x_structure = jax.tree.flatten(stacked)

    def __call__(
        self, carry: list[Tensor], x: PyTree
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs an iteration; returns the next carry, and `y`."""
        units = self.inside(carry, x)
        results = call_pure(
            units.kind, self.fn, units.pure_args(), self._out_axes
        )
        return self._next(carry, units, results)

    def first_iteration(self, carry: list[Tensor], x: PyTree) -> FirstIteration:
        """Runs an iteration; returns the state with which the loop has to begin, if it makes any.

        Otherwise, returns the next carry, and `y`.
        """
        units = self.inside(carry, x)
        results = call_pure(
            units.kind, self.fn, units.pure_args(), self._out_axes
        )
        created = created_groups(units, results)
        if created is not None:
            return FirstIteration(created, results.static, [], [])
        next_carry, y = self._next(carry, units, results)
        return FirstIteration(None, results.static, next_carry, y)

    def inside(self, carry: list[Tensor], x: PyTree) -> Units:
        """Returns the units with which an iteration begins."""
        sliced_values = self._x_structure.unflatten(x)
        sliced_units = _with_sliced(self._units, sliced_values)
        return sliced_units.with_role_replaced(CARRY, self._with_refs(carry))

    def _next(
        self, carry: list[Tensor], units: Units, results: PureResults
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the next carry and `y` of an iteration with these results; sets the outcome."""
        returned = units.of_results(results, self._out_axes)
        # The groups of the input carriers come first and have only what has changed; the next
        # iteration needs the unchanged values, too.
        for i, group in enumerate(units.groups()):
            if returned.layout.units[i].role is CARRY:
                returned.values[i] = units.kind.union(group, returned.values[i])
        _check_shared(self.transformation, units, returned)
        _check_carry(self.transformation, units, returned)
        structures = carry_structures(self._out_axes, results.packed)
        _check_carry_structures(
            self.transformation, self._carry_structures, structures
        )

        carried = returned.values_with_role(CARRY)
        next_carry = _without_refs(jax.tree.leaves(carried))
        sliced = [
            value for unit, value in returned.items() if _is_sliced(unit.role)
        ]
        y, y_structure = jax.tree.flatten(sliced)
        self.outcome = BodyOutcome(
            static=results.static,
            shared=returned.mapped(
                lambda value, role: value if role is None else None
            ),
            y_structure=y_structure,
            is_unchanged=[
                old is new for old, new in zip(carry, next_carry, strict=True)
            ],
        )
        return next_carry, y

    def results(self, carry: list[Tensor], ys: list[Tensor]) -> PureResults:
        """Returns the results of the loop from its last carry and its stacked slices."""
        outcome = self.outcome
        assert outcome is not None, "JAX has traced the body"
        final_carry: list[Tensor] = []
        leaves = zip(self.carry, carry, outcome.is_unchanged, strict=True)
        for initial, final, is_unchanged in leaves:
            # The caller's own array, so that a surrounding function sees that it did not change.
            is_kept = is_unchanged and isinstance(initial, jax.Array)
            final_carry.append(initial if is_kept else final)
        stacked_values = outcome.y_structure.unflatten(ys)
        stacked_units = _with_sliced(outcome.shared, stacked_values).mapped(
            _move_axis_from_front
        )
        final_units = stacked_units.with_role_replaced(
            CARRY, self._with_refs(final_carry)
        )
        state_nodes, packed = final_units.packed()
        return PureResults(outcome.static, state_nodes, packed)

    @property
    def has_refs(self) -> bool:
        """True if the carry has references."""
        return any(ref is not None for ref in self._refs)

    def _with_refs(self, carry: Iterable[Tensor]) -> list[PyTree]:
        """Returns the carried values from their leaves without references."""
        arrays = iter(carry)
        leaves = [next(arrays) if ref is None else ref for ref in self._refs]
        return self._carry_structure.unflatten(leaves)


def _zeros_like_slice(xs: Tensor) -> Tensor:
    if jnp.issubdtype(xs.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(xs)
        zeros = jnp.zeros_like(data, shape=data.shape[1:])
        return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(xs))
    return jnp.zeros_like(xs, shape=xs.shape[1:])


def _without_refs(leaves: Iterable[Tensor | jax.Ref]) -> list[Tensor]:
    return [leaf for leaf in leaves if not isinstance(leaf, jax.Ref)]


def _is_sliced(role: Role) -> bool:
    return role is FORK or isinstance(role, int)


def _move_axis_to_front(value: PyTree, role: Role) -> PyTree:
    # `moveaxis` costs a separate trace even if no axis moves.
    if not isinstance(role, int) or role == 0:
        return value
    return jax.tree.map(lambda x: jnp.moveaxis(x, role, 0), value)


def _move_axis_from_front(value: PyTree, role: Role) -> PyTree:
    if not isinstance(role, int) or role == 0:
        return value
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, role), value)


def _with_sliced(units: Units, sliced: Sequence[PyTree]) -> Units:
    """Returns the units with other values for those that have an axis or are forked, in order."""
    remaining = iter(sliced)
    return units.mapped(
        lambda value, role: next(remaining) if _is_sliced(role) else value
    )


def carry_structures(prefix: PyTree, packed: PyTree) -> CarryStructures:
    """Returns the structure of each carried part of arguments or results, without its carriers."""
    carried_parts: list[PyTree] = []

    def collect_carried(role: Role | Roles, part: PyTree) -> None:
        if role is CARRY:
            carried_parts.append(part)

    jax.tree.map(collect_carried, prefix, packed, is_leaf=is_role)

    # The kind handles results for a carrier, which need not be carriers.
    def is_of_kind(x: PyTree) -> bool:
        return isinstance(x, StateNode | Static)

    structures: list[Structure] = []
    for part in carried_parts:
        placeholders = jax.tree.map(
            lambda x: None if is_of_kind(x) else 0, part, is_leaf=is_of_kind
        )
        structures.append(jax.tree.structure(placeholders))
    return tuple(structures)


def carry_structures_of_args(
    in_axes: PyTree, args: tuple[PyTree, ...]
) -> CarryStructures:
    """Returns the `carry_structures` of each argument."""
    prefix = (in_axes,) * len(args) if is_role(in_axes) else in_axes
    return carry_structures(prefix, args)


def _check_shared(transformation: str, units: Units, returned: Units) -> None:
    """Raises RoleError if the body returns or changes what all iterations share."""
    # Unchanged values are the same tracers; a change makes a new one.
    shared_ids: set[int] = set()
    for unit, value in units.items():
        if unit.role is None:
            shared_ids.update(map(id, jax.tree.leaves(value)))
    for i, (unit, value) in enumerate(returned.items()):
        if unit.role is not None:
            continue
        for number, leaf in enumerate(jax.tree.leaves(value)):
            # Values other than tracers existed before the trace.
            if isinstance(leaf, jax.core.Tracer) and id(leaf) not in shared_ids:
                location = returned.location(i, number)
                raise RoleError(
                    changed_shared_message(transformation, location)
                )


def _check_carry(transformation: str, units: Units, returned: Units) -> None:
    """Raises CarryStructureError if the body returns a carry that differs from its input."""
    indices = units.indices_with_role(CARRY)
    carry = units.values_with_role(CARRY)
    next_carry = returned.values_with_role(CARRY)
    structure, next_structure = (
        jax.tree.structure(carry),
        jax.tree.structure(next_carry),
    )
    if structure != next_structure:
        difference = f"given {structure}, returned {next_structure}."
        if len(carry) == len(next_carry):
            difference = _first_difference(units, next_carry) or difference
        raise CarryStructureError(
            f"{transformation}: the body returns a carry of another structure than it was given: "
            + difference
        )
    for i, value, next_value in zip(indices, carry, next_carry, strict=True):
        leaves = zip(
            jax.tree.leaves(value), jax.tree.leaves(next_value), strict=True
        )
        for number, (leaf, next_leaf) in enumerate(leaves):
            if isinstance(leaf, jax.Ref) and leaf is not next_leaf:
                raise CarryStructureError(
                    f"{transformation}: the body replaces the reference at "
                    f"{units.location(i, number)}; write its value instead."
                )
            leaf_type, next_type = jax.typeof(leaf), jax.typeof(next_leaf)
            # Python numbers have weak types, which `jax.lax.scan` promotes.
            has_same_dtype = (
                leaf_type.dtype == next_type.dtype or leaf_type.weak_type
            )
            if leaf_type.shape != next_type.shape or not has_same_dtype:
                raise CarryStructureError(
                    f"{transformation}: the carry at {units.location(i, number)} is given as "
                    f"{leaf_type.str_short()} and returned as {next_type.str_short()}; a "
                    "carry keeps its shape and dtype in every iteration."
                )


def _first_difference(units: Units, next_carry: list[PyTree]) -> str | None:
    """Describes an entry that only one of two carries has; None for other differences."""
    next_units = units.with_role_replaced(CARRY, next_carry)
    for i in units.indices_with_role(CARRY):
        paths = [path for path, _ in tree_leaves_with_path(units.values[i])]
        next_paths = [
            path for path, _ in tree_leaves_with_path(next_units.values[i])
        ]
        for number, path in enumerate(paths):
            if path not in next_paths:
                return f"{units.location(i, number)} was given and is not returned."
        for number, path in enumerate(next_paths):
            if path not in paths:
                return f"{next_units.location(i, number)} is returned and was not given."
    return None


def _check_carry_structures(
    transformation: str,
    structures: CarryStructures,
    next_structures: CarryStructures,
) -> None:
    """Raises CarryStructureError if the carry comes back in other containers."""
    has_one_role = len(next_structures) == 1
    if has_one_role and len(structures) != 1:
        # The results are a tuple of the carried arguments, with one role for all.
        next_structures = tuple(next_structures[0].children())
    for structure, next_structure in zip(
        structures, next_structures, strict=False
    ):
        if structure != next_structure:
            raise CarryStructureError(
                f"{transformation}: the body returns a carry of another structure than it was "
                f"given: given {structure}, returned {next_structure}."
            )


def while_loop(kind: Kind, cond_fn: Fn, body_fn: Fn, *, in_axes: PyTree) -> Fn:
    """Applies `jax.lax.while_loop` to functions that take carriers.

    The result returns the last values of the carried arguments; changes by `cond_fn` are dropped.

    Args:
        body_fn: takes the arguments and returns the next values of the carried ones.
        in_axes: a prefix of the arguments: CARRY, None, or `Roles` of a carrier, FORK for keys.

    Raises:
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        RoleError: for an unsupported role, or a condition that reads references (`jax.Ref`).
    """

    def pure(structures: CarryStructures, units: Units) -> PureResults:
        make_body = functools.partial(_WhileBody, body_fn, CARRY, structures)
        body, step, created = prepare_loop(
            make_body, units, lambda body: (body.carry, jnp.int32(0))
        )

        def is_on(state: tuple[Tensor, list[Tensor]]) -> Tensor:
            index, carry = state
            inside = body.inside(carry, index).with_static(units.static)
            return call_pure(kind, cond_fn, inside.pure_args()).packed

        def iterate(
            state: tuple[Tensor, list[Tensor]],
        ) -> tuple[Tensor, list[Tensor]]:
            index, carry = state
            next_carry, _ = step(carry, index)
            return index + 1, next_carry

        named_after(cond_fn, is_on)
        named_after(body_fn, iterate)
        start = jnp.int32(0), body.carry
        # The only effects that it may have are reads of references.
        if body.has_refs and jax.make_jaxpr(is_on)(start).effects:
            raise RoleError(
                "while_loop: the condition reads a jax.Ref (a variable with ref=True), and JAX "
                "does not show it what the body writes there; carry the value that it reads."
            )
        _, carry = jax.lax.while_loop(is_on, iterate, start)
        return final_results(kind, body.results(carry, []), created)

    looped = jit_outside_traces(body_fn, pure)

    def call(*args: PyTree) -> PyTree:
        outer, pure_args = split_args(kind, args, in_axes, call=call)
        units = Units.of_pure_args(kind, pure_args)
        axes.check_roles(units, "while_loop", (CARRY, FORK))
        if any(isinstance(unit.role, int) for unit in units.layout.units):
            raise RoleError(
                "while_loop: its length is unknown, so it has no axis; give CARRY."
            )
        results = looped(
            carry_structures_of_args(in_axes, pure_args.packed), units
        )
        return commit_results(kind, outer, results)

    return call


class _WhileBody(LoopBody):
    """Body whose slice `x` is the iteration's index, which is folded into keys."""

    transformation = "while_loop"

    def inside(self, carry: list[Tensor], x: PyTree) -> Units:
        def fold_forked(value: PyTree, role: Role) -> PyTree:
            return _fold_keys(value, x) if role is FORK else value

        folded = self._units.mapped(fold_forked)
        return folded.with_role_replaced(CARRY, self._with_refs(carry))


def _fold_keys(group: Group, index: Tensor) -> Group:
    """Returns the PRNG keys of a group for one iteration of a loop of unknown length.

    Raises ForkError for values that are not keys.
    """

    def fold(path: jax.tree_util.KeyPath, key: Tensor) -> Tensor:
        is_key = (
            jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            or key.dtype == jnp.uint32
        )
        if not is_key:
            raise ForkError(
                f"the value at {jax.tree_util.keystr(path)} is {jax.typeof(key).str_short()}, not "
                "a PRNG key, and cannot be split; share it or carry it."
            )
        return jax.random.fold_in(key, index)

    return jax.tree_util.tree_map_with_path(fold, group)


def fori_loop(
    kind: Kind,
    lower: ArrayLike,
    upper: ArrayLike,
    body_fn: Fn,
    *,
    in_axes: PyTree,
    unroll: int | bool | None = None,
) -> Fn:
    """Applies `jax.lax.fori_loop` to a function that takes carriers; see `while_loop`.

    Args:
        upper: the index after the last. Reverse differentiation requires a Python number.
        body_fn: `body_fn(i, *args)` returns the next values of the carried arguments.
        unroll: number of iterations to unroll, if both bounds are Python numbers.
    """

    def while_body(i: Tensor, *args: PyTree) -> tuple[Tensor, PyTree]:
        return i + 1, body_fn(i, *args)

    def scan_body(
        i: Tensor, *args: PyTree
    ) -> tuple[tuple[Tensor, PyTree], None]:
        return (i + 1, body_fn(i, *args)), None

    named_after(body_fn, while_body)
    named_after(body_fn, scan_body)

    def call(*args: PyTree) -> PyTree:
        roles = (
            in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        )
        index_and_roles = (CARRY, *roles)
        if isinstance(lower, int) and isinstance(upper, int):
            loop = scan(
                kind,
                scan_body,
                in_axes=index_and_roles,
                out_axes=(CARRY, None),
                length=max(upper - lower, 0),
                unroll=1 if unroll is None else unroll,
            )
            (_, carried), _ = loop(jnp.int32(lower), *args)
            return carried
        loop = while_loop(
            kind, lambda i, *_: i < upper, while_body, in_axes=index_and_roles
        )
        _, carried = loop(jnp.asarray(lower, jnp.int32), *args)
        return carried

    return call
