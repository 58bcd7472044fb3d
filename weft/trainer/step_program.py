"""Train step as a compiled program, with its shardings and donation."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from weft import lifting
from weft.config import maybe_instantiate
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.transforms import CONTEXTS
from weft.trainer.anomalies import AnomalyGuard
from weft.trainer.learner_base import LearnerModule
from weft.trainer.rules_by_kind import rules_of
from weft.trainer.state import parameter_specs, state_shardings
from weft.trainer.train_step import TrainerState, train_step


def jit_train_step(
    cfg: Any,
    *,
    model: BaseLayer,
    learner: LearnerModule,
    input_: Any,
    mesh: jax.sharding.Mesh,
    specs: TrainerState,
    shardings: TrainerState,
) -> Callable[..., Any]:
    """Returns the jitted step of a trainer, which donates the state to the next one.

    Raises:
        MeshError: if a gradient does not fit the mesh; the message names it.
    """
    gradient_specs = parameter_specs(model, rules_of(cfg).gradients)
    state_shardings(mesh, {"gradients": gradient_specs})
    step = functools.partial(
        train_step,
        model=model,
        learner=learner,
        input_=input_,
        model_specs=specs.model,
        gradient_specs=gradient_specs,
        train_dtype=maybe_instantiate(cfg.train_dtype),
    )
    if cfg.anomaly_policy is not None:
        policy = cfg.anomaly_policy.instantiate()
        return AnomalyGuard(policy, step, shardings=shardings, mesh=mesh)
    return lifting.jit(
        CONTEXTS,
        step,
        in_shardings=(shardings, None),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
