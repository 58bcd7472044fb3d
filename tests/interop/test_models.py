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
from weft.core.meta import Partitioned
from weft.errors import (
    LayerMethodError,
    LayerVariablesError,
    MissingLibraryError,
    UnknownLayerError,
)
from weft.interop import Model, model_of
from weft.interop.equinox_haiku import EquinoxModel, HaikuModel
from weft.interop.models import (
    adapter_of,
    add_mode,
    check_variables,
    import_library,
    parameter_names,
    rebox,
    resolve_method,
    single_key,
)
from weft.nnx import bridge


def test_missing_library_names_the_extra():
    with pytest.raises(MissingLibraryError, match=r"no_such_library .* pip install weft-extra"):
        import_library("no_such_library", "weft-extra")
    assert import_library("math", "math").pi > 3


def test_key_argument_of_a_layer():
    keys = {"a": 1, "dropout": 2}
    assert single_key(keys, "default", "dropout") == 2
    assert single_key(keys, "other") == 1
    assert single_key({}, "a") is None


def test_training_mode_argument_names():
    def linen(x, *, deterministic=None, train=False):
        pass

    assert add_mode(linen, {"y": 1}, True) == {"deterministic": False, "train": True, "y": 1}
    assert add_mode(linen, {"train": None}, False) == {"deterministic": True, "train": None}
    assert add_mode(linen, {}, None) == {}
    assert add_mode(lambda x: x, {}, True) == {}
    assert parameter_names(max) == set() or "key" in parameter_names(max)


def test_methods():
    class Layer:
        def encode(self, x):
            return x + 1

    assert resolve_method(Layer(), "encode", "Layer")(1) == 2
    assert resolve_method(Layer(), Layer.encode, "Layer")(1) == 2
    assert resolve_method(lambda x: 2 * x, None, "f")(2) == 4
    with pytest.raises(LayerMethodError, match="Layer has no method 'decode'; there are: encode"):
        resolve_method(Layer(), "decode", "Layer")
    with pytest.raises(LayerMethodError, match="'__call__'"):
        resolve_method(Layer(), None, "Layer")


def test_boxes_are_kept():
    box = Partitioned(1.0, ("x",))
    assert rebox(box, 2.0) == box.replace(value=2.0)
    assert rebox(1.0, 2.0) == 2.0
    assert rebox(box, box) is box


def test_variables_must_match():
    wanted = {("params", "w"): jnp.ones((2, 3))}
    check_variables("Net", wanted, {("params", "w"): jnp.zeros((2, 3))})
    with pytest.raises(LayerVariablesError, match=r"Net has .* 'params/w', .* there are: b\."):
        check_variables("Net", wanted, {("b",): 1})
    with pytest.raises(LayerVariablesError, match=r"has the shape \(3,\); expected \(2, 3\)"):
        check_variables("Net", wanted, {("params", "w"): jnp.ones(3)})


def test_equal_models_are_equal():
    assert HaikuModel(str, 2) == HaikuModel(str, 2)
    assert hash(HaikuModel(str, 2)) == hash(HaikuModel(str, 2))
    assert HaikuModel(str, 2) != HaikuModel(str, 3)
    assert HaikuModel(str, 2) != EquinoxModel(str, 2)


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE)
def test_every_library_has_its_adapter(make):
    model = model_of(*make())
    assert isinstance(model, Model)
    assert model_of(model) is model
    assert model.name in repr(model)
    assert model == model_of(*make()) or not isinstance(make()[0], type)


def test_library_is_detected_from_the_base_class():
    assert "linen:LinenModel" in adapter_of(bridge.to_linen(nnx.Linear, 3, 2))
    assert "nnx:NNXModel" in adapter_of(bridge.ToNNX(linen.Dense(2)))
    assert "FlaxLinenModel" in adapter_of(flax.nnx.bridge.to_linen(flax.nnx.Linear, 3, 2))
    assert "FlaxNNXModel" in adapter_of(flax.nnx.Linear)
    assert "Equinox" in adapter_of(equinox.nn.make_with_state(equinox.nn.Dropout)(0.5))
    assert "Haiku" in adapter_of(haiku.Linear)
    assert adapter_of((1, 2)) == adapter_of(object) == ""


def test_non_layers_are_rejected():
    with pytest.raises(UnknownLayerError, match=r"3 is not a layer of .*weft.interop.Model"):
        model_of(3)
    with pytest.raises(
        UnknownLayerError, match=r"is not a class, but was given the arguments \(2,\)"
    ):
        model_of(linen.Dense(2), 2)


def test_custom_model_class():
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
def test_missing_rngs_of_a_config_are_passed(config):
    model = model_of(config)
    variables = model.init({"default": KEY}, X)
    again = model.init({"default": jax.random.key(5)}, X)
    assert not jnp.array_equal(*(jax.tree.leaves(v)[1] for v in (variables, again)))
    y, _ = model.apply(variables, X, rngs={}, mutable=False)
    assert y.shape[0] == X.shape[0]
    assert model.name in ("Doubles", "make_linear")
    assert not model.has_method("predict")


def test_methods_are_known_before_instantiation():
    assert model_of(config_for_class(Doubles).set(inner=None)).has_method("__call__")
    assert model_of(config_for_class(linen.Dense).set(features=2)).has_method("init")
