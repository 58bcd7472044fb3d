from weft.core import DenyList, broadcast
from weft.core.lift.common import roles_of, shared, without_broadcast
from weft.core.scope_kind import Select
from weft.lifting import CARRY, FORK, Roles


def test_filters_and_axes_become_roles():
    roles = roles_of({"params": 0, DenyList("params"): None}, {"noise": True, "other": False})
    assert roles.roles == (0, None, FORK, None)
    assert roles.filters[0] == Select("params")
    assert roles.filters[2] == Select(rngs="noise")
    first = roles_of({}, {}, ("state", CARRY))
    assert first == Roles(((Select("state"), CARRY),))
    assert shared(True, "noise").roles == (None,)


def test_broadcast_is_no_axis():
    assert without_broadcast((0, broadcast, {"a": broadcast})) == (0, None, {"a": None})
    assert repr(broadcast) == "broadcast"
