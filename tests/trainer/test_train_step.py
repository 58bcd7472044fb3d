import jax.numpy as jnp
import numpy as np

from weft.hierarchy.parameter_spec import FactorizationSpec, ParameterSpec
from weft.trainer.model import cast_floats
from weft.trainer.train_step import keep_state_uncast, opt_params


def test_opt_params_carry_spec_fields():
    factors = FactorizationSpec(("row", "col"))
    specs = {"a": {"w": ParameterSpec((2, 2), factorization=factors, weight_decay_scale=0.5)}}
    made = opt_params({"a": {"w": jnp.ones((2, 2))}}, specs)["a"]["w"]
    np.testing.assert_array_equal(made.value, np.ones((2, 2)))
    assert made.factorization_spec == factors
    assert made.weight_decay_scale == 0.5


def test_state_keeps_its_dtype():
    specs = {"w": ParameterSpec((1,)), "mean": ParameterSpec((1,), is_state=True)}
    params = {"w": jnp.ones(1), "mean": jnp.ones(1)}
    mixed = keep_state_uncast(params, cast_floats(params, jnp.bfloat16), specs)
    assert (mixed["w"].dtype, mixed["mean"].dtype) == (jnp.bfloat16, jnp.float32)
