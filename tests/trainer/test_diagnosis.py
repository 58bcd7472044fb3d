import functools

import jax
import jax.numpy as jnp
import pytest

from weft import linen as nn
from weft.config import config_for_class
from weft.hierarchy.module import observed_calls
from weft.recipes.lm import lm_tiny
from weft.trainer.diagnosis import first_undefined_module
from weft.trainer.train_step import train_step


def prepared(cfg):
    """An uncompiled step, a state and a batch."""
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    trainer.init(jax.random.key(0))
    step = functools.partial(
        train_step,
        model=trainer.model,
        learner=trainer.learner,
        input_=trainer.input,
        model_specs=trainer.trainer_state_specs.model,
        train_dtype=None,
    )
    spec = trainer.input.element_spec()
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)
    return trainer, step, trainer.trainer_state, batch


def spoiled(state, name, index):
    """The state with a NaN in the weights of one layer."""

    def spoil(path, x):
        return x.at[index].set(jnp.nan) if name in jax.tree_util.keystr(path) else x

    return state._replace(model=jax.tree_util.tree_map_with_path(spoil, state.model))


def test_the_module_is_found_in_a_loop_over_layers(tmp_path):
    cfg = lm_tiny().set(dir=str(tmp_path), evalers={}, mesh_shape=(1, 1))
    trainer, step, state, batch = prepared(cfg)
    with trainer.mesh():
        found = first_undefined_module(step, spoiled(state, "linear2", 1), batch)
    layer = "trainer.model.decoder.transformer.repeat.layer"
    assert found == f"{layer}.feed_forward.linear2, a Linear (forward)"


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, input_batch):
        x = nn.relu(nn.Dense(4, name="first")(input_batch["input_ids"].astype(jnp.float32)))
        return jnp.mean(nn.Dense(2, name="second")(x)), {}


def test_modules_of_linen_are_found_as_well(tmp_path):
    cfg = lm_tiny().set(dir=str(tmp_path), evalers={}, mesh_shape=(1, 1))
    cfg.model = config_for_class(Classifier)
    trainer, step, state, batch = prepared(cfg)
    with trainer.mesh():
        found = first_undefined_module(step, spoiled(state, "second", 0), batch)
    assert found == "second, a Dense (__call__)"


def test_where_it_cannot_be_said_a_line_tells_why(caplog):
    def step(state, batch, learner):
        raise NotImplementedError("checkify of pallas_call")

    assert first_undefined_module(step, jnp.ones(()), jnp.ones(())) is None
    assert "cannot be said: checkify of pallas_call" in caplog.text


def test_calls_are_observed_only_while_open():
    with pytest.raises(KeyError), observed_calls(print):
        raise KeyError
    with observed_calls(lambda module, method, result: None):
        pass
