"""Builders and converters that others are made of; with checkpoints in test_state_builder.py."""

import jax
import jax.numpy as jnp
import pytest

from weft.errors import CheckpointStructureError
from weft.trainer.checkpointer.index import CheckpointValidationType
from weft.trainer.state_builder import Builder, ChainBuilder, initial_state
from weft.trainer.train_step import TrainerState


class Renames(Builder):
    """Gives the parameter another name."""

    def input_state_type(self):
        return Builder.StateType.TENSORS

    def __call__(self, state):
        model = {"other": state.trainer_state.model["w"]}
        return Builder.State(0, state.trainer_state._replace(model=model))


def state():
    return TrainerState(prng_key=jax.random.key(0), model={"w": jnp.ones(2)}, learner={})


@pytest.mark.parametrize("validation", [CheckpointValidationType.EXACT, None], ids=str)
def test_chain_state_type_depends_on_validation(validation):
    cfg = ChainBuilder.default_config().set(name="chain", builders=[Renames.default_config()])
    chain = cfg.set(validation=validation).instantiate(parent=None)
    assert chain.input_state_type() is Builder.StateType.TENSORS
    if validation is None:
        assert list(chain(Builder.State(0, state())).trainer_state.model) == ["other"]
    else:
        with pytest.raises(CheckpointStructureError, match=r"model/w: state float32.*not in the"):
            chain(Builder.State(0, state()))


def test_no_builder_draws_all():
    layouts = jax.tree.map(lambda x: x.sharding, state())
    drawn = initial_state(None, lambda key: state(), jax.random.key(1), layouts)
    assert float(drawn.model["w"][1]) == 1.0
