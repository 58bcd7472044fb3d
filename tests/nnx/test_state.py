import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import StateFilterError, StatePathError


def example():
    return nnx.State({"a": {"b": nnx.Param(1)}, "c": nnx.Cache(2)})


def test_state_is_a_nested_mapping():
    state = example()
    state["d"] = {"e": 3}
    state.f = 4
    assert list(state) == ["a", "c", "d", "f"] and len(state) == 4 and "a" in state
    assert state.a.b is state["a"]["b"] and isinstance(state.d, nnx.State) and state.d.e == 3
    state["a"]["b"] = 5
    del state["c"], state.f
    assert state.raw_mapping == {"a": {"b": 5}, "d": {"e": 3}}
    assert state == nnx.State({"d": {"e": 3}, "a": {"b": 5}}) and state.get("x", 1) == 1
    with pytest.raises(StatePathError, match="the state has no 'q'; its keys: 'a', 'd'"):
        state["q"]
    with pytest.raises(AttributeError, match="the state has no 'q'"):
        state.q  # noqa: B018
    assert nnx.map_state(lambda path, x: path, state).a.b == ("a", "b")


def test_list_with_attribute_has_a_pytree_state():
    """Its keys are integers and a string, also where it is nested."""
    model = nnx.Dict(layers=nnx.List([nnx.Param(jnp.float32(3))]))
    model.layers.scale = nnx.Param(jnp.float32(2))
    state = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state))(nnx.state(model))
    assert nnx.to_pure_dict(state) == {"layers": {0: 4, "scale": 3}}
    assert type(state.raw_mapping["layers"]) is dict
    grads = nnx.grad(lambda m: m.layers[0][...] * m.layers.scale[...])(model)
    assert jax.tree.leaves(grads) == [2, 3]
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(grads)]
    assert paths == ["['layers'][0].value", "['layers']['scale'].value"]


def test_parts_and_the_whole():
    state = example()
    params, rest = nnx.split_state(state, nnx.Param, ...)
    assert list(params) == ["a"] and list(rest) == ["c"]
    assert nnx.merge_state(params, rest).a.b is state.a.b
    assert (params | rest).c is state.c
    assert nnx.filter_state(state, nnx.Cache, nnx.Param)[1].a.b is state.a.b
    assert nnx.filter_state(state, nnx.Cache).c is state.c
    with pytest.raises(StateFilterError, match=r"no filter matches 'c', a Cache; .* add `...`"):
        nnx.split_state(state, nnx.Param)
    for operation in (lambda: state | 1, lambda: state - 1):
        with pytest.raises(TypeError, match="unsupported operand"):
            operation()


@pytest.mark.parametrize("keys", [("b", "a"), (10, 9), ("b", 1, "a"), (True, 1.5), ((1,), (0,))])
def test_pytree_with_any_keys(keys):
    """JAX takes dicts apart by itself where it sorts their keys as a state does."""

    def nested(depth):
        return {k: nested(depth - 1) for k in keys} if depth else jnp.ones(2)

    state = nnx.State({"x": nested(1), "y": {"z": nested(2)}})
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    order = [tuple(key.key for key in path) for path in paths]
    assert order == [path for path, _ in nnx.to_flat_state(state)]
    leaves, tree = jax.tree.flatten(state)
    raw = tree.unflatten(range(len(leaves))).raw_mapping
    assert type(raw["y"]["z"]) is dict and type(raw["y"]["z"][keys[0]]) is dict
    assert jax.tree.structure(nnx.State(raw)) == tree
    is_sorted_by_jax = len(set(map(type, keys))) == 1 and type(keys[0]) in (str, int)
    assert (str(tree).count("State") == 1) == is_sorted_by_jax
    # A prefix of a state has its nodes, whether or not it reaches as deep.
    prefix = nnx.State({"x": 0, "y": {"z": 1}})
    axes = jax.tree.map(lambda axis, below: len(jax.tree.leaves(below)), prefix, state)
    assert axes.raw_mapping == {"x": len(keys), "y": {"z": len(keys) ** 2}}


def test_flat_and_back():
    state = example()
    flat = nnx.to_flat_state(state)
    assert flat.paths == (("a", "b"), ("c",)) and flat.leaves == [state.a.b, state.c]
    assert flat.to_nested_state().a.b is state.a.b
    assert nnx.from_flat_state({("a", "b"): 1}) == nnx.State({"a": {"b": 1}})
    assert nnx.FlatState.from_sorted_keys_values([("a",)], [1]) == [(("a",), 1)]
    merged = nnx.FlatState.merge(flat, nnx.FlatState([(("c",), 5)]))
    assert dict(merged)[("c",)] == 5
    assert [list(g) for g in flat.split(nnx.Cache, ...)] == [[flat[1]], [flat[0]]]
    assert list(flat.filter(nnx.Cache)) == [flat[1]]
    assert repr(nnx.FlatState([])) == "FlatState([])"
    assert repr(nnx.FlatState([(("a",), 1)])) == "FlatState([\n  (('a',), 1),\n])"
    with pytest.raises(StatePathError, match="'a/b' leads through 'a', which is a value"):
        nnx.merge_state(nnx.State({"a": 1}), nnx.State({"a": {"b": 2}}))


def test_pure_dicts():
    state = example()
    assert nnx.to_pure_dict(state) == {"a": {"b": 1}, "c": 2}
    assert nnx.to_pure_dict(state, lambda x: type(x).__name__) == {
        "a": {"b": "Param"},
        "c": "Cache",
    }
    nnx.replace_by_pure_dict(state, {"a": {"b": 7}})
    assert state.a.b[...] == 7 and isinstance(state.a.b, nnx.Param)
    nnx.replace_by_pure_dict(state, {"c": 3}, lambda old, new: old[...] + new)
    assert state.c == 5
    with pytest.raises(StatePathError, match="the state has nothing at 'x/y', which the dict has"):
        nnx.replace_by_pure_dict(state, {"x": {"y": 1}})
