"""

Rules by the kind of array: layouts of parameters, optimizer state, gradients, activations.
"""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jax.sharding import PartitionSpec as P

from weft import linen, nnx
from weft.config import ConfigModifier, config_for_class, config_for_function
from weft.errors import ConfigModifierError, LogicalAxisError, MeshError
from weft.hierarchy.base_layer import BaseModel
from weft.hierarchy.layers import Linear
from weft.input.fake import FakeLmInput
from weft.trainer.learner import Learner
from weft.trainer.mesh import (
    HybridMeshShape,
    RulesByKind,
    build_mesh,
    check_divides,
    named_sharding,
    rules_of,
    select_mesh_config,
)
from weft.trainer.optimizers import adamw_optimizer, param_ema
from weft.trainer.trainer import SpmdTrainer


def devices(n):
    if jax.device_count() < n:
        pytest.skip(f"needs {n} devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    return jax.devices()[:n]


def test_shape_with_one_inferred_size():
    mesh = build_mesh((-1, 2), ("data", "model"), devices(4))
    assert dict(mesh.shape) == {"data": 2, "model": 2}


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2,), ("data", "model"), r"mesh_shape=\(2,\) has 1 axes and .* names 2"),
        ((-1, -1), ("data", "model"), "one may be -1 for the rest"),
        ((0,), ("data",), "each size is a positive number"),
        ((3,), ("data",), r"\(data=3\) needs 3 devices and there are 4"),
        ((3, -1), ("data", "model"), "needs a multiple of 3 devices and there are 4"),
    ],
)
def test_invalid_shapes(shape, names, message):
    with pytest.raises(MeshError, match=message):
        build_mesh(shape, names, devices(4))


class Device:
    """A device of a machine that is not here."""

    platform, device_kind = "gpu", "gpu"

    def __init__(self, id, slice_index=0, process_index=0):
        self.id, self.slice_index, self.process_index = id, slice_index, process_index


def ids(mesh):
    return [[device.id for device in row] for row in mesh.devices]


class Chip(Device):
    """A chip of a TPU slice that is not here."""

    platform, device_kind, core_on_chip = "tpu", "TPU v5", 0

    def __init__(self, id, coords):
        super().__init__(id)
        self.coords = coords


def test_sizes_that_split_an_axis_of_the_torus():
    coords = np.ndindex(4, 4, 4)
    chips = [Chip(i, xyz) for i, xyz in enumerate(coords)]
    mesh = build_mesh((-1, 8), ("data", "fsdp"), chips)
    assert dict(mesh.shape) == {"data": 8, "fsdp": 8}
    assert sorted(device.id for device in mesh.devices.flat) == list(range(64))


@pytest.mark.parametrize("kind", ["slice_index", "process_index"])
def test_hybrid_mesh_keeps_slices_or_hosts_together(kind):
    # As they come, devices of the two groups alternate.
    gpus = [Device(i, **{kind: i % 2}) for i in range(8)]
    shape = HybridMeshShape(ici_mesh_shape=(-1, 2), dcn_mesh_shape=(2, 1))
    mesh = build_mesh(shape, ("data", "model"), gpus)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert ids(mesh) == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_hybrid_mesh_with_slices_on_second_axis():
    gpus = [Device(i, slice_index=i // 4) for i in range(8)]
    shape = HybridMeshShape(ici_mesh_shape=(2, 2), dcn_mesh_shape=(1, -1))
    assert ids(build_mesh(shape, ("data", "model"), gpus)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_cpu_devices_emulate_slices():
    shape = HybridMeshShape(ici_mesh_shape=(1, 2), dcn_mesh_shape=(-1, 1))
    mesh = build_mesh(shape, ("data", "model"), devices(8))
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    rows = jax.NamedSharding(mesh, PartitionSpec("data", "model"))
    x = jax.device_put(jax.numpy.arange(8.0).reshape(4, 2), rows)
    assert float(jax.jit(lambda x: x.sum())(x)) == 28


@pytest.mark.parametrize(
    ("ici", "dcn", "message"),
    [
        ((2,), (2, 1), r"ici_mesh_shape=\(2,\) has 1 axes and .* names 2"),
        ((4, 1), (2, 1, 1), r"dcn_mesh_shape=\(2, 1, 1\) has 3 axes and .* names 2"),
        (
            (-1, 1),
            (-1, 1),
            r"ici_mesh_shape .* and dcn_mesh_shape \(data=-1, model=1\): .* one may",
        ),
        ((3, 1), (2, 1), r"ici_mesh_shape \(data=3.*dcn_mesh_shape \(data=2.*6 devices and .* 8"),
        ((1, 2), (4, 1), r"\(data=4, model=1\) spans 4 .* in 2 slice\(s\) and 1 process\(es\)"),
    ],
)
def test_invalid_hybrid_shapes(ici, dcn, message):
    gpus = [Device(i, slice_index=i // 4) for i in range(8)]
    with pytest.raises(MeshError, match=message):
        build_mesh(HybridMeshShape(ici, dcn), ("data", "model"), gpus)


def test_invalid_layouts():
    mesh = build_mesh((4, 1), ("data", "model"), devices(4))
    with pytest.raises(MeshError, match=r"m.w is laid out as .* no axis \['expert'\]; it has"):
        named_sharding(mesh, PartitionSpec("expert"), "m.w")
    sharding = named_sharding(mesh, PartitionSpec(None, ("data", "model")), "m.w")
    check_divides("m.w", (3, 8), sharding)
    with pytest.raises(
        MeshError, match=r"m.w of shape \(3, 6\) .* axis 1 of size 6 .* data×model = 4"
    ):
        check_divides("m.w", (3, 6), sharding)


class Doubled(ConfigModifier):
    def __call__(self, cfg):
        cfg.mesh_shape = (2 * cfg.mesh_shape[0],)
        return cfg


class Replaced(ConfigModifier):
    def __call__(self, cfg):
        return types.SimpleNamespace(mesh_shape=(1,))


def test_rules_select_by_hardware():
    cfg: Any = types.SimpleNamespace(
        mesh_shape=(1,),
        mesh_rules=[
            ("gpu-.*", (8,)),
            ("tpu-v4", None),
            ("tpu-v5p", Doubled.default_config()),
            ("tpu-v6", Replaced.default_config()),
            (".*", (2,)),
        ],
    )
    select_mesh_config(cfg, mesh_selector="tpu-v4")
    assert cfg.mesh_shape == (1,)
    select_mesh_config(cfg, mesh_selector="gpu-h100")
    assert cfg.mesh_shape == (8,)
    select_mesh_config(cfg, mesh_selector="tpu-v5p")
    assert cfg.mesh_shape == (16,)
    with pytest.raises(ConfigModifierError, match=r"mesh_rules\['tpu-v6'\]: Replaced returned"):
        select_mesh_config(cfg, mesh_selector="tpu-v6")
    cfg.mesh_rules = None
    select_mesh_config(cfg, mesh_selector="cpu")
    assert cfg.mesh_shape == (16,)


VOCAB, WIDTH = 8, 16
NAMES = ("embed", "hidden")
# The hidden axis is replicated for parameters, and sharded over "data" for their state.
BY_KIND = {
    "parameters": [("hidden", None)],
    "optimizer": [("hidden", "data")],
    "gradients": [("hidden", ("data", "model"))],
    "activations": [("hidden", "model")],
}


def loss_of(hidden):
    return jnp.square(hidden - 1.0).mean(), {}


class HierarchyModel(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        linear = Linear.default_config().set(input_dim=VOCAB, output_dim=WIDTH, bias=False)
        linear.set(param_partition_spec=NAMES, output_partition_spec=(None, None, "hidden"))
        self._add_child("dense", linear)

    def forward(self, input_batch):
        return loss_of(self.dense(jax.nn.one_hot(input_batch["input_ids"], VOCAB)))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, input_batch):
        init = linen.with_logical_partitioning(jax.nn.initializers.lecun_normal(), NAMES)
        dense = linen.Dense(WIDTH, use_bias=False, kernel_init=init, name="dense")
        hidden = dense(jax.nn.one_hot(input_batch["input_ids"], VOCAB))
        return loss_of(linen.with_logical_constraint(hidden, (None, None, "hidden")))


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(jax.nn.initializers.lecun_normal(), NAMES)
        self.dense = nnx.Linear(VOCAB, WIDTH, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, input_batch):
        return loss_of(self.dense(jax.nn.one_hot(input_batch["input_ids"], VOCAB)))


MODELS = {
    "hierarchy": HierarchyModel.default_config(),
    "linen": config_for_class(LinenModel),
    "nnx": config_for_class(NNXModel),
}


def trainer_of(model, **kinds):
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=0.1, b1=0.9, b2=0.95, eps=1e-8
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir="",
        model=model,
        learner=Learner.default_config().set(
            optimizer=optimizer, ema=config_for_function(param_ema).set(decay=0.9)
        ),
        input=FakeLmInput.default_config().set(
            is_training=True, global_batch_size=8, source_length=2, max_token_id=VOCAB
        ),
        mesh_shape=(4, 2),
        mesh_axis_names=("data", "model"),
        logical_axis_rules=[("embed", None), ("hidden", "model")],
        rules_by_kind=RulesByKind.default_config().set(**kinds),
    )
    return cfg.instantiate(parent=None, devices=jax.devices()[:8])


def step(trainer):
    """Returns the state after a step from constant parameters, and the compiled step's text."""
    trainer.init(jax.random.key(0))
    layouts = jax.tree.map(lambda x: x.sharding, trainer.trainer_state.model)
    ramp = jax.tree.map(
        lambda x: np.linspace(-1, 1, x.size, dtype=x.dtype).reshape(x.shape),
        trainer.trainer_state.model,
    )
    state = trainer.trainer_state._replace(model=jax.device_put(ramp, layouts))
    batch = {"input_ids": np.arange(16).reshape(8, 2) % VOCAB}
    batch["target_labels"] = batch["input_ids"]
    with trainer.mesh():
        program = trainer._train_step.lower(state, batch)
        return program.compile()(state, batch), program.as_text()


def kernels(tree):
    """Returns the arrays of a tree that have the shape of the kernel."""
    return [x for x in jax.tree.leaves(tree) if x.shape == (VOCAB, WIDTH)]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_rules_by_kind_only_change_sharding(model):
    (plain, outputs), _ = step(trainer_of(model))
    (state, by_kind), text = step(trainer_of(model, **BY_KIND))
    assert {x.sharding.spec for x in kernels(plain)} == {P(None, "model")}
    assert [x.is_fully_replicated for x in kernels(state.model)] == [True]
    # Two moments and the moving average.
    assert [x.sharding.spec for x in kernels(state.learner)] == [P(None, "data")] * 3
    assert '[{}, {"data", "model"}]> : tensor<8x16xf32>' in text
    assert ('[{}, {}, {"model"}]> : tensor<8x2x16xf32>' in text) == (model is not MODELS["nnx"])
    np.testing.assert_allclose(outputs["loss"], by_kind["loss"], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7),
        (plain.model, plain.learner),
        (state.model, state.learner),
    )


def test_malformed_rules():
    twice = SpmdTrainer.default_config().set(logical_axis_rules=[("hidden", ("data", "data"))])
    with pytest.raises(LogicalAxisError, match=r"the rule for 'hidden' .* each may be there once"):
        rules_of(twice)
