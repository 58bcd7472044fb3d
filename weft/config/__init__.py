"""Configs: trees of named, typed values that objects are made from.

A class that derives from `Configurable` declares what it is made from in a nested `Config`; functions
and classes of other libraries get a config from their signature. Configs are edited freely, then
`instantiate()` makes an object. Nothing here imports JAX.
"""

from weft.config.config import ConfigBase
from weft.config.configurable import (
    Configurable,
    ConfigModifier,
    ConfigOr,
    InstantiableConfig,
    maybe_set_config,
)
from weft.config.fields import config_class
from weft.config.functions import (
    ClassConfigBase,
    FunctionConfigBase,
    config_for_class,
    config_for_function,
    maybe_instantiate,
)
from weft.config.names import similar_names
from weft.config.required import REQUIRED, Required, RequiredFieldValue
from weft.config.validation import (
    register_validator,
    validate_config_field_name,
    validate_config_field_value,
)
from weft.config.values import is_attrs, is_named_tuple
from weft.errors import (
    ConfigTypeError,
    FrozenConfigError,
    InvalidConfigClassError,
    InvalidConfigNameError,
    InvalidConfigValueError,
    MissingConfigClassDecoratorError,
    NonConfigFieldError,
    RequiredFieldMissingError,
    UnknownFieldError,
)
