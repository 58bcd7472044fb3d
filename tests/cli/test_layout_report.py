import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from weft import linen as nn
from weft.cli.layout_report import array_layouts, is_conflict, rule_findings
from weft.config import config_for_class
from weft.core.axis_rules import logical_axis_rules
from weft.core.rules_report import FindingKind
from weft.hierarchy.layers.linear import Linear
from weft.hierarchy.parameter_spec import TensorSpec
from weft.interop.hierarchy import InHierarchy

MESH = {"data": 4, "model": 2}


def test_bytes_per_device():
    specs = {
        "a": {"w": TensorSpec((8, 6), jnp.bfloat16, ("data", "model"))},
        "b": TensorSpec((8,), jnp.float32, (("data", "model"),)),
        "count": TensorSpec((), jnp.int32),
        "none": None,
    }
    found = [(x.path, x.bytes, x.bytes_per_device, x.problems) for x in array_layouts(specs, MESH)]
    assert found == [("a/w", 96, 12, ()), ("b", 32, 4, ()), ("count", 4, 4, ())]


def test_invalid_layouts():
    specs = {
        "w": TensorSpec((6, 3), jnp.float32, ("data", "model")),
        "x": TensorSpec((4,), jnp.float32, ("expert",)),
        "y": TensorSpec((12,), jnp.float32, (("data", "model"),)),
    }
    w, x, y = array_layouts(specs, MESH)
    assert w.problems == (
        "axis 0 of size 6 does not divide over data=4",
        "axis 1 of size 3 does not divide over model=2",
    )
    assert w.bytes_per_device == 4 * 2 * 2  # the largest part
    assert x.problems == (
        "axis 0 is sharded over 'expert', but the mesh has the axes 'data', 'model'",
    )
    assert y.problems == ("axis 0 of size 12 does not divide over data=4 × model=2",)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
        w = self.param("w", init, (8, 6))
        with_heads = nn.with_logical_partitioning(nn.initializers.ones, ("mlp", "heads"))
        return x @ w @ self.param("v", with_heads, (6, 4))


RULES = (("mlp", "model"), ("heads", "model"), ("embed", "data"), ("vocab", "model"))


def dense_specs(rules):
    cfg = InHierarchy.default_config().set(
        name="dense",
        layer=config_for_class(Dense),
        inputs=(jax.ShapeDtypeStruct((2, 8), jnp.float32),),
    )
    with logical_axis_rules(rules):
        return cfg.instantiate(parent=None).create_parameter_specs_recursively()


def test_applied_rules():
    specs = dense_specs(RULES)
    found = {x.path.rpartition("/")[2]: x for x in array_layouts(specs, MESH, rules=RULES)}
    assert found["w"].logical_axes == ("embed", "mlp")
    assert found["w"].spec == PartitionSpec("data", "model")
    assert found["w"].reason == "embed → data, mlp → model"
    assert found["v"].reason == "mlp → model, heads → - (model is taken)"
    (w,) = (x for x in array_layouts(dense_specs(()), MESH) if x.path.endswith("w"))
    assert w.reason == "embed has no rule, mlp has no rule"
    rules = (("embed", None), ("mlp", "model"))
    (w,) = (x for x in array_layouts(dense_specs(rules), MESH, rules=rules) if x.path[-1] == "w")
    assert w.reason == "embed → -, mlp → model"


def test_conflicting_and_unused_rules():
    findings = rule_findings(dense_specs(RULES), RULES, MESH)
    conflicts = [str(finding) for finding in findings if is_conflict(finding)]
    assert len(conflicts) == 1
    assert "v: in ('mlp', 'heads') the rule ('heads', 'model') conflicts" in conflicts[0]
    assert "the rule ('vocab', 'model') is never used" in str(findings[-1])
    rules = (("mlp", "experts"), ("embed", None))
    kinds = {f.kind for f in rule_findings(dense_specs(rules), rules, MESH) if is_conflict(f)}
    assert kinds == {FindingKind.UNKNOWN_MESH_AXIS}


def test_mesh_axis_names_without_rules():
    rules = (("data", None), ("fsdp", "data"), ("vocab", "data"))
    cfg = Linear.default_config().set(name="linear", input_dim=4, output_dim=4, bias=False)
    cfg.param_partition_spec = (("data", "fsdp"), "model")
    with logical_axis_rules(rules):
        specs = cfg.instantiate(parent=None).create_parameter_specs_recursively()
    (weight,) = array_layouts(specs, MESH, rules=rules)
    assert weight.spec == PartitionSpec("data", "model")
    assert weight.reason == "data×fsdp → data"
    (finding,) = rule_findings(specs, rules[1:], MESH)
    assert "the rule ('vocab', 'data') is never used" in str(finding)
