"""Logical axes of variables and activations, which rules map to mesh axes.

See `weft.core.logical` for how rules are applied.
"""

from weft.core.axis_rules import (
    get_logical_axis_rules,
    logical_axis_rules,
    set_logical_axis_rules,
)
from weft.core.logical import (
    LogicallyPartitioned,
    RulesFallback,
    logical_to_mesh,
    logical_to_mesh_axes,
    logical_to_mesh_sharding,
    with_logical_constraint,
    with_logical_partitioning,
)

__all__ = [
    "LogicallyPartitioned",
    "RulesFallback",
    "get_logical_axis_rules",
    "logical_axis_rules",
    "logical_to_mesh",
    "logical_to_mesh_axes",
    "logical_to_mesh_sharding",
    "set_logical_axis_rules",
    "with_logical_constraint",
    "with_logical_partitioning",
]
