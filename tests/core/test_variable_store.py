import pytest

from weft.core.frozen_dict import freeze
from weft.core.variable_store import VariableStore
from weft.errors import ScopeTreeError


def test_entries_of_scope():
    store = VariableStore({"params": {"a": {"b": 1}, "c": 2}}, False)
    assert store.entries("params", ()) == {"a": {"b": 1}, "c": 2}
    assert store.entries("params", ("a",)) == {"b": 1}
    assert store.entries("params", ("z", "y")) == {}
    assert store.entries("cache", ("a",)) == {}
    assert store.collections == {"params": {"a": {"b": 1}, "c": 2}}


def test_value_of_other_mapping_class_is_replaced():
    store = VariableStore({}, True)
    store.put("state", (), "a", freeze({"b": 1}))
    store.put("state", (), "a", freeze({"c": 1}))
    assert store.collections["state"]["a"] == freeze({"c": 1})


def test_value_instead_of_dict_is_rejected():
    store = VariableStore({"params": {"a": 1.0}}, True, ("lifted",))
    message = r"the collection 'params' has a float at '/lifted/a', where a scope needs a dict"
    with pytest.raises(ScopeTreeError, match=message):
        store.entries("params", ("a", "b"))
    with pytest.raises(ScopeTreeError, match="a variable and a scope share a name"):
        store.put("params", ("a",), "b", 1)
    assert store.collections == {"params": {"a": 1.0}}


def test_only_written_values_changed():
    store = VariableStore({"params": {"a": {"b": 1, "c": 2}}, "state": {"x": 0}}, True)
    assert store.changes() == {}
    store.put("params", ("a",), "b", 3)
    store.put("state", (), "y", {"z": 1})
    changes = store.changes()
    assert changes == {"params": {"a": {"b": 3}}}
    store.put("state", (), "y", {"z": 2})
    changes = store.changes()
    assert changes == {"params": {"a": {"b": 3}}, "state": {"y": {"z": 2}}}
    changes["state"]["y"]["z"] = 5
    assert store.entries("state", ("y",)) == {"z": 2}


def test_rewriting_equal_values_is_ignored():
    value = [1.5, {"a": 2.5}]
    store = VariableStore({"state": {"x": value, "y": 0}}, True)
    store.put("state", (), "x", [value[0], dict(value[1])])
    store.put("state", (), "y", 1)
    store.put("state", (), "y", 0)
    assert store.changes() == {}
    store.put("state", (), "x", [value[0], value[1]["a"]])
    assert store.changes() == {"state": {"x": [1.5, 2.5]}}


def test_initial_values_are_recorded():
    store = VariableStore({"state": {"old": 0}}, True)
    store.put("state", (), "old", 1)
    store.put("state", ("a",), "new", 2)
    assert store.initial_values == {"state": {"a": {"new": 2}}}
    store.put("state", ("a",), "new", 3)
    store.put("state", ("a",), "new", 4)
    assert store.initial_values == {"state": {"a": {"new": 2}}}
