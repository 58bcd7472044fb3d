import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError
from weft.nnx.contexts import current_update_context, merge_context, split_context, update_context
from weft.nnx.ref_map import RefMap


class Layer(nnx.Module):
    """One parameter."""

    def __init__(self, n=2):
        self.w = nnx.Param(jnp.ones(n))


class Model(nnx.Module):
    """A layer under two names, and a statistic."""

    def __init__(self):
        self.a = self.b = Layer()
        self.stat = nnx.BatchStat(jnp.zeros(()))


def test_what_is_shared_is_split_once_and_merged_into_one():
    model, layer = Model(), Layer()
    with split_context() as ctx:
        first = ctx.split(model)
        second = ctx.split({"n": layer, "a": model.a}, nnx.Param, ...)
        third = ctx.flatten(model)
        fourth = ctx.flatten([layer, nnx.Cache(1)], nnx.Cache)
        values = ctx.flatten([model.a, nnx.Cache(2)], with_paths=False)
    assert second[1].flat_state().paths == (("n", "w"),) and len(second) == 3
    assert len(third[1]) == 0 and fourth[1].paths == ((1,),) and values[1] == [2]
    assert [len(ctx.ref_index), ctx.is_inner] == [8, None]
    with merge_context() as ctx:
        made, found = ctx.merge(*first), ctx.merge(*second)
        assert ctx.unflatten(*third) is made and ctx.unflatten(*fourth)[0] is found["n"]
        assert ctx.unflatten(*values)[0] is made.a
    assert found["a"] is made.a is made.b and made.a.w is not model.a.w
    with pytest.raises(GraphStructureError, match="refers to object 1 of another one, with which"):
        nnx.merge(*second)


def test_flat_states_in_parts():
    with split_context() as ctx:
        graphdef, params, rest = ctx.flatten(Model(), nnx.Param, ...)
        with pytest.raises(GraphStructureError, match="filters and with_paths=False"):
            ctx.flatten(Model(), nnx.Param, with_paths=False)
    with merge_context() as ctx:
        assert ctx.unflatten(graphdef, params, rest).a.w.shape == (2,)


def round_trip(model, change):
    """Changes a model inside of a compiled function."""
    with split_context("t") as ctx:
        graphdef, state = ctx.split(model)
        assert ctx.is_inner is False

    @jax.jit
    def f(state):
        with merge_context("t", inner=True) as ctx:
            inner = ctx.merge(graphdef, state)
        result = change(inner)
        with split_context("t") as ctx:
            parts = ctx.split((inner, result))
            assert ctx.is_inner is True
        return parts

    f(state)  # what is compiled already does as well
    with merge_context("t", inner=False) as ctx:
        return ctx.merge(*f(state))


@update_context("t")
def test_a_round_trip_changes_the_objects_that_went_in():
    model = Model()
    layer, w = model.a, model.a.w

    def change(inner):
        inner.a.w[...] += 1
        inner.stat.set_metadata(tag="new")
        inner.b = Layer(4)
        return inner.a

    same, found = round_trip(model, change)
    assert same is model and found is layer and model.a is layer and layer.w is w
    assert w[...].tolist() == [2, 2] and model.b.w.shape == (4,) and model.stat.tag == "new"
    assert current_update_context("t").inner_ref_outer_index is None


def test_equal_descriptions_are_one_object():
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


def test_contexts_without_their_update_context():
    with pytest.raises(GraphStructureError, match="no update context 'q'"), split_context("q"):
        pass
    with (
        update_context("q"),
        pytest.raises(GraphStructureError, match=r"needs inner; give inner=True"),
        merge_context("q"),
    ):
        pass


def test_descriptions_that_refer_to_each_other():
    model, layer = Model(), Layer()
    known, made = RefMap(), {}
    first = nnx.flatten(model, ref_index=known)
    second = nnx.flatten([model, layer], ref_index=known, with_paths=False)
    assert len(first[1]) == 2 and len(second[1]) == 1 and sorted(known.values()) == [*range(6)]
    new = nnx.unflatten(*first, index_ref=made)
    again, other = nnx.unflatten(*second, index_ref=made)
    assert again is new and other is not layer and sorted(made) == [*range(6)]


def test_descriptions_of_objects_that_were_others_before():
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
