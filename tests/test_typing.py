from typing import get_args

import jax

from weft import typing as weft_typing


def test_nested_is_a_tree_of_its_argument():
    leaf, tree = get_args(weft_typing.Nested[jax.Array])
    assert leaf is jax.Array
    assert tree.__origin__.__name__ == "Mapping"


def test_every_name_exists():
    assert all(hasattr(weft_typing, name) for name in weft_typing.__all__)


def test_hashable_mappings_are_compared_by_value():
    given = {"a": 1}
    one, other = (weft_typing.HashableMapping(x) for x in (given, {"a": 1}))
    given["a"] = 2
    assert one == other and hash(one) == hash(other) and repr(one) == "{'a': 1}"
