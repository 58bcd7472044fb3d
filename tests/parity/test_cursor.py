"""Cursors, on Flax and on Weft."""

import dataclasses
import sys
from typing import NamedTuple

import flax.cursor
import flax.linen
import hypothesis
import hypothesis.strategies as st
import pytest

import weft.cursor


class Pair(NamedTuple):
    a: object
    b: object


@dataclasses.dataclass
class Box:
    x: object
    y: object = 2


NESTED = {"list": [1, 2, (3, 4)], "pair": Pair(1, {"z": 9}), "box": Box({3: 5})}


def both(program):
    assert program(flax.cursor.cursor) == program(weft.cursor.cursor)


def test_assignments():
    def program(cursor):
        c = cursor(NESTED)
        numbers = [x + 1 for x in c["list"][2]]
        c["list"][0] += 100
        c["list"][-1][1] *= 3
        c["pair"].b["z"] = 7
        c["pair"][0] = -c["pair"].a
        c["box"].x[3] = "new"
        c["new"] = 0
        sub = c["list"].build()
        return c.build(), sub, numbers, c["box"].y.set(8)

    both(program)


def test_modules_of_dense_layers():
    def program(cursor):
        model = flax.linen.Sequential([flax.linen.Dense(3), flax.linen.Dense(4)])
        is_dense = lambda path, value: isinstance(value, flax.linen.Dense)  # noqa: E731
        wide = lambda path, value: value.clone(features=9) if is_dense(path, value) else value  # noqa: E731
        return (
            cursor(model).layers[0].features.set(5),
            cursor(model).apply_update(wide).build(),
            [c.features + 1 for c in cursor(model).find_all(is_dense)],
            cursor(model).find(lambda path, value: path == "layers/1/features").set(7),
        )

    both(program)


def errors_of(program):
    with pytest.raises(Exception) as theirs:
        program(flax.cursor.cursor)
    with pytest.raises(Exception) as ours:
        program(weft.cursor.cursor)
    return type(theirs.value), type(ours.value)


@pytest.mark.parametrize(
    "program",
    [
        lambda cursor: cursor({"a": 1}).find(lambda path, value: False),
        lambda cursor: cursor({"a": 1}).find(None),
        lambda cursor: list(cursor({"a": 1}).find_all(None)),
        lambda cursor: cursor({"a": 1}).apply_update(None),
    ],
)
def test_named_errors(program):
    theirs, ours = errors_of(program)
    assert theirs.__name__ == ours.__name__


@pytest.mark.parametrize(
    "program",
    [
        lambda cursor: cursor({"a": 1})["b"],
        lambda cursor: cursor([1])[2],
        lambda cursor: cursor(Box(1)).z,
        lambda cursor: cursor(1)[0],
        pytest.param(
            lambda cursor: cursor([1, 2])[0:1],
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="slices have a hash"),
        ),
        lambda cursor: hash(cursor(1)),
    ],
)
def test_other_errors_are_caught_as_the_builtin_ones(program):
    theirs, ours = errors_of(program)
    assert issubclass(ours, theirs)


leaves = st.integers(0, 9)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner, inner),
    ),
    max_leaves=12,
)


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(trees, st.sampled_from("abc01xy"))
def test_random_trees(tree, letter):
    def program(cursor):
        seen = []

        def update(path, value):
            seen.append((path, value))
            return value + 1 if isinstance(value, int) and letter in path else value

        def found(path, value):
            return path.endswith(letter)

        c = cursor(tree)
        new = c.apply_update(update).build()
        return seen, new, [x.build() for x in cursor(tree).find_all(found)]

    both(program)
