import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import VariableStatError
from weft.trainer.variable_stats import variable_stat

X = np.array([[3.0, -4.0], [0.0, 0.0]], np.float32)


@pytest.mark.parametrize(("name", "value"), [("rms", 2.5), ("norm", 5.0), ("max_abs", 4.0)])
def test_numbers(name, value):
    np.testing.assert_allclose(variable_stat(name)(jnp.asarray(X)), value)
    assert variable_stat(name)(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.float32


def test_a_histogram_is_of_a_bounded_number_of_values():
    np.testing.assert_array_equal(variable_stat("histogram")(jnp.asarray(X)), X.reshape(-1))
    values = variable_stat("histogram")(jnp.arange(10_000.0))
    assert 512 <= values.size <= 1024
    assert len(set(np.diff(values))) == 1


def test_a_statistic_that_is_not_known_is_named():
    with pytest.raises(VariableStatError, match=r"names 'norms', which is not a statistic.*'?norm"):
        variable_stat("norms")
