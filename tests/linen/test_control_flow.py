import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from weft import linen as nn
from weft.errors import BranchStructureError, CarryStructureError, InvalidRngError

KEY = quick_key(0)
X = jnp.arange(6.0).reshape(2, 3)


class Linear(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", jax.nn.initializers.normal(1.0), (x.shape[-1], self.features))


class Counter(nn.Module):
    step: float = 1.0

    @nn.compact
    def __call__(self, x):
        count = self.variable("counts", "count", lambda: jnp.zeros(()))
        count.value += self.step
        return x + count.value


def model(body):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, *args):
            return body(self, *args)

    return Model()


# Loops.


def while_loop(n, body, m, x, **options):
    step = lambda m, carry: (carry[0] + 1, body(m, carry[1]))  # noqa: E731
    return nn.while_loop(lambda m, carry: carry[0] < n, step, m, (0, x), **options)[1]


def fori_loop(n, body, m, x, **options):
    return nn.fori_loop(0, n, lambda i, m, x: body(m, x), m, x, **options)


loops = pytest.mark.parametrize("loop", [while_loop, fori_loop])


def call(m, x):
    return m(x)


@loops
@pytest.mark.parametrize("n", [0, 1, 3])
def test_loop_matches_python(loop, n):
    def python(n, body, m, x, **options):
        for _ in range(n):
            x = body(m, x)
        return x

    def run(loop):
        def body(self, x):
            counter = Counter()
            counter(x)
            return loop(n, call, counter, x, carry_variables="counts")

        m = model(body)
        y, variables = m.init_with_output({}, X)
        return y, variables, m.apply(variables, X, mutable="counts")

    (y, variables, after), (expected, theirs, then) = run(loop), run(python)
    np.testing.assert_allclose(y, expected)
    assert variables == theirs
    np.testing.assert_allclose(after[0], then[0])
    assert after[1] == then[1]


def test_changed_carry_is_named():
    m = model(lambda self, x: while_loop(2, lambda m, x: {"a": x["a"][:1]}, self, {"a": x}))
    with pytest.raises(CarryStructureError, match=r"is given as float32\[2,3\] and returned as"):
        m.apply({}, X)


def test_unlifted_stream_is_named():
    with pytest.raises(InvalidRngError, match="lift the stream"):
        model(lambda self, x: while_loop(2, lambda m, x: Linear()(x), self, x)).init(KEY, X)


# Branches.


def two(flag, f, g, m, *args, **options):
    return nn.cond(flag, f, g, m, *args, **options)


def of_index(flag, f, g, m, *args, **options):
    return nn.switch(jnp.where(flag, 0, 1), [f, g], m, *args, **options)


branching = pytest.mark.parametrize("choose", [two, of_index])


@branching
def test_same_branch_twice_draws_the_same_keys(choose):
    def draw(self):
        return jax.random.normal(self.make_rng("noise"))

    m = model(lambda self, flag: (choose(flag, draw, draw, self), draw(self)))
    first, after = m.apply({}, True, rngs={"noise": KEY})
    again, _ = m.apply({}, False, rngs={"noise": KEY})
    assert first == again
    assert first != after


@branching
def test_branches_that_capture_modules(choose):
    def body(self, x, flag):
        a, b = Linear(), Linear()
        return choose(flag, lambda self, x: a(x), lambda self, x: b(x), self, x), a(x), b(x)

    m = model(body)
    variables = m.init(KEY, X, True)
    assert sorted(variables["params"]) == ["Linear_0", "Linear_1"]
    for flag in (True, False):
        y, a, b = m.apply(variables, X, flag)
        np.testing.assert_allclose(y, a if flag else b, rtol=1e-5)


@branching
def test_mismatched_branches_are_named(choose):
    def one(self, x):
        return {"y": x}

    def other(self, x):
        return {"y": x[:1]}

    m = model(lambda self, x: choose(True, one, other, self, x))
    with pytest.raises(BranchStructureError, match=r"result\['y'\] is float32\[.,3\] in .*, and"):
        m.apply({}, X)


@branching
def test_branches_without_a_collection(choose):
    m = model(
        lambda self, x: choose(True, Linear.__call__, Linear.__call__, Linear(), x, rngs=False)
    )
    with pytest.raises(InvalidRngError, match="lift the stream"):
        m.init(KEY, X)


# State that is made and changed in nested loops, see tests/core/lift/test_nested_state.py.
