from weft.config.config import ConfigBase as ConfigBase, Origin as Origin, origin as origin
from weft.config.configurable import (
    ConfigModifier as ConfigModifier, ConfigOr as ConfigOr, Configurable as Configurable,
    get_named_trainer_config as get_named_trainer_config, InstantiableConfig as InstantiableConfig,
    maybe_set_config as maybe_set_config, TrainerConfigFn as TrainerConfigFn,
    with_overrides as with_overrides,
)
from weft.config.fields import config_class as config_class
from weft.config.functions import (
    ClassConfigBase as ClassConfigBase, config_for_class as config_for_class,
    config_for_function as config_for_function, FunctionConfigBase as FunctionConfigBase,
    maybe_instantiate as maybe_instantiate,
)
from weft.config.overrides import apply_overrides as apply_overrides
from weft.config.text_parser import from_text as from_text
from weft.config.text_writer import (
    ABSENT as ABSENT, Change as Change, ConfigDiff as ConfigDiff, diff as diff, to_text as to_text,
)
from weft.config.validation import (
    register_validator as register_validator,
    validate_config_field_name as validate_config_field_name,
    validate_config_field_value as validate_config_field_value,
)
from weft.config.values import (
    InMemory as InMemory, is_attrs as is_attrs, is_named_tuple as is_named_tuple, Required as Required,
    REQUIRED as REQUIRED, RequiredFieldValue as RequiredFieldValue,
    UnreadValue as UnreadValue,
)
from weft.errors import (
    ConfigError as ConfigError, ConfigOverrideError as ConfigOverrideError,
    ConfigReferenceError as ConfigReferenceError, ConfigTextError as ConfigTextError,
    ConfigTypeError as ConfigTypeError, FrozenConfigError as FrozenConfigError,
    InvalidConfigClassError as InvalidConfigClassError,
    InvalidConfigNameError as InvalidConfigNameError,
    InvalidConfigValueError as InvalidConfigValueError,
    NonConfigFieldError as NonConfigFieldError,
    RequiredFieldMissingError as RequiredFieldMissingError, similar_names as similar_names,
    UnknownConfigError as UnknownConfigError, UnknownFieldError as UnknownFieldError,
    UnreadableValueError as UnreadableValueError,
)
