"""States with weights in int8."""

import jax.numpy as jnp
import numpy as np

from tests.hierarchy.test_stored_weight import DIM, initial, stack
from weft.hierarchy.int8_weights import with_int8_weights
from weft.hierarchy.module import functional


def test_stack_has_a_weight_in_int8_for_each_layer():
    cfg = stack()
    layer = cfg.instantiate(parent=None)
    state = initial(cfg)
    int8_state = with_int8_weights(layer, state)
    linear = int8_state["repeat"]["layer"]["feed_forward"]["linear2"]["weight"]
    assert linear.codes.shape == (2, 32, DIM)
    assert linear.scales.shape == (2, DIM)
    assert jnp.abs(linear.codes).max(axis=1).min() == 127
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, DIM)), jnp.float32)
    expected, outputs = (
        functional(layer, None, each, (x,), is_training=False)[0].data
        for each in (state, int8_state)
    )
    np.testing.assert_allclose(outputs, expected, atol=0.1)
    assert not np.array_equal(outputs, expected)
