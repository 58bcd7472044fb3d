import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from weft.core import axis_rules, logical
from weft.linen import spmd
from weft.linen.linear import Dense


def test_the_names_are_those_of_the_core():
    for name in spmd.__all__:
        assert getattr(spmd, name) is getattr(logical, name, None) or getattr(axis_rules, name)


def test_a_layer_whose_axes_have_names():
    kernel_init = spmd.with_logical_partitioning(jax.nn.initializers.ones, ("embed", "mlp"))
    variables = Dense(4, kernel_init=kernel_init).init(jax.random.key(0), jnp.ones((2, 3)))
    box = variables["params"]["kernel"]
    assert isinstance(box, spmd.LogicallyPartitioned) and box.names == ("embed", "mlp")
    with spmd.logical_axis_rules((("embed", "model"), ("mlp", None))):
        assert spmd.logical_to_mesh_axes(box.names) == P("model", None)
        assert spmd.get_logical_axis_rules() == (("embed", "model"), ("mlp", None))
