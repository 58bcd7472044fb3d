"""Small programs that other libraries contain, run on NNX of Flax and of Weft."""

import importlib
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.keys import draw
from tests.parity.nnx_transforms import TREE, VALUES
from tests.parity.objects import IS_LATER_FLAX, described, same
from weft import nnx as weft_nnx

# Flax says of some of its names that they will go; what they do is compared all the same.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X = draw(1, 4, 3, 2)


def module(nnx, **attributes):
    class Box(nnx.Module):
        def __init__(self):
            for name, value in attributes.items():
                setattr(self, name, value)

    return Box()


def net(nnx):
    return module(nnx, w=nnx.Param(X), n=nnx.BatchStat(X[0, 0]), a=nnx.data(jnp.array(2.0)))


def test_names_of_annotations():
    def program(nnx):
        class Leaf(nnx.Object):
            def __init__(self):
                self.items = [nnx.Param(jnp.ones(2))]

        def write(leaf: Leaf) -> nnx.GraphDef[nnx.A]:
            leaf.items[0][...] *= 2
            return nnx.graphdef(leaf)

        leaf = Leaf()
        nnx.jit(write)(leaf)
        of_tuple = typing.get_args(nnx.PureState)
        is_generic = typing.get_origin(nnx.GraphDef[Leaf]) is nnx.GraphDef
        found = len(jax.tree.leaves(leaf)), is_generic, nnx.VariableState is nnx.Variable
        assert [getattr(x, "__origin__", x).__name__ for x in of_tuple] == ["GraphDef", "State"]
        assert nnx.VariableMetadata[int](1).raw_value == 1
        return leaf.items[0].get_value(), found

    same(program)


def test_merge_of_leaves_and_flat_states():
    def program(nnx):
        graphdef, state = nnx.split(net(nnx))
        leaves = [2 * x for x in jax.tree.leaves(state)]
        variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        of_flat, flat = nnx.flatten(net(nnx), with_paths=False)
        with pytest.raises(ValueError, match="2"):
            nnx.merge(graphdef, leaves[:2])
        linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        of_linear, parameters = nnx.split(linear)
        y, _ = of_linear.apply(jax.tree.leaves(parameters))(X)
        merged = [nnx.merge(graphdef, leaves), nnx.merge(graphdef, variables, copy=True)]
        of_parts, *parts = nnx.split(net(nnx), nnx.Param, ...)
        flat_parts = [nnx.to_flat_state(part) for part in parts]
        merged += [nnx.merge(of_parts, *flat_parts), nnx.merge(of_parts, *map(dict, flat_parts))]
        merged.append(nnx.merge(of_parts, dict([*flat_parts[0], *flat_parts[1]])))
        named = [nnx.State({name: parameters[name]}) for name in ("kernel", "bias")]
        z, _ = nnx.call((of_linear, *named))(X)
        return (y, z), [merged, nnx.merge(of_flat, flat), nnx.merge(nnx.graphdef(module(nnx)), [])]

    same(program)


@pytest.mark.parametrize("mode", [{}, VALUES, TREE], ids=["graph", "values", "tree"])
def test_new_streams(mode):
    """Without graph updates, an object keeps its streams, and a copy gets the new ones."""

    def program(nnx):
        def make():
            dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=3))
            return module(nnx, dropout=dropout, w=nnx.Param(X), noise=nnx.Rngs(0))

        @nnx.split_rngs(splits=2, **mode)
        def write(model, *, rngs):
            model.w[...] += 1
            return described((model, rngs))

        model, other, rngs = make(), make(), nnx.Rngs(1)
        inside = write(model, rngs=rngs)
        split = nnx.split_rngs(other, splits=1, squeeze=True, only="dropout", **mode)
        forked, name = nnx.fork_rngs((other, "a"), split={"default": 3}, **mode) if mode else (0, 0)
        copies = [split, split.w is other.w, forked, name] if mode else []
        return (), [inside, model, rngs, other, copies]

    same(program)


@pytest.mark.parametrize("mode", [{}, VALUES, TREE], ids=["graph", "values", "tree"])
def test_programs_of_a_jitted_function(mode):
    def program(nnx):
        def step(model, x, scale=1.0):
            model.n[...] += 1
            return scale * model.w * x

        f, model, x = nnx.jit(step, **mode), net(nnx), jnp.ones((4, 3, 2))
        found = [f(model, x), f(model, x)], f.jitted_fn._cache_size()
        f(model, jnp.ones((1, 1, 1)))
        sizes = [found[1], f.jitted_fn._cache_size()]
        f.jitted_fn.clear_cache()
        sizes.append(f.jitted_fn._cache_size())
        # JAX drops programs of its own accord, so only Weft's are counted.
        assert nnx is not weft_nnx or (0 < sizes[0] <= sizes[1] and sizes[2] == 0)
        if not mode:
            return found[0], [model]
        bound = nnx.jit_partial(step, model, static_argnames="scale", **mode)
        shape = bound.eval_shape(x, scale=2.0)
        lowered = bound.lower(x, scale=2.0)
        results = bound(x), lowered.compile()(x), bound.trace(x).lower().compile()(x)
        assert "tensor" in lowered.as_text()
        assert nnx is not weft_nnx or bound.jitted_fn._cache_size() > 0
        return (found[0], results), [shape.shape, model]

    same(program)


@pytest.mark.parametrize("name", ["ref", "hijax"])
@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
def test_optimizer_of_references(name, tx):
    def program(nnx):
        # Flax makes the state of adam in vain under hijax=True.
        held = name if nnx is weft_nnx else "ref"
        with nnx.var_defaults(**{held: True}):
            model = nnx.Dict(w=nnx.Param(jnp.array([2.0, 3.0])), n=nnx.BatchStat(jnp.array(0.0)))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def step(model, optimizer):
            graphdef, params, rest = nnx.split(model, nnx.Param, ...)

            def loss(params):
                model = nnx.merge(graphdef, params, rest)
                model.n[...] += 1
                return (model.w**2).sum()

            optimizer.update(model, jax.grad(loss)(nnx.vars_as(params, **{held: False})))

        jitted = jax.jit(step)
        jitted(model, optimizer)
        jitted(model, optimizer)
        step(model, optimizer)
        return (model.w[...], model.n[...], optimizer.step[...]), []

    same(program)


@pytest.mark.skipif(IS_LATER_FLAX, reason="later Flax writes to no hijax variable inside of jit")
def test_optimizer_of_pytrees_in_references():
    def program(nnx):
        pair = {"a": jnp.array(1.0), "b": (jnp.array([2.0, 3.0]),)}
        model = nnx.Dict(p=nnx.Param(pair, hijax=True), q=nnx.Param(jnp.array(2.0), hijax=True))
        with nnx.var_defaults(hijax=True):
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @jax.jit
        def step(model, optimizer):
            graphdef, params = nnx.split(model)

            def loss(params):
                model = nnx.merge(graphdef, params)
                return model.p["a"] ** 2 + model.p["b"][0].sum() * model.q[...]

            optimizer.update(model, jax.grad(loss)(nnx.vars_as(params, hijax=False)))

        @jax.jit
        def write(v):
            v["a"] = v["a"] + 1
            v.set_value({**v.get_value(), "b": (2 * v["b"][0],)})

        step(model, optimizer)
        step(model, optimizer)
        other = nnx.Variable(pair, hijax=True)
        write(other)
        found = model.p.get_value(), other.get_value(), other.copy().get_value()
        return [(x["a"], x["b"]) for x in found], []

    same(program)


def test_arrays_of_sizes():
    def program(nnx):
        rngs = nnx.Rngs(0)
        layers = [
            nnx.LinearGeneral((4, 3), 5, axis=np.arange(2), rngs=rngs),
            nnx.LinearGeneral((3, 2), 4, axis=np.array([-2, -1]), rngs=rngs),
            nnx.Conv(2, 3, kernel_size=np.array([3]), strides=np.array([1]), rngs=rngs),
            nnx.RMSNorm(2, reduction_axes=np.array([1, 2]), rngs=rngs),
        ]
        call = nnx.jit(lambda layer, x: layer(x))
        params = [nnx.state(layer, nnx.Param) for layer in layers]
        return [*(layer(X) for layer in layers), call(layers[0], X)], params

    same(program)


def test_layouts_of_single_variables():
    def program(nnx):
        layouts = {"out_sharding": ("x", None)}, {"sharding": ("a",)}, {}
        spec = importlib.import_module(f"{nnx.__name__}.spmd").get_var_pspec
        with nnx.use_eager_sharding(False), nnx.logical_axis_rules([("x", "b")]):
            found = [spec(nnx.Param(jnp.ones((2, 2)), **layout)) for layout in layouts]
        return (), [*map(str, found), spec(nnx.Param(3)), spec(nnx.Param({"a": jnp.ones(2)}))]

    same(program)


def test_layout_of_one_name():
    def program(nnx):
        mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
        with jax.set_mesh(mesh):
            model = nnx.Dict(
                w=nnx.Param(jnp.ones((4, 2)), out_sharding="a"),
                layer=nnx.Linear(2, 3, kernel_metadata={"out_sharding": "a"}, rngs=nnx.Rngs(0)),
            )

            def make(x):
                return nnx.Param(x, out_sharding="a")

            made = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: None})(jnp.ones((2, 3)))
        specs = nnx.get_partition_spec((model, made))
        return (model.layer(X), made[...]), [str(specs[0].w.get_value()), str(specs[1].get_value())]

    same(program)
