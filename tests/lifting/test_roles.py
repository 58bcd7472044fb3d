import jax
import numpy as np
import pytest

from weft.errors import RoleError
from weft.lifting.roles import CARRY, DIFF, FORK, Roles, broadcast_roles, carrier_roles, is_role


def is_leaf(x):
    return not isinstance(x, (dict, list, tuple))


def test_roles_read_as_they_are_written():
    assert repr([CARRY, DIFF, FORK]) == "[CARRY, DIFF, FORK]"
    roles = Roles((("params", 0), (True, None)))
    assert roles.filters == ("params", True)
    assert roles.roles == (0, None)
    assert hash(roles) == hash(Roles((("params", 0), (True, None))))


def test_bare_role_applies_to_all():
    assert carrier_roles(2) == Roles(((True, 2),))
    assert carrier_roles(Roles((("a", 0),))) == Roles((("a", 0),))


def test_prefix_is_broadcast_to_leaves():
    tree = ({"a": 1, "b": [2, 3]}, 4, 5)
    prefix = ({"a": None, "b": 0}, CARRY, Roles(((True, 1),)))
    assert broadcast_roles(prefix, tree, is_leaf, "in_axes") == [
        None,
        0,
        0,
        CARRY,
        Roles(((True, 1),)),
    ]
    assert broadcast_roles(0, tree, is_leaf, "in_axes") == [0] * 5


def test_mismatched_prefix_is_named():
    with pytest.raises(RoleError, match=r"in_axes=\(0, 1\) has 2 entries, and the call"):
        broadcast_roles((0, 1), (1, 2, 3), is_leaf, "in_axes")


def test_leaves_of_a_prefix():
    leaves = jax.tree.leaves((None, 0, FORK, Roles((("a", 0),))), is_leaf=is_role)
    assert leaves == [None, 0, FORK, Roles((("a", 0),))]


@pytest.mark.parametrize(
    ("prefix", "tree", "words"),
    [
        ((0, 0), (1,), "in_axes=(0, 0) has 2 entries, and the call has 1 argument by position"),
        (
            (0, {"a": 0}),
            (1, {"b": 1}),
            "has a dict of 1 entry (['a']) at in_axes[1], where args[1] is a dict of 1 entry",
        ),
        ((0, [0, 0]), (1, np.ones(1)), "a list of 2 entries at in_axes[1], where args[1] is one"),
        (
            (Roles(((True, 0),)), (0, 0)),
            (1, (1,)),
            "in_axes has a tuple of 2 entries, where what it speaks of is a tuple of 1 entry",
        ),
    ],
)
def test_mismatched_prefix_shows_first_difference(prefix, tree, words):
    with pytest.raises(RoleError) as error:
        broadcast_roles(prefix, tree, lambda x: False, "in_axes")
    assert words in str(error.value) and "PyTreeDef" not in str(error.value)
    assert str(error.value).endswith("Give one entry for all, or one for each.")
