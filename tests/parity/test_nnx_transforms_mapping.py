"""Programs that map functions of objects over an axis or over devices, on Flax NNX and on Weft."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.parity.nnx_transforms import GRAPH, TREE, VALUES, Programs, X, models, same, same_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

program, error = Programs(), Programs()


@program()
def each_argument_along_its_own_axis(nnx, **mode):
    Pair = models(nnx).Pair
    a, b = Pair(jnp.ones((2, 3)), jnp.zeros((2, 3))), Pair(jnp.ones((3, 2)), jnp.zeros((3, 2)))

    @nnx.vmap(in_axes=(1, 0), **mode)
    def f(a, b):
        a.n[...] += 1
        return a.w @ b.w

    return f(a, b), a, b


@program()
def models_made_under_vmap(nnx, **mode):
    keys = jax.random.split(jax.random.key(0), 3)
    return nnx.vmap(lambda key: models(nnx).Block(nnx.Rngs(key)), **mode)(keys)


@program()
def ensemble_of_blocks(nnx, **mode):
    keys = jax.random.split(jax.random.key(0), 3)
    blocks = nnx.vmap(lambda key: models(nnx).Block(nnx.Rngs(key)), **mode)(keys)
    y = nnx.vmap(lambda m, x: m(x), in_axes=(0, None), **mode)(blocks, X)
    return y, blocks


@program()
def shared_model_over_a_batch(nnx, **mode):
    linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return nnx.vmap(lambda m, x: m(x), in_axes=(None, 0), **mode)(linear, X), linear


@program()
def parts_of_the_state_along_axes(nnx, **mode):
    m = models(nnx).Pair(jnp.ones((2, 3)), jnp.zeros(()))
    axes = {nnx.Param: 1, ...: None}
    axes = nnx.prefix(m, axes, **mode_of_prefix(mode)) if mode else nnx.StateAxes(axes)

    def f(m, x):
        m.n[...] += 1
        m.w[...] *= 2
        return m.w.sum() * x

    return nnx.vmap(f, in_axes=(axes, 0), **mode)(m, jnp.arange(3.0)), m


def mode_of_prefix(mode):
    return {"graph": mode.get("graph", True)}


@program(GRAPH)
def parts_by_path_and_negative_axes(nnx, **mode):
    m = models(nnx).Pair(jnp.arange(6.0).reshape(2, 3), jnp.zeros((3, 2)))
    axes = nnx.StateAxes({nnx.PathContains("w"): -1, models(nnx).Count: 0})
    return nnx.vmap(lambda m: m.w + m.n, in_axes=(axes,), **mode)(m), m


@program(GRAPH)
def parts_in_a_nested_prefix(nnx, **mode):
    m = models(nnx).Pair(jnp.ones((2, 3)), jnp.zeros((3, 2)))
    axes = {"m": nnx.StateAxes({nnx.Param: 1, ...: 0}), "x": None}
    return nnx.vmap(lambda d: d["m"].w * d["x"], in_axes=(axes,), **mode)({"m": m, "x": 2.0})


@program(GRAPH)
def results_with_parts_along_axes(nnx, **mode):
    axes = nnx.StateAxes({nnx.Param: 1, ...: None})
    make = nnx.vmap(lambda x: models(nnx).Pair(x * jnp.ones(2), 1.0), out_axes=axes, **mode)
    return make(jnp.arange(3.0))


@program()
def unmapped_results(nnx, **mode):
    def f(x):
        return models(nnx).Pair(3.0), x * 2

    return nnx.vmap(f, out_axes=(None, 0), **mode)(jnp.arange(3.0))


@program(GRAPH, VALUES)
def one_object_as_two_arguments(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(3), jnp.zeros(3))

    def f(a, b):
        a.n[...] += 1
        b.n[...] += 1
        return a is b, a.w is b.w

    is_same = []
    nnx.vmap(lambda a, b: is_same.append(f(a, b)), **mode)(m, m)
    return is_same, m


@program(GRAPH, VALUES)
def shared_part_of_two_arguments(nnx, **mode):
    space = models(nnx)
    shared = space.Pair(jnp.ones(3), jnp.zeros(3))
    a, b = space.Holder(part=shared, k=1), space.Holder(part=shared, k=2)

    def f(a, b):
        a.part.n[...] += 1
        b.part.n[...] += 1
        return a.part.w * a.k + b.part.w * b.k

    return nnx.vmap(f, **mode)(a, b), a, b


@program(GRAPH)
def returned_argument_identity(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(3), jnp.zeros(3))

    def f(m, x):
        m.n[...] += x
        return m, {"again": m, "w": m.w}

    first, rest = nnx.vmap(f, **mode)(m, jnp.arange(3.0))
    return first is m, rest["again"] is m, rest["w"] is m.w, m


@program(GRAPH)
def aliases_with_equal_axes_everywhere(nnx, **mode):
    Pair = models(nnx).Pair
    m1, m2 = Pair(jnp.ones((2, 3)), jnp.zeros(())), Pair(jnp.ones((3, 2)), jnp.zeros(()))
    first = nnx.StateAxes({nnx.Param: 1, ...: None})
    second = nnx.StateAxes({nnx.Param: 0, ...: None})

    @nnx.vmap(in_axes=(first, second, first), out_axes=second, **mode)
    def f(m1, m2, alias):
        assert alias is m1
        m2.w[...] += m1.w
        return m2

    return f(m1, m2, m1) is m2, m1, m2


@program()
def added_and_removed_attributes(nnx, **mode):
    space = models(nnx)
    m = space.Holder(pair=space.Pair(jnp.ones(3), jnp.zeros(3)), kind="old", gone=1)

    def f(m, x):
        m.new = nnx.Param(x * 2)
        m.kind = "new"
        m.number = 3
        del m.gone
        m.pair.w = nnx.Param(x + m.pair.w)
        return m.pair.w * 1

    before = m.pair.w
    y = nnx.vmap(f, **mode)(m, jnp.arange(3.0))
    return y, m, m.pair.w is before


@program()
def array_attributes(nnx, **mode):
    m = models(nnx).Holder(arr=nnx.data(jnp.arange(3.0)), w=nnx.Param(jnp.ones(3)))

    def f(m):
        m.arr = m.arr + 1
        m.w[...] = m.arr
        return m.arr * 2

    return nnx.vmap(f, **mode)(m), m


@program()
def changed_metadata(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(3), jnp.zeros(3))

    def f(m):
        m.w.set_metadata(note="seen")
        return m.w * 2

    return nnx.vmap(f, **mode)(m), m


@program()
def shared_update(nnx, **mode):
    m = models(nnx).Pair(1.0, 0.0)

    def f(m, x):
        m.n[...] += 1
        return x * m.w

    return nnx.vmap(f, in_axes=(None, 0), **mode)(m, jnp.arange(3.0)), m


@program()
def shared_streams(nnx, **mode):
    rngs = nnx.Rngs(0, dropout=1)
    y = nnx.vmap(lambda r, x: x + jax.random.normal(r.dropout()), in_axes=(None, 0), **mode)(
        rngs, jnp.arange(3.0)
    )
    return y, rngs


@program()
def split_streams(nnx, **mode):
    rngs = nnx.Rngs(0, dropout=1)

    @nnx.split_rngs(splits=3, **mode)
    @nnx.vmap(**mode)
    def f(rngs):
        return jax.random.normal(rngs.params(), (2,)), rngs.dropout()

    return f(rngs), rngs


@program()
def dropout_with_its_own_stream_per_index(nnx, **mode):
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    @nnx.split_rngs(splits=4, **mode)
    @nnx.vmap(**mode)
    def f(m, x):
        return m(x)

    return f(dropout, X), dropout


@program()
def containers_of_models(nnx, **mode):
    Pair = models(nnx).Pair
    tree = {
        "a": [Pair(jnp.ones(3), jnp.zeros(3))],
        "b": (Pair(2 * jnp.ones(3), jnp.zeros(3)), None),
    }

    def f(tree, x):
        return tree["a"][0](x) + tree["b"][0](x)

    return nnx.vmap(f, **mode)(tree, jnp.arange(3.0)), tree


@program()
def variables_and_states_as_arguments(nnx, **mode):
    Pair = models(nnx).Pair
    m = Pair(jnp.ones(3), jnp.zeros(3))
    v = nnx.Param(jnp.arange(3.0), note="v")

    def f(v, state):
        v[...] += 1
        state.n[...] = v * 2
        return v * state.w

    return nnx.vmap(f, **mode)(v, nnx.state(m)), v, m


@program()
def graphdef_and_a_state(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(3), jnp.zeros(3))
    graphdef, params, rest = nnx.split(m, nnx.Param, ...)

    def f(params, rest, x):
        m = nnx.merge(graphdef, params, rest)
        return m(x), nnx.clone(nnx.state(m, models(nnx).Count))

    return nnx.vmap(f, in_axes=(0, None, 0), out_axes=(0, None), **mode)(
        params, jax.tree.map(lambda x: x[0], rest), jnp.arange(3.0)
    )


@program()
def size_without_arguments(nnx, **mode):
    return nnx.vmap(lambda: models(nnx).Pair(), axis_size=3, **mode)()


@program(GRAPH)
def keyword_arguments_use_positional_axes(nnx, **mode):
    m = models(nnx).Pair(2.0, 0.0)

    def f(m, x, k=3.0):
        m.n[...] += 1
        return m.w * x + k

    g = nnx.vmap(f, in_axes=(None, 0, None), **mode)
    return g(m, x=jnp.arange(3.0), k=1.0), g(m, k=1.0, x=jnp.arange(3.0)), m


@program()
def methods(nnx, **mode):
    class Scale(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.asarray(3.0))
            self.n = nnx.BatchStat(jnp.asarray(0.0))

        @nnx.vmap(in_axes=(None, 0), **mode)
        def __call__(self, x):
            self.n[...] += 1
            return self.w * x

    m = Scale()
    return m(jnp.arange(3.0)), m, m(jnp.arange(2.0)), m


@program()
def collectives_in_batch_norm(nnx, **mode):
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0), axis_name="batch")
    f = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0), axis_name="batch", **mode)
    return f(norm, X[:, None]), norm


@program()
def vmap_of_vmap(nnx, **mode):
    m = models(nnx).Pair(jnp.ones((2, 3)), jnp.zeros((2, 3)))

    def f(m, x):
        m.n[...] += x
        return m.w * x

    inner = nnx.vmap(f, in_axes=(0, None), **mode)
    return nnx.vmap(inner, in_axes=(0, 0), **mode)(m, jnp.arange(2.0)), m


@program(GRAPH)
def new_axis_name_in_metadata(nnx, **mode):
    metadata = {nnx.PARTITION_NAME: "layers"}

    def make(x):
        return nnx.Param(x * jnp.ones((2, 3)), out_sharding=("a", "b"), eager_sharding=False)

    made = nnx.vmap(make, out_axes=1, transform_metadata=metadata, **mode)(jnp.arange(4.0))
    inside = []

    def f(v):
        inside.append(v.out_sharding)
        v[...] *= 2

    nnx.vmap(f, in_axes=1, transform_metadata=metadata, **mode)(made)
    return made, inside


@program()
def names_of_axes_by_transform_metadata(nnx, **mode):
    graph = mode_of_prefix(mode)

    def make(x):
        return nnx.Param(x * jnp.ones((2, 3)), out_sharding=("a", "b"), eager_sharding=False)

    named = nnx.transform_metadata(make, out_axes=0, partition="layers", **graph)
    made = nnx.vmap(named, **mode)(jnp.arange(4.0))
    inside = []

    def f(v):
        inside.append(v.out_sharding)
        return v * 2

    named = nnx.transform_metadata(f, partition="layers", **graph)
    y = nnx.vmap(named, **mode)(made)
    return made, inside, y


@program(GRAPH)
def hooks_of_axes(nnx, **mode):
    calls = []

    def make(x):
        return nnx.Param(
            x,
            on_add_axis=lambda v, i, name: calls.append(("add", i, name)),
            on_remove_axis=lambda v, i, name: calls.append(("remove", i, name)),
        )

    metadata = {nnx.PARTITION_NAME: "layers"}
    made = nnx.vmap(make, transform_metadata=metadata, **mode)(jnp.arange(4.0))

    def double(v):
        v[...] *= 2

    nnx.vmap(double, transform_metadata=metadata, **mode)(made)
    return calls, made[...]


@program()
def pmap_over_one_device(nnx, **mode):
    m = models(nnx).Pair(jnp.ones((1, 2)), jnp.zeros((1, 2)))

    def f(m, x):
        m.n[...] += jax.lax.psum(x, "d")
        return m.w * x

    return nnx.pmap(f, axis_name="d", **mode)(m, jnp.ones((1, 2))), m


@program()
def shard_map_over_one_device(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(4), jnp.zeros(4))
    mesh = Mesh(jax.devices()[:1], ("d",))
    spec = PartitionSpec("d")

    def f(m, x):
        m.n[...] += x
        return m.w * x

    mapped = nnx.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=spec, **mode)
    return mapped(m, jnp.arange(4.0)), m


@program(GRAPH)
def shard_map_of_parts(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(4), jnp.zeros(()))
    mesh = Mesh(jax.devices()[:1], ("d",))
    specs = nnx.StateSharding({nnx.Param: PartitionSpec("d"), ...: PartitionSpec()})

    def f(m):
        m.n[...] += 1
        m.w[...] *= 2
        return m

    mapped = nnx.shard_map(f, mesh=mesh, in_specs=(specs,), out_specs=specs, **mode)
    return mapped(m) is m, m


@program(GRAPH, VALUES, TREE)
def shard_map_of_variables_that_are_only_read(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(4), jnp.zeros(()))
    mesh = Mesh(jax.devices()[:2], ("d",))
    spec = PartitionSpec("d")
    mapped = nnx.shard_map(lambda w: w * 2, mesh=mesh, in_specs=(spec,), out_specs=spec, **mode)
    inside = nnx.jit(lambda w: mapped(w), **mode)
    return inside(m.w), mapped(m.w), str(m.w.get_value().sharding)


@program.each
def test_programs(program, mode):
    same(program, mode)


@error()
def inconsistent_inputs(nnx, **mode):
    m = models(nnx).Pair(jnp.ones((3, 3)), jnp.ones((3, 3)))
    nnx.vmap(lambda a, b: None, in_axes=(0, 1), **mode)(m, m)


@error()
def inconsistent_input_and_output(nnx, **mode):
    m = models(nnx).Pair(jnp.ones((3, 3)), jnp.ones((3, 3)))
    nnx.vmap(lambda a: a, out_axes=1, **mode)(m)


@error(VALUES, TREE)
def returned_variable_of_an_argument(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(3), jnp.ones(3))
    graphdef, state = nnx.split(m)
    nnx.vmap(lambda s: nnx.state(nnx.merge(graphdef, s)), **mode)(state)


@error(VALUES, TREE)
def returned_argument(nnx, **mode):
    nnx.vmap(lambda a: a, **mode)(models(nnx).Pair(jnp.ones(3), jnp.ones(3)))


@error()
def captured_result(nnx, **mode):
    m = models(nnx).Pair()
    nnx.vmap(lambda: m, axis_size=3, **mode)()


@error()
def captured_variable_is_written(nnx, **mode):
    m = models(nnx).Pair()

    def f(x):
        m.n[...] = x

    nnx.vmap(f, **mode)(jnp.ones(3))


@error()
def captured_module_is_changed(nnx, **mode):
    m = models(nnx).Pair()

    def f(x):
        m.other = 1

    nnx.vmap(f, **mode)(jnp.ones(3))


@error()
def differing_shared_value(nnx, **mode):
    m = models(nnx).Pair()

    def f(m, x):
        m.n[...] = x

    nnx.vmap(f, in_axes=(None, 0), **mode)(m, jnp.arange(3.0))


@error(GRAPH)
def missing_filter(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(3), jnp.ones(3))
    nnx.vmap(lambda m: None, in_axes=(nnx.StateAxes({nnx.Param: 0}),), **mode)(m)


@error()
def mismatched_sizes(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(3), jnp.ones(2))
    nnx.vmap(lambda m: None, **mode)(m)


@error()
def stream_without_an_axis(nnx, **mode):
    nnx.vmap(lambda r: r.params(), **mode)(nnx.Rngs(0))


@error()
def bound_method(nnx, **mode):
    nnx.vmap(models(nnx).Pair().__call__, **mode)


@error(GRAPH)
def keyword_only_parameter(nnx, **mode):
    def f(x, *, k):
        return x * k

    nnx.vmap(f, **mode)(jnp.arange(3.0), k=2.0)


@error(GRAPH)
def missing_name(nnx, **mode):
    v = nnx.Param(jnp.ones((3, 2)), out_sharding=("a", "b"), eager_sharding=False)
    nnx.vmap(lambda v: None, transform_metadata={nnx.PARTITION_NAME: "layers"}, **mode)(v)


@error()
def prefix_of_variables(nnx, **mode):
    m = models(nnx).Pair(jnp.ones(3), jnp.ones(3))
    axes = jax.tree.map(lambda x: 0, nnx.state(m))
    nnx.vmap(lambda s: None, in_axes=(axes,), **mode)(nnx.state(m))


@error.each
def test_errors(program, mode):
    same_error(program, mode)
