"""Nested mappings by the paths of their leaves."""

import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import nnx, traverse_util
from weft.errors import FlatDictError, NestedDictError
from weft.nnx import traversals
from weft.traverse_util import flatten_mapping, flatten_to_sequence, unflatten_mapping

keys = st.text("ab", min_size=1, max_size=2)
nested = st.dictionaries(
    keys,
    st.recursive(st.integers(), lambda x: st.dictionaries(keys, x, max_size=2), max_leaves=4),
    max_size=3,
)


@settings(deadline=None, max_examples=25)
@given(nested)
def test_nested_dict_round_trips(xs):
    assert unflatten_mapping(flatten_mapping(xs, keep_empty_nodes=True)) == xs
    joined = flatten_mapping(xs, keep_empty_nodes=True, sep="/")
    assert unflatten_mapping(joined, sep="/") == xs
    assert flatten_to_sequence(xs) == list(flatten_mapping(xs).items())


def test_states_are_mappings():
    state = nnx.State({"a": {"b": nnx.Param(1)}})
    assert list(flatten_mapping(state)) == [("a", "b")]
    assert unflatten_mapping(flatten_to_sequence(state))["a"]["b"] is state["a"]["b"]


def test_module_of_nnx():
    assert traversals is traverse_util
    module = importlib.import_module("weft.nnx.traversals")
    assert module.flatten_mapping is flatten_mapping


def test_non_mapping_is_rejected():
    for function in (flatten_mapping, flatten_to_sequence):
        with pytest.raises(NestedDictError, match="was given a int; expected a dict"):
            function(3)
    with pytest.raises(NestedDictError, match="unflatten_mapping was given a int; expected a map"):
        unflatten_mapping(3)
    with pytest.raises(FlatDictError, match="leaf and also the beginning of another leaf's path"):
        unflatten_mapping([(("a",), 1), (("a", "b"), 2)])
