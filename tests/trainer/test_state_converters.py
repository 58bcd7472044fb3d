"""Converters as functions of states; with checkpoints in test_state_builder.py."""

import jax
import jax.numpy as jnp
import pytest

from weft.errors import StateBuilderError
from weft.trainer.builder_base import Builder
from weft.trainer.state_converters import (
    MergeStateConverter,
    traverse_and_set_target_state_parameters,
)
from weft.trainer.train_step import TrainerState


def test_what_is_taken_gets_the_dtype_and_layout_of_the_run():
    spec = jax.ShapeDtypeStruct((2,), jnp.bfloat16, sharding=jnp.ones(2).sharding)
    target = Builder.State(0, TrainerState(prng_key={}, model={"a": spec, "b": spec}, learner={}))
    pairs = [("model/a", "model/x/y")]
    cfg = MergeStateConverter.default_config().set(name="c", selection_regexes=pairs)
    converter = cfg.instantiate(parent=None)
    source, aux = converter.target_to_source(target)
    assert source.trainer_state == TrainerState({}, {"x": {"y": spec}}, {})
    read = Builder.State(5, TrainerState({}, {"x": {"y": jnp.full(2, 1.5)}}, {}), {"model/x/y"})
    result = converter.source_to_target(read, aux)
    assert (result.step, result.built_keys) == (5, {"model/a"})
    assert result.trainer_state.model["a"].dtype == jnp.bfloat16
    assert result.trainer_state.model["b"] is spec


@pytest.mark.parametrize("scopes", [("y", "z"), ("y", ""), ("n", "z")], ids=str)
def test_layers_with_other_parameters_are_refused(scopes):
    with pytest.raises(StateBuilderError, match=r"has other parameters than the source"):
        traverse_and_set_target_state_parameters(
            target_state={"x": {"w": 1}, "y": {"w": 2, "b": 3}},
            target_scope=scopes[0],
            source_params={"z": {"w": 5}},
            source_scope=scopes[1],
        )
