import pytest

from tests.linen.modules import Affine
from weft.errors import CallShareScopeOnUnboundModuleError, ParameterGivenTwiceError
from weft.linen.apply import merge_param, share_scope


def test_scope_of_two_unbound_modules():
    with pytest.raises(CallShareScopeOnUnboundModuleError, match=r"`share_scope` .*Affine is not"):
        share_scope(Affine().bind({}), Affine())


def test_merge_param():
    assert merge_param("x", False, None) is False
    assert merge_param("x", None, 0) == 0
    with pytest.raises(ParameterGivenTwiceError, match="'x' was given twice, as 1 and as 2; pass"):
        merge_param("x", 1, 2)
    with pytest.raises(ParameterGivenTwiceError, match="'x' was given not at all; pass it once"):
        merge_param("x", None, None)
