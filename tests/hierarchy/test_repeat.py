import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_class, config_for_function
from weft.errors import AxisSizeError, ParameterSpecError
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec, RematSpec
from weft.hierarchy.context import fold_in_name
from weft.hierarchy.module import functional as F
from weft.hierarchy.repeat import Repeat
from weft.struct import VDict

DIM = 3


class Dense(BaseLayer):
    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec((DIM, DIM), mesh_axes=(None, "model"))}

    def forward(self, x):
        return x @ self.parameters["weight"]


class Block(BaseLayer):
    """Has a parameter, a child, randomness and all sorts of outputs."""

    @config_class
    class Config(BaseLayer.Config):
        dense: Dense.Config = Dense.default_config()

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("dense", cfg.dense)

    def _create_layer_parameter_specs(self):
        return {"scale": ParameterSpec((DIM,))}

    def forward(self, x, shift=0.0):
        y = jnp.tanh(self.dense(x)) * self.parameters["scale"][None] + shift
        self.add_summary("mean", y.mean())
        self.add_state_update("scale", self.parameters["scale"] + 1)
        self.add_module_output("y", y)
        return y

    def key(self):
        return self.prng_key


class Chain(Repeat):
    def forward(self, x, shifts=None):
        self.add_summary("outer", jnp.float32(7.0))

        def step(x, shift):
            y = self.layer(x) if shift is None else self.layer(x, shift)
            return y, (y.sum(), x)

        return self._run(step, x, xs=shifts)

    def keys(self):
        return self._run(lambda carry, _: (carry, self.layer.key())).ys


def chain(num_layers=3, **fields):
    layer = Block.default_config().set(**fields.pop("layer", {}))
    cfg = Chain.default_config().set(name="chain", num_layers=num_layers, layer=layer, **fields)
    return cfg.instantiate(parent=None)


def run(module, state, *inputs, **kwargs):
    kwargs = {"prng_key": jax.random.PRNGKey(1), "is_training": True, **kwargs}
    return F(module, state=state, inputs=inputs, **kwargs)


def reference(state, x, shifts):
    ys = []
    for i, shift in enumerate(shifts):
        weight, scale = state["layer"]["dense"]["weight"][i], state["layer"]["scale"][i]
        x = jnp.tanh(x @ weight) * scale[None] + shift
        ys.append(x)
    return x, ys


@pytest.fixture
def state():
    return chain().initialize_parameters_recursively(jax.random.PRNGKey(0))


X = jnp.linspace(-1.0, 1.0, 2 * DIM).reshape(2, DIM)


def test_equals_a_python_loop(state):
    shifts = jnp.array([0.1, 0.2, 0.3])
    (carry, (sums, xs)), outputs = run(chain(), state, X, shifts)
    expected, ys = reference(state, X, shifts)
    np.testing.assert_allclose(carry, expected, rtol=1e-5)
    np.testing.assert_allclose(sums, [y.sum() for y in ys], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(xs, [X, *ys[:-1]], rtol=1e-5)
    for i, y in enumerate(ys):
        np.testing.assert_allclose(outputs.summaries[f"layer{i}"]["mean"], y.mean(), atol=1e-6)


def test_output_has_names(state):
    output, _ = run(chain(), state, X)
    assert output.carry.shape == X.shape
    assert output.ys[0].shape == (3,)


def test_module_outputs_are_kept_on_request(state):
    def keep_all():
        return lambda path: False

    module = chain(drop_output=config_for_function(keep_all))
    _, outputs = run(module, state, X, drop_output_collections=())
    assert outputs.module_outputs["layer"]["y"].shape == (3, 2, DIM)


def test_drop_output_matches_whole_paths(state):
    module = chain()
    rules = module.config.drop_output.clone(rules=["summaries/mea.", "module_outputs"])
    _, outputs = run(chain(drop_output=rules), state, X, drop_output_collections=())
    assert sorted(outputs.summaries) == ["outer"]
    assert "y" in outputs.module_outputs["layer"]


def test_each_iteration_has_its_own_key():
    module = chain()
    root = jax.random.PRNGKey(123)
    state = module.initialize_parameters_recursively(root)
    keys, _ = F(module, root, state, (), method="keys", is_training=True)
    for key in keys:
        root, expected = jax.random.split(root)
        np.testing.assert_array_equal(key, expected)


def test_state_is_stacked_and_drawn_by_layer(state):
    assert isinstance(state["layer"], VDict)
    assert state["layer"]["dense"]["weight"].shape == (3, DIM, DIM)
    first, second, third = state["layer"]["dense"]["weight"]
    assert not np.allclose(first, second) and not np.allclose(second, third)
    # The fans are those of one layer, and its key does not depend on the number of layers.
    block = Block.default_config().set(name="block").instantiate(parent=None)
    key = jax.random.split(fold_in_name(jax.random.PRNGKey(0), "layer"))[1]
    alone = block.initialize_parameters_recursively(key)
    np.testing.assert_allclose(first, alone["dense"]["weight"], rtol=1e-6)
    more = chain(num_layers=5).initialize_parameters_recursively(jax.random.PRNGKey(0))
    np.testing.assert_allclose(
        more["layer"]["dense"]["weight"][:3], state["layer"]["dense"]["weight"]
    )


def test_prebuilt(state):
    scale = jnp.arange(9.0).reshape(3, DIM)
    given = {"layer": {"scale": scale, "dense": {"weight": None}}}
    made = chain().initialize_parameters_recursively(jax.random.PRNGKey(0), prebuilt=given)
    np.testing.assert_array_equal(made["layer"]["scale"], scale)
    np.testing.assert_allclose(
        made["layer"]["dense"]["weight"], state["layer"]["dense"]["weight"], rtol=1e-6
    )


@pytest.mark.parametrize(
    "shape, message",
    [
        (
            (2, DIM),
            "prebuilt chain.layer['scale'] has shape (2, 3); expected a leading axis of 3",
        ),
        ((3, 4), "prebuilt chain.layer.scale has the shape (4,); expected (3,)"),
    ],
)
def test_prebuilt_of_a_wrong_shape(shape, message):
    given = {"layer": {"scale": jnp.zeros(shape)}}
    with pytest.raises(ParameterSpecError, match=re.escape(message)):
        chain().initialize_parameters_recursively(jax.random.PRNGKey(0), prebuilt=given)


def test_wrong_number_of_layers(state):
    with pytest.raises(AxisSizeError, match="different sizes"):
        run(chain(num_layers=4), state, X)


def loss_and_grads(module, state):
    def loss(state):
        (carry, _), outputs = run(module, state, X)
        return (carry**2).sum(), outputs

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(state)


@pytest.mark.parametrize(
    "fields",
    [
        {"unroll": 2},
        {"unroll": True},
        {"layer": {"remat_spec": RematSpec()}},
        {"layer": {"remat_spec": RematSpec(policy=jax.checkpoint_policies.dots_saveable)}},
        {"layer": {"remat_spec": RematSpec()}, "unroll": True},
    ],
    ids=["by two", "unrolled", "remat", "with a policy", "remat, unrolled"],
)
def test_unroll_and_remat_keep_values(state, fields):
    (expected, outputs), grads = loss_and_grads(chain(), state)
    (loss, also_outputs), also_grads = loss_and_grads(chain(**fields), state)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), also_grads, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), also_outputs, outputs)


def test_remat_is_in_the_loop(state):
    def jaxpr(module, is_training=True):
        return str(jax.make_jaxpr(lambda s: run(module, s, X, is_training=is_training))(state))

    assert "checkpoint" not in jaxpr(chain())
    module = chain(layer={"remat_spec": RematSpec()})
    assert "prevent_cse=False" in jaxpr(module)
    assert "checkpoint" not in jaxpr(module, is_training=False)


def test_a_few_layers_are_unrolled_on_one_cpu(state):
    def unrolls(module):
        return f"unroll={module.config.num_layers}" in str(
            jax.make_jaxpr(lambda s: run(module, s, X))(state)
        )

    assert unrolls(chain())
    assert not unrolls(chain(unroll=1))
    assert not unrolls(chain(layer={"remat_spec": RematSpec()}))
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert not unrolls(chain())
