"""Trainer configs by name: functions in a module that create them."""

import functools
import importlib
from typing import Any, Protocol

from weft.config.configurable import InstantiableConfig
from weft.config.names import did_you_mean
from weft.errors import UnknownConfigError


class TrainerConfigFn(Protocol):
    """Function that creates a trainer config."""

    def __call__(self, data_dir: str | None = None) -> InstantiableConfig:
        """Returns a new config.

        Args:
            data_dir: location of the data, for recipes that read any.
        """
        ...


def get_named_trainer_config(config_name: str, *, config_module: str) -> TrainerConfigFn:
    """Returns a recipe by name.

    Args:
        config_module: dotted name of a module whose `named_trainer_configs()` returns a
            `TrainerConfigFn` by name.

    Raises:
        UnknownConfigError: if the module has no such recipe, or no recipes.
    """
    module = importlib.import_module(config_module)
    if not hasattr(module, "named_trainer_configs"):
        raise UnknownConfigError(
            f"{config_module} does not define named_trainer_configs(), "
            f"so there is no {config_name!r} in it. Name a module of recipes."
        )
    recipes: dict[str, Any] = module.named_trainer_configs()
    if config_name not in recipes:
        raise UnknownConfigError(
            f"unknown recipe {config_name!r} in {config_module}. "
            f"{did_you_mean(config_name, recipes)}"
        )
    return recipes[config_name]


def with_overrides(trainer_config_fn: TrainerConfigFn, **kwargs: Any) -> TrainerConfigFn:
    """Returns a function that creates the same config with some fields changed."""

    @functools.wraps(trainer_config_fn)
    def overridden(data_dir: str | None = None) -> InstantiableConfig:
        return trainer_config_fn(data_dir).set(**kwargs)

    return overridden
