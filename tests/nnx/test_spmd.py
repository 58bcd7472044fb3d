import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft import nnx
from weft.errors import (
    AxisMetadataError,
    LogicalAxisError,
    MeshError,
    NoMeshError,
    PartitionNameError,
    TraceContextError,
    VariableArgumentError,
)
from weft.nnx.spmd import (
    PARTITION_NAME,
    abstract_with_sharding,
    add_axis,
    get_abstract_model,
    get_named_sharding,
    get_partition_spec,
    logical_axis_rules,
    remove_axis,
    use_eager_sharding,
    with_partitioning,
)

LAYERS = {PARTITION_NAME: "layers"}


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


class Model(nnx.Module):
    """Variables with and without a layout, of several kinds."""

    def __init__(self):
        init = with_partitioning(jax.nn.initializers.ones, ("data", "model"))
        self.kernel = nnx.Param(init(jax.random.key(0), (4, 8)))
        self.bias = nnx.Param(jnp.ones(8))
        self.pair = nnx.Param({"a": jnp.ones((4, 2)), "b": jnp.ones(4)}, out_sharding=("embed",))
        self.step, self.rest, self.size = nnx.Variable(3), jnp.ones(2), 7


RULES = (("embed", "model"),)


def model():
    with use_eager_sharding(False):
        return Model()


def test_invalid_shardings(mesh):
    with pytest.raises(MeshError, match=r"'pair' has the layout P\('embed',\), and the mesh"):
        get_named_sharding(nnx.state(model()), mesh)
    with pytest.raises(VariableArgumentError, match="was given 3 for the mesh"):
        get_named_sharding(nnx.state(model()), 3)
    w = nnx.Param(jnp.ones(2), out_sharding=("embed",), sharding_rules=RULES, eager_sharding=False)
    with (
        logical_axis_rules([("embed", "data")]),
        pytest.raises(LogicalAxisError, match=r"the layout of 'a/w': .*conflict"),
    ):
        get_partition_spec({"a": {"w": w}})


def param(names=("data", "model"), **metadata):
    return nnx.Param(jnp.ones((4, 8)), out_sharding=names, eager_sharding=False, **metadata)


def test_optimizer_state_sharding_follows():
    with use_eager_sharding(False):
        w = nnx.Param(jnp.ones((4, 8)), out_sharding=(None, "m"), optimizer_sharding=("d", "m"))
    add_axis(w, 0, LAYERS)
    assert w.out_sharding == ("layers", None, "m") and w.optimizer_sharding[0] == "layers"
    remove_axis(w, 0, {})
    assert w.optimizer_sharding == ("d", "m")
    add_axis(w, 1, {})
    assert w.optimizer_sharding == ("d", "layers", "m") and w.out_sharding[1] == "layers"
    assert list(w.get_metadata(exclude_required=True)) == ["out_sharding", "optimizer_sharding"]
    remove_axis(w, 1, {PARTITION_NAME: "layers"})
    add_axis(w, 0, {**LAYERS, "optimizer_sharding": "other"})
    assert w.optimizer_sharding == ("other", "d", "m")


def test_other_metadata_with_an_entry_for_each_axis():
    calls = []
    w = param(
        sizes=(4, 8),
        kind="a",
        on_add_axis=lambda v, i, name: calls.append((i, name, v.out_sharding)),
        on_remove_axis=lambda v, i, name: calls.append((i, name, v.out_sharding)),
    )
    add_axis(w, 0, {PARTITION_NAME: "layers", "sizes": 3, "kind": "b", "other": 1})
    assert w.sizes == (3, 4, 8) and w.kind == "a" and not w.has_metadata("other")
    remove_axis(w, 0, {PARTITION_NAME: "layers", "sizes": 3})
    assert w.sizes == (4, 8)
    assert calls == [(0, "layers", ("layers", "data", "model")), (0, "layers", ("data", "model"))]
    plain = nnx.Param(jnp.ones(2), on_add_axis=lambda v, i, name: calls.append(name))
    add_axis(plain, 0, {})
    assert calls[-1] is None and not plain.has_metadata("out_sharding")


def test_other_sharding_types(mesh):
    with_mesh = add_axis(param(NamedSharding(mesh, P(None, "model"))), 0, {PARTITION_NAME: "data"})
    assert with_mesh.out_sharding == NamedSharding(mesh, P("data", None, "model"))
    assert add_axis(param(P("data")), 0, LAYERS).out_sharding == ("layers", "data")
    assert add_axis(param(None), 0, LAYERS).get_metadata("out_sharding", None) is None
    tree = {"a": [param(), nnx.Param(1)], "b": 3}
    assert add_axis(tree, 0, LAYERS)["a"][0].out_sharding == ("layers", "data", "model")


def test_missing_axes():
    with pytest.raises(PartitionNameError, match=r"'a/w': axis 0 .* called 'data'.* as 'layers'"):
        remove_axis({"a": {"w": param()}}, 0, LAYERS)
    with pytest.raises(AxisMetadataError, match="no axis 5"):
        add_axis(param(), 5, LAYERS)
    w = param()
    with pytest.raises(TraceContextError, match="Param of shape"):
        jax.jit(lambda: add_axis(w, 0, LAYERS) and None)()


def test_abstract_values_get_their_layout(mesh):
    with use_eager_sharding(False):
        abstract = jax.eval_shape(lambda: nnx.state(Model()))
    with jax.set_mesh(mesh), logical_axis_rules(RULES):
        laid = abstract_with_sharding(abstract)
    assert laid.kernel.get_value().sharding.spec == P("data", "model")
    assert laid.bias.get_value().sharding is None and laid.pair["b"].sharding.spec == P("model")
    assert abstract_with_sharding(nnx.state(model(), "no tag")) == nnx.State({})
    abstract.kernel.set_metadata(mesh=mesh)
    assert abstract_with_sharding(abstract.kernel).get_value().sharding.mesh == mesh
    abstract.kernel.del_metadata("mesh")
    with pytest.raises(NoMeshError, match="'kernel' has the layout"):
        abstract_with_sharding(abstract)


def test_abstract_model(mesh):
    with logical_axis_rules(RULES):
        graphdef, state = get_abstract_model(Model, mesh)
    kernel = state.kernel.get_value()
    assert kernel.shape == (4, 8) and state.step.shape == ()
    assert kernel.sharding == NamedSharding(mesh, P("data", "model"))
    assert state.pair["a"].sharding.spec == P("model") and state.rest.sharding.spec == P()
    assert nnx.merge(graphdef, state).kernel.out_sharding == ("data", "model")
    with pytest.raises(MeshError, match="the mesh has the axes 'data', 'model'"):
        get_abstract_model(Model, mesh)
    with (
        use_eager_sharding(False),
        pytest.raises(MeshError, match=r"the layout of 'pair': .*'embed'"),
    ):
        get_abstract_model(Model, mesh)
