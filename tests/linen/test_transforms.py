import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

from tests.linen.transformed import ALL, KEY, SPLIT, Codec, Linear, X, everywhere, model, shapes
from weft import linen as nn
from weft.errors import (
    InvalidRngError,
    ScopeCollectionNotFound,
    TransformArgumentError,
    TransformTargetError,
)


@everywhere
def test_on_a_class(lift):
    m, plain = lift(Linear)(), Linear()
    variables = plain.init(KEY, X)
    assert shapes(m.init(KEY, X)) == shapes(variables)
    assert isinstance(m, Linear)
    for _ in range(2):
        np.testing.assert_allclose(m.apply(variables, X), plain.apply(variables, X), rtol=1e-5)


@everywhere
def test_on_a_function_of_a_module(lift):
    @lift
    def run(linear, x):
        return linear(x)

    m = model(lambda self, x: run(Linear(), x))
    (y, variables) = m.init_with_output(KEY, X)
    np.testing.assert_allclose(y, X @ variables["params"]["Linear_0"]["w"], rtol=1e-5)


@everywhere
def test_on_a_function_of_several_modules(lift):
    @lift
    def run(modules, x):
        return modules["b"][0](modules["a"](x))

    def body(self, x):
        first = Linear(2)
        return run({"a": first, "b": (Linear(),)}, x), first(x)

    m = model(body)
    (y, first), variables = m.init_with_output(KEY, X)
    w = variables["params"]
    np.testing.assert_allclose(first, X @ w["Linear_0"]["w"], rtol=1e-5)
    np.testing.assert_allclose(y, first @ w["Linear_1"]["w"], rtol=1e-5)


@everywhere
def test_over_and_under_compact(lift):
    class Over(nn.Module):
        @lift
        @nn.compact
        def __call__(self, x):
            x = Linear(2)(x)
            return Linear(4)(x)

    class Under(nn.Module):
        @nn.compact
        @lift
        def __call__(self, x):
            x = Linear(2)(x)
            return Linear(4)(x)

    y, variables = Over().init_with_output(KEY, X)
    assert list(variables["params"]) == ["Linear_0", "Linear_1"]
    for cls in (Over, Under):
        assert shapes(cls().init(KEY, X)) == shapes(variables)
        np.testing.assert_allclose(cls().apply(variables, X), y, rtol=1e-5)


@everywhere
def test_on_a_method_using_setup(lift):
    class Model(nn.Module):
        def setup(self):
            self.linear = Linear()

        @lift
        def once(self, x):
            return self.linear(x)

        def __call__(self, x):
            return self.once(self.linear(self.once(x)))

    y, variables = Model().init_with_output(KEY, X)
    w = variables["params"]["linear"]["w"]
    np.testing.assert_allclose(y, X @ w @ w @ w, rtol=1e-4)


@everywhere
def test_on_a_submodule_in_setup(lift):
    class Model(nn.Module):
        def setup(self):
            self.layers = [lift(Linear)(3), Linear(3), lift(Linear)(3)]

        def __call__(self, x):
            for layer in (*self.layers, self.layers[0]):
                x = layer(x)
            return x

    y, variables = Model().init_with_output(KEY, X)
    a, b, c = (variables["params"][f"layers_{i}"]["w"] for i in range(3))
    np.testing.assert_allclose(y, X @ a @ b @ c @ a, rtol=1e-4)


@everywhere
def test_subclass_of_a_lifted_class(lift):
    class Doubled(lift(Linear)):
        factor: float = 2.0

        def __call__(self, x):
            return self.factor * super().__call__(x)

        def halved(self, x):
            return self(x) / 4

    y, variables = Doubled().init_with_output(KEY, X)
    np.testing.assert_allclose(y, 2 * X @ variables["params"]["w"], rtol=1e-5)
    np.testing.assert_allclose(Doubled().apply(variables, X, method="halved"), y / 4, rtol=1e-5)


# Several runs.


class Cell(nn.Module):
    @nn.compact
    def __call__(self, carry, x):
        steps = self.variable("state", "steps", lambda: jnp.zeros(()))
        steps.value += 1
        y = Linear(name="linear")(carry)
        noise = jax.random.normal(self.make_rng("noise"), ())
        return y if x is None else y + x, (steps.value, noise)


RNGS = {"params": KEY, "noise": jax.random.key(1)}


def test_body_creates_carry_variables():
    m = nn.scan(Cell, {"params": 0}, variable_carry="state", split_rngs={True: True}, length=3)()
    (_, (steps, noise)), variables = m.init_with_output(RNGS, X, None)
    assert steps.tolist() == [1, 2, 3]
    assert len(set(noise.tolist())) == 3
    assert variables["state"]["steps"] == 3
    assert variables["params"]["linear"]["w"].shape == (3, 3, 3)


def test_scan_is_a_loop_over_its_layers():
    options = {"split_rngs": {"params": True, "noise": False}, "length": 3}
    m = nn.scan(Cell, {"params": 0, "state": 0}, **options)()
    (y, (_, noise)), variables = m.init_with_output(RNGS, X, None)
    assert len(set(noise.tolist())) == 1
    expected = X
    for w in m.init(RNGS, X, None)["params"]["linear"]["w"]:
        expected = expected @ w
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    assert variables["state"]["steps"].tolist() == [1, 1, 1]


def test_sown_values_have_the_transform_axis():
    axes = {"params": 0, "intermediates": 0}
    m = model(lambda self, x: nn.vmap(Codec, axes, SPLIT)(name="m")(x))
    _, sown = m.apply(m.init(KEY, X), X, mutable="intermediates")
    assert shapes(sown["intermediates"]["m"]) == {
        "encoder": {"seen": ((2, 3),)},
        "decoder": {"seen": ((2, 2),)},
    }


def test_metadata_gains_the_axis():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            ones = nn.with_partitioning(jax.nn.initializers.ones, ("in", "out"))
            w = self.param("w", ones, (3, 3))
            assert w.shape == (3, 3)
            return x @ w

    axes, layers = {"params": 1}, {nn.PARTITION_NAME: "layers"}
    step = nn.remat(lambda self, c, _: (self(c), None))
    stack = {
        "vmap": nn.vmap(Layer, axes, SPLIT, in_axes=None, axis_size=4, metadata_params=layers),
        "add_metadata_axis": nn.add_metadata_axis(Layer, axes, layers),
    }
    for name, cls in stack.items():
        w = cls().init(KEY, X)["params"]["w"]
        assert w.names == ("in", "layers", "out"), name
    m = model(
        lambda self, x: nn.scan(
            step, axes, split_rngs=SPLIT, length=4, metadata_params={nn.PARTITION_NAME: None}
        )(Layer(), x, None)
    )
    variables = m.init(KEY, X)
    assert variables["params"]["Layer_0"]["w"].names == ("in", None, "out")
    assert variables["params"]["Layer_0"]["w"].value.shape == (3, 4, 3)
    assert m.apply(variables, X)[0].shape == X.shape


def test_remat_scan_has_an_axis_for_each_loop():
    m = nn.remat_scan(Linear, (2, 3))()
    y, variables = m.init_with_output(KEY, X)
    w = variables["params"]["w"]
    assert w.shape == (2, 3, 3, 3)
    expected = X
    for layer in w.reshape(6, 3, 3):
        expected = expected @ layer
    np.testing.assert_allclose(y, expected, rtol=1e-4)


def test_remat_scan_without_loops_is_rejected():
    with pytest.raises(TransformArgumentError, match=r"lengths=\(\)\) has no loops; give"):
        nn.remat_scan(Linear)


def test_pmap_matches_vmap():
    xs = jnp.arange(24.0).reshape(8, 1, 3)
    run = lambda lift: lift(Linear, {"params": 0}, SPLIT)().init_with_output(KEY, xs)  # noqa: E731
    y, variables = run(nn.pmap)
    expected, of_vmap = run(nn.vmap)
    np.testing.assert_array_equal(variables["params"]["w"], of_vmap["params"]["w"])
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    assert len(y.sharding.device_set) == len(jax.devices())


def test_collectives_in_pmap():
    class Mean(nn.Module):
        @nn.compact
        def __call__(self, x):
            mean = self.variable("stats", "mean", lambda: jnp.zeros(()))
            mean.value = jax.lax.pmean(x, "devices")
            return x - mean.value

    y, stats = nn.pmap(Mean, {"stats": None})().init_with_output({}, jnp.arange(8.0))
    assert y.tolist() == [x - 3.5 for x in range(8)]
    assert stats["stats"]["mean"] == 3.5


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_shard_map_sees_local_shards(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType[axis_type],))
    seen = []

    class Local(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.append(x.shape)
            scale = self.param("scale", jax.nn.initializers.ones, ())
            noise = jax.random.bits(self.make_rng("noise"), x.shape)
            return scale * x - jax.lax.pmean(x.mean(), "data"), noise

    options = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}
    m = nn.shard_map(Local, {"params": P()}, {"params": False, "noise": True}, **options)()
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("data")))
    (y, noise), variables = m.init_with_output({"params": KEY, "noise": KEY}, x)
    np.testing.assert_allclose(y, x - 3.5)
    assert len(set(noise.tolist())) == 8
    assert set(seen) == {(2,)}
    assert shapes(variables) == {"params": {"scale": ()}}


def test_vmap_of_scan_of_remat_traces_body_few_times():
    runs = []

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            runs.append(1)
            return Linear()(x), None

    cls = nn.scan(nn.remat(Layer), {"params": 0}, split_rngs=SPLIT, length=3)
    m = nn.vmap(cls, {"params": 0}, SPLIT, in_axes=(0, None))()
    variables = m.init(KEY, X, None)
    assert variables["params"]["Linear_0"]["w"].shape == (2, 3, 3, 3)
    assert len(runs) <= 2
    runs.clear()
    jax.jit(m.apply, static_argnums=2)(variables, X, None)
    assert len(runs) == 1


# How it is computed.


def test_remat_with_static_arguments():
    class Model(nn.Module):
        @functools.partial(nn.remat, static_argnums=(2, 3))
        @nn.compact
        def __call__(self, x, flag, n):
            assert flag is True
            return [Linear()(x) for _ in range(n)]

    assert len(Model().init(KEY, X, True, 2)["params"]) == 2
    with pytest.raises(TransformArgumentError, match="concrete=True"):
        nn.remat(Linear, concrete=True)().init(KEY, X)


@pytest.mark.parametrize("of_class", [True, False])
def test_checkify_returns_the_error_and_the_result(of_class):
    class Root(nn.Module):
        @nn.compact
        def __call__(self, x):
            count = self.variable("state", "n", lambda: jnp.int32(0))
            count.value += 1
            checkify.check(jnp.all(x > 0), "not positive")
            return jnp.sqrt(Linear()(x) ** 2)

    class OfFunction(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.checkify(lambda root, x: root(x))(Root(), x)

    m = nn.checkify(Root)() if of_class else OfFunction()
    (error, y), variables = m.init_with_output(KEY, 1 + X**2)
    assert error.get() is None
    assert y.shape == (*X.shape[:-1], 3)
    (error, _), changed = m.apply(variables, -1 - X**2, mutable=["state"])
    assert "not positive" in error.get()
    assert jax.tree.leaves(changed) == [2]


def test_jit_with_static_and_named_arguments():
    class Model(nn.Module):
        @functools.partial(nn.jit, static_argnums=2, static_argnames=("power",))
        def __call__(self, x, n, power=1, scale=1.0):
            assert isinstance(n, int) and isinstance(power, int)
            return scale * n * x**power

    assert Model().apply({}, 3.0, 2, power=2, scale=jnp.array(10.0)) == 180.0


def test_jitted_function_explains_itself():
    f = nn.jit(lambda linear, x: linear(x))
    m = model(lambda self, x: f(Linear(), x))
    variables = m.init(KEY, X)
    m.apply(variables, X)
    m.apply(variables, X[:1])
    assert "float32[2,3] before, float32[1,3]" in f.explain_recompile()


def test_jitted_function_is_lowered():
    f = nn.jit(lambda linear, x: linear(x))
    texts = []

    def body(self, x):
        linear = Linear()
        linear(x)
        texts.append(f.lower(linear, x).as_text())
        return x

    model(body).init(KEY, X)
    assert "dot_general" in texts[0]


def test_jitted_dropout_draws_new_keys_per_call():
    m = model(lambda self, x: [nn.jit(nn.Dropout)(0.5, deterministic=False)(x) for _ in range(2)])
    a, b = m.apply({}, jnp.ones(64), rngs={"dropout": KEY})
    assert (a != b).any()
    again, _ = m.apply({}, jnp.ones(64), rngs={"dropout": KEY})
    np.testing.assert_array_equal(a, again)


def test_fold_rngs_restarts():
    def body(self, x):
        draw = nn.fold_rngs(lambda self: self.make_rng("noise"))
        return jnp.stack([draw(self), draw(self), self.make_rng("noise")])

    keys = model(body).apply({}, X, rngs={"noise": jax.random.key(1)})
    assert len({tuple(k.tolist()) for k in jax.random.key_data(keys)}) == 3


def test_named_call_names_operations():
    class Scaled(nn.Module):
        def scaled(self, x):
            return 3 * x

        @functools.partial(nn.named_call, force=False)
        def __call__(self, x):
            return self.scaled(x)

    def text(m):
        jaxpr = jax.make_jaxpr(lambda x: m.apply({}, x))(1.0)
        return jaxpr.pretty_print(name_stack=True)

    assert "__call__" in text(Scaled())
    with nn.override_named_call(False):
        assert "__call__" not in text(Scaled())
        assert "named" in text(model(lambda self, x: nn.named_call(named)(self, x)))


def named(self, x):
    return 3 * x


# The state itself.


def test_map_variables_maps_in():
    double = lambda tree: jax.tree.map(lambda w: 2 * w, tree)  # noqa: E731
    m = nn.map_variables(Linear, "params", double)()
    variables = Linear().init(KEY, X)
    np.testing.assert_allclose(m.apply(variables, X), 2 * Linear().apply(variables, X), rtol=1e-5)


def test_map_variables_maps_out():
    half = lambda tree: jax.tree.map(lambda w: w / 2, tree)  # noqa: E731
    double = lambda tree: jax.tree.map(lambda w: 2 * w, tree)  # noqa: E731
    m = nn.map_variables(Linear, "params", half, double, init=True)()
    y, variables = m.init_with_output(KEY, X)
    np.testing.assert_allclose(y, X @ variables["params"]["w"] / 2, rtol=1e-5)


# Errors.


@pytest.mark.parametrize(
    "lifted",
    [
        nn.vmap(Linear, {}, SPLIT),
        nn.remat(Linear, variables="state"),
        nn.jit(Linear, variables=["state"]),
        nn.fold_rngs(Linear, variables=False),
    ],
)
def test_unlifted_collection_is_named(lifted):
    message = "lift the collection 'params'|does not lift the collection 'params'"
    with pytest.raises(ScopeCollectionNotFound, match=message):
        lifted().init(KEY, X)
    with pytest.raises(ScopeCollectionNotFound, match=message):
        lifted().apply(Linear().init(KEY, X), X)


@pytest.mark.parametrize(
    "lifted",
    [nn.vmap(Linear, {"params": 0}), nn.remat(Linear, rngs="noise"), nn.jit(Linear, rngs=False)],
)
def test_unlifted_stream_is_named(lifted):
    with pytest.raises(InvalidRngError, match="the PRNG stream 'params'"):
        lifted().init(KEY, X)


def test_field_change_is_visible():
    class Scaled(nn.Module):
        by: bytearray

        @nn.compact
        def __call__(self):
            return self.param("w", nn.initializers.ones, ()) * self.by[0]

    module = nn.jit(Scaled)(bytearray([2]))
    variables = module.init(jax.random.key(0))
    for value in (2, 5, 5, 7):
        module.by[0] = value
        assert module.apply(variables) == value


@everywhere
def test_invalid_target_is_rejected(lift):
    with pytest.raises(
        TransformTargetError, match="3 cannot be transformed; expected a module class"
    ):
        lift(3)
    with pytest.raises(TransformTargetError, match=r"transform its class: nn.remat\(Dense\)"):
        lift(Linear())


WITH_METHODS = [n for n in ALL if n not in ("fold_rngs", "add_metadata_axis", "named_call")]


@pytest.mark.parametrize("name", WITH_METHODS)
@pytest.mark.parametrize(
    "methods",
    ["decode", ["encode", "decode"], ("__call__", "encode"), {"encode": {}, "__call__": {}}],
)
def test_every_method_works_in_any_order(name, methods):
    m = ALL[name](Codec, methods=methods)()
    variables = m.init(KEY, X)
    w = variables["params"]
    np.testing.assert_array_equal(w["encoder"]["w"].shape, (3, 2))

    def all_methods(m, x):
        z = m.encode(x)
        return m.decode(z), m(x), m.encode(x), m.decode(m.encode(x))

    expected = X @ w["encoder"]["w"] @ w["decoder"]["w"]
    y, called, z, again = m.apply(variables, X, method=all_methods)
    for got in (y, called, again):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(z, X @ w["encoder"]["w"], rtol=1e-5)
    inside = model(lambda self, x: all_methods(ALL[name](Codec, methods=methods)(), x))
    y, *_ = inside.apply({"params": {f"{type(m).__name__}_0": w}}, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_each_method_has_its_own_options():
    options = {"encode": {"in_axes": 1, "out_axes": 1}, "decode": {}}
    m = nn.vmap(Codec, {"params": None}, {"params": False}, methods=options)()
    variables = Codec().init(KEY, X)
    xs = jnp.ones((4, 5, 3))
    assert m.apply(variables, xs, method="encode").shape == (4, 5, 2)
    options["encode"] = {"variable_axes": {"params": 0}, "axis_size": 7, "in_axes": None}
    m = nn.vmap(Codec, {"params": None}, SPLIT, methods=options)()
    assert shapes(m.init(KEY, X, method="encode")) == {"params": {"encoder": {"w": (7, 3, 2)}}}


def test_missing_method_is_rejected():
    with pytest.raises(TransformTargetError, match=r"'Linear.encode' cannot be transformed"):
        nn.remat(Linear, methods=["encode"])
    with pytest.raises(TransformTargetError, match=r"'Linear.features' cannot be transformed"):
        nn.vmap(Linear, methods={"features": {}})


def test_classes_are_named_by_their_transformation():
    named = [
        (nn.vmap, "VmapLinear"),
        (nn.scan, "ScanLinear"),
        (nn.remat, "CheckpointLinear"),
        (nn.jit, "JitLinear"),
        (functools.partial(nn.remat_scan, lengths=(2,)), "Remat_scanLinear"),
        (nn.map_variables, "Map_variablesLinear"),
        (nn.named_call, "Linear"),
    ]
    for lift, name in named:
        assert lift(Linear).__name__ == name
    assert nn.remat(nn.jit(Linear)).__name__ == "CheckpointJitLinear"
    m = model(lambda self, x: nn.remat(Linear)()(nn.remat(Linear)()(x)))
    assert list(m.init(KEY, X)["params"]) == ["CheckpointLinear_1", "CheckpointLinear_0"]


def test_transformed_class_is_cached():
    axes = lambda: {"params": 0, "stats": [1][0]}  # noqa: E731
    assert nn.vmap(Linear, axes(), {"params": True}) is nn.vmap(Linear, axes(), {"params": True})
    assert nn.vmap(Linear, {"params": 0}) is not nn.vmap(Linear, {"params": 1})
    assert nn.vmap(Linear, {"params": 0}) is not nn.vmap(Linear, {"params": False})
    assert nn.remat(Linear, policy=lambda *_: True) is not nn.remat(Linear, policy=lambda *_: False)
