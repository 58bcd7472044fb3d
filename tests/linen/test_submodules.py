import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.linen.modules import KEY, Affine, X
from tests.linen.transformed import ALL
from weft import linen as nn
from weft import struct
from weft.core.frozen_dict import FrozenDict
from weft.errors import NameInUseError
from weft.linen.methods import compact
from weft.linen.module import Module, map_submodules


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


def test_tuple_without_modules_stays_itself():
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


def test_inputs_are_not_mutated():
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


def test_passed_submodule_stays_with_its_parent():
    class Model(Module):
        @compact
        def __call__(self, x):
            shared = Affine(name="shared")
            return Holder([shared])(x) + Holder([shared, Affine()])(x)

    assert paths(Model()) == ["Affine_0/kernel", "shared/kernel"]


def test_module_default_is_shared():
    class Model(Module):
        layer: Module = Affine()

        def __call__(self, x):
            return self.layer(x)

    class Outer(Module):
        @compact
        def __call__(self, x):
            return jnp.tanh(Model()(Model()(x)))

    assert paths(Outer()) == ["Model_0/layer/kernel"]


# Names in transformations: the same names are allowed inside and outside.

SHARED = {
    "variable_broadcast": "params",
    "variable_carry": "state",
    "split_rngs": {"params": False},
}
MAPPED = {"variable_axes": {"params": None, "state": None}, "split_rngs": {"params": False}}
LIFTS = ALL | {
    "vmap": functools.partial(nn.vmap, **MAPPED),
    "pmap": functools.partial(nn.pmap, **MAPPED),
    "scan": lambda f: (
        lambda m, x: nn.scan(lambda m, x, _: (f(m, x), None), length=1, **SHARED)(m, x, None)[0]
    ),
    "while_loop": lambda f: (
        lambda m, x: nn.while_loop(
            lambda m, x: False, f, m, x, carry_variables="state", split_rngs={"params": False}
        )
    ),
    "cond": lambda f: lambda m, x: nn.cond(True, f, f, m, x),
    "switch": lambda f: lambda m, x: nn.switch(0, [f, f], m, x),
    "vjp": lambda f: lambda m, x: nn.vjp(f, m, x)[0],
    "jvp": lambda f: lambda m, x: nn.jvp(f, m, (x,), (x,), {})[0],
    "grad": lambda f: lambda m, x: nn.grad(lambda m, x: f(m, x).sum(), m, x)[0],
    "custom_vjp": lambda f: nn.custom_vjp(f, lambda m, x: nn.vjp(f, m, x), lambda pull, g: pull(g)),
    "jit in jit": lambda f: nn.jit(nn.jit(f)),
}
MADE = {
    "submodule": lambda m, x: Affine(name="a")(x),
    "parameter": lambda m, x: x + m.param("a", nn.initializers.ones, ()),
    "variable": lambda m, x: x + m.variable("state", "a", jnp.zeros, ()).value,
    "another": lambda m, x: Affine(name="b")(x),
    "own": lambda m, x: m.a(x) if callable(m.a) else x,
}


class InSetup(Module):
    kind: str
    body: Any

    def setup(self):
        if self.kind == "submodule":
            self.a = Affine()
        elif self.kind == "parameter":
            self.a = self.param("a", nn.initializers.ones, ())
        else:
            self.a = self.variable("state", "a", jnp.zeros, ())

    @compact
    def __call__(self, x):
        return self.body(self, x)


class InField(Module):
    a: Module
    body: Any

    @compact
    def __call__(self, x):
        return self.body(self, x)


def outcome(make, body):
    try:
        return jax.eval_shape(make(body).init, KEY, X)
    except NameInUseError:
        return "the name is in use"


OUTSIDE = {}  # what happens without a transformation, once it is known


@pytest.mark.parametrize("lift", LIFTS)
def test_name_taken_outside_is_rejected_in_a_transform(lift):
    lifted = LIFTS[lift]
    kinds = {
        kind: functools.partial(InSetup, kind) for kind in ("submodule", "parameter", "variable")
    }
    for kind, make in {**kinds, "field": functools.partial(InField, Affine())}.items():
        for made, body in MADE.items():
            if (kind, made) not in OUTSIDE:
                OUTSIDE[kind, made] = outcome(make, body)
            assert outcome(make, lifted(body)) == OUTSIDE[kind, made], (kind, made)


def test_jitted_method_cannot_reuse_setup_names():
    class Model(Module):
        def setup(self):
            self.a = Affine()

        @nn.jit
        @compact
        def __call__(self, x):
            return Affine(name="a")(self.a(x))

    with pytest.raises(NameInUseError, match="'a' is used twice in 'Model"):
        Model().init(KEY, X)


@struct.dataclass
class Box:
    """Its fields are in another order than their names."""

    b: Any
    a: Any = None
    kept: Any = struct.field(pytree_node=False, default="text")


class InBox(Module):
    box: Any

    @compact
    def __call__(self, x):
        x = nn.Dense(2)(x)
        for layer in jax.tree.leaves(self.box, is_leaf=lambda x: isinstance(x, Module)):
            x = layer(x)
        return x


class BoxInSetup(InBox):
    def setup(self):
        self.given, self.made = self.box, Box(nn.Dense(4))

    def __call__(self, x):
        return self.made.b(self.given.a(self.given.b(x)))


DENSE = nn.Dense(2)
BOXES = {
    "two": (InBox(Box(nn.Dense(2), nn.Dense(3))), ["Dense_0", "box_a", "box_b"]),
    "named": (InBox(Box(nn.Dense(2, name="q"), nn.Dense(3))), ["Dense_0", "box_a", "box_b"]),
    "shared": (InBox(Box(DENSE, DENSE)), ["Dense_0", "box_a"]),
    "nested": (
        InBox(Box([nn.Dense(2)], {"k": Box(nn.Dense(3))})),
        ["Dense_0", "box_a_k_b", "box_b_0"],
    ),
    "in a list": (InBox((Box(nn.Dense(2)), nn.Dense(3))), ["Dense_0", "box_0_b", "box_1"]),
    "setup": (BoxInSetup(Box(nn.Dense(2), nn.Dense(3))), ["box_a", "box_b", "made_b"]),
}


@pytest.mark.parametrize("case", BOXES)
def test_modules_in_the_fields_of_a_struct(case):
    module, names = BOXES[case]
    y, variables = module.init_with_output(KEY, X)
    assert sorted(variables["params"]) == names
    np.testing.assert_array_equal(module.apply(variables, X), y)
    given = jax.tree.leaves(module.box, is_leaf=lambda x: isinstance(x, Module))
    assert all(layer.scope is None for layer in given) and module.clone() == module
    lifted = nn.jit(type(module))(box=module.box)
    np.testing.assert_allclose(lifted.apply(variables, X), y, rtol=1e-6)
    unbound, _ = module.bind(variables).unbind()
    np.testing.assert_array_equal(unbound.apply(variables, X), y)


def test_only_children_of_a_struct_are_submodules():
    box = Box(1, kept=nn.Dense(2))
    assert map_submodules(lambda at, x: x, box, lambda x: isinstance(x, Module)) is box


def test_lifted_function_captures_modules_in_a_struct():
    class Lifted(Module):
        box: Any

        @compact
        def __call__(self, x):
            box = self.box
            return nn.vmap(
                lambda _, x: box.b(x), variable_axes={"params": None}, split_rngs={"params": False}
            )(self, x)

    y, variables = Lifted(Box(nn.Dense(2))).init_with_output(KEY, X)
    np.testing.assert_allclose(y, nn.Dense(2).apply({"params": variables["params"]["box_b"]}, X))
