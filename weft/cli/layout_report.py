"""Sharding of each array of a training run, computed from its specs alone, without devices.

For each parameter: the origin of its layout (a rule for its logical names, or the line of the
config that set it), the shard of a device, and axes that are not divisible.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import weft
from weft import config, hierarchy
from weft.core import axis_rules, logical, spmd
from weft.core.rules_report import Finding, FindingKind, check_rules
from weft.typing import Nested, PartitionSpec


class ArrayLayout(NamedTuple):
    """Layout of an array on a mesh.

    Attributes:
        path: path in the state, joined by `/`.
        spec: the mesh axes of each axis.
        logical_axes: the logical names that these come from; None if they come from the config.
        reason: the origin of the layout: for each logical name the rule that applied, the line that
            set it, or the layer whose default it is; "" for no layout.
        bytes: size of the whole array.
        bytes_per_device: size of the largest shard.
        problems: axes that are not divisible, or that are sharded over an unknown mesh axis.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    logical_axes: tuple[Any, ...] | None
    reason: str
    bytes: int
    bytes_per_device: int
    problems: tuple[str, ...]


def array_layouts(
    specs: Nested[object],
    mesh_shape: Mapping[str, int],
    *,
    model: hierarchy.Module | None = None,
    rules: axis_rules.Rules = (),
) -> list[ArrayLayout]:
    """Returns the layouts of the arrays that a tree of specs describes.

    Args:
        specs: specs of parameters, or of any state; other leaves are ignored.
        model: the model of these parameters, to find the lines that set their layouts.
    """
    found = []
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        if not isinstance(spec, hierarchy.TensorSpec):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Of a PRNG key only the shape is known, that of its two words.
        dtype = jnp.dtype("float32" if spec.dtype is None else spec.dtype)
        axes = getattr(spec, "logical_axes", None)
        parts = [_parts(entry, mesh_shape) for entry in spec.partition_spec]
        held = math.prod(-(-size // n) for size, n in zip(spec.shape, parts, strict=False))
        found.append(
            ArrayLayout(
                path=name,
                shape=tuple(spec.shape),
                dtype=dtype,
                spec=spec.partition_spec,
                logical_axes=axes,
                reason=_fired(axes, spec.partition_spec, rules) if axes else _set_at(model, name),
                bytes=math.prod(spec.shape) * dtype.itemsize,
                bytes_per_device=held * dtype.itemsize,
                problems=tuple(_problems(spec, mesh_shape)),
            )
        )
    return found


def _parts(entry: str | Sequence[str] | None, mesh_shape: Mapping[str, int]) -> int:
    return math.prod(mesh_shape.get(name, 1) for name in spmd.axes_of(entry))


def _problems(spec: hierarchy.TensorSpec, mesh_shape: Mapping[str, int]) -> Iterator[str]:
    for axis, (size, entry) in enumerate(zip(spec.shape, spec.partition_spec, strict=False)):
        unknown = [name for name in spmd.axes_of(entry) if name not in mesh_shape]
        if unknown:
            yield (
                f"axis {axis} is sharded over {', '.join(map(repr, unknown))}, but the mesh has "
                f"the axes {', '.join(map(repr, mesh_shape))}"
            )
        elif size % _parts(entry, mesh_shape):
            sizes = {name: mesh_shape[name] for name in spmd.axes_of(entry) if mesh_shape[name] > 1}
            over = " × ".join(f"{name}={n}" for name, n in sizes.items())
            yield f"axis {axis} of size {size} does not divide over {over}"


def _fired(axes: Sequence[Any], spec: PartitionSpec, rules: axis_rules.Rules) -> str:
    """Returns for each logical name the mesh axes that a rule assigned."""
    texts = []
    for name, entry in zip(axes, spec, strict=True):
        name = "×".join(name) if isinstance(name, tuple) else name
        of_name = [given for rule, given in rules if rule == name]
        if not isinstance(name, str) or (not of_name and name == "×".join(spmd.axes_of(entry))):
            continue  # no name, or a mesh axis
        if entry is not None:
            texts.append(f"{name} → {'×'.join(spmd.axes_of(entry))}")
        elif None in of_name or not of_name:
            texts.append(f"{name} → -" if of_name else f"{name} has no rule")
        else:
            texts.append(f"{name} → - ({'×'.join(spmd.axes_of(of_name[0]))} is taken)")
    return ", ".join(texts)


def _set_at(model: hierarchy.Module | None, path: str) -> str:
    if model is None:
        return ""
    for name in path.split("/"):
        if name not in model.children:
            break
        model = model.children[name]
    if getattr(model.config, "param_partition_spec", None) is None:
        return ""
    line = config.origin(model.config, "param_partition_spec")
    if line is None:
        return f"the default of {type(model).__name__}"
    file, package = Path(line.file), Path(weft.__file__).parent
    if file.is_relative_to(package):
        return f"{file.relative_to(package.parent)}:{line.line}"
    return str(line)


def rule_findings(
    specs: Nested[object], rules: axis_rules.Rules, mesh_shape: Mapping[str, int]
) -> list[Finding]:
    """Returns findings about rules for logical axes, see `weft.core.rules_report`.

    Axes that are not divisible are omitted; they are in each array's `problems`.
    """
    boxes, in_tuples = {}, set()
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        axes = spec.logical_axes if isinstance(spec, hierarchy.ParameterSpec) else None
        if not axes:
            continue
        if logical.names_to_mesh_axes(axes, rules) == spec.partition_spec:
            in_tuples |= {name for entry in axes if isinstance(entry, tuple) for name in entry}
            axes = tuple(logical.mark_mesh_axes(axes, rules))
        # Variables with rules of their own are not subject to these rules.
        if logical.logical_to_mesh_axes(axes, rules) == spec.partition_spec:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            boxes[name] = logical.LogicallyPartitioned(
                jax.ShapeDtypeStruct(spec.shape, "float32"), axes
            )
    mesh = jax.sharding.AbstractMesh(tuple(mesh_shape.values()), tuple(mesh_shape))
    found = check_rules(rules, boxes, mesh)
    return [
        finding
        for finding in found
        if finding.kind is not FindingKind.INDIVISIBLE_AXIS
        and (finding.rule is None or finding.rule[0] not in in_tuples)
    ]


def is_conflict(finding: Finding) -> bool:
    """Returns whether a finding must be fixed, unlike a rule or a name that is only unused."""
    return finding.kind in (FindingKind.FIGHTING_RULES, FindingKind.UNKNOWN_MESH_AXIS)
