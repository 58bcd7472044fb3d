import copy
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import serialization
from weft.core import frozen_dict
from weft.core.frozen_dict import FrozenDict, freeze, unfreeze
from weft.errors import FrozenDictMutationError, NestedDictError

names = st.text("abc", min_size=1, max_size=2)
nested = st.recursive(st.integers(-9, 9), lambda inner: st.dictionaries(names, inner, max_size=3))
dicts = st.dictionaries(names, nested, max_size=3)


@given(dicts)
@settings(deadline=None, max_examples=25)
def test_equality_hash_and_unfreeze(xs):
    frozen = freeze(xs)
    assert frozen == xs and xs == frozen
    assert unfreeze(frozen) == xs and type(unfreeze(frozen)) is dict
    assert hash(frozen) == hash(freeze(dict(reversed(xs.items()))))
    assert pickle.loads(pickle.dumps(frozen)) == frozen == copy.deepcopy(frozen)
    assert jax.tree.leaves(frozen) == jax.tree.leaves(xs)
    assert jax.tree.map(lambda x: x, frozen) == frozen
    assert serialization.from_bytes(frozen, serialization.to_bytes(frozen)) == frozen


def test_contents_are_copied():
    xs = {"a": {"b": 1}}
    frozen = FrozenDict(xs)
    xs["a"]["b"] = 2
    thawed = frozen.unfreeze()
    thawed["a"]["b"] = 3
    assert frozen["a"]["b"] == 1


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda d: d.__setitem__("a", 2), "setting 'a'"),
        (lambda d: d.__delitem__("a"), "deleting 'a'"),
        (lambda d: d.update(a=2), "`update`"),
        (lambda d: d.setdefault("b", 2), "`setdefault`"),
        (lambda d: d.popitem(), "`popitem`"),
        (lambda d: d.clear(), "`clear`"),
        (lambda d: d["n"].update(x=2), "`update`"),
    ],
)
def test_mutation_error_names_alternatives(change, what):
    frozen = FrozenDict(a=1, n={})
    with pytest.raises(FrozenDictMutationError, match=f"immutable, so {what} does not work; use"):
        change(frozen)
    assert frozen == {"a": 1, "n": {}}


def test_has_no_extra_attributes():
    assert not hasattr(FrozenDict(), "update")
    with pytest.raises(AttributeError, match="no attribute 'fromkey'"):
        _ = FrozenDict().fromkey


def test_nested_views_are_frozen():
    frozen = FrozenDict({"a": {"b": {"c": 1}}})
    for inner in (frozen["a"], frozen.get("a"), *frozen.values(), *dict(frozen.items()).values()):
        assert type(inner) is FrozenDict and type(inner["b"]) is FrozenDict
    assert str(frozen.keys()) == "frozen_dict_keys(['a'])"
    assert str(FrozenDict(a=1).values()) == "frozen_dict_values([1])"


def test_copy_and_pop_keep_the_original():
    for original in (FrozenDict({"a": {"b": 1}, "c": [2]}), {"a": {"b": 1}, "c": [2]}):
        more = frozen_dict.copy(original, {"d": 4})
        less, value = frozen_dict.pop(original, "a")
        assert type(more) is type(less) is type(original)
        assert more == {"a": {"b": 1}, "c": [2], "d": 4}
        assert less == {"c": [2]} and value == {"b": 1}
        assert original == {"a": {"b": 1}, "c": [2]}
    copied = frozen_dict.copy(original)
    copied["c"].append(3)
    assert original["c"] == [2]


@pytest.mark.parametrize("name, args", [("copy", ()), ("pop", ("a",))])
def test_copy_and_pop_need_a_dict(name, args):
    with pytest.raises(NestedDictError, match=f"{name} was given a list; expected a dict or a"):
        getattr(frozen_dict, name)([1], *args)


def test_unfreeze_thaws_nested_frozen_dicts():
    mapped = jax.tree.map(lambda x: FrozenDict(z=x), FrozenDict(a=1))
    assert unfreeze(mapped) == {"a": {"z": 1}}
    assert type(unfreeze(mapped)["a"]) is dict


def test_pytree_paths_match_dict():
    frozen = FrozenDict({"b": jnp.ones(2), "a": {"c": jnp.zeros(())}})
    assert type(jax.jit(lambda x: x)(frozen)) is FrozenDict
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(frozen)]
    assert paths == ["['a']['c']", "['b']"]


def test_hash_is_not_pickled():
    frozen = FrozenDict(a="x")
    assert isinstance(hash(frozen), int)
    read = (
        "import pickle, sys; d = pickle.loads(sys.stdin.buffer.read()); "
        "from weft.core.frozen_dict import FrozenDict; assert hash(d) == hash(FrozenDict(a='x'))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run(
        [sys.executable, "-c", read], input=pickle.dumps(frozen), env=env, check=True, timeout=120
    )
