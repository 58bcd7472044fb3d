import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError, InconsistentAliasError
from weft.nnx.contexts import update_context
from weft.nnx.node_states import NodeStates, from_tree, to_tree
from weft.nnx.transforms.symbols import StateAxes


def model():
    layer = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    return nnx.Dict(a=layer, b=layer, stat=nnx.BatchStat(jnp.zeros(())))


def test_objects_become_states_and_objects_again():
    m = model()
    tree = to_tree((m, m, {"q": m.a, "x": jnp.ones(1)}, 3))
    assert [isinstance(x, NodeStates) for x in (*tree[:2], tree[2]["q"])] == [True] * 3
    assert len(tree[1].state) == len(tree[2]["q"].state) == 0
    first, second, rest, n = from_tree(tree)
    assert first is second and rest["q"] is first.a is first.b and n == 3
    assert first.a.w is not m.a.w

    @jax.jit
    def step(tree):
        m, *_ = from_tree(tree)
        m.a.w[...] += 1
        return to_tree((m, {"a": m.a}))

    new, found = from_tree(step(tree))
    assert new.a is found["a"] and new.a.w[0] == 2 and m.a.w[0] == 1
    assert from_tree(to_tree(m.a.w)).shape == (2,) and from_tree(3) == 3


def split_in_two(ctx, path, prefix, x):
    return NodeStates.from_split(*ctx.split(x, nnx.Param, ...), metadata=prefix)


def test_ways_to_split_and_merge():
    m = model()
    tree = to_tree((m, 3), prefix=("p", None), split_fn=split_in_two)
    assert tree[0].metadata == "p" and len(tree[0].states) == 2
    assert from_tree(tree)[0].b.w[...].tolist() == [1, 1]

    def seen(ctx, path, prefix, x):
        return jax.tree_util.keystr(path), prefix, type(x).__name__

    assert to_tree((m, [3]), prefix=5, split_fn=seen) == (("[0]", 5, "Dict"), [3])
    every = to_tree((m, [3]), prefix=(5, None), split_fn=seen, map_non_graph_nodes=True)
    assert every == (("[0]", 5, "Dict"), [("[1][0]", None, "int")])
    assert from_tree(tree, prefix=(0, 1), merge_fn=seen) == (("[0]", 0, "NodeStates"), 3)
    every = from_tree(tree, prefix=2, merge_fn=seen, map_non_graph_nodes=True)
    assert every[1] == ("[1]", 2, "int")


def test_through_an_update_context():
    m = model()
    with update_context("t"):
        tree = to_tree((m, m.a), ctxtag="t")

        @jax.jit
        def f(tree):
            m, layer = from_tree(tree, ctxtag="t", is_inner=True)
            layer.w[...] += 1
            return to_tree({"m": m}, ctxtag="t")

        assert from_tree(f(tree), ctxtag="t", is_inner=False)["m"] is m
    assert m.b.w[0] == 2


def test_different_things_said_of_one_variable():
    m = model()
    with pytest.raises(InconsistentAliasError, match="one Param is at '0/a/w', with 0"):
        to_tree((m, m.a), prefix=(0, 1))
    with pytest.raises(InconsistentAliasError, match="at '1/a/w', with 1"):
        to_tree((m, m), prefix=tuple(StateAxes({nnx.Param: i, ...: 0}) for i in (0, 1)))
    to_tree((m, m), prefix=(StateAxes({nnx.Param: 0, ...: 1}),) * 2)
    assert len(to_tree((m, m), prefix=(0, 1), check_aliasing=False)) == 2
    with pytest.raises(ValueError, match="different lengths of tuple"):
        to_tree((m, 3), prefix=(0,))


def test_states_without_a_description_and_several():
    state = nnx.State({"w": jnp.ones((3, 2))})
    both = NodeStates.from_states(state, state)
    with pytest.raises(GraphStructureError, match="have no description"):
        both.graphdef  # noqa: B018
    with pytest.raises(GraphStructureError, match="have 2 states"):
        both.state  # noqa: B018
    one = both.replace(states=(state,))
    assert one.state is state and jax.tree.leaves(NodeStates.from_prefixes([0, 1])) == [0, 1]
    axes = NodeStates.from_prefixes([1])
    assert jax.vmap(lambda s: s.state.w.sum(), in_axes=(axes,))(one).tolist() == [3, 3]
    paths = jax.tree_util.tree_leaves_with_path(one)
    assert jax.tree_util.keystr(paths[0][0]) == ".states[0]['w']"
