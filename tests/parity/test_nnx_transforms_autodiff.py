"""Programs with derivatives of functions of objects, on Flax NNX and on Weft."""

import jax
import jax.numpy as jnp
import pytest

from tests.parity.nnx_transforms import GRAPH, TREE, VALUES, Programs, X, models, same, same_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

program, error = Programs(), Programs()


def square(m, x=3.0):
    return (m.w * x) ** 2 * (1 + m.n)


@program()
def gradients_of_a_module(nnx, **mode):
    m = models(nnx).Pair()
    m.w.set_metadata(note="kept")
    return nnx.grad(square, **mode)(m), nnx.value_and_grad(square, **mode)(m), m


@program()
def writes_in_the_loss(nnx, **mode):
    m = models(nnx).Pair()

    def loss(m, x):
        m.n[...] += 1
        y = m.w**2 * x
        m.w[...] = m.w * 10
        return y, {"n": m.n * 1}

    f = nnx.value_and_grad(loss, has_aux=True, **mode)
    (value, aux), grads = f(m, 2.0)
    again, aux_again = nnx.grad(loss, has_aux=True, **mode)(m, 2.0)
    return value, aux, grads, again, aux_again, m


@program()
def gradients_of_several_arguments(nnx, **mode):
    Pair = models(nnx).Pair
    f = lambda a, x, b: square(a) * x + square(b)  # noqa: E731
    args = Pair(), jnp.ones(()), Pair(3.0)
    every = [
        nnx.grad(f, argnums=argnums, **mode)(*args) for argnums in ((0, 1), [0, 2], (1,), 1, (1, 2))
    ]
    return every


@program(GRAPH)
def gradients_of_parts(nnx, **mode):
    space = models(nnx)
    m = space.Holder(a=space.Pair(), b=nnx.BatchStat(jnp.array(2.0)))
    f = lambda m, x: square(m.a, x) * m.b  # noqa: E731
    filters = [
        nnx.Param,
        space.Count,
        (nnx.Param, nnx.BatchStat),
        ...,
        nnx.Not(nnx.Param),
        nnx.PathContains("a"),
        nnx.Nothing(),
        lambda path, v: path[-1] == "w",
    ]
    every = [nnx.grad(f, argnums=nnx.DiffState(0, where), **mode)(m, 1.0) for where in filters]
    both = nnx.grad(f, argnums=(nnx.DiffState(0, nnx.BatchStat), 1), **mode)(m, 1.0)
    return every, both


@program()
def gradients_of_variables_states_and_containers(nnx, **mode):
    space = models(nnx)
    of_variable = nnx.grad(lambda v: v**2, **mode)(space.Count(jnp.array(3.0)))
    of_state = nnx.grad(lambda s: square(s), **mode)(nnx.state(space.Pair()))
    tree = {"a": space.Pair(), "b": [space.Pair(4.0), jnp.array(1.0)]}
    of_tree = nnx.grad(lambda t: square(t["a"]) * t["b"][1] + square(t["b"][0]), **mode)(tree)
    return of_variable, of_state, of_tree


@program(GRAPH, VALUES)
def gradients_of_shared_parameters(nnx, **mode):
    space = models(nnx)
    part = space.Pair()
    m = space.Holder(a=part, b=part)
    return nnx.grad(lambda m: square(m.a) + square(m.b), **mode)(m)


@program(GRAPH)
def one_object_as_two_arguments(nnx, **mode):
    m = models(nnx).Pair()
    return nnx.grad(lambda a, b: square(a) * b.w, argnums=(0, 1), **mode)(m, m)


@program()
def second_derivatives(nnx, **mode):
    m = models(nnx).Pair()

    def first(m):
        return nnx.grad(square, **mode)(m).w[...]

    return nnx.grad(first, **mode)(m)


@program(GRAPH)
def gradients_of_layers(nnx, **mode):
    block = models(nnx).Block(nnx.Rngs(0))
    return nnx.value_and_grad(lambda m, x: (m(x) ** 2).sum(), **mode)(block, X), block


@program(VALUES, TREE)
def arguments_by_name(nnx, **mode):
    Pair = models(nnx).Pair
    a, b = Pair(), Pair(4.0)

    def f(a, *, b, k=1.0):
        b.n[...] += 1
        return square(a) * b.w * k

    return nnx.grad(f, **mode)(a, b=b, k=3.0), a, b


@program(GRAPH)
def all_arguments_by_name(nnx, **mode):
    return nnx.grad(square, **mode)(x=2.0, m=models(nnx).Pair())


@program()
def complex_and_integer_gradients(nnx, **mode):
    v = nnx.Param(jnp.array(2.0 + 1j))
    holomorphic = nnx.grad(lambda v: v**3, holomorphic=True, **mode)(v)
    return holomorphic


@program()
def structure_changes_in_the_loss(nnx, **mode):
    m = models(nnx).Pair()

    def loss(m):
        m.made = nnx.Intermediate(m.w * 2)
        m.kind = "new"
        return m.w**2

    return nnx.grad(loss, **mode)(m), m


@program(GRAPH, TREE)
def new_models_as_aux(nnx, **mode):
    Pair = models(nnx).Pair
    return nnx.grad(lambda m: (square(m), Pair(m.w * 2)), has_aux=True, **mode)(Pair())


@program(GRAPH)
def argument_as_aux(nnx, **mode):
    m = models(nnx).Pair()
    _, out = nnx.grad(lambda m: (square(m), m), has_aux=True, **mode)(m)
    return out is m


@program()
def vmap_scan_and_remat_inside(nnx, **mode):
    m = models(nnx).Pair(jnp.arange(1.0, 4.0), jnp.zeros(3))

    @nnx.remat(**mode)
    def layer(x, m):
        m.n[...] += x
        return jnp.sin(x * m.w)

    def loss(m, x):
        f = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **mode)
        return nnx.vmap(lambda x, m: f(x, m), in_axes=(0, None), **mode)(x, m).sum()

    def without_writes(m, x):
        body = lambda x, w: jnp.sin(x * w)  # noqa: E731
        f = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **mode)
        return nnx.vmap(f, in_axes=(0, None), **mode)(x, m.w[...]).sum()

    del loss
    return nnx.grad(without_writes, **mode)(m, jnp.ones(2)), m


@program(VALUES, TREE)
def pullbacks(nnx, **mode):
    m = models(nnx).Pair()

    def f(m, x):
        m.n[...] += 1
        return m.w * x

    y, pull = nnx.vjp(f, m, 3.0, **mode)
    return y, pull(jnp.array(2.0)), m


@program(VALUES, TREE)
def pullbacks_with_more(nnx, **mode):
    m = models(nnx).Pair()
    f = lambda m, x: (m.w * x, {"n": m.n * 1})  # noqa: E731
    y, pull, aux = nnx.vjp(f, m, 3.0, has_aux=True, **mode)
    curried, again = nnx.vjp(lambda m: m.w**2, **mode)(m)
    return y, aux, pull(jnp.array(2.0)), curried, again(jnp.array(1.0))


@program(VALUES, TREE)
def tangents(nnx, **mode):
    m, t = models(nnx).Pair(), models(nnx).Pair(0.5, 1.0)

    def f(m, x):
        m.n[...] += 1
        return m.w * x * m.n

    y, dy = nnx.jvp(f, (m, 3.0), (t, 1.0), **mode)
    z, dz, aux = nnx.jvp(lambda m: (m.w**2, m.n * 1), (m,), (t,), has_aux=True, **mode)
    return y, dy, z, dz, aux, m, t


@program(TREE)
def results_that_are_objects(nnx, **mode):
    m, t = models(nnx).Pair(), models(nnx).Pair(0.5, 1.0)

    def f(m, x):
        return {"made": models(nnx).Pair(m.w * x, m.n * 2), "v": nnx.Param(m.w + x)}

    y, pull, aux = nnx.vjp(lambda m, x: (f(m, x), nnx.Param(x)), m, 2.0, has_aux=True, **mode)
    gradients = pull(jax.tree.map(jnp.ones_like, y))
    z, dz = nnx.jvp(f, (m, 2.0), (t, 1.0), **mode)
    return y, aux, gradients, z, dz, m


@program(GRAPH)
def rule_for_gradients(nnx, **mode):
    m = models(nnx).Pair()
    given = []

    @nnx.custom_vjp(**mode)
    def f(m, x):
        m.n[...] += 1
        return m.w * x

    def fwd(m, x):
        return f(m, x), (m, x)

    def bwd(residuals, g):
        m, x = residuals
        inputs, out = g
        given.append(jax.tree.map(jnp.shape, jax.tree.leaves(inputs)))
        state = nnx.state(m)
        state["w"][...] = 100 * out * x
        state["n"][...] = jnp.zeros(())
        return state, out * m.w

    f.defvjp(fwd, bwd)
    grads = nnx.grad(lambda m, x: f(m, x) * 2, argnums=(0, 1), **mode)(m, 3.0)
    return f(m, 3.0), grads, given, m


@program(VALUES, TREE)
def rule_for_gradients_of_trees(nnx, **mode):
    m = models(nnx).Pair()

    @nnx.custom_vjp(**mode)
    def f(m, x):
        return m.w * x

    def fwd(m, x):
        return m.w * x, (m.w * 1, x)

    def bwd(residuals, g):
        w, x = residuals
        return models(nnx).Pair(100 * g * x, jnp.zeros(())), g * w

    f.defvjp(fwd, bwd)
    return nnx.grad(lambda m, x: f(m, x) * 2, argnums=(0, 1), **mode)(m, 3.0), m


@program()
def rule_for_arrays(nnx, **mode):
    @nnx.custom_vjp(nondiff_argnums=(0,), **mode)
    def f(fn, x):
        return fn(x)

    def fwd(fn, x):
        return fn(x), x

    def bwd(fn, x, g):
        out = g[1] if isinstance(g, tuple) else g
        return (7 * fn(x) * out,)

    f.defvjp(fwd, bwd)
    return nnx.grad(lambda x: f(jnp.sin, x), **mode)(1.0)


@program(GRAPH)
def rule_for_a_part(nnx, **mode):
    m = models(nnx).Pair()

    @nnx.custom_vjp(nondiff_argnums=(nnx.DiffState(0, nnx.Param),), **mode)
    def f(m):
        return m.w**2

    def fwd(m):
        return f(m), m

    def bwd(m, g):
        _, out = g
        state = nnx.state(m, nnx.Param)
        state["w"][...] = 5 * out
        return (state,)

    f.defvjp(fwd, bwd)
    return nnx.grad(lambda m: f(m) * 2, **mode)(m)


@program(GRAPH)
def rules_of_unchanged_state(nnx, **mode):
    def times_ten(fun):
        f = nnx.custom_vjp(fun, **mode)

        def bwd(residuals, g):
            (of_model, _), _ = g
            state = nnx.state(nnx.clone(residuals))
            state["w"][...] = 10 * of_model["w"][...]
            state["n"][...] = jnp.zeros(())
            return state, jnp.zeros(())

        f.defvjp(lambda m, x: (fun(m, x), m), bwd)
        return f

    def gradient(loss):
        return nnx.grad(loss, **mode)(models(nnx).Pair())

    read = times_ten(lambda m, x: m.w * x)
    given_back = times_ten(lambda m, x: {"of": m.w, "twice": [m, m.w]})
    shared = nnx.scan(nnx.remat(nnx.jit(read)), in_axes=(None, 0), out_axes=0)
    carried = nnx.scan(
        lambda m, x: (m, read(m, x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0)
    )
    xs = jnp.arange(3.0)
    return (
        gradient(lambda m: given_back(m, 1.0)["of"][...]),
        gradient(lambda m: given_back(m, 1.0)["twice"][0].w[...]),
        gradient(lambda m: (read(m, 1.0), read(m, 2.0), m.w[...])[2]),
        gradient(lambda m: (nnx.cond(True, read, read, m, 1.0), m.w[...])[1]),
        gradient(lambda m: (nnx.vmap(read, in_axes=(None, 0))(m, xs), m.w[...])[1]),
        gradient(lambda m: (shared(m, xs), m.w[...])[1]),
        gradient(lambda m: (carried(m, xs), m.w[...])[1]),
    )


@program(TREE)
def one_variable_as_the_gradient_of_two(nnx, **mode):
    Holder = models(nnx).Holder
    f = nnx.custom_vjp(lambda m: m.a * m.b, **mode)
    f.defvjp(lambda m: (f(m), m), lambda m, g: (Holder(a=m.a, b=m.a),))
    return nnx.grad(lambda m: f(m), **mode)(Holder(a=nnx.Param(2.0), b=nnx.Param(3.0)))


@program(TREE)
def one_object_at_two_places(nnx, **mode):
    part = models(nnx).Holder(a=jnp.array(3.0))
    both = models(nnx).Holder(p=part, q=part)
    loss = lambda both, r: both.p.a * both.q.a**2 * r.a**3  # noqa: E731
    tangents = models(nnx).Holder(a=jnp.array(1.0)), models(nnx).Holder(a=jnp.array(10.0))
    return (
        nnx.grad(loss, argnums=(0, 1), **mode)(both, part),
        nnx.jvp(lambda p, q: p.a * q.a**2, (part, part), tangents, **mode),
    )


@program.each
def test_programs(program, mode):
    same(program, mode)


@error()
def differentiated_and_not(nnx, **mode):
    m = models(nnx).Pair()
    nnx.grad(lambda a, b: square(a), **mode)(m, m)


@error(VALUES, TREE)
def captured_result(nnx, **mode):
    m = models(nnx).Pair()
    nnx.grad(lambda x: (x**2, m), has_aux=True, **mode)(1.0)


@error()
def captured_counter(nnx, **mode):
    m = models(nnx).Pair()

    def loss(x):
        m.n[...] += x
        return x

    nnx.grad(loss, **mode)(1.0)


@error()
def non_scalar_loss(nnx, **mode):
    nnx.grad(lambda m: jnp.ones(3) * m.w, **mode)(models(nnx).Pair())


@error()
def integer_loss(nnx, **mode):
    nnx.grad(lambda m: 3, **mode)(models(nnx).Pair())


@error()
def integers(nnx, **mode):
    nnx.grad(lambda v: v * 1.0, **mode)(nnx.Param(jnp.array(3)))


@error()
def pair_without_has_aux(nnx, **mode):
    nnx.grad(lambda m: (square(m), 1), **mode)(models(nnx).Pair())


@error()
def no_arguments(nnx, **mode):
    nnx.grad(lambda: 1.0, **mode)()


@error()
def invalid_argnum(nnx, **mode):
    nnx.grad(square, argnums=5, **mode)(models(nnx).Pair())


@error(GRAPH)
def duplicate_argnums(nnx, **mode):
    nnx.grad(square, argnums=(0, 0), **mode)(models(nnx).Pair())


@error()
def axes_to_reduce(nnx, **mode):
    nnx.grad(square, reduce_axes=("batch",), **mode)(models(nnx).Pair())


@error()
def method_of_an_object(nnx, **mode):
    nnx.grad(models(nnx).Pair().__call__, **mode)


@error(VALUES, TREE)
def mismatched_tangent_state(nnx, **mode):
    m = models(nnx).Pair()
    nnx.jvp(lambda m: m.w * 1, (m,), (jnp.ones(()),), **mode)


@error(VALUES, TREE)
def alias_among_arguments_with_a_rule(nnx, **mode):
    f = nnx.custom_vjp(lambda m: m.w * m.v, **mode)
    f.defvjp(lambda m: (m.w * m.v, m), lambda m, g: (m,))
    m = models(nnx).Pair()
    m.v = m.w
    f(m)


@error(VALUES, TREE)
def alias_of_two_arguments_with_a_rule(nnx, **mode):
    f = nnx.custom_vjp(lambda a, b: a.w * b.w, **mode)
    f.defvjp(lambda a, b: (a.w * b.w, (a, b)), lambda pair, g: pair)
    m = models(nnx).Pair()
    f(m, m)


@error(VALUES)
def tangents_of_one_object_at_two_places(nnx, **mode):
    Holder = models(nnx).Holder
    part = Holder(a=jnp.array(3.0))
    tangents = Holder(a=jnp.array(1.0)), Holder(a=jnp.array(10.0))
    nnx.jvp(lambda p, q: p.a * q.a**2, (part, part), tangents, **mode)


@error(GRAPH)
def no_rule(nnx, **mode):
    nnx.custom_vjp(lambda m: m.w * 1, **mode)(models(nnx).Pair())


@error(GRAPH)
def rule_with_mismatched_result(nnx, **mode):
    f = nnx.custom_vjp(lambda m: m.w * 1, **mode)
    f.defvjp(lambda m: (m.w * 1, m), lambda m, g: (3.0,))
    nnx.grad(lambda m: f(m), **mode)(models(nnx).Pair())


@error.each
def test_errors(program, mode):
    same_error(program, mode)
