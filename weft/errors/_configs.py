"""The errors about configs."""

from weft.errors._base import WeftError


class ConfigError(WeftError):
    """Base of the errors about configs."""


class UnknownFieldError(ConfigError, AttributeError):
    """A config, or something on a path into it, has no field of that name."""


class FrozenConfigError(ConfigError, RuntimeError):
    """The config of an object that exists already was to be changed."""


class InvalidConfigClassError(ConfigError, TypeError):
    """A config class does not derive from the config class that it has to extend."""


class InvalidConfigNameError(ConfigError, ValueError):
    """A config field cannot have that name."""


class InvalidConfigValueError(ConfigError, TypeError):
    """A config field cannot hold that value."""


class ConfigTypeError(InvalidConfigValueError):
    """A value does not fit the type that its config field declares."""


class ConfigTextError(ConfigError, ValueError):
    """A text is not written as a config is."""


class ConfigReferenceError(ConfigTextError):
    """A text speaks of a class or function that is not there, or that it may not speak of."""


class ConfigModifierError(ConfigError, ValueError):
    """A config modifier finds nothing to change where it was told to, or changes it wrongly."""


class ConfigOverrideError(ConfigError, ValueError):
    """An override is not of the form `path=value`."""


class UnknownConfigError(ConfigError, KeyError):
    """A module has no trainer config of that name."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message, which hides its line breaks.
        return self.args[0] if self.args else ""


class MissingConfigClassDecoratorError(ConfigError, TypeError):
    """A config class was used that `@config_class` does not stand above."""


class NonConfigFieldError(ConfigError, ValueError):
    """A config class defines something that is not a field, such as a method."""


class RequiredFieldMissingError(ConfigError, ValueError):
    """A field was still REQUIRED when its config was instantiated."""
