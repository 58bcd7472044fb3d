"""Named trainer configs: functions that make the config of a trainer, found by name in a module."""

import functools
import importlib
from typing import Any, Protocol

from weft.config.configurable import InstantiableConfig
from weft.config.names import did_you_mean
from weft.errors import UnknownConfigError


class TrainerConfigFn(Protocol):
    """Makes the config of a trainer."""

    def __call__(self, data_dir: str | None = None) -> InstantiableConfig:
        """Returns a fresh config.

        Args:
            data_dir: where the data lies, for recipes that read any.
        """
        ...


def get_named_trainer_config(config_name: str, *, config_module: str) -> TrainerConfigFn:
    """Looks a recipe up by its name.

    Args:
        config_name: its name.
        config_module: the dotted name of a module that defines `named_trainer_configs()`, which
            returns a `TrainerConfigFn` by name.

    Raises:
        UnknownConfigError: if the module has no recipe of that name, or no recipes at all.
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
    """Returns a function that makes the same config with some fields set.

    Args:
        trainer_config_fn: makes the config.
        **kwargs: values by field name.
    """

    @functools.wraps(trainer_config_fn)
    def overridden(data_dir: str | None = None) -> InstantiableConfig:
        return trainer_config_fn(data_dir).set(**kwargs)

    return overridden
