import jax.numpy as jnp
import numpy as np
import pytest

from weft.functional import over_batch_axes


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0, 3), (1, 2, 3)])
def test_a_function_of_one_batch_axis_sees_one(batch):
    seen = []

    def fn(x):
        seen.append(x.shape)
        return 2 * x[:, :, 0]

    x = jnp.arange(20 * np.prod(batch, dtype=int)).reshape(*batch, 4, 5)
    np.testing.assert_array_equal(over_batch_axes(fn, x, 2), 2 * x[..., 0])
    assert seen == [(int(np.prod(batch)), 4, 5)]
