"""The same programs on weft.core.meta and flax.core.meta."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from weft.core import meta as weft_meta

flax_meta = pytest.importorskip("flax.core.meta")

LIBRARIES = (weft_meta, flax_meta)
NAME = weft_meta.PARTITION_NAME


def a_mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def plain(tree):
    """Returns a tree without the classes of either library: boxes as tuples, arrays as what they
    are.
    """

    def leaf(x):
        for lib in LIBRARIES:
            if isinstance(x, lib.Partitioned):
                return ("box", plain(x.value), tuple(x.names), x.mesh)
        if isinstance(x, jax.Array | np.ndarray):
            return ("array", x.shape, str(x.dtype), np.asarray(x).tolist())
        if isinstance(x, jax.ShapeDtypeStruct):
            return ("shape", x.shape, str(x.dtype))
        return x

    def is_leaf(x):
        return any(isinstance(x, lib.AxisMetadata) for lib in LIBRARIES)

    return jax.tree.map(leaf, tree, is_leaf=is_leaf)


def boxes(lib):
    one = lib.Partitioned(jnp.arange(6.0).reshape(2, 3), (None, "data"))
    return {
        "plain": jnp.zeros(2),
        "one": one,
        "two": lib.Partitioned(lib.Partitioned(jnp.ones((4, 8)), ("model", None)), ("data", None)),
        "mesh": lib.Partitioned(jnp.ones((4, 8)), (None, ("data", "model")), a_mesh()),
        "list": [one, 3, None],
    }


def initializers(lib):
    init = lib.with_partitioning(jax.nn.initializers.normal(), (None, "data"), a_mesh())
    return init(jax.random.key(3), (4, 8))


def shapes(lib):
    init = lib.with_partitioning(jax.nn.initializers.normal(), (None, "data"))
    return jax.eval_shape(lambda key: init(key, (4, 8)), jax.random.key(3))


def unboxed(lib):
    return lib.unbox(boxes(lib))


def added(lib):
    tree = {k: v for k, v in boxes(lib).items() if k != "two"}
    return [lib.add_axis(tree, i, {NAME: "layers"}) for i in (0, 1, 2)]


def added_and_removed(lib):
    tree = {k: v for k, v in boxes(lib).items() if k != "two"}
    params = {NAME: None}
    return lib.remove_axis(lib.add_axis(tree, 1, params), 1, params)


def removed(lib):
    return lib.remove_axis(boxes(lib)["one"], 1, {NAME: "data"})


def replaced(lib):
    new = {"plain": 1, "one": 2, "two": {"any": 3}, "mesh": (4, 5), "list": [6, 7, None]}
    return lib.replace_boxed(boxes(lib), new)


def mapped(lib):
    return lib.map_axis_meta(lambda box: {"names": list(box.names)}, boxes(lib))


def layouts(lib):
    return lib.get_partition_spec(boxes(lib) | {"np": np.ones(2), "scalar": np.float32(1)})


def layouts_of_shapes(lib):
    return lib.get_partition_spec(jax.eval_shape(lambda: lib.Partitioned(jnp.ones(2), ("data",))))


def shardings(lib):
    return lib.get_sharding(boxes(lib), a_mesh())


def as_variable_metadata(lib):
    box = lib.Partitioned(1, ("data",), a_mesh())
    return box.to_nnx_metadata(), lib.Partitioned.from_nnx_metadata(box.to_nnx_metadata())


def through_an_optimizer(lib):
    params = {"w": initializers(lib), "b": jnp.ones(3)}
    state = optax.adam(1e-2).init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = optax.adam(1e-2).update(grads, state, params)
    return optax.apply_updates(params, updates), state[0].mu, lib.get_partition_spec(state)


def paths(lib):
    leaves = jax.tree_util.tree_leaves_with_path(boxes(lib))
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def global_mesh(lib):
    outside = lib.get_global_mesh(), lib.global_mesh_defined()
    with jax.set_mesh(a_mesh()):
        return outside, lib.get_global_mesh(), lib.global_mesh_defined()


def which_are_boxes(lib):
    return [lib.is_axis_metadata(x) for x in (boxes(lib)["one"], jnp.ones(1), None, {})]


PROGRAMS = [
    initializers,
    shapes,
    unboxed,
    added,
    added_and_removed,
    removed,
    replaced,
    mapped,
    layouts,
    layouts_of_shapes,
    shardings,
    as_variable_metadata,
    through_an_optimizer,
    paths,
    global_mesh,
    which_are_boxes,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_trees_metadata_and_values_are_equal(program):
    assert plain(program(weft_meta)) == plain(program(flax_meta))


def unbox_with_its_mesh(lib):
    box = lib.Partitioned(jnp.ones((4, 8)), ("data", "model"), a_mesh())
    return box.unbox(), jax.jit(lib.unbox)(box), box.unbox(apply_constraint=False)


def unbox_over_the_global_mesh(lib):
    with jax.set_mesh(a_mesh()):
        box = lib.Partitioned(jnp.ones((4, 8)), (None, "model"))
        return jax.jit(lib.unbox)({"w": box, "b": jnp.ones(8)})


def unbox_two_levels(lib):
    inner = lib.Partitioned(jnp.ones((4, 8)), ("data", None), a_mesh())
    return jax.jit(lib.unbox)(lib.Partitioned(inner, ("data", None)))


def put_by_box_sharding(lib):
    tree = {"w": lib.Partitioned(jnp.ones((4, 8)), ("data", "model")), "b": jnp.ones(3)}
    return lib.unbox(jax.device_put(tree, lib.get_sharding(tree, a_mesh())))


PLACED = [
    unbox_with_its_mesh,
    unbox_over_the_global_mesh,
    unbox_two_levels,
    put_by_box_sharding,
]


@pytest.mark.parametrize("program", PLACED, ids=lambda p: p.__name__)
def test_shardings_agree(program):
    ours, theirs = (jax.tree.leaves(program(lib)) for lib in LIBRARIES)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        np.testing.assert_array_equal(one, other)


names = st.sampled_from([None, "data", "model", ("data", "model")])


@settings(deadline=None, max_examples=25)
@given(st.lists(names, max_size=3), st.lists(st.tuples(st.integers(0, 9), names), max_size=4))
def test_add_and_remove_axis_agree(start, new):
    trees = [lib.Partitioned(np.zeros((1,) * len(start)), tuple(start)) for lib in LIBRARIES]
    added = []
    for place, name in new:
        index = place % (len(trees[0].names) + 1)
        added.append((index, {NAME: name}))
        trees = [
            lib.add_axis(t.replace(value=np.expand_dims(t.value, index)), index, {NAME: name})
            for lib, t in zip(LIBRARIES, trees, strict=True)
        ]
        assert plain(trees[0]) == plain(trees[1])
    for index, params in reversed(added):
        trees = [
            lib.remove_axis(t.replace(value=t.value.squeeze(index)), index, params)
            for lib, t in zip(LIBRARIES, trees, strict=True)
        ]
        assert plain(trees[0]) == plain(trees[1])
    assert trees[0].names == tuple(start)


@pytest.mark.parametrize("change", ["add_axis", "remove_axis"])
@pytest.mark.parametrize("name", ["layers", None])
def test_axis_without_a_name_comes_and_goes_in_neither(change, name):
    for lib in LIBRARIES:
        box = lib.Partitioned(jnp.ones(2), (name,))
        assert getattr(lib, change)(box, 0, {NAME: name}).names in ((name, name), ())
        with pytest.raises(Exception, match="partition_name") as caught:
            getattr(lib, change)(box, 0, {})
        assert type(caught.value).__name__ == "PartitioningUnspecifiedError"


@pytest.mark.parametrize("compiled", [False, True])
def test_missing_mesh_axis_is_a_value_error(compiled):
    for lib in LIBRARIES:
        box = lib.Partitioned(jnp.ones(4), ("heads",), a_mesh())
        with pytest.raises(ValueError, match="heads"):
            (jax.jit(lib.unbox) if compiled else lib.unbox)(box)


def test_specs_as_names():
    """A `PartitionSpec` remains one until an axis comes or goes."""
    for lib in LIBRARIES:
        box = lib.with_partitioning(jnp.ones, P("data", ("model", "seq")))((2, 3))
        assert type(box.names) is P
        assert box.names == box.get_partition_spec() == P("data", ("model", "seq"))
        more = box.add_axis(1, {NAME: "l"})
        assert more.names == ("data", "l", ("model", "seq"))
        assert box.remove_axis(0, {NAME: "data"}).names == (("model", "seq"),)


def test_boxes_of_a_type():
    for lib in LIBRARIES:
        array = lib.Partitioned[jax.Array](jnp.ones(2), ("data",))
        assert type(array) is lib.Partitioned

        class Named(lib.AxisMetadata[jax.Array]):
            pass

        assert issubclass(Named, lib.AxisMetadata)


def test_differences():
    """Where Flax refuses, asserts or loses track, and Weft does not."""
    weft, flax = (lib.Partitioned(jnp.ones((2, 3)), ("a", "b")) for lib in LIBRARIES)
    # The last axis, counted from behind, is the last one.
    assert flax.add_axis(-1, {NAME: "l"}).names == ("a", "l", "b")
    assert weft.add_axis(-1, {NAME: "l"}).names == ("a", "b", "l")
    # An axis of another name is an error with a message.
    with pytest.raises(AssertionError):
        flax.remove_axis(0, {NAME: "l"})
    with pytest.raises(ValueError, match="is called 'a', and is to be removed as 'l'"):
        weft.remove_axis(0, {NAME: "l"})
    # All levels of a nest are notified of an axis.
    told = [
        lib.add_axis(lib.Partitioned(box, ("c", "d")), 0, {NAME: "l"}).value.names
        for lib, box in ((weft_meta, weft), (flax_meta, flax))
    ]
    assert told == [("l", "a", "b"), ("a", "b")]
    # Shapes with a mesh can be unboxed.
    laid = [box.replace(names=("model", None), mesh=a_mesh()) for box in (weft, flax)]
    avals = [jax.eval_shape(lambda box: box, box) for box in laid]
    assert weft_meta.unbox(avals[0]).shape == (2, 3)
    with pytest.raises(TypeError):
        flax_meta.unbox(avals[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_differences_on_explicit_and_manual_axes(compiled):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    results = []
    with jax.set_mesh(mesh):
        for lib in LIBRARIES:
            box = lib.Partitioned(jnp.ones((4, 8)), (None, "data"))
            unbox = jax.jit(lib.unbox) if compiled else lib.unbox
            try:
                results.append(unbox(box).sharding.spec)
            except AssertionError:
                results.append("refused")
    assert results == [P(None, "data"), "refused"]
