"""Splitting with shared parts, states that know their graph, prefixes: on Flax NNX and on Weft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from flax.nnx import graphlib as flax_graphlib

from tests.parity.objects import IS_LATER_FLAX
from weft import nnx as weft_nnx
from weft.nnx import contexts, graph, refs, split_merge
from weft.nnx import contexts as node_states
from weft.nnx import contexts as prefixes
from weft.nnx.transforms import state_roles

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


FLAX = Library(flax_nnx, flax_graphlib)
WEFT = Library(
    weft_nnx, graph, contexts, split_merge, split_merge, node_states, prefixes, split_merge, refs,
    split_merge, state_roles,
)  # fmt: skip


def seen(x):
    """Returns a result in plain Python."""
    if type(x).__name__ == "NodeStates":
        return "NodeStates", [seen(s) for s in x.states], x.metadata
    if hasattr(x, "get_raw_value"):
        return type(x).__name__, seen(x[...] if x.ref else x.get_raw_value()), x.ref, x.hijax
    if isinstance(x, jax.Array | np.ndarray):
        return str(x.dtype), np.asarray(x).tolist()
    if type(x).__name__ == "GraphDef":
        return x.num_leaves
    if type(x).__name__ in ("State", "GraphState"):
        return type(x).__name__, {path: seen(v) for path, v in x.flat_state()} if (
            hasattr(x, "flat_state")
        ) else {k: seen(v) for k, v in x.items()}
    if type(x).__name__ == "FlatState":
        return [(path, seen(v)) for path, v in x]
    if isinstance(x, dict):
        return {k: seen(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [seen(v) for v in x]
    if type(x).__module__.startswith(("flax", "weft", __name__.split(".")[-1])):
        return type(x).__name__, {k: seen(v) for k, v in vars(x).items() if k[0] != "_"}
    return x


def make(nnx):
    class Layer(nnx.Module):
        def __init__(self, n=2):
            self.w = nnx.Param(jnp.ones(n))

    class Model(nnx.Module):
        def __init__(self):
            self.a = self.b = Layer()
            self.stat = nnx.BatchStat(jnp.zeros(()))

    return Model(), Layer(3)


def unpacked(nnx):
    model, _ = make(nnx)
    whole = nnx.unpack(model)
    params, rest = nnx.unpack(model, nnx.Param, ...)
    new = nnx.merge(jax.tree.map(lambda x: x + 1, params), rest)
    out = [sorted(whole), sorted(params), nnx.merge(whole).a.w is model.a.w, nnx.state(new)]
    nnx.update(model, jax.tree.map(lambda x: x + 5, whole))
    keys = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(whole)]
    return [*out, nnx.state(model), keys]


def split_and_merged(nnx):
    model, layer = make(nnx)
    with nnx.split_context() as ctx:
        first = ctx.split(model)
        second = ctx.split({"n": layer, "a": model.a}, nnx.Param, ...)
        third = ctx.flatten(model)
        values = ctx.flatten([model.a, nnx.Cache(2)], with_paths=False)
        out = [first, second, third, values, sorted(ctx.ref_index.values()), ctx.is_inner]
    with nnx.merge_context() as ctx:
        a, b, c = ctx.merge(*first), ctx.merge(*second), ctx.unflatten(*third)
        out += [b["a"] is a.a, a is c, a.a.w is model.a.w, sorted(ctx.index_ref)]
    return out


def updated(nnx):
    model, layer = make(nnx)
    inner, w = model.a, model.a.w

    @nnx.update_context("t")
    def run(model):
        with nnx.split_context("t") as ctx:
            graphdef, state = ctx.split(model)
            outside = ctx.is_inner

        @jax.jit
        def f(state):
            with nnx.merge_context("t", True) as ctx:
                model = ctx.merge(graphdef, state)
            model.a.w[...] += 1
            model.b = type(layer)(4)
            with nnx.split_context("t") as ctx:
                return ctx.split((model, model.a)), ctx.is_inner

        out, inside = f(state)
        with nnx.merge_context("t", False) as ctx:
            return *ctx.merge(*out), outside, bool(inside)

    same, found, *where = run(model)
    return same is model, found is inner, model.a.w is w, where, nnx.state(model)


def referred(nnx):
    model, layer = make(nnx)
    known, made = nnx.RefMap(), {}
    first = nnx.flatten(model, ref_index=known)
    second = nnx.flatten([model, layer], ref_index=known)
    new = nnx.unflatten(*first, index_ref=made)
    again, _ = nnx.unflatten(*second, index_ref=made)
    return first, second, sorted(known.values()), again is new, sorted(made)


def replaced_objects(nnx):
    model, _ = make(nnx)
    layer, w, stat = model.a, model.a.w, model.stat
    index = nnx.RefMap()
    for i, x in enumerate((model, layer, w)):
        index[x] = i
    graphdef, flat = nnx.flatten(model, ref_outer_index=index)
    plain = nnx.graphdef(model)
    out = [
        graphdef == plain, graphdef.with_no_outer_index() == plain,
        plain.with_matching_outer_index(graphdef) == graphdef,
        plain.with_same_outer_index() == plain,
    ]  # fmt: skip
    new = nnx.unflatten(
        graphdef,
        jax.tree.map(lambda x: x + 7, flat),
        outer_index_outer_ref={0: model, 1: layer, 2: w},
    )
    return [*out, new is model, new.a is layer, layer.w is w, new.stat is stat, nnx.state(new)]


def trees(nnx):
    m, layer = make(nnx)
    tree = nnx.to_tree((m, {"q": m.a, "x": 3}, layer))
    first, rest, other = nnx.from_tree(tree)
    out = [
        tree,
        rest["q"] is first.a,
        first.a.w is m.a.w,
        other is layer,
        len(jax.tree.leaves(tree)),
    ]

    def named(ctx, path, prefix, x):
        return jax.tree_util.keystr(path), prefix, type(x).__name__

    def parts(ctx, path, prefix, x):
        return nnx.NodeStates.from_split(*ctx.split(x, nnx.Param, ...), metadata=prefix)

    out.append(nnx.to_tree((m, [3]), prefix=5, split_fn=named))
    out.append(nnx.to_tree((m, [3]), prefix=5, split_fn=named, map_non_graph_nodes=True))
    out.append(nnx.from_tree(tree, prefix=5, merge_fn=named))
    out.append(nnx.from_tree(tree, prefix=1, merge_fn=named, map_non_graph_nodes=True))
    two = nnx.to_tree((m, 3), prefix=(1, None), split_fn=parts)
    axes = (nnx.StateAxes({nnx.Param: 0, ...: 1}),) * 2
    out += [two, nnx.from_tree(two)[0].a.w is m.a.w, nnx.to_tree((m, m), prefix=axes)]
    out.append(nnx.to_tree((m, m.a), prefix=(0, 1), check_aliasing=False))
    return [*out, nnx.to_tree(m.a.w), nnx.NodeStates.from_prefixes([0, 1], metadata=2)]


def prefixed(nnx):
    class Node(nnx.Module):
        def __init__(self):
            self.w, self.n = nnx.Param(jnp.ones((3, 2))), nnx.BatchStat(jnp.ones(()))
            self.size, self.xs = 3, nnx.List([nnx.Cache(jnp.ones((2, 3)))])

    node = Node()
    axes = nnx.prefix(node, {nnx.Param: 0, nnx.Cache: 1, ...: None}, graph=False)
    total = jax.vmap(lambda m: m.w.sum() + m.xs[0].sum() + m.n, in_axes=(axes,))(node)
    out = [axes.w, axes.n, axes.xs[0], axes.size, total]
    by_name = nnx.prefix(node, lambda path, x: (path, type(x).__name__), graph=False)
    tree = nnx.prefix([jnp.ones(1), 3, {"a": 2}], {nnx.Param: 0, ...: 9}, graph=False)
    return [*out, by_name.xs[0], tree]


def held(nnx):
    model, _ = make(nnx)
    del model.b
    ref = nnx.vars_as(model, ref=True)
    some = nnx.vars_as(model, ref=True, only=nnx.Param)
    jax.jit(lambda m: m.a.w.__setitem__(..., m.a.w[...] + 1))(ref)
    jax.jit(lambda: ref.a.w.__setitem__(0, 9.0))()
    out = [nnx.state(m) for m in (ref, some, nnx.vars_as(ref, ref=False), model)]
    with nnx.var_defaults(ref=True):
        out += [dict(nnx.var_defaults()), nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1), ref=False)]
    hijax = nnx.Param(jnp.ones(2), hijax=True)
    write = lambda: hijax.__setitem__(..., hijax[...] + 1)  # noqa: E731
    write() if IS_LATER_FLAX else jax.jit(write)()
    copy = ref.a.w.copy()
    ref.a.w[...] = jnp.zeros(2)
    return [*out, hijax[...], hijax.hijax, copy, dict(nnx.var_defaults()), nnx.vars_as(3, ref=True)]


PROGRAMS = {
    f.__name__: f
    for f in (
        unpacked, split_and_merged, updated, referred, replaced_objects, trees, prefixed, held,
    )
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_results_agree(program):
    assert seen(program(WEFT)) == seen(program(FLAX))


def unknown_reference(nnx):
    model, _ = make(nnx)
    with nnx.split_context() as ctx:
        ctx.split(model)
        second = ctx.split({"a": model.a, "b": nnx.Param(1)})
    return nnx.merge(*second)


def enter(context):
    with context:
        pass


def twice(nnx):
    model, _ = make(nnx)
    model.again = model.a.w
    return model


FAILURES = {
    "merge of no description": lambda nnx: nnx.merge(3),
    "two parts, one of them no state": lambda nnx: nnx.merge(
        nnx.unpack(make(nnx)[0], nnx.Param, ...)[0]),
    "a filter missing": lambda nnx: nnx.unpack(make(nnx)[0], nnx.Param),
    "an unknown object": unknown_reference,
    "no update context": lambda nnx: nnx.current_update_context("q"),
    "a split without one": lambda nnx: enter(nnx.split_context("q")),
    "a merge that is nowhere": lambda nnx: nnx.update_context("q")(
        lambda: enter(nnx.merge_context("q")))(),
    "filters without paths": lambda nnx: nnx.split_context().__enter__().flatten(
        make(nnx)[0], nnx.Param, with_paths=False),
    "aliases": lambda nnx: nnx.to_tree((make(nnx)[0],) * 2, prefix=(0, 1)),
    "no prefix of the tree": lambda nnx: nnx.to_tree((make(nnx)[0], 3), prefix=(0,)),
    "several states": lambda nnx: nnx.NodeStates.from_states(1, 2).state,
    "states without a description": lambda nnx: nnx.NodeStates.from_states(1).graphdef,
    "what a prefix leaves out": lambda nnx: nnx.prefix(make(nnx)[0], {nnx.Param: 0}, graph=False),
    "no prefix": lambda nnx: nnx.prefix(make(nnx)[0], 3, graph=False),
    "a variable twice": lambda nnx: nnx.vars_as(twice(nnx), ref=True),
    "a reference for a value that is not an array": lambda nnx: nnx.Param({"a": "b"}, ref=True),
    "a reference keeps its shape": lambda nnx: nnx.Param(jnp.ones(2), ref=True).set_value(
        jnp.ones(3)),
    "no object": lambda nnx: nnx.check_pytree(3),
    "static data": lambda nnx: nnx.check_pytree(with_static_data(nnx)),
}  # fmt: skip


def with_static_data(nnx):
    model = make(nnx)[0]
    model.options = nnx.static({"a": 1})
    model.options["b"] = jnp.ones(1)
    return model


def failure(program, nnx):
    with pytest.raises(Exception) as caught:
        program(nnx)
    return type(caught.value)


@pytest.mark.parametrize("program", FAILURES.values(), ids=FAILURES)
def test_except_clauses_for_flax_catch_weft_errors(program):
    of_flax = [c for c in failure(program, FLAX).__mro__ if c.__module__ == "builtins"]
    assert issubclass(failure(program, WEFT), (of_flax[0], ValueError))
