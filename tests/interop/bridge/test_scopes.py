import jax
import pytest

from weft import nnx
from weft.interop.bridge.modules import Module
from weft.interop.bridge.scopes import (
    AttrPriority,
    Scope,
    current_context,
    current_module,
    running,
)


def test_scopes_share_their_streams():
    scope = Scope(nnx.Rngs(0), ["params"], initializing=True)
    scope.given["w"] = 1
    copy = scope.copy()
    assert copy is not scope
    assert copy.rngs is scope.rngs
    assert (copy.mutable, copy.initializing, dict(copy.given)) == (("params",), True, {})
    assert len(jax.tree.leaves(scope)) == 2
    assert Scope(nnx.Rngs(0)).mutable is False


def test_priorities():
    assert sorted(AttrPriority) == [0, 20, 50, 100]


def test_what_runs():
    assert current_context() is current_module() is None
    module = Module()
    with running(module, in_compact=True) as entry:
        assert current_context() is entry
        assert current_module() is module
        assert entry.type_counter[int] == 0
        with running(Module()):
            assert not current_context().in_compact
    with pytest.raises(RuntimeError, match="stop"), running(module):
        raise RuntimeError("stop")
    assert current_context() is None
