from collections.abc import Callable

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interop.layers import DENSE, KEY, NAMED, RANDOM, STATEFUL, X
from weft import linen as nn
from weft import nnx
from weft.core.filters import DenyList
from weft.errors import LayerVariablesError, UnknownLayerError
from weft.interop import InLinen, as_linen
from weft.interop.linen import LinenModel, linen_streams

RNGS = {"params": KEY, "dropout": jax.random.key(5)}
BUT_PARAMS = DenyList("params")


def over(cases):
    return pytest.mark.parametrize("make", cases.values(), ids=cases)


class Model(nn.Module):
    make: Callable

    @nn.compact
    def __call__(self, x, **kwargs):
        return as_linen(*self.make(), name="guest")(nn.Dense(3)(x), **kwargs)


@over(DENSE)
def test_layer_of_any_library_is_a_submodule_of_linen(make):
    layer = as_linen(*make())
    y, variables = layer.init_with_output(KEY, X)
    assert y.shape == (4, 2)
    assert sorted(np.shape(x) for x in jax.tree.leaves(variables))
    np.testing.assert_allclose(jax.jit(layer.apply)(variables, X), y, rtol=1e-6)


@over({k: v for k, v in DENSE.items() if k not in ("linen", "linen-config", "haiku")})
def test_its_variables_are_below_its_name(make):
    model = Model(make)
    variables = model.init(KEY, X)
    assert set(variables["params"]) == {"Dense_0", "guest"}
    assert model.apply(variables, X).shape == (4, 2)


@over(
    {k: DENSE[k] for k in ("nnx-class", "hierarchy", "flax-linen", "equinox-class", "haiku-class")}
)
def test_batch_of_layers_is_mapped(make):
    batch = nn.vmap(
        lambda module, x: module(x),
        variable_axes={"params": 0},
        split_rngs={"params": True},
    )

    class Batch(nn.Module):
        @nn.compact
        def __call__(self, x):
            return batch(as_linen(*make(), name="guest"), x)

    x = jnp.stack([X, X, X])
    y, variables = Batch().init_with_output(KEY, x)
    assert y.shape == (3, 4, 2)
    assert all(v.shape[0] == 3 for v in jax.tree.leaves(variables))
    np.testing.assert_allclose(Batch().apply(variables, x), y, rtol=1e-6)


@pytest.mark.parametrize("case", STATEFUL.values(), ids=STATEFUL)
def test_state_is_kept_under_jit_and_scan(case):
    make, col = case
    guest = make()
    is_linen = isinstance(guest[0], nn.Module)
    how = {"use_running_average": False} if is_linen else {"training": True}

    class Steps(nn.Module):
        @nn.compact
        def __call__(self, xs):
            scan = nn.scan(
                lambda module, _, x: (None, module(x, **how)),
                variable_broadcast="params",
                variable_carry=col,
            )
            return scan(as_linen(*make(), name="guest"), None, xs)[1]

    layer = as_linen(*guest)
    variables = layer.init(RNGS, X, **how)
    assert col in variables
    xs = jnp.stack([X, 2 * X, 3 * X])
    once = jax.jit(lambda v, x: layer.apply(v, x, mutable=[col], **how))
    one_by_one, state = [], variables
    for x in xs:
        y, changed = once(state, x)
        one_by_one.append(y)
        state = {**state, **changed}
    assert not all(
        jnp.allclose(a, b)
        for a, b in zip(jax.tree.leaves(state[col]), jax.tree.leaves(variables[col]), strict=True)
    )
    wrapped = {c: {"guest": v} for c, v in variables.items()}
    ys, after = Steps().apply(wrapped, xs, mutable=[col])
    np.testing.assert_allclose(ys, jnp.stack(one_by_one), rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        after[col]["guest"],
        state[col],
    )


def test_axis_metadata_follows_the_axes():
    for make in (NAMED["linen"], NAMED["hierarchy"], NAMED["flax-linen"]):
        layer = as_linen(*make())
        specs = nn.get_partition_spec(layer.init(KEY, X))["params"]
        weight = specs.get("kernel", specs.get("weight"))
        assert weight == jax.sharding.PartitionSpec(None, "model")

        class Stack(nn.Module):
            make: Callable

            @nn.compact
            def __call__(self, x):
                stack = nn.vmap(
                    lambda module, x: module(x),
                    in_axes=None,
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    axis_size=3,
                    metadata_params={nn.PARTITION_NAME: "layers"},
                )
                return stack(as_linen(*self.make(), name="guest"), x)

        variables = Stack(make).init(KEY, X)
        specs = nn.get_partition_spec(variables)["params"]["guest"]
        weight = specs.get("kernel", specs.get("weight"))
        assert weight == jax.sharding.PartitionSpec("layers", None, "model")
        assert Stack(make).apply(variables, X).shape == (3, 4, 2)


@over(RANDOM)
def test_keys_are_drawn_from_linen_streams(make):
    guest = make()
    how = {"deterministic": False} if isinstance(guest[0], nn.Module) else {"training": True}
    layer = as_linen(*guest)
    variables = layer.init(RNGS, X, **how)
    draw = jax.jit(lambda key: layer.apply(variables, X, rngs={"dropout": key}, **how))
    a, b, c = (draw(jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert not jnp.array_equal(a, c)
    assert set(jnp.unique(jnp.round(a / X)).tolist()) == {0.0, 2.0}


def test_training_mode_from_attribute_or_call():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    layer = as_linen(dropout, training=False)
    np.testing.assert_array_equal(layer.apply({}, X), X)
    dropped = layer.apply({}, X, rngs={"dropout": KEY}, training=True)
    assert not jnp.array_equal(dropped, X)


def test_method_is_called_by_name():
    embed = as_linen(nnx.Embed, 5, 3)
    variables = embed.init(KEY, jnp.array([1]))
    logits = embed.apply(variables, X, method=lambda module, x: module(x, method="attend"))
    assert logits.shape == (4, 5)


def test_linen_module_is_returned_unchanged():
    dense = nn.Dense(2)
    assert as_linen(dense) is dense
    assert as_linen(nn.Dense, 2, name="a") == nn.Dense(2, name="a")
    assert isinstance(as_linen(flax.linen.Dense(2)), InLinen)


def test_sown_values_are_returned_when_mutable():
    class Sows(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            self.sow("intermediates", "seen", x)
            return flax.linen.Dense(2)(x)

    layer = as_linen(Sows())
    variables = layer.init(KEY, X)
    assert set(variables) == {"params"}
    _, sown = layer.apply(variables, X, mutable=["intermediates"])
    np.testing.assert_array_equal(sown["intermediates"]["seen"][0], X)


def test_missing_variable_is_named():
    layer = as_linen(nnx.Linear, 3, 2)
    with pytest.raises(LayerVariablesError, match=r"Linear has a variable 'params/bias'.*none"):
        layer.apply({}, X)


def test_non_linen_modules_are_rejected():
    with pytest.raises(UnknownLayerError, match="a Linear was given"):
        LinenModel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))


def test_default_replaces_params():
    assert linen_streams({"default": 1, "dropout": 2}) == {"params": 1, "dropout": 2}
    assert linen_streams({"default": 1, "params": 2}) == {"params": 2}
