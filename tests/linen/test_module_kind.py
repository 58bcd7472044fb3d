import dataclasses
import functools
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from weft import linen as nn
from weft.errors import (
    TransformArgumentError,
    TransformedMethodReturnValueError,
    UnboundModuleError,
)

KEY = quick_key(0)
X = jnp.arange(6.0).reshape(2, 3)


def model(body, **fields):
    """Returns a module of a compact body `body(self, *args)`."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, *args):
            return body(self, *args)

    return Model()


class Linear(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", jax.nn.initializers.normal(1.0), (x.shape[-1], self.features))


def around(fn):
    """Returns a model of a module, what `fn` makes of it, and another module."""

    def body(self, x, *args):
        x = fn(self, Linear()(x), *args)
        return Linear()(x)

    return model(body)


def chained(variables, x, n):
    """Returns the result of `n` chained `Linear` modules."""
    for i in range(n):
        x = x @ variables["params"][f"Linear_{i}"]["w"]
    return x


# Names continue after the function, even if JAX replays a cached trace.

KNOWN = [1]  # a list makes a function that sees it equal to itself alone


@nn.jit
def of_incomparable(self, x):
    assert KNOWN
    return Linear()(x)


def fresh(self, x):
    return nn.jit(lambda self, x: Linear()(x))(self, x)


def fresh_remat(self, x):
    return nn.remat(lambda self, x: Linear()(x))(self, x)


def scanned(self, x):
    body = lambda self, x, _: (Linear()(x), None)  # noqa: E731
    return nn.scan(body, variable_broadcast="params", split_rngs={"params": False}, length=1)(
        self, x, None
    )[0]


def remat_scanned(self, x):
    options = {"variable_broadcast": "params", "variable_axes": {}, "split_rngs": {True: False}}
    return nn.remat_scan(lambda self, x: Linear()(x), (1,), **options)(self, x)


def looped(self, x):
    on, body = (lambda self, c: c[0] < 1), (lambda self, c: (c[0] + 1, Linear()(c[1])))
    return nn.while_loop(on, body, self, (0, x), split_rngs={"params": False})[1]


def counted(self, x):
    body = lambda i, self, x: Linear()(x)  # noqa: E731
    return nn.fori_loop(0, 1, body, self, x, split_rngs={"params": False})


def branched(self, x):
    return nn.cond(True, lambda self, x: Linear()(x), lambda self, x: 0 * x, self, x)


def switched(self, x):
    branches = [lambda self, x: 0 * x, lambda self, x: Linear()(x)]
    return nn.switch(1, branches, self, x)


def mapped(self, x):
    return nn.vmap(lambda self, x: Linear()(x), {"params": None}, {"params": False})(self, x)


def differentiated(self, x):
    return nn.vjp(lambda self, x: Linear()(x), self, x)[0]


@pytest.mark.parametrize(
    "lifted",
    [
        of_incomparable,
        fresh,
        fresh_remat,
        scanned,
        remat_scanned,
        looped,
        counted,
        branched,
        switched,
        mapped,
        differentiated,
    ],
    ids=lambda fn: fn.__name__,
)
def test_names_continue_after_a_transform_in_eager_calls(lifted):
    m = around(lifted)
    variables = m.init(KEY, X)
    assert sorted(variables["params"]) == ["Linear_0", "Linear_1", "Linear_2"]
    for _ in range(3):
        np.testing.assert_allclose(m.apply(variables, X), chained(variables, X, 3), rtol=1e-4)


def test_name_taken_outside_is_rejected_inside():
    m = model(
        lambda self, x: nn.remat(lambda self, x: Linear(name="a")(x))(self, Linear(name="a")(x))
    )
    w = m.init(KEY, X)["params"]
    assert list(w) == ["a"]


# Captured modules.


def in_a_closure(self, x, dense):
    return nn.vmap(lambda self, x: dense(x), {"params": None}, {"params": False})(self, x)


def in_a_helper(self, x, dense):
    helper = lambda x: dense(x)  # noqa: E731
    return nn.vmap(lambda self, x: helper(x), {"params": None}, {"params": False})(self, x)


def in_containers(self, x, dense):
    held = {"a": [(dense,)]}
    run = lambda self, x: held["a"][0][0](x)  # noqa: E731
    return nn.vmap(run, {"params": None}, {"params": False})(self, x)


def in_a_partial(self, x, dense):
    run = functools.partial(lambda dense, self, x: dense(x), dense)
    return nn.vmap(run, {"params": None}, {"params": False})(self, x)


def in_a_default(self, x, dense):
    run = lambda self, x, dense=dense: dense(x)  # noqa: E731
    return nn.vmap(run, {"params": None}, {"params": False})(self, x)


def in_a_bound_method(self, x, dense):
    call = dense.__call__
    return nn.vmap(lambda self, x: call(x), {"params": None}, {"params": False})(self, x)


def in_an_inner_transformation(self, x, dense):
    inner = nn.remat(lambda self, x: dense(x))
    return nn.vmap(lambda self, x: inner(self, x), {"params": None}, {"params": False})(self, x)


def in_a_recursive_function(self, x, dense):
    def run(n, x):
        return x if n == 0 else run(n - 1, dense(x))

    f = lambda self, x: run(1, x)  # noqa: E731
    return nn.vmap(f, {"params": None}, {"params": False})(self, x)


@pytest.mark.parametrize(
    "captures",
    [
        in_a_closure,
        in_a_helper,
        in_containers,
        in_a_partial,
        in_a_default,
        in_a_bound_method,
        in_an_inner_transformation,
        in_a_recursive_function,
    ],
    ids=lambda fn: fn.__name__,
)
def test_captured_modules(captures):
    def body(self, x):
        dense = Linear(4)
        return captures(self, x, dense), dense(x)

    (inside, outside), variables = model(body).init_with_output(KEY, X)
    np.testing.assert_allclose(inside, outside, rtol=1e-5)
    assert list(variables["params"]) == ["Linear_0"]


def test_module_of_another_tree_is_captured():
    bound = Linear().bind({"params": {"w": 2 * jnp.eye(3)}})
    m = model(lambda self, x: nn.jit(lambda self, x: bound(x))(self, x))
    np.testing.assert_allclose(m.apply({}, X), 2 * X)


# Comparison of modules.


class Field(nn.Module):
    """A module whose result shows the value and the type of a field."""

    field: Any

    @nn.jit
    def __call__(self, x):
        value = self.field(x) if callable(self.field) else self.field
        if isinstance(value, str | dict | tuple | nn.FrozenDict):
            return jnp.asarray([ord(c) for c in f"{type(value).__name__}{value}"])
        return jnp.asarray(value)


class Calls:
    def __init__(self, value):
        self.value = value

    def __call__(self, x):
        return self.value


@dataclasses.dataclass(frozen=True)
class Config:
    value: Any

    def __call__(self, x):
        return self.value


def returning(value):
    return lambda x: value


def returning_default(value):
    def f(x, value=value):
        return value

    return f


def through(value):
    f = returning(value)
    return lambda x: f(x)


VALUES = [1, 1.0, True, 0, 0.0, -0.0, False, 2, 1j]


def fields():
    yield from VALUES
    yield from (float("nan"), np.float32(1), np.float64(1), np.int32(1), np.bool_(True))
    yield from ("1", b"1".decode() + " ", (1,), (1.0,), (True,), ((1,), 1), {"a": 1}, {"a": 1.0})
    yield from ({"b": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, (("a", 1),), {"a": {"a": 1}})
    yield from (np.array([1]), np.array([1.0]), jnp.array([1]), jnp.array([2]))
    for make in (returning, returning_default, through, Calls, Config):
        yield from (make(value) for value in VALUES)
    yield from (functools.partial(lambda value, x: value, value) for value in VALUES)
    yield from (Calls(value).__call__ for value in VALUES)
    yield from (lambda x: 1, lambda x: 2, lambda x: 1.0, jnp.sin, jnp.cos, np.sum, abs)


def shown(y):
    return y.dtype, y.shape, np.asarray(y).tobytes()


@pytest.mark.parametrize("under", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_cache_distinguishes_fields(under):
    every = 1 if under is not jax.jit else 5
    for field in [*fields(), *fields()][::every]:
        y = under(functools.partial(Field(field).apply, {}))(1.0)
        with jax.disable_jit():
            expected = Field(field).apply({}, 1.0)
        assert shown(y) == shown(expected), field


def test_cache_distinguishes_submodules():
    class Outer(nn.Module):
        inner: Any

        @nn.jit
        def __call__(self, x):
            inner = self.inner[0] if isinstance(self.inner, tuple) else self.inner
            return inner(x)

    class Other(nn.Module):
        field: Any

        def __call__(self, x):
            return jnp.asarray(self.field) + 100

    for wrap in (lambda m: m, lambda m: (m,), lambda m: [m, m]):
        for value in (1, 1.0, True, 2):
            assert shown(Outer(wrap(Field(value))).apply({}, 0.0)) == shown(jnp.asarray(value))
            expected = jnp.asarray(value) + 100
            assert shown(Outer(wrap(Other(value))).apply({}, 0.0)) == shown(expected)


# How often a model is compiled.


def counting(traces):
    class Model(nn.Module):
        features: int = 3
        act: Any = None
        table: Any = ()

        @nn.compact
        def __call__(self, x):
            traces.append(self.features)
            return (self.act or nn.tanh)(Linear(self.features)(x))

    return Model


def test_equal_models_are_compiled_once():
    traces = []
    cls = counting(traces)
    variables = cls().init(KEY, X)
    for _ in range(20):
        table = {"sizes": [1, 2, {"a": (3, "x")}]}
        nn.jit(cls)(3, table=table, act=jax.nn.relu).apply(variables, X)
    assert len(traces) == 2  # init, and once for all
    nn.jit(cls)(3, table={"sizes": [1, 2, {"a": (3, "y")}]}).apply(variables, X)
    assert len(traces) == 3


def test_cache_distinguishes_closures():
    traces = []
    cls = nn.jit(counting(traces))
    variables = cls().init(KEY, X)
    plain = X @ variables["params"]["Linear_0"]["w"]
    for i in range(20):
        y = cls(3, act=lambda x: x * i).apply(variables, X)  # noqa: B023
        np.testing.assert_allclose(y, plain * i, rtol=1e-5)
        gc.collect(1)  # the whole heap takes seconds in a long test run
    for i in range(20):
        scale = jnp.full((), float(i))
        y = cls(3, act=lambda x: x * scale).apply(variables, X)  # noqa: B023
        np.testing.assert_allclose(y, plain * i, rtol=1e-5)


def test_cache_ignores_the_module_path():
    traces = []
    cls = nn.jit(counting(traces))

    def layers(self, x):
        layers = [cls(name=name) for name in "abc"]
        assert [layer.name for layer in layers] == ["a", "b", "c"]  # read outside of `nn.jit`
        return [layer(x) for layer in layers]

    m = model(layers)
    variables = m.init(KEY, X)
    assert len(traces) == 1
    a, b, c = m.apply(variables, X)
    assert len(traces) == 2
    for y, name in zip((a, b, c), "abc", strict=True):
        w = variables["params"][name]["Linear_0"]["w"]
        np.testing.assert_allclose(y, jnp.tanh(X @ w), rtol=1e-5)


@pytest.mark.parametrize("what", ["name", "path"])
def test_module_reading_its_path_is_compiled_per_path(what):
    class Labelled(nn.Module):
        @nn.compact
        def __call__(self, x):
            label = self.name if what == "name" else "/".join(self.path)
            self.sow("labels", f"{label}", x)
            return x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(3):
                x = nn.jit(Labelled)(name=f"layer{i}")(x)
            return x

    for _ in range(2):
        _, sown = Model().apply({}, 1.0, mutable=["labels"])
        assert {name: list(below) for name, below in sown["labels"].items()} == {
            f"layer{i}": [f"layer{i}"] for i in range(3)
        }


def test_interceptor_sees_a_compiled_module():
    m = nn.jit(Linear)()
    variables = m.init(KEY, X)
    plain = m.apply(variables, X)

    def times(factor):
        def interceptor(next_fun, args, kwargs, context):
            return factor * next_fun(*args, **kwargs)

        return interceptor

    for factor in (2, 3):
        with nn.intercept_methods(times(factor)):
            y = m.apply(variables, X)
        # One for the method that is lifted, and one for it inside.
        assert round(float(y[0, 0] / plain[0, 0])) in (factor, factor**2)
    np.testing.assert_array_equal(m.apply(variables, X), plain)


def test_cache_distinguishes_capturing():
    m = model(lambda self, x: nn.jit(Linear)()(x))
    variables = m.init(KEY, X)
    m.apply(variables, X)
    _, captured = m.apply(variables, X, capture_intermediates=True)
    assert list(captured["intermediates"]) == ["JitLinear_0", "__call__"]
    _, captured = m.apply(variables, X, capture_intermediates=lambda m, _: isinstance(m, Linear))
    assert list(captured["intermediates"]) == ["JitLinear_0"]


# Arguments and results.


def test_non_array_keyword_arguments_are_static():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, *, act=None, flag=False, name=None, scale=None):
            assert flag is True and name == "n"
            x = x if scale is None else x * scale
            return act(x) if act is not None else x

    variables = {}
    for lifted in (nn.jit, nn.remat, functools.partial(nn.vmap, variable_axes={})):
        m = lifted(Model)()
        y = m.apply(variables, X, act=jnp.sin, flag=True, name="n", scale=jnp.ones(2)[:, None])
        np.testing.assert_allclose(y, jnp.sin(X), rtol=1e-5)
        y = m.apply(variables, X, act=jnp.cos, flag=True, name="n")
        np.testing.assert_allclose(y, jnp.cos(X), rtol=1e-5)


# Errors and cleanup.


def test_module_without_variables_is_rejected():
    with pytest.raises(UnboundModuleError, match="but Linear is not bound to variables"):
        nn.jit(lambda m, x: m(x))(Linear(), X)


@pytest.mark.parametrize(
    "returned",
    [lambda m: Linear(), lambda m: (1.0, {"a": m.scope}), lambda m: m.variable("a", "b", int)],
)
def test_returned_module_is_rejected(returned):
    def gives(self, x):
        return returned(self)

    with pytest.raises(TransformedMethodReturnValueError, match="Model: gives returns a module, a"):
        model(lambda self, x: nn.remat(gives)(self, x)).init(KEY, X)


@pytest.mark.parametrize("target", [(), {}, jnp.ones(2), None, 3.0])
def test_non_module_is_rejected(target):
    def run(m, x):
        return x

    with pytest.raises(TransformArgumentError, match=r"expected a module or a tree of modules"):
        nn.jit(run)(target, X)
    with pytest.raises(TransformArgumentError, match=r"as run\(self, \.\.\.\)"):
        nn.cond(True, run, run, target, X)


def test_module_paired_with_array_is_rejected():
    f = nn.jit(lambda pair, x: x)
    with pytest.raises(TransformArgumentError, match=r"is 2\.0 of type float"):
        model(lambda self, x: f((self, 2.0), x)).init(KEY, X)


def failing(self, x, dense):
    dense(x)
    self.sow("sown", "x", 1.0)
    Linear()(x)
    self.variable("state", "n").value += 10
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    "lifted",
    [
        lambda f: nn.remat(f),
        lambda f: nn.jit(f),
        lambda f: nn.vmap(f, {True: None}, {"params": False}),
        lambda f: (
            lambda self, x: nn.scan(f, variable_carry=True, split_rngs={"params": True}, length=2)(
                self, x
            )
        ),
        lambda f: lambda self, x: nn.cond(True, f, f, self, x),
        lambda f: (
            lambda self, x: nn.while_loop(
                lambda m, c: True, f, self, x, True, False, {"params": True}
            )
        ),
        lambda f: lambda self, x: nn.vjp(f, self, x),
        lambda f: lambda self, x: nn.custom_vjp(f, f, f)(self, x),
        lambda f: nn.map_variables(f, "state", mutable=True),
        lambda f: nn.fold_rngs(f),
    ],
)
def test_failure_leaves_state_unchanged(lifted):
    def body(self, x):
        state = self.variable("state", "n", lambda: 1.0)
        dense = Linear()
        before = dict(vars(dense)), dense(x), nn.module.RUNNING.module_stack.copy()
        with pytest.raises(ValueError, match="on purpose"):
            lifted(lambda self, x: failing(self, x, dense))(self, x)
        assert vars(dense) == before[0]
        assert nn.module.RUNNING.module_stack == before[2]
        np.testing.assert_array_equal(dense(x), before[1])
        return Linear()(x), state.value

    (_, state), variables = model(body).init_with_output(KEY, X)
    assert state == 1.0
    assert sorted(variables) == ["params", "state"]
    assert sorted(variables["params"]) == ["Linear_0", "Linear_1"]
