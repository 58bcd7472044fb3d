from collections import OrderedDict

import pytest

from weft.core.frozen_dict import FrozenDict, freeze
from weft.core.trunk import Trunk, as_dicts, copied
from weft.errors import ScopeTreeError


def test_what_a_collection_has_in_a_scope():
    trunk = Trunk({"params": {"a": {"b": 1}, "c": 2}}, False)
    assert trunk.entries("params", ()) == {"a": {"b": 1}, "c": 2}
    assert trunk.entries("params", ("a",)) == {"b": 1}
    assert trunk.entries("params", ("z", "y")) == {}
    assert trunk.entries("cache", ("a",)) == {}
    assert trunk.collections == {"params": {"a": {"b": 1}, "c": 2}}


def test_of_mutable_collections_the_dicts_are_copied():
    params, state = freeze({"a": {"b": 1}}), OrderedDict(a={"b": 1})
    trunk = Trunk({"params": params, "state": state}, "state")
    assert trunk.collections["params"] is params
    trunk.put("state", ("a",), "b", 2)
    trunk.put("state", ("new",), "c", 3)
    assert trunk.collections["state"] == {"a": {"b": 2}, "new": {"c": 3}}
    assert type(trunk.collections["state"]) is dict
    assert state == {"a": {"b": 1}}


def test_dicts_that_scopes_hold_are_updated():
    trunk = Trunk({}, True)
    trunk.put("state", ("a",), "b", {"c": 1})
    held = trunk.entries("state", ("a", "b"))
    trunk.put("state", (), "a", {"b": {"d": 2}})
    assert held == {"c": 1, "d": 2}


def test_a_value_of_another_mapping_class_is_replaced():
    trunk = Trunk({}, True)
    trunk.put("state", (), "a", freeze({"b": 1}))
    trunk.put("state", (), "a", freeze({"c": 1}))
    assert trunk.collections["state"]["a"] == freeze({"c": 1})


def test_a_value_where_a_dict_should_be_is_named():
    trunk = Trunk({"params": {"a": 1.0}}, True, ("lifted",))
    message = r"the collection 'params' has a float at '/lifted/a', where a scope needs a dict"
    with pytest.raises(ScopeTreeError, match=message):
        trunk.entries("params", ("a", "b"))
    with pytest.raises(ScopeTreeError, match="a variable and a scope share a name"):
        trunk.put("params", ("a",), "b", 1)
    assert trunk.collections == {"params": {"a": 1.0}}


def test_only_what_was_written_to_has_changed():
    trunk = Trunk({"params": {"a": {"b": 1, "c": 2}}, "state": {"x": 0}}, True)
    assert trunk.changes() == {}
    trunk.put("params", ("a",), "b", 3)
    trunk.put("state", (), "y", {"z": 1})
    changes = trunk.changes()
    assert changes == {"params": {"a": {"b": 3}}}
    trunk.put("state", (), "y", {"z": 2})
    changes = trunk.changes()
    assert changes == {"params": {"a": {"b": 3}}, "state": {"y": {"z": 2}}}
    changes["state"]["y"]["z"] = 5
    assert trunk.entries("state", ("y",)) == {"z": 2}


def test_what_is_written_again_as_it_was_has_not_changed():
    value = [1.5, {"a": 2.5}]
    trunk = Trunk({"state": {"x": value, "y": 0}}, True)
    trunk.put("state", (), "x", [value[0], dict(value[1])])
    trunk.put("state", (), "y", 1)
    trunk.put("state", (), "y", 0)
    assert trunk.changes() == {}
    trunk.put("state", (), "x", [value[0], value[1]["a"]])
    assert trunk.changes() == {"state": {"x": [1.5, 2.5]}}


def test_the_first_values_of_what_was_made_are_kept():
    trunk = Trunk({"state": {"old": 0}}, True)
    trunk.put("state", (), "old", 1)
    trunk.put("state", ("a",), "new", 2)
    assert trunk.made == {"state": {"a": {"new": 2}}}
    trunk.put("state", ("a",), "new", 3)
    trunk.put("state", ("a",), "new", 4)
    assert trunk.made == {"state": {"a": {"new": 2}}}


def test_a_first_value_that_is_a_dict_does_not_change_with_it():
    trunk = Trunk({}, True)
    trunk.put("state", (), "x", {"n": 0})
    trunk.put("state", (), "x", {"n": 1})
    assert trunk.made == {"state": {"x": {"n": 0}}}


def test_copies_of_mappings():
    inner = FrozenDict(b=[1])
    xs = {"a": {"c": inner}}
    assert type(as_dicts(xs)["a"]["c"]) is dict
    assert copied(xs)["a"]["c"] is inner
    assert copied(xs)["a"] is not xs["a"]
    assert as_dicts(xs)["a"]["c"]["b"] is inner["b"]
