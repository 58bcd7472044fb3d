import jax.numpy as jnp
import numpy as np
import pytest

from weft.hierarchy.module import functional
from weft.hierarchy.tensor_stats import (
    CompositeTensorStats,
    DefaultTensorStats,
    TensorMaxAbs,
    TensorRMSNorm,
    TensorStats,
)

VALUE = jnp.array([3.0, -4.0])


def summaries(cfg):
    stats = cfg.set(name="stats").instantiate(parent=None)
    return functional(stats, None, {}, ("x", VALUE), method="add_stats", is_training=True)[
        1
    ].summaries


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (TensorStats, {}),
        (TensorRMSNorm, {"rms_norm": np.sqrt(12.5)}),
        (TensorMaxAbs, {"max_abs": 4.0}),
        (DefaultTensorStats, {"rms_norm": np.sqrt(12.5), "max_abs": 4.0}),
    ],
)
def test_statistics(cls, expected):
    got = summaries(cls.default_config())
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6)


def test_summaries_stand_under_the_names_of_their_statistics():
    got = summaries(
        CompositeTensorStats.default_config().set(
            tensor_stats={"a": TensorMaxAbs.default_config(), "b": TensorMaxAbs.default_config()}
        )
    )
    assert set(got) == {"a", "b"}
