"""Modules of Linen: the same programs on Flax and on Weft."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw
from tests.parity.linen import KEY, same

X = draw(1, 3, 2)
RNGS = {"params": KEY, "noise": jax.random.PRNGKey(5)}
normal = jax.nn.initializers.normal(1.0)
PROGRAMS = []


def program(fn):
    PROGRAMS.append(fn)
    return fn


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.__name__)
def test_variables_agree(case):
    same(case)


@functools.cache
def affine(nn):
    class Affine(nn.Module):
        features: int = 2
        bias: bool = True

        @nn.compact
        def __call__(self, x):
            x = x @ self.param("kernel", normal, (x.shape[-1], self.features))
            if not self.bias:
                return x
            return x + jnp.broadcast_to(self.param("bias", normal, (self.features,)), x.shape)

    return Affine


@functools.cache
def counter(nn):
    class Counter(nn.Module):
        @nn.compact
        def __call__(self, x):
            calls = self.variable("state", "calls", lambda: jnp.zeros((), int))
            calls.value += 1
            noise = jax.random.normal(self.make_rng("noise"), x.shape)
            return affine(nn)(name="of_noise")(noise) + affine(nn)()(x) * calls.value

    return Counter


def initialized(module, *args, **kwargs):
    return module.init_with_output(RNGS, *(args or (X,)), **kwargs)


# Where submodules are created.


@program
def compact_names_by_class_and_order(nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = affine(nn)(3)(x)
            x = counter(nn)()(x)
            return affine(nn)(bias=False)(affine(nn)()(x))

    return initialized(Model())


@program
def mixed_given_and_default_names(nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = affine(nn)(name="first")(x)
            x = affine(nn)()(x)
            x = affine(nn)(name="Affine_2")(x)
            return affine(nn)()(affine(nn)(name="last")(x))

    return initialized(Model())


@program
def setup_names_by_attribute(nn):
    class Model(nn.Module):
        def setup(self):
            self.first = affine(nn)(3)
            self.second = counter(nn)()
            self.scale = self.param("scale", normal, (2,))
            self.seen = self.variable("state", "seen", jnp.zeros, (2,))

        def __call__(self, x):
            self.seen.value = self.seen.value + x.sum(0)
            return self.second(self.first(x)) * 2

    return initialized(Model())


@program
def setup_of_lists_and_dicts(nn):
    class Model(nn.Module):
        def setup(self):
            self.layers = [affine(nn)() for _ in range(3)]
            self.pair = affine(nn)(), affine(nn)(bias=False)
            self.heads = {"a": affine(nn)(1), "b": affine(nn)(2)}
            self.deep = [{"x": (affine(nn)(), [affine(nn)()])}, affine(nn)()]

        def __call__(self, x):
            for layer in (*self.layers, *self.pair, self.deep[0]["x"][0], self.deep[0]["x"][1][0]):
                x = layer(x)
            kinds = [type(v).__name__ for v in (self.layers, self.heads, self.pair, self.deep)]
            return {name: head(x) for name, head in self.heads.items()}, self.deep[1](x), kinds

    return initialized(Model())


class Pair(NamedTuple):
    left: Any
    right: Any


@program
def setup_of_named_tuples(nn):
    class Model(nn.Module):
        def setup(self):
            self.pair = Pair(affine(nn)(), [affine(nn)()])

        def __call__(self, x):
            return self.pair.left(x) + self.pair.right[0](x)

    return initialized(Model())


@program
def unused_submodules_are_not_created(nn):
    class Model(nn.Module):
        def setup(self):
            self.used, self.unused = affine(nn)(), affine(nn)()

        def __call__(self, x):
            return self.used(x)

    return initialized(Model())


@program
def named_submodule_in_setup(nn):
    class Model(nn.Module):
        def setup(self):
            self.layer = affine(nn)(name="other")
            self.list = [affine(nn)(name="one"), affine(nn)()]

        def __call__(self, x):
            return self.layer(x) + self.list[0](x) + self.list[1](x)

    return initialized(Model())


@program
def setup_with_compact(nn):
    class Model(nn.Module):
        def setup(self):
            self.first = affine(nn)()
            self.flag = "text"

        @nn.compact
        def __call__(self, x):
            return affine(nn)()(self.first(x)), self.flag

    return initialized(Model())


@program
def chained_attribute_assignment(nn):
    class Model(nn.Module):
        def setup(self):
            self.a = self.b = affine(nn)()
            layer = affine(nn)()
            self.c, self.d = layer, [layer, self.a]

        def __call__(self, x):
            return self.b(x) + self.d[0](x) + self.d[1](x)

    return initialized(Model())


@program
def submodule_in_a_property(nn):
    class Model(nn.Module):
        @property
        def width(self):
            return 3

        @nn.compact
        def __call__(self, x):
            return affine(nn)(self.width)(x)

    return initialized(Model())


@program
def named_loop(nn):
    class Model(nn.Module):
        depth: int = 3

        @nn.compact
        def __call__(self, x):
            for i in range(self.depth):
                x = affine(nn)(name=f"layer{i}")(x)
            return x

    return initialized(Model())


@program
def classes_and_functions_as_fields(nn):
    class Model(nn.Module):
        layer: Callable = affine(nn)
        act: Callable = jnp.tanh

        @nn.compact
        def __call__(self, x):
            return self.act(self.layer()(x))

    partial = functools.partial(affine(nn), 3)
    y, variables = initialized(Model(partial, jnp.sin))
    z, others = initialized(Model())
    return (y, z), (variables, others)


@program
def compact_method_twice(nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return affine(nn)()(x) + self.param("b", normal, (2,))[None]

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            model = Model()
            return model(model(x))

    return initialized(Outer())


@program
def compact_method_calling_another(nn):
    class Model(nn.Module):
        def layer(self, x):
            return affine(nn)()(x)

        @nn.compact
        def __call__(self, x):
            return self.layer(self.layer(x))

    return initialized(Model())


@program
def several_methods_on_setup(nn):
    class Codec(nn.Module):
        def setup(self):
            self.encoder, self.decoder = affine(nn)(3), affine(nn)(2)

        def encode(self, x):
            return self.encoder(x)

        def decode(self, z):
            return self.decoder(z)

        def __call__(self, x):
            return self.decode(self.encode(x))

    y, variables = initialized(Codec())
    z = Codec().apply(variables, X, method="encode")
    again = Codec().apply(variables, z, method=Codec.decode)
    by_instance = Codec().apply(variables, X, method=Codec().encode)
    by_function = Codec().apply(variables, X, method=lambda m, x: m.encoder(x) + 1)
    part = Codec().init(RNGS, X, method="encode")
    return (y, z, again, by_instance, by_function), (variables, part)


# Modules that come from elsewhere.


@program
def modules_given_as_fields(nn):
    class Model(nn.Module):
        one: Any
        many: Any
        table: Any

        def __call__(self, x):
            x = self.one(x) + self.many[0](x) + self.many[1](x)
            return self.table["a"](x)

    Affine = affine(nn)
    return initialized(Model(Affine(), [Affine(), Affine()], {"a": Affine()}))


@program
def modules_given_as_fields_to_a_compact_method(nn):
    class Model(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.inner(affine(nn)()(x))

    return initialized(Model(Model(affine(nn)())))


@program
def named_module_as_field(nn):
    class Model(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner(x)

    return initialized(Model(affine(nn)(name="other")))


@program
def one_module_in_two_fields(nn):
    class Model(nn.Module):
        a: nn.Module
        b: nn.Module

        def __call__(self, x):
            return self.a(x) + self.b(x)

    layer = affine(nn)()
    return initialized(Model(layer, layer))


@program
def one_module_in_two_submodules(nn):
    class Half(nn.Module):
        layer: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.layer(x) * self.param("scale", normal, ())

    class Model(nn.Module):
        def setup(self):
            self.shared = affine(nn)()
            self.a, self.b = Half(self.shared), Half(self.shared)

        def __call__(self, x):
            return self.a(x) + self.b(x)

    return initialized(Model())


@program
def compact_module_passed_down(nn):
    class Half(nn.Module):
        layer: Any

        @nn.compact
        def __call__(self, x):
            return self.layer(x) * self.param("scale", normal, ())

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            shared = affine(nn)(name="shared")
            return Half(shared)(x) + Half([shared].pop())(x) + Half(affine(nn)())(x)

    return initialized(Model())


@program
def one_outside_module_in_two_submodules(nn):
    class Half(nn.Module):
        layer: nn.Module

        def __call__(self, x):
            return self.layer(x)

    class Model(nn.Module):
        a: nn.Module
        b: nn.Module

        def __call__(self, x):
            return self.a(x) + self.b(x)

    layer = affine(nn)()
    return initialized(Model(Half(layer), Half(layer)))


@program
def a_default_factory(nn):
    class Model(nn.Module):
        layers: list = dataclasses.field(default_factory=lambda: [affine(nn)(), affine(nn)()])

        @nn.compact
        def __call__(self, x):
            return self.layers[1](self.layers[0](x))

    return initialized(Model())


@program
def module_as_default(nn):
    class Model(nn.Module):
        layer: nn.Module = affine(nn)()

        def __call__(self, x):
            return self.layer(x)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Model()(Model()(x))

    return initialized(Twice())


@program
def modules_without_parent_in_setup(nn):
    class Model(nn.Module):
        def setup(self):
            self.layer = affine(nn)(parent=None)
            self.others = [affine(nn)(parent=None)]

        def __call__(self, x):
            return self.layer(x) + self.others[0](x)

    return initialized(Model())


@program
def unbound_module_in_another(nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            alone = affine(nn)(parent=None)
            inner = alone.init(self.make_rng("noise"), x)
            return affine(nn)()(alone.apply(inner, x)), inner

    return initialized(Model())


@program
def copies_inside_a_method(nn):
    class Model(nn.Module):
        layer: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.layer.copy()(x) + self.layer.copy(name="other", features=2)(x)

    return initialized(Model(affine(nn)()))


@program
def clone_with_this_parent(nn):
    class Model(nn.Module):
        layer: nn.Module

        @nn.compact
        def __call__(self, x):
            one = self.layer.clone(parent=self, name="one")
            return one(x) + affine(nn)(parent=self)(x)

    return initialized(Model(affine(nn)()))


@program
def submodules_of_submodules_are_reached(nn):
    class Inner(nn.Module):
        def setup(self):
            self.layer = affine(nn)()

        def __call__(self, x):
            return self.layer(x)

    class Model(nn.Module):
        def setup(self):
            self.inner = Inner()

        def __call__(self, x):
            return self.inner.layer(x) + self.inner(x)

    return initialized(Model())


# Classes.


@program
def subclass_extends_setup(nn):
    class Base(nn.Module):
        features: int

        def setup(self):
            self.first = affine(nn)(self.features)

        def __call__(self, x):
            return self.first(x)

    class Model(Base):
        more: int = 2

        def setup(self):
            super().setup()
            self.second = affine(nn)(self.more)

        def __call__(self, x):
            return self.second(super().__call__(x))

    return initialized(Model(3))


@program
def subclass_extends_a_compact_method(nn):
    class Base(nn.Module):
        @nn.compact
        def __call__(self, x):
            return affine(nn)()(x)

    class Model(Base):
        @nn.compact
        def __call__(self, x):
            return affine(nn)()(super().__call__(x))

    return initialized(Model())


@program
def generics_and_mixins(nn):
    T = TypeVar("T")

    class Scaled:
        def scaled(self, x):
            return x * self.factor

    class Model(Scaled, nn.Module, Generic[T]):
        factor: T

        @nn.compact
        def __call__(self, x):
            return affine(nn)()(self.scaled(x))

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Model[float](2.0)(x)

    return initialized(Outer())


@program
def keyword_only_fields(nn):
    class Base(nn.Module, kw_only=True):
        features: int = 2

    class Model(Base):
        factor: float

        @nn.compact
        def __call__(self, x):
            return self.factor * affine(nn)(self.features)(x)

    return initialized(Model(3.0, features=4))


@program
def fields_computed_after_init(nn):
    class Model(nn.Module):
        features: int
        double: int = dataclasses.field(init=False, default=0)

        def __post_init__(self):
            self.double = 2 * self.features
            super().__post_init__()

        @nn.compact
        def __call__(self, x):
            return affine(nn)(self.double)(x)

    return initialized(Model(1))


@program
def nowrap_helpers(nn):
    class Model(nn.Module):
        @nn.nowrap
        def make(self, features):
            return affine(nn)(features)

        @nn.compact
        def __call__(self, x):
            return self.make(2)(self.make(3)(x))

    return initialized(Model()), Model().make(4).features


@program
def static_and_class_methods(nn):
    class Model(nn.Module):
        features: int

        @classmethod
        def small(cls):
            return cls(1)

        @staticmethod
        def act(x):
            return jnp.tanh(x)

        @nn.compact
        def __call__(self, x):
            return self.act(affine(nn)(self.features)(x))

    return initialized(Model.small())


@program
def name_scopes_of_methods(nn):
    class Codec(nn.Module):
        @nn.compact_name_scope
        def encode(self, x):
            return affine(nn)()(x)

        @nn.compact_name_scope
        def decode(self, x):
            return affine(nn)(3)(x) * self.param("scale", normal, ())

        @nn.compact
        def __call__(self, x):
            return affine(nn)()(self.decode(self.encode(x)))

    y, variables = initialized(Codec())
    return (y, Codec().apply(variables, X, method="encode")), variables


@program
def shared_scope_in_setup(nn):
    class Wrapper(nn.Module):
        inner: nn.Module

        def setup(self):
            nn.share_scope(self, self.inner)

        @nn.compact
        def __call__(self, x):
            return self.inner(x) * self.param("scale", normal, ())

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Wrapper(affine(nn)())(Wrapper(affine(nn)())(x))

    alone, variables = initialized(Wrapper(affine(nn)(3)))
    y, more = initialized(Model())
    return (alone, y), (variables, more)


@program
def shared_scope_with_setup_submodule(nn):
    class Wrapper(nn.Module):
        def setup(self):
            self.inner = counter(nn)()
            nn.share_scope(self, self.inner)

        def __call__(self, x):
            return self.inner(x)

    return initialized(Wrapper())


@program
def nested_name_scopes(nn):
    class Model(nn.Module):
        @nn.compact_name_scope
        def f(self, x):
            return self.g(affine(nn)()(x)) + affine(nn)()(x)

        @nn.compact_name_scope
        def g(self, x):
            return affine(nn)(name="a")(x) + self.h(x)

        @nn.compact
        def h(self, x):
            self.sow("state", "seen", x)
            return affine(nn)()(x) + self.param("b", normal, (2,))[None]

        def __call__(self, x):
            return self.f(self.f(x))

    return initialized(Model())


@pytest.mark.parametrize("given_first", [True, False])
@pytest.mark.parametrize("deeper", [None, "wrapper", "inner"])
def test_scope_of_two_siblings(given_first, deeper):
    def program(nn):
        class Holder(nn.Module):
            def setup(self):
                self.layer = affine(nn)()

            def __call__(self, x):
                return self.layer(x)

        class Wrapper(nn.Module):
            inner: nn.Module

            def setup(self):
                inner = self.inner.layer if deeper == "inner" else self.inner
                nn.share_scope(*((self, inner) if given_first else (inner, self)))

            @nn.compact
            def __call__(self, x):
                return self.inner(x) * self.param("scale", normal, ())

        class Middle(nn.Module):
            inner: nn.Module

            @nn.compact
            def __call__(self, x):
                return Wrapper(self.inner)(x)

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                inner = Holder() if deeper == "inner" else affine(nn)()
                return (Middle if deeper == "wrapper" else Wrapper)(inner)(x)

        return initialized(Model())

    same(program)
