import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GradientStructureError
from weft.nnx.gradients import gradients_like

PARAMETERS = {("a", 0): nnx.Param(jnp.ones(2)), ("b",): nnx.Param(None), ("c",): jnp.ones(3)}


def test_gradients_take_the_form_of_the_parameters():
    given = {"c": nnx.Param(jnp.zeros(3)), "a": [jnp.zeros(2)], "n": nnx.BatchStat(1.0), "x": 2}
    made = gradients_like(PARAMETERS, given, nnx.Param)
    assert nnx.to_flat_state(made).paths == (("a", 0), ("b",), ("c",)) and made["b"] is None
    assert made["c"].shape == (3,) and made["a"][0].shape == (2,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"no gradient for 'a/0', .* filter Param selects; .*argnums=nnx.DiffState\(0, Param"),
        ({"a": [1.0, 2.0]}, r"no gradient for 'c'"),
        ({"a": [jnp.ones(1)]}, r"'a/0' has shape \(1,\), and the parameter \(2,\); give the grad"),
        ({"a": [1.0], "c": 1.0, "d": nnx.Param(1)}, r"gradient for 'd', but no parameter there"),
    ],
    ids=["none", "one missing", "shape", "extra"],
)
def test_gradients_that_do_not_fit(given, message):
    with pytest.raises(GradientStructureError, match=message):
        gradients_like(PARAMETERS, given, nnx.Param)
