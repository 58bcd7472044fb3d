import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError, ModuleAttributeNotFoundError
from weft.nnx.summary import tabulate
from weft.nnx.transforms.jit import jit

CONSOLE = {"width": 200, "force_terminal": False}
TRACES = []


class Layer(nnx.Module):
    """Layer with a parameter, a plain number and a stream."""

    def __init__(self, n, rngs):
        self.w = nnx.Param(jnp.ones((n, n)), out_sharding=("data", None), eager_sharding=False)
        self.mean, self.rngs = nnx.BatchStat({"value": jnp.zeros(n)}), rngs

    def __call__(self, x, flag=False):
        TRACES.append(isinstance(x, jax.core.Tracer))
        self.rngs.dropout()
        self.mean[...] = {"value": x.mean(0)}
        return self.product(x)

    def product(self, x):
        return x @ self.w

    def enc(self, x, *, flag=True):
        return {"x": x, "flag": flag}


class Model(nnx.Module):
    """A shared layer, one that is in a dict, and one that is not called."""

    def __init__(self):
        self.a = Layer(2, nnx.Rngs(dropout=0))
        self.others = {"b": Layer(2, nnx.Rngs(0)), "unused": self.a}

    def __call__(self, x):
        return self.others["b"](self.a.enc(self.a(self.a(x)))["x"]), None

    @jit
    def compiled(self, x):
        return self.a(x)


def rows(table):
    """Returns the cells of a table's rows, one list of lines for each cell."""
    found, cells = [], None
    for line in table.splitlines():
        if line[:1] in "┡├└":
            found, cells = [*found, cells], None
        elif line[:1] in "┃│" and line:
            parts = [part.strip() for part in line.strip("┃│").split("┃" if "┃" in line else "│")]
            cells = [[] for _ in parts] if cells is None else cells
            for cell, part in zip(cells, parts, strict=True):
                cell.extend([part] if part else [])
    return [[" ".join(cell) for cell in row] for row in found if row is not None]


def test_calls_and_variables():
    model = Model()
    header, root, a, enc, b, total = rows(tabulate(model, jnp.ones((4, 2)), console_kwargs=CONSOLE))
    assert header == ["path", "type", "inputs", "outputs", "BatchStat", "Param", "RngState"]
    assert root[:4] == ["", "Model", "float32[4,2]", "- float32[4,2] - None"]
    assert root[4:] == ["4 (16 B)", "8 (32 B)", "4 (24 B)"] == total[4:] and total[3] == "Total"
    assert a[:2] == ["a", "Layer"] and a[5] == "w: float32[2,2] P(data, None) 4 (16 B)"
    assert a[4] == "mean: value: float32[2] 2 (8 B)" and a[6] == "2 (12 B)"
    assert enc[:4] == ["a/enc", "Layer", "float32[4,2]", "flag: True x: float32[4,2]"]
    assert b[0] == "others/b"
    assert model.a.mean["value"].tolist() == [0, 0] and model.a.rngs.dropout.count[...] == 0
    assert type(model.a) is Layer and not hasattr(model.a, "_place")


def test_nothing_is_computed():
    TRACES.clear()
    shape = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    table = rows(tabulate(Model().a, shape, flag=True, console_kwargs=CONSOLE))
    assert table[1][2] == "- float32[4,2] - flag: True" and TRACES == [True]
    assert rows(tabulate(nnx.List([]), method="sort", console_kwargs=CONSOLE))[0][0] == "path"


def test_depth_filters_and_options():
    model, x = Model(), jnp.ones((4, 2))
    table = tabulate(model, x, depth=1, console_kwargs=CONSOLE, table_kwargs={"title": "Mine"})
    assert [row[0] for row in rows(table)[1:-1]] == ["", "a", "a/enc"] and " Mine " in table
    calls = []
    tabulate(model, x, row_filter=lambda call: calls.append(call) or True, console_kwargs=CONSOLE)
    assert [c.path for c in calls][:3] == [(), ("a",), ("a", "rngs", "dropout")]
    assert [c.call_order for c in calls] == [*range(len(calls))] and calls[1].type is Layer
    assert calls[1].object_id == id(model.a) and calls[1].outputs.shape == (4, 2)
    assert calls[1].inputs_repr == "float32[4,2]" and calls[1].flops is None


def test_flops_of_a_call_and_its_gradient():
    model, x = Model(), jnp.ones((8, 2))
    table = rows(
        tabulate(
            model, x, compute_flops=True, compute_vjp_flops=True, depth=1, console_kwargs=CONSOLE
        )
    )
    assert table[0][4:6] == ["flops", "vjp_flops"]
    flops, vjp_flops = (int(n) for n in table[2][4:6])
    assert flops >= 2 * 8 * 2 * 2 - 16 and vjp_flops > 2 * flops > 0


def test_calls_in_compiled_methods():
    model = Model()
    for options in ({}, {}, {"compute_flops": True}):
        table = tabulate(
            model, jnp.ones((4, 2)), method="compiled", console_kwargs=CONSOLE, **options
        )
        assert [row[0] for row in rows(table)[1:-1]] == ["compiled", "a"]
    assert model.compiled(jnp.ones((4, 2))).shape == (4, 2)


def test_invalid_targets():
    with pytest.raises(GraphStructureError, match=r"tabulate was given a dict; give an nnx\.Mod"):
        tabulate({"a": 1})
    with pytest.raises(ModuleAttributeNotFoundError, match="Model has no method 'nope' to tab"):
        tabulate(Model(), method="nope")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        tabulate(Model())
    assert len(rows(tabulate(Model(), jnp.ones((4, 2)), console_kwargs=CONSOLE))) == 6
