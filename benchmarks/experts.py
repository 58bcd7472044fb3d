"""How much slower is a step of a mixture of experts than of a dense model of equal arithmetic?

The models of the recipes `lm` and `lm-moe` on one device: each token passes a dense layer, or two
of eight experts with half its hidden dimensions. In turns, compiled before, on the same batch.
"""

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.harness import Row, ratios, row
from weft import hierarchy
from weft.recipes.lm import lm, lm_moe


def _with_capacities() -> Any:
    """Returns the config of `lm-moe` with experts that drop tokens beyond a capacity."""
    cfg: Any = lm_moe()
    experts = cfg.model.decoder.transformer.layer.feed_forward
    cfg.model.decoder.transformer.layer.feed_forward = (
        hierarchy.TransformerFeedForwardMoE.default_config().set(
            norm=experts.norm,
            hidden_dim=experts.hidden_dim,
            activation=experts.activation,
            param_init=experts.param_init,
            num_experts=8,
            num_groups=16,
            gating=hierarchy.Top2Gating.default_config().set(train_capacity_factor=2.5),
        )
    )
    return cfg


def _step(cfg: Any) -> Callable[[], None]:
    """Returns a function that runs a step of training and waits for it."""
    cfg = cfg.set(dir="", evalers={}, mesh_shape=(1,) * len(cfg.mesh_axis_names))
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    trainer.init(jax.random.key(0))
    states = [trainer.trainer_state]
    program = trainer.compile_train_step(trainer_state=states[0])
    batch = jax.device_put(next(iter(trainer.input.dataset())))

    def run() -> None:
        states[0], outputs = program(states[0], batch)
        jax.block_until_ready(outputs["loss"])

    return run


def run() -> list[Row]:
    dense = _step(lm())
    mixtures = {
        "that drops no token": (_step(lm_moe()), 2.0),
        "with capacities": (_step(_with_capacities()), None),
    }
    return [
        row(
            f"a step of a mixture of eight experts {name} / dense",
            ratios(step, dense, warmup=2),
            at_most=at_most,
        )
        for name, (step, at_most) in mixtures.items()
    ]
