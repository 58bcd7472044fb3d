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
    logical_to_mesh_sharding,
    names_to_mesh_axes,
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
    ("names", "spec"),
    [
        (("batch", "heads"), P("data", "model")),
        (["heads", None, "kv"], P("model", None, None)),
        (P("all"), P(("data", "model"))),
        (("nobody", "batch"), P(None, "data")),
        (("batch", "all"), P("data", None)),  # an earlier rule has taken "data"
        (("all", "batch"), P(None, "data")),
        ((("data",), "batch"), P("data", None)),  # mesh axes may be given as they are
        ((P.UNCONSTRAINED, "heads"), P(P.UNCONSTRAINED, "model")),
        ((), P()),
        (None, None),
    ],
)
def test_rules_are_applied_in_their_order(names, spec):
    assert logical_to_mesh_axes(names, RULES) == spec
    with logical_axis_rules(RULES):
        assert logical_to_mesh_axes(names) == spec


def test_later_rule_applies_if_the_first_conflicts():
    rules = [("a", "data"), ("b", "data"), ("b", "model")]
    assert logical_to_mesh_axes(("a", "b"), rules) == P("data", "model")
    assert logical_to_mesh_axes(("b",), rules) == P("data")


def test_no_rules_replicate():
    assert logical_to_mesh_axes(("batch", "heads")) == P(None, None)


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


@pytest.mark.parametrize(
    ("names", "rules", "spec"),
    [
        (("embed", ["data", "fsdp"]), [], P("embed", ("data", "fsdp"))),
        (("embed", "data"), [("embed", "model")], P("model", "data")),
        ((None, P.UNCONSTRAINED, "data"), [("embed", "model")], P(None, P.UNCONSTRAINED, "data")),
        (("embed", ("data", "fsdp")), [("fsdp", None)], P("embed", "data")),
        ((("fsdp",),), [("fsdp", None)], P(None)),
        # A mesh axis that an entry has by its own name is taken.
        (("embed", ("data",)), [("embed", "data"), ("embed", "model")], P("model", "data")),
    ],
    ids=["no rules", "mesh axis", "free", "tuple", "empty tuple", "taken"],
)
def test_names_mixed_with_mesh_axes(names, rules, spec):
    assert names_to_mesh_axes(names, rules) == spec
    with logical_axis_rules(rules):
        assert names_to_mesh_axes(names) == spec


def test_tree_of_names():
    tree = {"w": P("batch", "heads"), "b": ("heads",), "step": None, "two": (P("kv"), P())}
    want = {"w": P("data", "model"), "b": P("model"), "step": None, "two": (P(None), P())}
    assert logical_to_mesh(tree, RULES) == want
    mesh = a_mesh()
    assert logical_to_mesh_sharding(tree, mesh, RULES)["two"] == (
        NamedSharding(mesh, P(None)),
        NamedSharding(mesh, P()),
    )
    with logical_axis_rules(RULES):
        assert logical_to_mesh(tree) == want
        assert logical_to_mesh_sharding(tree, mesh)["b"] == NamedSharding(mesh, P("model"))


@pytest.mark.parametrize("leaf", ["batch", LogicallyPartitioned(1.0, ("batch",))])
def test_invalid_tree(leaf):
    with pytest.raises(LogicalAxisError, match=r"names of .*call get_partition_spec first"):
        logical_to_mesh({"w": leaf}, RULES)


# Constraints.


@pytest.mark.parametrize("compiled", [False, True])
def test_value_is_sharded_by_its_names(compiled):
    x = jnp.ones((4, 8))

    def given(x):
        return with_logical_constraint(x, ("batch", "heads"), RULES, a_mesh())

    def of_context(x):
        return with_logical_constraint(x, ("batch", "heads"))

    assert spec_of((jax.jit(given) if compiled else given)(x)) == ("data", "model")
    with jax.set_mesh(a_mesh()), logical_axis_rules(RULES):
        assert spec_of((jax.jit(of_context) if compiled else of_context)(x)) == ("data", "model")


def test_value_is_unchanged_without_mesh_or_rules():
    x = jnp.ones((4, 8))
    assert with_logical_constraint(x, ("batch", "heads"), RULES) is x
    assert with_logical_constraint(x, ("batch", "heads"), mesh=a_mesh()) is x
    assert with_logical_constraint(x, None, RULES, a_mesh()) is x


def test_names_of_a_tree():
    x = jnp.ones((8, 8))
    tree = {"a": x, "b": [x, x], "c": x, "d": x}
    names = {"a": ("batch", None), "b": ["heads", "kv"], "c": None, "d": (None, None)}
    out = with_logical_constraint(tree, names, RULES, a_mesh())
    assert spec_of(out["a"]) == ("data",)
    assert [spec_of(y) for y in out["b"]] == [("model",)] * 2
    assert out["c"] is x
    assert out["d"].sharding.is_fully_replicated
    pair = with_logical_constraint((x, x), (("batch", "kv"), ("kv", "batch")), RULES, a_mesh())
    assert [spec_of(y) for y in pair] == [("data",), (None, "data")]


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


def test_box_uses_its_own_or_context_rules():
    x = jnp.ones((4, 8))
    mesh = a_mesh()
    own = LogicallyPartitioned(x, ("batch", "heads"), mesh, RULES)
    assert spec_of(own.unbox()) == ("data", "model")
    assert spec_of(jax.jit(meta.unbox)(own)) == ("data", "model")
    assert own.unbox(apply_constraint=False) is x
    plain = LogicallyPartitioned(x, ("batch", "heads"))
    assert plain.unbox() is x
    with jax.set_mesh(mesh):
        assert plain.unbox() is x
        with logical_axis_rules(RULES):
            assert spec_of(plain.unbox()) == ("data", "model")


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
