import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.keys import quick_key
from weft.core.frozen_dict import FrozenDict
from weft.core.meta import PARTITION_NAME
from weft.errors import AxisMetadataError, ModuleError
from weft.linen import partitioning
from weft.linen.linear import Dense
from weft.linen.methods import compact
from weft.linen.module import Module

KEY = quick_key(0)
X = jnp.ones((2, 3))
ones = jax.nn.initializers.ones


class Layer(Module):
    axes: tuple | None = ("embed", "mlp")

    @compact
    def __call__(self, x, twice=False):
        kernel = partitioning.param_with_axes("kernel", ones, (x.shape[-1], 3), axes=self.axes)
        return (2 if twice else 1) * x @ kernel


class Counter(Module):
    @compact
    def __call__(self):
        count = partitioning.variable_with_axes("stats", "count", jnp.zeros, (4,), axes=("mlp",))
        if self.is_mutable_collection("stats"):
            count.value += 1
        return count.value


def test_names_are_stored_in_params_axes():
    variables = Layer().init(KEY, X)
    names = partitioning.AxisMetadata(("embed", "mlp"))
    assert variables["params_axes"] == {"kernel_axes": names}
    assert partitioning.get_axis_names(variables["params_axes"]) == {"kernel": P("embed", "mlp")}
    assert Layer().apply(variables, X).tolist() == [[3, 3, 3], [3, 3, 3]]
    assert list(Layer(None).init(KEY, X)) == ["params"]


def test_variables_of_any_collection():
    variables = Counter().init(KEY)
    assert variables["stats"]["count"].tolist() == [1, 1, 1, 1]
    assert partitioning.get_axis_names(variables["stats_axes"]) == {"count": P("mlp")}
    count, _ = Counter().apply(variables, mutable="stats")
    assert count.tolist() == [2, 2, 2, 2]


def test_read_values_are_sharded():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    variables = Counter().init(KEY)
    with jax.set_mesh(mesh), partitioning.axis_rules((("mlp", "model"),)):
        count = jax.jit(lambda: Counter().apply(variables))()
    assert count.sharding.spec == P("model")


@pytest.mark.parametrize("axis, names", [(0, ("layers", "a", "b")), (1, ("a", "layers", "b"))])
def test_scan_adds_a_name(axis, names):
    class Block(Module):
        @compact
        def __call__(self, x, _):
            kernel = partitioning.param_with_axes("kernel", ones, (3, 3), axes=("a", "b"))
            return x @ kernel, None

    stack = partitioning.scan_with_axes(
        Block, variable_axes={"params": axis}, split_rngs={"params": True}, length=2
    )()
    variables = stack.init(KEY, X, None)
    assert variables["params_axes"]["kernel_axes"].names == names
    assert stack.apply(variables, X, None)[0].tolist() == [[9, 9, 9]] * 2
    shared = partitioning.scan_with_axes(
        Block, variable_broadcast="params", split_rngs={"params": False}, length=2
    )()
    assert shared.init(KEY, X, None)["params_axes"]["kernel_axes"].names == ("a", "b")


def test_vmap_adds_a_name():
    ensemble = partitioning.vmap_with_axes(
        Layer,
        variable_axes={"params": -1},
        split_rngs={"params": True},
        in_axes=None,
        axis_size=4,
        partitioning_axis_names={"params": "members"},
    )()
    variables = ensemble.init(KEY, X)
    assert variables["params"]["kernel"].shape == (3, 3, 4)
    assert variables["params_axes"]["kernel_axes"].names == ("embed", "mlp", "members")
    assert ensemble.apply(variables, X).shape == (4, 2, 3)


def test_metadata_gains_and_loses_axes():
    names = partitioning.AxisMetadata(("a", "b"))
    params = {"partition_name": "new"}
    for index, expected in (
        (0, ("new", "a", "b")),
        (-1, ("a", "b", "new")),
        (-2, ("a", "new", "b")),
    ):
        more = names.add_axis(index, params)
        assert more.names == expected and more.remove_axis(index, params) == names
    assert names.unbox() is names


def test_remat_does_not_count_the_module():
    layer = partitioning.remat(Layer, static_argnums=(1,))()
    variables = layer.init(KEY, X, False)
    assert variables["params_axes"]["kernel_axes"].names == ("embed", "mlp")
    assert layer.apply(variables, X, True)[0, 0] == 6
    gradient = jax.grad(lambda v: layer.apply({**variables, "params": v}, X, True).sum())
    assert gradient(variables["params"])["kernel"].tolist() == [[4, 4, 4]] * 3


def test_errors():
    variables = Layer().init(KEY, X)
    with pytest.raises(
        AxisMetadataError, match=r"'kernel' of the outermost module was given axes="
    ):
        Layer(("a", "b")).apply(variables, X, mutable="params_axes")
    with pytest.raises(AxisMetadataError, match="a/b_axes is 3; expected AxisMetadata"):
        partitioning.get_axis_names({"a": {"b_axes": 3}})
    with pytest.raises(ModuleError, match="'kernel' was created where no module's method runs"):
        partitioning.param_with_axes("kernel", ones, (2, 3), axes=("a", "b"))


@pytest.mark.parametrize("axes", ["ab", {"a", "b"}, 5, {"u": "ab"}])
def test_invalid_axes_are_rejected(axes):
    class Model(Module):
        @compact
        def __call__(self):
            partitioning.param_with_axes("w", ones, (3, 4), axes=axes)

    with pytest.raises(AxisMetadataError, match=r"of 'w': names is .*; expected a sequence"):
        Model().init(KEY)


def test_names_of_a_variable_that_is_a_dict_gain_and_lose_axes():
    box = partitioning.AxisMetadata(FrozenDict({"u": ("a", "b"), "v": ("a",), "w": None}))
    more = box.add_axis(-1, {PARTITION_NAME: "layers"})
    assert more.names == FrozenDict({"u": ("a", "b", "layers"), "v": ("a", "layers"), "w": None})
    assert more.remove_axis(-1, {}) == box


def test_layer_with_named_axes():
    kernel_init = partitioning.with_logical_partitioning(jax.nn.initializers.ones, ("embed", "mlp"))
    variables = Dense(4, kernel_init=kernel_init).init(jax.random.key(0), jnp.ones((2, 3)))
    box = variables["params"]["kernel"]
    assert isinstance(box, partitioning.LogicallyPartitioned) and box.names == ("embed", "mlp")
    with partitioning.logical_axis_rules((("embed", "model"), ("mlp", None))):
        assert partitioning.logical_to_mesh_axes(box.names) == P("model", None)
        assert partitioning.get_logical_axis_rules() == (("embed", "model"), ("mlp", None))
