"""Layers on a mesh of Explicit axes, as `jax.make_mesh` makes: inputs sharded along each axis.

Values and gradients are those on one device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from weft import functional, hierarchy, nnx
from weft import linen as nn
from weft.hierarchy.module import functional as run_method

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8, 8)).astype(np.float32)  # batch, time and features
IMAGES = RNG.normal(size=(4, 8, 8, 4)).astype(np.float32)
IDS = RNG.integers(0, 8, (4, 8))
LABELS = RNG.integers(0, 8, 4)


@dataclasses.dataclass
class Case:
    """Attributes:
    fn: `fn(params, x)` returns an array.
    refused: axes of `x` along which JAX itself refuses the input.
    """

    fn: Callable[[Any, jax.Array], jax.Array]
    params: Any
    x: np.ndarray
    refused: tuple[int, ...] = ()


def of_nnx(make: Callable[[nnx.Rngs], nnx.Module], x: np.ndarray = X, refused=(), **kwargs) -> Case:
    graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)

    def fn(params, x):
        return nnx.merge(graph, params, rest, copy=True)(x, **kwargs)

    return Case(fn, nnx.to_pure_dict(params), x, refused)


def of_linen(module: nn.Module, x: np.ndarray = X, refused=(), **kwargs) -> Case:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = module.init(keys, x, **kwargs)
    params = variables.pop("params", {})

    def fn(params, x):
        return module.apply({"params": params, **variables}, x, mutable=True, rngs=keys, **kwargs)[
            0
        ]

    return Case(fn, params, x, refused)


def of_hierarchy(cls: type, x: np.ndarray = X, refused=(), result=lambda y: y, **fields) -> Case:
    layer = cls.default_config().set(name="layer", **fields).instantiate(parent=None)
    specs = layer.create_parameter_specs_recursively()
    params = jax.tree.map(lambda spec: RNG.normal(size=spec.shape).astype(spec.dtype or "f"), specs)

    def fn(params, x):
        y, _ = run_method(layer, jax.random.key(0), params, (x,), is_training=True)
        return result(y)

    return Case(fn, params, x, refused)


def of_fn(fn: Callable[[jax.Array], jax.Array], x: np.ndarray = X, refused=()) -> Case:
    return Case(lambda params, x: fn(x), {}, x, refused)


TIME, CHANNELS = 1, 3
SIZES = {"query_dim": 8, "key_dim": 8, "value_dim": 8, "num_heads": 2}

CASES = {
    "nnx.Linear": of_nnx(lambda rngs: nnx.Linear(8, 4, rngs=rngs)),
    "nnx.Embed": of_nnx(lambda rngs: nnx.Embed(8, 4, rngs=rngs), IDS),
    "nnx.Conv": of_nnx(lambda rngs: nnx.Conv(4, 8, (3, 3), rngs=rngs), IMAGES, (CHANNELS,)),
    "nnx.BatchNorm": of_nnx(lambda rngs: nnx.BatchNorm(8, rngs=rngs)),
    "nnx.BatchNorm, masked": of_nnx(lambda rngs: nnx.BatchNorm(8, rngs=rngs), mask=X[..., :1] < 1),
    "nnx.LayerNorm": of_nnx(lambda rngs: nnx.LayerNorm(8, rngs=rngs)),
    "nnx.GroupNorm": of_nnx(lambda rngs: nnx.GroupNorm(8, num_groups=2, rngs=rngs)),
    "nnx.MultiHeadAttention": of_nnx(
        lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs), X, (TIME,)
    ),
    "nnx.RNN": of_nnx(lambda rngs: nnx.RNN(nnx.GRUCell(8, 4, rngs=rngs)), X, (TIME,)),
    "nn.Embed": of_linen(nn.Embed(8, 4), IDS),
    "nn.LayerNorm": of_linen(nn.LayerNorm()),
    "nn.RNN": of_linen(nn.RNN(nn.OptimizedLSTMCell(4)), X, (TIME,)),
    "cross_entropy": of_fn(lambda x: functional.cross_entropy(x, jnp.array(IDS))[0]),
    "moments": of_fn(lambda x: functional.moments(x, axis=(0, 1, 2))[1]),
    "Linear": of_hierarchy(hierarchy.Linear, input_dim=8, output_dim=4),
    "Embedding": of_hierarchy(hierarchy.Embedding, IDS, num_embeddings=8, dim=4),
    "BatchNorm": of_hierarchy(hierarchy.BatchNorm, input_dim=8),
    "LayerNorm": of_hierarchy(hierarchy.LayerNorm, input_dim=8),
    "KmeansVectorQuantizer": of_hierarchy(
        hierarchy.KmeansVectorQuantizer,
        codebook_size=3,
        codebook_dim=4,
        num_codebooks=2,
        result=lambda y: y.quantized_vectors,
    ),
    "MultiheadAttention": of_hierarchy(
        hierarchy.MultiheadAttention, X, (TIME,), lambda y: y.data, **SIZES
    ),
}


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])


def value_and_gradients(case: Case, params: Any, x: jax.Array) -> Any:
    def loss(params, x):
        return jnp.sum(jnp.sin(case.fn(params, x)))

    wrt = (0,) if jnp.issubdtype(x.dtype, jnp.integer) else (0, 1)
    return jax.value_and_grad(loss, wrt)(params, x)


SHARDED = [
    (name, axis)
    for name, case in CASES.items()
    for axis in range(case.x.ndim)
    if axis not in case.refused
]


@functools.cache
def results() -> tuple[dict[str, Any], dict[tuple[str, int], Any]]:
    """The results on one device, and those on the mesh, each of one program."""
    alone = jax.jit(
        lambda args: {k: value_and_gradients(CASES[k], *both) for k, both in args.items()}
    )({name: (case.params, case.x) for name, case in CASES.items()})

    def args(name: str, axis: int) -> tuple[Any, jax.Array]:
        replicated = NamedSharding(mesh(), PartitionSpec())
        along = NamedSharding(mesh(), PartitionSpec(*[None] * axis, "d"))
        case = CASES[name]
        return jax.device_put(case.params, replicated), jax.device_put(case.x, along)

    with jax.set_mesh(mesh()):
        on_mesh = jax.jit(
            lambda args: {k: value_and_gradients(CASES[k[0]], *both) for k, both in args.items()}
        )({key: args(*key) for key in SHARDED})
    return jax.device_get((alone, on_mesh))


@pytest.mark.parametrize(("name", "axis"), SHARDED)
def test_values_and_gradients_are_those_on_one_device(name, axis):
    alone, on_mesh = results()
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(assert_close, on_mesh[name, axis], alone[name])


@pytest.mark.parametrize("norm", [nnx.BatchNorm, nnx.LayerNorm])
@pytest.mark.parametrize("axis", range(3))
def test_norms_without_jit(norm, axis):
    x = 100 + X  # far from 0, where the variance needs a shift
    along = NamedSharding(mesh(), PartitionSpec(*[None] * axis, "d"))
    expected = norm(8, rngs=nnx.Rngs(0))(jnp.array(x))
    found = norm(8, rngs=nnx.Rngs(0))(jax.device_put(x, along))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
