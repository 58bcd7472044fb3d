"""State of a training run: its specs, its sharding over a mesh, and its initial value.

The specs of the model's parameters determine those of the learner's state, and all specs, by the
rules of each kind of array, the shardings. Each device computes only its own shards of the initial
state; no array is ever materialized whole.
"""

from typing import Any

import jax

from weft.core.axis_rules import Rules, logical_axis_rules
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.parameter_spec import TensorSpec
from weft.trainer.learner import BaseLearner
from weft.trainer.mesh import check_divides, named_sharding
from weft.trainer.rules_by_kind import KindRules
from weft.trainer.train_step import TrainerState, opt_params
from weft.typing import Tensor


def parameter_specs(model: BaseLayer, rules: Rules) -> Any:
    """Returns the specs of a model's parameters, with rules for the names of their axes."""
    with logical_axis_rules(rules):
        return model.create_parameter_specs_recursively()


def state_specs(
    model: BaseLayer, learner: BaseLearner, rules: KindRules | None = None
) -> TrainerState:
    """Returns shapes, dtypes and layouts of the state, with rules for each kind of array."""
    rules = rules or KindRules()
    for_learner = parameter_specs(model, rules.optimizer)
    return TrainerState(
        prng_key=TensorSpec(shape=()),
        model=parameter_specs(model, rules.parameters),
        learner=learner.create_state_partition_specs(for_learner),
    )


def partition_specs(specs: TrainerState) -> TrainerState:
    """Returns the mesh axes of each array."""
    return jax.tree.map(lambda spec: spec.partition_spec, specs, is_leaf=_is_spec)


def state_shardings(mesh: jax.sharding.Mesh, specs: Any) -> Any:
    """Returns the shardings of a tree of specs; raises a MeshError if an array does not fit."""

    def sharding(path: Any, spec: TensorSpec) -> jax.sharding.NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        sharding = named_sharding(mesh, spec.partition_spec, name)
        check_divides(name, spec.shape, sharding)
        return sharding.with_memory_kind(spec.memory_kind) if spec.memory_kind else sharding

    return jax.tree_util.tree_map_with_path(sharding, specs, is_leaf=_is_spec)


def new_state(
    prng_key: Tensor, *, model: BaseLayer, learner: BaseLearner, model_specs: Any
) -> TrainerState:
    """Computes the state before the first step; the key serves the parameters and all steps."""
    prng_key, init_key = jax.random.split(prng_key)
    params = model.initialize_parameters_recursively(init_key)
    return TrainerState(
        prng_key=prng_key, model=params, learner=learner.init(opt_params(params, model_specs))
    )


def shapes_with(shapes: TrainerState, shardings: TrainerState) -> TrainerState:
    """Combines shapes and dtypes, as of `jax.eval_shape`, with `state_shardings`."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, TensorSpec)
