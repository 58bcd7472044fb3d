"""The same programs on weft.core and on flax.core.spmd and flax.linen: logical axes."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft.core import logical, meta, spmd
from weft.errors import ShardingWarning

flax_spmd = pytest.importorskip("flax.core.spmd")
flax_meta = importlib.import_module("flax.core.meta")
flax_logical = importlib.import_module("flax.linen")
flax_fallback = importlib.import_module("flax.linen.spmd").RulesFallback

RULES = (("a", "data"), ("b", "model"), ("c", None), ("d", ("data", "model")))
FREE = P.UNCONSTRAINED


class Library:
    """Names that a program may use, from one of the two libraries."""

    def __init__(self, spmd, logical, meta, fallback):
        self.spmd, self.meta, self.fallback = spmd, meta, fallback
        for name in (
            "LogicallyPartitioned",
            "logical_to_mesh",
            "logical_to_mesh_axes",
            "logical_to_mesh_sharding",
            "with_logical_constraint",
            "with_logical_partitioning",
        ):
            setattr(self, name, getattr(logical, name))


LIBRARIES = (
    Library(spmd, logical, meta, logical.RulesFallback),
    Library(flax_spmd, flax_logical, flax_meta, flax_fallback),
)


def a_mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def x():
    return jnp.arange(32.0).reshape(4, 8)


@pytest.fixture(autouse=True)
def rules_are_reset():
    yield
    for lib in LIBRARIES:
        lib.spmd.set_logical_axis_rules(())


def axes(lib):
    f = lib.logical_to_mesh_axes
    names = [("a", "b"), P("b", "a"), ["a", "c"], ("zz", "a"), ("a", "d"), ("d", "a"), ("d",), ()]
    names += [(None, "a", None), (("data",), "a"), (FREE, "a"), (FREE, FREE), None, ("data", "a")]
    return [f(n, RULES) for n in names], f(("a", "b")), f(("a",), [["a", "data"]])


def trees(lib):
    tree = {"k": P("a", "b"), "s": [P("c"), P()], "n": None, "empty": ()}
    mesh = a_mesh()
    with lib.spmd.logical_axis_rules(RULES):
        context = lib.logical_to_mesh(tree), lib.logical_to_mesh_sharding(tree, mesh)
    given = lib.logical_to_mesh(tree, RULES), lib.logical_to_mesh_sharding(tree, mesh, RULES)
    return context, given, lib.logical_to_mesh(tree)


def boxes(lib):
    init = lib.with_logical_partitioning(jax.nn.initializers.normal(), ("a", "b"), a_mesh(), RULES)
    box = init(jax.random.key(0), (4, 8))
    told = lib.meta.add_axis(box, 0, {meta.PARTITION_NAME: "layers"})
    back = lib.LogicallyPartitioned.from_nnx_metadata(box.to_nnx_metadata())
    return (
        (box.value.tolist(), box.names, box.mesh, box.rules, type(box).__name__),
        (told.names, told.rules, lib.meta.get_partition_spec({"w": told})),
        sorted(box.to_nnx_metadata()),
        (back.names, back.mesh, back.rules),
        lib.meta.is_axis_metadata(box),
        isinstance(box, lib.meta.Partitioned),
    )


def contexts(lib):
    seen = [lib.spmd.get_logical_axis_rules()]
    with lib.spmd.logical_axis_rules(RULES):
        seen.append(lib.spmd.get_logical_axis_rules())
        with lib.spmd.logical_axis_rules(RULES[:1]):
            seen.append(lib.spmd.get_logical_axis_rules())
        lib.spmd.set_logical_axis_rules(RULES[:2])
        seen.append(lib.spmd.get_logical_axis_rules())
    seen.append(lib.spmd.get_logical_axis_rules())
    lib.spmd.set_logical_axis_rules(RULES[:3])
    return [*seen, lib.spmd.get_logical_axis_rules()]


def translations(lib):
    f = lib.spmd
    mesh = a_mesh()
    names = [("a", "b"), ("a", None, "zz"), (("a", "b"), "c"), ("a", "a"), (FREE, "a"), ()]
    return (
        [f.from_sharding_rules(n, RULES) for n in names],
        [f.apply_rules(n, RULES) for n in [*names, P("a"), None]],
        [f.get_pspec(n, RULES) for n in [*names, P("b"), None, "a", {"w": 1}]],
        f.get_pspec(("a", "b")),
        f.from_sharding_rules(("a",), (("a", "x"), ("a", "y"))),
        f.get_mesh(NamedSharding(mesh, P("data"))),
        [f.get_mesh(s) for s in (P("data"), ("a",), None)],
        f.map_sharding(lambda n: {"a": "q", None: "none"}.get(n, n), ("a", None, ("a", "b"))),
        f.map_sharding(lambda n: n, NamedSharding(mesh, P("data", None))),
        f.composite_rules(RULES, (("e", "data"), ("a", "data"))),
        f.composite_rules(None, RULES[:2]),
        f.composite_rules(RULES[:2], None),
        f.composite_rules((), ()),
    )


def translations_in_a_context(lib):
    f = lib.spmd
    with f.logical_axis_rules(RULES):
        return (
            f.get_pspec(("a", "e"), (("e", "x"),)),
            f.apply_rules(("a", "e"), (("e", "x"),)),
            f.apply_rules(("a", "b"), None),
            f.from_sharding_rules(("a", "e"), (("e", "x"),)),
        )


@pytest.mark.parametrize(
    "program",
    [axes, trees, boxes, contexts, translations, translations_in_a_context],
    ids=lambda p: p.__name__,
)
def test_specs_and_metadata_are_equal(program):
    ours, theirs = map(program, LIBRARIES)
    assert ours == theirs


def constraints(lib):
    f = lib.with_logical_constraint
    mesh = a_mesh()
    return [
        f(x(), ("a", "b"), RULES, mesh),
        f(x(), ("a", "b"), RULES),
        f(x(), ("a", "b"), None, mesh),
        f(x(), None, RULES, mesh),
        f(x(), ("a",), RULES, mesh),
        f(x(), (), RULES, mesh),
        f(x(), (None, None), RULES, mesh),
        f(x(), ("a", "zz"), RULES, mesh),
        f({"x": x(), "y": [x()]}, {"x": ("a", "b"), "y": [P("b")]}, RULES, mesh),
        f((x(), x()), (("a", "b"), ("b", "a")), RULES, mesh),
        f({"x": x(), "y": x()}, P("a", "b"), RULES, mesh),
        f(x(), ("a", "zz"), (), mesh, lib.fallback.RAISE_ERROR),
    ]


def fallbacks(lib):
    f = lib.with_logical_constraint
    mesh = a_mesh()
    no = lib.fallback.NO_CONSTRAINT
    whole = lib.fallback.AXIS_IS_UNSHARDED
    return [
        f(x(), ("a", "zz"), RULES, mesh, no),
        f(x(), ("a", "c"), RULES, mesh, no),
        f(x(), ("a", "d"), RULES, mesh, no),
        f(x(), ("a", "zz"), RULES, mesh, whole),
        f(x(), ("a", "c"), RULES, mesh, lib.fallback.RAISE_ERROR),
    ]


def constraints_of_the_context(lib):
    with jax.set_mesh(a_mesh()), lib.spmd.logical_axis_rules(RULES):
        return jax.jit(lambda x: lib.with_logical_constraint(x, ("a", "b")))(x())


def constraints_compiled(lib):
    def f(x):
        return lib.with_logical_constraint(x, ("c", "d"), RULES, a_mesh())

    return jax.jit(f)(x())


def unboxed(lib):
    mesh = a_mesh()
    box = lib.LogicallyPartitioned(x(), ("a", "b"), mesh, RULES)
    with jax.set_mesh(mesh), lib.spmd.logical_axis_rules(RULES):
        context = jax.jit(lib.meta.unbox)(lib.LogicallyPartitioned(x(), ("b", "zz")))
    return [
        box.unbox(),
        jax.jit(lib.meta.unbox)(box),
        box.unbox(apply_constraint=False),
        box.replace(rules=None).unbox(),
        box.replace(mesh=None).unbox(),
        context,
    ]


def sharded(lib):
    f = lib.spmd.shard_value
    mesh = a_mesh()
    own = NamedSharding(mesh, P("data", "model"))
    with jax.set_mesh(mesh):
        context = jax.jit(lambda x: f(x, ("a", "b"), RULES, None))(x())
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        explicit = f(x(), ("a", "b"), RULES, None)
    return [
        f(x(), ("a", "b"), RULES, mesh),
        f(x(), ("a",), RULES, mesh),
        f(x(), ("data", "model"), None, mesh),
        f(x(), None, None, mesh),
        f(x(), (), None, mesh),
        f(x(), own, None, None),
        f({"x": x()}, ("a", "b"), RULES, mesh),
        jax.jit(lambda x: f(x, ("a", "b"), RULES, mesh))(x()),
        context,
        explicit,
    ]


@pytest.mark.parametrize(
    "program",
    [
        constraints,
        fallbacks,
        constraints_of_the_context,
        constraints_compiled,
        unboxed,
        sharded,
    ],
    ids=lambda p: p.__name__,
)
def test_shardings_agree(program):
    ours, theirs = (jax.tree.flatten(program(lib)) for lib in LIBRARIES)
    assert ours[1] == theirs[1]
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        np.testing.assert_array_equal(one, other)


NAMES = ["a", "b", "c", "d"]
MESH_AXES = [None, "x", "y", "z", ("x", "y"), ("y", "z"), ("z",)]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from(NAMES), unique=True),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(MESH_AXES)), max_size=8),
    st.integers(0, 4),
)
def test_random_rules_give_the_same_spec(names, rules, place):
    row = (*names[:place], None, *names[place:])
    ours, theirs = (lib.logical_to_mesh_axes(row, tuple(rules)) for lib in LIBRARIES)
    assert ours == theirs


@pytest.mark.parametrize(
    ("program", "ours"),
    [
        (lambda lib: lib.logical_to_mesh_axes(("a", "a"), RULES), "LogicalAxisError"),
        (lambda lib: lib.logical_to_mesh_axes(("a",), {"a": "data"}), "LogicalAxisError"),
        (lambda lib: lib.logical_to_mesh_axes(("a",), [("a",)]), "LogicalAxisError"),
        (lambda lib: lib.spmd.composite_rules(RULES, [("a", "x")]), "LogicalAxisError"),
        (
            lambda lib: lib.with_logical_constraint(
                x(), ("a", "zz"), RULES, a_mesh(), lib.fallback.RAISE_ERROR
            ),
            "LogicalAxisError",
        ),
        (
            lambda lib: lib.with_logical_constraint(x(), ("a",), (("a", "nope"),), a_mesh()),
            "MeshError",
        ),
        (lambda lib: lib.spmd.shard_value(x(), ("a", "b", "c"), RULES, a_mesh()), "MeshError"),
    ],
)
def test_shared_value_errors(program, ours):
    for lib in LIBRARIES:
        with pytest.raises(ValueError) as caught:
            program(lib)
        if lib is LIBRARIES[0]:
            assert type(caught.value).__name__ == ours


def test_differences():
    """Where Flax says nothing, or something else, and Weft helps."""
    ours, theirs = LIBRARIES
    mesh = a_mesh()
    # Conflicting rules and indivisible axes are reported; the layout is the same.
    with pytest.warns(ShardingWarning, match="conflicts with another"):
        one = ours.with_logical_constraint(x(), ("a", "d"), RULES, mesh)
    other = theirs.with_logical_constraint(x(), ("a", "d"), RULES, mesh)
    assert one.sharding.is_equivalent_to(other.sharding, 2)
    # A compiled function knows under which rules it was compiled.
    layouts = []
    for lib in LIBRARIES:
        f = jax.jit(lambda x, lib=lib: lib.with_logical_constraint(x, ("a", None), mesh=mesh))
        with lib.spmd.logical_axis_rules((("a", "data"),)):
            f(x())
        with lib.spmd.logical_axis_rules((("a", "model"),)):
            layouts.append(f(x()).sharding.spec[0])
    assert layouts == ["model", "data"]
    # A box with logical names knows its layout over a mesh.
    boxes = [lib.LogicallyPartitioned(x(), ("a", "b"), rules=RULES) for lib in LIBRARIES]
    assert boxes[0].get_sharding(mesh) == NamedSharding(mesh, P("data", "model"))
    with pytest.raises(ValueError, match="not found in mesh"):
        boxes[1].get_sharding(mesh)
