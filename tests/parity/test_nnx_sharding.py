"""Layouts of variables, on Flax NNX and on Weft: where values lie, and what metadata says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from flax.nnx import spmd as flax_spmd
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft import nnx as weft_nnx
from weft.nnx import spmd as weft_spmd

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

# Flax keeps these in addition to the given metadata.
OF_FLAX = ("eager_sharding", "hijax", "ref")
RULES = (("embed", "model"),)


class Library:
    """The names of one of the two libraries: of its `nnx`, and of its `nnx.spmd`."""

    def __init__(self, nnx, spmd):
        self._modules = nnx, spmd

    def __getattr__(self, name):
        nnx, spmd = self._modules
        return getattr(spmd if hasattr(spmd, name) else nnx, name)


FLAX, WEFT = Library(flax_nnx, flax_spmd), Library(weft_nnx, weft_spmd)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


def spec_of(sharding, ndim):
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    return spec + (None,) * (ndim - len(spec))


def seen(x):
    """Returns a result in plain Python: of arrays where they lie, of variables what they hold and
    know.
    """
    if hasattr(x, "get_raw_value"):
        metadata = {k: v for k, v in x.get_metadata().items() if k not in OF_FLAX}
        return type(x).__name__, seen(x.get_raw_value()), metadata
    if isinstance(x, P):
        return x
    if isinstance(x, NamedSharding):
        return x.spec
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return x.shape, str(x.dtype), spec_of(getattr(x, "sharding", None), len(x.shape))
    if hasattr(x, "flat_state"):
        return {path: seen(v) for path, v in x.flat_state()}
    if isinstance(x, dict):
        return {k: seen(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [seen(v) for v in x]
    return x


def make(nnx):
    class Model(nnx.Module):
        def __init__(self):
            ones = nnx.with_partitioning(jax.nn.initializers.ones, ("data", "model"))
            self.kernel = nnx.Param(ones(jax.random.key(0), (4, 8)))
            self.bias = nnx.Param(jnp.ones(8))
            self.embed = nnx.Param(
                jnp.ones((4, 2)), out_sharding=("embed", None), sharding_rules=RULES
            )
            self.step = nnx.Variable(jnp.array(3))
            self.rngs = nnx.Rngs(0)

    return Model()


def lazy(nnx):
    with nnx.use_eager_sharding(False):
        return make(nnx)


def under(kind, program):
    def run(nnx):
        with jax.set_mesh(mesh_of(kind)):
            return program(nnx)

    return run


def created(nnx):
    out = [nnx.state(make(nnx))]
    for layout in (("data", "model"), P("data"), ("data",), (("data", "model"),), (), None):
        for name in ("sharding", "sharding_names", "out_sharding"):
            out.append(nnx.Param(jnp.ones((8, 8)), **{name: layout}))
    v = nnx.Param(np.ones((4, 8)), out_sharding=("model", None))
    out += [v, v.sharding_names]
    v.set_value(jnp.zeros((4, 8)))
    return [*out, v, v.copy(jnp.ones((4, 8)))]


def turned_off(nnx):
    out = [nnx.using_eager_sharding(), nnx.use_eager_sharding.get_default()]

    def param(**metadata):
        return nnx.Param(jnp.ones((4, 8)), out_sharding=("data",), **metadata)

    with nnx.use_eager_sharding(False):
        out += [nnx.using_eager_sharding(), param(), param(eager_sharding=True)]
        with nnx.use_eager_sharding(True):
            out += [nnx.using_eager_sharding(), param(), param(eager_sharding=False)]

    @nnx.use_eager_sharding(False)
    def f():
        return nnx.using_eager_sharding()

    with nnx.use_eager_sharding(True):  # the statements below change it to the end of this block
        nnx.use_eager_sharding(False)
        out += [f(), nnx.using_eager_sharding()]
        nnx.use_eager_sharding(True)
        return [*out, nnx.using_eager_sharding()]


def by_rules(nnx):
    out = []
    with nnx.logical_axis_rules((("embed", "data"), ("heads", ("data", "model")))):
        out.append(nnx.Param(jnp.ones((4, 8)), out_sharding=("embed", "model")))
        out.append(nnx.Param(jnp.ones(8), out_sharding=("heads",)))
        out.append(nnx.get_partition_spec(out[0]))
    return [*out, nnx.Param(jnp.ones((4, 8)), out_sharding=("embed",), sharding_rules=RULES)]


def compiled(nnx):
    return jax.jit(lambda: nnx.Param(jnp.ones((4, 8)), out_sharding=("data", "model"))[...])()


def abstract(nnx):
    def params():
        with nnx.use_eager_sharding(False):
            ones = jnp.ones((4, 8))
            return nnx.State({"a": nnx.Param(ones, out_sharding=("data",)), "b": nnx.Param(ones)})

    state = jax.eval_shape(params)
    return nnx.abstract_with_sharding(state), nnx.abstract_with_sharding(params())


def axes(nnx):
    """Names that gain and lose an axis, at the places that Flax counts as its users do."""
    out = []
    for index in (0, 1, 2):
        for layout in (("data", "model"), P("data", "model"), None):
            v = nnx.Param(jnp.ones((4, 8)), out_sharding=layout, eager_sharding=False, sizes=(4, 8))
            for name in ("layers", None):
                params = {nnx.PARTITION_NAME: name, "sizes": 3, "other": 2}
                nnx.add_axis(v, index, params)
                out.append(v.get_metadata("out_sharding"))
                out.append((v.get_metadata("sizes"), nnx.add_axis([v, 3], 0, params)[0] is v))
                nnx.remove_axis(nnx.remove_axis(v, 0, params), index, params)
                out.append(v.get_metadata("out_sharding"))
    return out


def axis_hooks(nnx):
    told = []
    hooks = {
        name: lambda v, i, axis: told.append((i, axis, v.get_metadata("out_sharding", None)))
        for name in ("on_add_axis", "on_remove_axis")
    }
    for layout in ({"out_sharding": ("data",)}, {}):
        v = nnx.Param(jnp.ones(4), eager_sharding=False, **layout, **hooks)
        nnx.remove_axis(nnx.add_axis(v, 0, {"partition_name": "a"}), 0, {"partition_name": "a"})
    return told


PROGRAMS = {
    **{f"{f.__name__} on an {kind.name} mesh": under(kind, f)
       for f in (created, turned_off, by_rules, compiled, abstract)
       for kind in (AxisType.Auto, AxisType.Explicit)},
    "a mesh as metadata": lambda nnx: nnx.Param(
        jnp.ones((4, 8)), out_sharding=("data",), mesh=mesh_of()),
    "a named sharding": lambda nnx: nnx.Param(
        jnp.ones((4, 8)), out_sharding=NamedSharding(mesh_of(), P("data"))).get_raw_value(),
    "specs of a state": lambda nnx: nnx.get_partition_spec(nnx.state(lazy(nnx))),
    "specs of a model": lambda nnx: nnx.state(
        jax.tree.map(lambda x: x, nnx.get_partition_spec(lazy(nnx)))).flat_state().paths[:0],
    "specs of values": lambda nnx: nnx.get_partition_spec([jnp.ones(2), np.ones(1), 3, None, "a"]),
    "shardings of a state": lambda nnx: nnx.get_named_sharding(nnx.state(lazy(nnx)), mesh_of()),
    "an abstract model": lambda nnx: nnx.get_abstract_model(lambda: make(nnx), mesh_of())[1],
    "a lazy abstract model": lambda nnx: nnx.get_abstract_model(lambda: lazy(nnx), mesh_of())[1],
    "initializers": lambda nnx: [nnx.Param(init(jax.random.key(0), (4, 8)), eager_sharding=False)
        for init in (
            nnx.with_partitioning(jax.nn.initializers.ones, ("data", None), tag="a"),
            nnx.with_metadata(jax.nn.initializers.ones, sharding=("data", None)),
        )],
    "axes": axes,
    "hooks": axis_hooks,
    "the name": lambda nnx: nnx.PARTITION_NAME,
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_results_agree(program):
    assert seen(program(WEFT)) == seen(program(FLAX))


FAILURES = {
    "no mesh": lambda nnx: nnx.Param(jnp.ones(4), out_sharding=("data",)),
    "no such axis": lambda nnx: nnx.Param(jnp.ones(4), out_sharding=("q",), mesh=mesh_of()),
    "too many axes": lambda nnx: nnx.Param(
        jnp.ones(4), out_sharding=(None, "data"), mesh=mesh_of()),
    "conflicting rules": lambda nnx: under(AxisType.Auto, by_conflicting_rules)(nnx),
    "no axis in the mesh of all": lambda nnx: nnx.get_named_sharding(
        nnx.Param(jnp.ones(4), out_sharding=("q",), eager_sharding=False), mesh_of()),
    "no mesh for what is abstract": lambda nnx: nnx.abstract_with_sharding(
        nnx.Param(
            jax.ShapeDtypeStruct((4,), int), out_sharding=("data",), eager_sharding=False)),
    "another name": lambda nnx: nnx.remove_axis(
        nnx.Param(jnp.ones(4), out_sharding=("data",), eager_sharding=False), 0,
        {"partition_name": "q"}),
}  # fmt: skip


def by_conflicting_rules(nnx):
    with nnx.logical_axis_rules((("embed", "data"),)):
        return nnx.Param(jnp.ones((4, 8)), out_sharding=("embed",), sharding_rules=RULES)


def failure(program, nnx):
    with pytest.raises(Exception) as caught:
        program(nnx)
    return type(caught.value)


@pytest.mark.parametrize("program", FAILURES.values(), ids=FAILURES)
def test_except_clauses_for_flax_catch_weft_errors(program):
    known = next(c for c in failure(program, FLAX).__mro__ if c.__module__ == "builtins")
    assert issubclass(failure(program, WEFT), known)
