import subprocess
import sys
from typing import Any

import equinox
import flax.linen
import flax.nnx
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.interop.layers import DENSE, KEY, NAMED, RANDOM, SHAPE, STATEFUL, X
from weft import linen, nnx
from weft.config import REQUIRED, Required, config_class, config_for_class, config_for_function
from weft.core.axis_rules import logical_axis_rules
from weft.errors import (
    InvalidConfigValueError,
    LayerInputsError,
    LayerMethodError,
    LayerVariablesError,
    ParameterSpecError,
    UnknownLayerError,
)
from weft.functional import default_dot_general, int8_dot_general
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.layers.linear import Linear
from weft.hierarchy.module import Module, functional
from weft.hierarchy.param_init import DefaultInitializer
from weft.hierarchy.repeat import Repeat
from weft.interop import InHierarchy, as_hierarchy, as_linen
from weft.interop.hierarchy import HierarchyModel


def over(cases):
    return pytest.mark.parametrize("make", cases.values(), ids=cases)


def layer_of(guest, **kwargs):
    return as_hierarchy(*guest, inputs=SHAPE, **kwargs).clone(name="guest").instantiate(parent=None)


def run(layer, state, x=X, is_training=False, key=KEY):
    return functional(layer, key, state, (x,), is_training=is_training)


def is_spec(x):
    return hasattr(x, "mesh_axes")


@over(DENSE)
def test_layer_of_any_library_is_a_layer_of_the_hierarchy(make):
    layer = layer_of(make())
    specs = layer.create_parameter_specs_recursively()
    state = layer.initialize_parameters_recursively(KEY)
    shapes = jax.tree.map(lambda s: (tuple(s.shape), s.dtype), specs, is_leaf=is_spec)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    (y, outputs), again = jax.jit(lambda s: run(layer, s))(state), run(layer, state)[0]
    assert y.shape == (4, 2)
    np.testing.assert_allclose(y, again, rtol=1e-6)
    assert outputs.state_updates == {}


class Parent(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        inner: Required[Any] = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("inner", cfg.inner)

    def forward(self, x):
        return self.inner(x)


def parent_of(inner):
    return Parent.default_config().set(name="parent", inner=inner).instantiate(parent=None)


CHILDREN = {
    "nnx": lambda: config_for_class(nnx.Linear).set(in_features=3, out_features=2),
    "flax-nnx": lambda: config_for_class(flax.nnx.Linear).set(in_features=3, out_features=2),
    "nnx-object": lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
    "function": lambda: config_for_function(lambda rngs: nnx.Linear(3, 2, rngs=rngs)),
    "equinox": lambda: _Mapped(KEY),
    "linen": lambda: as_hierarchy(linen.Dense(2), inputs=SHAPE),
    "linen-config": lambda: as_hierarchy(
        config_for_class(linen.Dense).set(features=2), inputs=SHAPE
    ),
    "haiku": lambda: as_hierarchy(haiku.transform(lambda x: haiku.Linear(2)(x)), inputs=SHAPE),
}


class _Mapped(equinox.Module):
    linear: equinox.nn.Linear

    def __init__(self, key):
        self.linear = equinox.nn.Linear(3, 2, key=key)

    def __call__(self, x):
        return jax.vmap(self.linear)(x)


@over(CHILDREN)
def test_any_library_layer_is_a_child(make):
    layer = parent_of(make())
    state = layer.initialize_parameters_recursively(KEY)
    assert sorted(x.shape for x in jax.tree.leaves(state["inner"])) in (
        [(2,), (2, 3)],
        [(2,), (3, 2)],
    )
    y, _ = run(layer, state)
    assert y.shape == (4, 2) and layer.inner.path() == "parent.inner"


@pytest.mark.parametrize(
    "child",
    [linen.Dense(2), config_for_class(linen.Dense).set(features=2), flax.linen.Dense(2)],
    ids=["module", "config", "flax"],
)
def test_child_with_lazy_parameters_explains_how_to_pass_inputs(child):
    message = r"parent.inner holds a Dense, .* say weft.interop.as_hierarchy\(layer, inputs="
    with pytest.raises(LayerInputsError, match=message):
        parent_of(child).initialize_parameters_recursively(KEY)


def test_layouts_are_mesh_axes():
    for name in ("linen", "linen-logical", "flax-linen"):
        specs = layer_of(NAMED[name]()).create_parameter_specs_recursively()["params"]
        assert specs["kernel"].partition_spec == P(None, "model")
        assert specs["bias"].partition_spec == P(None)
    init = nnx.with_partitioning(jax.nn.initializers.ones, (None, "model"))
    with nnx.use_eager_sharding(False):
        layer = layer_of((nnx.Linear, 3, 2), kernel_init=init)
        specs = layer.create_parameter_specs_recursively()["params"]
    assert specs["kernel"].partition_spec == P(None, "model")


@pytest.mark.parametrize("case", STATEFUL.values(), ids=STATEFUL)
def test_state_is_updated_in_training_only(case):
    make, col = case
    layer = layer_of(make())
    state = layer.initialize_parameters_recursively(KEY)
    _, outputs = jax.jit(lambda s: run(layer, s, is_training=True))(state)
    updates = outputs.state_updates
    if make()[0].__class__.__name__ == "Config":  # a hierarchy layer is returned unchanged
        assert set(updates) == {"moving_mean", "moving_variance"}
        return
    assert set(updates) == {col}
    changed = jax.tree.leaves(updates)
    before = jax.tree.leaves(state[col])
    assert any(not jnp.array_equal(a, b) for a, b in zip(before, changed, strict=True))
    specs = layer.create_parameter_specs_recursively()[col]
    assert {s.weight_decay_scale for s in jax.tree.leaves(specs, is_leaf=is_spec)} == {0.0}
    _, outputs = run(layer, state)
    unchanged = zip(before, jax.tree.leaves(outputs.state_updates), strict=False)
    assert all(jnp.array_equal(a, b) for a, b in unchanged)


@over(RANDOM)
def test_keys_come_from_the_invocation(make):
    layer = layer_of(make())
    state = layer.initialize_parameters_recursively(KEY)
    a, b, c = (run(layer, state, is_training=True, key=jax.random.key(i))[0] for i in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert not jnp.array_equal(a, c)
    np.testing.assert_allclose(run(layer, state)[0], X)


class Net(BaseLayer):
    """A layer of Linen between layers of the hierarchy."""

    @config_class
    class Config(BaseLayer.Config):
        guest: Required[BaseLayer.Config] = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("first", Linear.default_config().set(input_dim=3, output_dim=3))
        self._add_child("guest", cfg.guest)

    def forward(self, x):
        return self.guest(self.first(x))


def test_config_defines_a_child():
    guest = as_hierarchy(config_for_class(linen.Dense).set(features=2), inputs=SHAPE)
    net = Net.default_config().set(name="net", guest=guest).instantiate(parent=None)
    state = net.initialize_parameters_recursively(KEY)
    assert set(state) == {"first", "guest"}
    assert run(net, state)[0].shape == (4, 2)
    again = net.initialize_parameters_recursively(KEY, prebuilt={"guest": state["guest"]})
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_hierarchy_alone_takes_children_of_any_kind():
    code = """
import sys
from weft.hierarchy import Linear, Module
assert "weft.interop" not in sys.modules
root = Module.default_config().set(name="root").instantiate(parent=None)
root._add_child("own", Linear.default_config().set(input_dim=3, output_dim=2))
assert "weft.interop.hierarchy" not in sys.modules

from weft.config import config_for_class, config_for_function
class Layer(Linear):
    def __init__(self, width, *, name, parent):
        cfg = Linear.default_config().set(name=name, input_dim=3, output_dim=width)
        super().__init__(cfg, parent=parent)
def layer(width, *, name, parent):
    return Layer(width, name=name, parent=parent)
root._add_child("function", config_for_function(layer).set(width=2))

from weft import linen, nnx
root._add_child("linen", config_for_class(linen.Dense).set(features=2))
root._add_child("nnx_class", config_for_class(nnx.Linear).set(in_features=3, out_features=2))
root._add_child("nnx_object", nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
print(*(type(child).__name__ for child in root.children.values()))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    assert run.stdout.split() == ["Linear", "Layer", *["InHierarchy"] * 3]


class Chain(Repeat):
    def forward(self, x):
        return self._run(lambda x, _: (self.layer(x), None), x).carry


def test_copies_of_it_are_stacked():
    guest = as_hierarchy(linen.Dense, 3, inputs=SHAPE)
    cfg = Chain.default_config().set(name="stack", layer=guest, num_layers=3)
    stack = cfg.instantiate(parent=None)
    state = stack.initialize_parameters_recursively(KEY)
    kernel = state["layer"]["params"]["kernel"]
    assert kernel.shape == (3, 3, 3)
    assert not jnp.array_equal(kernel[0], kernel[1])
    carry = jax.jit(lambda s: run(stack, s)[0])(state)
    want = X
    for k, b in zip(kernel, state["layer"]["params"]["bias"], strict=True):
        want = want @ k + b[None]
    np.testing.assert_allclose(carry, want, rtol=1e-4, atol=1e-5)


def test_sown_values_are_module_outputs():
    class Sows(linen.Module):
        @linen.compact
        def __call__(self, x):
            self.sow("intermediates", "seen", x)
            return linen.Dense(2)(x)

    layer = layer_of((Sows(),))
    state = layer.initialize_parameters_recursively(KEY)
    _, outputs = functional(layer, KEY, state, (X,), is_training=True, drop_output_collections=())
    np.testing.assert_array_equal(outputs.module_outputs["intermediates"]["seen"][0], X)


def test_prebuilt_values_must_match():
    layer = layer_of((linen.Dense(2),))
    with pytest.raises(ParameterSpecError, match=r"'params/kernel' of shape \(2,\) .*\(3, 2\)"):
        layer.initialize_parameters_recursively(KEY, prebuilt={"params": {"kernel": jnp.ones(2)}})
    with pytest.raises(ParameterSpecError, match="'params/weight'"):
        layer.initialize_parameters_recursively(KEY, prebuilt={"params": {"weight": jnp.ones(2)}})
    layer = layer_of((linen.Dropout(0.5),))
    with pytest.raises(ParameterSpecError, match=r"whose layer Dropout has: none\.$"):
        layer.initialize_parameters_recursively(KEY, prebuilt={"params": {"weight": jnp.ones(2)}})


def test_state_without_a_variable_is_rejected():
    layer = layer_of((linen.Dense(2),))
    with pytest.raises(LayerVariablesError, match="Dense has a variable 'params/bias'"):
        run(layer, {"params": {}})


# Layers of the hierarchy as models of other libraries.


class Reports(BaseLayer):
    """Reports summaries in addition to its result."""

    def forward(self, x, *, scale=1.0):
        self.add_summary("mean", x.mean())
        self.add_module_output("x", x)
        return scale * x


def test_summaries_and_outputs_are_collections():
    layer = as_linen(Reports.default_config())
    y, reported = layer.apply({}, X, scale=2.0, mutable=["summaries", "module_outputs"])
    np.testing.assert_array_equal(y, 2 * X)
    np.testing.assert_allclose(reported["summaries"]["mean"], X.mean(), rtol=1e-6)
    np.testing.assert_array_equal(reported["module_outputs"]["x"], X)


class Plain(Module):
    def forward(self, x):
        return x + 1


def test_non_layer_module():
    layer = as_linen(Plain)
    y, variables = layer.init_with_output(KEY, X)
    np.testing.assert_array_equal(y, X + 1)
    assert variables == {}


def test_missing_method_is_named():
    with pytest.raises(LayerMethodError, match="Plain has no method 'backward'"):
        HierarchyModel(Plain).apply({}, X, rngs={}, mutable=False, method="backward")
    with pytest.raises(LayerVariablesError, match="Linear has a variable 'weight'"):
        HierarchyModel(Linear, input_dim=3, output_dim=2).apply({}, X, rngs={}, mutable=False)


# Parameters of other libraries in the hierarchy: dtype, initialization, sharding, training.


class InHalf(Net):
    """A model whose parameters are in bfloat16."""

    def __init__(self, cfg, *, parent):
        super().__init__(cfg.set(dtype=jnp.bfloat16), parent=parent)


@over({"linen": linen.BatchNorm, "nnx": lambda: nnx.BatchNorm})
def test_dtype_of_parent_sets_parameter_dtype(make):
    args = (3,) if isinstance(make(), type) else ()
    guest = as_hierarchy(make(), *args, inputs=SHAPE)
    net = InHalf.default_config().set(name="net", guest=guest).instantiate(parent=None)
    specs = net.create_parameter_specs_recursively()["guest"]
    state = net.initialize_parameters_recursively(KEY)["guest"]
    for tree in (specs, state):
        assert {x.dtype for x in jax.tree.leaves(tree["params"], is_leaf=is_spec)} == {
            jnp.dtype(jnp.bfloat16)
        }
        assert {x.dtype for x in jax.tree.leaves(tree["batch_stats"], is_leaf=is_spec)} == {
            jnp.dtype(jnp.float32)
        }
    alone = layer_of((make(), *args)).create_parameter_specs_recursively()["params"]
    assert {x.dtype for x in jax.tree.leaves(alone, is_leaf=is_spec)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    "field",
    [{"param_init": DefaultInitializer.default_config()}, {"param_partition_spec": (None,)}],
)
def test_initialization_and_layout_belong_to_the_layer(field):
    cfg = as_hierarchy(linen.Dense(2), inputs=SHAPE).set(name="guest", **field)
    with pytest.raises(
        ParameterSpecError, match=r"guest has param_.* of Dense, a layer of another"
    ):
        cfg.instantiate(parent=None)


def test_unknown_object_is_named_with_its_path():
    with pytest.raises(UnknownLayerError, match=r"^guest: .*is not a layer of a known"):
        layer_of((object(),))


def test_rules_of_the_context_turn_names_into_mesh_axes():
    named = linen.with_logical_partitioning(jax.nn.initializers.ones, ("in", "out"))
    layer = layer_of((linen.Dense(2, kernel_init=named),))
    of_nnx = nnx.with_partitioning(jax.nn.initializers.ones, ("in", "out"))
    objects = layer_of((nnx.Linear, 3, 2), kernel_init=of_nnx)
    with logical_axis_rules([("in", None), ("out", "model"), ("in", "model")]):
        for each in (layer, objects):
            specs = each.create_parameter_specs_recursively()["params"]
            assert specs["kernel"].partition_spec == P(None, "model")
    # Without a rule one is not split, and the other is a mesh axis.
    assert layer.create_parameter_specs_recursively()["params"]["kernel"].partition_spec == P(
        None, None
    )


def test_layer_names_in_linen_follow_the_rules():
    cfg = Linear.default_config().set(input_dim=4, output_dim=2, bias=False)
    layer = as_linen(cfg.set(param_partition_spec=("in", "data")))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.ones((3, 4))
    with jax.set_mesh(mesh), logical_axis_rules([("in", None)]):
        y, variables = jax.jit(layer.init_with_output)(KEY, x)
        again = jax.jit(layer.apply)(variables, x)
    np.testing.assert_array_equal(y, again)
    assert linen.get_partition_spec(variables)["params"]["weight"] == P("in", "data")


QUANTIZED = {
    "linen": (linen.Dense(2), linen.Dense(2, dot_general=int8_dot_general)),
    "nnx": tuple(
        config_for_class(nnx.Linear).set(in_features=3, out_features=2, dot_general=product)
        for product in (jax.lax.dot_general, int8_dot_general)
    ),
}


@pytest.mark.parametrize("library", QUANTIZED)
def test_quantization_of_a_parent_holds_for_linear_layers(library):
    plain, by_hand = QUANTIZED[library]
    outputs = {}
    state = None
    for name, guest, outer, own in (
        ("plain", plain, None, None),
        ("by hand", by_hand, None, None),
        ("of the parent", plain, "int8", None),
        ("of its own", plain, "fp8", "int8"),
        ("off", plain, "int8", "off"),
    ):
        cfg = as_hierarchy(guest, inputs=SHAPE).set(quantization=own)
        parent = Parent.default_config().set(name="parent", inner=cfg, quantization=outer)
        layer = parent.instantiate(parent=None)
        state = state or layer.initialize_parameters_recursively(KEY)
        outputs[name] = run(layer, state)[0]
        inner, _ = functional(layer.inner, KEY, state["inner"], (X,), is_training=False)
        np.testing.assert_array_equal(inner, outputs[name])
    with default_dot_general(int8_dot_general):  # of the caller, which the layer ends
        outputs["off here"] = run(layer, state)[0]
    np.testing.assert_array_equal(outputs["of the parent"], outputs["by hand"])
    np.testing.assert_array_equal(outputs["of its own"], outputs["by hand"])
    np.testing.assert_array_equal(outputs["off"], outputs["plain"])
    np.testing.assert_array_equal(outputs["off here"], outputs["plain"])
    assert (outputs["by hand"] != outputs["plain"]).any()


@over({"flax": DENSE["flax-linen"], "equinox": DENSE["equinox"], "haiku": DENSE["haiku"]})
def test_quantization_of_other_libraries_is_refused(make):
    with pytest.raises(InvalidConfigValueError, match=r"guest is to quantize .*'off' here"):
        layer_of((as_hierarchy(*make(), inputs=SHAPE),), quantization="int8")
    layer_of((as_hierarchy(*make(), inputs=SHAPE),), quantization="off")


class Adapted(nnx.Module):
    """Layer with two kinds of parameters and other state."""

    def __init__(self, *, rngs):
        self.linear = nnx.LoRALinear(3, 2, lora_rank=1, rngs=rngs)
        self.seen = nnx.Cache(jnp.zeros(()))

    def __call__(self, x):
        self.seen[...] += 1
        return self.linear(x)


def test_derived_parameters_are_trained():
    layer = layer_of((config_for_class(Adapted),))
    specs = layer.create_parameter_specs_recursively()
    state_of = {
        col: {s.is_state for s in jax.tree.leaves(entries, is_leaf=is_spec)}
        for col, entries in specs.items()
    }
    assert state_of.pop("cache") == {True}
    assert len(state_of) == 2 and set.union(*state_of.values()) == {False}
    state = layer.initialize_parameters_recursively(KEY)
    updates = run(layer, state, is_training=True)[1].state_updates
    assert set(updates) == {"cache"}


class Counts(linen.Module):
    @linen.compact
    def __call__(self, x, twice=False):
        for _ in range(1 + twice):
            self.sow("summaries", "mean", x.mean())
        return linen.Dense(2, name="dense")(x)


def test_sown_summaries_are_summaries():
    layer = layer_of((Counts(),))
    state = layer.initialize_parameters_recursively(KEY)
    assert set(state) == {"params"}
    _, once = functional(layer, KEY, state, (X,), is_training=True)
    np.testing.assert_array_equal(once.summaries["mean"], X.mean())
    _, twice = functional(layer, KEY, state, {"x": X, "twice": True}, is_training=True)
    assert sorted(twice.summaries["mean"]) == ["0", "1"]


def test_hierarchy_config_is_kept():
    cfg = Linear.default_config().set(input_dim=3)
    assert as_hierarchy(cfg, output_dim=2) == cfg.clone(output_dim=2)
    assert as_hierarchy(Linear, output_dim=2) == Linear.default_config().set(output_dim=2)
    assert isinstance(as_hierarchy(linen.Dense, 2, inputs=(SHAPE,)), InHierarchy.Config)
