"""Modules in the attributes of modules: their names, and calls with variables of their own."""

import functools
import importlib
from collections import namedtuple
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.parity.linen import KEY, same

X = jnp.ones((2, 3))
Pair = namedtuple("Pair", "right left")
Fields = namedtuple("Fields", "b a")  # of a struct.dataclass

keys = st.text("ab12", min_size=1, max_size=2)
containers = st.recursive(
    st.integers(0, 2),
    lambda below: (
        st.lists(below, min_size=1, max_size=12)
        | st.tuples(below, below)
        | st.builds(Pair, below, below)
        | st.builds(Fields, below, below)
        | st.dictionaries(keys, below, min_size=1, max_size=3)
    ),
    max_leaves=14,
)


@functools.cache
def struct(nn):
    of = importlib.import_module(nn.__name__.replace("linen", "struct"))
    return of.dataclass(type("Struct", (), {"__annotations__": {"b": object, "a": object}}))


def with_layers(nn, tree, layers):
    """Returns the tree with a layer for each number; unlike `jax.tree.map` it keeps the order of
    dicts.
    """
    if isinstance(tree, int):
        return layers[tree]
    if isinstance(tree, dict):
        return {key: with_layers(nn, value, layers) for key, value in tree.items()}
    items = [with_layers(nn, value, layers) for value in tree]
    if isinstance(tree, Fields):
        return struct(nn)(*items)
    return Pair(*items) if isinstance(tree, Pair) else type(tree)(items)


@functools.cache
def classes(nn):
    class Leaf(nn.Module):
        @nn.compact
        def __call__(self):
            self.param("p", lambda key: jnp.zeros(()))

    class Field(nn.Module):
        layers: object

        def __call__(self):
            for leaf in jax.tree.leaves(self.layers, is_leaf=lambda x: isinstance(x, Leaf)):
                leaf()

    class Setup(nn.Module):
        make: Callable

        def setup(self):
            self.layers = self.make()

        def __call__(self):
            Field.__call__(self)

    return Leaf, Field, Setup


def names(nn, tree, in_setup):
    Leaf, Field, Setup = classes(nn)
    make = lambda: with_layers(nn, tree, [Leaf() for _ in range(3)])  # noqa: E731
    module = Setup(make) if in_setup else Field(make())
    return {}, module.init(KEY)


@given(containers, st.booleans())
@example({"b": 0, "a": 0}, False)
@example([Fields(0, [1, 0]), 2], False)
@example(Fields({"k": 1}, Pair(0, 1)), True)
@settings(deadline=None, max_examples=40)
def test_names_of_modules_that_are_in_several_places(tree, in_setup):
    same(lambda nn: names(nn, tree, in_setup))


# Modules called with their own variables inside another module.

ENTRIES = {
    "init": lambda inner: inner.init(KEY, X),
    "init_with_output": lambda inner: inner.init_with_output(KEY, X),
    "lazy_init": lambda inner: inner.lazy_init(KEY, X),
    "tabulate": lambda inner: len(inner.tabulate(KEY, X)) > 0,
    "module_paths": lambda inner: list(inner.module_paths(KEY, X)),
    "apply": lambda inner: inner.apply(inner.clone(parent=None).init(KEY, X), X),
    "bind": lambda inner: inner.bind(inner.clone(parent=None).init(KEY, X))(X),
    "unbind": lambda inner: inner.bind(inner.init(KEY, X)).unbind()[0].init(KEY, X),
    "clone": lambda inner: inner.clone(parent=None).init(KEY, X),
    "clone of clone": lambda inner: inner.clone(parent=None).clone().init(KEY, X),
}


@functools.cache
def nested(nn):
    class Inner(nn.Module):
        held: object

        @nn.compact
        def __call__(self, x):
            held = self.held
            for layer in held.values() if hasattr(held, "values") else (held, held):
                x = layer(x)
            return nn.Dense(2)(x)

    return Inner


def in_setup(nn, hold, use):
    class Outer(nn.Module):
        def setup(self):
            self.sub = nn.Dense(3)
            self.inner = nested(nn)(hold(nn, self.sub))

        def __call__(self, x):
            return use(self.inner)

    return Outer()


def in_compact(nn, hold, use):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return use(nested(nn)(hold(nn, nn.Dense(3))))

    return Outer()


def unnamed(nn, hold, use):
    class Outer(nn.Module):
        sub: nn.Module

        @nn.compact
        def __call__(self, x):
            self.sub(x)
            return use(nested(nn)(hold(nn, self.sub), parent=None))

    return Outer(nn.Dense(3))


def given_as_field(nn, hold, use):
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            self.inner(x)
            return use(self.inner)

    return Outer(nested(nn)(hold(nn, nn.Dense(3))))


HOLDS = {
    "a module": lambda nn, sub: sub,
    "in a dict": lambda nn, sub: {"b": sub, "a": sub},
    "deeper": lambda nn, sub: nn.Sequential([sub, nn.Dense(3, parent=None), sub]),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("outer", [in_setup, in_compact, unnamed, given_as_field])
def test_module_with_own_variables_is_called_inside_another(outer, entry):
    def program(nn):
        def run():
            return [
                outer(nn, hold, ENTRIES[entry]).init_with_output(KEY, X) for hold in HOLDS.values()
            ]

        results = run()
        return [result for result, _ in results], [variables for _, variables in results]

    same(program)


def test_unbind_keeps_a_shared_module_shared():
    def program(nn):
        class Twice(nn.Module):
            a: nn.Module
            b: nn.Module
            c: object

            def __call__(self, x):
                return self.c[0](self.a(self.b(x)))

        dense = nn.Dense(3)
        variables = Twice(dense, dense, [dense]).init(KEY, X)
        module, variables = Twice(dense, dense, [dense]).bind(variables).unbind()
        assert module.a is module.b is module.c[0]
        return module.apply(variables, X), variables

    same(program)
