"""Shardings in any form, and rules for logical axes applied to them.

A variable may be given its layout as a `NamedSharding`, a `Format` that holds one, a
`PartitionSpec`, or a tuple of names; the functions here take all of them. Unlike
`weft.core.logical`, a name that has no rule is taken for a mesh axis, and every name is translated
by itself: no rule is passed over because another has its mesh axis.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from weft.core.axis_rules import (
    checked_rules,
    composite_rules,
    get_logical_axis_rules,
    logical_axis_rules,
    set_logical_axis_rules,
)
from weft.core.layout import AnyMesh, constrain, get_global_mesh
from weft.errors import NoMeshError

AnyRules = Iterable[Sequence[Any]]
Layout = NamedSharding | Format | PartitionSpec | tuple[Any, ...]

__all__ = [
    "apply_rules",
    "composite_rules",
    "from_sharding_rules",
    "get_logical_axis_rules",
    "get_mesh",
    "get_pspec",
    "logical_axis_rules",
    "map_sharding",
    "set_logical_axis_rules",
    "shard_value",
    "without_format",
]


def get_mesh(sharding: Any) -> AnyMesh | None:
    """The mesh that a sharding knows, or None.

    Example:
        >>> get_mesh(PartitionSpec("data"))
    """
    sharding = without_format(sharding)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def without_format(sharding: Any) -> Any:
    """The sharding that a `Format` holds; anything else as it is.

    Example:
        >>> without_format(("data", None))
        ('data', None)
    """
    return sharding.sharding if isinstance(sharding, Format) else sharding


def map_sharding(f: Callable[[Any], Any], sharding: Any) -> Any:
    """Calls a function with the entry of each axis of a sharding.

    Args:
        f: from an entry to an entry.
        sharding: a `NamedSharding`, a `PartitionSpec` or a tuple of entries; for anything else the
          result is None.

    Returns:
        A `NamedSharding` over the same mesh, or a `PartitionSpec`.

    Example:
        >>> map_sharding(str.upper, ("data", "model"))
        P('DATA', 'MODEL')
    """
    sharding = without_format(sharding)
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, map_sharding(f, sharding.spec))
    if isinstance(sharding, PartitionSpec | tuple):
        return PartitionSpec(*map(f, sharding))
    return None


def from_sharding_rules(sharding: Iterable[Any], sharding_rules: AnyRules) -> tuple[Any, ...]:
    """Names as mesh axes, by these rules alone.

    Args:
        sharding: for each axis a name or another entry.
        sharding_rules: the rules; the last one for a name holds. Names without one stay.

    Raises:
        LogicalAxisError: if the rules are not in form.

    Example:
        >>> from_sharding_rules(("embed", "model", None), [("embed", "data")])
        ('data', 'model', None)
    """
    return tuple(map(_translator(sharding_rules), sharding))


def _translator(rules: AnyRules) -> Callable[[Any], Any]:
    table = dict(checked_rules(rules))
    return lambda entry: table.get(entry, entry) if isinstance(entry, str) else entry


def apply_rules(sharding: Any, sharding_rules: AnyRules | None) -> Any:
    """A sharding with its names as mesh axes, by these rules and those of the context.

    Args:
        sharding: a `NamedSharding`, a `PartitionSpec` or a tuple of names; for anything else the
          result is None.
        sharding_rules: the rules; names that have none, here or in the context, stay.

    Raises:
        LogicalAxisError: if the rules are not in form, or those of the context differ.

    Example:
        >>> apply_rules(("embed", None), [("embed", "data")])
        P('data', None)
    """
    rules = composite_rules(get_logical_axis_rules(), sharding_rules)
    return map_sharding(_translator(rules), sharding)


def get_pspec(sharding: Any, sharding_rules: AnyRules | None = None) -> PartitionSpec | None:
    """The layout that a sharding asks for, with its names as mesh axes.

    Args:
        sharding: a `NamedSharding`, a `PartitionSpec` or a tuple of names; for anything else the
          result is None.
        sharding_rules: as for `apply_rules`.

    Example:
        >>> get_pspec(("embed", None), [("embed", "data")])
        P('data', None)
    """
    sharding = without_format(sharding)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    return apply_rules(spec, sharding_rules)


def shard_value(
    value: Any, out_sharding: Any, sharding_rules: AnyRules | None, mesh: AnyMesh | None
) -> Any:
    """Lays a value over a mesh.

    Args:
        value: a pytree of arrays.
        out_sharding: a `NamedSharding`, a `PartitionSpec` or a tuple of names. Without any entry,
          or for None, the value stays as it is.
        sharding_rules: as for `apply_rules`.
        mesh: the mesh; if None, that of `out_sharding` or of `jax.set_mesh`.

    Raises:
        NoMeshError: if there is no mesh.
        MeshError: if the mesh has no axis of a name, or there are more entries than axes.

    Warns:
        ShardingWarning: if a mesh axis does not divide the axis that is split over it.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> shard_value(jax.numpy.ones(4), ("embed",), [("embed", "data")], mesh).sharding.spec
        P('data',)
    """
    spec = get_pspec(out_sharding, sharding_rules)
    if not spec:
        return value
    known = (mesh, get_mesh(out_sharding), get_global_mesh())
    mesh = next((m for m in known if m is not None), None)
    if mesh is None:
        raise NoMeshError(
            f"a value is to be laid out as {spec}, and there is no mesh; give one, or enter "
            "jax.set_mesh(mesh)."
        )
    return constrain(value, spec, mesh)
