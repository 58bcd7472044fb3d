import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.errors import ArgumentValueError, LayerConfigError
from weft.hierarchy.attention.qkv_linear import (
    FusedGroupedQKVLinear,
    FusedQKVLinear,
    GroupedQKVLinear,
    MultiheadInputLinear,
    MultiheadOutputLinear,
    QKVLinear,
    QLinear,
)
from weft.hierarchy.module import functional as F
from weft.hierarchy.param_init import FanAxes
from weft.struct import VDict

DIM, HEADS, HEAD = 8, 4, 3


def linear(cls, **fields):
    cfg = cls.default_config().set(name="l", model_dim=DIM, num_heads=HEADS, per_head_dim=HEAD)
    return cfg.set(**fields).instantiate(parent=None)


def qkv(cls, **fields):
    dims = {"query_dim": DIM, "key_dim": DIM, "value_dim": DIM, **fields}
    cfg = cls.default_config().set(name="qkv", num_heads=HEADS, per_head_dim=HEAD, **dims)
    return cfg.instantiate(parent=None)


def run(layer, state, *args, **kwargs):
    inputs = dict(zip(("query",), args, strict=False), **kwargs)
    return F(layer, None, state, inputs, is_training=False)[0]


@pytest.mark.parametrize("bias", [True, False])
def test_to_heads_and_back(bias, filled, wave):
    x = wave((2, 5, DIM))
    to, back = linear(MultiheadInputLinear, bias=bias), linear(MultiheadOutputLinear, bias=bias)
    w, v = filled(to), filled(back)
    heads, _ = F(to, None, w, (x,), is_training=False)
    expected = np.add(np.tensordot(x, w["weight"], 1), w.get("bias", 0.0))
    np.testing.assert_allclose(heads, expected, rtol=1e-5, atol=1e-6)
    y, _ = F(back, None, v, (heads,), is_training=False)
    product = np.tensordot(heads, v["weight"], ((2, 3), (1, 2)))
    expected = np.add(product, v.get("bias", 0.0))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "cls, fans, bias_shape, bias_axes",
    [
        (MultiheadInputLinear, FanAxes(0, (1, 2)), (HEADS, HEAD), ("model", None)),
        (MultiheadOutputLinear, FanAxes((1, 2), 0), (DIM,), (None,)),
    ],
)
def test_specs(cls, fans, bias_shape, bias_axes):
    specs = linear(cls).create_parameter_specs_recursively()
    weight, bias = specs["weight"], specs["bias"]
    assert weight.shape == (DIM, HEADS, HEAD)
    assert weight.mesh_axes == PartitionSpec(None, "model", None)
    assert weight.fan_axes == fans
    assert weight.factorization.axes == ("row", None, "col")
    assert bias.shape == bias_shape
    assert bias.mesh_axes == PartitionSpec(*bias_axes)


def test_initial_weights_have_the_variance_of_their_fans():
    layer = linear(MultiheadOutputLinear, model_dim=64, per_head_dim=8)
    weight = layer.initialize_parameters_recursively(jax.random.PRNGKey(0))["weight"]
    bound = np.sqrt(3 / ((HEADS * 8 + 64) / 2))
    assert np.max(np.abs(weight)) <= bound
    np.testing.assert_allclose(np.var(weight), bound**2 / 3, rtol=0.05)


def fuse(state):
    """Returns the state of a FusedQKVLinear from that of a QKVLinear."""
    parts = [state[f"{n}_proj"] for n in "qkv"]
    return {"qkv_proj": VDict(jax.tree.map(lambda *x: jnp.stack(x), *parts))}


@pytest.mark.parametrize("other", [(), ("key",), ("key", "value")])
def test_fused_equals_separate(other, filled, wave):
    separate, fused = qkv(QKVLinear), qkv(FusedQKVLinear)
    state = filled(separate)
    assert jax.tree.structure(fuse(state)) == jax.tree.structure(filled(fused))
    inputs = {name: wave((2, 3 + i, DIM), i) for i, name in enumerate(other)}
    expected = run(separate, state, wave((2, 3, DIM)), **inputs)
    got = run(fused, fuse(state), wave((2, 3, DIM)), **inputs)
    assert got._fields == ("query", "key", "value")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def test_fused_parameters_are_stacked():
    specs = qkv(FusedQKVLinear).create_parameter_specs_recursively()["qkv_proj"]
    assert isinstance(specs, VDict)
    assert specs["weight"].shape == (3, DIM, HEADS, HEAD)
    assert specs["weight"].mesh_axes == PartitionSpec(None, None, "model", None)
    assert specs["weight"].fan_axes == FanAxes(in_axis=(1,), out_axis=(2, 3), batch_axis=(0,))


def test_fused_grouped_equals_separate(filled, wave):
    separate = qkv(GroupedQKVLinear, num_kv_heads=2)
    fused = qkv(FusedGroupedQKVLinear, num_kv_heads=2)
    assert separate.num_kv_heads == fused.num_kv_heads == 2
    state = filled(separate)
    parts = [state[f"{n}_proj"] for n in "qkv"]
    together = {
        "weight": jnp.concatenate([p["weight"] for p in parts], axis=1),
        "bias": jnp.concatenate([p["bias"] for p in parts], axis=0),
    }
    expected = run(separate, state, wave((2, 3, DIM)))
    got = run(fused, {"qkv_proj": together}, wave((2, 3, DIM)))
    assert got.key.shape == (2, 3, 2, HEAD)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


X = jnp.ones((1, 2, DIM))


@pytest.mark.parametrize(
    "cls, fields, inputs, message",
    [
        (
            QKVLinear,
            {},
            {"kv_state": 1},
            "qkv is a QKVLinear, which projects keys and values itself",
        ),
        (QLinear, {}, {"kv_state": None}, "qkv is a QLinear, which takes keys and values from"),
        (QLinear, {}, {"kv_state": 1, "key": X}, "and neither key nor value"),
        (QLinear, {}, {"kv_state": 1, "value": X}, "and neither key nor value"),
        (FusedGroupedQKVLinear, {"num_kv_heads": 2}, {"key": X}, "use GroupedQKVLinear"),
    ],
)
def test_wrong_arguments(cls, fields, inputs, message, filled):
    layer = qkv(cls, **fields)
    with pytest.raises(ArgumentValueError, match=re.escape(message)):
        run(layer, filled(layer), X, **inputs)


@pytest.mark.parametrize(
    "cls, fields, message",
    [
        (GroupedQKVLinear, {"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        (FusedGroupedQKVLinear, {"num_kv_heads": 3}, "num_heads=4 is not a multiple"),
        (FusedQKVLinear, {"key_dim": 5}, "key_dim=5 and value_dim=8 must be equal"),
        (FusedGroupedQKVLinear, {"num_kv_heads": 2, "key_dim": 5}, "use GroupedQKVLinear"),
    ],
)
def test_invalid_fields(cls, fields, message):
    with pytest.raises(LayerConfigError, match=re.escape(message)):
        qkv(cls, **fields)


@pytest.mark.parametrize("cls", [QKVLinear, FusedGroupedQKVLinear])
def test_outputs_are_sharded(cls, filled):
    n = jax.device_count()
    axis_types = (jax.sharding.AxisType.Auto,)
    spec = PartitionSpec("data", None, None, None)
    fields = {"num_kv_heads": 2, "output_partition_spec": spec}
    if cls is QKVLinear:
        fields = {f"{name}_partition_spec": spec for name in ("query", "key", "value")}
    layer = qkv(cls, **fields)
    state, x = filled(layer), jnp.ones((n, 2, DIM))
    plain = run(layer, state, x)
    with jax.set_mesh(jax.make_mesh((n,), ("data",), axis_types=axis_types)):
        laid_out = jax.jit(lambda x: run(layer, state, x))(x)
    assert laid_out.query.sharding.spec[0] == "data"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), laid_out, plain)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_fused_heads_that_devices_cannot_share():
    layer = qkv(FusedGroupedQKVLinear, num_kv_heads=1)
    said = (
        "qkv is a FusedGroupedQKVLinear with num_heads=4 and twice num_kv_heads=1, 6 heads in all, "
        "which the mesh axis 'model' cannot split into 4 equal parts; use GroupedQKVLinear"
    )
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(LayerConfigError, match=re.escape(said)):
        layer.create_parameter_specs_recursively()
    layer = qkv(FusedGroupedQKVLinear, num_kv_heads=2)
    with jax.set_mesh(mesh):
        specs = layer.create_parameter_specs_recursively()
    assert specs["qkv_proj"]["weight"].partition_spec == PartitionSpec(None, "model", None)
