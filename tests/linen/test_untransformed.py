"""Transformations of JAX itself around modules, which hand no scope through."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from tests.raw_transformations import RAW
from weft import linen as nn
from weft.errors import JaxTransformError

KEY = quick_key(0)
X = jnp.arange(1.0, 5.0).reshape(2, 2) / 10
BIASES = {"kernel_init": nn.initializers.normal(), "bias_init": nn.initializers.normal()}


class Of(nn.Module):
    """Calls a function with itself, a layer that it has in `setup`, and an input."""

    body: object

    def setup(self):
        self.dense = nn.Dense(2, **BIASES)

    def __call__(self, x):
        return self.body(self, x)


class Compact(nn.Module):
    body: object

    @nn.compact
    def __call__(self, x):
        return self.body(self, x)


def around(raw, call):
    return lambda module, x: RAW[raw][0](lambda x: call(module, x), x)


MAKERS = {
    "setup": (Of, lambda module, x: module.dense(x)),
    "compact": (Compact, lambda module, x: nn.Dense(2, **BIASES, name="dense")(x)),
    "variable": (
        Compact,
        lambda module, x: (
            x
            * jnp.broadcast_to(
                module.variable(
                    "state", "v", lambda: jax.random.normal(module.make_rng(), (2,))
                ).value,
                x.shape,
            )
        ),
    ),
}


@cache
def plain_model(cls, call):
    """Returns a module without a transformation of JAX, and its variables."""
    return cls(call), cls(call).init(KEY, X)


# These call a function once; where it makes a layer or a variable, that has one name.
ONCE = ("vmap", "jit", "jvp", "checkpoint", "scan", "switch", "shard_map", "vmap in jit")


@pytest.mark.parametrize(
    ("raw", "made", "outer"),
    [(raw, "setup", "eager") for raw in RAW]
    + [(raw, made, "eager") for raw in ONCE for made in ("compact", "variable")]
    + [(raw, "compact", "jit") for raw in ONCE],
)
def test_variables_are_created_in_raw_transforms(raw, made, outer):
    cls, call = MAKERS[made]
    plain, created = plain_model(cls, call)
    wrapped = cls(around(raw, call))
    init = wrapped.init if outer == "eager" else jax.jit(wrapped.init)
    with jax.checking_leaks():
        variables = init(KEY, X)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), variables, created)
    # A second call has other variables, and no trace of the first one.
    other = jax.tree.map(lambda v: v + 1, variables)
    for given in (variables, other):
        y = wrapped.apply(given, X)
        np.testing.assert_allclose(y, plain.apply(given, X), rtol=1e-6)
    y, again = wrapped.init_with_output(KEY, X)
    np.testing.assert_allclose(y, plain.apply(again, X), rtol=1e-6)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sin(nn.Dense(2, **BIASES)(x))


class Debugged(nn.Module):
    @nn.compact
    def __call__(self, x):
        jax.debug.callback(lambda x: None, x)
        return Layer()(x)


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Layer()(x), None


def choose(module, x):
    branch = lambda module, x: nn.Dense(2, name="a", **BIASES)(x)  # noqa: E731
    other = lambda module, x: nn.Dense(2, name="b", **BIASES)(x)  # noqa: E731
    return nn.switch(1, [branch, other], module, x)


def looped(module, x):
    def body(module, carry):
        i, x = carry
        return i + 1, nn.Dense(2, name="dense", **BIASES)(x)

    begin = jnp.int32(0), x
    on = lambda module, carry: carry[0] < 2  # noqa: E731
    return nn.while_loop(on, body, module, begin, split_rngs=SAME)[1]


def doubled(variables):
    return jax.tree.map(lambda v: 2 * v, variables)


def halved(variables):
    return jax.tree.map(lambda v: v / 2, variables)


SAME = {"params": False}
AXES = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
LIFTED = {
    "scan": lambda module, x: nn.scan(Step, length=3, **AXES)(name="l")(x, None)[0],
    "shared scan": lambda module, x: nn.scan(
        Step, variable_broadcast="params", split_rngs=SAME, length=2
    )(name="l")(x, None)[0],
    "vmap": lambda module, x: nn.vmap(Layer, in_axes=None, axis_size=3, **AXES)(name="l")(x).sum(0),
    "remat": lambda module, x: nn.remat(Layer)(name="l")(x),
    "remat of a callback": lambda module, x: nn.remat(Debugged)(name="l")(x),
    "jit": lambda module, x: nn.jit(Layer)(name="l")(x),
    "switch": choose,
    "while_loop": looped,
    "map_variables": lambda module, x: nn.map_variables(
        Layer, "params", doubled, halved, init=True
    )(name="l")(x),
    "scan of remat": lambda module, x: nn.scan(nn.remat(Step), length=3, **AXES)(name="l")(x, None)[
        0
    ],
}


@pytest.mark.parametrize(
    ("raw", "lifted", "outer"),
    [(raw, "scan", "eager") for raw in ONCE if raw != "vmap"]
    + [("vmap", lifted, "eager") for lifted in LIFTED]
    + [("jit", lifted, "eager") for lifted in ("jit", "switch", "while_loop", "map_variables")]
    + [("vmap in jit", lifted, "jit") for lifted in ("scan", "jit", "switch")]
    + [("scan", "remat", "jit"), ("while_loop", "shared scan", "eager")],
)
def test_lifted_functions_create_variables_once(raw, lifted, outer):
    plain, created = plain_model(Compact, LIFTED[lifted])
    wrapped = Compact(around(raw, LIFTED[lifted]))
    init = wrapped.init if outer == "eager" else jax.jit(wrapped.init)
    with jax.checking_leaks():
        variables = init(KEY, X)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), variables, created)
    other = jax.tree.map(lambda v: v + 1, variables)
    expected = Compact(around(raw, lambda module, x: plain.apply(other, x))).apply({}, X)
    np.testing.assert_allclose(wrapped.apply(other, X), expected, rtol=1e-6)
    y, again = wrapped.init_with_output(KEY, X)
    np.testing.assert_allclose(y, wrapped.apply(again, X), rtol=1e-6)


@pytest.mark.parametrize("axes", [AXES, {"variable_broadcast": "params", "split_rngs": SAME}])
def test_lifted_functions_create_variables_in_the_body_of_a_loop(axes):
    """A loop traces a body again that creates what it carries, and an axis has new variables."""

    def model(raw):
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                layer = nn.remat(Layer)(name="l")
                calls = self.variable("state", "calls", lambda: jnp.zeros(()))
                calls.value += 1
                return RAW[raw][0](layer, x) if raw == "vmap" else layer(x), None

        options = {"variable_carry": "state", **axes}
        return nn.scan(Body, length=3, **options)()

    with jax.checking_leaks():
        variables = model("vmap").init(KEY, X, None)
    expected = model("").init(KEY, X, None)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), variables, expected)


FIRST = "the first value of 'v' of the collection 'state'"
REFUSED = {
    "key": (
        lambda module, x: x + jax.random.uniform(module.make_rng()),
        "a key of the PRNG stream 'params' is drawn in '/inner'",
        "draw the same",
    ),
    "write": (
        lambda module, x: x + (module.put_variable("state", "v", x) or 0),
        "'v' of the collection 'state' is written to in '/inner'",
        "a tracer would leak",
    ),
    "first value": (
        lambda module, x: x + module.variable("state", "v", lambda: 2 * x).value,
        FIRST + " depends on what is transformed in '/inner'",
        "a tracer would leak",
    ),
    "first value as it is": (
        lambda module, x: x + module.variable("state", "v", lambda: x).value,
        FIRST + " depends on what is transformed in '/inner'",
        "a tracer would leak",
    ),
}


@pytest.mark.parametrize(
    ("raw", "what"),
    [(raw, what) for raw in RAW for what in ("key", "write")]
    + [(raw, w) for raw in ONCE for w in ("first value", "first value as it is")],
)
def test_leaks_and_repeats_are_rejected_with_a_fix(raw, what):
    call, text, why = REFUSED[what]
    _, of_jax, *names = RAW[raw]
    inner = Compact(around(raw, call), name="inner", parent=None)
    with pytest.raises(JaxTransformError) as caught:
        Compact(lambda module, x: inner.clone(parent=module)(x)).init(KEY, X)
    message = str(caught.value)
    assert message.startswith(f"{text} inside of {of_jax}, which the scope does not cross")
    assert why in message
    if raw in ("eval_shape", "checkify"):
        assert f"`lift.{raw}`" in message and "nn." not in message
    else:
        assert " or ".join(f"`nn.{name}`" for name in names) + " of weft.linen" in message
        assert all(hasattr(nn, name) for name in names)


@pytest.mark.parametrize("what", ["key", "first value"])
@pytest.mark.parametrize(("raw", "lift"), [("vmap", nn.remat), ("jit", nn.jit), ("scan", nn.remat)])
def test_lifted_function_error_names_path_and_fix(raw, lift, what):
    call, text, why = REFUSED[what]
    _, of_jax, *names = RAW[raw]
    inner = Compact(around(raw, lambda module, x: lift(call)(module, x)), name="inner", parent=None)
    with pytest.raises(JaxTransformError) as caught:
        Compact(lambda module, x: inner.clone(parent=module)(x)).init(KEY, X)
    message = str(caught.value)
    assert message.startswith(f"{text} inside of {of_jax}, which the scope does not cross")
    assert why in message
    assert " or ".join(f"`nn.{name}`" for name in names) + " of weft.linen" in message


def test_mutating_lifted_function_is_rejected():
    def count(module, x):
        calls = module.variable("state", "calls", lambda: jnp.zeros(()))
        if module.is_mutable_collection("state") and not module.is_initializing():
            calls.value += 1
        return x

    model = Compact(lambda module, x: jax.vmap(lambda x: nn.remat(count)(module, x))(x))
    variables = model.init(KEY, X)
    assert variables == {"state": {"calls": 0}}
    np.testing.assert_array_equal(model.apply(variables, X), X)
    message = r"'calls' of the collection 'state' is written to in '/' inside of jax.vmap"
    with pytest.raises(JaxTransformError, match=message):
        model.apply(variables, X, mutable=["state"])


def test_map_that_writes_variables_is_rejected():
    mapped = nn.map_variables(Layer, "params", doubled, halved, init=True, mutable=True)
    message = r"'bias' of the collection 'params' is written to in '/l/Dense_0' inside of jax.vmap"
    with pytest.raises(JaxTransformError, match=message):
        Compact(lambda module, x: jax.vmap(mapped(name="l"))(x)).init(KEY, X)


def test_inner_tracers_never_leak():
    bad = Compact(around("vmap", REFUSED["first value"][0]))
    with pytest.raises((JaxTransformError, jax.errors.UnexpectedTracerError)):
        jax.jit(bad.init)(KEY, X)


@pytest.mark.parametrize("raw", ["jit", "checkpoint", "cond"])
def test_bound_module_is_not_cached_by_jax(raw):
    """JAX would run the trace of an equal module, with the variables of that one."""
    kept = []

    def call(module, x):
        layer = nn.Dense(2)
        kept.append(layer)
        return {
            "jit": lambda: jax.jit(layer)(x),
            "checkpoint": lambda: jax.checkpoint(layer)(x),
            "cond": lambda: jax.lax.cond(jnp.array(True), layer, layer, x),
        }[raw]()

    message = r"Dense Dense_0 is bound to variables, so it has no hash, .*Use `nn.jit`.*lambda x"
    with pytest.raises(TypeError, match=message):
        Compact(call).init(KEY, X)
