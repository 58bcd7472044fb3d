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


# Several runs.


def test_remat_scan_without_loops_is_rejected():
    with pytest.raises(TransformArgumentError, match=r"lengths=\(\)\) has no loops; give"):
        nn.remat_scan(Linear)


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


# How it is computed.


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
