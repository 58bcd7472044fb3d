"""Jitted functions of objects, on Flax NNX and on Weft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.parity.nnx_transforms import (
    GRAPH,
    TREE,
    VALUES,
    Programs,
    X,
    described,
    models,
    same,
    same_error,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

program, error = Programs(), Programs()
MESH = Mesh(np.array(jax.devices()[:2]), ("x",))


@program()
def block_called_several_times(nnx, **mode):
    model = models(nnx).Block(nnx.Rngs(0))
    f = nnx.jit(lambda model, x: model(x), **mode)
    return [f(model, X) for _ in range(3)], model


@program()
def values_written_between_the_calls(nnx, **mode):
    model, results = models(nnx).Pair(), []
    f = nnx.jit(lambda model, x: model(x), **mode)
    for value in (1.0, jnp.ones(2), jnp.ones(2, int), np.ones((2, 1), np.float32)):
        model.w.set_value(value)
        results.append(f(model, 2.0))
    return results, model


@program()
def structure_changed_between_the_calls(nnx, **mode):
    space = models(nnx)
    model, results = space.Holder(a=space.Pair(), k=2.0, layers=nnx.List([space.Pair(3.0)])), []

    def run(model, x):
        for layer in model.layers:
            x = layer(x) * model.k
        return model.a(x)

    f = nnx.jit(run, **mode)
    for change in (
        lambda: None,
        lambda: setattr(model, "k", 3.0),
        lambda: model.layers.append(space.Pair(5.0)),
        lambda: setattr(model, "a", space.Pair(7.0)),
        lambda: setattr(model.a, "w", nnx.Param(jnp.ones((1, 2)))),
        lambda: model.layers.insert(0, space.Pair(jnp.ones((2, 1)))),
        lambda: setattr(model, "k", 1.0),
        lambda: model.a.w.set_metadata(extra=1),
    ):
        change()
        results.append((f(model, 1.0), f(model, 2.0)))
    return results, model.a, model.k, list(model.layers)


@program(GRAPH)
def structure_changed_inside(nnx, **mode):
    space = models(nnx)

    @nnx.jit(**mode)
    def f(model, other):
        model.k += 1
        model.new = nnx.Param(model.a.w * 2)
        model.a, other.a = other.a, model.a
        model.list = nnx.List([other, space.Pair(9.0)])
        other.again = model.a
        del other.gone

    model, results = space.Holder(a=space.Pair(1.0), k=0), []
    other = space.Holder(a=space.Pair(2.0), gone=1)
    for _ in range(2):
        f(model, other)
        other.gone = 2
        results.append((model.k, model.new.get_value() * 1, model.a.w.get_value() * 1))
    return results, model.a, list(model.list), model.list[0] is other, other


@program(GRAPH, VALUES)
def one_object_at_several_places(nnx, **mode):
    space, seen = models(nnx), []
    a, b = space.Pair(1.0), space.Pair(2.0)

    @nnx.jit(**mode)
    def f(x, y, z=None):
        seen.append((x is y, x is z, x.w is y.w))
        x.n[...] += 1
        y.n[...] += 1
        return x.w + y.w

    results = [f(a, b), f(a, a), f(b, a), f(a, b, z=a), f(x=a, y=a)]
    a.w = b.w
    return [*results, f(a, b)], seen, a, b


@program()
def arguments_by_position_and_name(nnx, **mode):
    Pair = models(nnx).Pair

    @nnx.jit(static_argnames="k", **mode)
    def f(model, x=1.0, other=None, *, k=1):
        return model(x) * k if other is None else model(x) + other(x)

    a, b = Pair(2.0), Pair(3.0)
    calls = [f(a), f(a, 2.0), f(a, x=2.0), f(model=a), f(a, 1.0, b), f(a, other=b), f(a, k=3)]
    return [*calls, f(x=4.0, other=b, model=a), f(a, 2.0)], a, b


@program()
def objects_in_containers(nnx, **mode):
    Pair = models(nnx).Pair

    @nnx.jit(**mode)
    def f(tree, x):
        return {"y": tree["a"](x), "z": tree["b"][0](x), "new": [Pair(x), tree["c"]]}

    a, b = Pair(2.0), Pair(3.0)
    return [f({"a": a, "b": (b, 1.0), "c": 5.0}, float(i)) for i in range(2)], a, b


@program(GRAPH)
def functional_style(nnx, **mode):
    @nnx.jit(**mode)
    def step(graphdef, state, x):
        model = nnx.merge(graphdef, state)
        y = model(x)
        return y, nnx.state(model)

    graphdef, state = nnx.split(models(nnx).Block(nnx.Rngs(0)))
    y, state = step(graphdef, state, X)
    y, state = step(graphdef, state, X)
    return y, nnx.to_pure_dict(state)


@program()
def donated_models(nnx, **mode):
    model = models(nnx).Pair(jnp.ones(3))
    before = model.w.get_value(), model.n.get_value()
    f = nnx.jit(lambda model, x: model(x), donate_argnums=0, **mode)
    results = [f(model, 2.0), f(model, 3.0)]
    return results, model, [x.is_deleted() for x in before]


def _in_each_transformation(nnx, f, mode):
    """Returns the results of a function of one number in transformations."""
    two = jnp.arange(2.0)
    return [
        nnx.jit(f, **mode)(2.0),
        nnx.vmap(f, **mode)(two),
        nnx.remat(f, **mode)(two),
        nnx.scan(f, in_axes=0, out_axes=0, **mode)(two),
        nnx.cond(True, f, f, 2.0, **mode),
        nnx.eval_shape(f, 2.0, **mode),
    ]


@program(GRAPH, VALUES)
def new_objects_at_several_places_of_the_result(nnx, **mode):
    space = models(nnx)

    def modules(x):
        pair, other = space.Pair(x), space.Pair(2 * x)
        other.w = pair.w
        return pair, {"again": pair, "part": nnx.Dict(p=pair), "shares_w": other}

    def variables(x):
        n = nnx.BatchStat(jnp.asarray(x))
        return n, [n]

    found = [_in_each_transformation(nnx, f, mode) for f in (modules, variables)]
    same = [[pair is rest["again"], pair.w is rest["shares_w"].w] for pair, rest in found[0]]
    return [*map(described, (one for of in found for one in of))], same


@program()
def arguments_without_variables_among_the_results(nnx, **mode):
    def f(point, x):
        point.a = point.a + x
        return point, {"doubled": point.a * 2}

    both = []
    for run in (
        nnx.jit(f, **mode),
        nnx.vmap(f, in_axes=(0, 0), **mode),
        nnx.remat(f, **mode),
        lambda point, x: nnx.cond(True, f, f, point, x, **mode),
    ):
        point = models(nnx).Holder(a=jnp.arange(2.0), k="static")
        new, rest = run(point, jnp.ones(2))
        both.append((new, rest, point.a * 1, new is point))
    return both


@program()
def shardings_beside_static_arguments(nnx, **mode):
    halves, whole = (NamedSharding(MESH, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
    x = jnp.arange(8.0)
    f = lambda a, b, k: a + b * k  # noqa: E731
    results = []
    for static, given in (
        ({"static_argnums": 2}, (halves, whole)),
        ({"static_argnums": -1}, [whole, halves]),
        ({"static_argnames": "k"}, (halves, whole)),
        ({"static_argnums": (2,)}, halves),
        ({"static_argnames": "k", "donate_argnums": 1, "out_shardings": whole}, (halves, halves)),
    ):
        y = nnx.jit(f, in_shardings=given, **static, **mode)(x, x + 1, 3)
        results.append((y, y.sharding.spec))
    between = nnx.jit(
        lambda a, k, b: a + b * k, static_argnums=1, in_shardings=(halves, whole), **mode
    )
    y = between(x, 3, x)
    return results, y, y.sharding.spec


@program(GRAPH)
def shardings_of_parts_beside_static_arguments(nnx, **mode):
    halves, whole = (NamedSharding(MESH, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
    model = models(nnx).Pair(jnp.ones(8))

    def f(model, k, x):
        model.w[...] = model.w * k + x
        return model(x)

    parts = nnx.StateSharding({nnx.Param: halves, ...: whole})
    g = nnx.jit(f, static_argnums=1, in_shardings=(parts, halves), donate_argnums=0, **mode)
    y = g(model, 2, jnp.arange(8.0))
    return y, model, [x.sharding.spec for x in (y, model.w.get_value(), model.n.get_value())]


@program(GRAPH)
def shapes_of_variables_in_references(nnx, **mode):
    with nnx.var_defaults(hijax=True):
        layer = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), **mode)
    found = [layer.kernel, layer.bias]
    return [(described(x.get_value()), x.hijax) for x in found]


@program(GRAPH)
def references_made_inside(nnx, **mode):
    @nnx.jit(**mode)
    def f(model, x):
        model.made = nnx.BatchStat(x, ref=True)
        model.made[...] += 1

    model = models(nnx).Pair()
    f(model, jnp.ones(2))
    is_ref = isinstance(model.made.get_raw_value(), jax.Ref)
    model.made[...] += 1
    return model.made[...], is_ref


@program(GRAPH)
def references_in_closures(nnx, **mode):
    with nnx.var_defaults(hijax=True):
        norm, dropout = nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        total = nnx.BatchStat({"a": jnp.zeros(())})

    @jax.jit
    def step(x):
        total.set_value({"a": total.get_value()["a"] + x.sum()})
        return dropout(norm(x))

    results = [step(X), step(X + 1)]
    return results, norm.mean[...], total.get_value(), dropout.rngs.count[...]


@program()
def static_arguments(nnx, **mode):
    model = models(nnx).Pair()
    f = nnx.jit(lambda model, k, x: model(x) if k == "a" else x, static_argnums=1, **mode)
    return f(model, "a", 1.0), f(model, "b", 1.0), f(model, k="a", x=2.0), model


@program()
def optimizer_in_a_step(nnx, **mode):
    import optax

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit(**mode)
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean(), **mode)(model)
        if mode:
            grads = nnx.state(grads, nnx.Param, graph=mode.get("graph", True))
        optimizer.update(model, grads)
        return loss

    return [step(model, optimizer, X) for _ in range(3)], model.kernel, optimizer.step


@program(GRAPH)
def shardings_of_a_state(nnx, **mode):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    over, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    state = nnx.StateSharding({nnx.Param: over, ...: whole})
    model = models(nnx).Pair(jnp.arange(4.0))

    @nnx.jit(in_shardings=(state, None), out_shardings=(state, over), **mode)
    def f(model, x):
        return model, model.w * x

    result, y = f(model, 2.0)
    arrays = model.w.get_value(), model.n.get_value(), y
    return result is model, result, y, [len(x.sharding.device_set) for x in arrays]


@program()
def compiled_ahead_of_time(nnx, **mode):
    model, other = models(nnx).Pair(2.0), models(nnx).Pair(3.0)
    f = nnx.jit(lambda model, x: model(x), **mode)
    compiled = f.lower(model, 1.0).compile()
    again = f.trace(model, 1.0).lower().compile()
    return compiled(model, 2.0), compiled(other, 3.0), again(model, 4.0), model, other


@program()
def compiled_with_static_arguments(nnx, **mode):
    model = models(nnx).Pair(2.0)
    f = nnx.jit(lambda model, k, x: model(x) * k, static_argnums=1, **mode)
    return f.lower(model, 3, 1.0).compile()(model, 2.0), model


@program()
def shapes_of_results(nnx, **mode):
    model = models(nnx).Pair(jnp.ones(3))
    return nnx.jit(lambda model, x: model(x), **mode).eval_shape(model, 1.0), model


@program()
def jit_inside_jit_and_grad(nnx, **mode):
    model = models(nnx).Pair(2.0)
    inner = nnx.jit(lambda model, x: model(x), **mode)
    y = nnx.jit(lambda model, x: inner(model, x) + inner(model, 2 * x), **mode)(model, 1.0)
    return y, nnx.value_and_grad(lambda x: nnx.jit(jnp.sin)(x), **mode)(1.0), model


@program()
def error_before_and_after_a_write(nnx, **mode):
    model, results = models(nnx).Pair(2.0), []

    @nnx.jit(static_argnums=1, **mode)
    def f(model, when):
        if when == "before":
            raise KeyError(when)
        y = model(1.0)
        model.w[...] = model.w * 2
        if when == "after":
            raise KeyError(when)
        return y

    for when in ("before", "after", "never", "before", "after", "never"):
        try:
            results.append(f(model, when))
        except KeyError as e:
            results.append(str(e))
    return results, model


@program(VALUES, TREE)
def some_arguments_given(nnx, **mode):
    model = models(nnx).Pair(2.0)
    f = nnx.jit_partial(lambda model, x: model(x), model, **mode)
    results = [f(2.0), f(x=3.0)]
    model.w[...] = 5.0
    return [*results, f(1.0)], model


@program(GRAPH)
def some_arguments_remembered(nnx, **mode):
    model = models(nnx).Pair(2.0)
    f = nnx.cached_partial(nnx.jit(lambda model, x: model(x)), model)
    results = [f(2.0), f(3.0)]
    model.w[...] = 5.0
    return [*results, f(1.0)], model


@program()
def without_jit(nnx, **mode):
    model = models(nnx).Pair(2.0)
    f = nnx.jit(lambda model, x: model(x), **mode)
    with jax.disable_jit():
        y = f(model, 2.0)
    return y, f(model, 3.0), model


@error()
def method_of_one_object(nnx, **mode):
    nnx.jit(nnx.Linear(3, 2, rngs=nnx.Rngs(0)).__call__, **mode)


@error()
def captured_object_is_written_to(nnx, **mode):
    model = models(nnx).Pair()
    nnx.jit(lambda x: model(x), **mode)(1.0)


@error()
def captured_object_is_returned(nnx, **mode):
    model = models(nnx).Pair()
    nnx.jit(lambda x: model, **mode)(1.0)


@error(TREE)
def object_twice_in_tree_mode(nnx, **mode):
    model = models(nnx).Pair()
    nnx.jit(lambda a, b: a.w + b.w, **mode)(model, model)


@error(GRAPH)
def static_object(nnx, **mode):
    nnx.jit(lambda model, x: x, static_argnums=0, **mode)(models(nnx).Pair(), 1.0)


@error()
def unhashable_static_argument(nnx, **mode):
    nnx.jit(lambda model, x: x, static_argnums=1, **mode)(models(nnx).Pair(), [1])


@error()
def string_argument(nnx, **mode):
    nnx.jit(lambda model, x: x, **mode)(models(nnx).Pair(), "text")


@error()
def compiled_for_other_structure(nnx, **mode):
    model = models(nnx).Pair()
    compiled = nnx.jit(lambda model, x: x, **mode).lower(model, 1.0).compile()
    model.new = nnx.Param(1.0)
    compiled(model, 1.0)


@error()
def compiled_for_another_shape(nnx, **mode):
    model = models(nnx).Pair()
    compiled = nnx.jit(lambda model, x: x, **mode).lower(model, 1.0).compile()
    compiled(model, jnp.ones(2))


@error(GRAPH)
def result_with_other_sharding(nnx, **mode):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    over, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    model = nnx.List([nnx.Param(jnp.arange(4.0))])
    nnx.jit(lambda model: model, in_shardings=over, out_shardings=whole, **mode)(model)


@program.each
def test_results_agree(program, mode):
    same(program, mode)


@error.each
def test_errors_agree(program, mode):
    same_error(program, mode)
