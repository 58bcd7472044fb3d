import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import nnx
from weft.errors import (
    GraphStructureError,
    ObjectArgumentError,
    SharedObjectError,
    StateFilterError,
    VariableArgumentError,
)
from weft.nnx.split_merge import GraphState, unpack, with_vars


class Node(nnx.Module):
    """Anything, with a name and a variable."""


def model():
    node = Node()
    node.w, node.stat = nnx.Param(jnp.ones(2), tag="a"), nnx.BatchStat(3.0)
    node.x, node.n = jnp.zeros(1), 5
    return node


def test_mismatched_parts():
    graphdef, params, rest = nnx.split(model(), nnx.Param, ...)
    with pytest.raises(
        GraphStructureError, match="has no value for stat, x, which the description"
    ):
        nnx.merge(graphdef, params)
    with pytest.raises(
        GraphStructureError, match="has values for q, which the description has not"
    ):
        nnx.merge(graphdef, params, rest, {"q": 1})
    with pytest.raises(StateFilterError, match=r"'stat' and 1 more, .* are Param; add"):
        nnx.split(model(), nnx.Param)


def test_call_keeps_the_parts():
    class Counter(nnx.Module):
        def __init__(self):
            self.n, self.subs = nnx.Variable(jnp.array(0)), [Node()]

        def __call__(self, by):
            self.n[...] = self.n + by
            self.subs.append(Node())
            return len(self.subs)

    graphdef, state = nnx.split({"c": [Counter()]})
    out, (after, new) = nnx.call((graphdef, state))["c"][0](2)
    assert out == 2 and new["c"][0].n[...] == 2 and after != graphdef
    assert state["c"][0].n[...] == 0 and len(nnx.merge(graphdef, state)["c"][0].subs) == 1
    out, _ = nnx.call(nnx.split(model())).w.sum()
    assert out == 2


# Random graphs.

KINDS = (Node, nnx.List, nnx.Dict, nnx.Param, nnx.BatchStat, "array", "number", "tuple")


@st.composite
def graphs(draw):
    """Returns a graph of objects, whose edges go anywhere: it shares, and has cycles."""
    kinds = [Node, *draw(st.lists(st.sampled_from(KINDS), max_size=7))]
    made = [
        {"array": jnp.full(1, i), "number": i, "tuple": ()}.get(kind)  # pyright: ignore[reportCallIssue, reportArgumentType]
        if isinstance(kind, str)
        else kind(jnp.array(i), tag=str(i))
        if issubclass(kind, nnx.Variable)
        else kind()
        for i, kind in enumerate(kinds)
    ]
    made = [(made[0], made[-1], [made[-1]]) if type(x) is tuple else x for x in made]
    edges = st.tuples(st.integers(0, len(made) - 1), st.integers(0, len(made) - 1))
    for i, (a, b) in enumerate(draw(st.lists(edges, max_size=12))):
        owner, value = made[a], made[b]
        if isinstance(owner, list):
            owner.append(value)
        elif isinstance(owner, nnx.Pytree):
            setattr(owner, f"x{i}", value)
    made[0].last = made[-1]
    return made[0]


def described(root):
    """Returns a graph in words: every edge with the number of the object it leads to."""
    numbers, words = {}, []

    def walk(x):
        if isinstance(x, nnx.Pytree | nnx.Variable):
            if id(x) in numbers:
                return numbers[id(x)]
            numbers[id(x)] = len(numbers)
        if isinstance(x, nnx.Variable):
            words.append((type(x).__name__, x[...].tolist(), x.get_metadata()))
        elif isinstance(x, nnx.Pytree):
            words.append((type(x).__name__, [(str(k), walk(v)) for k, v in x._items()]))
        elif isinstance(x, tuple):
            return [walk(v) for v in x]
        else:
            return x.tolist() if hasattr(x, "tolist") else x
        return numbers[id(x)]

    return walk(root), words


@settings(deadline=None, max_examples=25)
@given(graphs())
def test_random_graphs_round_trip(root):
    words = described(root)
    graphdef, state = nnx.split(root)
    assert described(nnx.merge(graphdef, state)) == words == described(nnx.clone(root))
    parts = nnx.split(root, nnx.Param, nnx.BatchStat, ...)
    assert parts[0] == graphdef == nnx.graphdef(nnx.clone(root))
    assert described(nnx.merge(parts[0], *reversed(parts[1:]), copy=True)) == words
    assert described(nnx.unflatten(*nnx.flatten(root))) == words
    assert described(nnx.recursive_map(lambda path, x: x, root)) == words
    shared = nnx.clone(root, variables=False)
    assert [v for _, v in nnx.flatten(shared)[1] if isinstance(v, nnx.Variable)] == [
        v for _, v in nnx.flatten(root)[1] if isinstance(v, nnx.Variable)
    ]
    assert described(root) == words


@settings(deadline=None, max_examples=25)
@given(graphs())
def test_random_graphs_take_values_from_states(root):
    other = nnx.map(lambda path, x: x + 1 if not isinstance(x, nnx.Variable) else x[...] + 1, root)
    other_words = described(other)
    assert nnx.graphdef(other) == nnx.graphdef(root)
    parts = nnx.to_flat_state(nnx.state(other)).split(nnx.Param, ...)
    nnx.update(root, *(part.to_nested_state() for part in parts))
    assert described(root) == other_words
    nnx.update(root, nnx.to_pure_dict(nnx.state(nnx.clone(other))))
    assert described(root) == other_words


def small_model():
    return nnx.Dict(w=nnx.Param(jnp.ones(2)), n=nnx.BatchStat(jnp.zeros(())))


def test_graph_state_merges_without_a_graphdef():
    node = small_model()
    whole = unpack(node)
    assert isinstance(whole, nnx.State) and whole.w is node.w and list(whole) == ["n", "w"]
    assert nnx.merge(whole).w is node.w and nnx.merge(whole, copy=True).w is not node.w
    params, rest = unpack(node, nnx.Param, ...)
    assert nnx.merge(params, rest).n is node.n
    assert nnx.merge(rest, nnx.state(node, nnx.Param)).w is node.w
    nnx.update(node, jax.tree.map(lambda x: x + 1, whole))
    assert node.w[...].tolist() == [2, 2]


def test_invalid_state_or_graphdef():
    with pytest.raises(ObjectArgumentError, match="GraphState was given a int and a State"):
        GraphState(1, nnx.State({}))
    with pytest.raises(ObjectArgumentError, match="merge was given a int first"):
        nnx.merge(3)
    with pytest.raises(GraphStructureError, match="has no value for n"):
        nnx.merge(unpack(small_model(), nnx.Param, ...)[0])
    with pytest.raises(StateFilterError, match="no filter matches 'n'"):
        unpack(small_model(), nnx.Param)


class Holder(nnx.Module):
    """Variables, one of them shared, and a plain value."""

    def __init__(self):
        self.w, self.n = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(()))
        self.name = "node"


def is_held(variable):
    return isinstance(variable.get_raw_value(), jax.Ref)


@pytest.mark.parametrize("name", ["ref", "hijax"])
def test_values_in_references_and_back(name):
    node = Holder()
    held = with_vars(node, **{name: True})
    assert held is not node and is_held(held.w) and is_held(held.n) and not is_held(node.w)
    assert held.name == "node" and held.w.get_metadata(name) is True

    @jax.jit
    def step(node):
        node.w[...] += 1

    step(held)
    step(held)
    back = with_vars(held, **{name: False})
    assert (
        back.w[...].tolist() == [3, 3]
        and not is_held(back.w)
        and back.w.get_metadata(exclude_required=True) == {}
    )
    assert node.w[...].tolist() == [1, 1]


def test_duplicate_variables():
    node = Holder()
    node.again = node.w
    with pytest.raises(GraphStructureError, match="the variable at 'again' is also at 'w'"):
        with_vars(node, ref=True)
    held = with_vars(node, ref=True, allow_duplicates=True)
    assert held.w is held.again and is_held(held.w)
    assert is_held(with_vars(node, ref=True, only=nnx.BatchStat).n)
    assert with_vars(node).again is node.w


def test_invalid_reference_values():
    with pytest.raises(VariableArgumentError, match="Cache with ref=True was given a str"):
        with_vars([nnx.Cache((1, "b"))], ref=True)


def test_trees_name_both_places_of_a_shared_variable():
    w = nnx.Param(1.0)
    with pytest.raises(SharedObjectError, match=r"same Param is at 'a' and at 'b\.w'; .*clone"):
        nnx.split(nnx.Dict(a=w, b=nnx.Dict(w=w)), graph=False)
    cyclic = nnx.Dict(w=nnx.Param(1.0))
    cyclic.again = cyclic
    with pytest.raises(SharedObjectError, match="the same Dict is at the top and at 'again'"):
        list(nnx.iter_graph(cyclic, graph=False))

    class NoTree(nnx.Module, pytree=False):
        pass

    with pytest.raises(GraphStructureError, match="NoTree at 'x' is of a class with pytree=False"):
        nnx.state(nnx.Dict(x=NoTree()), graph=False)


def test_states_of_a_merge_are_disjoint():
    graphdef, state = nnx.split(nnx.Dict(a=nnx.Dict(w=nnx.Param(1.0)), n=nnx.Cache(2)))
    with pytest.raises(GraphStructureError, match=r"2 values at 'a/w', in several states"):
        nnx.merge(graphdef, state, nnx.State({"a": {"w": nnx.Param(3.0)}}))
    joined = nnx.merge_state(state, nnx.State({"a": {"w": nnx.Param(3.0)}}))
    assert nnx.merge(graphdef, joined).a.w.get_value() == 3
