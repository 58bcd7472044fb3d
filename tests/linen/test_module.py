import copy
import dataclasses
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope

from tests.linen.modules import KEY, Affine, Counter, X
from weft.errors import (
    ApplyModuleInvalidMethodError,
    CallUnbindOnUnboundModuleError,
    DescriptorAttributeError,
    IncorrectPostInitOverrideError,
    InvalidInstanceModuleError,
    InvalidParentModuleError,
    InvalidScopeError,
    ModuleAttributeError,
    ReservedModuleAttributeError,
    SetAttributeFrozenModuleError,
    SetAttributeInModuleSetupError,
)
from weft.linen.methods import compact
from weft.linen.module import Module


class Model(Module):
    features: int = 3

    def setup(self):
        self.first = Affine(self.features)
        self.rest = [Affine(), Counter()]

    def encode(self, x):
        return self.first(x)

    def __call__(self, x):
        return self.rest[1](self.rest[0](self.encode(x)))


# Classes and fields.


def test_modules_are_values():
    assert Affine(3) == Affine(features=3) != Affine(4)
    assert hash(Affine(3)) == hash(Affine(3))
    assert Model(3) != Affine(3)
    assert {Affine(3): 1}[Affine(3)] == 1
    with pytest.raises(
        TypeError, match=r"sizes = \[1\](.|\n)*has no hash.*unhashable type: 'list'"
    ):
        dataclass_hash = type("Sized", (Module,), {"__annotations__": {"sizes": list}})([1])
        hash(dataclass_hash)


def test_parent_and_name_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        Affine(3, 1.0, None, "name")
    assert Affine(3, parent=None, name="n").name == "n"


@pytest.mark.parametrize("name", ["parent", "name"])
def test_reserved_fields(name):
    with pytest.raises(ReservedModuleAttributeError, match=rf"declares.*{name}.*redeclared"):
        type("Model", (Module,), {"__annotations__": {name: int}})


def test_invalid_parent():
    with pytest.raises(InvalidParentModuleError, match="given parent='x'; expected a module"):
        Affine(parent="x")


def test_post_init():
    class Wrong(Module):
        def __post_init__(self):
            pass

    class Right(Module):
        features: int
        double: int = dataclasses.field(init=False, default=0)

        def __post_init__(self):
            self.double = 2 * self.features
            super().__post_init__()

        def __call__(self):
            return self.double

    with pytest.raises(IncorrectPostInitOverrideError, match=r"of Wrong does not call super\(\)"):
        Wrong().init(KEY)
    assert Right(3).apply({}) == 6


# Attributes.


def test_missing_attributes():
    with pytest.raises(ModuleAttributeError, match=r"Model has no attribute 'first'.*`setup`"):
        _ = Model().first
    with pytest.raises(ModuleAttributeError, match="did you mean 'features'"):
        _ = Model().feature
    with pytest.raises(ModuleAttributeError, match=r"Affine \(the outermost module\) has no attri"):
        Affine().bind({}).missing  # noqa: B018
    assert getattr(Model(), "first", None) is None and not hasattr(Model(), "__len__")
    with pytest.raises(ModuleAttributeError, match="'__call__': define it"):
        type("Empty", (Module,), {})().init(KEY)


def test_property_reading_missing_attribute():
    class Model(Module):
        @property
        def width(self):
            return self.missing

        def __call__(self):
            return self.width

    with pytest.raises(DescriptorAttributeError, match=r"property 'width' of Model \(the outer"):
        Model().init(KEY)


def test_attributes_are_set_in_setup_only():
    class Wrong(Module):
        features: int = 2

        def setup(self):
            self.features = 3

        def __call__(self):
            pass

    with pytest.raises(SetAttributeInModuleSetupError, match=r"of Wrong.*'features'.*rename"):
        Wrong().init(KEY)
    bound = Affine().bind({})
    with pytest.raises(SetAttributeFrozenModuleError, match=r"seen = Array.{,40} was set on"):
        bound.seen = jnp.zeros(1000)
    with pytest.raises(SetAttributeFrozenModuleError, match=r"deleted.*self.variable\('state'"):
        del bound.features
    free = Affine()
    free.features = 5
    assert free.features == 5
    del free.features
    assert "features" not in vars(free)


# Copies.


def test_pickles_and_deep_copies():
    variables = Model().init(KEY, X)
    for again in (
        pickle.loads(pickle.dumps(Model(4))),
        copy.deepcopy(Model(4)),
        copy.copy(Model(4)),
    ):
        assert again == Model(4)
        assert again.init(KEY, X)["params"]["first"]["kernel"].shape == (2, 4)
    bound = copy.deepcopy(Model().bind(variables))
    np.testing.assert_array_equal(bound.encode(X), Model().apply(variables, X, method="encode"))


def test_classes_of_a_function_are_pickled_by_cloudpickle():
    class Local(Module):
        features: int = 2

        @compact
        def __call__(self, x):
            return Affine(self.features)(x)

    again = pickle.loads(cloudpickle.dumps(Local(5)))
    assert again.init(KEY, X)["params"]["Affine_0"]["kernel"].shape == (2, 5)


# The ways in and out.


@pytest.mark.parametrize("method", [3, "features", lambda: 3])
def test_invalid_methods(method):
    with pytest.raises(ApplyModuleInvalidMethodError, match=r"method=.*cannot be called.*its name"):
        Affine().apply({}, X, method=method)


@pytest.mark.parametrize("method", ["init", "init_with_output", "apply", "bind", "lazy_init"])
def test_class_in_place_of_a_module(method):
    with pytest.raises(InvalidInstanceModuleError, match=rf"{method} was called on the class"):
        getattr(Affine, method)(KEY, X)


def test_bind_and_unbind():
    variables = Model().init(KEY, X)
    bound = Model().bind(variables, mutable=["state"])
    bound(X)
    assert bound.variables["state"]["rest_1"]["calls"] == 2
    layer, of_layer = bound.rest[0].unbind()
    np.testing.assert_array_equal(layer.apply(of_layer, jnp.eye(3)), of_layer["params"]["kernel"])
    assert (layer.name, layer.scope) == (None, None)
    model, again = bound.unbind()
    assert model == Model() and again["state"]["rest_1"]["calls"] == 2
    with pytest.raises(CallUnbindOnUnboundModuleError, match=r"`unbind` was called, but Model"):
        model.unbind()


def test_lazy_init_computes_variables_only():
    shapes = jax.ShapeDtypeStruct((1_000_000, 2), jnp.float32)
    kernel = Affine().lazy_init(KEY, shapes)["params"]["kernel"]
    np.testing.assert_array_equal(kernel, Affine().init(KEY, X)["params"]["kernel"])


def test_use_after_call_is_rejected():
    kept = []

    class Keeper(Module):
        @compact
        def __call__(self, x):
            kept.append(Affine())
            return kept[0](x)

    Keeper().init(KEY, X)
    with pytest.raises(InvalidScopeError, match=r"/Affine_0' is used after its end"):
        kept[0](X)


def test_threads_are_independent():
    def run(i):
        model = Model(i + 1)
        for _ in range(2):
            variables = model.init(KEY, X)
        return variables["params"]["first"]["kernel"].shape, sorted(variables["params"])

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(4)))
    assert found == [((2, i + 1), ["first", "rest_0"]) for i in range(4)]


class ShownModel(Module):
    inner: Module
    sizes: tuple = (1, 2)
    act: object = jnp.tanh

    def setup(self):
        self.last = Affine(3)

    def __call__(self, x):
        return self.last(self.act(self.inner(x)))


def test_trees_in_notebooks_have_submodules_of_setup():
    model = ShownModel(Affine())
    text = treescope.render_to_text(model)
    assert re.search(r"ShownModel\(\s*sizes=.*inner=Affine\(.*last=Affine\(features=3", text, re.S)
    bound = model.bind(model.init(KEY, X))
    assert re.search(r"last=Affine\(.*'kernel': .*\(2, 3\)", treescope.render_to_text(bound), re.S)
    assert "treescope" in model._repr_mimebundle_()["text/html"]


def test_unset_fields_are_not_shown():
    class Late(Module):
        a: int
        b: int = 2

        def __post_init__(self):
            shown.append(repr(self))
            super().__post_init__()

    shown = []
    Late(1)
    assert shown == ["Late(\n    # attributes\n    a = 1\n    b = 2\n)"]


def test_clones():
    model = Model(4, name="n")
    assert model.clone() == model and model.clone(features=5).features == 5
    with pytest.raises(TypeError, match="feature"):
        model.clone(feature=5)

    class Wrapper(Module):
        inner: Module
        more: tuple = ()

    inner = Affine(name="inner")
    wrapper = Wrapper(inner, (inner,))
    assert wrapper.clone().inner is inner
    copied = wrapper.clone(_deep_clone=True, _reset_names=True)
    assert copied.inner is not inner and copied.inner.name is None
    assert copied.more[0].features == 2
