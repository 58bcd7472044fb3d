import copy
import os
import pickle
import subprocess
import sys

import jax
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


@pytest.mark.parametrize("name, args", [("copy", ()), ("pop", ("a",))])
def test_copy_and_pop_need_a_dict(name, args):
    with pytest.raises(NestedDictError, match=f"{name} was given a list; expected a dict or a"):
        getattr(frozen_dict, name)([1], *args)


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
