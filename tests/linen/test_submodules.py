from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.linen.modules import KEY, Affine, X
from weft.core.frozen_dict import FrozenDict
from weft.linen.methods import compact
from weft.linen.module import Module
from weft.linen.submodules import map_submodules


class Pair(NamedTuple):
    left: Any
    right: Any


def test_names_by_place():
    tree = {"k": [1, {"j": 2}], "n": Pair(3, (4,)), "s": "text"}
    found = map_submodules(lambda at, x: (at, x), tree, lambda x: isinstance(x, int), "a")
    assert found == FrozenDict(
        {
            "k": (("a_k_0", 1), {"j": ("a_k_1_j", 2)}),
            "n": Pair(("a_n_left", 3), (("a_n_right_0", 4),)),
            "s": "text",
        }
    )
    assert isinstance(found["n"], Pair)


def test_a_tuple_without_modules_stays_itself():
    given = (1, (2, "x"))
    assert map_submodules(lambda at, x: x, given, lambda x: False) is given


class Holder(Module):
    inner: Any

    def __call__(self, x):
        inner = self.inner
        for layer in inner.values() if isinstance(inner, FrozenDict) else inner:
            x = layer(x)
        return x


def paths(module):
    return sorted("/".join(k.key for k in p) for p, _ in jax.tree.leaves_with_path(shapes(module)))


def shapes(module):
    return jax.eval_shape(module.init, KEY, X)["params"]


def test_containers_of_modules_in_fields_and_in_setup():
    class Model(Module):
        def setup(self):
            self.layers = [Affine(), Affine()]
            self.table = {"a": Affine()}

        def __call__(self, x):
            assert isinstance(self.layers, tuple) and isinstance(self.table, FrozenDict)
            return self.table["a"](self.layers[1](x))

    assert paths(Model()) == ["layers_1/kernel", "table_a/kernel"]
    assert paths(Holder([Affine(), Affine()])) == ["inner_0/kernel", "inner_1/kernel"]
    assert paths(Holder({"x": Affine()})) == ["inner_x/kernel"]


def test_what_was_given_stays_as_it_was():
    layer, layers = Affine(), [Affine()]
    holder = Holder(layers)
    holder.init(KEY, X)
    assert holder.inner is layers and layer.scope is None and layers[0].scope is None


def test_one_module_in_several_places_is_one_submodule():
    layer = Affine()
    assert paths(Holder([layer, layer])) == ["inner_0/kernel"]
    # Inside of two others, it is that of the first one that is bound.
    y, variables = Holder([Holder([layer]), Holder([layer])]).init_with_output(KEY, X)
    kernel = variables["params"]["inner_0"]["inner_0"]["kernel"]
    np.testing.assert_allclose(y, X @ kernel @ kernel, rtol=1e-5, atol=1e-6)


def test_equal_modules_are_two():
    assert paths(Holder([Affine(), Affine()])) == ["inner_0/kernel", "inner_1/kernel"]


def test_a_submodule_that_is_passed_down_stays_where_it_was_made():
    class Model(Module):
        @compact
        def __call__(self, x):
            shared = Affine(name="shared")
            return Holder([shared])(x) + Holder([shared, Affine()])(x)

    assert paths(Model()) == ["Affine_0/kernel", "shared/kernel"]


def test_a_default_that_is_a_module_is_one_for_all():
    class Model(Module):
        layer: Module = Affine()

        def __call__(self, x):
            return self.layer(x)

    class Outer(Module):
        @compact
        def __call__(self, x):
            return jnp.tanh(Model()(Model()(x)))

    assert paths(Outer()) == ["Model_0/layer/kernel"]
