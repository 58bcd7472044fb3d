import jax
import pytest

from weft.errors import RoleError
from weft.lifting.roles import CARRY, DIFF, FORK, Roles, broadcast_roles, is_role, roles_of_carrier


def is_leaf(x):
    return not isinstance(x, (dict, list, tuple))


def test_roles_read_as_they_are_written():
    assert repr([CARRY, DIFF, FORK]) == "[CARRY, DIFF, FORK]"
    roles = Roles((("params", 0), (True, None)))
    assert roles.filters == ("params", True)
    assert roles.roles == (0, None)
    assert hash(roles) == hash(Roles((("params", 0), (True, None))))


def test_a_bare_role_goes_to_everything():
    assert roles_of_carrier(2) == Roles(((True, 2),))
    assert roles_of_carrier(Roles((("a", 0),))) == Roles((("a", 0),))


def test_a_prefix_is_spread_over_the_leaves():
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


def test_a_prefix_that_does_not_fit_is_refused_by_name():
    with pytest.raises(RoleError, match=r"in_axes=\(0, 1\) does not fit"):
        broadcast_roles((0, 1), (1, 2, 3), is_leaf, "in_axes")


def test_the_leaves_of_a_prefix():
    leaves = jax.tree.leaves((None, 0, FORK, Roles((("a", 0),))), is_leaf=is_role)
    assert leaves == [None, 0, FORK, Roles((("a", 0),))]
