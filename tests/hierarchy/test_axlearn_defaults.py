"""Defaults are those that users of AXLearn know, apart from differences that are listed.

`axlearn_defaults.json` has the defaults of config fields, of `default_config()`, of dataclasses and
of parameters, and the members of enums. `weft/compat/axlearn/differences.txt` lists what differs on
purpose, and errors tell what to write instead.
"""

import ast
import enum
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.compat.axlearn.hints import differences, missing_modules
from weft.errors import LeftOutError, MetricCalculatorError, UnknownFieldError
from weft.hierarchy import (
    ForwardMode,
    GMMBackend,
    MultiheadAttention,
    ZeroAttentionBias,
    functional,
)
from weft.trainer.metric_calculator import CompositeMetricCalculator
from weft.trainer.trainer import SpmdTrainer

HERE = Path(__file__).parent
KNOWN = json.loads((HERE / "axlearn_defaults.json").read_text(encoding="utf-8"))
ALLOWED = differences()
MISSING = object()


def is_known(want: dict[str, Any], have: Any) -> bool:
    if "made" in want:
        return have is not MISSING and is_made_so(want["made"], have)
    if "name" in want:
        last = want["name"].rpartition(".")[2]
        return last in (getattr(have, "__name__", ""), getattr(have, "name", "")) or last in repr(
            have
        )
    if want["value"] in ("inf", "nan"):
        return repr(have) == want["value"]
    value = ast.literal_eval(want["value"])
    is_pair = isinstance(value, tuple | list) and isinstance(have, tuple | list)
    return have == value or (is_pair and [*have] == [*value])


MADE = re.compile(
    r"(?:\w+\.)*?(?:(?P<class>[A-Z]\w*)\.default_config|config_for_function\((?P<function>[a-z]\w*))"
)


def is_made_so(call: str | bool, have: Any) -> bool:
    """Returns whether a value computed by a call is of the class or function that is known.

    `call` is its text, whose end may be cut off, or True if it is not known. Classes and functions
    that are private to AXLearn have other names here.
    """
    made = MADE.match(str(call))
    if made is None:
        return True
    maker = getattr(have, "klass", None) if made["class"] else getattr(have, "fn", None)
    if getattr(maker, "__name__", "") != (made["class"] or made["function"]):
        return False
    settings = re.search(r"\.set\((\w+)=([\w'.]+)\)$", str(call))
    return settings is None or repr(getattr(have, settings[1])) == settings[2]


def config_value(cls: Any, path: str) -> Any:
    try:
        value = cls.default_config()
    except TypeError:  # takes arguments
        return MISSING
    for name in path.split("."):
        value = getattr(value, name, MISSING)
    return value


def parameters(target: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}


def defaults(cls: Any, facts: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yields for each fact what it is about, what is known, and what is here."""
    for path, want in {**facts.get("config", {}), **facts.get("default_config", {})}.items():
        yield f".{path}", want, config_value(cls, path)
    for member in facts.get("enum", ()):
        is_member = issubclass(cls, enum.Enum) and member in cls.__members__
        yield f".{member}", {"made": True}, True if is_member else MISSING
    for name, want in facts.get("dataclass", {}).items():
        field = getattr(cls, "__dataclass_fields__", {}).get(name)
        yield f".{name}", want, field.default if field is not None else MISSING
    for method, wants in {"": facts.get("params", {}), **facts.get("methods", {})}.items():
        found = parameters(getattr(cls, method, None) if method else cls)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in found.values())
        for name, want in wants.items():
            if found and not (takes_any and name not in found):
                have = found[name].default if name in found else MISSING
                yield f"{'.' if method else ''}{method}({name})", want, have


@pytest.mark.parametrize("module", KNOWN)
def test_defaults_are_known_or_listed(module):
    differ = set()
    for name, facts in KNOWN[module].items():
        cls = getattr(importlib.import_module(module), name, MISSING)
        key = f"{module}.{name}"
        if cls is MISSING:
            differ.add(key)
        else:
            differ |= {
                key + of for of, want, have in defaults(cls, facts) if not is_known(want, have)
            }
    about = [f"{module}.{name}" for name in KNOWN[module]]
    assert differ == {key for key in ALLOWED if any(is_about(key, name) for name in about)}


def is_about(key: str, name: str) -> bool:
    return key.startswith(name) and not key.removeprefix(name)[:1].isidentifier()


def test_names_that_are_left_out_say_what_to_write():
    left_out = [key.rpartition(".") for key in ALLOWED if "(" not in key]
    left_out = [(place, name) for place, _, name in left_out if place.split(".")[-1].islower()]
    for module, name in left_out:
        instead = re.escape(ALLOWED[f"{module}.{name}"])
        assert not hasattr(importlib.import_module(module), name)
        with pytest.raises(LeftOutError, match=f"{module} has no '{name}' of AXLearn: {instead}"):
            exec(f"from {module} import {name}")
        with pytest.raises(AttributeError, match=instead):
            getattr(importlib.import_module(module), name)
    assert len(left_out) > 10


def test_old_uses_say_what_to_write():
    for cls, member in ((GMMBackend, "PALLAS"), (GMMBackend, "TOKAMAX")):
        with pytest.raises(
            AttributeError, match=f"no attribute '{member}'. In place of AXLearn's: kerne"
        ):
            getattr(cls, member)
    with pytest.raises(
        AttributeError, match=r"'INIT_STATES'. In place of AXLearn's: call init_states\(batch"
    ):
        getattr(ForwardMode, "INIT_STATES")  # noqa: B009 - no such member for type checkers
    assert ForwardMode["FORWARD"] is ForwardMode.FORWARD and not hasattr(ForwardMode, "OTHER")
    with pytest.raises(
        AttributeError, match=r"'partition_spec'\. In place of AXLearn's: leave it out; t"
    ):
        ZeroAttentionBias().partition_spec  # noqa: B018
    with pytest.raises(MetricCalculatorError, match="a Dependency has no 'key'; it has src, dst"):
        CompositeMetricCalculator.Dependency("a", "b", key="c")
    attention = MultiheadAttention.default_config().set(
        name="attention", query_dim=4, key_dim=4, value_dim=4, num_heads=1
    )
    layer: Any = attention.instantiate(parent=None)
    for old in ({"time_step": None}, {"data": None}):
        call = {"inputs": old, "method": "init_states", "state": {}, "prng_key": None}
        with pytest.raises(TypeError, match="In place of AXLearn's: pass batch_size, max_len and"):
            functional(layer, **call, is_training=False)


@pytest.mark.parametrize("field", ["recorder", "save_input_iterator", "tpu_trace_mode"])
def test_fields_that_are_left_out_say_what_to_write(field):
    class Trainer(SpmdTrainer):
        pass

    instead = re.escape(ALLOWED[f"weft.trainer.trainer.SpmdTrainer.{field}"])
    with pytest.raises(UnknownFieldError, match=f"{field}.*In place of AXLearn's: {instead}"):
        Trainer.default_config().set(**{field: None})


def test_modules_that_are_left_out_say_what_to_use():
    coverage = Path("docs/coverage.md").read_text(encoding="utf-8")
    assert len(missing_modules()) > 50
    for name, instead in missing_modules().items():
        package = "weft" if name in ("common", "cloud", "experiments") else "weft.hierarchy"
        said = re.escape(f"{package} has no module {name!r} of AXLearn: {instead}.")
        with pytest.raises(LeftOutError, match=said):
            importlib.import_module(f"{package}.{name}")
        with pytest.raises(LeftOutError, match=said):
            exec(f"from {package} import {name}")
        assert not hasattr(importlib.import_module(package), name)
        assert f"`{name}`" in coverage
        for used in re.findall(r"weft(?:\.\w+)+", instead):
            pkgutil.resolve_name(used)


def test_modules_below_those_that_are_left_out_say_so():
    with pytest.raises(LeftOutError, match=r"set implementation of weft\.hierarchy\.attention"):
        exec("from weft.hierarchy.flash_attention.layer import FlashAttention")
    with pytest.raises(LeftOutError, match=r"its modules are in weft\.config, weft"):
        exec("import weft.common.layers")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'weft\.hierarchy\.nons"):
        exec("import weft.hierarchy.nonsense")
    assert importlib.import_module("weft.launch").__name__ == "weft.launch"


def test_orbax_checkpointer_is_another_name():
    from weft.trainer.checkpointer import Checkpointer
    from weft.trainer.checkpointer_orbax import OrbaxCheckpointer

    assert OrbaxCheckpointer is Checkpointer
