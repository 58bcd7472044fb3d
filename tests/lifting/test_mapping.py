import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.lifting.counting import BOXES, Box, BoxKind
from weft.errors import AxisSizeError, ForkError, RoleError, TransformArgumentError
from weft.lifting import FORK, Roles, pmap, scan, shard_map, vmap
from weft.lifting.roles import CARRY


class Labelled(BoxKind):
    """Records calls about axes."""

    def __init__(self):
        self.told = []

    def axis(self, static, carrier, sign, group, axis, metadata):
        if group:
            self.told.append((sign, tuple(group), axis, dict(metadata)))
        return group


def test_kind_is_notified_of_removed_and_added_axes():
    kind = Labelled()
    box = Box(w=jnp.ones((2, 3)), b=jnp.ones(3))
    roles = Roles((("w", 1), (True, None)))
    double = lambda box: box.write("w", 2 * box.arrays["w"])  # noqa: E731
    vmap(kind, double, in_axes=(roles,), metadata={"name": "heads"})(box)
    assert kind.told == [(-1, ("w",), 1, {"name": "heads"}), (1, ("w",), 1, {"name": "heads"})]


@settings(deadline=None, max_examples=15)
@given(axis=st.integers(-3, 2), out=st.integers(-3, 2))
def test_vmap_and_scan_move_any_axis_to_any_other(axis, out):
    x = jnp.arange(24.0).reshape(2, 3, 4)
    expected = np.moveaxis(np.moveaxis(x, axis, 0) * 2, 0, out)
    np.testing.assert_array_equal(
        vmap(BOXES, lambda x: x * 2, in_axes=axis, out_axes=out)(x), expected
    )
    _, ys = scan(BOXES, lambda c, x: (c, x * 2), in_axes=(CARRY, axis), out_axes=(CARRY, out))(
        0.0, x
    )
    np.testing.assert_array_equal(ys, expected)


@pytest.fixture(autouse=True)
def no_leaks():
    with jax.checking_leaks():
        yield


def test_new_state_joins_the_first_matching_group():
    box = Box(w=jnp.arange(3.0))

    def fn(box):
        box.write("new", box.arrays["w"] * 2)

    vmap(BOXES, fn, in_axes=(Roles((("w", 0), (True, 0))),))(box)
    np.testing.assert_array_equal(box.arrays["new"], [0, 2, 4])


def test_returned_carriers_have_the_axis_of_out_axes():
    made = vmap(BOXES, lambda x: Box(x=x), out_axes=1)(jnp.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(made.arrays["x"], np.arange(6.0).reshape(2, 3).T)
    roles = Roles((("x", 1),))
    made = vmap(BOXES, lambda x: Box(x=x), out_axes=roles)(jnp.arange(6.0).reshape(2, 3))
    assert made.arrays["x"].shape == (3, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: vmap(BOXES, lambda x, y: x)(jnp.ones(2), jnp.ones(3)),
            AxisSizeError,
            r"vmap: the mapped axes have different sizes \(input 0: 2, input 1: 3\)",
        ),
        (
            lambda: vmap(BOXES, lambda x: x, in_axes=2)(jnp.ones((2, 2))),
            AxisSizeError,
            r"vmap: input 0 of shape \(2, 2\) has no axis 2",
        ),
        (
            lambda: vmap(BOXES, lambda x: x, in_axes=None)(jnp.ones(2)),
            AxisSizeError,
            "the size is unknown",
        ),
        (
            lambda: vmap(BOXES, lambda b: 0, in_axes=(Roles((("w", FORK),)),), axis_size=2)(
                Box(w=jnp.ones(2))
            ),
            ForkError,
            "w is not a PRNG key",
        ),
    ],
)
def test_bad_axes(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_unsupported_vmap_role():
    from weft.lifting import CARRY

    with pytest.raises(RoleError, match="vmap has no role CARRY; expected an axis, None, FORK"):
        vmap(BOXES, lambda x: x, in_axes=CARRY)(jnp.ones(2))


needs_devices = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
SPLIT = PartitionSpec("d")


@pytest.fixture
def mesh():
    return Mesh(np.asarray(jax.devices()[:4]), ("d",))


@needs_devices
def test_state_is_sharded_over_devices(mesh):
    box = Box(x=jnp.arange(8.0), scale=jnp.float32(2))

    def f(box, y):
        assert box.arrays["x"].shape == (2,)
        box.write("x", box.arrays["scale"] * box.arrays["x"])
        return jax.lax.psum(y.sum(), "d")

    roles = Roles((("x", SPLIT), ("scale", PartitionSpec())))
    mapped = shard_map(
        BOXES, f, mesh=mesh, in_specs=(roles, SPLIT), out_specs=PartitionSpec(), check_vma=False
    )
    assert mapped(box, jnp.arange(4.0)) == 6
    np.testing.assert_array_equal(box.arrays["x"], 2 * np.arange(8.0))


@needs_devices
def test_each_device_has_its_own_keys(mesh):
    box = Box(key=jax.random.key(0))
    mapped = shard_map(
        BOXES,
        lambda box: jax.random.uniform(box.arrays["key"], (1,)),
        mesh=mesh,
        in_specs=(Roles(((True, FORK),)),),
        out_specs=SPLIT,
    )
    expected = jax.vmap(jax.random.uniform)(jax.random.split(jax.random.key(0), 4))
    np.testing.assert_array_equal(mapped(box), expected)


def test_pmap_needs_a_device_for_each_index():
    with pytest.raises(AxisSizeError, match=r"have size 100, and there are \d+ devices"):
        pmap(BOXES, lambda x: x)(jnp.ones(100))


def scale(box, y):
    box.write("x", box.arrays["x"] * y)
    return box.arrays["x"].sum()


@needs_devices
@pytest.mark.parametrize("transformed", [lambda f: f, jax.jit, jax.grad], ids=["", "jit", "grad"])
@pytest.mark.parametrize("spec", [SPLIT, PartitionSpec(None, "d"), PartitionSpec()], ids=str)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_pmap_takes_arrays_of_another_mesh(kind, spec, transformed):
    n = 4 if transformed in (jax.jit, jax.grad) else 2  # in a trace the devices are the same
    other = jax.make_mesh((n,), ("d",), axis_types=(AxisType[kind],), devices=jax.devices()[:n])
    x = jax.device_put(np.arange(16.0, dtype=np.float32).reshape(4, 4), NamedSharding(other, spec))

    @transformed
    def run(x):
        box = Box(x=x)
        sums = pmap(BOXES, scale, in_axes=(Roles(((True, 1),)), 0))(box, jnp.arange(4.0))
        return sums.sum() + 0 * box.arrays["x"].sum()

    grid = np.arange(16.0).reshape(4, 4)
    expected = np.broadcast_to(np.arange(4.0), (4, 4))
    expected = expected if transformed is jax.grad else (grid * expected).sum()
    np.testing.assert_array_equal(run(x), expected)


@needs_devices
def test_pmap_under_a_mesh_in_the_context():
    def run():
        return pmap(BOXES, scale)(Box(x=jnp.ones((4, 2))), jnp.arange(4.0))

    with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)):
        assert run().tolist() == jax.jit(run)().tolist() == [0, 2, 4, 6]
    with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)):
        for call in (run, jax.jit(run)):
            with pytest.raises(TransformArgumentError, match=r"has the explicit axes \('a', 'b'\)"):
                call()
    nested = pmap(BOXES, lambda x: pmap(BOXES, jnp.sin, axis_name="i")(x[None]))
    with pytest.raises(TransformArgumentError, match=r"the manual axes \('devices',\); call pmap"):
        nested(jnp.ones(2))


@needs_devices
@pytest.mark.parametrize("spec", [None, PartitionSpec(None, "d")], ids=str)
def test_pmap_inside_vmap_with_unmapped_values(spec):
    def run(y):
        shared = (Roles(((True, None),)), 0)
        return pmap(BOXES, lambda box, y: box.arrays["x"] * y, in_axes=shared)(box, y)

    box, y = Box(x=jnp.arange(2.0)), jnp.arange(8.0).reshape(2, 4)
    if spec is not None:
        explicit = jax.make_mesh(
            (4,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
        )
        y = jax.device_put(y, NamedSharding(explicit, spec))
    expected = np.arange(8.0).reshape(2, 4, 1) * np.arange(2.0)
    assert jax.vmap(run)(y).tolist() == expected.tolist()
