"""Flags of Flax: `config.update("flax_return_frozendict", True)`, `nnx_graph_mode` and others.

A flag begins with the value of the environment variable of its name in capitals. Some are settings
of Weft (`weft.core.settings`). Others change nothing in Weft; changing one of them
warns once.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from weft.core.settings import settings
from weft.errors import ArgumentValueError, FlagWarning, UnknownFlagError, _base

T = TypeVar("T")

_SETTINGS = {
    "flax_filter_frames": "filter_frames",
    "flax_profile": "profile",
    "flax_preserve_adopted_names": "preserve_adopted_names",
    "flax_return_frozendict": "return_frozendict",
    "flax_fix_rng_separator": "fix_rng_separator",
    "flax_always_shard_variable": "always_shard_variable",
    "nnx_graph_mode": "graph_mode",
    "nnx_graph_updates": "graph_updates",
}
"""Names of Weft's settings, by those of the flags that are these settings."""

_UNUSED = {
    "flax_use_flaxlib": "Weft has no flaxlib",
    "flax_array_ref": "write nnx.var_defaults(ref=True)",
    "flax_hijax_variable": "write nnx.var_defaults(hijax=True)",
    "flax_pytree_module": "modules are pytrees unless their class has pytree=False",
    "flax_max_repr_depth": "texts of objects show all levels",
}

_other_values: dict[str, Any] = {}
"""Values of the other flags."""

_flags: list[str] = []
"""Names of all flags."""


class FlagHolder(Generic[T]):
    """Handle of a flag."""

    def __init__(self, name: str, help: str):
        self.name, self.help = name, help

    @property
    def value(self) -> T:
        """Current value."""
        return getattr(config, self.name)

    def __bool__(self) -> bool:
        raise ArgumentValueError(
            f"the flag {self.name} is not its value: use its `value`."
        )


class Config:
    """Values of all flags, as attributes.

    >>> with config.temp_flip_flag("return_frozendict", True):
    ...     config.flax_return_frozendict
    True
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _flags:
            raise AttributeError(_unknown_flag(name))
        if name in _SETTINGS:
            return getattr(settings, _SETTINGS[name])
        return _other_values[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"set a flag by config.update({name!r}, {value!r})."
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_flags]

    def __repr__(self) -> str:
        values = [f"{name}={getattr(self, name)!r}" for name in _flags]
        return f"Config({', '.join(values)})"

    def update(
        self, name_or_holder: str | FlagHolder[Any], value: object, /
    ) -> None:
        """Sets a flag.

        Raises UnknownFlagError if the flag is unknown.
        """
        name = (
            name_or_holder
            if isinstance(name_or_holder, str)
            else name_or_holder.name
        )
        if name not in _flags:
            raise UnknownFlagError(_unknown_flag(name))
        if value != getattr(self, name) and name in _UNUSED:
            reason = _UNUSED.pop(name)
            warnings.warn(
                f"the flag {name} changes nothing: {reason}.",
                FlagWarning,
                stacklevel=2,
            )
        _set(name, value)

    @contextlib.contextmanager
    def temp_flip_flag(
        self, var_name: str, var_value: object
    ) -> Iterator[None]:
        """Enters a context in which the flag `flax_` + `var_name` has a value."""
        name = f"flax_{var_name}"
        value_before = getattr(self, name)
        self.update(name, var_value)
        try:
            yield
        finally:
            _set(name, value_before)


def _unknown_flag(name: str) -> str:
    return f"unknown flag {name!r}. {_base.did_you_mean(name, _flags)}"


def _set(name: str, value: object) -> None:
    if name in _SETTINGS:
        setattr(settings, _SETTINGS[name], value)
    else:
        _other_values[name] = value


config = Config()


def _flag(
    name: str, default: T, help: str, parse: Callable[[str], T]
) -> FlagHolder[T]:
    if name in _flags:
        raise ArgumentValueError(
            f"the flag {name!r} is already defined; choose another name."
        )
    _flags.append(name)
    if name not in _SETTINGS:
        _other_values[name] = default
    if text := os.environ.get(name.upper()):
        config.update(name, parse(text))
    return FlagHolder(name, help)


def bool_flag(name: str, *, default: bool, help: str) -> FlagHolder[bool]:
    """Defines a flag, and returns its handle.

    Raises ArgumentValueError if the flag is already defined, or the environment variable of its
    name in capitals is not a boolean.
    """
    return _flag(name, default, help, lambda text: _parse_bool(name, text))


def int_flag(
    name: str, *, default: int | None, help: str
) -> FlagHolder[int | None]:
    """Defines a flag that is a number, as `bool_flag` does."""
    return _flag(name, default, help, int)


def _parse_bool(name: str, text: str) -> bool:
    if text.lower() in ("y", "yes", "t", "true", "on", "1"):
        return True
    if text.lower() in ("n", "no", "f", "false", "off", "0"):
        return False
    raise ArgumentValueError(
        f"the environment variable {name.upper()}={text!r}: expected 1 or 0."
    )


def _switch(name: str, default: bool, help: str) -> FlagHolder[bool]:
    return bool_flag(name, default=default, help=help)


flax_filter_frames = _switch(
    "flax_filter_frames", True, "Hides frames of Weft in tracebacks."
)
flax_profile = _switch(
    "flax_profile", True, "Names the operations of modules in profiles."
)
flax_use_orbax_checkpointing = _switch(
    "flax_use_orbax_checkpointing",
    False,
    "Saves directories of Orbax, not files.",
)
flax_preserve_adopted_names = _switch(
    "flax_preserve_adopted_names", False, "Keeps names of adopted submodules."
)
flax_return_frozendict = _switch(
    "flax_return_frozendict", False, "Returns variables as FrozenDicts."
)
flax_fix_rng = _switch(
    "flax_fix_rng_separator", False, "Separates the names that keys depend on."
)
flax_use_flaxlib = _switch("flax_use_flaxlib", False, "Not used.")
flax_array_ref = _switch("flax_array_ref", False, "Not used.")
flax_pytree_module = _switch("flax_pytree_module", True, "Not used.")
flax_max_repr_depth = int_flag(
    "flax_max_repr_depth", default=None, help="Not used."
)
flax_always_shard_variable = _switch(
    "flax_always_shard_variable", True, "Shards new variables at once."
)
flax_hijax_variable = _switch("flax_hijax_variable", False, "Not used.")
nnx_graph_mode = _switch(
    "nnx_graph_mode", True, "Default of nnx.set_graph_mode."
)
nnx_graph_updates = _switch(
    "nnx_graph_updates", True, "Default of nnx.set_graph_updates."
)
