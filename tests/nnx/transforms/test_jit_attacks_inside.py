"""Whatever a jitted function changes, it sees itself, and it is seen outside."""

import pytest

from tests.nnx.transforms.changes import ARRAYS, CHANGES, Model, WithArrays
from tests.nnx.transforms.looks import look, same
from weft import nnx


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_inside_of_the_function(change):
    check(change, Model())


IN_CONTAINERS = [
    "another array",
    "an array of another shape",
    "a list in a named tuple",
    "a variable in a named tuple",
    "another named tuple",
    "an array in a struct",
    "a static field of a struct",
    "an ordered dict",
    "an item of an ordered dict",
    "a static list for data",
]


@pytest.mark.parametrize("name", IN_CONTAINERS)
def test_changes_of_arrays_and_containers_inside(name):
    check(ARRAYS[name], WithArrays())


def check(change, model):
    def f(m):
        before = look(m)
        change(m)
        return before, look(m)

    jitted = nnx.jit(f)
    for _ in range(2):
        plain = nnx.clone(model)
        try:
            expected = f(plain)
        except Exception as error:
            with pytest.raises(type(error)):
                jitted(model)
        else:
            same(jitted(model), expected)
        same(look(model), look(plain))
