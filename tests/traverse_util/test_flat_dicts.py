import re
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import FlatDictError, NestedDictError
from weft.traverse_util import empty_node, flatten_dict, path_aware_map, unflatten_dict

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


def test_a_whole_dict_may_be_a_leaf():
    flat = flatten_dict({"a": {"b": 1}}, is_leaf=lambda path, x: True)
    assert flat == {(): {"a": {"b": 1}}}
    assert unflatten_dict(flat) == {"a": {"b": 1}}
    assert flatten_dict({"a": {}}, is_leaf=lambda path, x: path == ("a",)) == {("a",): {}}


def test_every_mapping_counts():
    assert flatten_dict(MappingProxyType({"a": MappingProxyType({"b": 1})})) == {("a", "b"): 1}


def test_an_empty_node_and_other_leaves_go_together_in_either_order():
    flat = {("a",): empty_node, ("a", "b"): 1}
    assert unflatten_dict(flat) == {"a": {"b": 1}}
    assert unflatten_dict(dict(reversed(flat.items()))) == {"a": {"b": 1}}


def test_the_leaves_stay_as_they_are():
    leaf = {}
    assert unflatten_dict({("a",): leaf})["a"] is leaf
    flat = {("a",): {"b": 1}, ("a", "c"): 2}
    with pytest.raises(FlatDictError):
        unflatten_dict(flat)
    assert flat == {("a",): {"b": 1}, ("a", "c"): 2}


@pytest.mark.parametrize("function", [flatten_dict, unflatten_dict])
def test_what_is_no_mapping_is_refused(function):
    with pytest.raises(NestedDictError, match=f"{function.__name__} was given a list; expected a"):
        function([1])
    with pytest.raises(NestedDictError, match="path_aware_map was given a int"):
        path_aware_map(lambda path, x: x, 1)


def test_paths_that_become_equal_are_refused():
    message = "two leaves have the path 'a/b' once their names are joined by '/'; use a separator"
    with pytest.raises(FlatDictError, match=message):
        flatten_dict({"a/b": 1, "a": {"b": 2}}, sep="/")


def test_a_path_of_other_keys_than_strings_is_not_joined():
    assert flatten_dict({1: {"a": 2}}) == {(1, "a"): 2}
    with pytest.raises(
        FlatDictError, match=re.escape("path (1, 'a') has 1, which is not a string")
    ):
        flatten_dict({1: {"a": 2}}, sep="/")


@pytest.mark.parametrize("flip", [False, True])
def test_a_path_through_a_leaf_is_refused(flip):
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
def test_a_key_that_is_no_path_is_refused(flat, sep, message):
    with pytest.raises(FlatDictError, match=message):
        unflatten_dict(flat, sep=sep)
