"""

Texts that an earlier version wrote are read: of recipes, of each class, and of other values.

The files in golden/ were written by the version before the packages were rearranged. They are never
written again: a name in them that has moved belongs in the table of moved names.
"""

import collections
import dataclasses
import enum
import functools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from weft.config import (
    ABSENT,
    REQUIRED,
    Change,
    ConfigBase,
    Configurable,
    InMemory,
    Origin,
    Required,
    apply_overrides,
    config_class,
    diff,
    from_text,
    to_text,
)
from weft.config.text_parser import read_value
from weft.config.text_writer import value_text


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Spec:
    size: int = 1


class Leaf(Configurable):
    @config_class
    class Config(Configurable.Config):
        rate: float = 0.1
        act: Any = jax.nn.gelu


class Tree(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: Required[int] = REQUIRED
        leaf: Leaf.Config = Leaf.default_config()
        many: list = []
        value: Any = None


@config_class
class Data(ConfigBase):
    x: Any = None


class Foreign:
    def __init__(self, x: int = 1):
        self.x = x


M = __name__


def test_defaults_may_be_omitted():
    cfg = Tree.default_config().set(dim=3)
    cfg.leaf.rate = 0.5
    assert (
        to_text(cfg, omit_defaults=True)
        == f"""\
{M}.Tree.Config(
    dim=3,
    leaf={M}.Leaf.Config(
        rate=0.5,
    ),
)"""
    )
    assert to_text(Leaf.default_config(), omit_defaults=True) == f"{M}.Leaf.Config()"


def test_class_is_written_if_head_differs():
    cfg = Tree.default_config().set(klass=Leaf)
    assert to_text(cfg, True) == f"{M}.Tree.Config(\n    klass={M}.Leaf,\n)"
    assert from_text(to_text(cfg)) == cfg


VALUES = [
    (None, "None"),
    (True, "True"),
    (-3, "-3"),
    (3e-4, "0.0003"),
    (math.inf, "inf"),
    (-math.inf, "-inf"),
    (math.nan, "nan"),
    (complex(1, -2), "complex(1.0, -2.0)"),
    ("it's\n", '"it\'s\\n"'),
    (b"x", "b'x'"),
    (REQUIRED, "REQUIRED"),
    (Colour.RED, f"{M}.Colour.RED"),
    ([], "[]"),
    ((), "()"),
    ((1,), "(1,)"),
    ({}, "{}"),
    ({"a": [1], 2: None}, "{'a': [1], 2: None}"),
    ({2, 1}, "{1, 2}"),
    (set(), "set()"),
    (frozenset({1}), "frozenset({1})"),
    (frozenset(), "frozenset()"),
    (Point(1), f"{M}.Point(x=1, y=None)"),
    (Spec(2), f"{M}.Spec(size=2)"),
    (int, "int"),
    (Foreign, f"{M}.Foreign"),
    (jax.nn.relu, "jax.nn.relu"),
    (jax.checkpoint_policies.dots_saveable, "jax.checkpoint_policies.dots_saveable"),
    (functools.partial(jax.nn.gelu, approximate=False), None),
    (np.dtype("float32"), "numpy.dtype('float32')"),
    (np.dtype("bfloat16"), "numpy.dtype('bfloat16')"),
    (np.dtype(">f4"), "numpy.dtype('>f4')"),
    (np.dtype("U3"), "numpy.dtype('<U3')"),
    (np.float32(0.5), "numpy.float32(0.5)"),
    (np.int8(-3), "numpy.int8(-3)"),
    (np.float64("inf"), "numpy.float64(inf)"),
    (np.bool_(True), "numpy.bool(True)"),
    (ml_dtypes.bfloat16(1.5), "ml_dtypes.bfloat16(1.5)"),
    (jnp.bfloat16, "jax.numpy.bfloat16"),
    (jax.sharding.PartitionSpec(), "jax.sharding.PartitionSpec()"),
    (
        jax.sharding.PartitionSpec("data", None, ("a", "b")),
        "jax.sharding.PartitionSpec('data', None, ('a', 'b'))",
    ),
]


def short(value):
    return str(value).partition(" at 0x")[0][:40]


@pytest.mark.parametrize(("value", "text"), VALUES, ids=short)
def test_values(value, text):
    cfg = Data(x=value)
    assert text is None or to_text(cfg) == f"{M}.Data(\n    x={text},\n)"
    assert from_text(to_text(cfg), allow=(M,)) == cfg
    again = from_text(to_text(cfg), allow=(M,)).x
    assert type(again) is type(value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (lambda: 1, "<lambda>"),
        (object(), "an object of type builtins.object"),
        (np.arange(3), "an object of type numpy.ndarray"),
        (np.dtype([("a", "f4")]), "an object of type"),
        (collections.OrderedDict(), "an object of type collections.OrderedDict"),
        (jax.sharding.PartitionSpec(jax.sharding.PartitionSpec.UNCONSTRAINED), "an object of"),
        (InMemory({}, "a table with 1 row"), "unreadable('a table with 1 row')"),
        (np.datetime64("2020-01-01"), "an object of type numpy.datetime64"),
    ],
    ids=short,
)
def test_values_without_text_are_marked(value, name):
    text = to_text(Data(x=value))
    assert text.startswith(f"{M}.Data(\n    x=unreadable(")
    assert name in text
    assert " at 0x" not in text  # the same config gives the same text


def test_long_lines_are_broken():
    text = to_text(Data(x=list(range(100))))
    assert max(map(len, text.splitlines())) < 100
    assert from_text(text, allow=(M,)).x == list(range(100))
    assert f"    x=['{'a' * 88}'],\n" in to_text(Data(x=["a" * 88]))
    assert f"    x=[\n        '{'a' * 89}',\n" in to_text(Data(x=["a" * 89]))


def test_origins_are_trailing_comments():
    cfg = Tree.default_config().set(dim=3)
    apply_overrides(cfg, ["leaf.rate=0.5"])
    lines = to_text(cfg, omit_defaults=True, origins=True).splitlines()
    assert lines[1].startswith("    dim=3,  # ")
    assert "test_text_writer.py:" in lines[1]
    assert lines[2] == f"    leaf={M}.Leaf.Config("
    assert lines[3] == "        rate=0.5,  # override"
    assert from_text("\n".join(lines)) == cfg


def test_origin_is_escaped_in_comment():
    cfg = Data(x=1)
    cfg._origins["x"] = Origin("a\nb\r__import__('os')")
    assert from_text(to_text(cfg, origins=True), allow=(M,)) == cfg


class Node(Configurable):
    @config_class
    class Config(Configurable.Config):
        rate: float = 0.1
        sizes: list = []


class Other(Configurable):
    @config_class
    class Config(Configurable.Config):
        rate: float = 0.1
        depth: int = 3


class Root(Configurable):
    @config_class
    class Config(Configurable.Config):
        leaf: Node.Config = Node.default_config()
        many: list = []
        rules: dict = {}
        note: str | None = None


@config_class
class Wide(ConfigBase):
    text: str = ""


def test_changes_are_values_with_paths():
    a = Root.default_config().set(many=[1, 2], rules={"x": 1})
    b = a.clone(note="new", many=[1, 3, 4], rules={"y": 2})
    b.leaf.rate = 0.5
    assert list(diff(a, b)) == [
        Change("leaf.rate", 0.1, 0.5),
        Change("many[1]", 2, 3),
        Change("many[2]", ABSENT, 4),
        Change("note", None, "new"),
        Change("rules['x']", 1, ABSENT),
        Change("rules['y']", ABSENT, 2),
    ]
    assert str(diff(a, b)).splitlines() == [
        "leaf.rate: 0.1 → 0.5",
        "many[1]: 2 → 3",
        "many[2]: nothing → 4",
        "note: None → 'new'",
        "rules['x']: 1 → nothing",
        "rules['y']: nothing → 2",
    ]


def test_class_replaced():
    a = Root.default_config()
    b = a.clone(leaf=Other.default_config())
    assert str(diff(a, b)).splitlines() == [
        "leaf: Node.Config → Other.Config",
        "leaf.sizes: [] → nothing",
        "leaf.depth: nothing → 3",
    ]


def test_added_config():
    a, b = Root.default_config(), Root.default_config().set(many=[Node.default_config()])
    assert str(diff(a, b)) == "many[0]: nothing → Node.Config"
    a.rules = {"x": 1}
    b = a.clone(rules={"x": [1]})
    assert str(diff(a, b)) == "rules['x']: 1 → [1]"


def test_long_values_are_cut():
    line = str(diff(Wide(), Wide(text="x" * 1000)))
    assert len(line) < 200
    assert line.endswith("…")


GOLDEN = Path(__file__).parent / "golden"
ALLOW = ("weft",)  # launchers and writers to services too, which a text may name only if allowed


def texts(name, separator):
    return (GOLDEN / name).read_text(encoding="utf-8").strip().split(separator)


def assert_names_are_public(text):
    assert not re.findall(r"\bweft\.(?:\w+\.)*_\w+", text)


@pytest.mark.parametrize("recipe", ["digits", "lm-lora", "lm-moe", "lm-nnx"])
def test_config_of_a_recipe(recipe):
    (text,) = texts(f"{recipe}.txt", "\n\n")
    cfg = from_text(text)
    written = to_text(cfg)
    assert from_text(written) == cfg
    assert_names_are_public(written)


def test_config_of_each_class():
    found = [from_text(text, allow=ALLOW) for text in texts("classes.txt", "\n\n")]
    assert len(found) == 232
    for cfg in found:
        written = to_text(cfg)
        assert from_text(written, allow=ALLOW) == cfg
        assert_names_are_public(written)


@pytest.mark.parametrize("text", texts("values.txt", "\n"))
def test_value(text):
    value = read_value(text)
    again = read_value(value_text(value))
    assert again == value and type(again) is type(value)
