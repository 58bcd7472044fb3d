"""Configs: trees of named, typed values that objects are created from.

A `Configurable` class declares its parameters in a nested `Config`; functions and classes of other
libraries get configs from their signatures. After edits, `instantiate()` creates the object. Does
not import JAX.
"""

from weft.config.config import ConfigBase
from weft.config.configurable import (
    ConfigModifier,
    ConfigOr,
    Configurable,
    InstantiableConfig,
    maybe_set_config,
)
from weft.config.differences import ABSENT, Change, ConfigDiff, diff
from weft.config.fields import config_class
from weft.config.functions import (
    ClassConfigBase,
    FunctionConfigBase,
    config_for_class,
    config_for_function,
    maybe_instantiate,
)
from weft.config.names import similar_names
from weft.config.origins import Origin, origin
from weft.config.overrides import apply_overrides
from weft.config.recipes import TrainerConfigFn, get_named_trainer_config, with_overrides
from weft.config.required import REQUIRED, Required, RequiredFieldValue
from weft.config.text_read import from_text
from weft.config.text_write import to_text
from weft.config.validation import (
    register_validator,
    validate_config_field_name,
    validate_config_field_value,
)
from weft.config.values import is_attrs, is_named_tuple
from weft.errors import (
    ConfigError,
    ConfigOverrideError,
    ConfigReferenceError,
    ConfigTextError,
    ConfigTypeError,
    FrozenConfigError,
    InvalidConfigClassError,
    InvalidConfigNameError,
    InvalidConfigValueError,
    MissingConfigClassDecoratorError,
    NonConfigFieldError,
    RequiredFieldMissingError,
    UnknownConfigError,
    UnknownFieldError,
)

__all__ = [
    # Config classes.
    "REQUIRED",
    "ConfigBase",
    "Required",
    "RequiredFieldValue",
    "config_class",
    "is_attrs",
    "is_named_tuple",
    "register_validator",
    "similar_names",
    "validate_config_field_name",
    "validate_config_field_value",
    # Configs of objects.
    "ClassConfigBase",
    "ConfigModifier",
    "ConfigOr",
    "Configurable",
    "FunctionConfigBase",
    "InstantiableConfig",
    "config_for_class",
    "config_for_function",
    "maybe_instantiate",
    "maybe_set_config",
    # Text, differences, command lines and origins of configs.
    "ABSENT",
    "Change",
    "ConfigDiff",
    "Origin",
    "apply_overrides",
    "diff",
    "from_text",
    "origin",
    "to_text",
    # Trainer configs by name.
    "TrainerConfigFn",
    "get_named_trainer_config",
    "with_overrides",
    # Errors.
    "ConfigError",
    "ConfigOverrideError",
    "ConfigReferenceError",
    "ConfigTextError",
    "ConfigTypeError",
    "FrozenConfigError",
    "InvalidConfigClassError",
    "InvalidConfigNameError",
    "InvalidConfigValueError",
    "MissingConfigClassDecoratorError",
    "NonConfigFieldError",
    "RequiredFieldMissingError",
    "UnknownConfigError",
    "UnknownFieldError",
]
