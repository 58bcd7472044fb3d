"""The one trip that a model's state makes through any JAX transformation.

A JAX transformation takes pure functions of pytrees; a model's state hangs on a scope, on objects
or on a context, which are the *carriers*. The trip has five stages, and a `Kind` knows how its own
carriers make each of them:

    outside   split     carriers -> groups of arrays, and a hashable value for all else
    inside    merge     groups -> fresh carriers at the new trace level
    inside              the user's function runs
    inside    collect   what it changed, and the carriers it returns -> groups
    outside   commit    groups -> the caller's own carriers

Between `depart` and `run`, a `Parcel` with a carrier's groups sits where the carrier sat in the
arguments; between `run` and `commit`, in the results. So the user's trees keep their shape, and
whatever JAX matches by prefix (axes, shardings, donation) matches. What is not an array travels as
the structure of a pytree without leaves, which makes it a part of JAX's own cache keys. Only
`commit` touches what the caller holds: a trip that fails leaves no trace.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax

from weft.errors import ForkError, RoleError
from weft.lifting.roles import FORK, Roles, broadcast_roles, is_role, roles_of_carrier


class Kind(Protocol):
    """How one sort of carrier crosses.

    `groups` has one pytree per filter of a carrier, in the filters' order.

    Attributes:
        carriers_are_leaves: whether JAX takes carriers for leaves by itself, as it does where they
            are no pytrees. Then arguments without carriers are seen to be so at once, however many
            leaves they have.
    """

    carriers_are_leaves: ClassVar[bool] = False

    def is_carrier(self, x: Any) -> bool:
        """Whether this leaf of the arguments or results is a carrier of this kind."""
        ...

    def split(
        self, carriers: Sequence[Any], filters: Sequence[tuple[Any, ...]]
    ) -> tuple[Any, Hashable, list[tuple[Any, ...]]]:
        """Sees all carriers of a call at once.

        Returns a handle for `commit`, the static half, and the groups of each carrier.
        """
        ...

    def merge(self, static: Any, groups: Sequence[tuple[Any, ...]]) -> tuple[Any, list[Any]]:
        """Makes carriers from its arguments alone; returns a handle for `collect`, and them."""
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
        """What the call may have changed in `carriers`, and the carriers `new` that it returns."""
        ...

    def commit(
        self,
        outer: Any,
        static: Any,
        groups: Sequence[tuple[Any, ...]],
        new_groups: Sequence[tuple[Any, ...]],
    ) -> list[Any]:
        """Writes to the caller's carriers, all or nothing; returns those the call returned.

        A group that is None has nothing to write.
        """
        ...

    # A kind that has keys, axis metadata, counters, or whose functions make new state, says how.

    def wanted(self, roles: Roles) -> tuple[Any, ...]:
        """What `split` and `collect` are told of the groups of a carrier: their filters."""
        return roles.filters

    def fork(self, group: Any, n: int) -> Any:
        """Splits each PRNG key of a group into `n`, along a new leading axis."""
        raise ForkError(f"{type(self).__name__} has no PRNG keys to fork; give the group an axis.")

    def fold(self, group: Any, i: Any) -> Any:
        """The PRNG keys of a group for iteration `i` of a loop of unknown length."""
        raise ForkError(f"{type(self).__name__} has no PRNG keys to fork; share the group.")

    def axis(
        self,
        static: Any,
        carrier: int,
        sign: int,
        group: Any,
        axis: int,
        metadata: dict[Any, Any],
    ) -> Any:
        """Tells axis metadata in a group that an axis came (`sign` 1) or went (-1).

        Args:
            static: the static half, for errors.
            carrier: the index of the group's carrier, for errors.
            sign: 1 or -1.
            group: the group.
            axis: where the axis is.
            metadata: handed to axis metadata.
        """
        return group

    def may_create(self, static: Any, where: Any) -> bool:
        """Whether a call may make new state in a group.

        Args:
            static: the static half.
            where: the filter of the group.
        """
        return False

    def created(self, before: Any, after: Any) -> Any:
        """The entries of a group that a call has made, as they were when they were made.

        None if there are none.
        """
        return None

    def union(self, group: Any, other: Any) -> Any:
        """A group with the entries of another one, which replace its own."""
        return other

    def begun(self, made: Any, result: Any) -> Any:
        """What a loop or a branch leaves of a group, as `commit` is to find it.

        Args:
            made: what `created` gave: the entries made before, with their initial values.
            result: the group afterwards; it may have initial values of its own, from each
                iteration of a loop.
        """
        return result

    def in_loop(self, static: Any, after: Any = None) -> Any:
        """The static half for the body of a loop.

        Args:
            static: that of the call.
            after: what the same loop collects, where that is known before.
        """
        return static

    def follow(self, static: Any, before: Any, after: Any = None) -> Any:
        """The static half for a run that finds the state which another one has made.

        Args:
            static: that of the call.
            before: the static half that the other run has collected.
            after: what this run collects, where that is known before.
        """
        return static

    def join(self, static: Any, statics: Sequence[Any]) -> Any:
        """One collected static half for several branches; one of them is taken.

        Args:
            static: that of the call.
            statics: what each branch has collected.
        """
        return statics[0]

    def place(self, static: Any, carrier: int, path: Any) -> str:
        """Where in the state an entry of a group is, as its user knows it, for errors.

        Args:
            static: the static half.
            carrier: the index of the group's carrier: first come those that went in, then those
                that the function returned.
            path: of JAX, from the group on.
        """
        return f"the state{jax.tree_util.keystr(path)}"

    def argument(self, path: Any) -> str:
        """Which argument is meant, or what in it, by its path among the arguments; for errors."""
        return f"input {path[0].idx}{jax.tree_util.keystr(path[1:])}" if path else "the input"


@jax.tree_util.register_pytree_with_keys_class
class Parcel:
    """A carrier's groups, where the carrier sat."""

    def __init__(self, groups: tuple[Any, ...]):
        self.groups = groups

    def tree_flatten(self):
        return self.groups, None

    def tree_flatten_with_keys(self):
        keys = (jax.tree_util.SequenceKey(i) for i in range(len(self.groups)))
        return tuple(zip(keys, self.groups, strict=True)), None

    @classmethod
    def tree_unflatten(cls, aux: None, groups: Sequence[Any]) -> "Parcel":
        return cls(tuple(groups))


@jax.tree_util.register_static
class Static:
    """A hashable value that travels as the structure of a pytree without leaves."""

    def __init__(self, value: Hashable):
        self.value: Any = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        # True, 1 and 1.0 are equal, and yet a function may tell them apart.
        return (
            isinstance(other, Static)
            and type(self.value) is type(other.value)
            and self.value == other.value
        )

    def __repr__(self) -> str:
        return repr(self.value)


@jax.tree_util.register_static
class NothingNew(Static):
    """The static half of a function that returned no carriers."""


def is_parcel(x: Any) -> bool:
    """Whether `x` stands for a carrier."""
    return isinstance(x, Parcel)


class Cargo(NamedTuple):
    """What crosses: `static` holds the kind's static half and one role per leaf of `packed`."""

    static: Static
    packed: Any


class Results(NamedTuple):
    """What comes back: a static half, a parcel per carrier that went in, the function's results."""

    static: Static
    parcels: list[Parcel]
    packed: Any


def depart(
    kind: Kind, args: Any, roles: Any, what: str = "in_axes", of_carriers: Roles | None = None
) -> tuple[Any, Cargo]:
    """Splits the carriers among `args` into groups, by the roles they are given.

    Args:
        kind: whose carriers to look for.
        args: a pytree of the arguments.
        roles: a pytree prefix of `args`, see `weft.lifting.roles`.
        what: the name under which the user gave `roles`, for errors.
        of_carriers: the roles of carriers to which `roles` gives None.

    Returns:
        A handle for `commit`, which stays outside, and what crosses.
    """
    opaque = kind.carriers_are_leaves
    leaves, tree = jax.tree.flatten(args, is_leaf=None if opaque else kind.is_carrier)
    if roles is None and opaque:
        # One leaf of each type; there are many leaves and few types.
        of_types = dict(zip(map(type, leaves), leaves, strict=True)).values()
        if not any(map(kind.is_carrier, of_types)):
            outer, static, _ = kind.split([], [])
            return outer, Cargo(Static((static, (None,) * len(leaves))), args)
    flat: list[Any] = (
        [None] * len(leaves)
        if roles is None
        else broadcast_roles(roles, args, kind.is_carrier, what)
    )
    at = []
    for i, leaf in enumerate(leaves):
        if kind.is_carrier(leaf):
            at.append(i)
            role = of_carriers if flat[i] is None and of_carriers is not None else flat[i]
            flat[i] = roles_of_carrier(role)
        elif isinstance(flat[i], Roles):
            raise RoleError(
                f"{what} gives {flat[i]!r} to a {type(leaf).__name__}, which carries no state; "
                "give it an axis or None."
            )
    wanted = [kind.wanted(flat[i]) for i in at]
    outer, static, groups = kind.split([leaves[i] for i in at], wanted)
    for i, group in zip(at, groups, strict=True):
        leaves[i] = Parcel(group)
    return outer, Cargo(Static((static, tuple(flat))), tree.unflatten(leaves))


def run(kind: Kind, fn: Callable[..., Any], cargo: Cargo, out_roles: Any = None) -> Results:
    """Merges the carriers at the present trace level, calls `fn(args)` and collects.

    Args:
        kind: whose carriers cross.
        fn: takes the pytree that was given to `depart`, with fresh carriers.
        cargo: from `depart`.
        out_roles: the roles of carriers that `fn` returns, a pytree prefix of its result.
    """
    static, flat = cargo.static.value
    leaves, tree = jax.tree.flatten(cargo.packed, is_leaf=is_parcel)
    at = [i for i, leaf in enumerate(leaves) if is_parcel(leaf)]
    inner, carriers = kind.merge(static, [leaves[i].groups for i in at])
    for i, carrier in zip(at, carriers, strict=True):
        leaves[i] = carrier

    out = fn(tree.unflatten(leaves))

    out_leaves, out_tree = jax.tree.flatten(out, is_leaf=kind.is_carrier)
    out_at = [i for i, leaf in enumerate(out_leaves) if kind.is_carrier(leaf)]
    out_flat = (
        broadcast_roles(out_roles, out, kind.is_carrier, "out_axes")
        if out_at or not is_role(out_roles)
        else [None] * len(out_leaves)
    )
    out_static, groups, new_groups = kind.collect(
        inner,
        static,
        carriers,
        [kind.wanted(flat[i]) for i in at],
        [out_leaves[i] for i in out_at],
        [kind.wanted(roles_of_carrier(out_flat[i])) for i in out_at],
    )
    for i, group in zip(out_at, new_groups, strict=True):
        out_leaves[i] = Parcel(group)
    parcels = [
        # The keys were made for the new axis alone; the caller's own stay as they are.
        Parcel(tuple(None if r is FORK else g for r, g in zip(flat[i].roles, group, strict=True)))
        for i, group in zip(at, groups, strict=True)
    ]
    made = Static if out_at else NothingNew
    return Results(made(out_static), parcels, out_tree.unflatten(out_leaves))


def commit(kind: Kind, outer: Any, results: Results) -> Any:
    """Writes what came back to the caller's carriers and returns the function's own results."""
    static, groups = results.static.value, [parcel.groups for parcel in results.parcels]
    if type(results.static) is NothingNew:
        kind.commit(outer, static, groups, [])
        return results.packed
    leaves, tree = jax.tree.flatten(results.packed, is_leaf=is_parcel)
    at = [i for i, leaf in enumerate(leaves) if is_parcel(leaf)]
    new = kind.commit(outer, static, groups, [leaves[i].groups for i in at])
    if not at:
        return results.packed
    for i, carrier in zip(at, new, strict=True):
        leaves[i] = carrier
    return tree.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where in a packed tree each unit is, and what is to happen to it.

    Attributes:
        tree: the structure of the packed tree, with parcels as leaves.
        sizes: for each of its leaves how many groups the parcel has; None for what is no parcel.
        flat_roles: one role for each of its leaves.
    """

    tree: Any
    sizes: tuple[int | None, ...]
    flat_roles: tuple[Any, ...]

    @functools.cached_property
    def of_units(self) -> tuple[list[Any], list[Any], list[int | None]]:
        """The role of each unit, its filter, and the carrier whose group it is, if it is one."""
        roles, filters, carriers, count = [], [], [], itertools.count()
        for size, role in zip(self.sizes, self.flat_roles, strict=True):
            if size is None:
                roles.append(role)
                filters.append(None)
                carriers.append(None)
            else:
                of_carrier = roles_of_carrier(role)
                roles.extend(of_carrier.roles)
                filters.extend(of_carrier.filters)
                carriers.extend([next(count)] * size)
        return roles, filters, carriers


class Units:
    """A packed tree as a list of what has a role of its own: groups of parcels, and other leaves.

    Attributes:
        layout: where they are in the packed tree.
        values: the groups and leaves, in order.
        roles: the role of each.
        filters: the filter of each group; None for another leaf.
        carriers: the index of the carrier whose group each is; None for another leaf.
    """

    def __init__(self, layout: Layout, values: Sequence[Any]):
        self.layout, self.values = layout, list(values)
        self.roles, self.filters, self.carriers = layout.of_units

    @property
    def is_group(self) -> list[bool]:
        """Whether each is a group of a parcel."""
        return [carrier is not None for carrier in self.carriers]

    @classmethod
    def of_packed(cls, packed: Any, flat_roles: Sequence[Any]) -> "Units":
        leaves, tree = jax.tree.flatten(packed, is_leaf=is_parcel)
        sizes, values = [], []
        for leaf in leaves:
            is_carrier = is_parcel(leaf)
            sizes.append(len(leaf.groups) if is_carrier else None)
            values.extend(leaf.groups if is_carrier else (leaf,))
        return cls(Layout(tree, tuple(sizes), tuple(flat_roles)), values)

    @classmethod
    def of_cargo(cls, cargo: Cargo) -> "Units":
        return cls.of_packed(cargo.packed, cargo.static.value[1])

    def packed(self) -> Any:
        """The packed tree."""
        rest = iter(self.values)
        return self.layout.tree.unflatten(
            [
                next(rest) if size is None else Parcel(tuple(itertools.islice(rest, size)))
                for size in self.layout.sizes
            ]
        )

    def cargo(self, static: Any) -> Cargo:
        """What crosses, with the kind's static half."""
        return Cargo(Static((static, self.layout.flat_roles)), self.packed())

    def having(self, values: Sequence[Any]) -> "Units":
        """The same units with other values."""
        return Units(self.layout, values)

    def emptied(self) -> "Units":
        """The same units without their values, for a function that lives longer than the call."""
        return self.having([None] * len(self.values))

    def place(self, kind: Kind, static: Any, i: int, leaf: int | None = None) -> str:
        """Where the i-th value is, or the leaf of it with that number, for errors."""
        path = self._path(i, leaf)
        if (carrier := self.carriers[i]) is not None:
            return kind.place(static, carrier, path)
        return kind.argument(path)

    def place_in_results(self, kind: Kind, static: Any, i: int, leaf: int) -> str:
        """The same where these are the units of results, see `in_results`."""
        path = self._path(i, leaf)
        if (carrier := self.carriers[i]) is not None:
            return kind.place(static, carrier, path)
        return f"the result{jax.tree_util.keystr(path[1:])}"

    def place_in_groups(self, kind: Kind, static: Any, path: Any) -> str:
        """Where something is, by its path of JAX in a list of all groups; for errors."""
        carriers = [carrier for carrier in self.carriers if carrier is not None]
        return kind.place(static, carriers[path[0].idx], path[1:])

    def _path(self, i: int, leaf: int | None) -> tuple[Any, ...]:
        """The path of JAX: of a group's entry from the group on, of others in the packed tree."""
        path = () if leaf is None else jax.tree_util.tree_leaves_with_path(self.values[i])[leaf][0]
        if self.carriers[i] is not None:
            return path
        sizes = [1 if size is None else size for size in self.layout.sizes]
        n = next(n for n in range(len(sizes)) if sum(sizes[: n + 1]) > i)
        at = jax.tree_util.tree_leaves_with_path(self.layout.tree.unflatten(range(len(sizes))))
        return (*at[n][0], *path)

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Each value with its role."""
        return zip(self.values, self.roles, strict=True)

    def with_roles(self, role: Any) -> list[Any]:
        """The values whose role is `role`: first those of carriers, which come back first."""
        return [self.values[i] for i in self.places(role)]

    def places(self, role: Any) -> list[int]:
        """Which of the values those are."""
        places = [i for i, r in enumerate(self.roles) if r is role]
        return sorted(places, key=lambda i: not self.is_group[i])

    def merged(self, role: Any, replacements: Sequence[Any]) -> "Units":
        """The units with the values of that role replaced, in the order of `with_roles`."""
        values = list(self.values)
        for i, value in zip(self.places(role), replacements, strict=True):
            values[i] = value
        return self.having(values)


def in_results(cargo: Cargo, results: Results, out_roles: Any) -> Units:
    """The units of what comes back: carriers that went in keep their roles."""
    _, flat = cargo.static.value
    carried = [role for role in flat if isinstance(role, Roles)]
    out = broadcast_roles(out_roles, results.packed, is_parcel, "out_axes")
    return Units.of_packed((results.parcels, results.packed), [*carried, *out])
