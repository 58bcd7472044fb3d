"""The programs that axis metadata is proposed with, on scopes and on modules."""

from typing import Any, Dict, Optional, Tuple, TypeVar  # noqa: UP035 - as it is written there

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import weft as flax
import weft.struct
from weft import linen as nn
from weft.core import apply, init, lift, meta
from weft.core.meta import AxisMetadata

# The programs are of users, who may let JAX add axes.
pytestmark = pytest.mark.rank_promotion("allow")

TAxisMetadata = TypeVar("TAxisMetadata", bound="AxisMetadata")


class Partitioned(flax.struct.PyTreeNode, AxisMetadata):
    value: Any
    names: Tuple[Optional[str], ...] = flax.struct.field(pytree_node=False)  # noqa: UP006, UP045

    # Cases beyond the proposal.
    def unbox(self):
        return self.value

    def _get_partition_name(self, params):
        return params["partition_name"]

    def add_axis(self, index: int, params: Dict[Any, Any]) -> TAxisMetadata:  # noqa: UP006
        axis_name = self._get_partition_name(params)
        names = list(self.names)
        names.insert(index, axis_name)
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: Dict[Any, Any]) -> TAxisMetadata:  # noqa: UP006
        axis_name = self._get_partition_name(params)
        names = list(self.names)
        assert names.pop(index) == axis_name
        return self.replace(names=tuple(names))


def with_partitioning(init_fn, names):
    def wrapper(*args, **kwargs):
        return Partitioned(init_fn(*args, **kwargs), names)

    return wrapper


@pytest.fixture(params=["of the proposal", "of Weft"])
def kinds(request):
    if request.param == "of Weft":
        return meta.Partitioned, meta.with_partitioning
    return Partitioned, with_partitioning


def partitioned_dense(with_partitioning):
    # init kernel with lecun normal and split the output features over the data axis
    kernel_init = with_partitioning(jax.nn.initializers.lecun_normal(), (None, "data"))

    def dense(scope, x):
        kernel = scope.param("kernel", kernel_init, (x.shape[-1], 8))
        return x @ kernel + scope.param("bias", jax.nn.initializers.zeros, (8,))

    return dense


def test_initializer_creates_box(kinds):
    kind, with_partitioning = kinds
    rng = jax.random.key(0)
    _, variables = init(partitioned_dense(with_partitioning))(rng, jnp.ones((4,)))
    shapes = jax.tree.map(np.shape, variables)
    expected = {"params": {"kernel": kind(value=(4, 8), names=(None, "data")), "bias": (8,)}}
    assert shapes == expected


def test_boxes_become_specs(kinds):
    kind, with_partitioning = kinds
    _, variables = init(partitioned_dense(with_partitioning))(jax.random.key(0), jnp.ones((4,)))

    def to_sharding_spec(x):
        if isinstance(x, kind):
            return PartitionSpec(*x.names)
        else:
            # fully replicated
            return PartitionSpec()

    # Result: {"params": {"kernel": PartitionSpec(None, "data"), bias: PartitionSpec()}}
    variables_pspec = jax.tree.map(
        to_sharding_spec, variables, is_leaf=lambda x: isinstance(x, kind)
    )
    assert variables_pspec == {
        "params": {"kernel": PartitionSpec(None, "data"), "bias": PartitionSpec()}
    }


def test_optimizer_inherits_the_boxes(kinds):
    kind, with_partitioning = kinds
    _, variables = init(partitioned_dense(with_partitioning))(jax.random.key(0), jnp.ones((4,)))
    moments = optax.adam(1e-3).init(variables["params"])[0].mu
    assert isinstance(moments["kernel"], kind)
    assert moments["kernel"].names == (None, "data")


def test_unboxing_is_the_default(kinds):
    kind, with_partitioning = kinds

    def f(self):
        kernel_init = with_partitioning(jax.nn.initializers.ones, (None, "data"))
        shape = (2, 3)
        kernel = self.param("kernel", kernel_init, shape)  # No AxisMetadata instances
        # AxisMetadata boxes are preserved
        kernel_box = self.get_variable("params", "kernel", unbox=False)
        assert isinstance(kernel, jax.Array)
        assert isinstance(kernel_box, kind)
        assert isinstance(self.variable("params", "other", lambda: kernel_box).value, jax.Array)
        boxed = self.variable("params", "box", lambda: kernel_box, unbox=False)
        assert isinstance(boxed.value, kind)
        assert isinstance(self.get_variable("params", "box", unbox=True), jax.Array)

    init(f)(jax.random.key(0))


def test_lifted_transformation_passes_its_axis_name(kinds):
    _, with_partitioning = kinds
    dense = partitioned_dense(with_partitioning)
    stack = lift.scan(
        lambda scope, x, _: (dense(scope, x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={meta.Partitioned.AXIS_NAME: "layers"},
    )
    _, variables = init(stack)(jax.random.key(0), jnp.ones((8,)), None)
    assert variables["params"]["kernel"].names == ("layers", None, "data")
    (y, _), again = apply(stack, mutable=["params"])(variables, jnp.ones((8,)), None)
    assert y.shape == (8,)
    assert again["params"]["kernel"].names == ("layers", None, "data")


def test_initializer_adds_metadata_to_other_layers(kinds):
    kind, with_partitioning_ = kinds
    if kind is meta.Partitioned:
        # As it is written there: the initializer's factory, without the call.
        kernel_init = with_partitioning_(nn.initializers.lecun_normal, (None, "data"))
    else:
        kernel_init = with_partitioning_(nn.initializers.lecun_normal(), (None, "data"))
    features, rng = 8, jax.random.key(0)
    partitioned_dense = nn.Dense(features, kernel_init=kernel_init)
    variables = partitioned_dense.init(rng, jnp.ones((4,)))
    shapes = jax.tree.map(np.shape, variables)
    assert shapes == {"params": {"kernel": kind(value=(4, 8), names=(None, "data")), "bias": (8,)}}
    assert partitioned_dense.apply(variables, jnp.ones((4,))).shape == (8,)


def test_modules_read_unboxed_values(kinds):
    kind, with_partitioning = kinds

    class Kernel(nn.Module):
        kernel_init: Any

        @nn.compact
        def __call__(self, shape):
            kernel = self.param("kernel", self.kernel_init, shape)  # No AxisMetadata instances
            # AxisMetadata boxes are preserved
            kernel_box = self.get_variable("params", "kernel", unbox=False)
            return kernel, kernel_box

    module = Kernel(with_partitioning(jax.nn.initializers.ones, (None, "data")))
    (kernel, kernel_box), _ = module.init_with_output(jax.random.key(0), (2, 3))
    assert isinstance(kernel, jax.Array)
    assert isinstance(kernel_box, kind)


def test_scanned_modules_get_the_axis_name():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            kernel_init = nn.with_partitioning(nn.initializers.ones, (None, "data"))
            return nn.Dense(8, kernel_init=kernel_init)(x), None

    stack = nn.scan(
        Layer,
        length=3,
        split_rngs={"params": True},
        variable_axes={"params": 0},
        metadata_params={nn.Partitioned.AXIS_NAME: "layers"},
    )
    variables = stack().init(jax.random.key(0), jnp.ones((8,)), None)
    assert variables["params"]["Dense_0"]["kernel"].names == ("layers", None, "data")
