import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft import nnx
from weft.errors import ObjectArgumentError, StateFilterError
from weft.nnx.prefixes import prefix
from weft.nnx.transforms.symbols import StateAxes


class Node(nnx.Module):
    """Anything, with a name and variables."""

    def __init__(self):
        self.w, self.n = nnx.Param(jnp.ones((3, 2))), nnx.BatchStat(jnp.ones(()))
        self.name, self.xs = "node", nnx.List([nnx.Cache(jnp.ones((2, 3)))])


AXES = {nnx.Param: 0, nnx.PathContains("xs"): 1, ...: None}


@pytest.mark.parametrize("axes", [AXES, StateAxes(AXES)], ids=["dict", "StateAxes"])
def test_it_stands_where_jax_takes_a_prefix(axes):
    node = Node()
    made = prefix(node, axes)
    assert (made.w, made.n, made.xs[0], made.name) == (0, None, 1, "node")
    f = jax.vmap(lambda m, x: m.w.sum() + m.xs[0].sum() + m.n * x, in_axes=(made, None))
    assert f(node, 2.0).tolist() == [6, 6, 6]


def test_states_values_and_functions():
    tree = [nnx.state(Node()), {"a": jnp.ones(1), "b": 3}]
    by_filter = prefix(tree, {nnx.Param: "p", ...: "x"})
    assert by_filter[0].w == "p" and by_filter[1] == {"a": "x", "b": "x"}
    paths = prefix(tree, lambda path, x: (path, type(x).__name__))
    assert paths[0].xs[0] == ((0, "xs", 0), "Cache") and paths[1]["b"] == ((1, "b"), "int")


def test_what_no_filter_matches():
    with pytest.raises(StateFilterError, match="'n', a BatchStat; the filters are Param; add"):
        prefix(Node(), {nnx.Param: 0})
    with pytest.raises(ObjectArgumentError, match="prefix was given 3; give a dict from filters"):
        prefix(Node(), 3)


class Layer(nnx.Module):
    """Has static attributes of every kind, which are not axes."""

    def __init__(self):
        self.w, self.n = nnx.Param(jnp.full((3, 2), 2.0)), nnx.BatchStat(jnp.ones(()))
        self.act, self.k, self.name, self.rate = jnp.tanh, 3, "layer", 0.5
        self.mark, self.parts = nnx.static((0, 1)), [nnx.Dict(v=nnx.Cache(jnp.ones((2, 3))), at=7)]


def total(layer):
    return layer.w.sum() + layer.parts[0].v.sum() + layer.n


LAYER = {nnx.Param: 0, nnx.Cache: 1, ...: None}
MODES = [{}, {"graph": False}, {"graph_updates": False}]
MAPPED = {
    "vmap": lambda at, **modes: nnx.vmap(total, in_axes=(at,), **modes)(Layer()),
    "vmap of a list": lambda at, **modes: nnx.vmap(
        lambda layers: total(layers[0]), in_axes=([at],), **modes
    )([Layer()]),
    "scan": lambda at, **modes: nnx.scan(
        lambda c, layer: (c, total(layer)), in_axes=(nnx.Carry, at), **modes
    )(0, Layer())[1],
    "pmap": lambda at, **modes: nnx.pmap(total, in_axes=(at,), **modes)(Layer()),
    "jax.vmap": lambda at, **modes: jax.vmap(total, in_axes=(at,))(Layer()),
}


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("transformation", MAPPED)
def test_transformations_take_it_whatever_is_static(transformation, modes):
    run = MAPPED[transformation]
    at = prefix(Layer(), LAYER)
    assert run(at, **modes).tolist() == [7, 7, 7]


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_results_and_layouts_take_it(modes):
    at = prefix(Layer(), LAYER)
    made = nnx.vmap(lambda _: Layer(), out_axes=at, **modes)(jnp.arange(5))
    assert made.w.shape == (5, 3, 2) and made.parts[0].v.shape == (2, 5, 3) and made.n.shape == ()
    mesh = jax.make_mesh((3,), ("d",), (AxisType.Auto,), devices=jax.devices()[:3])
    laid_out = prefix(
        Layer(), {nnx.Param: NamedSharding(mesh, P("d")), ...: NamedSharding(mesh, P())}
    )
    layer = Layer()
    run = nnx.jit(
        lambda layer: nnx.clone(layer), in_shardings=(laid_out,), out_shardings=laid_out, **modes
    )
    assert run(layer).w.sharding.spec == P("d") and run([layer][0]).n.sharding.spec == P()
    run = nnx.jit(lambda layers: total(layers[0]), in_shardings=([laid_out],), **modes)
    assert run([Layer()]) == 19
    specs = prefix(Layer(), {nnx.Param: P("d"), nnx.Cache: P(None, "d"), ...: P()})
    each = nnx.shard_map(
        lambda m: total(m)[None], mesh=mesh, in_specs=(specs,), out_specs=P("d"), **modes
    )
    assert each(Layer()).tolist() == [7, 7, 7]
