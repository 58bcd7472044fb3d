import dataclasses
from typing import Any, NamedTuple

import pytest

from weft.config import REQUIRED, ConfigBase, ConfigTypeError, UnknownFieldError, config_class
from weft.config.paths import get_path, parse_path, split_path


class Point(NamedTuple):
    x: int
    y: Any = 0


@dataclasses.dataclass(frozen=True)
class Spec:
    size: int = 1
    inner: Any = None


@config_class
class Leaf(ConfigBase):
    rate: float = 0.1


@config_class
class Tree(ConfigBase):
    leaf: Leaf = Leaf()
    many: list = [Leaf(), Leaf()]
    numbers: tuple[int, ...] = (1, 2)
    rules: dict[str, Any] = {"a": 1, "b c": [1]}
    point: Point = Point(1)
    spec: Spec = Spec()
    unset: Any = REQUIRED


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("", []),
        ("a", ["a"]),
        ("a.b", ["a", "b"]),
        ("a[2].b[-1]", ["a", 2, "b", -1]),
        ("a['x y'].b", ["a", "x y", "b"]),
        ('a["x]"]', ["a", "x]"]),
        (r"a['it\'s']", ["a", "it's"]),
        ("a[1][2]", ["a", 1, 2]),
    ],
)
def test_paths_are_read(text, steps):
    assert parse_path(text) == steps


def test_steps_are_taken_as_they_are():
    assert parse_path(["a", 2, "b.c"]) == ["a", 2, "b.c"]
    assert parse_path(("a",)) == ["a"]


@pytest.mark.parametrize("text", [".a", "a..b", "a.", "a[", "a[x]", "a[1]b", "a b", "a[1.5]", "[b"])
def test_what_is_no_path(text):
    with pytest.raises(UnknownFieldError) as error:
        parse_path(text)
    assert f"{text!r} is not a path: cannot read" in str(error.value)
    assert "as model.layers[2].rate" in str(error.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("leaf.rate", 0.1),
        ("many[1].rate", 0.1),
        ("many[-1].rate", 0.1),
        ("numbers[0]", 1),
        ("rules.a", 1),
        ("rules['b c'][0]", 1),
        ("point.x", 1),
        ("point.y", 0),
        ("spec.size", 1),
    ],
)
def test_values_are_found_and_set(path, value):
    cfg = Tree()
    assert cfg.get_recursively(path) == value
    cfg.set_recursively(path, value=5)
    assert cfg.get_recursively(path) == 5
    assert Tree().get_recursively(path) == value


def test_containers_keep_their_class():
    cfg = Tree()
    for path in ("numbers[1]", "point.y", "spec.inner", "rules.new", "many[0]"):
        cfg.set_recursively(path, value=7)
    assert cfg.numbers == (1, 7)
    assert cfg.point == Point(1, 7)
    assert cfg.spec == Spec(inner=7)
    assert cfg.rules == {"a": 1, "b c": [1], "new": 7}
    assert cfg.many == [7, Leaf()]


def test_what_is_set_inside_is_checked_as_a_whole():
    with pytest.raises(ConfigTypeError, match=r"numbers: Tree declares tuple\[int, \.\.\.\]"):
        Tree().set_recursively("numbers[0]", value="x")


def test_a_config_inside_of_a_container_is_set_in_place():
    cfg = Tree()
    leaf = cfg.many[0]
    cfg.set_recursively("many[0].rate", value=0.9)
    assert leaf.rate == 0.9


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("laef.rate", "unknown field 'laef' in Tree. Did you mean 'leaf'?"),
        ("leaf.raet", "leaf: unknown field 'raet' in Leaf. Did you mean 'rate'?"),
        ("many[2].rate", "many: there is no [2] in a list of length 2. Write an index from 0 to 1"),
        ("many.rate", "many: there is no ['rate'] in a list of length 2"),
        ("rules.aa", "rules: unknown key 'aa'."),
        ("spec.sise", "spec: unknown field 'sise' in Spec. Did you mean 'size'?"),
        ("point.z", "point: unknown field 'z' in Point. There are: x, y."),
        ("leaf.rate.x", "leaf.rate: there is no 'x' in it, since it is 0.1."),
        ("unset.x", "unset: there is no 'x' in it, since it is still REQUIRED."),
    ],
)
def test_where_a_path_ends(path, message):
    cfg = Tree()
    with pytest.raises(UnknownFieldError) as error:
        cfg.get_recursively(path)
    assert message in str(error.value)
    if path != "rules.aa":  # a dict may get a new key
        with pytest.raises(UnknownFieldError):
            cfg.set_recursively(path, value=1)


def test_an_empty_path_cannot_be_set():
    for path in ("", []):
        with pytest.raises(UnknownFieldError, match="The path is empty"):
            Tree().set_recursively(path, value=1)


def test_split_path_finds_the_innermost_config():
    cfg = Tree()
    owner, steps = split_path(cfg, "rules['b c'][0]")
    assert owner is cfg
    assert steps == ["rules", "b c", 0]
    owner, steps = split_path(cfg, "many[0].rate")
    assert owner is cfg.many[0]
    assert steps == ["rate"]
    assert get_path(cfg, ()) is cfg
