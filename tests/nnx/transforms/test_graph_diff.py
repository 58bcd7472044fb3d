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
    return None if found is None else (found.path, found.texts)


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
