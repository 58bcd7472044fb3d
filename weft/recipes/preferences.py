"""Parts that the recipes `dpo` and `grpo` share: a base, its reference, and what is trained."""

from typing import Any, NamedTuple

from weft.config import InstantiableConfig
from weft.hierarchy.preferences import REFERENCE, ModelWithReference
from weft.input import ArrayInput
from weft.input.datasets import read_rows
from weft.recipes.sft import (
    Tuning,
    named_targets,
    set_initial_state,
    tokenizer_configs,
    tuned_model,
)
from weft.trainer import (
    ImportedWeightsBuilder,
    SpmdTrainer,
    UpdateType,
    import_weights,
)
from weft.trainer.checkpointer import index
from weft.trainer.state_builder import Builder
from weft.typing import PyTree

TRAIN, HELD_OUT = "train", "held_out"


class ReferenceWeightsBuilder(ImportedWeightsBuilder):
    """Builder that reads the parameters of a checkpoint, and those of the reference again."""

    def __call__(self, state: Builder.State) -> Builder.State:
        params: dict[str, PyTree] = dict(state.trainer_state.model)
        reference = params.pop(REFERENCE)
        trainer_state = state.trainer_state._replace(model=params)
        built = super().__call__(
            Builder.State(state.step, trainer_state, state.built_keys)
        )
        reference = import_weights(self.config.path, reference)
        built_keys = set(built.built_keys)
        for path, _ in index.flatten_state({"model": {REFERENCE: reference}}):
            built_keys.add(path)
        model: Any = {**built.trainer_state.model, REFERENCE: reference}
        return Builder.State(
            built.step, built.trainer_state._replace(model=model), built_keys
        )


class Base(NamedTuple):
    """Configs of the model to train, of its tokenizer and of its chat template, if any."""

    model: Any
    tokenizer: InstantiableConfig[Any]
    template: InstantiableConfig[Any] | None

    def max_length(self, length: int) -> int:
        """Returns a length, or the largest one that the model has positions for."""
        positions = self.model.decoder.emb.pos_emb
        if positions is None:
            return length
        return min(length, positions.shape[0])


def read_base(
    base: str, *, tuning: Tuning, rank: int, alpha: float | None, targets: str
) -> Base:
    """Reads the configs of a Hugging Face folder; for the arguments see `weft.recipes.sft.sft`."""
    tokenizer, template = tokenizer_configs(base)
    model = tuned_model(
        base,
        tokenizer,
        tuning=tuning,
        rank=rank,
        alpha=alpha,
        targets=named_targets(targets),
    )
    return Base(model, tokenizer, template)


def set_training(cfg: SpmdTrainer.Config, base: str, tuning: Tuning) -> None:
    """Sets the initial state of a config, and which of its parameters are trained."""
    model: Any = cfg.model
    assert isinstance(model, ModelWithReference.Config)
    set_initial_state(cfg, base, tuning)
    if tuning == "full" and model.has_reference:
        cfg.init_state_builder = ReferenceWeightsBuilder.default_config().set(
            path=base
        )
        cfg.learner.update_rules = [  # pyright: ignore[reportAttributeAccessIssue]
            (f"{REFERENCE}/.*", UpdateType.NO_UPDATE),
            (".*", UpdateType.ALL_UPDATES),
        ]


def rows_input(
    arrays: Any, split: str, held_out: float, batch_size: int
) -> ArrayInput.Config:
    """Returns the input of a part of the rows.

    Args:
        arrays: the config of `preference_arrays` or `prompt_arrays`.
    """
    part = split if held_out > 0 else None
    return ArrayInput.default_config().set(
        arrays=arrays.clone(part=part, held_out=held_out or 0.1),
        global_batch_size=batch_size,
        padding={},
    )


def num_rows(data: str, held_out: float) -> int:
    """Returns the number of rows to train on."""
    count = len(read_rows(data))
    if held_out == 0:
        return count
    return count - min(max(1, round(held_out * count)), count - 1)


def learning_rate_of(tuning: Tuning) -> float:
    """Returns the highest learning rate by default."""
    return 1e-6 if tuning == "full" else 2e-5
