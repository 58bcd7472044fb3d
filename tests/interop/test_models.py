import jax.numpy as jnp
import pytest

from weft.core.meta import Partitioned
from weft.errors import LayerMethodError, LayerVariablesError, MissingLibraryError
from weft.interop.equinox import EquinoxModel
from weft.interop.haiku import HaikuModel
from weft.interop.models import (
    boxed_like,
    check_same_paths,
    flat,
    library,
    method_of,
    nested,
    one_key,
    parameters_of,
    shown,
    with_mode,
)


def test_a_library_that_is_missing_is_named_with_what_to_install():
    with pytest.raises(MissingLibraryError, match=r"no_such_library .* pip install weft-extra"):
        library("no_such_library", "weft-extra")
    assert library("math", "math").pi > 3


def test_the_key_for_a_layer_that_takes_one():
    keys = {"a": 1, "dropout": 2}
    assert one_key(keys, "default", "dropout") == 2
    assert one_key(keys, "other") == 1
    assert one_key({}, "a") is None


def test_whether_it_is_training_is_said_under_the_names_of_libraries():
    def linen(x, *, deterministic=None, train=False):
        pass

    assert with_mode(linen, {"y": 1}, True) == {"deterministic": False, "train": True, "y": 1}
    assert with_mode(linen, {"train": None}, False) == {"deterministic": True, "train": None}
    assert with_mode(linen, {}, None) == {}
    assert with_mode(lambda x: x, {}, True) == {}
    assert parameters_of(max) == set() or "key" in parameters_of(max)


def test_methods():
    class Layer:
        def encode(self, x):
            return x + 1

    assert method_of(Layer(), "encode", "Layer")(1) == 2
    assert method_of(Layer(), Layer.encode, "Layer")(1) == 2
    assert method_of(lambda x: 2 * x, None, "f")(2) == 4
    with pytest.raises(LayerMethodError, match="Layer has no method 'decode'; there are: encode"):
        method_of(Layer(), "decode", "Layer")
    with pytest.raises(LayerMethodError, match="'__call__'"):
        method_of(Layer(), None, "Layer")


def test_nested_dicts_and_their_paths():
    tree = {"a": {"b": 1, 0: {"c": 2}}, "d": 3}
    assert nested(flat(tree)) == tree
    assert flat(tree)["a", 0, "c"] == 2
    assert shown(("a", 0)) == "a/0"


def test_boxes_are_kept():
    box = Partitioned(1.0, ("x",))
    assert boxed_like(box, 2.0) == box.replace(value=2.0)
    assert boxed_like(1.0, 2.0) == 2.0
    assert boxed_like(box, box) is box


def test_variables_have_to_fit():
    wanted = {("params", "w"): jnp.ones((2, 3))}
    check_same_paths("Net", wanted, {("params", "w"): jnp.zeros((2, 3))})
    with pytest.raises(LayerVariablesError, match=r"Net has .* 'params/w', .* there are: b\."):
        check_same_paths("Net", wanted, {("b",): 1})
    with pytest.raises(LayerVariablesError, match=r"has the shape \(3,\); expected \(2, 3\)"):
        check_same_paths("Net", wanted, {("params", "w"): jnp.ones(3)})


def test_equal_models_are_equal():
    assert HaikuModel(str, 2) == HaikuModel(str, 2)
    assert hash(HaikuModel(str, 2)) == hash(HaikuModel(str, 2))
    assert HaikuModel(str, 2) != HaikuModel(str, 3)
    assert HaikuModel(str, 2) != EquinoxModel(str, 2)
