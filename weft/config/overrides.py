"""Overrides of config fields, as strings from a command line.

    apply_overrides(cfg, ["learner.optimizer.learning_rate=3e-4", "model.layers[2].rate=0.1"])

The declared type determines how a string is read; see `weft.config.convert`.
"""

import collections.abc
import sys
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from weft.config.config import ConfigBase
from weft.config.convert import NoConversion, convert
from weft.config.fields import own_annotations
from weft.config.origins import Origin
from weft.config.paths import get_path, set_path, split_path
from weft.config.required import RequiredFieldValue
from weft.config.text_read import read_value
from weft.config.text_write import value_text
from weft.config.typecheck import is_instantiable, resolve_annotation, type_name
from weft.config.values import record_fields
from weft.config.visit import to_flat_dict
from weft.errors import ConfigError, ConfigOverrideError, ConfigTypeError, UnknownFieldError

Config = TypeVar("Config", bound=ConfigBase)


def apply_overrides(
    cfg: Config,
    overrides: Iterable[str],
    *,
    allow: Sequence[str] = (),
    source: str = "override",
) -> Config:
    """Sets fields of a config, in place, from strings: all, or none if one is invalid.

    Args:
        source: name of the origin of the values.

    Raises:
        ConfigOverrideError: for a string that is not of the form `path=value`.
        UnknownFieldError: for an unknown path.
        ConfigTypeError: for a value that does not match the declared type.

    >>> from weft.config import config_for_class
    >>> apply_overrides(config_for_class(complex), ["real=1.5"])
    config_for_class(complex)(imag=0, real=1.5)
    """
    overrides = list(overrides)
    # Errors only affect the copy.
    for target in (cfg.clone(), cfg):
        for override in overrides:
            _apply(target, override, allow, Origin(source))
    return cfg


def _apply(cfg: ConfigBase, override: str, allow: Sequence[str], origin: Origin) -> None:
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigOverrideError(
            f"{override!r} is not an override. Write path=value, such as "
            "learner.learning_rate=3e-4."
        )
    try:
        owner, steps = split_path(cfg, path)
    except UnknownFieldError as error:
        raise UnknownFieldError(f"{override}: {error}{_elsewhere(cfg, path)}") from None
    assert isinstance(owner, ConfigBase)
    hint, like = _declared(owner, steps)
    try:
        value = convert(text, hint, lambda t: read_value(t, allow=allow, source=""), like)
        set_path(owner, steps, value)
    except NoConversion as error:
        kind = type(error.cause) if error.cause else ConfigTypeError
        expected = error.cause or f"expected {_type_of(hint, like)}, but got {text!r}."
        raise kind(f"{override}: {expected}{_now(owner, steps)}") from None
    except ConfigError as error:
        raise type(error)(f"{override}: {error}{_now(owner, steps)}") from None
    owner._origins[steps[0]] = origin


def _declared(owner: ConfigBase, steps: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the declared type at a path, and an example value for undeclared types."""
    field = owner._fields()[steps[0]]
    hint, value, like = field.hint, getattr(owner, steps[0]), field.default()
    for step in steps[1:]:
        hint = _hint_inside(hint, value, step)
        value = get_path(value, [step]) if not isinstance(value, dict) else value.get(step)
        like = value
    return hint, like


def _hint_inside(hint: Any, value: Any, step: Any) -> Any:
    if record_fields(value) is not None:
        for cls in type(value).__mro__:
            annotation = own_annotations(cls).get(step)
            if annotation is not None:
                resolved = resolve_annotation(annotation, vars(sys.modules[cls.__module__]).copy)
                return Any if resolved is None else resolved
        return Any
    container = dict if isinstance(value, dict) else collections.abc.Sequence
    for arm in [hint, *typing.get_args(hint)]:
        cls, args = typing.get_origin(arm), typing.get_args(arm)
        if not isinstance(cls, type) or not args:
            continue
        if container is dict and issubclass(cls, collections.abc.Mapping):
            return args[-1]
        if container is not dict and issubclass(cls, collections.abc.Sequence):
            return args[step] if len(args) > abs(step) and args[-1] is not Ellipsis else args[0]
    return Any


def _type_of(hint: Any, like: Any) -> str:
    if hint is Any and like is not None and not isinstance(like, RequiredFieldValue):
        return type_name(type(like))
    return type_name(hint)


def _now(owner: ConfigBase, steps: Sequence[Any]) -> str:
    try:
        value = get_path(owner, steps)
    except UnknownFieldError:
        return ""
    shown = value._title() if is_instantiable(value) else f"{value_text(value):.80}"
    origin = owner._origins.get(steps[0])
    return f" It is {shown}, {f'set at {origin}' if origin else 'by default'}."


def _elsewhere(cfg: ConfigBase, path: str) -> str:
    """Names the paths where the last name of a wrong path does exist."""
    name = path.rpartition(".")[2]
    paths = to_flat_dict(cfg, omit_default_values=())
    found = [p for p in paths if p.rpartition(".")[2] == name]
    return f" There is {' and '.join(found[:3])}." if found else ""
