import jax.numpy as jnp
import pytest

from weft import nnx
from weft.nnx.graph import flatten_graph
from weft.nnx.transforms.graph_diff import differences


def model(**attributes):
    return nnx.Dict(a=nnx.Param(1.0), k=nnx.static("k"), **attributes)


def between(x, y, origins=None):
    graphs = tuple(flatten_graph(m, with_metadata=False) for m in (x, y))
    if origins is None:
        origins = tuple(range(len(flat.objects)) for flat in graphs)
    found = next(differences(tuple(flat.graphdef.root for flat in graphs), origins), None)
    return None if found is None else (found.path, found.seen)


def test_equal_graphs_have_no_difference():
    assert between(model(), model()) is None
    assert between([model(), jnp.ones(2)], [model(), jnp.zeros(3)]) is None


CASES = {
    "made": (lambda: model(z=nnx.Param(1.0)), (("z",), ("absent", "present"))),
    "static": (lambda: nnx.Dict(a=nnx.Param(1.0), k="j"), (("k",), ("'k'", "'j'"))),
    "class": (
        lambda: nnx.Dict(a=nnx.BatchStat(1.0), k="k"),
        (("a",), ("Param", "BatchStat")),
    ),
    "array": (lambda: nnx.Dict(a=jnp.ones(1), k="k"), (("a",), ("Param", "an array"))),
}


@pytest.mark.parametrize("name", CASES)
def test_first_difference_is_found(name):
    make, expected = CASES[name]
    assert between(model(), make()) == expected
    assert between(make(), model()) == (expected[0], expected[1][::-1])


def test_new_attribute_is_reported_before_shifted_indices():
    assert between(nnx.Dict(w=nnx.Param(1.0)), nnx.Dict(a=nnx.Param(1.0), w=nnx.Param(1.0))) == (
        ("a",), ("absent", "present"),
    )  # fmt: skip


def test_identity_differences():
    graphs = model(), model()
    assert between(*graphs, ((0, 1), (1, 0))) == ((), ("one object", "a different one"))
    old = "an existing object"
    assert between(*graphs, ((0, None), (0, 1))) == (("a",), ("a new object", old))
    assert between(*graphs, ((0, 1), (0, None))) == (("a",), (old, "a new object"))


def test_marks_and_the_order_of_keys_may_differ():
    a, b = nnx.Dict(n=1), nnx.Dict(n=nnx.static(1))
    assert between(a, b) == ((), ("marked one way", "marked another way"))
    a, b = nnx.Dict(n=1, m=2), nnx.Dict(m=2, n=1)
    assert between(a, b) == ((), ("in one order", "in another order"))
