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
    layouts: list[ArrayLayout] = []
    for key_path, spec in jax.tree_util.tree_leaves_with_path(specs):
        if not isinstance(spec, hierarchy.TensorSpec):
            continue
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        logical_axes = getattr(spec, "logical_axes", None)
        if logical_axes:
            reason = _rules_applied(logical_axes, spec.partition_spec, rules)
        else:
            reason = _origin_in_config(model, path)
        # Of a PRNG key only the shape is known, that of its two words.
        dtype = jnp.dtype("float32" if spec.dtype is None else spec.dtype)
        shard_shape: list[int] = []
        for size, mesh_axes in zip(
            spec.shape, spec.partition_spec, strict=False
        ):
            shard_shape.append(
                math.ceil(size / _num_shards(mesh_axes, mesh_shape))
            )
        layouts.append(
            ArrayLayout(
                path=path,
                shape=tuple(spec.shape),
                dtype=dtype,
                spec=spec.partition_spec,
                logical_axes=logical_axes,
                reason=reason,
                bytes=math.prod(spec.shape) * dtype.itemsize,
                bytes_per_device=math.prod(shard_shape) * dtype.itemsize,
                problems=tuple(_problems(spec, mesh_shape)),
            )
        )
    return layouts


def _num_shards(
    mesh_axes: str | Sequence[str] | None, mesh_shape: Mapping[str, int]
) -> int:
    return math.prod(
        mesh_shape.get(name, 1) for name in spmd.axes_of(mesh_axes)
    )


def _problems(
    spec: hierarchy.TensorSpec, mesh_shape: Mapping[str, int]
) -> Iterator[str]:
    for axis, (size, mesh_axes) in enumerate(
        zip(spec.shape, spec.partition_spec, strict=False)
    ):
        names = spmd.axes_of(mesh_axes)
        unknown = [repr(name) for name in names if name not in mesh_shape]
        if unknown:
            yield (
                f"axis {axis} is sharded over {', '.join(unknown)}, but the mesh has "
                f"the axes {', '.join(map(repr, mesh_shape))}"
            )
        elif size % _num_shards(mesh_axes, mesh_shape):
            sizes = [
                f"{name}={mesh_shape[name]}"
                for name in names
                if mesh_shape[name] > 1
            ]
            yield f"axis {axis} of size {size} does not divide over {' × '.join(sizes)}"


def _rules_applied(
    logical_axes: Sequence[str | tuple[str, ...] | None],
    spec: PartitionSpec,
    rules: axis_rules.Rules,
) -> str:
    """Returns for each logical name the mesh axes that a rule assigned."""
    texts: list[str] = []
    for logical_axis, mesh_axes in zip(logical_axes, spec, strict=True):
        if isinstance(logical_axis, tuple):
            name = "×".join(logical_axis)
        elif isinstance(logical_axis, str):
            name = logical_axis
        else:
            continue
        mesh_text = "×".join(spmd.axes_of(mesh_axes))
        candidates = [
            target for rule_name, target in rules if rule_name == name
        ]
        if not candidates and name == mesh_text:
            continue  # a mesh axis
        if mesh_axes is not None:
            texts.append(f"{name} → {mesh_text}")
        elif not candidates:
            texts.append(f"{name} has no rule")
        elif None in candidates:
            texts.append(f"{name} → -")
        else:
            texts.append(
                f"{name} → - ({'×'.join(spmd.axes_of(candidates[0]))} is taken)"
            )
    return ", ".join(texts)


def _origin_in_config(model: hierarchy.Module | None, path: str) -> str:
    """Returns the line that set the layout of a parameter; "" if it has none."""
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
    specs: Nested[object],
    rules: axis_rules.Rules,
    mesh_shape: Mapping[str, int],
) -> list[Finding]:
    """Returns findings about rules for logical axes, see `weft.core.rules_report`.

    Axes that are not divisible are omitted; they are in each array's `problems`.
    """
    boxes: dict[str, logical.LogicallyPartitioned] = {}
    names_in_tuples: set[str] = set()
    for key_path, spec in jax.tree_util.tree_leaves_with_path(specs):
        axes = (
            spec.logical_axes
            if isinstance(spec, hierarchy.ParameterSpec)
            else None
        )
        if not axes:
            continue
        if logical.names_to_mesh_axes(axes, rules) == spec.partition_spec:
            for axis in axes:
                if isinstance(axis, tuple):
                    names_in_tuples.update(axis)
            axes = tuple(logical.mark_mesh_axes(axes, rules))
        # Variables with rules of their own are not subject to these rules.
        if logical.logical_to_mesh_axes(axes, rules) == spec.partition_spec:
            path = jax.tree_util.keystr(key_path, simple=True, separator="/")
            shape = jax.ShapeDtypeStruct(spec.shape, "float32")
            boxes[path] = logical.LogicallyPartitioned(shape, axes)
    mesh = jax.sharding.AbstractMesh(
        tuple(mesh_shape.values()), tuple(mesh_shape)
    )
    findings: list[Finding] = []
    for finding in check_rules(rules, boxes, mesh):
        is_shown_with_array = finding.kind is FindingKind.INDIVISIBLE_AXIS
        # A name in a tuple is that of a part of an axis, and `boxes` have whole axes.
        is_in_tuple = (
            finding.rule is not None and finding.rule[0] in names_in_tuples
        )
        if not (is_shown_with_array or is_in_tuple):
            findings.append(finding)
    return findings


def is_conflict(finding: Finding) -> bool:
    """Returns whether a finding must be fixed, unlike a rule or a name that is only unused."""
    return finding.kind in (
        FindingKind.FIGHTING_RULES,
        FindingKind.UNKNOWN_MESH_AXIS,
    )
