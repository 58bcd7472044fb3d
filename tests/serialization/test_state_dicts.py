import collections
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from weft import struct
from weft.errors import SerializationHandlerError, StateDictKeyError, StateDictMismatchError
from weft.serialization import (
    current_path,
    from_state_dict,
    register_serialization_state,
    to_state_dict,
)

Pair = collections.namedtuple("Pair", "first second")


class Point(struct.PyTreeNode):
    x: Any
    y: Any = 0
    name: str = struct.field(pytree_node=False, default="p")


class Registered:
    def __init__(self, held):
        self.held = held


paths = []


def held_to_state(value):
    paths.append(current_path())
    return {"held": to_state_dict(value.held)}


def held_from_state(value, state):
    paths.append(current_path())
    return Registered(from_state_dict(value.held, state["held"], name="held"))


register_serialization_state(Registered, held_to_state, held_from_state)


def test_partials_keep_their_function():
    made = from_state_dict(
        jax.tree_util.Partial(pow, 0, mod=None), to_state_dict(jax.tree_util.Partial(pow, 2))
        | {"keywords": {"mod": 3}},
    )  # fmt: skip
    assert made(4) == 1
    with pytest.raises(StateDictMismatchError, match="does not fit a Partial"):
        from_state_dict(jax.tree_util.Partial(pow, 0), {"args": {"0": 1}})


def test_named_tuples_of_old_files_are_read():
    old = {"name": "Pair", "fields": {"0": "second", "1": "first"}, "values": {"0": 1, "1": 2}}
    assert from_state_dict(Pair(0, 0), old) == Pair(first=2, second=1)


@pytest.mark.parametrize(
    "target, state, messages",
    [
        (
            {"a": {"kernel": 0, "bias": 0}},
            {"a": {"kernle": 1, "bias": 2}},
            ["a dict of the target at './a'", "it lacks 'kernel'", "'kernle' is near 'kernel'"],
        ),
        ({"a": 0}, [1], ["expected a dict with the keys 'a', got a list"]),
        ({"a": [0, 0]}, {"a": {"0": 1}}, ["a list", "'./a'", "has 2 entries, the state dict 1"]),
        ((0, 0), {"0": 1, "5": 1}, ["a tuple", "lacks '1'", "has '5', which the target has not"]),
        ([0], {0: 1}, ["lacks '0'"]),
        ([0], [1], ["expected a dict with the keys '0', got a list"]),
        (
            [Pair(0, 0)],
            {"0": {"first": 1, "secnd": 1}},
            ["the named tuple Pair of the target at './0'", "'secnd' is near 'second'"],
        ),
        (Point(0), {"x": 1}, ["the struct Point", "it lacks 'y'"]),
        (Point(0), {"x": 1, "y": 2, "z": 3}, ["it has 'z', which the target has not"]),
        (Point(0), 3, ["expected a dict with the keys 'x', 'y', got a int"]),
        (
            {"a": jnp.ones(2)},
            {"a": {"value": 1}},
            ["an array of the target at './a'", "expected an array, got a dict with 'value'"],
        ),
    ],
)
def test_mismatch_names_the_path(target, state, messages):
    with pytest.raises(StateDictMismatchError) as caught:
        from_state_dict(target, state)
    for message in [*messages, "Make the target as the saved one was made"]:
        assert message in str(caught.value)
    assert current_path() == ""


def test_path_starts_with_the_name():
    with pytest.raises(StateDictMismatchError, match="at 'params/0'"):
        from_state_dict([Point(0)], {"0": {}}, name="params")


def test_equal_string_keys_are_rejected():
    with pytest.raises(StateDictKeyError, match=r"dict at '\./a' are equal as strings: '1'"):
        to_state_dict({"a": {1: 0, "1": 1}})
    assert to_state_dict({(1, 2): 0}) == {"(1, 2)": 0}


def test_current_path_in_registered_types():
    paths.clear()
    tree = {"a": [Registered((1, 2))]}
    state = to_state_dict(tree)
    assert state == {"a": {"0": {"held": {"0": 1, "1": 2}}}}
    assert from_state_dict(tree, state)["a"][0].held == (1, 2)
    assert paths == ["./a/0", "./a/0"] and current_path() == ""
    with pytest.raises(StateDictMismatchError, match=r"'\./a/0/held'"):
        from_state_dict(tree, {"a": {"0": {"held": {}}}})


def test_each_thread_has_its_own_path():
    seen = []

    def look(value):
        thread = threading.Thread(target=lambda: seen.append(current_path()))
        thread.start()
        thread.join()
        return {}

    class Looks:
        pass

    register_serialization_state(Looks, look, lambda value, state: value)
    to_state_dict({"a": Looks()})
    assert seen == [""]


def test_custom_rule_has_precedence():
    class Own(struct.PyTreeNode):
        x: int

    register_serialization_state(
        Own, lambda own: {"own": own.x}, lambda own, state: Own(state["own"]), override=True
    )
    assert from_state_dict(Own(0), to_state_dict(Own(1))) == Own(1)
    assert to_state_dict(Own(1)) == {"own": 1}


@pytest.mark.parametrize("ty", [Registered, Point, dict])
def test_override_replaces_a_rule(ty):
    with pytest.raises(SerializationHandlerError, match=f"'{ty.__name__}' already has a rule"):
        register_serialization_state(ty, held_to_state, held_from_state)
