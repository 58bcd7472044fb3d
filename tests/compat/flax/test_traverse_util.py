import copy
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import strategies as st

from weft.errors import FlatDictError, NestedDictError, TraversalError
from weft.traverse_util import (
    ModelParamTraversal,
    Traversal,
    TraverseAttr,
    flatten_dict,
    path_aware_map,
    t_identity,
    unflatten_dict,
)

names = st.text("abc", max_size=2)


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


def plus_one(x):
    return x + 1


def test_entries_of_arrays_are_replaced():
    made = t_identity[0].update(plus_one, np.arange(2))
    np.testing.assert_array_equal(made, [1, 1])


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


def test_non_string_keys_are_not_joined():
    assert flatten_dict({1: {"a": 2}}) == {(1, "a"): 2}
    with pytest.raises(
        FlatDictError, match=re.escape("path (1, 'a') has 1, which is not a string")
    ):
        flatten_dict({1: {"a": 2}}, sep="/")
