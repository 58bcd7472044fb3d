import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from weft.config import config_for_function
from weft.errors import MeshError, ModelSizeError
from weft.hierarchy import TensorSpec
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.layers.linear import Linear
from weft.input.dispatch import InputDispatcher
from weft.input.fake import FakeLmInput
from weft.trainer import state
from weft.trainer.learner import Learner
from weft.trainer.mesh import build_mesh
from weft.trainer.optimizers import adamw_optimizer
from weft.trainer.state import (
    batch_partition,
    batch_shapes,
    new_state,
    open_batches,
    parameter_specs,
    state_shardings,
    state_specs,
    with_shardings,
)

OPTIMIZER = config_for_function(adamw_optimizer).set(learning_rate=0.1, b1=0.9, b2=0.99, eps=1e-8)


@pytest.fixture(scope="module")
def parts():
    model = Linear.default_config().set(name="model", input_dim=3, output_dim=4)
    model.param_partition_spec = (None, "model")
    learner = Learner.default_config().set(name="learner", optimizer=OPTIMIZER)
    return model.instantiate(parent=None), learner.instantiate(parent=None)


def test_new_state_matches_its_specs(parts):
    model, learner = parts
    specs = state_specs(model, learner)
    mesh = build_mesh((4, 2), ("data", "model"), jax.devices()[:8])
    shardings = state_shardings(mesh, specs)

    def begin(key):
        return new_state(key, model=model, learner=learner, model_specs=specs.model)

    state = jax.jit(begin, out_shardings=shardings)(jax.random.key(0))
    weight = state.model["weight"]
    assert weight.sharding == NamedSharding(mesh, P(None, "model"))
    assert weight.addressable_shards[0].data.shape == (3, 2)
    assert not jnp.array_equal(jax.random.key_data(state.prng_key), [0, 0])
    target = with_shardings(jax.eval_shape(begin, jax.random.key(0)), shardings)
    assert target.model["weight"] == jax.ShapeDtypeStruct(
        (3, 4), "float32", sharding=weight.sharding
    )


def test_mesh_mismatch_is_named(parts):
    mesh = build_mesh((1, 8), ("data", "model"), jax.devices()[:8])
    with pytest.raises(MeshError, match=r"model\.bias of shape \(4,\).* over model = 8"):
        state_shardings(mesh, state_specs(*parts))


def input_of(**kwargs):
    cfg = FakeLmInput.default_config().set(
        name="input", is_training=True, global_batch_size=8, source_length=4
    )
    return cfg.set(**kwargs).instantiate(parent=None)


@pytest.fixture(scope="module")
def mesh():
    return build_mesh((4, 2), ("data", "model"), jax.devices()[:8])


def test_input_partition_spec_is_used():
    assert batch_partition(input_of(), ("data", "model")) == P(("data", "model"))
    own = input_of(partition_spec=P("model"))
    assert batch_partition(own, "data") == P("model")


@pytest.mark.parametrize("is_padded", [False, True])
def test_batches_are_sharded_like_their_shapes(mesh, is_padded):
    input_ = input_of(total_num_batches=2)
    if is_padded:
        padded = InputDispatcher.default_config().set(
            global_logical_batch_size=8, global_physical_batch_size=16
        )
        input_ = input_of(total_num_batches=2, input_dispatcher=padded)
    with jax.set_mesh(mesh), open_batches(input_, P("data"), mesh) as batches:
        batch, *rest = batches
    assert len(rest) == 1
    shapes = batch_shapes(input_, P("data"), mesh)
    assert jax.tree.structure(batch) == jax.tree.structure(shapes)
    for x, shape in zip(jax.tree.leaves(batch), jax.tree.leaves(shapes), strict=True):
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
        assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)


@pytest.mark.parametrize("output_dim", [10**9, 10**12])
def test_sizes_that_no_array_has_are_refused_by_path(output_dim):
    model = Linear.default_config().set(name="model", input_dim=3000, output_dim=output_dim)
    message = rf"the parameter (weight|bias) of the model has the shape \(.*{output_dim}"
    with pytest.raises(ModelSizeError, match=message):
        parameter_specs(model.instantiate(parent=None), ())


def test_state_larger_than_the_memory_is_refused_before_it_is_made(monkeypatch):
    devices = jax.devices()[:1]
    mesh = jax.sharding.Mesh(devices, ("data",))
    halves = TensorSpec(shape=(4,), dtype=jnp.bfloat16)
    specs = {"a": {"w": TensorSpec(shape=(2, 3)), "v": halves}}
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, P()), specs)
    monkeypatch.setattr(state, "memory_bytes", lambda: 32)
    state.check_memory(specs, shardings, devices)
    monkeypatch.setattr(state, "memory_bytes", lambda: 31)
    with pytest.raises(ModelSizeError, match=r"takes 32 bytes .* largest array is a\.w with 24"):
        state.check_memory(specs, shardings, devices)


class Initialized(BaseLayer):
    """Initializes its parameters in its own way, with the arguments that AXLearn passes."""

    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec((2,))}

    def initialize_parameters_recursively(self, prng_key, *, prebuilt):
        assert prebuilt == {"weight": None}
        return {"weight": jnp.full(2, 7.0)}


def test_a_model_may_initialize_itself(parts):
    model = Initialized.default_config().set(name="model").instantiate(parent=None)
    learner = parts[1]
    specs = state_specs(model, learner)
    begun = new_state(jax.random.key(0), model=model, learner=learner, model_specs=specs.model)
    assert begun.model["weight"].tolist() == [7.0, 7.0]
