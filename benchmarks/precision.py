"""What does training in fewer bits cost in loss, and save in memory, compared with float32?

The learning rate is that of models a hundred times as large, where it matters how parameters are
rounded: most steps are smaller than the distance from one number of bfloat16 to the next.
"""

import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from benchmarks._lm_linen import LanguageModel
from benchmarks.harness import Row, counted
from weft.config import config_for_class
from weft.recipes import find_recipe
from weft.trainer import Hook, Precision

STEPS, LAST = 200, 50
_ARGUMENTS = [f"steps={STEPS}", "batch_size=8", "learning_rate=5e-4"]
_HALF = Precision.default_config().set(
    param_dtype="bfloat16", compute_dtype="bfloat16", moment_dtype="bfloat16"
)
_NEAREST = _HALF.clone(stochastic_rounding=False)


class _Losses(Hook):
    def __init__(self):
        self.values: list[Any] = []

    def on_step(self, step: int, outputs: dict[str, Any], batch: Any) -> None:
        self.values.append(outputs["loss"])


def _config(recipe: str, precision: str | Precision.Config, directory: str) -> Any:
    in_linen = recipe == "lm-linen"
    cfg, _ = find_recipe("lm-nnx" if in_linen else recipe).config(_ARGUMENTS)
    if in_linen:
        cfg.model = config_for_class(LanguageModel)
    return cfg.set(dir=directory, evalers={}, precision=precision)


def _loss(recipe: str, precision: str | Precision.Config) -> float:
    """Returns the mean loss of the last steps, which see the same batches in every dtype."""
    losses = _Losses()
    with tempfile.TemporaryDirectory() as directory:
        trainer = _config(recipe, precision, directory).instantiate(parent=None)
        trainer.run(listener=losses, progress=False)
    return float(np.mean(jax.device_get(losses.values[-LAST:])))


def _losses(
    recipe: str, policies: Mapping[str, tuple[str | Precision.Config, float | None]]
) -> Any:
    base = _loss(recipe, "float32")
    for name, (precision, at_most) in policies.items():
        loss = _loss(recipe, precision)
        yield counted(
            f"loss of {recipe} after {STEPS} steps, {name} / float32",
            loss / base,
            at_most=at_most,
            note=f"{loss:.3f} against {base:.3f}",
        )


def _bytes(precision: str) -> tuple[int, int]:
    """Returns the bytes of the state of `lm`, and the peak memory of its compiled step."""
    with tempfile.TemporaryDirectory() as directory:
        cfg = _config("lm", precision, directory)
        cfg.model.decoder.set(dim=768)  # 22M parameters, which outweigh activations
        trainer = cfg.instantiate(parent=None)
        compiled = trainer.compile_train_step().memory_analysis()
        specs = trainer.trainer_state_specs
        shapes = jax.tree.leaves((specs.model, specs.learner))
    new = compiled.output_size_in_bytes - compiled.alias_size_in_bytes
    peak = compiled.argument_size_in_bytes + new + compiled.temp_size_in_bytes
    return sum(np.prod(x.shape) * jax.numpy.dtype(x.dtype).itemsize for x in shapes), peak


def _memory() -> list[Row]:
    measured = {name: _bytes(name) for name in ("float32", "mixed_bfloat16", "bfloat16")}
    rows = []
    for i, what in enumerate(("bytes of parameters and moments", "peak memory of a step")):
        for name, at_most in (("mixed_bfloat16", None), ("bfloat16", (0.501, 0.8)[i])):
            value, base = measured[name][i], measured["float32"][i]
            rows.append(
                counted(
                    f"{what}, {name} / float32",
                    value / base,
                    at_most=at_most,
                    note=f"{value / 1e6:,.1f} against {base / 1e6:,.1f} MB",
                )
            )
    return rows


def run() -> list[Row]:
    """Trains the recipes in each policy, and counts bytes of state and of compiled steps."""
    policies = {name: (name, 1.02) for name in ("bfloat16", "int8", "fp8")}
    others = {
        "mixed_bfloat16": ("mixed_bfloat16", 1.02),
        "bfloat16 rounded to the nearest": (_NEAREST, None),
    }
    return [
        *_losses("lm", {**policies, **others}),
        *_losses("lm-nnx", policies),
        *_losses("lm-linen", policies),
        *_memory(),
    ]
