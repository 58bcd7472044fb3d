"""Counting floating-point operations, against products worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

from weft.trainer.flops import count_flops

W, X = jnp.zeros((3, 5)), jnp.zeros((2, 3))


def test_a_batched_product_counts_each_row():
    x, w = jnp.zeros((4, 2, 3)), jnp.zeros((4, 3, 5))
    counted = count_flops(lambda w, x: jnp.einsum("bij,bjk->bik", x, w), w, x)
    assert counted == {"": 2 * 4 * 2 * 3 * 5}


def test_a_scan_counts_its_body_for_each_iteration():
    def stack(w, x):
        return jax.lax.scan(lambda x, w: (jnp.dot(x, w["a"]), None), x, w)[0]

    assert count_flops(stack, {"a": jnp.zeros((7, 3, 3))}, X) == {"a": 7 * (2 * 2 * 3 * 3)}


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, lambda f: jax.vmap(f, (None, 0))])
def test_transformations_are_looked_into(transform):
    x = X[None] if transform not in (jax.jit, jax.checkpoint) else X
    assert count_flops(transform(lambda w, x: x @ w), W, x) == {"": 60}


def test_a_gradient_counts_the_products_of_both_directions():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    assert count_flops(jax.grad(loss), W, X).total() == 2 * 60
    assert count_flops(jax.grad(loss, argnums=(0, 1)), W, X).total() == 3 * 60


def test_a_weight_is_followed_through_casts_turns_and_slices():
    def fn(w, x):
        a = jax.jit(lambda w: w["a"].astype(jnp.bfloat16).T)(w)
        return (2 * x.astype(jnp.bfloat16) @ a) @ w["b"][:, :4].astype(jnp.bfloat16)

    weights = {"a": jnp.zeros((5, 3)), "b": jnp.zeros((5, 9))}
    assert count_flops(fn, weights, X) == {"a": 60, "b": 2 * 2 * 5 * 4}


def test_products_of_what_is_computed_belong_to_no_weight():
    def attention(w, x):
        return (x @ w) @ (x @ w).T

    assert count_flops(attention, W, X) == {"": 2 * 60, None: 2 * 2 * 2 * 5}


def test_the_costliest_branch_of_a_cond_counts():
    def branch(w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: (x @ w) @ w, x)

    assert count_flops(branch, jnp.zeros((3, 3)), X) == {"": 2 * (2 * 2 * 9)}


def test_the_body_of_a_while_loop_counts_once():
    def loop(w, x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)

    assert count_flops(loop, jnp.zeros((3, 3)), X).total() == 2 * 2 * 9


def test_a_convolution_counts_its_window():
    x, kernel = jnp.zeros((1, 8, 8, 3)), jnp.zeros((2, 2, 3, 5))

    def conv(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    assert count_flops(conv, kernel, x) == {"": 2 * (8 * 8 * 5) * (2 * 2 * 3)}
