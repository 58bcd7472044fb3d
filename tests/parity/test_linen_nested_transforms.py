"""Transformations of Linen modules inside of each other: the same on Flax and on Weft."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.keys import draw, quick_key
from tests.parity.linen import same_compiled

XS = draw(2, 2, 2, 2)
RNGS = {"params": quick_key(0), "noise": quick_key(6)}


def step(nn):
    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            self.sow("intermediates", "seen", carry)
            calls = self.variable("counts", "calls", lambda: jnp.zeros((), int))
            if self.is_mutable_collection("counts") and not self.is_initializing():
                calls.value += 1
            carry = jnp.tanh(carry) @ self.param("w", fast_random, carry.shape[-1:] * 2)
            carry += fast_random(self.make_rng("noise"), carry.shape)
            return carry if x is None else carry + x, carry.sum()

    return Step


def fast_random(key, shape):
    """Draws random numbers that compile fast."""
    return jax.random.bits(key, shape) / 2.0**32


def lifted(nn, cls, how, params=0, split=True, noise=True):
    split_rngs = {"params": params is not None and split, "noise": noise}
    axes = {"intermediates": 0, "counts": 0}
    if how == "scan":
        shared = "params" if params is None else False
        axes = axes if params is None else {**axes, "params": params}
        return nn.scan(cls, axes, variable_broadcast=shared, split_rngs=split_rngs, length=2)
    if how == "vmap":
        return nn.vmap(cls, {**axes, "params": params}, split_rngs, in_axes=(0, None))
    if how == "remat":
        return nn.remat(cls, prevent_cse=False)
    return nn.jit(cls)


def nested(transformations):
    """Returns a program; `transformations` are the options of `lifted`, from the inner one."""

    def run(nn):
        cls = step(nn)
        x = XS[0]
        for how, *options in transformations:
            cls = lifted(nn, cls, how, *options)
            x = jnp.stack([x, 2 * x]) if how == "vmap" else x

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return cls()(x, None), cls()(x, None)

        variables = Model().init(RNGS, x)
        kept = {name: v for name, v in variables.items() if name != "intermediates"}
        mutable = ["counts", "intermediates"]
        return Model().apply(kept, x, rngs=RNGS, mutable=mutable), variables

    return run


@pytest.mark.parametrize(
    "nesting",
    [
        ("remat", "scan", "jit"),
        ("remat", "scan", "vmap"),
        ("vmap", "scan"),
        ("scan", "scan", "vmap"),
        ("jit", "remat", "vmap"),
        ("vmap", "vmap", "remat"),
    ],
    ids="-".join,
)
def test_nestings_agree(nesting):
    same_compiled(nested([(how,) for how in nesting]))


options = st.tuples(
    st.sampled_from(["vmap", "scan", "remat", "jit"]),
    st.sampled_from([0, 1, -1, None]),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=8, deadline=None)
@given(st.lists(options, min_size=1, max_size=3))
def test_random_nestings_agree(transformations):
    same_compiled(nested(transformations))
