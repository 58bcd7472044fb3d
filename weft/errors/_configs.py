from weft.errors._base import WeftError


class ConfigError(WeftError):
    """Base of the errors of configs."""


class UnknownFieldError(ConfigError, AttributeError):
    """A config, or a value on a path into it, has no field of that name."""


class FrozenConfigError(ConfigError, RuntimeError):
    """The config of an existing object cannot be changed."""


class InvalidConfigClassError(ConfigError, TypeError):
    """A config class does not derive from the config class that it must extend."""


class InvalidConfigNameError(ConfigError, ValueError):
    """A config field cannot have that name."""


class InvalidConfigValueError(ConfigError, TypeError):
    """A config field cannot hold that value."""


class ConfigTypeError(InvalidConfigValueError):
    """A value does not match the declared type of its config field."""


class ConfigTextError(ConfigError, ValueError):
    """A text is not a valid config."""


class ConfigReferenceError(ConfigTextError):
    """A config text names a class or function that does not exist or is not allowed."""


class ConfigModifierError(ConfigError, ValueError):
    """A config modifier finds nothing to change at its path, or changes it wrongly."""


class ConfigOverrideError(ConfigError, ValueError):
    """An override is not of the form `path=value`."""


class UnknownConfigError(ConfigError, KeyError):
    """A module has no trainer config of that name."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message, which hides its line breaks.
        return self.args[0] if self.args else ""


class MissingConfigClassDecoratorError(ConfigError, TypeError):
    """A config class lacks the decorator `@config_class`."""


class NonConfigFieldError(ConfigError, ValueError):
    """A config class defines something that is not a field, such as a method."""


class RequiredFieldMissingError(ConfigError, ValueError):
    """A field was still REQUIRED when its config was instantiated."""
