"""Transformations of Linen modules: the same programs on Flax and on Weft."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.parity.linen import KEY, same_error
from tests.parity.linen_transforms import (
    AXES,
    RNGS,
    SPLIT,
    XS,
    Programs,
    X,
    block,
    of_body,
    pair,
)

programs = Programs()


@programs.body(x=XS)
def vmap_of_a_class(nn, self, x):
    return nn.vmap(block(nn), AXES, SPLIT)()(x)


@programs.body()
def vmap_with_shared_inputs(nn, self, x):
    return nn.vmap(block(nn), AXES, SPLIT, in_axes=None, axis_size=3)()(x)


@programs.body(x=XS)
def vmap_with_shared_params(nn, self, x):
    axes = {"params": None, "counts": 0, "intermediates": 0}
    return nn.vmap(block(nn), axes, {"params": False, "dropout": True})()(x)


@programs.body(x=XS)
def vmap_with_one_key_for_all(nn, self, x):
    return nn.vmap(block(nn), AXES, {"params": True, "dropout": False})()(x)


@programs.body(x=XS)
def vmap_over_other_axes(nn, self, x):
    axes = {"params": 1, "counts": 0, "intermediates": -1}
    return nn.vmap(nn.Dense, axes, SPLIT, in_axes=1, out_axes=-1)(2)(x)


@programs.body(x=XS)
def vmap_with_batch_statistics_over_the_axis(nn, self, x):
    axes = {"params": None, "batch_stats": None}
    norm = nn.vmap(nn.BatchNorm, axes, {"params": False}, axis_name="batch")
    return norm(
        use_running_average=not self.is_mutable_collection("batch_stats"), axis_name="batch"
    )(x)


@programs.body(x=XS, mutable=("batch_stats",))
def vmap_with_batch_statistics_of_each(nn, self, x):
    norm = nn.vmap(nn.BatchNorm, {"params": 0, "batch_stats": 0}, {"params": True})
    return norm(use_running_average=False)(x)


@programs.body(x=XS)
def vmap_with_axis_metadata(nn, self, x):
    dense = nn.vmap(nn.Dense, {"params": 0}, SPLIT, metadata_params={nn.PARTITION_NAME: "models"})
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    return dense(2, kernel_init=kernel)(x)


@programs.body(x=XS)
def vmap_of_methods(nn, self, x):
    model = nn.vmap(pair(nn), {"params": 0}, SPLIT, methods=["encode", "decode"])()
    return model.decode(model.encode(x)), model.decode(x[..., :2])


@programs.body(x=XS)
def vmap_of_a_function(nn, self, x):
    dense = nn.Dense(2)
    f = nn.vmap(lambda dense, x: dense(x), {"params": None}, {"params": False})
    return f(dense, x), dense(x)


@programs.program
def vmap_as_decorator(nn):
    class Model(nn.Module):
        @functools.partial(nn.vmap, variable_axes={"params": 0}, split_rngs={"params": True})
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x)

    return Model().init_with_output(KEY, XS)


@programs.program
def vmap_of_the_model(nn):
    model = nn.vmap(block(nn), AXES, SPLIT)()
    variables = model.init(RNGS, XS)
    return model.apply(variables, XS, rngs=RNGS, mutable=["counts"]), variables


@programs.body(x=XS)
def vmap_of_a_function_that_makes_submodules(nn, self, x):
    f = nn.vmap(lambda self, x: nn.Dense(2)(nn.Dense(3)(x)), {"params": 0}, SPLIT)
    return f(self, x)


@programs.body(x=XS)
def vmap_of_methods_with_options(nn, self, x):
    of_both = {"variable_axes": {"params": 0}, "split_rngs": SPLIT}
    options = {"encode": of_both, "decode": {**of_both, "in_axes": 1, "out_axes": 1}}
    model = nn.vmap(pair(nn), methods=options)()
    return model.decode(jnp.swapaxes(model.encode(x), 0, 1))


@programs.program
def vmap_of_a_subclass(nn):
    class Twice(nn.vmap(pair(nn), {"params": 0}, SPLIT)):
        def twice(self, x):
            return self(self(x))

    return Twice().init_with_output(KEY, XS, method="twice")


@programs.body()
def remat_of_a_class(nn, self, x):
    return nn.remat(block(nn))()(x)


@programs.body(True)
def remat_with_static_arguments(nn, self, x, flag):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, flag):
            return nn.Dense(2 if flag else 3)(x)

    return nn.remat(Model, static_argnums=(2,))()(x, flag)


@programs.body()
def remat_with_a_policy(nn, self, x):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return nn.checkpoint(block(nn), policy=policy, prevent_cse=False)()(x)


@programs.body()
def remat_of_a_function(nn, self, x):
    f = nn.remat(lambda self, x: nn.Dense(2)(nn.Dense(3)(x)))
    return nn.Dense(3)(f(self, x))


@programs.body()
def remat_of_methods(nn, self, x):
    model = nn.remat(pair(nn), methods=["encode", "decode"])()
    return model(x), model.decode(model.encode(x))


@programs.body()
def remat_of_some_collections(nn, self, x):
    return nn.remat(nn.Dense, variables=["params"], rngs=["params"])(2)(x)


@programs.program
def remat_under_a_gradient(nn):
    model = nn.remat(block(nn))()
    variables = model.init(RNGS, X)
    loss = lambda v: model.apply(v, X, rngs=RNGS).sum()  # noqa: E731
    return jax.grad(loss, allow_int=True)(
        {"params": variables["params"], "counts": variables["counts"]}
    )["params"], variables


@programs.body()
def jit_of_a_class(nn, self, x):
    return nn.jit(block(nn))()(x), nn.jit(block(nn))()(x)


@programs.body(2)
def jit_with_static_arguments(nn, self, x, n):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, n):
            return [nn.Dense(3)(x) for _ in range(n)]

    return nn.jit(Model, static_argnums=(2,))()(x, n)


@programs.body()
def jit_of_a_function(nn, self, x):
    f = nn.jit(lambda self, x: nn.Dense(2)(nn.Dense(3)(x)))
    return nn.Dense(3)(f(self, x))


@programs.body()
def fold_rngs_of_a_class(nn, self, x):
    return nn.fold_rngs(block(nn))()(x)


@programs.program
def map_variables_for_tied_weights(nn):
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, x):
            transpose = lambda tree: jax.tree.map(lambda w: w.T, tree)  # noqa: E731
            back = nn.map_variables(nn.Dense, "params", transpose, transpose, init=True)
            return back(2, use_bias=False)(x)

    return Tied().init_with_output(KEY, X)


@programs.program
def map_variables_of_a_module(nn):
    shift = lambda n: lambda tree: jax.tree.map(lambda w: w + n, tree)  # noqa: E731
    model = nn.map_variables(pair(nn), "params", shift(1.0), shift(-1.0), init=True)()
    variables = model.init(KEY, X)
    return model.apply(variables, X), variables


@programs.program
def map_variables_that_change(nn):
    class Counter(nn.Module):
        @nn.compact
        def __call__(self):
            calls = self.variable("counts", "calls", lambda: 1.0)
            calls.value += 1
            return calls.value

    half = lambda tree: jax.tree.map(lambda v: v / 2, tree)  # noqa: E731
    double = lambda tree: jax.tree.map(lambda v: v * 2, tree)  # noqa: E731
    model = nn.map_variables(Counter, "counts", half, double, init=True, mutable=True)()
    variables = model.init({})
    return model.apply(variables, mutable=["counts"]), variables


@programs.program
def add_metadata_axis_of_a_class(nn):
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, kernel_init=kernel)(x)

    params = {nn.PARTITION_NAME: "new"}
    return nn.add_metadata_axis(Model, {"params": 0}, params)().init_with_output(KEY, X)


@programs.body()
def module_as_field_of_a_lifted_one(nn, self, x):
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(self.inner(x))

    inner = nn.Dense(3)
    return nn.remat(Outer)(inner)(x), inner(x)


@programs.body()
def module_as_argument_of_a_lifted_one(nn, self, x):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, inner):
            return nn.Dense(2)(inner(x))

    inner = nn.Dense(3)
    return nn.remat(Outer)()(x, inner), inner(x)


@programs.program
def lifted_submodules_in_setup(nn):
    class Model(nn.Module):
        def setup(self):
            self.shared = nn.remat(nn.Dense)(3)
            self.layers = [nn.jit(nn.Dense)(3), nn.remat(nn.Dense)(3)]
            self.heads = {"a": nn.vmap(nn.Dense, {"params": 0}, SPLIT)(2)}

        def __call__(self, x):
            for layer in (self.shared, *self.layers, self.shared):
                x = layer(x)
            return self.heads["a"](x)

    return Model().init_with_output(KEY, XS)


@programs.program
def methods_of_a_lifted_class_in_any_order(nn):
    class Model(nn.Module):
        def setup(self):
            self.pair = nn.remat(pair(nn))()

        def __call__(self, x):
            z = self.pair.encode(x)
            return self.pair.decode(z), self.pair(x), self.pair.encode(x)

    return Model().init_with_output(KEY, X)


@programs.program
def decorated_methods_call_each_other(nn):
    class Model(nn.Module):
        def setup(self):
            self.dense = nn.Dense(3)

        @nn.remat
        def inner(self, x):
            return self.dense(x)

        @nn.jit
        def __call__(self, x):
            return self.inner(self.inner(x))

    return Model().init_with_output(KEY, X)


@programs.body(x=XS)
def partials_of_classes(nn, self, x):
    ensemble = nn.vmap(functools.partial(nn.Dense, 3, use_bias=False), {"params": 0}, SPLIT)
    x = ensemble(name="first")(x)
    x = nn.remat(functools.partial(nn.Dense, 2))(dtype=jnp.bfloat16)(x)
    return nn.jit(functools.partial(pair(nn)), methods=["encode"])().encode(x)


@programs.body()
def partial_of_a_scanned_class(nn, self, x):
    class Step(nn.Module):
        features: int

        @nn.compact
        def __call__(self, carry, x):
            return nn.Dense(self.features)(carry), x

    layers = nn.scan(functools.partial(Step, 3), {"params": 0}, split_rngs=SPLIT, length=2)
    return layers()(x, None)


@programs.program
def functions_of_modules_that_are_not_bound(nn):
    model, keys = pair(nn)(), jax.random.split(KEY, 2)
    y, variables = nn.jit(nn.Module.init_with_output)(model, KEY, X)
    stacked = nn.vmap(nn.Module.init, in_axes=(0, None))(model, keys, X)
    z = nn.remat(nn.Module.apply)(model, variables, X)
    loss = lambda model, variables, x: model.apply(variables, x).sum()  # noqa: E731
    return (y, z, nn.grad(loss, model, variables, X)), (variables, stacked)


@programs.body()
def jit_of_init_in_a_method(nn, self, x):
    y, variables = nn.jit(nn.Dense, methods=["init_with_output"])(2).init_with_output(KEY, x)
    return y, variables


def counted(nn, module, ref, x):
    ref["calls"].value += 1
    return x * ref["calls"].value


@programs.body(mutable=("counts",))
def variables_as_arguments(nn, self, x):
    ref = {"calls": self.variable("counts", "calls", lambda: jnp.zeros(()))}
    f = functools.partial(counted, nn)
    options = {"variable_axes": {"counts": None}, "split_rngs": {}, "in_axes": (None, 0)}
    ys = [nn.jit(f)(self, ref, x), nn.remat(f)(self, ref, x), nn.vmap(f, **options)(self, ref, x)]
    return ys, nn.cond(True, f, f, self, ref, x), nn.jit(f)(nn.Dense(2), ref, x)


@programs.body(mutable=("counts",))
def variables_in_fields(nn, self, x):
    class Counted(nn.Module):
        calls: nn.Variable

        def __call__(self, carry, x):
            self.calls.value += 1
            return carry, x * self.calls.value

    ref = self.variable("counts", "calls", lambda: jnp.zeros(()))
    loop = nn.scan(Counted, variable_carry="counts")(ref)
    return nn.jit(Counted)(ref)(1.0, x), loop(1.0, x), nn.remat(Counted)(ref)(2.0, x)


test_variables_agree = programs.test()


def boxed(nn, box):
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("w", getattr(nn, box)(nn.initializers.ones, ("a",)), (1,))

    return nn.vmap(Boxed, {"params": 0}, SPLIT)()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda nn: nn.vmap(3),
        lambda nn: nn.scan(nn.Dense(2)),
        lambda nn: nn.vmap(nn.Dense, {}, SPLIT)(2).init(KEY, XS),
        lambda nn: of_body(lambda nn, self, x: nn.jit(lambda m, x: nn.Dense(2))(self, x))(nn),
        lambda nn: of_body(lambda nn, self, x: nn.remat(nn.Dense, variables=False)(2)(x))(nn),
        lambda nn: nn.jit(lambda dense, x: dense(x))(nn.Dense(2), X),
        lambda nn: boxed(nn, "with_partitioning").init(KEY, XS),
        lambda nn: boxed(nn, "with_logical_partitioning").init(KEY, XS),
    ],
)
def test_errors_agree(wrong):
    same_error(wrong)
