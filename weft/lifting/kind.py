"""Transfer of a model's state through a JAX transformation.

JAX transforms pure functions of pytrees; a model's state is part of a scope, of objects or of a
context, the *carriers*. The transfer has five stages; a `Kind` implements each for its carriers:

outside   split     carriers -> groups of arrays, and a hashable value for all else
inside    merge     groups -> fresh carriers at the new trace level
inside              the user's function runs
inside    collect   what it changed, and the carriers it returns -> groups
outside   commit    groups -> the caller's own carriers

Between `split_args` and `call_pure`, a `StateNode` with a carrier's groups replaces the carrier in
the arguments; between `call_pure` and `commit`, in the results. The user's trees keep their shape,
so JAX's prefixes (axes, shardings, donation) match. Static values are part of the structure of a
pytree without leaves, and thus of JAX's cache keys. Only `commit` changes the caller's values: a
failed transfer has no effect.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from weft.errors import ForkError, RoleError
from weft.lifting.roles import FORK, Roles, broadcast_roles, carrier_roles, is_role
from weft.typing import Fn

_NO_CONTEXT = contextlib.nullcontext()


class Kind(Protocol):
    """Protocol of the transfer of one sort of carrier.

    `groups` has one pytree per filter of a carrier, in the filters' order.

    Attributes:
        carriers_are_leaves: whether carriers are leaves for JAX, not pytrees. Arguments without
            carriers are then recognized immediately, regardless of their number of leaves.
    """

    carriers_are_leaves: ClassVar[bool] = False

    def is_carrier(self, x: Any) -> bool:
        """Returns whether a leaf of the arguments or results is a carrier of this kind."""
        ...

    def split(
        self, carriers: Sequence[Any], filters: Sequence[tuple[Any, ...]]
    ) -> tuple[Any, Hashable, list[tuple[Any, ...]]]:
        """Splits all carriers of a call.

        Returns a handle for `commit`, the static half, and the groups of each carrier.
        """
        ...

    def merge(self, static: Any, groups: Sequence[tuple[Any, ...]]) -> tuple[Any, list[Any]]:
        """Creates carriers from the arguments; returns a handle for `collect` and the carriers."""
        ...

    def collect(
        self,
        inner: Any,
        static: Any,
        carriers: Sequence[Any],
        filters: Sequence[tuple[Any, ...]],
        new: Sequence[Any],
        new_filters: Sequence[tuple[Any, ...]],
    ) -> tuple[Hashable, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """Returns the groups of changed `carriers`, and of the returned carriers `new`."""
        ...

    def commit(
        self,
        outer: Any,
        static: Any,
        groups: Sequence[tuple[Any, ...]],
        new_groups: Sequence[tuple[Any, ...]],
    ) -> list[Any]:
        """Writes to the caller's carriers, all or nothing; returns those the call returned.

        A group that is None has no changes.
        """
        ...

    # Kinds with keys, axis metadata, counters, or functions that create state override these.

    def create_outside(
        self,
        carriers: Sequence[Any],
        filters: Sequence[tuple[Any, ...]],
        call: Callable[[Sequence[Any]], Any],
    ) -> None:
        """Creates state of carriers that belong to an outer trace, before `split`.

        `call` calls the transformed function with other carriers.
        """

    def call_context(self, inner: Any) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of the function's call, between `merge` and `collect`."""
        return _NO_CONTEXT

    def note_result(self, result: Any) -> None:
        """Takes a result with carriers before `collect`, for the names of its parts in errors."""

    def group_filters(self, roles: Roles) -> tuple[Any, ...]:
        """Returns the filters of a carrier's groups for `split` and `collect`."""
        return roles.filters

    def fork(self, group: Any, n: int) -> Any:
        """Splits each PRNG key of a group into `n`, along a new leading axis."""
        raise ForkError(f"{type(self).__name__} has no PRNG keys to fork; give the group an axis.")

    def fold(self, group: Any, i: Any) -> Any:
        """Returns the PRNG keys of a group for iteration `i` of a loop of unknown length."""
        raise ForkError(f"{type(self).__name__} has no PRNG keys to fork; share the group.")

    def axis(
        self, static: Any, carrier: int, sign: int, group: Any, axis: int, metadata: dict[Any, Any]
    ) -> Any:
        """Adds (`sign` 1) or removes (-1) an axis in a group's axis metadata."""
        return group

    def may_create(self, static: Any, where: Any) -> bool:
        """Returns whether a call may create state in the group with the filter `where`."""
        return False

    def created(self, before: Any, after: Any) -> Any:
        """Returns the entries of a group that a call has created, with initial values, or None."""
        return None

    def union(self, group: Any, other: Any) -> Any:
        """Returns a group with the entries of another one, which replace its own."""
        return other

    def creates_structure(self, after: Any) -> bool:
        """Returns whether a call has created parts that are not arrays; `after` is collected."""
        return False

    def initial_state(
        self,
        static: Any,
        created: list[Any],
        used: Callable[[list[Any]], Sequence[tuple[Any, Any]]],
        changes: "CarryChanges | None" = None,
    ) -> list[Any]:
        """Returns the entries with which a loop begins, of those that `created` returned, by group.

        Args:
            static: the static half.
            created: the entries of each group, or None; numbers are in place of arrays.
            used: takes such entries, and returns each group with its role, and in place of each
                array whether they depend on it. A shared group is as it is.
            changes: changes by a run that finds the entries, once it is known.
        """
        return created

    def static_without_runs(self, static: Any, after: Any) -> Any:
        """Returns the body's static half after a loop of no iterations.

        `after` is what the trace of the body has collected.
        """
        return after

    def final_group(self, created: Any, result: Any, ends: Sequence[Any]) -> Any:
        """Returns the final group of a loop or of branches for `commit`.

        Args:
            created: the entries created before, with initial values, or None.
            result: the group, which may have initial values from each iteration of a loop.
            ends: the groups after the body or each branch, with True in place of arrays.
        """
        return result

    def static_in_loop(self, static: Any, after: Any = None) -> Any:
        """Returns the static half for a loop's body; `after` is that of its end, if known."""
        return static

    def static_in_first_run(self, static: Any) -> Any:
        """Returns the static half for the first run of a loop's body.

        It is another one if loops in the body may discard what they create, see `is_discarded`.
        """
        return static

    def is_discarded(self, after: Any) -> bool:
        """Returns whether only carriers that an outer loop makes in its first run have new state.

        `after` is the static half that a run has collected.
        """
        return False

    def static_after_creation(self, static: Any, before: Any, after: Any = None) -> Any:
        """Returns the static half for a run on state that another run has created.

        `before` is what the other run has collected, `after` what this one has, if known.
        """
        return static

    def static_in_condition(self, static: Any, of_body: Any) -> Any:
        """Returns the static half, that of the call, for the condition of a loop."""
        return static

    def join(self, static: Any, statics: Sequence[Any]) -> Any:
        """Joins the static halves that branches have collected; one branch runs."""
        return statics[0]

    def location(self, static: Any, carrier: int, path: Any) -> str:
        """Returns the user's name for the location of an entry of a group, for errors.

        `carrier` is the index of the group's carrier; input carriers precede returned ones.
        """
        return f"the state{keystr(path)}"

    def argument(self, path: Any) -> str:
        """Returns an argument's name, or a part's, by its path among the arguments, for errors."""
        return f"input {path[0].idx}{keystr(path[1:])}" if path else "the input"


class CarryChanges(NamedTuple):
    """Changes by a run of a loop's body that finds the created state.

    Attributes:
        static, after: the static halves of the body, and collected from the run.
        changed, read: each group with booleans in place of its arrays, or None for a group that is
            not carried: whether the run returns another value, and whether anything but that value
            depends on the one before.
    """

    static: Any
    after: Any
    changed: list[Any]
    read: list[Any]


@jax.tree_util.register_pytree_with_keys_class
class StateNode:
    """Carrier's groups, in the carrier's place."""

    def __init__(self, groups: tuple[Any, ...]):
        self.groups = groups

    def tree_flatten(self):
        return self.groups, None

    def tree_flatten_with_keys(self):
        keys = (jax.tree_util.SequenceKey(i) for i in range(len(self.groups)))
        return tuple(zip(keys, self.groups, strict=True)), None

    @classmethod
    def tree_unflatten(cls, aux: None, groups: Sequence[Any]) -> "StateNode":
        return cls(tuple(groups))


@jax.tree_util.register_static
class Static:
    """Hashable value as the structure of a pytree without leaves."""

    def __init__(self, value: Hashable):
        self.value: Any = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        # True, 1 and 1.0 are equal, but a function may distinguish them.
        return (
            isinstance(other, Static)
            and type(self.value) is type(other.value)
            and self.value == other.value
        )

    def __repr__(self) -> str:
        return repr(self.value)


@jax.tree_util.register_static
class StaticWithoutNew(Static):
    """Static half of a function that returned no carriers."""


def is_state_node(x: object) -> bool:
    """Returns whether `x` represents a carrier."""
    return isinstance(x, StateNode)


class PureArgs(NamedTuple):
    """Input values: `static` contains the kind's static half and one role per leaf of `packed`."""

    static: Static
    packed: Any


class PureResults(NamedTuple):
    """Output values: a static half, a `StateNode` per input carrier, and the function's results."""

    static: Static
    state_nodes: list[StateNode]
    packed: Any


class Leaves(NamedTuple):
    """Leaves of a tree; those at the positions `at` can be replaced."""

    every: list[Any]
    structure: Any
    at: list[int]

    @classmethod
    def of(
        cls, tree: object, is_picked: Callable[[Any], bool], is_leaf: Callable[[Any], bool] | None
    ) -> "Leaves":
        every, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
        return cls(every, structure, [i for i, x in enumerate(every) if is_picked(x)])

    @property
    def picked(self) -> list[Any]:
        return [self.every[i] for i in self.at]

    def filled(self, values: Iterable[Any]) -> Any:
        """Returns the tree with other values at these positions."""
        every = list(self.every)
        for i, x in zip(self.at, values, strict=True):
            every[i] = x
        return self.structure.unflatten(every)


def split_args(
    kind: Kind,
    args: Any,
    roles: object,
    what: str = "in_axes",
    of_carriers: Roles | None = None,
    call: Fn | None = None,
) -> tuple[Any, PureArgs]:
    """Splits the carriers among `args` into groups, by their roles.

    Args:
        roles: a pytree prefix of `args`, see `weft.lifting.roles`.
        what: the user's name of `roles`, for errors.
        of_carriers: the roles of carriers to which `roles` gives None.
        call: the transformed function of `args`, for `Kind.create_outside`.

    Returns a handle for `commit`, which stays outside, and the crossing values.
    """
    opaque = kind.carriers_are_leaves
    leaves, tree = jax.tree.flatten(args, is_leaf=None if opaque else kind.is_carrier)
    if roles is None and opaque:
        # One leaf of each type; there are many leaves and few types.
        of_types = dict(zip(map(type, leaves), leaves, strict=True)).values()
        if not any(map(kind.is_carrier, of_types)):
            outer, static, _ = kind.split([], [])
            return outer, PureArgs(Static((static, (None,) * len(leaves))), args)
    flat: list[Any] = [None] * len(leaves)
    if roles is not None:
        flat = broadcast_roles(roles, args, kind.is_carrier, what)
    at = []
    for i, leaf in enumerate(leaves):
        if kind.is_carrier(leaf):
            at.append(i)
            role = of_carriers if flat[i] is None and of_carriers is not None else flat[i]
            flat[i] = carrier_roles(role)
        elif isinstance(flat[i], Roles):
            raise stateless_error(what, flat[i], leaf)
    wanted, given = [kind.group_filters(flat[i]) for i in at], Leaves(leaves, tree, at)
    if call is not None:
        kind.create_outside(given.picked, wanted, lambda others: call(*given.filled(others)))
    outer, static, groups = kind.split(given.picked, wanted)
    packed = given.filled(map(StateNode, groups))
    return outer, PureArgs(Static((static, tuple(flat))), packed)


def stateless_error(what: str, role: Roles, leaf: object) -> RoleError:
    """Returns the error for roles of state that are given to a value without state."""
    return RoleError(
        f"{what} gives {role!r} to a {type(leaf).__name__}, which carries no state; give it an "
        "axis, a sharding or None."
    )


def call_pure(
    kind: Kind, fn: Fn, pure_args: PureArgs, out_roles: object = None, has_kwargs: bool = False
) -> PureResults:
    """Merges the carriers at the present trace level, calls `fn(*args)` and collects.

    The arguments are the tuple given to `split_args`, with new carriers; with `has_kwargs`, the
    last one is a dict of arguments by name. `out_roles` are the roles of carriers that `fn`
    returns, a pytree prefix of its result.
    """
    static, flat = pure_args.static.value
    given = Leaves.of(pure_args.packed, is_state_node, is_state_node)
    inner, carriers = kind.merge(static, [state_node.groups for state_node in given.picked])
    args, kwargs = given.filled(carriers), {}
    if has_kwargs:
        *args, kwargs = args
    with kind.call_context(inner):
        out = fn(*args, **kwargs)

    new = Leaves.of(out, kind.is_carrier, kind.is_carrier)
    if new.at:
        kind.note_result(out)
    out_flat = []
    if new.at or not is_role(out_roles):
        out_flat = broadcast_roles(out_roles, out, kind.is_carrier, "out_axes")
        for role, leaf in zip(out_flat, jax.tree.leaves(out, is_leaf=kind.is_carrier), strict=True):
            if isinstance(role, Roles) and not kind.is_carrier(leaf):
                raise stateless_error("out_axes", role, leaf)
    roles = [flat[i] for i in given.at]
    out_static, groups, new_groups = kind.collect(
        inner,
        static,
        carriers,
        [kind.group_filters(of_carrier) for of_carrier in roles],
        new.picked,
        [kind.group_filters(carrier_roles(out_flat[i])) for i in new.at],
    )
    state_nodes = [
        # These keys are only for the new axis; the caller's keys are unchanged.
        StateNode(tuple(None if r is FORK else g for r, g in zip(of.roles, group, strict=True)))
        for of, group in zip(roles, groups, strict=True)
    ]
    static_type = Static if new.at else StaticWithoutNew
    return PureResults(static_type(out_static), state_nodes, new.filled(map(StateNode, new_groups)))


def commit_results(kind: Kind, outer: object, results: PureResults) -> Any:
    """Writes changes to the caller's carriers and returns the function's own results."""
    static, groups = results.static.value, [state_node.groups for state_node in results.state_nodes]
    if type(results.static) is StaticWithoutNew:
        kind.commit(outer, static, groups, [])
        return results.packed
    new = Leaves.of(results.packed, is_state_node, is_state_node)
    carriers = kind.commit(outer, static, groups, [node.groups for node in new.picked])
    return new.filled(carriers) if new.at else results.packed


@dataclasses.dataclass(frozen=True)
class UnitLayout:
    """Positions of units in a packed tree, with their roles and the sizes of `StateNode`s.

    `static` is the static half of the kind.
    """

    kind: Kind = dataclasses.field(compare=False)
    static: Hashable
    tree: Any
    sizes: tuple[int | None, ...]
    flat_roles: tuple[Any, ...]

    @functools.cached_property
    def of_units(self) -> tuple[list[Any], list[Any], list[int | None]]:
        """Returns the role of each unit, its filter, and the index of its carrier, or None."""
        roles, filters, carriers, count = [], [], [], itertools.count()
        for size, role in zip(self.sizes, self.flat_roles, strict=True):
            if size is None:
                roles.append(role)
                filters.append(None)
                carriers.append(None)
            else:
                of_carrier = carrier_roles(role)
                roles.extend(of_carrier.roles)
                filters.extend(of_carrier.filters)
                carriers.extend([next(count)] * size)
        return roles, filters, carriers


class Units:
    """Packed tree as a list of its parts with roles: groups of `StateNode`s, and other leaves.

    Attributes:
        filters: the filter of each group; None for another leaf.
        carriers: the index of each group's carrier; None for another leaf.
    """

    def __init__(self, layout: UnitLayout, values: Sequence[Any]):
        self.layout, self.values = layout, list(values)
        self.kind, self.static = layout.kind, layout.static
        self.roles, self.filters, self.carriers = layout.of_units

    @property
    def is_group(self) -> list[bool]:
        """Returns whether each is a group of a `StateNode`."""
        return [carrier is not None for carrier in self.carriers]

    @classmethod
    def of_packed(
        cls, kind: Kind, static: Any, packed: object, flat_roles: Sequence[Any]
    ) -> "Units":
        leaves, tree = jax.tree.flatten(packed, is_leaf=is_state_node)
        sizes, values = [], []
        for leaf in leaves:
            is_carrier = is_state_node(leaf)
            sizes.append(len(leaf.groups) if is_carrier else None)
            values.extend(leaf.groups if is_carrier else (leaf,))
        return cls(UnitLayout(kind, static, tree, tuple(sizes), tuple(flat_roles)), values)

    @classmethod
    def of_pure_args(cls, kind: Kind, pure_args: PureArgs) -> "Units":
        static, flat_roles = pure_args.static.value
        return cls.of_packed(kind, static, pure_args.packed, flat_roles)

    def of_results(self, results: PureResults, out_roles: object) -> "Units":
        """Returns the units of the results of a call; input carriers keep their roles."""
        carried = [role for role in self.layout.flat_roles if isinstance(role, Roles)]
        out = broadcast_roles(out_roles, results.packed, is_state_node, "out_axes")
        packed = results.state_nodes, results.packed
        return Units.of_packed(self.kind, self.static, packed, [*carried, *out])

    def packed(self) -> Any:
        rest = iter(self.values)
        return self.layout.tree.unflatten(
            [
                next(rest) if size is None else StateNode(tuple(itertools.islice(rest, size)))
                for size in self.layout.sizes
            ]
        )

    def pure_args(self) -> PureArgs:
        """Returns the crossing values."""
        return PureArgs(Static((self.static, self.layout.flat_roles)), self.packed())

    def with_static(self, static: Any) -> "Units":
        """Returns the same units with another static half of the kind."""
        return Units(dataclasses.replace(self.layout, static=static), self.values)

    def with_values(self, values: Sequence[Any]) -> "Units":
        """Returns the same units with other values."""
        return Units(self.layout, values)

    def mapped(self, fn: Callable[[Any, Any], Any]) -> "Units":
        """Returns the same units with the values that `fn` returns for each value and its role."""
        return self.with_values([fn(value, role) for value, role in self.pairs()])

    def without_values(self) -> "Units":
        """Returns the same units without values, for a function that outlives the call."""
        return self.with_values([None] * len(self.values))

    def location(self, i: int, leaf: int | None = None, of_results: bool = False) -> str:
        """Returns the location of the i-th value, or of its leaf with that number, for errors."""
        path = self._path(i, leaf)
        if (carrier := self.carriers[i]) is not None:
            return self.kind.location(self.static, carrier, path)
        return f"the result{keystr(path[1:])}" if of_results else self.kind.argument(path)

    def location_in_groups(self, path: Any) -> str:
        """Returns a location by its JAX path in a list of all groups, for errors."""
        carriers = [carrier for carrier in self.carriers if carrier is not None]
        return self.kind.location(self.static, carriers[path[0].idx], path[1:])

    def _path(self, i: int, leaf: int | None) -> tuple[Any, ...]:
        """Returns the JAX path of a group's entry in the group, of others in the packed tree."""
        path = () if leaf is None else tree_leaves_with_path(self.values[i])[leaf][0]
        if self.carriers[i] is not None:
            return path
        sizes = [1 if size is None else size for size in self.layout.sizes]
        n = next(n for n in range(len(sizes)) if sum(sizes[: n + 1]) > i)
        at = tree_leaves_with_path(self.layout.tree.unflatten(range(len(sizes))))
        return (*at[n][0], *path)

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yields each value with its role."""
        return zip(self.values, self.roles, strict=True)

    def groups(self) -> list[tuple[Any, Any]]:
        """Returns each group with its role."""
        return [p for p, is_group in zip(self.pairs(), self.is_group, strict=True) if is_group]

    def values_with_role(self, role: object) -> list[Any]:
        """Returns the values with the role `role`, those of carriers first."""
        return [self.values[i] for i in self.indices_with_role(role)]

    def indices_with_role(self, role: object) -> list[int]:
        """Returns the indices of these values."""
        places = [i for i, r in enumerate(self.roles) if r is role]
        return sorted(places, key=lambda i: not self.is_group[i])

    def with_role_replaced(self, role: object, replacements: Sequence[Any]) -> "Units":
        """Returns the units with other values of that role, in the order of `values_with_role`."""
        values = list(self.values)
        for i, value in zip(self.indices_with_role(role), replacements, strict=True):
            values[i] = value
        return self.with_values(values)
