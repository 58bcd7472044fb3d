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


@loops
@pytest.mark.parametrize("n", [0, 3])
def test_body_creates_carry_variables(loop, n):
    m = model(lambda self, x: loop(n, call, Counter(), x, carry_variables="counts"))
    y, variables = m.init_with_output({}, 0.0)
    assert variables["counts"]["Counter_0"]["count"] == n
    assert y == n * (n + 1) / 2


@loops
def test_params_created_in_body_are_shared(loop):
    def body(self, x):
        return loop(3, lambda self, x: Linear()(x), self, x, split_rngs={"params": False})

    m = model(body)
    y, variables = m.init_with_output(KEY, X)
    w = variables["params"]["Linear_0"]["w"]
    np.testing.assert_allclose(y, X @ w @ w @ w, rtol=1e-4)
    np.testing.assert_allclose(m.apply(variables, X), y, rtol=1e-4)


@loops
@pytest.mark.parametrize("split", [True, False])
def test_parameter_after_a_loop_differs_from_its_parameters(loop, split):
    def body(self, x):
        make = lambda self, x: x + self.param("a", jax.random.uniform)  # noqa: E731
        x = loop(2, make, self, x, split_rngs={"params": split})
        return x + self.param("b", jax.random.uniform)

    params = model(body).init(KEY, 0.0)["params"]
    of_python = model(lambda self, x: [self.param(n, jax.random.uniform) for n in "ab"])
    expected = of_python.init(KEY, 0.0)["params"]
    assert params["a"] != params["b"] == expected["b"]
    assert split or params["a"] == expected["a"]


@loops
@pytest.mark.parametrize("split", [True, False])
def test_keys_in_a_loop(loop, split):
    def step(self, pair):
        i, keys = pair
        key = jax.random.key_data(self.make_rng("noise"))
        return i + 1, keys.at[i].set(key)

    init = 0, jnp.zeros((4, 2), jnp.uint32)
    m = model(lambda self: loop(4, step, self, init, split_rngs={"noise": split})[1])
    keys = m.apply({}, rngs={"noise": KEY})
    assert len({tuple(key.tolist()) for key in keys}) == (4 if split else 1)


def test_condition_that_reads_variables():
    def body(self, x):
        counter = Counter(2.0)
        counter(x)
        on = lambda m, x: m.get_variable("counts", "count") < 7  # noqa: E731
        return nn.while_loop(on, call, counter, x, carry_variables="counts")

    y, variables = model(body).init_with_output({}, 0.0)
    assert y == 4 + 6 + 8
    assert variables["counts"]["Counter_0"]["count"] == 8


def test_conditions_and_bodies_that_capture_modules():
    def body(self, x):
        linear, bound = Linear(), Linear(1)
        linear(x), bound(x)
        on = lambda self, c: (c[0] < 2) & (jnp.sum(bound(c[1])) < jnp.inf)  # noqa: E731
        step = lambda self, c: (c[0] + 1, linear(c[1]))  # noqa: E731
        return nn.while_loop(on, step, self, (0, x))[1]

    y, variables = model(body).init_with_output(KEY, X)
    w = variables["params"]["Linear_0"]["w"]
    np.testing.assert_allclose(y, X @ w @ w, rtol=1e-4)


def test_loops_of_several_modules():
    def body(self, x):
        modules = {"linear": Linear(), "counter": Counter()}
        step = lambda ms, x: ms["counter"](ms["linear"](x))  # noqa: E731
        options = {"carry_variables": "counts", "split_rngs": {"params": False}}
        return fori_loop(2, step, modules, x, **options)

    y, variables = model(body).init_with_output(KEY, X)
    w = variables["params"]["Linear_0"]["w"]
    np.testing.assert_allclose(y, ((X @ w) + 1) @ w + 2, rtol=1e-4)
    assert variables["counts"]["Counter_0"]["count"] == 2


def test_fori_loop_counts():
    m = model(lambda self, x: nn.fori_loop(2, 5, lambda i, self, x: x + i, self, x))
    assert m.apply({}, 0) == 2 + 3 + 4


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
def test_branches_create_other_variables(choose):
    def f(self, x):
        return Linear(2, name="a")(x)

    def g(self, x):
        return Linear(2, name="c")(Linear(4, name="b")(x))

    m = model(lambda self, x, flag: choose(flag, f, g, self, x))
    variables = m.init(KEY, X, True)
    assert sorted(variables["params"]) == ["a", "b", "c"]
    w = {name: below["w"] for name, below in variables["params"].items()}
    np.testing.assert_allclose(m.apply(variables, X, True), X @ w["a"], rtol=1e-5)
    np.testing.assert_allclose(m.apply(variables, X, False), X @ w["b"] @ w["c"], rtol=1e-4)
    np.testing.assert_allclose(
        jax.jit(m.apply)(variables, X, False), X @ w["b"] @ w["c"], rtol=1e-4
    )
    one = model(lambda self, x: f(self, x)).init(KEY, X)
    np.testing.assert_array_equal(one["params"]["a"]["w"], w["a"])


@branching
def test_branches_update_other_variables(choose):
    def body(self, flag):
        one, other = Counter(name="one"), Counter(10.0, name="other")
        one(0), other(0)
        return choose(flag, lambda m: m[0](0.0), lambda m: m[1](0.0), (one, other))

    m = model(body)
    variables = {"counts": {"one": {"count": 0.0}, "other": {"count": 0.0}}}
    for flag, expected in [(True, (2, 10)), (False, (1, 20))]:
        _, changed = m.apply(variables, flag, mutable="counts")
        counts = changed["counts"]
        assert (counts["one"]["count"], counts["other"]["count"]) == expected


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


def test_switch_has_many_branches():
    def body(self, x, i):
        heads = [Linear(1, name=f"head_{i}") for i in range(4)]
        return nn.switch(i, [lambda m, x, i=i: m[i](x) for i in range(4)], heads, x)

    m = model(body)
    variables = m.init(KEY, X, 0)
    assert len(variables["params"]) == 4
    for i in range(4):
        expected = X @ variables["params"][f"head_{i}"]["w"]
        np.testing.assert_allclose(m.apply(variables, X, i), expected, rtol=1e-5)


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


def test_cond_in_a_scan_in_a_jit():
    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, flag):
            linear = Linear()
            linear(x)
            return nn.cond(flag, lambda m, x: m(x), lambda m, x: x, linear, x), None

    m = nn.jit(nn.scan(Step, {"params": 0}, split_rngs={"params": True}))()
    flags = jnp.array([True, False, True])
    (y, _), variables = m.init_with_output(KEY, X, flags)
    w = variables["params"]["Linear_0"]["w"]
    np.testing.assert_allclose(y, X @ w[0] @ w[2], rtol=1e-4)


def sows(self, x):
    self.sow("sown", "x", x)
    return x


@branching
def test_sow_in_branches(choose):
    m = model(lambda self, x: choose(x < 3, sows, lambda self, x: sows(self, 2 * x), self, x))
    assert m.apply({}, 1.0, mutable="sown")[1] == {"sown": {"x": (1.0,)}}
    assert m.apply({}, 3.0, mutable="sown")[1] == {"sown": {"x": (6.0,)}}


@branching
def test_sow_sum_in_one_branch(choose):
    def adds(self, x):
        self.sow("sown", "sum", x, lambda a, b: a + b, lambda: 0.0)
        return x

    m = model(lambda self, x: choose(x < 3, adds, lambda self, x: x, self, x))
    assert m.apply({}, 1.0, mutable="sown")[1] == {"sown": {"sum": 1.0}}
    assert m.apply({}, 3.0, mutable="sown")[1] == {"sown": {"sum": 0.0}}


# State that is made and changed in nested loops, see tests/core/lift/test_nested_state.py.

RUNS = []


class Noted(nn.Module):
    """Counts how often it ran, in its state and in Python."""

    @nn.compact
    def __call__(self, x, _=None):
        RUNS.append(1)
        count = self.variable("counts", "n", lambda: jnp.float32(10))
        count.value += 1
        return x, None


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_each_scan_carrying_new_state_adds_one_trace(depth):
    program = Noted
    for _ in range(depth):
        program = nn.scan(program, variable_carry="counts", length=2)
    RUNS.clear()
    made = program().init(KEY, 0.0, None)
    assert len(RUNS) <= depth + 1
    RUNS.clear()
    _, applied = program().apply({}, 0.0, None, mutable=["counts"])
    assert len(RUNS) <= depth + 1
    assert made == applied == {"counts": {"n": 10 + 2**depth}}
    RUNS.clear()
    program().apply(made, 0.0, None, mutable=["counts"])
    assert len(RUNS) == 1


def test_decode_loop_starts_with_initial_state_of_layers():
    layers = nn.scan(Noted, variable_axes={"counts": 0}, length=3)
    for length in (0, 1, 4):
        times = nn.scan(layers, variable_carry="counts", length=length)
        _, state = times().apply({}, 0.0, None, mutable=["counts"])
        assert state["counts"]["n"].tolist() == [10 + length] * 3


def test_untaken_branch_keeps_initial_state_of_layers():
    class Chosen(nn.Module):
        @nn.compact
        def __call__(self, taken):
            layers = nn.scan(Noted, variable_axes={"counts": 0}, length=3)(name="layers")
            run = lambda m, layers: layers(0.0, None)[0]  # noqa: E731
            return nn.cond(taken, run, lambda m, layers: 0.0, self, layers)

    for taken in (False, True):
        _, state = Chosen().apply({}, taken, mutable=["counts"])
        assert state["counts"]["layers"]["n"].tolist() == [10 + taken] * 3
