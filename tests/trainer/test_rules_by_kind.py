"""Rules by the kind of array: layouts of parameters, optimizer state, gradients, activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from weft import linen, nnx
from weft.config import config_for_class, config_for_function
from weft.errors import LogicalAxisError
from weft.hierarchy.base_model import BaseModel
from weft.hierarchy.layers import Linear
from weft.input.fake import FakeLmInput
from weft.trainer.learner import Learner
from weft.trainer.optimizers import adamw_optimizer, param_ema
from weft.trainer.rules_by_kind import KindRules, RulesByKind, rules_of
from weft.trainer.trainer import SpmdTrainer

VOCAB, WIDTH = 8, 16
NAMES = ("embed", "hidden")
# The hidden axis of parameters lies nowhere, that of what belongs to them over "data".
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
    """The state after a step from constant parameters, and the text of the compiled step."""
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
    """The arrays of a tree that have the shape of the kernel."""
    return [x for x in jax.tree.leaves(tree) if x.shape == (VOCAB, WIDTH)]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_each_kind_lies_by_its_own_rules_and_nothing_else_changes(model):
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


def test_a_name_has_the_rules_of_its_kind_or_those_for_all():
    rules = RulesByKind.default_config().set(**BY_KIND).instantiate()
    of_kind = rules.with_all([("hidden", "model"), ("embed", "data")])
    assert of_kind.parameters == (("hidden", None), ("embed", "data"))
    assert of_kind.optimizer == (("hidden", "data"), ("embed", "data"))
    assert RulesByKind.default_config().instantiate().with_all([]) == KindRules()


def test_rules_that_are_not_in_form():
    twice = SpmdTrainer.default_config().set(logical_axis_rules=[("hidden", ("data", "data"))])
    with pytest.raises(LogicalAxisError, match=r"the rule for 'hidden' .* each may be there once"):
        rules_of(twice)
