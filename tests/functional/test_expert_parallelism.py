"""Experts on eight virtual devices that exchange tokens: equal to all experts on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from weft.functional.expert_parallelism import dispatch_and_combine

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
TOKENS, DIM, K, EXPERTS = 64, 4, 2, 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(TOKENS, DIM)).astype("f")
GATES = RNG.uniform(size=(TOKENS, K)).astype("f")
WEIGHTS = RNG.normal(size=(EXPERTS, DIM, DIM)).astype("f")
CHOICES = {
    "even": np.arange(TOKENS * K) % EXPERTS,
    "random": RNG.integers(0, EXPERTS, TOKENS * K),
    "one expert": np.full(TOKENS * K, 5),
    "one device": RNG.integers(6, 8, TOKENS * K),
    "some masked": np.where(RNG.random(TOKENS * K) < 0.5, EXPERTS, 5),
    "all masked": np.full(TOKENS * K, EXPERTS),
}


def apply(rows, experts, gates, weights):
    """Applies each row's expert; what is padding has no expert, and arbitrary results."""
    chosen = weights[experts]
    return gates[:, None] * jnp.tanh(jnp.einsum("nd,ndi->ni", rows, chosen))


def on_one_device(experts, x, gates, weights):
    rows = jnp.repeat(x, K, axis=0)
    results = apply(rows, experts.ravel(), gates.ravel(), weights)
    results = jnp.where(experts.ravel()[:, None] < EXPERTS, results, 0)
    return results.reshape(TOKENS, K, DIM).sum(1)


def exchanged(mesh, experts, x, gates, weights):
    names = mesh.axis_names
    of_tokens = PartitionSpec(names)
    fn = functools.partial(
        dispatch_and_combine,
        apply,
        num_experts=EXPERTS // mesh.shape["expert"],
        axis_names=("expert",),
        token_axis_names=names,
    )
    on_devices = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(of_tokens, of_tokens, of_tokens, PartitionSpec("expert")),
        out_specs=of_tokens,
        check_vma=False,
    )
    return on_devices(x, experts, gates, weights)


def value_and_gradients(fn, experts, dtype="f"):
    def loss(x, gates, weights):
        y = fn(experts, x, gates, weights)
        return jnp.sum(jnp.sin(y.astype("f"))), y

    arrays = [jnp.asarray(x, dtype) for x in (X, GATES, WEIGHTS)]
    (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    return [y, *gradients]


def mesh_of(**sizes):
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("sizes", [{"expert": 8}, {"data": 2, "expert": 4}], ids=str)
def test_equals_one_device(sizes, choices):
    experts = jnp.asarray(CHOICES[choices].reshape(TOKENS, K), jnp.int32)
    results = value_and_gradients(functools.partial(exchanged, mesh_of(**sizes)), experts)
    expected = value_and_gradients(on_one_device, experts)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
