import collections
import dataclasses
import enum
import functools
import threading
from typing import Any, ClassVar, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import (
    REQUIRED,
    ConfigBase,
    ConfigTypeError,
    Required,
    RequiredFieldMissingError,
    UnknownFieldError,
    config_class,
)
from weft.config.values import (
    copy_value,
    parse_path,
    values_equal,
)


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass(frozen=True)
class Spec:
    shape: tuple
    extra: Any = None
    KIND: ClassVar[str] = "spec"


@dataclasses.dataclass
class Counter:
    values: list


@attrs.define
class Pair:
    left: Any
    right: Any = None


@config_class
class Leaf(ConfigBase):
    x: int = 1


class Plain:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    "value",
    [
        [1, [2]],
        {"a": [1]},
        (1, [2]),
        Point(1, [2]),
        Counter([1]),
        Pair([1]),
        Spec((1,), extra=[2]),
        {"a": {1, 2}},
        np.arange(3),
        Plain([1]),
        collections.OrderedDict(a=[1]),
        collections.deque([1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mutable_values_are_copied(value):
    copied = copy_value(value)
    assert copied is not value
    assert type(copied) is type(value)
    assert values_equal(copied, value)


def test_configs_in_records_are_copied():
    leaf = Leaf()
    for value in (Point(1, leaf), Spec((), leaf), Pair(leaf), [(leaf,)]):
        copied = copy_value(value)
        leaf.x += 1
        assert not values_equal(copied, value)


@pytest.mark.parametrize(
    "value",
    [
        1,
        "text",
        None,
        Colour.RED,
        len,
        Leaf,
        Plain(1).__init__,
        jnp.float32,
        Spec((1, 2)),
        jax.sharding.PartitionSpec("data"),
        object(),
        threading.Lock(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_immutable_values_are_shared(value):
    assert copy_value(value) is value


def test_arrays_on_devices_are_shared():
    array = jnp.arange(3)
    assert copy_value([array])[0] is array


def test_uncopyable_record_is_shared():
    @dataclasses.dataclass
    class Stubborn:
        values: list

        def __reduce_ex__(self, protocol):
            raise TypeError("no copies")

    value = Stubborn([1])
    assert copy_value(value) is value


def double(x, y=0):
    return 2 * x


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1, 1.0, True),
        ([1], [1], True),
        ([1], (1,), False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, collections.OrderedDict(a=1), False),
        (float("nan"), float("nan"), True),
        ([float("nan")], [float("nan")], True),
        (complex(0, float("nan")), complex(0, float("nan")), True),
        (complex(1, float("nan")), complex(0, float("nan")), False),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(3) + 1, False),
        (np.arange(3), np.zeros((3, 1)), False),
        (np.arange(3), 0, False),
        (Spec((1,)), Spec((1,)), True),
        (Spec((1,), np.arange(2)), Spec((1,), np.arange(2)), True),
        (Pair(1), Pair(2), False),
        ({1, 2}, {2, 1}, True),
        (Plain(1), Plain(1), True),
        (Plain(1), Plain(2), False),
        (double, len, False),
        (lambda: 1, lambda: 1, False),
        (functools.partial(double, 1), functools.partial(double, 1), True),
        (functools.partial(double, 1), functools.partial(double, 2), False),
        (functools.partial(double, y=1), functools.partial(double, y=2), False),
        (jnp.float32, np.float32, True),
        (Leaf(x=1), Leaf(x=1), True),
        (Leaf(x=1), 1, False),
        (np.dtype("float32"), np.dtype("float32"), True),
    ],
)
def test_equality(a, b, equal):
    assert values_equal(a, b) is equal
    assert values_equal(b, a) is equal


def test_incomparable_values_are_unequal():
    class Odd:
        __hash__ = None

        def __eq__(self, other):
            raise RuntimeError("no")

    assert not values_equal(Odd(), Odd())


def test_calling_names_missing_value():
    with pytest.raises(RequiredFieldMissingError, match="still REQUIRED was called as a function"):
        REQUIRED(1, x=2)


@dataclasses.dataclass
class VisitSpec:
    size: int
    inner: Any = None


@config_class
class VisitLeaf(ConfigBase):
    rate: float = 0.1
    name: str | None = None


@config_class
class VisitTree(ConfigBase):
    dim: Required[int] = REQUIRED
    leaf: VisitLeaf = VisitLeaf()
    many: list = []
    rules: dict = {}
    spec: Any = None


def tree():
    return VisitTree(
        dim=3,
        many=[VisitLeaf(), (1, 2)],
        rules={"a": VisitLeaf(rate=0.5), 3: "x"},
        spec=VisitSpec(1, VisitLeaf()),
    )


def test_dict_is_independent():
    cfg = tree()
    cfg.to_dict()["many"].append(1)
    assert len(cfg.many) == 2


def test_listed_defaults_are_omitted():
    assert VisitTree().to_flat_dict(omit_default_values=(None, REQUIRED)) == {
        "leaf.rate": 0.1,
        "many": [],
        "rules": {},
    }
    assert VisitTree().to_flat_dict(omit_default_values=(0.1,))["leaf.name"] is None


def test_listed_value_is_kept_if_not_default():
    assert VisitTree(dim=REQUIRED, spec=3).set(rules={"a": None}).to_flat_dict(
        omit_default_values=(None,)
    ) == {"dim": REQUIRED, "leaf.rate": 0.1, "many": [], "rules['a']": None, "spec": 3}


class PathPoint(NamedTuple):
    x: int
    y: Any = 0


@dataclasses.dataclass(frozen=True)
class PathSpec:
    size: int = 1
    inner: Any = None


@config_class
class PathLeaf(ConfigBase):
    rate: float = 0.1


@config_class
class PathTree(ConfigBase):
    leaf: PathLeaf = PathLeaf()
    many: list = [PathLeaf(), PathLeaf()]
    numbers: tuple[int, ...] = (1, 2)
    rules: dict[str, Any] = {"a": 1, "b c": [1]}
    point: PathPoint = PathPoint(1)
    spec: PathSpec = PathSpec()
    unset: Any = REQUIRED


@pytest.mark.parametrize("text", [".a", "a..b", "a.", "a[", "a[x]", "a[1]b", "a b", "a[1.5]", "[b"])
def test_invalid_paths(text):
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
    cfg = PathTree()
    assert cfg.get_recursively(path) == value
    cfg.set_recursively(path, value=5)
    assert cfg.get_recursively(path) == 5
    assert PathTree().get_recursively(path) == value


def test_containers_keep_their_class():
    cfg = PathTree()
    for path in ("numbers[1]", "point.y", "spec.inner", "rules.new", "many[0]"):
        cfg.set_recursively(path, value=7)
    assert cfg.numbers == (1, 7)
    assert cfg.point == PathPoint(1, 7)
    assert cfg.spec == PathSpec(inner=7)
    assert cfg.rules == {"a": 1, "b c": [1], "new": 7}
    assert cfg.many == [7, PathLeaf()]


def test_nested_set_is_validated():
    with pytest.raises(ConfigTypeError, match=r"numbers: PathTree declares tuple\[int, \.\.\.\]"):
        PathTree().set_recursively("numbers[0]", value="x")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("laef.rate", "unknown field 'laef' in PathTree. Did you mean 'leaf'?"),
        ("leaf.raet", "leaf: unknown field 'raet' in PathLeaf. Did you mean 'rate'?"),
        ("many[2].rate", "many: there is no [2] in a list of length 2. Write an index from 0 to 1"),
        ("many.rate", "many: there is no ['rate'] in a list of length 2"),
        ("rules.aa", "rules: unknown key 'aa'."),
        ("spec.sise", "spec: unknown field 'sise' in PathSpec. Did you mean 'size'?"),
        ("point.z", "point: unknown field 'z' in PathPoint. There are: x, y."),
        ("leaf.rate.x", "leaf.rate: there is no 'x' in it, since it is 0.1."),
        ("unset.x", "unset: there is no 'x' in it, since it is still REQUIRED."),
    ],
)
def test_invalid_path(path, message):
    cfg = PathTree()
    with pytest.raises(UnknownFieldError) as error:
        cfg.get_recursively(path)
    assert message in str(error.value)
    if path != "rules.aa":  # a dict may get a new key
        with pytest.raises(UnknownFieldError):
            cfg.set_recursively(path, value=1)


def test_empty_path_cannot_be_set():
    for path in ("", []):
        with pytest.raises(UnknownFieldError, match="The path is empty"):
            PathTree().set_recursively(path, value=1)


def test_exit_runs_after_children():
    order = []
    VisitTree(dim=1).visit(
        visit_fn=lambda path, value: order.append(path),
        exit_fn=lambda path, value: order.append(f"/{path}"),
    )
    assert order == [
        "dim",
        *("leaf.name", "leaf.rate", "/leaf"),
        *("/many", "/rules", "spec", "/"),
    ]


def test_enter_may_stop_and_redirect():
    seen = {}

    def enter(path, value, children):
        if isinstance(value, VisitLeaf):
            return None
        if path == "rules":
            return [("elsewhere", 1)]
        return children

    tree().visit(visit_fn=seen.__setitem__, enter_fn=enter)
    assert seen["leaf"] == VisitLeaf()
    assert seen["elsewhere"] == 1
    assert not any(path.startswith("rules") for path in seen)
