"""Programs with cond, switch, remat, checkify and shapes, on Flax NNX and on Weft."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from tests.parity.nnx_transforms import GRAPH, TREE, VALUES, Programs, X, models, same, same_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

program, error = Programs(), Programs()


def add_one(m):
    m.n[...] += 1
    return m.w * 2


def add_ten(m):
    m.n[...] += 10
    return m.w * 3


@program()
def each_branch_writes(nnx, **mode):
    m = models(nnx).Pair()
    ys = [nnx.cond(p, add_one, add_ten, m, **mode) for p in (True, False, jnp.array(True))]
    ys += [nnx.switch(i, [add_one, add_ten], m, **mode) for i in (0, 1, 7, -3, jnp.array(1))]
    return ys, m


@program()
def one_branch_writes(nnx, **mode):
    m, other = models(nnx).Pair(), models(nnx).Pair()

    def nothing(m):
        return m.w * 3

    f = nnx.jit(lambda p, m: nnx.cond(p, add_one, nothing, m, **mode), **mode)
    return f(True, m), f(False, other), m, other


@program()
def streams_advance_in_taken_branch(nnx, **mode):
    rngs = nnx.Rngs(0)
    draw = lambda r: jax.random.normal(r.noise())  # noqa: E731
    rest = lambda r: jnp.zeros(())  # noqa: E731
    y = nnx.cond(True, draw, rest, rngs, **mode)
    z = nnx.cond(False, draw, rest, rngs, **mode)
    return y, z, rngs


@program()
def several_operands_in_containers(nnx, **mode):
    Pair = models(nnx).Pair
    ops = {"a": Pair(), "b": [Pair(5.0), jnp.ones(2)]}

    def left(ops, x):
        ops["a"].w[...] = ops["b"][0].w * x
        return ops["b"][1] * x

    def right(ops, x):
        ops["b"][0].w[...] += 1
        return ops["b"][1] + x

    y = nnx.cond(False, left, right, ops, 2.0, **mode)
    z = nnx.cond(True, left, right, ops, 3.0, **mode)
    return y, z, ops


@program(GRAPH)
def same_attribute_in_both_branches(nnx, **mode):
    m = models(nnx).Pair()

    def of(value):
        def branch(m):
            m.made = nnx.Param(m.w + value)
            m.kind = "new"

        return branch

    nnx.cond(True, of(1.0), of(2.0), m, **mode)
    return m


@program(VALUES, TREE)
def attribute_in_one_branch_is_dropped(nnx, **mode):
    m = models(nnx).Pair()

    def make(m):
        m.made = nnx.Param(1.0)

    nnx.cond(True, make, lambda m: None, m, **mode)
    return m


@program(GRAPH)
def operand_is_returned(nnx, **mode):
    m = models(nnx).Pair()
    out = nnx.cond(True, lambda m: (m, m.w), lambda m: (m, m.w), m, **mode)
    return out[0] is m, out[1] is m.w


@program()
def new_models_from_branches(nnx, **mode):
    Pair = models(nnx).Pair
    return nnx.switch(1, [lambda x: Pair(x), lambda x: Pair(2 * x)], 3.0, **mode)


@program(GRAPH, VALUES)
def shared_operands(nnx, **mode):
    m = models(nnx).Pair()

    def both(a, b):
        a.n[...] += 1
        b.n[...] += 1

    nnx.cond(True, both, lambda a, b: None, m, m, **mode)
    return m


@program()
def captured_values_are_read(nnx, **mode):
    m = models(nnx).Pair(3.0)
    ys = []
    for _ in range(2):
        ys.append(nnx.cond(True, lambda x: x * m.w, lambda x: x, 2.0, **mode))
        m.w[...] += 1
    return ys


@program()
def nested_branches(nnx, **mode):
    m = models(nnx).Pair()

    def outer(m):
        m.n[...] += 100
        return nnx.cond(m.n[...] > 1, add_one, add_ten, m, **mode)

    return nnx.cond(True, outer, add_ten, m, **mode), m


@program()
def remat_of_a_block(nnx, **mode):
    block = models(nnx).Block(nnx.Rngs(0))
    f = nnx.remat(lambda m, x: m(x), **mode)
    loss = lambda m, x: (f(m, x) ** 2).sum()  # noqa: E731
    if mode.get("graph", True) and mode.get("graph_updates", True):
        return nnx.value_and_grad(loss, **mode)(block, X), block
    return loss(block, X), block


@program()
def remat_with_static_arguments(nnx, **mode):
    m = models(nnx).Pair()

    def f(m, kind, x):
        assert kind == "double"
        m.n[...] += 1
        return m.w * x

    g = nnx.remat(f, static_argnums=(1,), policy=jax.checkpoint_policies.dots_saveable, **mode)
    return g(m, "double", 3.0), g(m, "double", x=3.0), m


@program()
def remat_of_a_method(nnx, **mode):
    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array(2.0))
            self.n = nnx.BatchStat(jnp.array(0.0))

        @nnx.remat(static_argnums=(2,), **mode)
        def __call__(self, x, train):
            if train:
                self.n[...] += 1
            return self.w * x

    m = Layer()
    return m(2.0, True), m(2.0, False), m


@program(GRAPH)
def structure_changes_under_remat(nnx, **mode):
    m = models(nnx).Pair()

    def f(m):
        m.made = nnx.Param(jnp.ones(2))
        del m.n
        return m

    return nnx.remat(f, **mode)(m) is m, m


@program()
def checks(nnx, **mode):
    m = models(nnx).Pair()

    def f(m, x):
        checkify.check(x > 0, "not positive")
        m.n[...] += 1
        return m.w * x

    good, y = nnx.checkify(f, **mode)(m, 1.0)
    bad, z = nnx.checkify(f, **mode)(m, -1.0)
    return good.get(), bad.get().split(" (")[0], y, z, m


@program()
def checks_under_jit(nnx, **mode):
    m = models(nnx).Pair()

    def f(m, x):
        checkify.check(x > 0, "not positive")
        m.n[...] += 1
        return m.w * x

    bad, y = nnx.jit(nnx.checkify(f, **mode), **mode)(m, -1.0)
    return bad.get().split(" (")[0], y, m


@program()
def shapes_of_a_model(nnx, **mode):
    return nnx.eval_shape(lambda: models(nnx).Block(nnx.Rngs(0)), **mode)


@program()
def shapes_of_a_call(nnx, **mode):
    block = models(nnx).Block(nnx.Rngs(0))

    def f(m, x, k=1):
        return {"y": m(x), "k": m.norm.mean * k}

    return nnx.eval_shape(f, block, X, **mode), nnx.eval_shape(f, block, x=X, k=2.0, **mode), block


@program()
def shapes_of_an_abstract_model(nnx, **mode):
    abstract = nnx.eval_shape(lambda: models(nnx).Pair(), **mode)
    return nnx.eval_shape(
        lambda m, x: m(x), abstract, jax.ShapeDtypeStruct((2,), "float32"), **mode
    )


@program(VALUES)
def a_jaxpr(nnx, **mode):
    m = models(nnx).Pair()

    def f(m, x):
        m.n[...] += 1
        return m.w * x

    jaxpr = nnx.make_jaxpr(f, **mode)(m, 2.0)
    return len(jaxpr.jaxpr.invars), [str(v) for v in jaxpr.out_avals], m


@program.each
def test_programs(program, mode):
    same(program, mode)


@error()
def mismatched_result_shapes(nnx, **mode):
    m = models(nnx).Pair()
    nnx.cond(True, lambda m: m.w * 1, lambda m: jnp.ones(2), m, **mode)


@error()
def mismatched_result_structures(nnx, **mode):
    m = models(nnx).Pair()
    nnx.cond(True, lambda m: m.w * 1, lambda m: (m.w * 1, 2.0), m, **mode)


@error()
def mismatched_variable_shapes(nnx, **mode):
    m = models(nnx).Pair()
    nnx.cond(True, lambda m: m.n.set_value(jnp.ones(2)), lambda m: None, m, **mode)


@error(GRAPH)
def differing_static_attributes(nnx, **mode):
    def of(kind):
        def branch(m):
            m.kind = kind

        return branch

    nnx.cond(True, of("a"), of("b"), models(nnx).Pair(), **mode)


@error(GRAPH)
def branches_that_return_other_operands(nnx, **mode):
    a, b = models(nnx).Pair(), models(nnx).Pair()
    nnx.cond(True, lambda a, b: a, lambda a, b: b, a, b, **mode)


@error()
def mismatched_model_classes(nnx, **mode):
    space = models(nnx)
    nnx.cond(True, lambda: space.Pair(), lambda: space.Holder(w=nnx.Param(1.0)), **mode)


@error(VALUES, TREE)
def captured_result(nnx, **mode):
    m = models(nnx).Pair()
    nnx.cond(True, lambda: m, lambda: m, **mode)


@error()
def captured_counter(nnx, **mode):
    m = models(nnx).Pair()
    nnx.cond(True, lambda: add_one(m), lambda: add_ten(m), **mode)


@error()
def non_scalar_predicate(nnx, **mode):
    nnx.cond(jnp.array([True, False]), add_one, add_ten, models(nnx).Pair(), **mode)


@error()
def non_integer_index(nnx, **mode):
    nnx.switch(1.0, [add_one, add_ten], models(nnx).Pair(), **mode)


@error()
def no_branches(nnx, **mode):
    nnx.switch(0, [], models(nnx).Pair(), **mode)


@error(TREE)
def duplicate_operand(nnx, **mode):
    m = models(nnx).Pair()
    nnx.cond(True, lambda a, b: None, lambda a, b: None, m, m, **mode)


@error()
def remat_of_a_bound_method(nnx, **mode):
    nnx.remat(models(nnx).Pair().__call__, **mode)


@error(VALUES, TREE)
def remat_returns_captured(nnx, **mode):
    m = models(nnx).Pair()
    nnx.remat(lambda x: m, **mode)(1.0)


@error()
def static_argument_not_named(nnx, **mode):
    nnx.remat(lambda m, train: m.w if train else m.n, **mode)(models(nnx).Pair(), True)


@error()
def checkify_of_a_bound_method(nnx, **mode):
    nnx.checkify(models(nnx).Pair().__call__, **mode)


@error()
def eval_shape_of_a_bound_method(nnx, **mode):
    nnx.eval_shape(models(nnx).Pair().__call__, 1.0, **mode)


@error()
def eval_shape_changes_captured(nnx, **mode):
    m = models(nnx).Pair()
    nnx.eval_shape(lambda: add_one(m), **mode)


@error.each
def test_errors(program, mode):
    same_error(program, mode)
