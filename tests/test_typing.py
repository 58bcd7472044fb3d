from typing import get_args

import jax

from weft import typing as weft_typing


def test_nested_is_a_dict_tree_of_what_it_names():
    leaf, tree = get_args(weft_typing.Nested[jax.Array])
    assert leaf is jax.Array
    assert tree.__origin__.__name__ == "Mapping"


def test_every_name_is_there():
    assert all(hasattr(weft_typing, name) for name in weft_typing.__all__)
