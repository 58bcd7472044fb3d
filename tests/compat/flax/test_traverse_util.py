import collections
import copy
import dataclasses
import pickle
import re
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import struct
from weft.core.frozen_dict import FrozenDict
from weft.errors import FlatDictError, NestedDictError, TraversalError
from weft.traverse_util import (
    ModelParamTraversal,
    Traversal,
    TraverseAttr,
    empty_node,
    flatten_dict,
    path_aware_map,
    t_identity,
    unflatten_dict,
)

names = st.text("abc", max_size=2)
nested = st.recursive(
    st.one_of(st.integers(), st.none(), st.lists(st.integers(), max_size=2)),
    lambda inner: st.dictionaries(names, inner, max_size=3),
)
dicts = st.dictionaries(names, nested, max_size=3)


@given(dicts)
@settings(deadline=None, max_examples=25)
def test_unflatten_undoes_flatten(xs):
    assert unflatten_dict(flatten_dict(xs, keep_empty_nodes=True)) == xs
    assert unflatten_dict(flatten_dict(xs, keep_empty_nodes=True, sep="/"), sep="/") == xs
    assert path_aware_map(lambda _, x: x, xs) == xs


def test_whole_dict_may_be_a_leaf():
    flat = flatten_dict({"a": {"b": 1}}, is_leaf=lambda path, x: True)
    assert flat == {(): {"a": {"b": 1}}}
    assert unflatten_dict(flat) == {"a": {"b": 1}}
    assert flatten_dict({"a": {}}, is_leaf=lambda path, x: path == ("a",)) == {("a",): {}}


def test_every_mapping_counts():
    assert flatten_dict(MappingProxyType({"a": MappingProxyType({"b": 1})})) == {("a", "b"): 1}


def test_empty_node_and_leaves_merge_in_any_order():
    flat = {("a",): empty_node, ("a", "b"): 1}
    assert unflatten_dict(flat) == {"a": {"b": 1}}
    assert unflatten_dict(dict(reversed(flat.items()))) == {"a": {"b": 1}}


def test_leaves_are_unchanged():
    leaf = {}
    assert unflatten_dict({("a",): leaf})["a"] is leaf
    flat = {("a",): {"b": 1}, ("a", "c"): 2}
    with pytest.raises(FlatDictError):
        unflatten_dict(flat)
    assert flat == {("a",): {"b": 1}, ("a", "c"): 2}


@pytest.mark.parametrize("function", [flatten_dict, unflatten_dict])
def test_non_mappings_are_rejected(function):
    with pytest.raises(NestedDictError, match=f"{function.__name__} was given a list; expected a"):
        function([1])
    with pytest.raises(NestedDictError, match="path_aware_map was given a int"):
        path_aware_map(lambda path, x: x, 1)


def test_paths_that_become_equal_are_rejected():
    message = "two leaves have the path 'ab' once their names are joined by ''; use a separator"
    with pytest.raises(FlatDictError, match=message):
        flatten_dict({"ab": 1, "a": {"b": 2}}, sep="")


@pytest.mark.parametrize(
    ("xs", "sep", "key"),
    [
        ({"mlp": {"up/0": 1}}, "/", "up/0"),
        ({"a/b": 1, "a": {"b": 2}}, "/", "a/b"),
        ({"a.": {"b": 1}}, "..", "a."),  # "a...b" splits into "a" and ".b"
    ],
)
def test_a_key_with_the_separator_is_refused(xs, sep, key):
    with pytest.raises(FlatDictError, match=f"the key {re.escape(repr(key))}, which contains the"):
        flatten_dict(xs, sep=sep)
    assert unflatten_dict(flatten_dict(xs)) == xs


def test_non_string_keys_are_not_joined():
    assert flatten_dict({1: {"a": 2}}) == {(1, "a"): 2}
    with pytest.raises(
        FlatDictError, match=re.escape("path (1, 'a') has 1, which is not a string")
    ):
        flatten_dict({1: {"a": 2}}, sep="/")


@pytest.mark.parametrize("flip", [False, True])
def test_path_through_leaf_fails(flip):
    flat = {("a",): 1, ("a", "b", "c"): 2}
    flat = dict(reversed(flat.items())) if flip else flat
    with pytest.raises(
        FlatDictError, match=re.escape("the path ('a',) is that of a leaf and also")
    ):
        unflatten_dict(flat)
    with pytest.raises(FlatDictError, match=re.escape("the path () is that of a leaf")):
        unflatten_dict({("a",): 1, (): 2})


@pytest.mark.parametrize(
    "flat, sep, message",
    [
        ({"dense": 1}, None, "the key 'dense' is not a path; expected a tuple of keys, or `sep`"),
        ({1: 1}, None, "the key 1 is not a path"),
        ({("a",): 1}, "/", "is not a path; expected a string, as sep is set"),
    ],
)
def test_invalid_key_is_rejected(flat, sep, message):
    with pytest.raises(FlatDictError, match=message):
        unflatten_dict(flat, sep=sep)


Pair = collections.namedtuple("Pair", "x y")
Pair4 = collections.namedtuple("Pair4", "a b c d")


@struct.dataclass
class Struct:
    x: int
    y: int


@dataclasses.dataclass
class Plain:
    x: int
    y: int


def plus_one(x):
    return x + 1


@pytest.mark.parametrize(
    "traversal, value, parts, updated",
    [
        (t_identity, 1, [1], 2),
        (t_identity["a"]["b"], {"a": {"b": 1}, "c": 2}, [1], {"a": {"b": 2}, "c": 2}),
        (t_identity["a"], FrozenDict(a=1, b=2), [1], FrozenDict(a=2, b=2)),
        (t_identity[-1], (1, 2), [2], (1, 3)),
        (t_identity[0], [1, 2], [1], [2, 2]),
        (t_identity[0], Pair(1, 2), [1], Pair(2, 2)),
        (t_identity.x, Pair(1, 2), [1], Pair(2, 2)),
        (t_identity.x, Struct(1, 2), [1], Struct(2, 2)),
        (t_identity.x, Plain(1, 2), [1], Plain(2, 2)),
        (t_identity.x, SimpleNamespace(x=1, y=2), [1], SimpleNamespace(x=2, y=2)),
        (t_identity.x.y, Struct(Struct(1, 2), 3), [2], Struct(Struct(1, 3), 3)),
        (t_identity.each(), (1, 2), [1, 2], (2, 3)),
        (t_identity.each(), Pair(1, 2), [1, 2], Pair(2, 3)),
        (t_identity.each(), {"a": 1}, [1], {"a": 2}),
        (
            t_identity.each(),
            collections.OrderedDict(a=1),
            [1],
            collections.OrderedDict(a=2),
        ),
        (t_identity.each(), FrozenDict(a=1), [1], FrozenDict(a=2)),
        (t_identity.tree(), {"a": [1, (2,)]}, [1, 2], {"a": [2, (3,)]}),
        (t_identity.each().filter(lambda x: x > 1), [1, 2], [2], [1, 3]),
        (t_identity.merge(t_identity["a"], t_identity["b"]), {"a": 1, "b": 2}, [1, 2],
         {"a": 2, "b": 3}),
        (ModelParamTraversal(lambda path, x: path == "/a/w"), {"a": {"w": 1, "v": 2, "e": {}}}, [1],
         {"a": {"w": 2, "v": 2, "e": {}}}),
        (ModelParamTraversal(lambda path, x: x == 1), FrozenDict({1: {"w": 1}}), [1],
         FrozenDict({1: {"w": 2}})),
    ],
)  # fmt: skip
def test_parts_are_read_and_replaced_and_the_value_stays(traversal, value, parts, updated):
    before = copy.deepcopy(value)
    assert list(traversal.iterate(value)) == parts
    made = traversal.update(plus_one, value)
    assert made == updated and type(made) is type(updated)
    assert traversal.set([p + 1 for p in parts], value) == updated
    assert value == before


def test_entries_of_arrays_are_replaced():
    made = t_identity[0].update(plus_one, np.arange(2))
    np.testing.assert_array_equal(made, [1, 1])


SLICES = [slice(1, 3), slice(-3, None), slice(None, None, -2), slice(5, 9), slice(None)]


@pytest.mark.parametrize("key", SLICES, ids=str)
@pytest.mark.parametrize("make", [list, tuple, lambda xs: Pair4(*xs), np.array])
def test_slice_names_each_of_its_items(key, make):
    value, traversal = make([1, 2, 3, 4]), t_identity[key]
    positions = range(4)[key]
    assert list(traversal.iterate(value)) == [value[i] for i in positions]
    expected = [10 * (i + 1) if i in positions else i + 1 for i in range(4)]
    made = traversal.update(lambda x: 10 * x, value)
    assert list(made) == expected and type(made) is type(value)
    given = [7 + i for i in range(len(positions))]
    written = dict(zip(positions, given, strict=True))
    assert list(traversal.set(given, value)) == [written.get(i, i + 1) for i in range(4)]
    assert list(value) == [1, 2, 3, 4]


def test_slices_compose_with_items():
    value = {"a": [{"w": 1}, {"w": 2}, {"w": 3}], "b": 4}
    traversal = t_identity["a"][1:]["w"]
    assert list(traversal.iterate(value)) == [2, 3]
    expected = {"a": [{"w": 1}, {"w": 3}, {"w": 4}], "b": 4}
    assert traversal.update(plus_one, value) == expected
    with pytest.raises(TraversalError, match="given 3 values, 1 more than"):
        t_identity[1:3].set([1, 2, 3], (1, 2, 3, 4))


@pytest.mark.parametrize(
    "values, message",
    [([1], "set was given 1 values, fewer than"), ([1, 2, 3], "given 3 values, 1 more than")],
)
def test_set_checks_number_of_values(values, message):
    with pytest.raises(TraversalError, match=message):
        t_identity.each().set(values, [0, 0])
    assert len(values) in (1, 3)


@pytest.mark.parametrize("value", [3, "ab", np.arange(2)])
def test_each_rejects_other_types(value):
    each = t_identity.each()
    message = f"not into a {type(value).__name__}; use tree"
    with pytest.raises(TraversalError, match=message):
        each.update(plus_one, value)
    with pytest.raises(TraversalError, match=message):
        list(each.iterate(value))


def test_parameters_are_in_a_nested_dict():
    with pytest.raises(NestedDictError, match="ModelParamTraversal was given a list"):
        ModelParamTraversal(lambda path, x: True).update(plus_one, [1])


def test_traversals_are_ordinary_objects():
    traversal = pickle.loads(pickle.dumps(copy.deepcopy(t_identity["a"].each())))
    assert traversal.update(plus_one, {"a": [1]}) == {"a": [2]}
    assert TraverseAttr("each").iterate(SimpleNamespace(each=4)).__next__() == 4
    with pytest.raises(AttributeError, match="__array__"):
        _ = t_identity.__array__
    with pytest.raises(TypeError, match="abstract"):
        Traversal()
