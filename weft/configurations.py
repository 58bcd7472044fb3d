"""Flags of Flax: `config.update("flax_return_frozendict", True)`, `nnx_graph_mode` and others.

A flag begins with the value of the environment variable of its name in capitals. Weft does the same
whatever the flags in `_UNUSED` are; changing one warns once.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from weft.errors import ArgumentValueError, FlagWarning, UnknownFlagError
from weft.errors._base import did_you_mean

T = TypeVar("T")

_UNUSED = {
    "flax_use_flaxlib": "there is no flaxlib",
    "flax_array_ref": "write nnx.var_defaults(ref=True)",
    "flax_hijax_variable": "write nnx.var_defaults(hijax=True)",
    "flax_pytree_module": "modules are pytrees unless their class has pytree=False",
    "flax_max_repr_depth": "texts of objects show all levels",
}


class FlagHolder(Generic[T]):
    """Handle of a flag."""

    def __init__(self, name: str, help: str):
        self.name, self.help = name, help

    @property
    def value(self) -> T:
        """Current value."""
        return getattr(config, self.name)

    def __bool__(self) -> bool:
        raise ArgumentValueError(f"the flag {self.name} is not its value: use its `value`.")


class Config:
    """Values of all flags, as attributes.

    Example:
        >>> with config.temp_flip_flag("return_frozendict", True):
        ...     config.flax_return_frozendict
        True
    """

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no flag {name!r}. {did_you_mean(name, vars(self))}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"set a flag by config.update({name!r}, {value!r}).")

    def __repr__(self) -> str:
        return (
            "Config(" + ", ".join(f"{name}={value!r}" for name, value in vars(self).items()) + ")"
        )

    def update(self, name_or_holder: str | FlagHolder[Any], value: object, /) -> None:
        """Sets a flag.

        Raises:
            UnknownFlagError: if there is no such flag.
        """
        name = name_or_holder if isinstance(name_or_holder, str) else name_or_holder.name
        if name not in vars(self):
            raise UnknownFlagError(
                f"config.update({name!r}): there is no such flag. {did_you_mean(name, vars(self))}"
            )
        if value != vars(self)[name] and (reason := _UNUSED.pop(name, None)):
            warnings.warn(f"the flag {name} changes nothing: {reason}.", FlagWarning, stacklevel=2)
        vars(self)[name] = value

    @contextlib.contextmanager
    def temp_flip_flag(self, var_name: str, var_value: object) -> Iterator[None]:
        """Enters a context in which the flag `flax_` + `var_name` has a value."""
        before = getattr(self, f"flax_{var_name}")
        self.update(f"flax_{var_name}", var_value)
        try:
            yield
        finally:
            vars(self)[f"flax_{var_name}"] = before


config = Config()


def _flag(name: str, default: T, help: str, parse: Callable[[str], T]) -> FlagHolder[T]:
    if name in vars(config):
        raise ArgumentValueError(f"there is a flag {name!r} already; choose another name.")
    vars(config)[name] = default
    if text := os.environ.get(name.upper()):
        config.update(name, parse(text))
    return FlagHolder(name, help)


def bool_flag(name: str, *, default: bool, help: str) -> FlagHolder[bool]:
    """Defines a flag, and returns its handle.

    Raises:
        ArgumentValueError: if there is such a flag, or the environment variable of its name in
            capitals is not a boolean.
    """
    return _flag(name, default, help, lambda text: _parse_bool(name, text))


def int_flag(name: str, *, default: int | None, help: str) -> FlagHolder[int | None]:
    """Defines a flag that is a number, as `bool_flag` does."""
    return _flag(name, default, help, int)


def _parse_bool(name: str, text: str) -> bool:
    if text.lower() in ("y", "yes", "t", "true", "on", "1"):
        return True
    if text.lower() in ("n", "no", "f", "false", "off", "0"):
        return False
    raise ArgumentValueError(f"the environment variable {name.upper()}={text!r}: expected 1 or 0.")


flax_filter_frames = bool_flag(
    "flax_filter_frames", default=True, help="Hides frames of Weft in tracebacks."
)
flax_profile = bool_flag(
    "flax_profile", default=True, help="Names the operations of modules in profiles."
)
flax_use_orbax_checkpointing = bool_flag(
    "flax_use_orbax_checkpointing", default=False, help="Saves directories of Orbax, not files."
)
flax_preserve_adopted_names = bool_flag(
    "flax_preserve_adopted_names", default=False, help="Keeps names of adopted submodules."
)
flax_return_frozendict = bool_flag(
    "flax_return_frozendict", default=False, help="Returns variables as FrozenDicts."
)
flax_fix_rng = bool_flag(
    "flax_fix_rng_separator", default=False, help="Separates the names that keys depend on."
)
flax_use_flaxlib = bool_flag("flax_use_flaxlib", default=False, help="Not used.")
flax_array_ref = bool_flag("flax_array_ref", default=False, help="Not used.")
flax_pytree_module = bool_flag("flax_pytree_module", default=True, help="Not used.")
flax_max_repr_depth = int_flag("flax_max_repr_depth", default=None, help="Not used.")
flax_always_shard_variable = bool_flag(
    "flax_always_shard_variable", default=True, help="Shards new variables at once."
)
flax_hijax_variable = bool_flag("flax_hijax_variable", default=False, help="Not used.")
nnx_graph_mode = bool_flag("nnx_graph_mode", default=True, help="Default of nnx.set_graph_mode.")
nnx_graph_updates = bool_flag(
    "nnx_graph_updates", default=True, help="Default of nnx.set_graph_updates."
)
