from typing import get_args

import jax

from weft import typing as weft_typing


def test_nested_is_a_tree_of_its_argument():
    leaf, tree = get_args(weft_typing.Nested[jax.Array])
    assert leaf is jax.Array
    assert tree.__origin__.__name__ == "Mapping"


def test_every_name_exists():
    assert all(hasattr(weft_typing, name) for name in weft_typing.__all__)
