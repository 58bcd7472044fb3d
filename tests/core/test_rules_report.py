from typing import Any

import jax
import jax.numpy as jnp
import pytest

from weft import struct
from weft.core.logical import LogicallyPartitioned, with_logical_partitioning
from weft.core.meta import AxisMetadata, Partitioned
from weft.core.rules_report import Finding, FindingKind, check_rules
from weft.errors import LogicalAxisError


class Note(struct.PyTreeNode, AxisMetadata):
    """Another kind of metadata, around the layout."""

    value: Any

    def unbox(self):
        return self.value

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self


def a_mesh():
    return jax.make_mesh((4, 2), ("data", "model"))


def box(shape, *names, **kwargs):
    return LogicallyPartitioned(jnp.ones(shape), names, **kwargs)


def test_valid_rules_have_no_findings():
    rules = [("embed", "data"), ("heads", "model"), ("kv", None)]
    tree = {"w": box((8, 4), "embed", "heads"), "b": box((3,), "kv"), "plain": jnp.ones(3)}
    assert check_rules(rules, tree, a_mesh()) == []


def test_shapes_are_enough():
    init = with_logical_partitioning(jax.nn.initializers.ones, ("embed", "heads"))
    avals = jax.eval_shape(lambda key: {"w": init(key, (6, 4))}, jax.random.key(0))
    [finding] = check_rules([("embed", "data"), ("heads", "model")], avals, a_mesh())
    assert finding == Finding(
        FindingKind.INDIVISIBLE_AXIS,
        "axis 0 of shape (6, 4), 'embed', cannot be split into 4 equal parts over 'data'; change "
        "its size or its layout.",
        "w",
    )
    assert str(finding).startswith("w: axis 0")
    with jax.set_mesh(a_mesh()):
        assert check_rules([("embed", "data"), ("heads", "model")], avals) == [finding]
    assert check_rules([("embed", "data"), ("heads", "model")], avals) == []


def test_name_without_rule():
    [finding] = check_rules([], Note({"w": box((8,), "embed")}))
    assert (finding.kind, finding.path) == (FindingKind.MISSING_RULE, "")
    assert "no rule is for 'embed'" in finding.message


def test_unknown_mesh_axes():
    tree = {"w": box((8, 4), "embed", ("pipe",)), "v": Note(Partitioned(jnp.ones(3), ("stage",)))}
    findings = check_rules([("embed", "rows")], tree, a_mesh())
    assert [f.kind for f in findings] == [FindingKind.UNKNOWN_MESH_AXIS] * 3
    assert [f.path for f in findings] == ["v", "w", ""]
    assert "over 'stage', and the mesh has the axes 'data', 'model'" in str(findings[0])
    assert "axis 1 of shape (8, 4) is to be split over 'pipe'" in str(findings[1])
    first, *_ = check_rules([], tree, jax.make_mesh((), (), axis_types=()))
    assert "over 'stage', and the mesh has the axes (none)." in str(first)
    assert str(findings[2]).startswith("by the rule ('embed', 'rows') an axis is to be split over")


def test_box_rules_take_precedence():
    tree = {"w": box((8,), "embed", rules=[("embed", "data")])}
    [finding] = check_rules([("embed", "model")], tree, a_mesh())
    assert finding.kind is FindingKind.UNUSED_RULE


def test_malformed_rules_and_names():
    with pytest.raises(LogicalAxisError, match="is not a rule"):
        check_rules([("embed",)], {})
    with pytest.raises(LogicalAxisError, match="more than once"):
        check_rules([], box((2, 2), "embed", "embed"))
