"""Programs with scan, while_loop and fori_loop over objects, on Flax NNX and on Weft."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.parity.nnx_transforms import GRAPH, TREE, VALUES, Programs, X, models, same, same_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

program, error = Programs(), Programs()
XS = jnp.arange(3.0)


@program()
def arrays_alone(nnx, **mode):
    f = nnx.scan(
        lambda x, c: (c + x, c * 2), in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), **mode
    )
    g = nnx.scan(lambda c: c * 2, in_axes=nnx.Carry, out_axes=nnx.Carry, length=3, **mode)
    h = nnx.scan(lambda c, x: (c + x,), out_axes=(nnx.Carry,), **mode)
    return f(XS, 0.0), g(1.0), h(0.0, XS)


@program()
def carry_at_any_place(nnx, **mode):
    f = nnx.scan(
        lambda a, c, b: (a + b, c + a, a * b),
        in_axes=(0, nnx.Carry, None),
        out_axes=(0, nnx.Carry, 0),
        **mode,
    )
    return f(XS, jnp.zeros(()), jnp.ones(()))


@program()
def no_carry(nnx, **mode):
    return nnx.scan(lambda x, y: x * y, in_axes=(0, None), out_axes=0, **mode)(XS, jnp.ones(2))


@program()
def nested_carries_and_axes(nnx, **mode):
    f = nnx.scan(
        lambda c, d: ({"a": c["a"] + d["a"], "b": (c["b"][0] * 2,)}, {"y": d["a"] + d["b"]}),
        in_axes=(nnx.Carry, {"a": 1, "b": None}),
        out_axes=(nnx.Carry, {"y": -1}),
        **mode,
    )
    return f({"a": jnp.zeros(2), "b": (1.0,)}, {"a": jnp.ones((2, 3)), "b": jnp.ones(())})


@program()
def backwards_and_unrolled(nnx, **mode):
    body = lambda c, x: (c * 0.5 + x, c)  # noqa: E731
    return [
        nnx.scan(body, **options, **mode)(1.0, XS)
        for options in ({"reverse": True}, {"unroll": 2}, {"unroll": True}, {"length": 3})
    ]


@program()
def layers_made_and_scanned(nnx, **mode):
    keys = jax.random.split(jax.random.key(0), 3)
    layers = nnx.vmap(lambda key: models(nnx).Block(nnx.Rngs(key)), **mode)(keys)
    f = nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **mode)
    return f(X, layers), layers


@program()
def module_is_the_carry(nnx, **mode):
    m = models(nnx).Pair()

    def f(m, x):
        m.n[...] += x
        m.w[...] *= 2
        return m, m.n * 1

    out, ys = nnx.scan(f, **mode)(m, XS)
    return out.w is m.w, type(out), ys, m


@program(GRAPH)
def carry_keeps_identity(nnx, **mode):
    m = models(nnx).Pair()
    carry = {"m": m, "x": (jnp.zeros(()), m.w)}

    def f(carry, x):
        carry["m"].n[...] += x
        carry["x"][1][...] += 1
        return {"m": carry["m"], "x": (carry["x"][0] + x, carry["x"][1])}

    out = nnx.scan(f, out_axes=nnx.Carry, **mode)(carry, XS)
    return out["m"] is m, out["x"][1] is m.w, out, m


@program()
def modules_in_the_carry(nnx, **mode):
    Pair = models(nnx).Pair
    carry = {"m": Pair(), "l": [Pair(3.0), jnp.zeros(())]}

    def f(carry, x):
        carry["m"].n[...] += x
        carry["l"][0].w[...] += carry["m"].n
        carry["l"][1] = carry["l"][1] + x
        return carry, None

    out, _ = nnx.scan(f, **mode)(carry, XS)
    return out


@program()
def each_step_writes_to_its_slice(nnx, **mode):
    m = models(nnx).Pair(jnp.arange(6.0).reshape(2, 3), jnp.zeros((2, 3)))

    def f(c, m):
        m.n[...] = m.w * c
        return c + 1, m.w.sum()

    f = nnx.scan(f, in_axes=(nnx.Carry, 1), **mode)
    return f(1.0, m), m


@program(GRAPH)
def carried_and_scanned_parts(nnx, **mode):
    m = models(nnx).Pair(jnp.arange(3.0), 0.0)
    axes = nnx.StateAxes({nnx.Param: 0, ...: nnx.Carry})

    def f(x, m):
        m.n[...] += m.w
        return x + m.n

    f = nnx.scan(f, in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, **mode)
    return f(jnp.zeros(()), m), m


@program(GRAPH)
def attributes_made_in_each_step(nnx, **mode):
    m = models(nnx).Holder(w=nnx.Param(jnp.arange(3.0)), kind="old")

    def f(c, m):
        m.made = nnx.Intermediate(m.w * c)
        m.kind = "new"
        return c + 1

    f = nnx.scan(f, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **mode)
    return f(1.0, m), m


@program()
def shared_model(nnx, **mode):
    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    f = nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=3, **mode)
    return f(X, linear), linear


@program()
def streams_as_the_carry(nnx, **mode):
    rngs = nnx.Rngs(0, dropout=3)

    def f(rngs, x):
        return rngs, x + jax.random.normal(rngs.dropout())

    _, ys = nnx.scan(f, **mode)(rngs, XS)
    return ys, rngs


@program()
def split_streams(nnx, **mode):
    rngs = nnx.Rngs(0)

    @nnx.split_rngs(splits=3, **mode)
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **mode)
    def f(c, rngs):
        return c + jax.random.normal(rngs.noise())

    return f(0.0, rngs), rngs


@program()
def new_models_stacked(nnx, **mode):
    def f(c, x):
        return c + x, models(nnx).Pair(c, x)

    return nnx.scan(f, **mode)(0.0, XS)


@program()
def method(nnx, **mode):
    class Stack(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(XS)
            self.seen = nnx.BatchStat(jnp.zeros(3))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, **mode)
        def __call__(self, x):
            self.seen[...] = x
            return x * self.w + 1

    m = Stack()
    return m(jnp.ones(())), m


@program(GRAPH)
def names_of_axes(nnx, **mode):
    v = nnx.Param(jnp.ones((3, 2)), out_sharding=("layers", "a"), eager_sharding=False)
    inside = []

    def f(c, v):
        inside.append(v.out_sharding)
        return c, nnx.Param(v * 2, out_sharding=("b",), eager_sharding=False)

    f = nnx.scan(
        f, out_axes=(nnx.Carry, 1), transform_metadata={nnx.PARTITION_NAME: "layers"}, **mode
    )
    return f(jnp.zeros(()), v), inside, v


@program()
def gradients_of_a_scan(nnx, **mode):
    layers = models(nnx).Holder(w=nnx.Param(jnp.array([1.0, 2.0, 3.0])))

    def loss(m, x):
        f = nnx.scan(lambda x, m: m.w * x, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **mode)
        return f(x, m)

    return nnx.value_and_grad(loss, **mode)(layers, jnp.ones(()))


@program()
def while_over_a_module(nnx, **mode):
    m = models(nnx).Pair(2.0)

    def body(m):
        m.n[...] += 1
        m.w[...] *= 2
        return m

    out = nnx.while_loop(lambda m: m.n[...] < 4, body, m, **mode)
    return out.w is m.w, type(out), m


@program()
def while_over_a_tree(nnx, **mode):
    m = models(nnx).Pair(2.0)

    def body(carry):
        i, d = carry
        d["m"].n[...] += d["x"]
        return i + 1, {"m": d["m"], "x": d["x"] * 2}

    i, rest = nnx.while_loop(lambda c: c[0] < 3, body, (0, {"m": m, "x": 1.0}), **mode)
    return i, rest["x"], rest["m"].n is m.n, m


@program()
def condition_writes_are_dropped(nnx, **mode):
    m = models(nnx).Pair(2.0)

    def cond(m):
        m.w[...] += 1
        return m.n[...] < 3

    def body(m):
        m.n[...] += 1
        return m

    nnx.while_loop(cond, body, m, **mode)
    return m


@program(GRAPH)
def while_over_shared_objects(nnx, **mode):
    space = models(nnx)
    part = space.Pair()
    carry = (space.Holder(part=part), space.Holder(part=part))

    def body(carry):
        assert carry[0].part is carry[1].part
        carry[1].part.n[...] += 1
        return carry

    out = nnx.while_loop(lambda c: c[0].part.n[...] < 3, body, carry, **mode)
    return out[0] is carry[0], out[1] is carry[1], out


@program()
def fori_over_a_module(nnx, **mode):
    m = models(nnx).Pair(2.0)

    def body(i, m):
        m.n[...] += i
        return m

    out = nnx.fori_loop(1, 4, body, m, **mode)
    return out.n is m.n, m


@program()
def fori_with_streams(nnx, **mode):
    rngs = nnx.Rngs(0)

    def body(i, carry):
        x, rngs = carry
        return x + jax.random.normal(rngs.noise()), rngs

    return nnx.fori_loop(0, 3, body, (jnp.zeros(()), rngs), **mode)[0], rngs


@program()
def fori_with_array_bounds(nnx, **mode):
    m = models(nnx).Pair(2.0)

    def body(i, m):
        m.n[...] += i
        return m

    nnx.fori_loop(jnp.array(1), jnp.array(4), body, m, **mode)
    return m


@program()
def gradients_of_a_fori_loop(nnx, **mode):
    def loss(w):
        return nnx.fori_loop(0, 3, lambda i, x: x * w, jnp.ones(()), **mode)

    return nnx.grad(loss, **mode)(nnx.Param(2.0))


@program()
def empty_loops(nnx, **mode):
    m = models(nnx).Pair(2.0)

    def body(m):
        m.n[...] += 1
        return m

    nnx.while_loop(lambda m: False, body, m, **mode)
    nnx.fori_loop(3, 1, lambda i, m: body(m), m, **mode)
    nnx.scan(lambda m, x: (body(m), x), **mode)(m, jnp.zeros((0, 2)))
    return m


@program()
def nested_loops(nnx, **mode):
    m = models(nnx).Pair(1.0)

    def inner(i, m):
        m.n[...] += 1
        return m

    def body(m, x):
        m.w[...] += x
        return nnx.fori_loop(0, 2, inner, m, **mode), m.n * m.w

    _, ys = nnx.scan(body, **mode)(m, XS)
    return m, ys


@program(VALUES, TREE)
def body_writes_shared_variable(nnx, **mode):
    m = nnx.Dict(n=nnx.BatchStat(jnp.zeros(())), w=nnx.Param(jnp.ones(())))

    def body(c, m, x):
        m.n[...] += m.w[...] * x
        return c + m.n[...], m.n[...]

    f = nnx.scan(body, in_axes=(nnx.Carry, None, 0), **mode)
    return m, f(0.0, m, XS), f(0.0, m, XS)


@program(VALUES, TREE)
def body_draws_shared_keys(nnx, **mode):
    rngs = nnx.Rngs(0)
    f = nnx.scan(
        lambda c, r: (c, jax.random.uniform(r.default())),
        in_axes=(nnx.Carry, None),
        length=3,
        **mode,
    )
    return f(jnp.float32(0), rngs), rngs.default.count[...]


@program.each
def test_programs(program, mode):
    same(program, mode)


@program(GRAPH, VALUES, TREE)
def arrays_in_attributes_of_a_carry(nnx, **mode):
    space, found = models(nnx), []

    def step(holder, x):
        holder.a = holder.a + x
        holder.part.b = nnx.data({"c": holder.part.b["c"] * 2})
        holder.n[...] += 1
        return holder

    for run in (
        lambda h: nnx.scan(lambda h, x: (step(h, x), h.a * 1), **mode)(h, XS),
        lambda h: nnx.scan(lambda h, x: step(h[0], x) and h, out_axes=nnx.Carry, **mode)([h], XS),
        lambda h: nnx.while_loop(lambda h: h.a < 3, lambda h: step(h, 1.0), h, **mode),
        lambda h: nnx.fori_loop(
            0, 3, lambda i, h: (step(h[0], i), h[1]), (h, jnp.int32(0)), **mode
        ),
        lambda h: nnx.fori_loop(0, 0, lambda i, h: step(h, i), h, **mode),
    ):
        part = space.Holder(b=nnx.data({"c": jnp.ones(2)}))
        holder = space.Holder(a=jnp.zeros(()), part=part, n=space.Count(jnp.zeros(())), k="k")
        found.append((run(holder), holder, holder.part is part))
    return found


@program(VALUES, TREE)
def carries_that_are_replaced(nnx, **mode):
    def step(point, x):
        new = nnx.clone(point, variables=False)
        new.a = new.a + x
        return new

    new = lambda: models(nnx).Holder(a=jnp.zeros(()), n=nnx.BatchStat(jnp.ones(())))  # noqa: E731
    return [
        nnx.scan(lambda c, x: (step(c, x), c.a * 1), **mode)(new(), XS),
        nnx.while_loop(lambda c: c.a < 3, lambda c: step(c, 1.0), new(), **mode),
        nnx.fori_loop(0, 3, lambda i, c: step(c, i), new(), **mode),
    ]


@program(GRAPH, VALUES, TREE)
def arrays_in_attributes_that_are_not_carried(nnx, **mode):
    def body(shared, mapped, x):
        for holder in (shared, mapped):
            holder.a = holder.a + x
        return shared.a * 1, mapped.a * 1

    shared, mapped = (models(nnx).Holder(a=a) for a in (jnp.zeros(()), XS))
    f = nnx.scan(body, in_axes=(None, 0, 0), out_axes=0, **mode)
    return f(shared, mapped, XS), shared, mapped


@program(GRAPH, VALUES, TREE)
def sowing_into_a_variable_of_the_carry(nnx, **mode):
    class Sows(nnx.Module):
        def __init__(self):
            self.h = nnx.Intermediate(jnp.zeros(()))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "h", x, reduce_fn=jnp.add, init_fn=lambda: 0.0)
            return x

    layer = Sows()
    ys = nnx.scan(lambda c, x: (c, c(x)), **mode)(layer, XS)[1]
    nnx.fori_loop(0, 3, lambda i, c: (c[0], c[0](c[1])), (layer, jnp.array(1.0)), **mode)
    return ys, layer


@program(GRAPH)
def changed_state_that_axes_share(nnx, **mode):
    space = models(nnx)
    axes = nnx.StateAxes({space.Count: nnx.Carry, nnx.BatchStat: None, nnx.Param: 0})

    def body(c, model):
        model.n[...] += 1
        model.seen[...] += model.n
        model.w[...] *= 2
        model.seen.set_metadata(changed=True)
        return c + model.seen * model.w

    model = space.Pair(XS)
    model.seen = nnx.BatchStat(jnp.zeros(()))
    f = nnx.scan(body, in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, **mode)
    return f(0.0, model), nnx.jit(f, **mode)(0.0, model), model


@program(GRAPH, VALUES, TREE)
def changed_objects_and_variables_that_are_shared(nnx, **mode):
    def body(model, n, x):
        model.n[...] += x
        n.set_value(n[...] + model.n)
        return model.n + n, nnx.vmap(lambda a, y: a * y, in_axes=(None, 0), **mode)(
            model.w, x[None]
        )

    model, n = models(nnx).Pair(), nnx.BatchStat(jnp.zeros(()))
    f = nnx.scan(body, in_axes=(None, None, 0), out_axes=0, **mode)
    loss = lambda model, n: f(model, n, XS)[0].sum() * model.w[...]  # noqa: E731
    grad = nnx.grad(loss, **mode)
    return f(model, n, XS), model, n, nnx.to_pure_dict(nnx.state(grad(model, n)))


@program(GRAPH, VALUES, TREE)
def replaced_parts_of_shared_objects(nnx, **mode):
    space = models(nnx)
    n = nnx.BatchStat(jnp.zeros(()))
    shared = space.Holder(n=n, part=space.Holder(m=nnx.BatchStat(jnp.ones(()))), k="a", gone=1)

    def body(c, shared, x):
        shared.n = nnx.BatchStat(shared.n + x, changed=True)
        shared.part = space.Holder(m=nnx.BatchStat(shared.part.m + x))
        shared.k += "b"
        shared.new = "new"
        del shared.gone
        return c + shared.n + shared.part.m

    f = nnx.scan(body, in_axes=(nnx.Carry, None, 0), out_axes=nnx.Carry, **mode)
    return f(0.0, shared, XS), shared, shared.n is n


@program(GRAPH)
def replaced_parts_that_axes_share(nnx, **mode):
    model = models(nnx).Holder(w=nnx.Param(XS), n=nnx.BatchStat(jnp.zeros(())), k="a")

    def body(c, model):
        model.n = nnx.BatchStat(model.n + model.w)
        model.k = "b"
        return c + model.n

    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    f = nnx.scan(body, in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, **mode)
    return f(0.0, model), model


@program(VALUES, TREE)
def changed_attributes_of_mapped_objects(nnx, **mode):
    def body(c, mapped):
        mapped.k, mapped.w = "b", nnx.Param(mapped.w * 2)
        return c + mapped.w

    mapped = models(nnx).Holder(w=nnx.Param(XS), k="a")
    f = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **mode)
    return f(0.0, mapped), mapped


@program(GRAPH, VALUES, TREE)
def objects_of_variables_in_the_carry(nnx, **mode):
    def step(holder, x):
        holder.n[...] += x
        return holder

    found = []
    for run in (
        lambda h: nnx.scan(lambda h, x: (step(h, x), x), **mode)(h, XS)[0],
        lambda h: nnx.while_loop(lambda h: h.n[...] < 3, lambda h: step(h, 1.0), h, **mode),
        lambda h: nnx.fori_loop(0, 3, lambda i, h: step(h, i), h, **mode),
    ):
        holder = models(nnx).Holder(n=nnx.BatchStat(jnp.zeros(())), k="k")
        out = run(holder)
        found.append((out, holder, out is holder, out.n is holder.n))
    return found


@program(GRAPH, VALUES, TREE)
def one_object_at_two_places(nnx, **mode):
    def step(pair, x):
        pair[0].a = pair[0].a + x
        return pair

    part = models(nnx).Holder(a=jnp.ones(()))
    both = models(nnx).Holder(p=part, q=part)
    gradient = nnx.grad(lambda both: both.p.a * both.q.a**2, **mode)(both)
    return (
        nnx.scan(lambda c, x: (step(c, x), x), **mode)((part, part), XS)[0],
        nnx.while_loop(lambda c: c[0].a < 3, lambda c: step(c, 1.0), (part, part), **mode),
        nnx.jit(lambda p, q: step((p, q), 1.0)[1].a * 1, **mode)(part, part),
        nnx.jit(lambda both: step((both.p, 0), 1.0) and both.q.a * 1, **mode)(both),
        nnx.scan(lambda c, p, q: c + p.a * q.a, in_axes=(nnx.Carry, None, None), length=2,
                 out_axes=nnx.Carry, **mode)(0.0, part, part),
        gradient if mode else None,
    )  # fmt: skip


@program(GRAPH, VALUES, TREE)
def shared_random_numbers(nnx, **mode):
    draw = lambda rngs, layer, x: (rngs.uniform((2,)), layer(x))  # noqa: E731
    rngs, layer = nnx.Rngs(1), nnx.Dropout(0.5, rngs=nnx.Rngs(2))
    f = nnx.scan(draw, in_axes=(None, None, 0), out_axes=0, **mode)
    return f(rngs, layer, jnp.ones((3, 8))), rngs, layer


def double_with_a_new_variable(nnx, m):
    m.w = nnx.Param(m.w[...] * 2)
    return m


def double_in_a_new_part(nnx, m):
    m.part = models(nnx).Holder(w=nnx.Param(m.part.w[...] * 2))
    return m


@program(GRAPH)
def replaced_variables_and_parts_of_the_carry(nnx, **mode):
    found = []
    for step in (double_with_a_new_variable, double_in_a_new_part):
        body = functools.partial(step, nnx)
        of_part = models(nnx).Holder(w=nnx.Param(jnp.ones(())))
        m = models(nnx).Holder(w=nnx.Param(jnp.ones(())), part=of_part)
        before, part = m.w, m.part
        carry = nnx.scan(body, in_axes=nnx.Carry, out_axes=nnx.Carry, length=2, **mode)(m)
        carry = nnx.fori_loop(0, 2, lambda i, m, body=body: body(m), carry, **mode)
        found.append((carry, carry is m, m.w is before, m.part is part, before, part))
    return found


@error(GRAPH)
def replaced_variable_of_a_while_loop(nnx, **mode):
    m = models(nnx).Holder(w=nnx.Param(jnp.ones(())))
    body = functools.partial(double_with_a_new_variable, nnx)
    nnx.while_loop(lambda m: m.w[...] < 4, body, m, **mode)


@error(GRAPH)
def replaced_part_of_a_while_loop(nnx, **mode):
    m = models(nnx).Holder(part=models(nnx).Holder(w=nnx.Param(jnp.ones(()))))
    nnx.while_loop(
        lambda m: m.part.w[...] < 4, functools.partial(double_in_a_new_part, nnx), m, **mode
    )


@error()
def carry_without_a_counterpart(nnx, **mode):
    nnx.scan(lambda c, x: x, in_axes=(nnx.Carry, 0), out_axes=0, **mode)(0.0, XS)


@error()
def nested_carry(nnx, **mode):
    nnx.scan(lambda a, b: (a, b), in_axes=({"a": nnx.Carry}, 0), **mode)({"a": 0.0}, XS)


@error()
def shared_result(nnx, **mode):
    nnx.scan(lambda c, x: (c, x), out_axes=(nnx.Carry, None), **mode)(0.0, XS)


@error(GRAPH)
def shared_part_of_a_result(nnx, **mode):
    axes = nnx.StateAxes({...: None})
    make = lambda c, x: (c, models(nnx).Pair(x))  # noqa: E731
    nnx.scan(make, out_axes=(nnx.Carry, axes), **mode)(0.0, XS)


@error()
def no_length(nnx, **mode):
    nnx.scan(lambda c: c, in_axes=nnx.Carry, out_axes=nnx.Carry, **mode)(0.0)


@error()
def mismatched_length(nnx, **mode):
    nnx.scan(lambda c, x: (c, x), length=4, **mode)(0.0, XS)


@error()
def mismatched_carry_shape(nnx, **mode):
    nnx.scan(lambda c, x: (jnp.stack([c, c]), x), **mode)(jnp.zeros(()), XS)


@error(VALUES, TREE)
def mismatched_carry_structure(nnx, **mode):
    nnx.scan(lambda c, x: ((c, c), x), **mode)(jnp.zeros(()), XS)


@error()
def different_module_returned(nnx, **mode):
    nnx.scan(lambda m, x: (nnx.clone(m), x), **mode)(models(nnx).Pair(), XS)


@error()
def carry_is_also_shared(nnx, **mode):
    m = models(nnx).Pair()
    f = nnx.scan(lambda a, b, x: (a, x), in_axes=(nnx.Carry, None, 0), **mode)
    f(m, m, XS)


@error()
def carry_is_also_scanned(nnx, **mode):
    m = models(nnx).Pair(XS, XS)
    nnx.scan(lambda a, b: (a, 0.0), **mode)(m, m)


@error()
def captured_result(nnx, **mode):
    m = models(nnx).Pair()
    nnx.scan(lambda c, x: (c, m), **mode)(0.0, XS)


@error()
def captured_counter(nnx, **mode):
    m = models(nnx).Pair()

    def f(c, x):
        m.n[...] += x
        return c, x

    nnx.scan(f, **mode)(0.0, XS)


@error()
def while_loop_returns_other_module(nnx, **mode):
    nnx.while_loop(lambda m: m.n[...] < 3, nnx.clone, models(nnx).Pair(), **mode)


@error()
def while_loop_returns_nothing(nnx, **mode):
    nnx.while_loop(lambda m: m.n[...] < 3, lambda m: None, models(nnx).Pair(), **mode)


@error()
def non_bool_condition(nnx, **mode):
    nnx.while_loop(lambda m: m.n[...], lambda m: m, models(nnx).Pair(), **mode)


@error()
def variable_changes_its_shape_in_a_loop(nnx, **mode):
    def body(m):
        m.n.set_value(jnp.ones(2))
        return m

    nnx.while_loop(lambda m: True, body, models(nnx).Pair(), **mode)


@error()
def method_of_an_object(nnx, **mode):
    nnx.scan(models(nnx).Pair().__call__, **mode)


@error.each
def test_errors(program, mode):
    same_error(program, mode)
