"""Shardings in any form, with rules for logical axes.

A layout may be a `NamedSharding`, a `Format` with one, a `PartitionSpec`, or a tuple of names.
Unlike in `weft.core.logical`, names without a rule are mesh axes, and each name is translated
separately: no rule is skipped because of a used mesh axis. Invalid rules raise LogicalAxisError.
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
    """Returns the mesh of a sharding, or None.

    Example:
        >>> get_mesh(PartitionSpec("data"))
    """
    sharding = without_format(sharding)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def without_format(sharding: Any) -> Any:
    """Returns the sharding of a `Format`; other values unchanged.

    Example:
        >>> without_format(("data", None))
        ('data', None)
    """
    return sharding.sharding if isinstance(sharding, Format) else sharding


def map_sharding(f: Callable[[Any], Any], sharding: Any) -> Any:
    """Maps the entry of each axis of a sharding.

    Returns:
        A `NamedSharding` over the same mesh or a `PartitionSpec`; None if `sharding` is neither of
        these nor a tuple.

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
    """Translates names to mesh axes by these rules alone; the last one for a name applies.

    Example:
        >>> from_sharding_rules(("embed", "model", None), [("embed", "data")])
        ('data', 'model', None)
    """
    return tuple(map(_translator(sharding_rules), sharding))


def _translator(rules: AnyRules) -> Callable[[Any], Any]:
    table = dict(checked_rules(rules))
    return lambda entry: table.get(entry, entry) if isinstance(entry, str) else entry


def apply_rules(sharding: Any, sharding_rules: AnyRules | None) -> Any:
    """Translates a sharding's names to mesh axes, by these rules and those of the context.

    Names without a rule are unchanged; for values that are not shardings, the result is None.

    Raises:
        LogicalAxisError: if rules for a name differ from those of the context.

    Example:
        >>> apply_rules(("embed", None), [("embed", "data")])
        P('data', None)
    """
    rules = composite_rules(get_logical_axis_rules(), sharding_rules)
    return map_sharding(_translator(rules), sharding)


def get_pspec(sharding: Any, sharding_rules: AnyRules | None = None) -> PartitionSpec | None:
    """Returns the layout of a sharding, with its names as mesh axes; see `apply_rules`.

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
    """Lays out a value over a mesh.

    Args:
        out_sharding: a `NamedSharding`, a `PartitionSpec` or a tuple of names. For None or no
            entries, the value is returned unchanged.
        sharding_rules: see `apply_rules`.
        mesh: by default that of `out_sharding` or of `jax.set_mesh`.

    Raises:
        NoMeshError: if there is no mesh.
        MeshError: if the mesh lacks an axis, or there are more entries than axes.

    Warns:
        ShardingWarning: if a mesh axis does not divide an axis of the value.

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
