import pickle

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError, ObjectArgumentError, StateFilterError
from weft.nnx.graph_state import GraphState
from weft.nnx.splitting import unpack


def model():
    return nnx.Dict(w=nnx.Param(jnp.ones(2)), n=nnx.BatchStat(jnp.zeros(())))


def test_it_is_a_state_that_is_merged_without_a_description():
    node = model()
    whole = unpack(node)
    assert isinstance(whole, nnx.State) and whole.w is node.w and list(whole) == ["n", "w"]
    assert nnx.merge(whole).w is node.w and nnx.merge(whole, copy=True).w is not node.w
    params, rest = unpack(node, nnx.Param, ...)
    assert nnx.merge(params, rest).n is node.n
    assert nnx.merge(rest, nnx.state(node, nnx.Param)).w is node.w
    nnx.update(node, jax.tree.map(lambda x: x + 1, whole))
    assert node.w[...].tolist() == [2, 2]


def test_jax_knows_it():
    whole = unpack(model())
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(whole)]
    assert paths == ["['n'].value", "['w'].value"]
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s))
    assert nnx.merge(step(whole)).w[...].tolist() == [2, 2]
    assert nnx.merge(pickle.loads(pickle.dumps(whole))).w[...].tolist() == [1, 1]
    assert type(whole.map(lambda _, x: x)) is nnx.State and "GraphState({" in repr(whole)


def test_what_is_no_state_and_no_description():
    with pytest.raises(ObjectArgumentError, match="GraphState was given a int and a State"):
        GraphState(1, nnx.State({}))
    with pytest.raises(ObjectArgumentError, match="merge was given a int first"):
        nnx.merge(3)
    with pytest.raises(GraphStructureError, match="has no value for n"):
        nnx.merge(unpack(model(), nnx.Param, ...)[0])
    with pytest.raises(StateFilterError, match="no filter matches 'n'"):
        unpack(model(), nnx.Param)
