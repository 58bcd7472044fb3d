import jax
import jax.numpy as jnp
import pytest

from tests.keys import quick_key
from weft.errors import AxisMetadataError, ModuleError
from weft.linen import partitioning
from weft.linen.methods import compact
from weft.linen.module import Module

KEY = quick_key(0)
X = jnp.ones((2, 3))
ones = jax.nn.initializers.ones


class Layer(Module):
    axes: tuple | None = ("embed", "mlp")

    @compact
    def __call__(self, x, twice=False):
        kernel = partitioning.param_with_axes("kernel", ones, (x.shape[-1], 3), axes=self.axes)
        return (2 if twice else 1) * x @ kernel


def test_errors():
    variables = Layer().init(KEY, X)
    with pytest.raises(
        AxisMetadataError, match=r"'kernel' of the outermost module was given axes="
    ):
        Layer(("a", "b")).apply(variables, X, mutable="params_axes")
    with pytest.raises(AxisMetadataError, match="a/b_axes is 3; expected AxisMetadata"):
        partitioning.get_axis_names({"a": {"b_axes": 3}})
    with pytest.raises(ModuleError, match="'kernel' was created where no module's method runs"):
        partitioning.param_with_axes("kernel", ones, (2, 3), axes=("a", "b"))


@pytest.mark.parametrize("axes", ["ab", {"a", "b"}, 5, {"u": "ab"}])
def test_invalid_axes_are_rejected(axes):
    class Model(Module):
        @compact
        def __call__(self):
            partitioning.param_with_axes("w", ones, (3, 4), axes=axes)

    with pytest.raises(AxisMetadataError, match=r"of 'w': names is .*; expected a sequence"):
        Model().init(KEY)
