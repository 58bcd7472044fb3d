"""The same programs on the FrozenDicts of weft.core and flax.core."""

import pickle

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core import frozen_dict as weft_frozen

flax_frozen = pytest.importorskip("flax.core.frozen_dict")

names = st.text("abc", min_size=1, max_size=2)
nested = st.recursive(
    st.one_of(st.integers(-9, 9), st.text("xy")),
    lambda inner: st.dictionaries(names, inner, max_size=3),
)
dicts = st.dictionaries(names, nested, max_size=3)


def seen(lib, xs, ys):
    """Returns a program's view of a FrozenDict."""
    frozen = lib.freeze(xs)
    more, copied = frozen.copy(ys), lib.copy(xs, ys)
    leaves, tree = jax.tree_util.tree_flatten_with_path(frozen)
    popped = [(lib.pop(d, key)) for key in xs for d in (xs, frozen)]
    mapped = jax.tree.map(lambda x: (x, x), frozen)
    return [
        repr(frozen), str(more), frozen.pretty_repr(2), lib.pretty_repr({"f": frozen, **xs}),
        repr(frozen.keys()), repr(frozen.values()), dict(frozen.items()) == xs, len(frozen),
        list(frozen), frozen == lib.freeze(ys), frozen == ys, ys == frozen, more == copied,
        copied, [(rest == {k: v for k, v in xs.items() if k in rest}, x) for rest, x in popped],
        [type(rest).__name__ for rest, _ in popped], leaves, str(tree).replace("weft", "flax"),
        repr(mapped), lib.unfreeze(more), lib.unfreeze({"f": frozen, "g": 1}),
        hash(frozen) == hash(lib.freeze(dict(reversed(xs.items())))),
        pickle.loads(pickle.dumps(frozen)) == frozen, frozen.tree_flatten_with_keys(),
        frozen.get("a"), frozen.get("z", 3), "a" in frozen, isinstance(frozen, dict),
        {**frozen} == xs, dict(frozen) == xs, bool(frozen), lib.unfreeze(3), lib.pretty_repr([1]),
    ]  # fmt: skip


@given(dicts, dicts)
@settings(deadline=None, max_examples=25)
def test_programs_agree(xs, ys):
    assert seen(weft_frozen, xs, ys) == seen(flax_frozen, xs, ys)


@pytest.mark.parametrize("lib", [weft_frozen, flax_frozen])
def test_error_classes_agree(lib):
    frozen = lib.freeze({"a": 1, "l": [1]})
    with pytest.raises(ValueError, match="immutable"):
        frozen["a"] = 2
    for change in (
        lambda: frozen.__delitem__("a"),
        lambda: frozen.update({}),
        lambda: frozen.popitem(),
        lambda: setattr(frozen, "a", 1),
    ):
        with pytest.raises(AttributeError):
            change()
    for key_error in (lambda: frozen["z"], lambda: frozen.pop("z"), lambda: lib.pop({}, "z")):
        with pytest.raises(KeyError, match="'z'"):
            key_error()
    for type_error in (
        lambda: hash(frozen),
        lambda: lib.freeze(1),
        lambda: lib.copy([1]),
        lambda: lib.pop([1], 0),
        lambda: frozen | {},
        lambda: frozen.copy([("a", 1)]),
        lambda: jax.tree.leaves(lib.freeze({"a": 1, 1: 2})),
    ):
        with pytest.raises(TypeError):
            type_error()


@pytest.mark.parametrize("lib", [weft_frozen, flax_frozen])
def test_constructor_like_dict(lib):
    assert lib.FrozenDict([("a", 1)], b={"c": 2}) == lib.FrozenDict(a=1, b={"c": 2})
    assert lib.FrozenDict({"a": {"b": 1}}, __unsafe_skip_copy__=True)["a"]["b"] == 1
    assert lib.FrozenDict.tree_unflatten(("a", "b"), (1, 2)) == {"a": 1, "b": 2}
    assert lib.FrozenKeysView({"a": 1}) & {"a"} == {"a"}
    assert list(lib.FrozenValuesView({"a": 1})) == [1]
