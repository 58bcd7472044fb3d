import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.trainer.test_state import OPTIMIZER
from weft.errors import MeshError
from weft.hierarchy.base_model import BaseModel
from weft.hierarchy.layers import Linear
from weft.input.fake import FakeLmInput
from weft.trainer.anomalies import AnomalyPolicy
from weft.trainer.learner import Learner
from weft.trainer.mesh import build_mesh
from weft.trainer.rules_by_kind import rules_of
from weft.trainer.state import new_state, state_shardings, state_specs
from weft.trainer.step_program import jit_train_step
from weft.trainer.trainer import SpmdTrainer

MESH_AXES = ("data", "model")


class Model(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        linear = Linear.default_config().set(input_dim=4, output_dim=6, bias=False)
        self._add_child("linear", linear.set(param_partition_spec=(None, "model")))

    def forward(self, input_batch):
        return self.linear(jax.nn.one_hot(input_batch["input_ids"], 4)).mean(), {}


class Program:
    """A step on a mesh of two devices, and the state before the first one."""

    def __init__(self, **fields):
        if jax.device_count() < 2:
            pytest.skip("needs 2 devices")
        parts = {
            "model": Model.default_config(),
            "learner": Learner.default_config().set(optimizer=OPTIMIZER),
            "input": FakeLmInput.default_config().set(
                is_training=True, global_batch_size=2, source_length=2, max_token_id=4
            ),
        }
        cfg = SpmdTrainer.default_config().set(**parts, **fields)
        made = {k: part.set(name=k).instantiate(parent=None) for k, part in parts.items()}
        self.model, self.learner = made["model"], made["learner"]
        self.mesh = build_mesh((1, 2), MESH_AXES, jax.devices()[:2])
        self.specs = state_specs(self.model, self.learner, rules_of(cfg))
        self.shardings = state_shardings(self.mesh, self.specs)
        self.step = jit_train_step(
            cfg,
            model=self.model,
            learner=self.learner,
            input_=made["input"],
            mesh=self.mesh,
            specs=self.specs,
            shardings=self.shardings,
        )

    def state(self):
        def begin(key):
            return new_state(
                key, model=self.model, learner=self.learner, model_specs=self.specs.model
            )

        return jax.jit(begin, out_shardings=self.shardings)(jax.random.key(0))


def test_a_step_takes_the_state_over_and_keeps_its_layouts():
    program = Program()
    state = program.state()
    weight = state.model["linear"]["weight"]
    first = np.asarray(weight)
    with jax.set_mesh(program.mesh):
        ids = np.ones((2, 2), np.int32)
        after, outputs = program.step(state, {"input_ids": ids, "target_labels": ids})
    assert weight.is_deleted()
    moved = after.model["linear"]["weight"]
    assert moved.sharding.spec == P(None, "model")
    assert np.all(np.asarray(moved)[1] < first[1])
    assert outputs["loss"].sharding.is_fully_replicated


@pytest.mark.parametrize("policy", [None, AnomalyPolicy.default_config()], ids=["plain", "guarded"])
def test_a_profile_shows_the_step_the_modules_and_the_arguments(policy):
    program = Program(anomaly_policy=policy)
    ids = np.ones((2, 2), np.int32)
    with jax.set_mesh(program.mesh):
        lowered = program.step.lower(program.state(), {"input_ids": ids, "target_labels": ids})
    text = lowered.as_text(debug_info=True)
    assert "module @jit_train_step" in text
    assert "model['linear']['weight']\"" in text and "\"batch['input_ids']\"" in text
    compiled = lowered.compile().as_text()
    assert 'op_name="jit(train_step)/' in compiled
    for path in ("jvp(model)/linear/", "transpose(jvp(model))/linear/", "learner/optimizer"):
        assert path in compiled


def test_a_gradient_that_does_not_fit_the_mesh_is_named():
    with pytest.raises(MeshError, match=r"gradients\.linear\.weight .* no axis \['fsdp'\]"):
        kinds = SpmdTrainer.default_config().rules_by_kind.set(gradients=[("model", "fsdp")])
        Program(rules_by_kind=kinds)
