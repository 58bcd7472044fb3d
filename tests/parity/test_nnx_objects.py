"""Programs on objects, run on Flax NNX and on Weft: trees, values, keys, paths and errors agree."""

import copy
import pickle
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from weft import nnx as weft_nnx
from weft.errors import SharedObjectError

# Flax says of some of its names that they will go; what they do is compared all the same.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

# Flax keeps these in addition to the given metadata.
OF_FLAX = ("eager_sharding", "hijax", "ref")


def seen(x):
    """Returns a result in plain Python, so that those of both libraries can be compared."""
    if isinstance(x, type):
        return x.__name__
    if hasattr(x, "get_raw_value"):
        metadata = {k: seen(v) for k, v in x.get_metadata().items() if k not in OF_FLAX}
        return type(x).__name__, seen(x.get_raw_value()), metadata
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, str(x.dtype)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "key", np.asarray(jax.random.key_data(x)).tolist()
    if isinstance(x, jax.Array | np.ndarray):
        return str(x.dtype), np.asarray(x).tolist()
    if type(x).__name__ == "GraphDef":
        return x.num_leaves
    if isinstance(x, Mapping):
        return type(x).__name__, {k: seen(v) for k, v in x.items()}
    if type(x).__name__ in ("list", "tuple", "List", "FlatState"):
        return type(x).__name__, [seen(v) for v in x]
    if type(x).__module__.startswith(("flax", "weft", __name__.split(".")[-1])):
        return type(x).__name__, {k: seen(v) for k, v in vars(x).items() if k[0] != "_"}
    return x


def make(nnx):
    """Returns a model with shared layers, lists, state and streams."""

    class Linear(nnx.Module):
        def __init__(self, n_in, n_out, *, rngs):
            self.kernel = nnx.Param(rngs.params.normal((n_in, n_out)), tag="kernel")
            self.bias = nnx.Param(jnp.zeros(n_out))
            self.features = n_out

        def __call__(self, x):
            return x @ self.kernel + jnp.broadcast_to(
                self.bias[...], (*x.shape[:-1], self.features)
            )

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = Linear(2, 3, rngs=rngs)
            self.layers = nnx.List([Linear(3, 3, rngs=rngs), nnx.Dict(a=Linear(3, 3, rngs=rngs))])
            self.again = self.first
            self.stat = nnx.BatchStat(jnp.ones(2))
            self.buffer = jnp.arange(2)
            self.scale = nnx.data(2.0)
            self.rngs = rngs
            self.deterministic = False

        def __call__(self, x):
            self.stat[...] = self.stat * 2
            self.sow(nnx.Intermediate, "seen", x)
            x = self.layers[0](self.again(x))
            kept = self.rngs.dropout.bernoulli(0.5, (3,))
            return x * jnp.broadcast_to(kept, x.shape)

        def set_view(self, deterministic=None):
            if deterministic is not None:
                self.deterministic = deterministic

    return Net(nnx.Rngs(0, dropout=1))


def inside(nnx, change):
    """Changes an outer object inside of a trace."""
    jax.jit(lambda x: change(x) or x)(jnp.ones(2))


def hooked(nnx):
    seen = []

    def hook(name, change):
        return lambda variable, x: (seen.append((name, x)), change(x))[1]

    v = nnx.Param(
        10,
        on_get_value=(hook("get", lambda x: x + 1), hook("then", lambda x: x * 3)),
        on_set_value=hook("set", lambda x: x * 2),
        on_create_value=hook("create", lambda x: x - 1),
    )
    values = [v.get_raw_value(), v.get_value()]
    v.set_value(3)
    return values, v.raw_value, v + 1, seen


def methods_as_hooks(nnx):
    class Own(nnx.Variable):
        def on_get_value(self, x):
            return x + 1

        def on_set_value(self, x):
            return x * 2

        def on_create_value(self, x):
            return x - 1

    v = Own(10)
    v.set_value(3)
    return v.raw_value, v.get_value()


def written(nnx):
    v = nnx.Param(jnp.arange(6.0).reshape(2, 3), foo=1)
    v[0] = 5
    v[1, 1:] += 1
    v.set_metadata(bar=2)
    v.del_metadata("foo")
    return v, v[0], len(v), v.T, v.sum(), v.copy(1), v.replace(2, bar=3), v.type, next(iter(v))


def computed(nnx):
    v = nnx.Param(jnp.arange(3.0) + 1)
    return [
        v + 1,
        1 - v,
        v * v,
        2 / v,
        v // 2,
        5 % v,
        v**2,
        v @ v,
        -v,
        abs(v),
        v == 2,
    ]


def updated(nnx):
    model = make(nnx)
    nnx.update(
        model, nnx.State({"stat": nnx.BatchStat(jnp.zeros(1), foo=1)}), {"buffer": jnp.ones(1)}
    )
    nnx.update(model, {"first": {"bias": jnp.ones(3)}, "new": nnx.Cache(1), "deterministic": True})
    return nnx.state(model), model.deterministic, model.again.bias


def popped(nnx):
    model = make(nnx)
    model.sow(nnx.Intermediate, "h", 1)
    model.first.sow(nnx.Intermediate, "h", jnp.ones(2))
    model.first.sow(nnx.Intermediate, "h", 3)
    model.sow("counters", "total", 1, reduce_fn=lambda a, b: a + b, init_fn=lambda: 5)
    return nnx.pop(model, nnx.Intermediate), hasattr(model, "h"), nnx.state(model)


def mapped(nnx):
    paths = []
    new = nnx.map(lambda path, x: (paths.append(path), x)[1], make(nnx))
    return paths, nnx.state(new)


def modes(nnx):
    model = make(nnx)
    model.eval(features=7)
    after = model.deterministic, model.first.features, model.layers[1].a.features
    model.train()
    new = nnx.with_attributes(model, deterministic=True, only=lambda path, x: path == ())
    view = nnx.view(nnx.List([nnx.Param(1)]), raise_if_not_found=False, deterministic=True)
    return (
        after,
        model.deterministic,
        new.deterministic,
        new.first.kernel is model.first.kernel,
        view,
    )


def shared(nnx):
    model = make(nnx)
    graphdef, state = nnx.split(model)
    new, clone = nnx.merge(graphdef, state), nnx.clone(model)
    return (
        state["again"]["kernel"] is model.first.kernel,
        new.first.kernel is model.first.kernel,
        new.first is new.again,
        clone.first is clone.again,
        clone.first.kernel is model.first.kernel,
        nnx.graphdef(clone) == graphdef,
        hash(nnx.graphdef(clone)) == hash(graphdef),
        graphdef.num_leaves,
    )


def cyclic(nnx):
    class Node(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(1)

    node = Node()
    node.me = nnx.data(node)
    graphdef, state = nnx.split(node)
    return state, nnx.merge(graphdef, state).me.me.w, nnx.find_duplicates(node)


def marked(nnx):
    class Model(nnx.Module):
        a: nnx.Data[int]

        def __init__(self):
            self.a, self.b, self.c = 1, nnx.data(2), nnx.static("x")
            self.d, self.e, self.f = jnp.ones(1), np.float32(3), nnx.data((4, 5))

    model = Model()
    leaves = jax.tree.leaves(model)
    model.b, model.d = 6, 7
    return leaves, jax.tree.leaves(model), nnx.is_data(1), nnx.is_data(nnx.Param(1))


def dataclasses(nnx):
    @nnx.dataclass
    class Point(nnx.Pytree):
        x: int = nnx.data()
        y: int = nnx.static(default=3)

    return jax.tree.leaves(Point(1)), Point(1).y, Point(1) == Point(1), Point(1) == Point(2)


def filtered(nnx):
    state = nnx.state(make(nnx))
    filters = [
        nnx.Param, "kernel", nnx.PathContains("bias"), nnx.PathContains("bia", exact=False),
        nnx.Not(nnx.Param), nnx.All(nnx.Param, nnx.PathContains("layers")),
        nnx.Any(nnx.BatchStat, "default"), [nnx.BatchStat, nnx.RngKey],
        lambda path, x: path[-1] == "key", True, False, None, ..., nnx.OfType(nnx.RngState),
    ]  # fmt: skip
    return [nnx.to_flat_state(nnx.filter_state(state, f)).paths for f in filters]


def states(nnx):
    state = nnx.state(make(nnx))
    params, rest = state.split(nnx.Param, ...)
    pure = nnx.to_pure_dict(params)
    nnx.replace_by_pure_dict(params, jax.tree.map(lambda x: x + 1, pure))
    keys = [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(state)]
    return keys, params, nnx.merge_state(params, rest), state.flat_state().filter(nnx.RngKey)


def streams(nnx):
    r = nnx.Rngs(0, params=jax.random.key(5), dropout=1)
    out = [r(), r.params(), r.other(), r.normal((2,)), r.dropout.lecun_normal()((2, 2))]
    out += [
        nnx.state(x) for x in (r.fork(), r.split(2), r.broadcast(2), r.fork(split={"params": 3}))
    ]
    return out, nnx.state(r.split({"dropout": (1, 2)})), list(r), nnx.state(nnx.Rngs(r.params))


def split_streams(nnx):
    model = make(nnx)
    backups = nnx.split_rngs(model, splits=3, only="dropout")
    inside = jax.tree.map(lambda x: x, nnx.state(model, nnx.RngState))
    nnx.restore_rngs(backups)

    @nnx.split_rngs(splits=2)
    def f(model):
        return model.rngs.dropout.key[...]

    out = f(model)
    with nnx.fork_rngs(model, split={"default": 2}):
        forked = jax.tree.map(lambda x: x, nnx.state(model, nnx.RngState))
    nnx.split_rngs(model, splits=1, squeeze=True)
    return inside, out, forked, nnx.state(model, nnx.RngState)


def reseeded(nnx):
    model = nnx.List([make(nnx), nnx.Rngs(3)])
    nnx.reseed(model, default=5, dropout=jax.random.key(9))
    first = jax.tree.map(lambda x: x, nnx.state(model, nnx.RngState))
    nnx.split_rngs(model, splits=2)
    nnx.reseed(model, dropout=1, policy="match_shape")
    return first, nnx.state(model, nnx.RngState)


def in_jit(nnx):
    model = make(nnx)
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(state, x):
        inner = nnx.merge(graphdef, state)
        out = inner(x)
        return out, nnx.state(inner)

    out, new = step(state, jnp.ones((1, 2)))
    nnx.update(model, new)
    return out, nnx.state(model)


def mapped_in_place(nnx):
    model = make(nnx)
    same = nnx.map(lambda path, x: x, model)
    plain = nnx.map(
        lambda path, x: 7.0 if isinstance(x, nnx.Param) else x, model, recreate_variables=False
    )
    shared = nnx.Param(1.0)
    twice = nnx.Dict(a=shared, b=nnx.Dict(c=shared))
    both = nnx.map(lambda path, x: 2.0, twice, recreate_variables=False)
    return same.layers[0].kernel is model.layers[0].kernel, nnx.state(plain), both.a, both.b.c


def popped_arrays(nnx):
    model = nnx.Dict(a=jnp.ones(2), b=nnx.Cache(2.0), c=nnx.Dict(d=nnx.Param(3.0), e="kept"))
    return nnx.pop(model, ...), list(model), list(model.c)


def default_metadata(nnx):
    x = nnx.Param(1.0, tag="t")
    names = "hijax", "ref", "eager_sharding", "tag", "other"
    found = [x.get_metadata(name, None) for name in names[3:]]
    return found, [x.has_metadata(name) for name in names], x.hijax, x.ref, x.eager_sharding


def no_layers(nnx):
    empty = nnx.Sequential()
    return empty(), empty(1.0), empty(1.0, 2.0), empty(1.0, b=2.0)


def gradients_of_aliases(nnx):
    w = nnx.Param(jnp.array(2.0))
    f = nnx.grad(lambda a, b: a["x"] * a["y"][0] * b.w, argnums=(0, 1))
    first, _ = f({"x": w, "y": [w]}, nnx.Dict(w=w))
    second = nnx.grad(lambda a, b: a * b, argnums=(0, 1))(w, w)[1]
    return first["x"], first["y"][0], second, len(second)


IN_TREES = {
    "split": lambda nnx, x: nnx.split(x, graph=False)[1],
    "parts": lambda nnx, x: nnx.split(x, nnx.Param, ..., graph=False)[1:],
    "state": lambda nnx, x: nnx.state(x, nnx.Param, graph=False),
    "graphdef": lambda nnx, x: nnx.graphdef(x, graph=False).num_leaves * 0,
    "flatten": lambda nnx, x: nnx.flatten(x, graph=False)[1],
    "unpack": lambda nnx, x: jax.tree.leaves(nnx.unpack(x, graph=False)),
    "clone": lambda nnx, x: nnx.state(nnx.clone(x, graph=False)),
    "map": lambda nnx, x: nnx.state(nnx.map(lambda path, x: x, x, graph=False)),
    "recursive_map": lambda nnx, x: nnx.state(nnx.recursive_map(lambda p, x: x, x, graph=False)),
    "iter_graph": lambda nnx, x: [
        p for p, x in nnx.iter_graph(x, graph=False) if isinstance(x, nnx.Variable | jax.Array)
    ],
}


def trees(nnx):
    """Returns objects that are trees, and some that only graphs can have."""

    class Point(nnx.Pytree):
        def __init__(self):
            self.x = jnp.ones(2)

    class NoTree(nnx.Module, pytree=False):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    w, point, array = nnx.Param(jnp.ones(2)), Point(), jnp.ones(2)
    layer, no_tree = nnx.Dict(w=w), NoTree()
    good = [
        nnx.Dict(a=layer, b=3),
        nnx.Dict(p=point, q=nnx.Dict(p=point)),
        nnx.Dict(a=array, b=array),
    ]
    bad = [nnx.Dict(a=layer, b=layer), nnx.Dict(a=w, b=layer), no_tree, nnx.Dict(a=no_tree)]
    return good, [*bad, [layer, layer]]


@pytest.mark.parametrize("function", IN_TREES.values(), ids=IN_TREES)
def test_trees_without_shared_references(function):
    seen_of_weft, seen_of_flax = (
        [seen(function(nnx, tree)) for tree in trees(nnx)[0]] for nnx in (weft_nnx, flax_nnx)
    )
    assert seen_of_weft == seen_of_flax
    for i, _ in enumerate(trees(weft_nnx)[1]):
        known = failure(lambda nnx, i=i: function(nnx, trees(nnx)[1][i]), flax_nnx)
        ours = failure(lambda nnx, i=i: function(nnx, trees(nnx)[1][i]), weft_nnx)
        assert issubclass(ours, known), (i, known)
    with weft_nnx.set_graph_mode(False), pytest.raises(SharedObjectError):
        weft_nnx.state(trees(weft_nnx)[1][0])


PROGRAMS = {
    "a state": lambda nnx: nnx.state(make(nnx)),
    "parts": lambda nnx: nnx.split(make(nnx), nnx.Param, nnx.RngState, ...)[1:],
    "flat": lambda nnx: nnx.flatten(make(nnx))[1],
    "values": lambda nnx: nnx.flatten(make(nnx), with_paths=False)[1],
    "pure": lambda nnx: nnx.pure(nnx.state(make(nnx))),
    "leaves": lambda nnx: jax.tree.leaves(make(nnx)),
    "modules": lambda nnx: [(p, type(m)) for p, m in nnx.iter_modules(make(nnx))],
    "children": lambda nnx: [(k, type(m)) for k, m in make(nnx).iter_children()],
    "inner modules": lambda nnx: [(k, type(m)) for k, m in nnx.iter_module_children(make(nnx))],
    "duplicates": lambda nnx: nnx.find_duplicates(make(nnx)),
    "a method": lambda nnx: nnx.call(nnx.split(make(nnx))).layers[0](jnp.ones((1, 3))),
    "a call": lambda nnx: nnx.split(make(nnx))[0].apply(nnx.state(make(nnx)))(jnp.ones(2))[0],
    "abstract": lambda nnx: nnx.state(jax.eval_shape(lambda: make(nnx)), nnx.Variable),
    "deepcopy": lambda nnx: nnx.state(copy.deepcopy(make(nnx))),
    "pickle": lambda nnx: pickle.loads(pickle.dumps(nnx.List([nnx.Param(jnp.ones(1))]))),
    "an own name": lambda nnx: nnx.variable_type_from_name("parity_kind", allow_register=True),
    "sequential": lambda nnx: nnx.Sequential(
        lambda x: (x, 2), lambda a, b: {"x": a * b}, lambda x: abs(x)
    )(-3),
    "metadata": lambda nnx: nnx.Param(
        nnx.with_metadata(jax.nn.initializers.ones, foo=1)(jax.random.key(0), (2,)), foo=2, bar=3
    ),
    "a view": lambda nnx: nnx.view(make(nnx), deterministic=True).deterministic,
    **{
        f.__name__: f
        for f in (
            hooked, methods_as_hooks, written, computed, updated, popped, mapped, modes, shared,
            default_metadata, mapped_in_place, popped_arrays, no_layers, gradients_of_aliases,
            cyclic, marked, dataclasses, filtered, states, streams, split_streams, reseeded, in_jit,
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_results_agree(program):
    assert seen(program(weft_nnx)) == seen(program(flax_nnx))


FAILURES = {
    "a filter missing": lambda nnx: nnx.split(make(nnx), nnx.Param),
    "a filter too early": lambda nnx: nnx.state(make(nnx), ..., nnx.Param),
    "values missing": lambda nnx: nnx.merge(nnx.graphdef(make(nnx)), {}),
    "values too many": lambda nnx: nnx.merge(*nnx.split(make(nnx)), {"q": 1}),
    "pop without a filter": lambda nnx: nnx.pop(make(nnx)),
    "in place": lambda nnx: nnx.Param(jnp.ones(1)).__iadd__(1),
    "no metadata": lambda nnx: nnx.Param(1).get_metadata("q"),
    "no attribute": lambda nnx: nnx.Param(1).q,
    "an attribute set": lambda nnx: setattr(nnx.Param(1), "q", 1),
    "another kind": lambda nnx: nnx.Param(1).copy_from(nnx.Cache(1)),
    "set_metadata both ways": lambda nnx: nnx.Param(1).set_metadata({"a": 1}, b=2),
    "no name": lambda nnx: nnx.variable_name_from_type(nnx.Variable),
    "no type": lambda nnx: nnx.variable_type_from_name("no such kind"),
    "name taken": lambda nnx: nnx.register_variable_name("params", nnx.Cache),
    "sow elsewhere": lambda nnx: make(nnx).sow(nnx.Intermediate, "stat", 1),
    "no mode": lambda nnx: make(nnx).set_attributes(q=1),
    "no view": lambda nnx: nnx.view(make(nnx), q=1),
    "not a layer": lambda nnx: nnx.Sequential(3)(1),
    "static data": lambda nnx: setattr(make(nnx), "q", nnx.static(jnp.ones(1))),
    "no stream": lambda nnx: nnx.Rngs(a=1).b(),
    "no stream by key": lambda nnx: nnx.Rngs(a=1)["b"],
    "a bad seed": lambda nnx: nnx.Rngs("a"),
    "a bad squeeze": lambda nnx: nnx.split_rngs(make(nnx), splits=2, squeeze=True),
    "a bad policy": lambda nnx: nnx.reseed(make(nnx), dropout=1, policy="q"),
    "no path": lambda nnx: nnx.State({"a": 1})["b"],
    "no path of a dict": lambda nnx: nnx.state(make(nnx)).replace_by_pure_dict({"q": 1}),
    "unhashable": lambda nnx: hash(nnx.Param(1)),
}


def failure(program, nnx):
    with pytest.raises(Exception) as caught:
        program(nnx)
    return type(caught.value)


@pytest.mark.parametrize("program", FAILURES.values(), ids=FAILURES)
def test_except_clauses_for_flax_catch_weft_errors(program):
    known = next(c for c in failure(program, flax_nnx).__mro__ if c.__module__ == "builtins")
    assert issubclass(failure(program, weft_nnx), known)


@pytest.mark.parametrize(
    "change",
    [
        lambda nnx, m: lambda x: setattr(m, "q", x),
        lambda nnx, m: lambda x: m.stat.set_value(x),
        lambda nnx, m: lambda x: m.stat.__setitem__(0, x[0]),
        lambda nnx, m: lambda x: m.layers.append(x),
        lambda nnx, m: lambda x: m.layers[1].__setitem__("q", x),
        lambda nnx, m: lambda x: m.rngs() and None,
    ],
    ids=["attribute", "value", "item", "list", "dict", "stream"],
)
def test_changes_from_another_trace_have_one_error_class(change):
    classes = {
        failure(lambda nnx: inside(nnx, change(nnx, make(nnx))), nnx).__name__
        for nnx in (flax_nnx, weft_nnx)
    }
    assert classes == {"TraceContextError"}
