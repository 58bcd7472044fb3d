import equinox
import flax.linen
import flax.nnx
import haiku
import jax
import jax.numpy as jnp
import pytest

from tests.interop.layers import DENSE, KEY, X
from weft import linen, nnx
from weft.config import config_for_class, config_for_function
from weft.errors import UnknownLayerError
from weft.interop import Model, model_of
from weft.interop.recognition import adapter_of
from weft.nnx import bridge


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE)
def test_every_library_has_its_adapter(make):
    model = model_of(*make())
    assert isinstance(model, Model)
    assert model_of(model) is model
    assert model.name in repr(model)
    assert model == model_of(*make()) or not isinstance(make()[0], type)


def test_the_root_of_the_classes_says_which_library_it_is():
    assert "linen:LinenModel" in adapter_of(bridge.to_linen(nnx.Linear, 3, 2))
    assert "nnx:NNXModel" in adapter_of(bridge.ToNNX(linen.Dense(2)))
    assert "FlaxLinenModel" in adapter_of(flax.nnx.bridge.to_linen(flax.nnx.Linear, 3, 2))
    assert "FlaxNNXModel" in adapter_of(flax.nnx.Linear)
    assert "Equinox" in adapter_of(equinox.nn.make_with_state(equinox.nn.Dropout)(0.5))
    assert "Haiku" in adapter_of(haiku.Linear)
    assert adapter_of((1, 2)) == adapter_of(object) == ""


def test_what_is_no_layer_is_refused():
    with pytest.raises(UnknownLayerError, match=r"3 is not a layer of .*weft.interop.Model"):
        model_of(3)
    with pytest.raises(
        UnknownLayerError, match=r"is not a class, but was given the arguments \(2,\)"
    ):
        model_of(linen.Dense(2), 2)


def test_a_library_of_ones_own_has_a_model_of_its_own():
    class Affine(Model):
        def init(self, rngs, *args, training=None, method=None, **kwargs):
            return {"params": {"offset": 0 * X[0]}}

        def apply(self, variables, *args, rngs, mutable, training=None, method=None, **kwargs):
            return args[0] + variables["params"]["offset"][None], {}

    from weft.interop import as_hierarchy, as_linen, as_nnx

    assert as_linen(Affine()).init_with_output({}, X)[0].shape == X.shape
    assert as_nnx(Affine()).lazy_init(X)(X).shape == X.shape
    cfg = as_hierarchy(Affine(), inputs=X)
    layer = cfg.set(name="a").instantiate(parent=None)
    assert layer.create_parameter_specs_recursively()["params"]["offset"].shape == (3,)


class Doubles(nnx.Module):
    def __init__(self, inner, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.inner = inner

    def __call__(self, x):
        return 2 * self.linear(x)


def make_linear(features: int, rngs: nnx.Rngs | None = None):
    return nnx.Linear(3, features, rngs=rngs)


@pytest.mark.parametrize(
    "config",
    [
        config_for_class(Doubles).set(inner=None),
        config_for_function(make_linear).set(features=2),
    ],
    ids=["class", "function"],
)
def test_a_config_that_lacks_only_its_streams_is_given_them(config):
    model = model_of(config)
    variables = model.init({"default": KEY}, X)
    again = model.init({"default": jax.random.key(5)}, X)
    assert not jnp.array_equal(*(jax.tree.leaves(v)[1] for v in (variables, again)))
    y, _ = model.apply(variables, X, rngs={}, mutable=False)
    assert y.shape[0] == X.shape[0]
    assert model.name in ("Doubles", "make_linear")
    assert not model.has_method("predict")


def test_methods_are_known_before_a_module_is_made():
    assert model_of(config_for_class(Doubles).set(inner=None)).has_method("__call__")
    assert model_of(config_for_class(linen.Dense).set(features=2)).has_method("init")
