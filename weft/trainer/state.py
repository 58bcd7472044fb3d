"""The state of a training run: what it holds, how it lies over a mesh, and how it begins.

The specs of the model's parameters come first, for each kind of array by its own rules. From them
follow the specs of the learner's state, from all specs the layouts, and the state is computed with
these: each device computes its own part of each array, and the whole of none is anywhere.
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
    """The specs of a model's parameters.

    Args:
        model: the model.
        rules: say what the names of their axes stand for.
    """
    with logical_axis_rules(rules):
        return model.create_parameter_specs_recursively()


def state_specs(
    model: BaseLayer, learner: BaseLearner, rules: KindRules | None = None
) -> TrainerState:
    """Shapes, dtypes and layouts of the state.

    Args:
        model: the model.
        learner: updates its parameters.
        rules: for parameters and for the learner's state; None for none.
    """
    rules = rules or KindRules()
    for_learner = parameter_specs(model, rules.optimizer)
    return TrainerState(
        prng_key=TensorSpec(shape=()),
        model=parameter_specs(model, rules.parameters),
        learner=learner.create_state_partition_specs(for_learner),
    )


def partition_specs(specs: TrainerState) -> TrainerState:
    """The mesh axes of each array.

    Args:
        specs: of `state_specs`.
    """
    return jax.tree.map(lambda spec: spec.partition_spec, specs, is_leaf=_is_spec)


def state_shardings(mesh: jax.sharding.Mesh, specs: Any) -> Any:
    """The layout of each array on a mesh.

    Args:
        mesh: the mesh.
        specs: of `state_specs`, or any other tree of specs.

    Raises:
        MeshError: if an array does not fit the mesh, naming it.
    """

    def sharding(path: Any, spec: TensorSpec) -> jax.sharding.NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        sharding = named_sharding(mesh, spec.partition_spec, name)
        check_divides(name, spec.shape, sharding)
        return sharding.with_memory_kind(spec.memory_kind) if spec.memory_kind else sharding

    return jax.tree_util.tree_map_with_path(sharding, specs, is_leaf=_is_spec)


def new_state(
    prng_key: Tensor, *, model: BaseLayer, learner: BaseLearner, model_specs: Any
) -> TrainerState:
    """The state before the first step.

    Args:
        prng_key: for the parameters and all steps.
        model: the model.
        learner: updates its parameters.
        model_specs: the specs of these.
    """
    prng_key, init_key = jax.random.split(prng_key)
    params = model.initialize_parameters_recursively(init_key)
    return TrainerState(
        prng_key=prng_key, model=params, learner=learner.init(opt_params(params, model_specs))
    )


def shapes_with(shapes: TrainerState, shardings: TrainerState) -> TrainerState:
    """Shapes and dtypes together with layouts.

    Args:
        shapes: as of `jax.eval_shape`.
        shardings: of `state_shardings`.
    """
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, TensorSpec)
