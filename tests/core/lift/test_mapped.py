import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.keys import draw
from weft.core import apply, init, lift, meta, nn
from weft.errors import AxisSizeError, ScopeCollectionNotFound, VariableAxisError

KEY = jax.random.key(0)
X = draw(0, 4, 3)
needs_devices = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")


def dense(scope, x):
    return nn.dense(scope, x, 2)


def count(scope, x):
    calls = scope.variable("state", "calls", lambda: jnp.zeros(()))
    calls.value += x.sum()
    return calls.value


@pytest.mark.parametrize("mapped", [lift.vmap, pytest.param(lift.pmap, marks=needs_devices)])
@pytest.mark.parametrize("axis", [0, 1])
def test_each_index_has_its_own_parameters(mapped, axis):
    ensemble = mapped(dense, {"params": axis}, {"params": True})
    y, variables = init(ensemble)(KEY, X)
    kernel = jnp.moveaxis(variables["params"]["kernel"], axis, 0)
    assert kernel.shape == (4, 3, 2)
    assert len({float(k) for k in kernel[:, 0, 0]}) == 4
    np.testing.assert_allclose(y, jnp.einsum("bi,bif->bf", X, kernel), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(apply(ensemble)(variables, X), y, rtol=1e-6)


def test_all_share_the_parameters():
    shared = lift.vmap(dense, {"params": None}, {"params": False})
    y, variables = init(shared)(KEY, X)
    expected, alone = init(dense)(KEY, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(variables["params"]["kernel"], alone["params"]["kernel"])


def test_what_differs_cannot_be_shared():
    with pytest.raises(VariableAxisError, match=r"vmap: 'params/kernel' is declared to be the"):
        init(lift.vmap(dense, {"params": None}, {"params": True}))(KEY, X)


def test_state_is_mapped_and_arguments_by_name_too():
    f = lift.vmap(lambda scope, x, *, y: count(scope, x + y), {"state": 0}, {})
    y, changed = apply(f, mutable=["state"])({}, X, y=X)
    np.testing.assert_allclose(changed["state"]["calls"], 2 * X.sum(1), rtol=1e-6)
    assert y.shape == (4,)


def test_negative_axes_count_from_the_end():
    _, variables = init(lift.vmap(dense, {"params": -1}, {"params": True}))(KEY, X)
    assert variables["params"]["kernel"].shape == (3, 2, 4)


def test_sizes_must_agree():
    f = lift.vmap(dense, {"params": 0}, {"params": True})
    _, variables = init(f)(KEY, X)
    with pytest.raises(AxisSizeError, match="vmap: the mapped axes have different sizes"):
        apply(f)(variables, X[:3])
    with pytest.raises(AxisSizeError, match="vmap: no input is mapped, so the size is unknown"):
        init(lift.vmap(dense, {"params": 0}, {"params": True}, in_axes=None))(KEY, X)
    with pytest.raises(AxisSizeError, match=r"shape \(4, 3\) has no axis 5"):
        init(lift.vmap(dense, {}, {}, in_axes=5))(KEY, X)


def test_what_is_not_lifted_is_not_there():
    with pytest.raises(ScopeCollectionNotFound, match="vmap does not lift the collection 'state'"):
        apply(lift.vmap(count, {"params": 0}, {}), mutable=True)({}, X)


def test_names_of_axes():
    f = lift.vmap(lambda scope, x: jax.lax.psum(x, "batch"), {}, {}, axis_name="batch")
    np.testing.assert_allclose(apply(f)({}, X)[0], X.sum(0), rtol=1e-5)


@pytest.mark.parametrize("mapped", [lift.vmap, pytest.param(lift.pmap, marks=needs_devices)])
def test_boxes_gain_and_lose_the_axis(mapped):
    def boxed(scope, x):
        kernel_init = meta.with_partitioning(jax.nn.initializers.ones, ("in", "out"))
        value = scope.param("kernel", kernel_init, (3, 2))
        assert scope.get_variable("params", "kernel").names == ("in", "out")
        return x @ value

    f = mapped(
        boxed, {"params": 1}, {"params": True}, metadata_params={meta.PARTITION_NAME: "layers"}
    )
    _, variables = init(f)(KEY, X)
    assert variables["params"]["kernel"].names == ("in", "layers", "out")
    _, again = apply(f, mutable=["params"])(variables, X)
    assert again["params"]["kernel"].names == ("in", "layers", "out")


@needs_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_gives_each_device_its_part(axis_type):
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(axis_type,))
    split, whole = PartitionSpec("d"), PartitionSpec()
    x = jax.device_put(X, NamedSharding(mesh, split))

    def f(scope, x):
        seen = scope.variable("state", "seen", lambda: jnp.zeros((1,)))
        seen.value = seen.value + x.sum()
        noise = jax.random.uniform(scope.make_rng("noise"), (1,))
        return scope.get_variable("params", "scale") * jax.lax.psum(x.sum(), "d"), noise

    mapped = lift.shard_map(
        f,
        {"params": whole, "state": split},
        {"noise": True},
        mesh=mesh,
        in_specs=split,
        out_specs=(whole, split),
        check_vma=False,
    )
    variables = {"params": {"scale": jnp.float32(2)}}
    (y, noise), changed = apply(mapped, mutable=["state"])(variables, x, rngs={"noise": KEY})
    np.testing.assert_allclose(y, 2 * X.sum(), rtol=1e-5)
    np.testing.assert_allclose(changed["state"]["seen"], X.sum(1), rtol=1e-5)
    assert len(set(noise.tolist())) == 4


def test_pmap_has_one_device_for_each_index():
    with pytest.raises(AxisSizeError, match="have size 100, and there are"):
        init(lift.pmap(dense, {"params": 0}, {"params": True}))(KEY, jnp.ones((100, 3)))
