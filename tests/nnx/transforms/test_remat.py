"""remat of functions of objects: the same numbers and the same state, computed twice."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import TransformArgumentError


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.arange(3.0))
        self.calls = nnx.BatchStat(jnp.array(0))

    @nnx.remat(static_argnums=2)
    def __call__(self, x: jax.Array, power: int = 1, *, scale: float = 1.0) -> jax.Array:
        self.calls[...] += 1
        return jnp.sin(self.w * x * scale) ** power


def test_values_gradients_and_state_are_those_without():
    layer = Layer()
    loss, grads = nnx.value_and_grad(lambda m: m(2.0, 2, scale=0.5).sum())(layer)
    w = jnp.arange(3.0)
    assert jnp.allclose(loss, (jnp.sin(w) ** 2).sum())
    assert jnp.allclose(grads.w[...], 2 * jnp.sin(w) * jnp.cos(w))
    assert int(layer.calls) == 1


def test_what_is_computed_is_computed_again_in_the_backward_pass():
    def twice(m: Layer, x: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sin(m.w * x)).sum()

    def count(f: Callable[..., Any]) -> int:
        graphdef, state = nnx.split(Layer())
        both = lambda s: nnx.value_and_grad(f)(nnx.merge(graphdef, s), 2.0)  # noqa: E731
        return str(jax.make_jaxpr(both)(state)).count(" sin ")

    assert count(nnx.remat(twice)) > count(twice) == 2


def test_a_policy_says_what_is_kept():
    keep = jax.checkpoint_policies.everything_saveable
    f = nnx.remat(lambda m, x: jnp.sin(m.w * x).sum(), policy=keep, prevent_cse=False)
    assert jnp.allclose(nnx.grad(f)(Layer(), 0.0).w[...], 0.0)


def test_a_method_of_one_object_is_refused():
    with pytest.raises(TransformArgumentError, match=r"method of a Layer.*write @nnx.remat above"):
        nnx.remat(Layer().__call__)
