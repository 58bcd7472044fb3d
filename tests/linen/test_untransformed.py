"""Transformations of JAX itself around modules, which hand no scope through."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.raw_transformations import RAW
from weft import linen as nn
from weft.errors import JaxTransformError

KEY = jax.random.key(0)
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


# These call a function once; where it makes a layer or a variable, that has one name.
ONCE = ("vmap", "jit", "jvp", "checkpoint", "scan", "switch", "shard_map", "vmap in jit")


@pytest.mark.parametrize(
    ("raw", "made", "outer"),
    [(raw, "setup", "eager") for raw in RAW]
    + [(raw, made, "eager") for raw in ONCE for made in ("compact", "variable")]
    + [(raw, "compact", "jit") for raw in ONCE],
)
def test_variables_are_made_as_if_they_had_been_there(raw, made, outer):
    cls, call = MAKERS[made]
    plain = cls(call)
    wrapped = cls(around(raw, call))
    init = wrapped.init if outer == "eager" else jax.jit(wrapped.init)
    with jax.checking_leaks():
        variables = init(KEY, X)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), variables, plain.init(KEY, X))
    # A second call has other variables, and no trace of the first one.
    other = jax.tree.map(lambda v: v + 1, variables)
    for given in (variables, other):
        y = wrapped.apply(given, X)
        np.testing.assert_allclose(y, plain.apply(given, X), rtol=1e-6)
    y, again = wrapped.init_with_output(KEY, X)
    np.testing.assert_allclose(y, plain.apply(again, X), rtol=1e-6)


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
def test_what_would_leak_or_repeat_is_refused_with_the_mend(raw, what):
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


def test_a_tracer_of_an_inner_trace_never_gets_out_of_an_outer_one():
    bad = Compact(around("vmap", REFUSED["first value"][0]))
    with pytest.raises((JaxTransformError, jax.errors.UnexpectedTracerError)):
        jax.jit(bad.init)(KEY, X)


@pytest.mark.parametrize("raw", ["jit", "checkpoint", "cond"])
def test_a_bound_module_is_not_a_function_that_jax_may_know_again(raw):
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


def test_a_bound_module_can_be_mapped_and_differentiated_itself():
    def call(module, x):
        layer = nn.Dense(2)
        return jax.vmap(layer)(x) + jax.jvp(layer, (x,), (x,))[0] + jax.vjp(layer, x)[0]

    y, variables = Compact(call).init_with_output(KEY, X)
    plain = Compact(lambda module, x: 3 * nn.Dense(2)(x))
    jax.tree.map(np.testing.assert_array_equal, variables, plain.init(KEY, X))
    np.testing.assert_allclose(y, plain.apply(variables, X), rtol=1e-6)


def test_a_perturbation_has_the_shape_that_is_seen():
    module = Compact(lambda module, x: jax.vmap(lambda x: module.perturb("h", x) ** 2)(x))
    variables = module.init(KEY, X)
    np.testing.assert_array_equal(variables["perturbations"]["h"], np.zeros(2))
    grads = jax.grad(lambda v: module.apply(v, X).sum())(variables)
    np.testing.assert_allclose(grads["perturbations"]["h"], 2 * X.sum(0), rtol=1e-6)
