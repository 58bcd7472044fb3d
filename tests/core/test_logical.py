import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft.core import meta
from weft.core.axis_rules import logical_axis_rules
from weft.core.logical import (
    LogicallyPartitioned,
    RulesFallback,
    logical_to_mesh,
    logical_to_mesh_axes,
    with_logical_constraint,
    with_logical_partitioning,
)
from weft.errors import LogicalAxisError, MeshError, ShardingWarning

RULES = (("batch", "data"), ("heads", "model"), ("kv", None), ("all", ("data", "model")))


def a_mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def spec_of(x):
    entries = list(x.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


# Names and rules.


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("batch", r"'batch' was given .* write \('batch',\)"),
        (3, "3 was given for the names"),
        (("batch", 3), r"3 in \('batch', 3\) is not a name of an axis"),
        (("batch", "kv", "batch"), "the logical axis 'batch' is there more than once"),
    ],
)
def test_malformed_names(names, message):
    with pytest.raises(LogicalAxisError, match=message):
        logical_to_mesh_axes(names, RULES)


@pytest.mark.parametrize("leaf", ["batch", LogicallyPartitioned(1.0, ("batch",))])
def test_invalid_tree(leaf):
    with pytest.raises(LogicalAxisError, match=r"names of .*call get_partition_spec first"):
        logical_to_mesh({"w": leaf}, RULES)


# Constraints.


def test_name_without_rule():
    x = jnp.ones((4, 8))
    mesh = a_mesh()
    names = ("batch", "nobody")
    assert spec_of(with_logical_constraint(x, names, RULES, mesh)) == ("data",)
    kept = with_logical_constraint(x, names, RULES, mesh, RulesFallback.NO_CONSTRAINT)
    assert kept is x
    with pytest.raises(LogicalAxisError, match=r"no rule gave .* 'nobody'.*\('nobody', None\)"):
        with_logical_constraint(x, names, RULES, mesh, RulesFallback.RAISE_ERROR)
    fine = ("batch", "kv")
    out = with_logical_constraint(x, fine, RULES, mesh, RulesFallback.RAISE_ERROR)
    assert spec_of(out) == ("data",)


FIGHT = r"\('batch', 'all'\) the rule \('all', .*'data' is used by 'batch'.*\('all', None\) after"


def test_conflicting_rules_warn():
    x = jnp.ones((4, 8))
    mesh = a_mesh()
    with pytest.warns(ShardingWarning, match=FIGHT):
        out = with_logical_constraint(x, ("batch", "all"), RULES, mesh)
    assert spec_of(out) == ("data",)
    with pytest.raises(LogicalAxisError, match=FIGHT):
        with_logical_constraint(x, ("batch", "all"), RULES, mesh, RulesFallback.RAISE_ERROR)
    meant = (*RULES, ("all", None))
    assert spec_of(with_logical_constraint(x, ("batch", "all"), meant, mesh)) == ("data",)


def test_missing_or_indivisible_mesh_axis():
    with pytest.raises(MeshError, match="over 'pipe', and the mesh has the axes 'data', 'model'"):
        with_logical_constraint(jnp.ones(4), ("a",), [("a", "pipe")], a_mesh())
    with pytest.warns(ShardingWarning, match="cannot be split into 4 equal parts over 'data'"):
        with_logical_constraint(jnp.ones(3), ("batch",), RULES, a_mesh())


# Boxes.


def test_layout_of_a_box():
    mesh = a_mesh()
    box = LogicallyPartitioned(jnp.ones((4, 8)), ("batch", "heads"), rules=RULES)
    assert meta.get_partition_spec({"w": box}) == {"w": P("batch", "heads")}
    want = NamedSharding(mesh, P("data", "model"))
    assert meta.get_sharding({"w": box}, mesh) == {"w": want}
    plain = box.replace(rules=None)
    with logical_axis_rules(RULES):
        assert plain.get_sharding(mesh) == want
    with pytest.raises(LogicalAxisError, match="are logical, and there are no rules"):
        plain.get_sharding(mesh)


def test_rules_of_a_box_can_be_hashed():
    init = with_logical_partitioning(
        jax.nn.initializers.ones, ["batch", None], a_mesh(), [["batch", "data"]]
    )
    box = init(jax.random.key(0), (4, 8))
    assert init.__name__ == "ones"
    assert (box.names, box.rules) == (("batch", None), (("batch", "data"),))
    assert hash(jax.tree.structure(box)) == hash(jax.tree.structure(box))
    with pytest.raises(LogicalAxisError, match="is not a rule"):
        box.replace(rules=[("batch",)])


def test_factory_of_initializers_is_wrapped():
    init = with_logical_partitioning(jax.nn.initializers.he_normal, ("embed", None))
    box = init(jax.random.key(0), (4, 8))
    assert (box.names, box.value.shape) == (("embed", None), (4, 8))


def test_box_implements_axis_metadata():
    box = LogicallyPartitioned(jnp.ones((4, 8)), ("batch", "heads"), rules=RULES)
    told = meta.add_axis({"w": box}, 0, {meta.PARTITION_NAME: "layers"})["w"]
    assert type(told) is LogicallyPartitioned
    assert (told.names, told.rules) == (("layers", "batch", "heads"), RULES)
    assert LogicallyPartitioned.from_nnx_metadata(box.to_nnx_metadata()) == box
    assert box.to_nnx_metadata()["sharding_rules"] == RULES
