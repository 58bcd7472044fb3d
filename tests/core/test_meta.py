import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from weft import serialization, struct
from weft.core import apply, init, lift, meta
from weft.core.meta import PARTITION_NAME, AxisMetadata, Partitioned
from weft.errors import (
    AxisMetadataError,
    MeshError,
    PartitioningUnspecifiedError,
    PartitionNameError,
    ShardingWarning,
)


class Factored(struct.PyTreeNode, AxisMetadata):
    """Box with a flag for each axis, as of a factored optimizer's state."""

    array: Any
    factored: tuple[bool, ...] = struct.field(pytree_node=False)

    def unbox(self):
        return self.array

    def add_axis(self, index, params):
        index = index % (len(self.factored) + 1)
        new = params.get("factored", False)
        return self.replace(factored=(*self.factored[:index], new, *self.factored[index:]))

    def remove_axis(self, index, params):
        index = index % len(self.factored)
        if self.factored[index] != params.get("factored", False):
            raise ValueError(f"axis {index} is factored the other way")
        return self.replace(factored=self.factored[:index] + self.factored[index + 1 :])


class Opaque(AxisMetadata):
    """A box that is not a pytree node."""

    def __init__(self, value, axes):
        self.value, self.axes = value, axes

    def unbox(self):
        return self.value

    def add_axis(self, index, params):
        return Opaque(self.value, self.axes + 1)

    def remove_axis(self, index, params):
        return Opaque(self.value, self.axes - 1)


def a_mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def named(name):
    return {PARTITION_NAME: name}


# The box.


def test_names_are_converted_to_tuple():
    assert Partitioned(1, [None, ["data", "model"]]).names == (None, ("data", "model"))
    assert meta.with_partitioning(jnp.ones, ["data"])((3,)).names == ("data",)


@pytest.mark.parametrize("names", ["data", 3, None])
def test_non_sequence_names_are_rejected(names):
    with pytest.raises(AxisMetadataError, match=rf"names is {names!r}.*write \({names!r},\)"):
        Partitioned(1, names)


@pytest.mark.parametrize("names", [{"data": 0}, {"data", "model"}])
def test_unordered_names_are_rejected(names):
    with pytest.raises(AxisMetadataError, match=r"expected a sequence with one entry .*or None.$"):
        Partitioned(1, names)


def test_abstract_methods_are_required():
    class Half(AxisMetadata):
        def unbox(self):
            return 0

    with pytest.raises(TypeError, match="add_axis"):
        Half()


# Axes that come and go.


@pytest.mark.parametrize(
    ("index", "names"),
    [
        (0, ("l", "a", "b")),
        (1, ("a", "l", "b")),
        (2, ("a", "b", "l")),
        (-1, ("a", "b", "l")),
        (-2, ("a", "l", "b")),
        (-3, ("l", "a", "b")),
    ],
)
def test_axis_index_counts_in_the_full_value(index, names):
    box = Partitioned(jnp.ones((2, 3)), ("a", "b"))
    assert box.add_axis(index, named("l")).names == names
    assert box.add_axis(index, named("l")).remove_axis(index, named("l")) == box


@pytest.mark.parametrize("index", [3, -4])
def test_add_axis_out_of_range(index):
    with pytest.raises(AxisMetadataError, match=rf"no axis {index} .*expected .* -3 to 2"):
        Partitioned(jnp.ones((2, 3)), ("a", "b")).add_axis(index, named("l"))


@pytest.mark.parametrize("index", [2, -3])
def test_remove_axis_out_of_range(index):
    with pytest.raises(AxisMetadataError, match=rf"no axis {index} .*expected .* -2 to 1"):
        Partitioned(jnp.ones((2, 3)), ("a", "b")).remove_axis(index, named("l"))


def test_axis_after_last_name_is_replicated():
    short = Partitioned(jnp.ones((2, 3, 4)), ("a",))
    assert short.add_axis(3, named("l")).names == ("a", None, None, "l")
    assert short.add_axis(3, named("l")).remove_axis(3, named("l")).names == ("a", None, None)
    assert short.remove_axis(2, named(None)).names == ("a",)
    with pytest.raises(PartitionNameError, match="is called None, and is to be removed as 'l'"):
        short.remove_axis(2, named("l"))
    with pytest.raises(AxisMetadataError, match="no axis 4"):
        short.add_axis(4, named("l"))


def test_negative_axis_needs_all_names():
    with pytest.raises(AxisMetadataError, match="name all 3 axes of the value"):
        Partitioned(jnp.ones((2, 3, 4)), ("a",)).remove_axis(-1, {})


def test_axis_is_removed_under_its_name_only():
    box = Partitioned(jnp.ones((2, 3)), ("layers", "data"))
    with pytest.raises(PartitionNameError) as caught:
        meta.remove_axis({"dense": {"kernel": box}}, 0, named("stages"))
    assert str(caught.value) == (
        "the axis metadata of 'dense/kernel': axis 0 of names=('layers', 'data') is called "
        "'layers', and is to be removed as 'stages'; give the transformation the name, "
        "{'partition_name': 'layers'} as metadata_params (in NNX transform_metadata), or the axis "
        "that was meant."
    )
    assert caught.value.path == "dense/kernel"


def test_named_axis_is_not_removed_without_a_name():
    with pytest.raises(PartitioningUnspecifiedError, match=r"'layers', and is .* without a name"):
        meta.remove_axis(Partitioned(1, ("layers",)), 0, {})
    with pytest.raises(PartitioningUnspecifiedError, match=r"'w': .* gains axis 0, .* or None in"):
        meta.add_axis({"w": Partitioned(1, (None,))}, 0, {})


def test_error_path_can_be_prefixed():
    with pytest.raises(AxisMetadataError) as caught:
        meta.add_axis({"w": Partitioned(1, ())}, 1, named("l"))
    caught.value.path = f"params/{caught.value.path}"
    assert str(caught.value).startswith("the axis metadata of 'params/w': there is no axis 1")


def test_errors_of_custom_boxes_name_the_variable():
    with pytest.raises(ValueError, match="factored the other way") as caught:
        meta.remove_axis({"w": Factored(jnp.ones(2), (True,))}, 0, {})
    assert caught.value.__notes__ == ["This is about the axis metadata of 'w'."]


names = st.sampled_from([None, "data", "model", ("data", "model")])


def describe(tree):
    return jax.tree.structure(tree)


# Trees with boxes.


def boxes():
    return {
        "plain": jnp.zeros(2),
        "one": Partitioned(jnp.ones((2, 3)), (None, "data")),
        "two": Factored(Partitioned(jnp.ones((2, 3)), ("model", None)), (True, False)),
    }


def test_boxes_in_a_tree_in_a_box_are_updated():
    box = Partitioned({"a": Partitioned(jnp.ones(2), ("x",))}, ("y",))
    added = meta.add_axis(box, 0, named("l"))
    assert (added.names, added.value["a"].names) == (("l", "y"), ("l", "x"))


class Walking(struct.PyTreeNode, AxisMetadata):
    """A box whose hooks forward each call to its content, with the functions for trees."""

    value: Any

    def unbox(self):
        return meta.unbox(self.value)

    def replace_boxed(self, val):
        return self.replace(value=meta.replace_boxed(self.value, val))

    def add_axis(self, index, params):
        return self.replace(value=meta.add_axis(self.value, index, params))

    def remove_axis(self, index, params):
        return self.replace(value=meta.remove_axis(self.value, index, params))


class Calling(Walking):
    """The same by methods of the box in it."""

    def _of(self, method, *args):
        is_box = isinstance(self.value, AxisMetadata)
        return self.replace(value=getattr(self.value, method)(*args)) if is_box else self

    def replace_boxed(self, val):
        return self._of("replace_boxed", val) if meta.is_axis_metadata(self.value) else Calling(val)

    def add_axis(self, index, params):
        return self._of("add_axis", index, params)

    def remove_axis(self, index, params):
        return self._of("remove_axis", index, params)


class Silent(struct.PyTreeNode, AxisMetadata):
    """Box that ignores axes."""

    value: Any

    def unbox(self):
        return self.value

    def add_axis(self, index, params):
        return self

    remove_axis = add_axis


SHELLS = {
    "names": lambda value: Partitioned(value, (None, "data")),
    "walking": Walking,
    "calling": Calling,
    "silent": Silent,
    "factored": lambda value: Factored(value, (True, False)),
}


def names_in(box):
    """Returns the names of all boxes of a nest that have some."""
    own = [box.names] if isinstance(box, Partitioned) else []
    content = box.array if isinstance(box, Factored) else box.value
    return own + (names_in(content) if meta.is_axis_metadata(content) else [])


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(SHELLS)), min_size=1, max_size=5), st.sampled_from([0, -1]))
def test_nested_boxes_are_updated_once(shells, index):
    box = functools.reduce(lambda inner, shell: SHELLS[shell](inner), shells, jnp.ones((2, 3)))
    params = {PARTITION_NAME: "l", "factored": True}
    added = meta.add_axis({"w": box}, index, params)["w"]
    expected = ("l", None, "data") if index == 0 else (None, "data", "l")
    assert names_in(added) == [expected] * shells.count("names")
    assert describe(meta.remove_axis({"w": added}, index, params)["w"]) == describe(box)
    new = np.zeros((2, 3))
    replaced = meta.replace_boxed({"w": box}, {"w": new})["w"]
    assert meta.unbox(replaced) is new
    assert describe(replaced) == describe(box)


def test_box_not_registered_as_pytree():
    assert meta.unbox({"w": Opaque(3, 1)}) == {"w": 3}
    assert meta.add_axis(Opaque(3, 1), 0, {}).axes == 2
    assert meta.get_partition_spec(Opaque(Partitioned(jnp.ones(1), ("a",)), 1)) == P("a")
    with pytest.raises(
        AxisMetadataError, match=r"Opaque is not a pytree node .*replace_boxed\(val\)"
    ):
        meta.replace_boxed(Opaque(3, 1), 4)


# Sharding of unboxed values.


def test_invalid_sharding_for_mesh():
    mesh = a_mesh()
    with pytest.raises(MeshError, match="'heads'"):
        Partitioned(jnp.ones(4), ("heads",), mesh).unbox()
    with pytest.warns(ShardingWarning, match="cannot be split into 4"):
        Partitioned(jnp.ones(3), ("data",), mesh).unbox()


# Boxes in other JAX functions.


def test_boxes_are_saved_and_restored():
    tree = boxes() | {"mesh": Partitioned(jnp.ones((4, 8)), ("data", None), a_mesh())}
    blank = jax.tree.map(jnp.zeros_like, tree)
    restored = serialization.from_bytes(blank, serialization.to_bytes(tree))
    assert describe(restored) == describe(tree)
    jax.tree.map(np.testing.assert_array_equal, restored, tree)
    assert serialization.to_state_dict(tree["one"]).keys() == {"value"}
    state = optax.adam(1e-3).init(tree)
    again = serialization.from_state_dict(state, serialization.to_state_dict(state))
    assert describe(again) == describe(state)


def test_equal_metadata_compiles_once():
    traces = []

    @jax.jit
    def f(box):
        traces.append(box.names)
        return box.value

    f(Partitioned(jnp.ones(2), ("a",)))
    f(Partitioned(jnp.zeros(2), ["a"]))
    assert traces == [("a",)]
    f(Partitioned(jnp.ones(2), ("b",)))
    assert traces == [("a",), ("b",)]


def test_box_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Partitioned(1, ()).names = ("a",)


# The code of the seed.


class Padded(struct.PyTreeNode, AxisMetadata):
    """A value that is one longer along each axis, where it has the axis of a transformation."""

    value: Any

    def unbox(self):
        return self.value

    def add_axis(self, index, params):
        return self.replace(value=jnp.pad(self.value, [(0, 1)] * self.value.ndim))

    def remove_axis(self, index, params):
        return self.replace(value=self.value[(slice(-1),) * self.value.ndim])


def test_shape_changing_hooks_run_before_mapping():
    def body(scope, x, _=None):
        return x @ scope.param("w", lambda _: Padded(jnp.eye(3))), None

    x = jnp.arange(3.0)
    scan = lift.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
    vmap = lift.vmap(body, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=2)
    pmap = lift.pmap(body, {"params": 0}, {"params": True}, devices=jax.devices()[:1])
    for run, args, n in [
        (scan, (x, None), 2),
        (vmap, (jnp.stack([x, x]),), 2),
        (pmap, (x[None],), 1),
    ]:
        (y, _), variables = init(run)(jax.random.key(0), *args)
        assert variables["params"]["w"].value.shape == (n + 1, 4, 4)
        np.testing.assert_array_equal(apply(run)(variables, *args)[0], y)
