"""What happens to a group of state, or to an argument, when a transformation is crossed.

A role is an integer (mapped over that axis), `None` (shared by all), `CARRY` (handed from one
iteration to the next), `DIFF` (differentiated) or `FORK` (PRNG keys, split into one per index of
the new axis).

Roles are given as a pytree prefix of the arguments, as `in_axes` are in JAX. Where the prefix
reaches something that carries state, `Roles` gives each group of that state its own role: its
filters are asked in order, the first that matches takes the entry, and what no filter matches stays
behind.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax

from weft.errors import RoleError


class Special(enum.Enum):
    """The roles that are not an axis."""

    CARRY = "CARRY"
    DIFF = "DIFF"
    FORK = "FORK"

    def __repr__(self) -> str:
        return self.value


CARRY, DIFF, FORK = Special.CARRY, Special.DIFF, Special.FORK

Role = int | None | Special


class Roles(tuple):
    """`((filter, role), ...)` for the state of one carrier.

    Example:
        >>> Roles((("state", 0), ("prng_key", FORK)))
        Roles((('state', 0), ('prng_key', FORK)))
    """

    @property
    def filters(self) -> tuple[Any, ...]:
        return tuple(where for where, _ in self)

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(role for _, role in self)

    def __repr__(self) -> str:
        return f"Roles({super().__repr__()})"


def is_role(x: Any) -> bool:
    """Whether `x` is a leaf of a role prefix."""
    return x is None or isinstance(x, int | Special | Roles)


def roles_of_carrier(role: Role | Roles) -> Roles:
    """The roles of a carrier's groups; a bare role goes to everything the carrier has."""
    return role if isinstance(role, Roles) else Roles(((True, role),))


def broadcast_roles(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], what: str) -> list[Any]:
    """One role for each leaf of `tree`.

    Args:
        prefix: roles as a pytree prefix of `tree`.
        tree: the arguments or results.
        is_leaf: what counts as a leaf of `tree`.
        what: the name of the prefix, for the error.

    Raises:
        RoleError: if `prefix` is no prefix of `tree`.
    """
    flat: list[Any] = []

    def extend(role: Any, subtree: Any) -> None:
        flat.extend([role] * len(jax.tree.leaves(subtree, is_leaf=is_leaf)))

    try:
        jax.tree.map(extend, prefix, tree, is_leaf=is_role)
    except ValueError as error:
        raise RoleError(
            f"{what}={prefix!r} does not fit what it speaks of: expected one role, or a pytree "
            "prefix of "
            f"{jax.tree.structure(tree, is_leaf=is_leaf)}. {error}"
        ) from None
    return flat
