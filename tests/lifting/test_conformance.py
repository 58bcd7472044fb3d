"""Every kind of this repository whose carriers are made of arrays, under every transformation."""

import pytest

from tests.lifting.conformance import AROUND, CHECKS, Carriers, check_compiled_once
from tests.lifting.counting import BOXES, Box
from weft.core.scope import Scope
from weft.core.scope_kind import ScopeKind, Select

KINDS = {
    "boxes": Carriers(
        BOXES,
        make=lambda arrays: Box(**arrays),
        read=lambda box, name: box.arrays[name],
        write=Box.write,
    ),
    "scopes": Carriers(
        ScopeKind("test"),
        make=lambda arrays: Scope({name: {"x": x} for name, x in arrays.items()}, mutable=True),
        read=lambda scope, name: scope.get_variable(name, "x"),
        write=lambda scope, name, x: scope.put_variable(name, "x", x),
        where=Select,
    ),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind, name, check):
    check(KINDS[kind], name)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_carriers_share_a_compiled_function(kind):
    check_compiled_once(KINDS[kind])
