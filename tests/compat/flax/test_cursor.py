import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from weft import struct
from weft.cursor import cursor
from weft.errors import (
    CursorAttributeError,
    CursorError,
    CursorFindError,
    CursorIndexError,
    CursorKeyError,
    CursorTypeError,
    TraverseTreeError,
)


class Pair(NamedTuple):
    a: object
    b: object


@dataclasses.dataclass
class Box:
    x: object
    y: object = 2
    made: int = dataclasses.field(init=False, default=3)


class Frozen(struct.PyTreeNode):
    x: object


NESTED = {"list": [1, 2, (3, 4)], "pair": Pair(1, {"z": 9}), "box": Box(Frozen(5))}


def test_unchanged_parts_are_shared():
    changed = cursor(NESTED)["pair"].a.set(0)
    assert changed["list"] is NESTED["list"] and changed["box"] is NESTED["box"]
    assert cursor(NESTED).build() is not NESTED


def test_iteration_uses_value():
    c = cursor([1, 2, 3])
    c[0] = 5
    assert [x + 1 for x in c] == [6, 3, 4] and list(reversed(c)) == [3, 2, 5]
    assert len(c) == 3 and 5 in c and 1 not in c
    d = cursor({"a": 1})
    d["b"] = 2
    assert list(d) == ["a", "b"] and "b" in d
    with pytest.raises(CursorTypeError, match="cursor is 1, and only lists, tuples and mappings"):
        iter(cursor(1))


def test_repr_shows_value_and_changes():
    c = cursor({"a": [1, 2]})
    assert repr(c["a"]) == "Cursor([1, 2])"
    c["a"][0] = 5
    assert repr(c) == "Cursor({'a': [1, 2]}, changes={'a': Cursor([1, 2], changes={0: Cursor(5)})})"


def test_update_by_path_and_value():
    seen = []

    def update(path, value):
        seen.append(path)
        return 10 * value if isinstance(value, int) else value

    c = cursor(NESTED)
    assert c.apply_update(update) is c
    assert seen == [
        *("list", "list/0", "list/1", "list/2", "list/2/0", "list/2/1"),
        *("pair", "pair/a", "pair/b", "pair/b/z", "box", "box/x", "box/x/x", "box/y"),
    ]
    assert c.build() == {
        "list": [10, 20, (30, 40)],
        "pair": Pair(10, {"z": 90}),
        "box": Box(Frozen(50), 20),
    }


def test_updates_see_earlier_but_not_nested_changes():
    c = cursor({"a": {"b": 1}, "c": {"d": 2}})
    c["a"]["b"] = 5
    c.apply_update(lambda path, value: value + 1 if path == "a/b" else value)
    c.apply_update(lambda path, value: "gone" if path == "c" else value)
    c["a"].apply_update(lambda path, value: 2 * value if path == "b" else value)
    assert c.build() == {"a": {"b": 12}, "c": "gone"}


def test_find():
    c = cursor(NESTED)
    found = c.find(lambda path, value: path.endswith("z"))
    found += 0
    assert found == 9
    changed = c.find(lambda path, value: isinstance(value, Frozen)).x.set(0)
    assert changed["box"].x == Frozen(0)
    all_ints = cursor([1, [2, "x"], {"a": 3}]).find_all(lambda path, value: isinstance(value, int))
    assert [x + 0 for x in all_ints] == [1, 2, 3]


def test_errors_of_finding():
    c = cursor({"a": {"b": 1}, "c": {"b": 2}})
    with pytest.raises(CursorFindError, match=r"first cursor\['a'\]\['b'\], then cursor\['c"):
        c.find(lambda path, value: path.endswith("b"))
    with pytest.raises(CursorFindError, match=r"matched nothing below cursor, which has \['a', 'c"):
        c.find(lambda path, value: False)
    for method in (c.find, c.find_all, c.apply_update):
        with pytest.raises(TraverseTreeError, match=r"either an `update_fn` or a `cond_fn`"):
            method(None)


def test_missing_entries():
    c = cursor(NESTED)
    with pytest.raises(CursorKeyError, match=r"^cursor has no entry 'b', it has \['list', 'pair'"):
        c["b"]
    with pytest.raises(CursorIndexError, match=r"cursor\['list'\] has 3 elements and none at 3"):
        c["list"][3]
    with pytest.raises(CursorIndexError, match="none at -4"):
        c["list"][-4] = 1
    with pytest.raises(CursorAttributeError, match=r"cursor\['box'\] has no attribute 'z'"):
        c["box"].z  # noqa: B018
    with pytest.raises(CursorAttributeError, match=r"cursor\['box'\].z cannot be set: a Box has"):
        c["box"].z = 1
    with pytest.raises(CursorAttributeError, match=r"a Box has the fields \['x', 'y'\]"):
        c["box"].made = 1
    with pytest.raises(CursorTypeError, match="cursor is 1, which has no elements"):
        cursor(1)[0]
    with pytest.raises(CursorTypeError, match="points to one element; loop over the indices"):
        c["list"][:2]
    assert issubclass(CursorKeyError, CursorError | KeyError)


@pytest.mark.parametrize("kind", [np, jnp])
def test_arrays_are_changed_as_a_whole(kind):
    c = cursor({"w": kind.ones(2)})
    assert c["w"][0] == 1 and c["w"].shape == (2,)
    with pytest.raises(CursorTypeError, match=r"cursor\['w'\]\[0\] cannot be set: a .* as a whole"):
        c["w"][0] = 5
    with pytest.raises(CursorTypeError, match="as a whole"):
        c["w"][0].set(5)
    with pytest.raises(CursorTypeError, match="as a whole"):
        c["w"].shape[0] = 3


def test_items_and_attributes_differ():
    with pytest.raises(CursorTypeError, match=r"cursor.a cannot be set: write \['a'\] for an elem"):
        cursor({"a": 1}).a = 2
    with pytest.raises(CursorAttributeError, match=r"\['x'\] cannot be set: a Box has the fields"):
        cursor(Box(1))["x"] = 2
