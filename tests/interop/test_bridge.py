import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interop.layers import KEY, X, normal
from weft import linen as nn
from weft import nnx
from weft.errors import (
    BridgeContextError,
    InvalidRngError,
    LayerMethodError,
    LayerVariablesError,
    ModifyScopeVariableError,
    RngStreamNotFoundError,
    ScopeParamShapeError,
)
from weft.interop.bridge import (
    AttrPriority,
    Module,
    Scope,
    compact,
    current_context,
    current_module,
    enter_module,
    linen_in_bridge_mdl,
    nnx_in_bridge_mdl,
)
from weft.interop.variables import with_partitioning


class Scale(Module):
    by: float = 1.0

    def __call__(self, x):
        scale = self.param("scale", normal, x.shape[-1:])
        return self.by * x * jnp.broadcast_to(scale, x.shape)


class Dense(Module):
    features: int

    def __call__(self, x):
        return x @ self.param("kernel", normal, (x.shape[-1], self.features))


class Net(Module):
    def setup(self):
        self.first = Dense(3)
        self.many = [Scale(), {"a": Scale(2.0)}]

    @compact
    def __call__(self, x):
        x = self.many[1]["a"](self.many[0](self.first(x)))
        calls = self.variable("calls", "n", lambda: jnp.zeros((), int))
        calls[...] += 1
        scale = Scale()
        return Dense(2, name="head")(scale(scale(x)))

    def encode(self, x):
        return self.first(x)


def shapes(variables):
    return jax.tree.map(jnp.shape, variables)


def test_variables_are_named_as_submodules_are():
    y, variables = Net().init_with_output(KEY, X)
    assert y.shape == (4, 2)
    assert shapes(variables) == {
        "params": {
            "first": {"kernel": (3, 3)},
            "many": {0: {"scale": (3,)}, 1: {"a": {"scale": (3,)}}},
            "Scale_0": {"scale": (3,)},
            "head": {"kernel": (3, 2)},
        },
        "calls": {"n": ()},
    }
    np.testing.assert_allclose(jax.jit(Net().apply)(variables, X), y, rtol=1e-5)


def test_custom_init_and_fields():
    class Parent(Module):
        child: Module
        bias: bool = False

        def __call__(self, x):
            return self.child(x)

    assert shapes(Parent(Dense(2)).init(KEY, X)) == {"params": {"child": {"kernel": (3, 2)}}}
    child = Dense(2)
    parent = Parent(child, bias=True)
    parent.init(KEY, X)
    assert (parent.child, parent.bias, child.scope) == (child, True, None)

    class Own(Module):
        def __init__(self, n):
            self.n = n
            self.set_attr_priority("n", AttrPriority.LOW)

        def __call__(self):
            return self.n

    assert Own(3).apply({}) == 3


def test_axes_have_names():
    class Boxed(Module):
        @compact
        def __call__(self, x):
            a = self.param("a", with_partitioning(normal, ("x", None)), (3, 2))
            b = self.param("b", nn.with_partitioning(normal, ("y",)), (2,))
            assert b.out_sharding == ("y",)
            return x @ a + b[None]

    with nnx.use_eager_sharding(False):
        variables = Boxed().init(KEY, X)
    assert isinstance(variables["params"]["a"], nn.Partitioned)
    assert variables["params"]["a"].names == ("x", None)
    assert Boxed().apply(variables, X).shape == (4, 2)
    variables["params"]["b"] = variables["params"]["b"].replace_boxed(jnp.ones(3))
    with pytest.raises(ScopeParamShapeError, match=r"'b' in the scope 'Boxed' has shape \[\(3,\)"):
        Boxed().apply(variables, X)


def test_modules_and_arrays_that_are_assigned():
    class Assigns(Module):
        @compact
        def __call__(self, x):
            rngs = self.scope.rngs if self.is_initializing() else nnx.Rngs(9)
            self.linear = nnx.Linear(3, 2, rngs=rngs)
            self.offset = jnp.zeros(2) if self.is_initializing() else jnp.ones(2)
            self.own = nnx.Param(jnp.zeros(2)) if self.is_initializing() else nnx.Param(jnp.ones(2))
            return self.linear(x) + (self.offset + self.own)[None]

    y, variables = Assigns().init_with_output(KEY, X)
    assert set(variables) == {"params", "arrays"}
    np.testing.assert_allclose(Assigns().apply(variables, X), y, rtol=1e-6)


def test_current_module_in_methods():
    seen = []

    class Knows(Module):
        def setup(self):
            seen.append((current_module() is self, current_context().in_compact))

        @compact
        def __call__(self):
            seen.append((current_module() is self, current_context().in_compact))
            seen.append((self.is_initializing(), self.variables))
            self.encode()
            return self.make_rng("noise"), self.make_rng()

        def encode(self):
            seen.append((current_module() is self, current_context().in_compact))

    a, b = Knows().apply({}, rngs={"noise": KEY, "default": 1})
    assert seen == [(True, False), (True, True), (False, {}), (True, False)]
    assert a == nnx.Rngs(noise=KEY).noise()
    assert b == nnx.Rngs(1)()
    Knows().init(1)
    assert seen[6] == (True, {})
    assert current_module() is None


def test_parent_is_the_running_module():
    class Outer(Module):
        @compact
        def __call__(self, x):
            return Dense(2, parent=Dense(3))(x)

    with pytest.raises(BridgeContextError, match=r"given a Dense as its parent, .* a Outer, to"):
        Outer().init(KEY, X)


def test_errors_name_missing_items():
    with pytest.raises(BridgeContextError, match="parameter 'kernel' was asked for by a Dense"):
        Dense(2)(X)
    with pytest.raises(RngStreamNotFoundError, match="'params'"):
        Dense(2).apply({}, X)
    with pytest.raises(LayerVariablesError, match="given 'kernel' in two collections"):
        Dense(2).apply({"params": {"kernel": X}, "cache": {"kernel": X}}, X)
    with pytest.raises(LayerVariablesError, match=r"Dense\.kernel is a Cache, where .* 'params'"):
        Dense(2).apply({"cache": {"kernel": X}}, X)

    class Asks(Module):
        def __call__(self):
            return self.variable("state", "n")

    with pytest.raises(LayerVariablesError, match="Asks has no variable 'n' in 'state'"):
        Asks().init(KEY)
    assert Asks().apply({"state": {"n": 3}})[...] == 3
    with pytest.raises(TypeError, match="name"):
        Dense(2, name="a")


def test_scopes_share_their_streams():
    scope = Scope(nnx.Rngs(0), ["params"], initializing=True)
    scope.unused_variables["w"] = 1
    copy = scope.copy()
    assert copy is not scope
    assert copy.rngs is scope.rngs
    assert (copy.mutable, copy.initializing, dict(copy.unused_variables)) == (("params",), True, {})
    assert len(jax.tree.leaves(scope)) == 2
    assert Scope(nnx.Rngs(0)).mutable is False


def test_priorities():
    assert sorted(AttrPriority) == [0, 20, 50, 100]


def test_current_context():
    assert current_context() is current_module() is None
    module = Module()
    with enter_module(module, in_compact=True) as entry:
        assert current_context() is entry
        assert current_module() is module
        assert entry.type_counter[int] == 0
        with enter_module(Module()):
            assert not current_context().in_compact
    with pytest.raises(RuntimeError, match="stop"), enter_module(module):
        raise RuntimeError("stop")
    assert current_context() is None


class Outer(Module):
    train: bool = False

    @compact
    def __call__(self, x):
        x = nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 3, rngs=rngs))(x)
        x = linen_in_bridge_mdl(nn.BatchNorm(use_running_average=not self.train), name="norm")(x)
        x = linen_in_bridge_mdl(nn.Dense(2))(x)
        dropout = nnx_in_bridge_mdl(lambda rngs: nnx.Dropout(0.5, rngs=rngs), name="dropout")
        return dropout(x, deterministic=not self.train)


def test_outside_of_modules_fails():
    with pytest.raises(BridgeContextError, match="linen_in_bridge_mdl was called outside"):
        linen_in_bridge_mdl(nn.Dense(2))
    with pytest.raises(BridgeContextError, match="nnx_in_bridge_mdl was called outside"):
        nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 3, rngs=rngs))
    with pytest.raises(BridgeContextError, match="the PRNG streams was asked for by a Outer"):
        Outer()(X)


def test_state_and_keys():
    net = Outer(train=True)
    variables = Outer().init(nnx.Rngs(0), X)
    rngs = {"dropout": KEY}
    _, after = net.apply(variables, X, rngs=rngs, mutable=["batch_stats"])
    assert jnp.any(after["batch_stats"]["norm"]["mean"])
    with pytest.raises(ModifyScopeVariableError, match="batch_stats"):
        net.apply(variables, X, rngs=rngs)
    with pytest.raises(InvalidRngError, match="draws a key from a PRNG stream"):
        net.apply(variables, X, mutable=True)


def test_methods():
    net, variables = Net(), Net().init(KEY, X)
    a = net.apply(variables, X, method="encode")
    b = net.apply(variables, X, method=Net.encode)
    np.testing.assert_array_equal(a, b)
    _, all_of_them = net.apply(variables, X, method="encode", mutable=True)
    assert shapes(all_of_them) == shapes(variables)
    with pytest.raises(LayerMethodError, match="Net has no method 'decode'"):
        net.apply(variables, X, method="decode")


def test_second_call_shares_variables():
    class Outer(Module):
        @compact
        def __call__(self, x):
            return Scale()(x)

    class Twice(Module):
        @compact
        def __call__(self, x):
            outer = Outer()
            return outer(outer(x))

    variables = Twice().init(KEY, X)
    assert shapes(variables) == {"params": {"Outer_0": {"Scale_0": {"scale": (3,)}}}}
    scale = variables["params"]["Outer_0"]["Scale_0"]["scale"]
    np.testing.assert_allclose(Twice().apply(variables, X), X * scale[None] ** 2, rtol=1e-5)
