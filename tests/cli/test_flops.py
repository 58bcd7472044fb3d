"""Counting floating-point operations, against products worked out by hand."""

import jax
import jax.numpy as jnp

from weft.cli.flops import count_flops


def test_a_batched_product_counts_each_row():
    x, w = jnp.zeros((4, 2, 3)), jnp.zeros((4, 3, 5))
    assert count_flops(lambda x, w: jnp.einsum("bij,bjk->bik", x, w), x, w) == 2 * 4 * 2 * 3 * 5


def test_a_scan_counts_its_body_for_each_iteration():
    w = jnp.zeros((7, 3, 3))

    def stack(x, w):
        return jax.lax.scan(lambda x, w: (jnp.dot(x, w), None), x, w)[0]

    assert count_flops(stack, jnp.zeros((2, 3)), w) == 7 * (2 * 2 * 3 * 3)


def test_jit_remat_and_gradients_are_looked_into():
    def loss(w, x):
        return jnp.sum(jax.checkpoint(jax.jit(jnp.dot))(x, w))

    w, x = jnp.zeros((3, 5)), jnp.zeros((2, 3))
    forward = count_flops(loss, w, x)
    assert forward == 60
    assert count_flops(jax.grad(loss), w, x) >= forward


def test_the_costliest_branch_of_a_cond_counts():
    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x @ x, x)

    assert count_flops(branch, jnp.zeros((3, 3))) == 2 * (2 * 27)


def test_a_convolution_counts_its_window():
    x, kernel = jnp.zeros((1, 8, 8, 3)), jnp.zeros((2, 2, 3, 5))
    conv = jax.lax.conv_general_dilated
    numbers = ("NHWC", "HWIO", "NHWC")
    count = count_flops(
        lambda x, k: conv(x, k, (1, 1), "SAME", dimension_numbers=numbers), x, kernel
    )
    assert count == 2 * (8 * 8 * 5) * (2 * 2 * 3)
