"""Rules that map logical axis names to mesh axes, and the rules of a context.

Rules are a sequence of pairs `(name, mesh_axes)`, where `mesh_axes` is a mesh axis, a tuple of
them, or None for an unsplit axis, in the order of priority. An array uses each mesh axis once: a
rule whose mesh axes are taken is skipped, and a later rule of the same name may apply instead.

The rules of a context belong to its thread and to the cache key of `jax.jit`: others recompile.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from weft.errors import LogicalAxisError

MeshAxes = (
    Any  # a mesh axis, a tuple of them, None, or `PartitionSpec.UNCONSTRAINED`
)
Rule = tuple[str, MeshAxes]
Rules = tuple[Rule, ...]

_context = jax.make_user_context(())


def checked_rules(rules: Iterable[Sequence[Any]] | None) -> Rules:
    """Returns rules as a hashable tuple of pairs of a name and its mesh axes; () for None.

    Raises LogicalAxisError if the rules do not have this form.
    """
    if rules is None:
        return ()
    if isinstance(rules, dict):
        raise LogicalAxisError(
            "the rules for logical axes are a dict, which has no priorities; expected a sequence "
            "of pairs in the order of their priority, as tuple(rules.items())."
        )
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise LogicalAxisError(
            f"the rules for logical axes are {rules!r}; expected a sequence of pairs, as "
            "((name, mesh_axis), ...)."
        )
    return tuple(_checked_rule(rule) for rule in rules)


def _checked_rule(rule: Sequence[Any]) -> Rule:
    is_pair = (
        isinstance(rule, tuple | list)
        and len(rule) == 2
        and isinstance(rule[0], str)
    )
    if not is_pair:
        raise LogicalAxisError(
            f"{rule!r} is not a rule for a logical axis; expected a pair of its name and its mesh "
            "axes, as ('embed', 'data')."
        )
    name, axes = rule
    if isinstance(axes, list):
        axes = tuple(axes)
    names = axes if isinstance(axes, tuple) else (axes,)
    is_without_names = (
        axes is None or axes is jax.sharding.PartitionSpec.UNCONSTRAINED
    )
    if not is_without_names and not all(
        isinstance(axis, str) for axis in names
    ):
        raise LogicalAxisError(
            f"the rule for {name!r} gives it the mesh axes {axes!r}; expected a name, a tuple of "
            "names, or None."
        )
    if len(set(names)) < len(names):
        raise LogicalAxisError(
            f"the rule for {name!r} gives it the mesh axes {axes!r}; each may be there once."
        )
    return name, axes


def get_logical_axis_rules() -> Rules:
    """Returns the rules of this thread's context."""
    return _context.value


def set_logical_axis_rules(rules: Iterable[Sequence[Any]] | None) -> None:
    """Sets the rules of this thread, until the surrounding `logical_axis_rules` ends."""
    _context(checked_rules(rules)).__enter__()


@contextlib.contextmanager
def logical_axis_rules(rules: Iterable[Sequence[Any]] | None) -> Iterator[None]:
    """Sets the rules for code traced in this context, in this thread; see `checked_rules`.

    >>> with logical_axis_rules([("embed", "data")]):
    ...     get_logical_axis_rules()
    (('embed', 'data'),)
    """
    with _context(checked_rules(rules)):
        yield


def composite_rules(
    rule1: Iterable[Sequence[Any]] | None, rule2: Iterable[Sequence[Any]] | None
) -> Rules:
    """Joins two sets of rules, the first with the higher priority.

    Raises LogicalAxisError if both have different rules for a name.

    >>> composite_rules([("embed", "data")], [("heads", "model")])
    (('embed', 'data'), ('heads', 'model'))
    """
    first_rules, second_rules = checked_rules(rule1), checked_rules(rule2)
    first_axes, second_axes = (
        _axes_by_name(first_rules),
        _axes_by_name(second_rules),
    )
    for name, axes in second_axes.items():
        if name in first_axes and axes != first_axes[name]:
            raise LogicalAxisError(
                f"two sets of rules conflict for the logical axis {name!r}: one gives it "
                f"{_listing(first_axes[name])}, the other {_listing(axes)}; take it out of one of "
                "them."
            )
    return first_rules + tuple(
        rule for rule in second_rules if rule[0] not in first_axes
    )


def _axes_by_name(rules: Rules) -> dict[str, list[MeshAxes]]:
    axes_by_name: dict[str, list[MeshAxes]] = {}
    for name, axes in rules:
        axes_by_name.setdefault(name, []).append(axes)
    return axes_by_name


def _listing(axes: list[MeshAxes]) -> str:
    return " and then ".join(map(repr, axes))
