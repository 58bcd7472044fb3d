import jax.numpy as jnp
import pytest

from weft.config import config_for_function
from weft.hierarchy.decoder import log_probs_from_logits
from weft.hierarchy.logit_modifiers import chain, scale_by, top_k_logits, top_p_logits

LOGITS = jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]]))


@pytest.mark.parametrize(
    "modifier, expected",
    [
        (None, [0.1, 0.4, 0.3, 0.2]),
        (scale_by(0.5), [0.01 / 0.3, 0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3]),
        (top_k_logits(2), [0, 4 / 7, 3 / 7, 0]),
        (top_p_logits(0.6), [0, 4 / 7, 3 / 7, 0]),
        (chain(scale_by(0.5), top_k_logits(2)), [0, 16 / 25, 9 / 25, 0]),
        (config_for_function(top_k_logits).set(k=1), [0, 1, 0, 0]),
    ],
)
def test_modifiers_and_their_configs_change_the_distribution(modifier, expected):
    probs = jnp.exp(log_probs_from_logits(LOGITS, modifier))
    assert probs[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_log_probs_are_computed_in_float32():
    assert log_probs_from_logits(LOGITS.astype(jnp.bfloat16)).dtype == jnp.float32
