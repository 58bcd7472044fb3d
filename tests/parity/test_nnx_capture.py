"""Sown values as results, and tables of models: on Flax NNX and on Weft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from weft import nnx as weft_nnx
from weft.nnx import capture, summary

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Library:
    """The names of one of the two libraries, from all of its modules."""

    def __init__(self, *modules):
        self._modules = modules

    def __getattr__(self, name):
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


FLAX, WEFT = Library(flax_nnx), Library(weft_nnx, capture, summary)
X = jnp.ones((4, 2))


def seen(x):
    """Returns a result in plain Python."""
    if hasattr(x, "flat_state") or type(x).__name__ == "State":
        return {path: seen(v) for path, v in flax_or_weft_items(x)}
    if hasattr(x, "get_raw_value"):
        return type(x).__name__, seen(x.get_raw_value())
    if isinstance(x, jax.Array | np.ndarray):
        return x.shape, np.asarray(x).tolist()
    if isinstance(x, list | tuple):
        return [seen(v) for v in x]
    return x


def flax_or_weft_items(state):
    for name, value in sorted(state.items(), key=lambda item: str(item[0])):
        is_nested = type(value).__name__ in ("State", "dict")
        below = flax_or_weft_items(value) if is_nested else [((), value)]
        yield from (((name, *path), v) for path, v in below)


def make(nnx):
    class Layer(nnx.Module):
        def __init__(self):
            self.w, self.stat = nnx.Param(jnp.full((2, 2), 2.0)), nnx.BatchStat(jnp.zeros(2))

        def __call__(self, x):
            self.stat[...] = self.stat + x.mean(0)
            self.sow(nnx.Intermediate, "x", x)
            return x @ self.w

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Layer(), Layer()])
            self.again, self.bias = self.layers[0], nnx.Param(jnp.ones(2))

        def __call__(self, x):
            x = self.perturb("between", self.layers[0](x))
            self.sow(nnx.Cache, "kept", x)
            return self.again(self.layers[1](x)) + self.bias[None]

        def first(self, x):
            return self.layers[0](x)

    return Model()


def names(model):
    return sorted(name for name in vars(model) if name[0] != "_")


def kinds(nnx):
    model = make(nnx)
    wanted = [
        (nnx.Intermediate,), (nnx.Perturbation,), (nnx.Cache, nnx.Intermediate), (),
        (nnx.Intermediate, nnx.Perturbation), (nnx.Perturbation, nnx.Intermediate),
        (nnx.Variable,),
    ]  # fmt: skip
    return [nnx.capture(model, *w)(X) for w in wanted], names(model), nnx.state(model)


def functions(nnx):
    model, other = make(nnx), make(nnx)
    decorated = nnx.capture(nnx.Intermediate)(lambda m, x: m(x))
    return [
        decorated(model, X),
        nnx.capture(model.first, nnx.Intermediate)(X),
        nnx.capture(lambda m, x: m.first(x), nnx.Intermediate)(model, X),
        nnx.capture(lambda ms, x: ms[0](ms[1](x)), nnx.Intermediate)([model, other], X),
        nnx.capture(lambda x: other(x), nnx.Intermediate)(X),
        names(model),
        names(other),
    ]


def outputs(nnx):
    model = make(nnx)
    method = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    unwanted = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Cache)
    alone = nnx.capture(lambda m: m.first(X), nnx.Cache, nnx.Perturbation, method_outputs=nnx.Cache)
    return method(X), unwanted(X), alone(model), nnx.capture(model, method_outputs=nnx.Cache)(X)


def initial_values(nnx):
    model = make(nnx)
    _, seen_before = nnx.capture(model, nnx.Intermediate)(X)
    _, between = nnx.capture(model, nnx.Perturbation)(X)
    shifted = jax.tree.map(lambda x: x + 1, between)
    return [
        nnx.capture(model, nnx.Intermediate, init=seen_before)(X),
        nnx.capture(model, nnx.Perturbation, init=shifted)(X),
        nnx.capture(model, nnx.Intermediate, init=shifted)(X),
        seen_before,
    ]


def existing_attributes(nnx):
    model = make(nnx)
    model(X)
    before = names(model)
    return nnx.capture(model, nnx.Intermediate, nnx.Perturbation)(X), before, nnx.state(model)


def gradients(nnx):
    model = make(nnx)
    graphdef, state = nnx.split(model)
    _, between = nnx.capture(model, nnx.Perturbation)(X)

    def loss(between):
        model = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
        return nnx.capture(model, nnx.Perturbation, init=between)(X)[0].sum()

    return jax.grad(loss)(between)


def compiled(nnx):
    model = make(nnx)
    run = nnx.jit(lambda model, x: nnx.capture(model, nnx.Intermediate)(x))
    inner = nnx.capture(nnx.jit(lambda model, x: model(x)), nnx.Intermediate)
    return [run(model, X), run(model, X), inner(model, X), inner(model, X), names(model)]


def nested(nnx):
    inner = nnx.capture(lambda m: m(X), nnx.Intermediate)
    return nnx.capture(lambda m: inner(m), nnx.Intermediate)(make(nnx))


def rows(table):
    """Returns the cells of a table's rows."""
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


def tables(nnx):
    model = make(nnx)
    options = {"console_kwargs": {"width": 160, "force_terminal": False}}
    first = nnx.tabulate(model, X, **options)
    made = [
        first,
        nnx.tabulate(model, X, depth=1, **options),
        nnx.tabulate(model, X, method="first", **options),
    ]
    # Flax counts `sow` and `perturb` as methods of the model.
    own = ("sow", "perturb")
    return [
        [[row for row in rows(table) if row[0].split("/")[-1] not in own] for table in made],
        first.strip().splitlines()[-1].strip(),
        names(model),
    ]


PROGRAMS = {
    f.__name__: f
    for f in (
        kinds, functions, outputs, initial_values, existing_attributes, gradients, compiled,
        nested, tables,
    )
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_results_agree(program):
    assert seen(program(WEFT)) == seen(program(FLAX))


FAILURES = {
    "nothing to call": lambda nnx: nnx.capture(3, nnx.Intermediate)(X),
    "no kind": lambda nnx: nnx.capture(make(nnx), 3)(X),
    "no object": lambda nnx: nnx.tabulate(3, X),
}


def failure(program, nnx):
    with pytest.raises(Exception) as caught:
        program(nnx)
    return type(caught.value)


@pytest.mark.parametrize("program", FAILURES.values(), ids=FAILURES)
def test_except_clauses_for_flax_catch_weft_errors(program):
    known = next(c for c in failure(program, FLAX).__mro__ if c.__module__ == "builtins")
    assert issubclass(failure(program, WEFT), known)
