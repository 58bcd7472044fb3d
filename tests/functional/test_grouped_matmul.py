"""Products of groups of rows, against a loop over the groups and `jax.lax.ragged_dot`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.functional import grouped_matmul

RNG = np.random.default_rng(0)


def operands(num_rows, num_groups, inputs=3, outputs=5, dtype=jnp.float32):
    rows = jnp.asarray(RNG.normal(size=(num_rows, inputs)), dtype)
    weights = jnp.asarray(RNG.normal(size=(num_groups, inputs, outputs)), dtype)
    return rows, weights


def by_loop(rows, weights, sizes):
    results = np.zeros((len(rows), weights.shape[-1]), np.float32)
    start = 0
    for size, weight in zip(sizes, np.asarray(weights, np.float32), strict=True):
        results[start : start + size] = np.asarray(rows, np.float32)[start : start + size] @ weight
        start += size
    return results


@pytest.mark.parametrize(
    "sizes",
    [[1], [7], [0, 3, 0, 4], [300, 0, 129, 128], [1, 700, 0], [0, 0, 5]],
    ids=str,
)
@pytest.mark.parametrize("num_others", [0, 200])
def test_equals_a_loop_over_groups(sizes, num_others):
    rows, weights = operands(sum(sizes) + num_others, len(sizes))
    results = jax.jit(grouped_matmul)(rows, weights, jnp.array(sizes))
    np.testing.assert_allclose(results, by_loop(rows, weights, sizes), atol=1e-5)


@pytest.mark.parametrize("sizes", [[3, 0, 200], [130, 126, 0]], ids=str)
def test_gradients_are_those_of_ragged_dot(sizes):
    rows, weights = operands(sum(sizes) + 9, len(sizes))
    group_sizes = jnp.array(sizes)

    def gradients(product):
        def loss(rows, weights):
            return jnp.sum(jnp.sin(product(rows, weights, group_sizes)))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(rows, weights)

    for found, expected in zip(
        gradients(grouped_matmul), gradients(jax.lax.ragged_dot), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_rows_of_no_group_leave_gradients_finite():
    rows, weights = operands(6, 2)
    rows = rows.at[4:].set(jnp.nan)

    def loss(weights):
        return jnp.sum(grouped_matmul(rows, weights, jnp.array([1, 3]))[:4])

    assert np.isfinite(jax.grad(loss)(weights)).all()


def test_dtypes():
    rows, weights = operands(10, 2, dtype=jnp.bfloat16)
    sizes = jnp.array([4, 6])
    assert grouped_matmul(rows, weights, sizes).dtype == jnp.bfloat16
    results = grouped_matmul(rows, weights, sizes, preferred_element_type=jnp.float32)
    assert results.dtype == jnp.float32
    np.testing.assert_allclose(results, by_loop(rows, weights, [4, 6]), rtol=1e-2, atol=1e-2)


def test_vmap():
    rows, weights = operands(8, 2)
    sizes = jnp.array([[3, 5], [8, 0]])
    results = jax.vmap(grouped_matmul, in_axes=(None, None, 0))(rows, weights, sizes)
    for result, group_sizes in zip(results, sizes, strict=True):
        np.testing.assert_allclose(result, by_loop(rows, weights, group_sizes), atol=1e-5)


def test_accelerators_get_ragged_dot():
    rows, weights = operands(8, 2)
    exported = jax.export.export(jax.jit(grouped_matmul), platforms=["tpu"])(
        rows, weights, jnp.array([3, 5])
    )
    assert "ragged_dot" in exported.mlir_module() and "while" not in exported.mlir_module()
