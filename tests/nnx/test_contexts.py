import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft import nnx
from weft.errors import (
    GraphStructureError,
    InconsistentAliasError,
    ObjectArgumentError,
    StateFilterError,
)
from weft.nnx.contexts import (
    NodeStates,
    current_update_context,
    merge_context,
    prefix,
    split_context,
    to_tree,
    update_context,
)
from weft.nnx.split_merge import RefMap
from weft.nnx.transforms.state_roles import StateAxes


class Layer(nnx.Module):
    """One parameter."""

    def __init__(self, n=2):
        self.w = nnx.Param(jnp.ones(n))


class Model(nnx.Module):
    """A layer under two names, and a statistic."""

    def __init__(self):
        self.a = self.b = Layer()
        self.stat = nnx.BatchStat(jnp.zeros(()))


def test_equal_graphdefs_are_one_object():
    with update_context("t"):
        parts = []
        for _ in range(2):
            with split_context("t") as ctx:
                parts.append(ctx.split(Model())[0])
    assert parts[0] is parts[1]


def test_inner_contexts_hide_outer_ones():
    with update_context("t") as outer:
        with update_context("t") as inner:
            assert current_update_context("t") is inner
        with update_context("other"):
            assert current_update_context("t") is outer
    with pytest.raises(KeyError), update_context("t"):
        raise KeyError
    with pytest.raises(GraphStructureError, match=r"no update context 't' here.*none"):
        current_update_context("t")


def test_missing_update_context():
    with pytest.raises(GraphStructureError, match="no update context 'q'"), split_context("q"):
        pass
    with (
        update_context("q"),
        pytest.raises(GraphStructureError, match=r"needs inner; give inner=True"),
        merge_context("q"),
    ):
        pass


def test_graphdefs_with_shared_index():
    model, layer = Model(), Layer()
    known, made = RefMap(), {}
    first = nnx.flatten(model, ref_index=known)
    second = nnx.flatten([model, layer], ref_index=known, with_paths=False)
    assert len(first[1]) == 2 and len(second[1]) == 1 and sorted(known.values()) == [*range(6)]
    new = nnx.unflatten(*first, index_ref=made)
    again, other = nnx.unflatten(*second, index_ref=made)
    assert again is new and other is not layer and sorted(made) == [*range(6)]


def test_graphdef_outer_index():
    model = Model()
    index = RefMap([(model, 5), (model.a, 1), (model.a.w, 7)])
    graphdef, flat = nnx.flatten(model, ref_outer_index=index)
    plain = nnx.graphdef(model)
    assert graphdef.outer == ((0, 5), (1, 1), (2, 7)) and graphdef != plain
    assert graphdef.with_no_outer_index() == plain and hash(graphdef) == hash(plain)
    assert plain.with_same_outer_index().outer == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert plain.with_matching_outer_index(graphdef) == graphdef
    layer, w, stat = model.a, model.a.w, model.stat
    outer = {5: model, 1: layer, 7: w}
    same = nnx.unflatten(graphdef, jax.tree.map(lambda x: x + 7, flat), outer_index_outer_ref=outer)
    assert same is model and model.a is layer and layer.w is w and w[0] == 8
    assert model.stat is not stat and model.stat[...] == 7 and stat[...] == 0
    nnx.unflatten(graphdef, [jnp.zeros(2), jnp.ones(())], outer_index_outer_ref=outer)
    assert w[0] == 0


def model():
    layer = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    return nnx.Dict(a=layer, b=layer, stat=nnx.BatchStat(jnp.zeros(())))


def test_inconsistent_prefixes():
    m = model()
    with pytest.raises(InconsistentAliasError, match="one Param is at '0/a/w', with 0"):
        to_tree((m, m.a), prefix=(0, 1))
    with pytest.raises(InconsistentAliasError, match="at '1/a/w', with 1"):
        to_tree((m, m), prefix=tuple(StateAxes({nnx.Param: i, ...: 0}) for i in (0, 1)))
    to_tree((m, m), prefix=(StateAxes({nnx.Param: 0, ...: 1}),) * 2)
    assert len(to_tree((m, m), prefix=(0, 1), check_aliasing=False)) == 2
    with pytest.raises(ValueError, match="different lengths of tuple"):
        to_tree((m, 3), prefix=(0,))


def test_missing_and_multiple_graphdefs():
    state = nnx.State({"w": jnp.ones((3, 2))})
    both = NodeStates.from_states(state, state)
    with pytest.raises(GraphStructureError, match="have no description"):
        both.graphdef  # noqa: B018
    with pytest.raises(GraphStructureError, match="have 2 states"):
        both.state  # noqa: B018
    one = both.replace(states=(state,))
    assert one.state is state and jax.tree.leaves(NodeStates.from_prefixes([0, 1])) == [0, 1]
    axes = NodeStates.from_prefixes([1])
    assert jax.vmap(lambda s: s.state.w.sum(), in_axes=(axes,))(one).tolist() == [3, 3]
    paths = jax.tree_util.tree_leaves_with_path(one)
    assert jax.tree_util.keystr(paths[0][0]) == ".states[0]['w']"


class Node(nnx.Module):
    """Anything, with a name and variables."""

    def __init__(self):
        self.w, self.n = nnx.Param(jnp.ones((3, 2))), nnx.BatchStat(jnp.ones(()))
        self.name, self.xs = "node", nnx.List([nnx.Cache(jnp.ones((2, 3)))])


AXES = {nnx.Param: 0, nnx.PathContains("xs"): 1, ...: None}


@pytest.mark.parametrize("axes", [AXES, StateAxes(AXES)], ids=["dict", "StateAxes"])
def test_prefix_works_in_jax(axes):
    node = Node()
    made = prefix(node, axes)
    assert (made.w, made.n, made.xs[0], made.name) == (0, None, 1, "node")
    f = jax.vmap(lambda m, x: m.w.sum() + m.xs[0].sum() + m.n * x, in_axes=(made, None))
    assert f(node, 2.0).tolist() == [6, 6, 6]


def test_unmatched_filters():
    with pytest.raises(StateFilterError, match=r"Param: 0.* the BatchStat at .*'n'.*; add"):
        prefix(Node(), {nnx.Param: 0})
    with pytest.raises(ObjectArgumentError, match="prefix was given 3; give a dict from filters"):
        prefix(Node(), 3)


class PrefixLayer(nnx.Module):
    """Has static attributes of every kind, which are not axes."""

    def __init__(self):
        self.w, self.n = nnx.Param(jnp.full((3, 2), 2.0)), nnx.BatchStat(jnp.ones(()))
        self.act, self.k, self.name, self.rate = jnp.tanh, 3, "layer", 0.5
        self.mark, self.parts = nnx.static((0, 1)), [nnx.Dict(v=nnx.Cache(jnp.ones((2, 3))), at=7)]


def total(layer):
    return layer.w.sum() + layer.parts[0].v.sum() + layer.n


PREFIX_LAYER = {nnx.Param: 0, nnx.Cache: 1, ...: None}
MODES = [{}, {"graph": False}, {"graph_updates": False}]
MAPPED = {
    "vmap": lambda at, **modes: nnx.vmap(total, in_axes=(at,), **modes)(PrefixLayer()),
    "vmap of a list": lambda at, **modes: nnx.vmap(
        lambda layers: total(layers[0]), in_axes=([at],), **modes
    )([PrefixLayer()]),
    "scan": lambda at, **modes: nnx.scan(
        lambda c, layer: (c, total(layer)), in_axes=(nnx.Carry, at), **modes
    )(0, PrefixLayer())[1],
    "pmap": lambda at, **modes: nnx.pmap(total, in_axes=(at,), **modes)(PrefixLayer()),
    "jax.vmap": lambda at, **modes: jax.vmap(total, in_axes=(at,))(PrefixLayer()),
}


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("transformation", MAPPED)
def test_transformations_accept_prefix(transformation, modes):
    run = MAPPED[transformation]
    at = prefix(PrefixLayer(), PREFIX_LAYER)
    assert run(at, **modes).tolist() == [7, 7, 7]


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_out_axes_and_shardings(modes):
    at = prefix(PrefixLayer(), PREFIX_LAYER)
    made = nnx.vmap(lambda _: PrefixLayer(), out_axes=at, **modes)(jnp.arange(5))
    assert made.w.shape == (5, 3, 2) and made.parts[0].v.shape == (2, 5, 3) and made.n.shape == ()
    mesh = jax.make_mesh((3,), ("d",), (AxisType.Auto,), devices=jax.devices()[:3])
    laid_out = prefix(
        PrefixLayer(), {nnx.Param: NamedSharding(mesh, P("d")), ...: NamedSharding(mesh, P())}
    )
    layer = PrefixLayer()
    run = nnx.jit(
        lambda layer: nnx.clone(layer), in_shardings=(laid_out,), out_shardings=laid_out, **modes
    )
    assert run(layer).w.sharding.spec == P("d") and run([layer][0]).n.sharding.spec == P()
    run = nnx.jit(lambda layers: total(layers[0]), in_shardings=([laid_out],), **modes)
    assert run([PrefixLayer()]) == 19
    specs = prefix(PrefixLayer(), {nnx.Param: P("d"), nnx.Cache: P(None, "d"), ...: P()})
    each = nnx.shard_map(
        lambda m: total(m)[None], mesh=mesh, in_specs=(specs,), out_specs=P("d"), **modes
    )
    assert each(PrefixLayer()).tolist() == [7, 7, 7]


def test_flat_states_in_parts():
    with split_context() as ctx:
        graphdef, params, rest = ctx.flatten(Model(), nnx.Param, ...)
        with pytest.raises(GraphStructureError, match="filters and with_paths=False"):
            ctx.flatten(Model(), nnx.Param, with_paths=False)
    with merge_context() as ctx:
        assert ctx.unflatten(graphdef, params, rest).a.w.shape == (2,)


def test_shared_objects_are_split_and_merged_once():
    model, layer = Model(), Layer()
    with split_context() as ctx:
        first = ctx.split(model)
        second = ctx.split({"n": layer, "a": model.a}, nnx.Param, ...)
        third = ctx.flatten(model)
        fourth = ctx.flatten([layer, nnx.Cache(1)], nnx.Cache)
        values = ctx.flatten([model.a, nnx.Cache(2)], with_paths=False)
    assert nnx.to_flat_state(second[1]).paths == (("n", "w"),) and len(second) == 3
    assert len(third[1]) == 0 and fourth[1].paths == ((1,),) and values[1] == [2]
    assert [len(ctx.ref_index), ctx.is_inner] == [8, None]
    with merge_context() as ctx:
        made, found = ctx.merge(*first), ctx.merge(*second)
        assert ctx.unflatten(*third) is made and ctx.unflatten(*fourth)[0] is found["n"]
        assert ctx.unflatten(*values)[0] is made.a
    assert found["a"] is made.a is made.b and made.a.w is not model.a.w
    with pytest.raises(GraphStructureError, match="refers to object 1 of another one, with which"):
        nnx.merge(*second)
