"""Advice on modules, names, fields and arguments of AXLearn that Weft lacks.

A line of `differences.txt` has a dotted name, such as `weft.trainer.trainer.SpmdTrainer.recorder`
for a config field, and what to write instead; one of `modules.txt` a module of AXLearn, and what to
use instead.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

_PACKAGES = ("weft", "weft.hierarchy", "weft.input", "weft.trainer")
"""Packages that programs of AXLearn name in place of `axlearn` and `axlearn.common`."""


@functools.cache
def differences() -> Mapping[str, str]:
    """Returns what to write instead of names, fields, arguments and defaults, by dotted name."""
    return _read_table("differences.txt")


@functools.cache
def missing_modules() -> Mapping[str, str]:
    """Returns what to use instead of modules and packages that Weft does not have."""
    return _read_table("modules.txt")


def _read_table(name: str) -> Mapping[str, str]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    table: dict[str, str] = {}
    for line in text.splitlines():
        dotted_name, advice = line.split(" # ")
        table[dotted_name] = advice
    return table


def instead_of_module(name: str) -> str | None:
    """Returns what to use instead of a module, by its dotted name; None if it is not AXLearn's."""
    package, _, module = name.rpartition(".")
    if package not in _PACKAGES:
        return None
    return missing_modules().get(module)


def instead_of_name(owner: str, name: str) -> str | None:
    """Returns what to write instead of a name in a module, or below it, or of a class's field."""
    for dotted_name, advice in differences().items():
        place, _, last = dotted_name.rpartition(".")
        is_owner = f"{place}.".startswith(f"{owner}.") or place.endswith(
            f".{owner}"
        )
        if last == name and is_owner:
            return advice
    return None


_UNEXPECTED_ARGUMENT = re.compile(
    r"(\w+)\(\) got an unexpected keyword argument '(\w+)'"
)


def hint_for_name(owner: str, name: str) -> str | None:
    """Returns the sentence of an error about a name that a class or an object lacks, or None."""
    advice = instead_of_name(owner, name)
    if advice is None:
        return None
    return f"In place of AXLearn's: {advice}."


def hint_for_error(error: Exception) -> str | None:
    """Returns the sentence about an argument that AXLearn's method of that name has, or None."""
    if not isinstance(error, TypeError):
        return None
    match = _UNEXPECTED_ARGUMENT.search(str(error))
    if match is None:
        return None
    method, argument = match.groups()
    return hint_for_name("weft.hierarchy", f"{method}({argument})")
