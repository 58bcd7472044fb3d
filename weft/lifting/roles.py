"""Roles of groups of state and of arguments in a transformation.

A role is an integer (mapped over that axis), `None` (shared by all), `CARRY` (passed from one
iteration to the next), `DIFF` (differentiated) or `FORK` (PRNG keys, one per index of the axis).

Roles are a pytree prefix of the arguments, as JAX's `in_axes`. For a carrier of state, `Roles`
gives each group of the state its own role: an entry belongs to the first filter that matches, and
entries without a match do not cross.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax

from weft.errors import RoleError


class SpecialRole(enum.Enum):
    """Roles that are not an axis."""

    CARRY = "CARRY"
    DIFF = "DIFF"
    FORK = "FORK"

    def __repr__(self) -> str:
        return self.value


CARRY = SpecialRole.CARRY
"""The role of what is passed from one iteration to the next."""
DIFF = SpecialRole.DIFF
"""The role of what is differentiated."""
FORK = SpecialRole.FORK
"""The role of PRNG keys, which become one per index of the axis."""

Role = int | None | SpecialRole


class Roles(tuple):
    """`((filter, role), ...)` for the state of one carrier."""

    @property
    def filters(self) -> tuple[Any, ...]:
        return tuple(where for where, _ in self)

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(role for _, role in self)

    def __repr__(self) -> str:
        return f"Roles({super().__repr__()})"


def is_role(x: object) -> bool:
    """Returns whether `x` is a leaf of a role prefix."""
    return x is None or isinstance(x, int | SpecialRole | Roles)


def carrier_roles(role: Role | Roles) -> Roles:
    """Returns the roles of a carrier's groups; a bare role applies to all its state."""
    return role if isinstance(role, Roles) else Roles(((True, role),))


def broadcast_roles(
    prefix: object, tree: object, is_leaf: Callable[[Any], bool], what: str
) -> list[Any]:
    """Returns one role for each leaf of `tree`, from a pytree prefix called `what` in errors.

    Raises RoleError if `prefix` is not a prefix of `tree`.
    """
    flat: list[Any] = []

    def extend(role: object, subtree: object) -> None:
        flat.extend([role] * len(jax.tree.leaves(subtree, is_leaf=is_leaf)))

    try:
        jax.tree.map(extend, prefix, tree, is_leaf=is_role)
    except ValueError:
        # The user's prefix does not contain the roles of carriers.
        is_whole = not (isinstance(prefix, tuple) and any(type(x) is Roles for x in prefix))
        given = f"{what}={prefix!r}" if is_whole else what
        misfit = _prefix_mismatch(prefix, tree, is_leaf, what if is_whole else "")
        raise RoleError(f"{given} {misfit}") from None
    return flat


def _prefix_mismatch(
    prefix: object, tree: object, is_leaf: Callable[[Any], bool], what: str
) -> str:
    """Describes the first difference of a prefix and a tree; omits locations if `what` is ""."""
    of_results = what.startswith("out")
    of_args = what and not of_results
    whole = "the result" if of_results else "the arguments"
    fix = "Give one entry for all, or one for each."

    def find(role: object, x: object, path: str) -> str | None:
        of_role, of_x = _entries(role, is_role), _entries(x, is_leaf)
        if of_role is None:
            return None
        place = whole if not path else f"{'the result' if of_results else 'args'}{path}"
        if of_x is None or type(role) is not type(x) or list(of_role) != list(of_x):
            if of_args and not path and isinstance(role, tuple) and of_x is not None:
                return (
                    f"has {_with_count(of_role, 'entry', 'entries')}, and the call has "
                    f"{_with_count(of_x, 'argument', 'arguments')} by position. {fix}"
                )
            there, at = _describe(x, of_x), f" at {what}{path}" if what else ""
            place = place if what else "what it speaks of"
            return f"has {_describe(role, of_role)}{at}, where {place} is {there}. {fix}"
        found = (find(of_role[key], of_x[key], path + key) for key in of_role)
        return next((words for words in found if words is not None), None)

    return find(prefix, tree, "") or f"does not fit {whole}. {fix}"


def _entries(x: object, is_leaf: Callable[[Any], bool]) -> dict[str, Any] | None:
    if x is not None and is_leaf(x):
        return None
    found, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    if len(found) == 1 and found[0][1] is x:
        return None
    return {jax.tree_util.keystr(path): value for path, value in found}


def _describe(x: object, entries: dict[str, Any] | None) -> str:
    if entries is None:
        return "an array" if isinstance(x, jax.Array) else f"one {type(x).__name__}"
    keys = f" ({', '.join(entries)})" if isinstance(x, dict) and entries else ""
    return f"a {type(x).__name__} of {_with_count(entries, 'entry', 'entries')}{keys}"


def _with_count(entries: dict[str, Any], one: str, several: str) -> str:
    return f"{len(entries)} {one if len(entries) == 1 else several}"


def changed_shared_message(transformation: str, at: str) -> str:
    """Returns the error message about a body that changes a value shared by all iterations."""
    return (
        f"{transformation}: the body returns or changes what is shared by all iterations (None), "
        f"at {at}; have it carried from one to the next, or give an axis along which to stack it."
    )
