"""The same programs on weft.traverse_util and flax.traverse_util."""

import collections
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import traverse_util as weft_traverse
from weft.core.frozen_dict import freeze as weft_freeze

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of its traversals, which Weft keeps
    flax_traverse = pytest.importorskip("flax.traverse_util")
    flax_freeze = pytest.importorskip("flax.core").freeze

pytestmark = pytest.mark.filterwarnings("ignore:.*traverse_util.Traversal:DeprecationWarning")
both = pytest.mark.parametrize(
    "lib, freeze",
    [(weft_traverse, weft_freeze), (flax_traverse, flax_freeze)],
    ids=["weft", "flax"],
)

names = st.text("abc", max_size=2)
nested = st.recursive(
    st.one_of(st.integers(-9, 9), st.none(), st.lists(st.integers(), max_size=2)),
    lambda inner: st.dictionaries(names, inner, max_size=3),
)
dicts = st.dictionaries(names, nested, max_size=3)


def plain(lib, flat):
    return {key: "empty" if x == lib.empty_node else x for key, x in flat.items()}


def seen(lib, freeze, xs, keep, sep, depth):
    def is_leaf(path, x):
        assert isinstance(path, tuple)
        return len(path) == depth

    flat = lib.flatten_dict(xs, keep, is_leaf if depth else None, sep)
    frozen = lib.flatten_dict(freeze(xs), keep_empty_nodes=keep, sep=sep)
    calls = []
    select = lib.ModelParamTraversal(lambda path, x: calls.append(path) or "a" in path)
    return [
        list(plain(lib, flat).items()), plain(lib, frozen), lib.unflatten_dict(flat, sep=sep),
        lib.unflatten_dict(frozen, sep), lib.path_aware_map(lambda path, x: (path, x), xs),
        list(select.iterate(xs)), select.update(lambda x: (x,), xs), calls,
        select.update(lambda x: (x,), freeze(xs)) == select.update(lambda x: (x,), xs),
    ]  # fmt: skip


@given(dicts, st.booleans(), st.sampled_from([None, "/", "::"]), st.sampled_from([0, 1, 2]))
@settings(deadline=None, max_examples=25)
def test_nested_and_flat_dicts_agree(xs, keep, sep, depth):
    seen_by_weft = seen(weft_traverse, weft_freeze, xs, keep, sep, depth)
    assert seen_by_weft == seen(flax_traverse, flax_freeze, xs, keep, sep, depth)


@both
def test_unusual_flat_dicts(lib, freeze):
    assert lib.flatten_dict({"a": {}}, is_leaf=lambda path, x: True) == {(): {"a": {}}}
    assert lib.flatten_dict({"a": 1}, is_leaf=lambda path, x: True, sep="/") == {"": {"a": 1}}
    assert lib.unflatten_dict({"a//b": 1}, sep="/") == {"a": {"": {"b": 1}}}
    assert lib.unflatten_dict({"a": 1}) == {"a": 1}
    assert lib.unflatten_dict({("a",): lib.empty_node, ("a", "b"): 1}) == {"a": {"b": 1}}
    assert lib.flatten_dict({(1, 2): {"b": 1}}) == {((1, 2), "b"): 1}
    assert type(lib.empty_node).__name__ == "_EmptyNode"


@both
def test_invalid_inputs_are_rejected(lib, freeze):
    for call in (
        lambda: lib.flatten_dict([1]),
        lambda: lib.unflatten_dict([1]),
        lambda: lib.path_aware_map(lambda path, x: x, 3),
        lambda: lib.flatten_dict({1: {"a": 1}}, sep="/"),
        lambda: lib.unflatten_dict({("a",): 1, ("a", "b"): 2}),
        lambda: lib.unflatten_dict({1: 1}),
        lambda: lib.ModelParamTraversal(lambda path, x: True).update(str, [1]),
    ):
        with pytest.raises((AssertionError, TypeError, ValueError)):
            call()


Pair = collections.namedtuple("Pair", "x y")

PROGRAMS = [
    (lambda t: t, 1),
    (lambda t: t["a"]["b"], {"a": {"b": 1}, "c": 2}),
    (lambda t: t[0], [1, 2]),
    (lambda t: t[0], (1, 2)),
    (lambda t: t[0], Pair(1, 2)),
    (lambda t: t[-1], [1, 2]),
    (lambda t: t[1:3], (1, 2, 3, 4)),
    (lambda t: t[-1:], Pair(1, 2)),
    (lambda t: t[5:], (1, 2)),
    (lambda t: t.x, Pair(1, 2)),
    (lambda t: t.each(), [1, 2]),
    (lambda t: t.each(), (1, 2)),
    (lambda t: t.each(), {"a": 1, "b": 2}),
    (lambda t: t.each()["a"].each(), [{"a": [1]}, {"a": [2, 3]}]),
    (lambda t: t.tree(), {"a": [1, 2], "b": (3,)}),
    (lambda t: t.each().filter(lambda x: x > 1), [1, 2, 3]),
    (lambda t: t["z"].merge(t["a"], t["b"]), {"z": {"a": 1, "b": 2, "c": 3}}),
    (lambda t: t.merge(t[0], t[0]), [3]),
    (lambda t: t["a"].compose(t["b"]), {"a": {"b": 1}}),
]


@both
@pytest.mark.parametrize("program, value", PROGRAMS)
def test_traversals_agree(lib, freeze, program, value):
    traversal = program(lib.t_identity)
    of_weft = program(weft_traverse.t_identity)
    parts = list(traversal.iterate(value))
    assert parts == list(of_weft.iterate(value))
    assert traversal.update(lambda x: 2 * x + 1, value) == of_weft.update(
        lambda x: 2 * x + 1, value
    )
    assert traversal.set([7] * len(parts), value) == of_weft.set([7] * len(parts), value)


@both
def test_traversal_errors_agree(lib, freeze):
    each = lib.t_identity.each()
    for call in (
        lambda: each.update(str, 3),
        lambda: each.update(str, "ab"),
        lambda: each.set([1], [1, 2]),
        lambda: each.set([1, 2, 3], [1, 2]),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(KeyError):
        lib.t_identity["a"].update(str, {})
    with pytest.raises(AttributeError):
        lib.t_identity.a.update(str, Pair(1, 2))
    with pytest.raises(TypeError):
        lib.Traversal()
    for name in ("TraverseId", "TraverseEach", "TraverseTree"):
        assert isinstance(getattr(lib, name)(), lib.Traversal)
