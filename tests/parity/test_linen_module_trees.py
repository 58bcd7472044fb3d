"""Trees of modules made from one description for Flax and for Weft."""

import functools

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity.linen import same
from tests.parity.test_linen_module import RNGS, X, normal

names = st.sampled_from(["a", "b", "Leaf_0", "Node_1", "c_0"])
leaf_parts = st.sampled_from(["param", "state", "noise", "sow", "perturb", "default_rng"])
leaves = st.fixed_dictionaries(
    {"kind": st.just("leaf"), "parts": st.lists(leaf_parts, unique=True, min_size=1, max_size=3)}
)


def nodes(children):
    """Modules with submodules: where each is made, how often it is called, and what is shared."""
    child = st.fixed_dictionaries(
        {
            "of": children,
            "name": st.none() | st.none() | names,
            "calls": st.integers(1, 2),
            "in": st.sampled_from(["alone", "list", "dict", "nested"]),
        }
    )
    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["compact", "setup", "both", "given"]),
            "children": st.lists(child, min_size=1, max_size=3),
            "shared": st.booleans(),
            "param": st.booleans(),
        }
    )


trees = st.recursive(leaves, nodes, max_leaves=6).filter(lambda tree: tree["kind"] != "leaf")


@functools.cache
def classes(nn):
    class Leaf(nn.Module):
        parts: tuple

        @nn.compact
        def __call__(self, x):
            for part in self.parts:
                x = x + getattr(self, part)(x)
            return x

        def param_(self, x):
            return self.param("kernel", normal, x.shape)

        def state(self, x):
            total = self.variable("state", "total", jnp.zeros_like, x)
            total.value += x
            return total.value

        def noise(self, x):
            return normal(self.make_rng("noise"), x.shape)

        def default_rng(self, x):
            return normal(self.make_rng(), x.shape)

        def sow_(self, x):
            self.sow("seen", "x", x)
            return x

        def perturb_(self, x):
            return self.perturb("h", x)

    def put(self, tree):
        """Submodules as attributes: alone, in lists, in dicts, and in lists in dicts."""
        for i, child in enumerate(tree["children"]):
            module = make(nn, child["of"], child["name"])
            places = {"list": [module], "dict": {"k": module}, "nested": {"k": [module, (module,)]}}
            setattr(self, f"child{i}", places.get(child["in"], module))
        if tree["shared"]:
            self.again = self.child0

    def found(self, tree):
        for i, child in enumerate(tree["children"]):
            held = getattr(self, f"child{i}")
            held = held["k"] if child["in"] in ("dict", "nested") else held
            yield held[0] if child["in"] in ("list", "nested") else held, child["calls"]

    def called(modules, x):
        for module, calls in modules:
            for _ in range(calls):
                x = jnp.tanh(module(x))
        return x

    def made(tree):
        for child in tree["children"]:
            module = make(nn, child["of"], child["name"])
            yield module, child["calls"]
            if tree["shared"]:
                yield module, 1
                yield Holder(module), 1

    class Node(nn.Module):
        tree: dict
        shared: nn.Module | None = None

        def setup(self):
            if self.tree["kind"] in ("setup", "both"):
                put(self, self.tree)

        @nn.compact
        def __call__(self, x):
            kind = self.tree["kind"]
            if self.tree["param"]:
                x = x + self.param("own", normal, x.shape)
            if kind == "given":
                layers = [make(nn, c["of"], c["name"], parent=None) for c in self.tree["children"]]
                return x + called([(Given(layers, {"k": layers[0]}), 1)], x)
            if kind in ("setup", "both"):
                x = called(found(self, self.tree), x)
            if kind == "compact":
                x = called(made(self.tree), x)
            if kind == "both":
                x = called([(Leaf(("param_",)), 2)], x)
            return x

    class Holder(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner(x)

    class Given(nn.Module):
        layers: list
        table: dict

        @nn.compact
        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.table["k"](Holder(self.layers[-1])(x))

    return Leaf, Node


def make(nn, tree, name=None, **options):
    Leaf, Node = classes(nn)
    if tree["kind"] == "leaf":
        renamed = {"param": "param_", "sow": "sow_", "perturb": "perturb_"}
        return Leaf(tuple(renamed.get(p, p) for p in tree["parts"]), name=name, **options)
    return Node(tree, name=name, **options)


def outcome(nn, tree):
    """Results and variables; or the kind of an error, such as a name that is used twice."""
    model = make(nn, tree)
    try:
        y, variables = model.init_with_output(RNGS, X)
    except Exception as error:
        return type(error).__name__, {}
    mutable = ["state", "seen", "perturbations"]
    z, changed = model.apply(variables, X, rngs=RNGS, mutable=mutable)
    left = model.apply(variables, X, rngs=RNGS, capture_intermediates=True, mutable=True)
    paths = model.module_paths(RNGS, X)
    kinds = {path: type(module).__name__ for path, module in paths.items()}
    return (y, z, changed, left, kinds, list(paths)), variables


@given(trees)
@settings(deadline=None, max_examples=20)
def test_trees_of_modules(tree):
    same(lambda nn: outcome(nn, tree))


@given(trees)
@settings(deadline=None, max_examples=3)
def test_gradients_through_trees_of_modules(tree):
    def program(nn):
        model = make(nn, tree)
        try:
            variables = model.init(RNGS, X)
        except Exception as error:
            return type(error).__name__, {}

        @jax.jit
        def gradient(variables):
            def loss(params):
                y, _ = model.apply({**variables, "params": params}, X, rngs=RNGS, mutable=True)
                return (y**2).sum()

            return jax.grad(loss)(variables.get("params", {}))

        return gradient(variables), variables

    same(program)
