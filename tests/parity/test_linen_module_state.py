"""Variables, PRNG streams and calls of Linen modules: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import pytest

from tests.parity.linen import KEY, same
from tests.parity.test_linen_module import RNGS, X, affine, counter, initialized, normal

PROGRAMS = []


def program(fn):
    PROGRAMS.append(fn)
    return fn


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.__name__)
def test_programs_agree(case):
    same(case)


def method(nn, fn, compact=True):
    """Returns a module with one method."""
    return type("Model", (nn.Module,), {"__call__": nn.compact(fn) if compact else fn})()


@program
def mutated_state(nn):
    y, variables = initialized(counter(nn)())
    (z, changed) = counter(nn)().apply(variables, X, rngs={"noise": KEY}, mutable=["state"])
    return (y, z), (variables, changed)


@program
def mutable_as_each_filter(nn):
    results = []
    for mutable in ("state", ["state"], True, ("state",)):
        variables = counter(nn)().init(RNGS, X)
        results.append(counter(nn)().apply(variables, X, rngs=RNGS, mutable=mutable))
    return results, affine(nn)().init(RNGS, X, mutable=["params"])


@program
def variables_by_name(nn):
    def call(self, x):
        before = self.has_variable("state", "v"), self.get_variable("state", "v", "none")
        self.put_variable("state", "v", x)
        after = self.has_variable("state", "v"), self.get_variable("state", "v")
        return before, after, self.has_variable("params", "v"), self.is_mutable_collection("state")

    model = method(nn, call, compact=False)
    y, variables = initialized(model)
    return (y, model.apply(variables, X, mutable=["state"])[0]), variables


@program
def variables_of_submodules_by_name(nn):
    def call(self, x):
        y = affine(nn)(name="a")(x)
        inside = self.get_variable("params", "a")
        return y, inside, self.variables["params"]["a"]["kernel"], sorted(self.variables)

    return initialized(method(nn, call))


@program
def variable_init_with_key(nn):
    def call(self, x):
        v = self.variable("state", "v", lambda shape: normal(self.make_rng("noise"), shape), (2,))
        w = self.variable("state", "w", lambda *, fill: jnp.full(2, fill), fill=3.0)
        return v.value + w.value, v.is_mutable()

    return initialized(method(nn, call))


@program
def parameter_that_is_a_tree(nn):
    def make(key, shape, *, scale):
        a, b = jax.random.split(key)
        return {"a": normal(a, shape), "b": [scale * normal(b, shape)]}

    def call(self, x):
        tree = self.param("tree", make, (2,), scale=3.0)
        return tree["a"] + tree["b"][0]

    return initialized(method(nn, call))


@program
def parameters_in_boxes(nn):
    def call(self, x):
        init = nn.with_partitioning(normal, ("rows", "columns"))
        plain = self.param("a", init, (2, 3))
        boxed = self.param("b", init, (2, 3), unbox=False)
        v = self.variable("state", "v", lambda: nn.with_partitioning(jnp.ones, ("rows",))((2,)))
        v.value = v.value * 2
        return plain, boxed, v.value

    return initialized(method(nn, call))


@program
def none_parameter(nn):
    return initialized(method(nn, lambda self, x: self.param("none", lambda key: None) is None))


# PRNG streams.


@program
def keys_by_place_and_order(nn):
    class Inner(nn.Module):
        def __call__(self):
            return [self.make_rng("noise"), self.make_rng(), self.make_rng("noise")]

    def call(self, x):
        a, b = Inner(name="a"), Inner()
        first = self.make_rng("noise")
        return first, a(), b(), a(), self.make_rng("noise"), self.make_rng("params")

    raw = {"params": jax.random.PRNGKey(0), "noise": jax.random.PRNGKey(5)}
    typed = {name: jax.random.wrap_key_data(key) for name, key in raw.items()}
    model = method(nn, call)
    made = [model.init_with_output(rngs, X) for rngs in (raw, typed)]
    return made, model.init(raw, X)


@program
def one_key_for_every_stream(nn):
    def call(self, x):
        asked = self.has_rng("params"), self.has_rng("dropout")
        return self.make_rng("dropout"), self.make_rng("params"), self.make_rng("other"), asked

    one = method(nn, call).init_with_output(KEY, X)
    return (one, method(nn, call).apply({}, X, rngs=KEY)), {}


@program
def keys_after_parameters(nn):
    def call(self, x):
        a = self.param("a", normal, (2,))
        key = self.make_rng("params")
        return a, key, self.param("b", normal, (2,)), affine(nn)()(x), self.make_rng("noise")

    model = method(nn, call)
    y, variables = initialized(model)
    return (y, model.apply(variables, X, rngs=RNGS)), variables


# Remaining state.


@program
def sown_values(nn):
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "h", x)
            self.sow("intermediates", "h", 2 * x)
            self.sow("losses", "l", x.sum(), reduce_fn=lambda a, b: a + b, init_fn=lambda: 0.0)
            return affine(nn)()(x)

    def call(self, x):
        inner = Inner()
        y = inner(inner(x))
        return y, self.sow("intermediates", "last", y), self.sow("nowhere", "last", y)

    model = method(nn, call)
    y, variables = initialized(model)
    z, left = model.apply(variables, X, mutable=["intermediates", "losses"])
    again = model.apply({**variables, **left}, X, mutable=["intermediates", "losses"])
    return (y, z, left, again, model.apply(variables, X)), variables


@program
def perturbations_and_their_gradients(nn):
    def call(self, x):
        h = self.perturb("h", affine(nn)()(x))
        return (self.perturb("tree", {"a": h})["a"] ** 2).sum()

    model = method(nn, call)
    y, variables = initialized(model)
    gradients = jax.grad(lambda v: model.apply(v, X))(variables)
    without = model.apply({"params": variables["params"]}, X)
    other = method(nn, lambda self, x: self.perturb("h", x, collection="p"), compact=False)
    return (y, gradients, without), (variables, other.init(RNGS, X))


@program
def intermediates(nn):
    class Model(nn.Module):
        def setup(self):
            self.layer = affine(nn)()

        def encode(self, x):
            return self.layer(x)

        def __call__(self, x):
            return {"y": self.encode(self.layer(x))}

    model = Model()
    _, variables = initialized(model)
    asked = {"encode": lambda m, name: name == "encode"}
    asked |= {"layers": lambda m, name: isinstance(m, affine(nn)), "all": True}
    results = {
        name: model.apply(variables, X, capture_intermediates=ask, mutable=["intermediates"])
        for name, ask in asked.items()
    }
    results["alone"] = model.apply(variables, X, capture_intermediates=True, mutable=True)
    results["init"] = model.init(RNGS, X, capture_intermediates=True, mutable=True)
    return results, variables


@program
def interceptors(nn):
    seen = []

    def outer(next_fun, args, kwargs, context):
        path = "/".join(context.module.path)
        seen.append(("outer", context.method_name, path, len(args), sorted(kwargs)))
        return next_fun(*args, **kwargs)

    def inner(next_fun, args, kwargs, context):
        seen.append(("inner", context.method_name))
        if context.method_name == "double":
            return next_fun(3 * args[0])
        if isinstance(context.module, affine(nn)):
            return 2 * context.orig_method(*args, **kwargs)
        return next_fun(*args, **kwargs)

    class Model(nn.Module):
        def setup(self):
            self.layer = affine(nn)()

        def double(self, x):
            return 2 * x

        def __call__(self, x, *, scale):
            return self.double(self.layer(x)) * scale

    with nn.intercept_methods(outer), nn.intercept_methods(inner):
        y, variables = initialized(Model(), X, scale=2.0)
    return (y, seen, Model().apply(variables, X, scale=2.0)), variables


# Ways in and out.


@program
def names_and_paths(nn):
    class Model(nn.Module):
        def setup(self):
            self.inner = affine(nn)()

        def __call__(self, x):
            return self.inner(x), self.inner.name, self.inner.path, self.path, self.name

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Model()(x), Model(name="m")(x), Model().parent is self

    return initialized(Outer())


@program
def bound_modules(nn):
    class Model(nn.Module):
        def setup(self):
            self.a = affine(nn)()
            self.b = [affine(nn)(3)]

        def __call__(self, x):
            return self.b[0](self.a(x))

    _, variables = initialized(Model())
    bound = Model().bind(variables)
    module, again = bound.unbind()
    layer, of_layer = bound.b[0].unbind()
    found = bound.a.variables, bound.b[0].features, bound.a.name, layer.name, layer.features
    return (bound(X), bound.a(X), module.apply(again, X), found), (of_layer, again)


@program
def bound_modules_with_state(nn):
    _, variables = initialized(counter(nn)())
    bound = counter(nn)().bind(variables, rngs={"noise": KEY}, mutable=["state"])
    return (bound(X), bound(X)), bound.variables


@program
def initializing_from_another_method(nn):
    class Model(nn.Module):
        @nn.compact
        def encode(self, x, flag=False):
            return affine(nn)(3 if flag else 2)(x), self.is_initializing()

    one = Model().init_with_output(RNGS, X, method=Model.encode)
    two = Model().init_with_output(RNGS, X, flag=True, method="encode")
    return (one, two, Model().apply(one[1], X, method="encode")), Model().init(
        RNGS, X, method=lambda m, x: m.encode(x, True)
    )


@program
def initializing_from_shapes(nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            mean = self.variable("state", "mean", jnp.zeros, x.shape[-1:])
            return affine(nn)()(x - mean.value[None])

    shape = jax.ShapeDtypeStruct((3, 2), jnp.float32)
    return 0, (Model().lazy_init(RNGS, shape), jax.eval_shape(Model().init, RNGS, shape) and 0)


@program
def functions_of_modules(nn):
    class Model(nn.Module):
        def setup(self):
            self.a, self.b = affine(nn)(), affine(nn)()

    def f(model, x, factor=1):
        return factor * model.b(model.a(x))

    variables = nn.init(f, Model())(RNGS, X)
    y, more = nn.init_with_output(f, Model(), mutable=["params"])(RNGS, X, factor=2)
    z = nn.apply(f, Model(), mutable=["state"])(variables, X, 3)
    return (y, z, nn.apply(f, Model())(variables, X, factor=2)), (variables, more)


@program
def call_flags(nn):
    def call(self, x):
        cols = [self.is_mutable_collection(col) for col in ("params", "state", "intermediates")]
        return cols, self.is_initializing(), self.has_rng("noise")

    model = method(nn, call)
    results = [model.init_with_output(RNGS, X), model.apply({}, X), model.apply({"state": {}}, X)]
    results.append(model.apply({}, X, mutable=["state"]))
    return results, {}


@program
def merged_arguments(nn):
    both = [(None, 1), (True, None), (0, None), (None, False)]
    return [nn.merge_param("x", a, b) for a, b in both], {}


@program
def under_jit_and_grad(nn):
    _, variables = initialized(counter(nn)())

    @jax.jit
    def step(variables):
        def loss(params):
            y, changed = counter(nn)().apply(
                {**variables, "params": params}, X, rngs=RNGS, mutable=["state"]
            )
            return (y**2).mean(), changed

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    return step(variables), jax.jit(counter(nn)().init)(RNGS, X) and variables


@program
def frozen_dict_inputs(nn):
    import flax.core

    import weft.core

    frozen = (flax.core if nn.__name__.startswith("flax") else weft.core).freeze
    y, variables = initialized(counter(nn)())
    z = counter(nn)().apply(frozen(variables), X, rngs=RNGS, mutable=["state"])
    return (y, z[0]), variables
