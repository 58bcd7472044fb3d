import types

import jax
import pytest
from jax.sharding import PartitionSpec

from weft.config import ConfigModifier
from weft.errors import ConfigModifierError, MeshError
from weft.trainer.mesh import (
    HybridMeshShape,
    build_mesh,
    check_divides,
    named_sharding,
    over_slices,
    select_mesh_config,
)


def devices(n):
    if jax.device_count() < n:
        pytest.skip(f"needs {n} devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    return jax.devices()[:n]


def test_a_shape_over_devices_with_one_size_left_open():
    mesh = build_mesh((-1, 2), ("data", "model"), devices(4))
    assert dict(mesh.shape) == {"data": 2, "model": 2}


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2,), ("data", "model"), r"mesh_shape=\(2,\) has 1 axes and .* names 2"),
        ((-1, -1), ("data", "model"), "one may be -1 for the rest"),
        ((0,), ("data",), "each size is a positive number"),
        ((3,), ("data",), r"\(data=3\) needs 3 devices and there are 4"),
        ((3, -1), ("data", "model"), "needs a multiple of 3 devices and there are 4"),
    ],
)
def test_shapes_that_do_not_fit(shape, names, message):
    with pytest.raises(MeshError, match=message):
        build_mesh(shape, names, devices(4))


class Device:
    """A device of a machine that is not here."""

    platform, device_kind = "gpu", "gpu"

    def __init__(self, id, slice_index=0, process_index=0):
        self.id, self.slice_index, self.process_index = id, slice_index, process_index


def ids(mesh):
    return [[device.id for device in row] for row in mesh.devices]


@pytest.mark.parametrize("kind", ["slice_index", "process_index"])
def test_a_hybrid_mesh_keeps_slices_or_hosts_together(kind):
    # As they come, devices of the two groups alternate.
    gpus = [Device(i, **{kind: i % 2}) for i in range(8)]
    shape = HybridMeshShape(ici_mesh_shape=(-1, 2), dcn_mesh_shape=(2, 1))
    mesh = build_mesh(shape, ("data", "model"), gpus)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert ids(mesh) == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_a_hybrid_mesh_whose_slices_lie_along_the_second_axis():
    gpus = [Device(i, slice_index=i // 4) for i in range(8)]
    shape = HybridMeshShape(ici_mesh_shape=(2, 2), dcn_mesh_shape=(1, -1))
    assert ids(build_mesh(shape, ("data", "model"), gpus)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_plain_shape_over_several_slices():
    assert over_slices((1, 8), 2) == HybridMeshShape((1, 4), (1, 2))
    with pytest.raises(MeshError, match=r"form 3 slices, and no axis of mesh_shape=\(2, 4\)"):
        over_slices((2, 4), 3)


def test_cpu_devices_stand_for_any_number_of_slices():
    shape = HybridMeshShape(ici_mesh_shape=(1, 2), dcn_mesh_shape=(-1, 1))
    mesh = build_mesh(shape, ("data", "model"), devices(8))
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    rows = jax.NamedSharding(mesh, PartitionSpec("data", "model"))
    x = jax.device_put(jax.numpy.arange(8.0).reshape(4, 2), rows)
    assert float(jax.jit(lambda x: x.sum())(x)) == 28


@pytest.mark.parametrize(
    ("ici", "dcn", "message"),
    [
        ((2,), (2, 1), r"ici_mesh_shape=\(2,\) has 1 axes and .* names 2"),
        ((4, 1), (2, 1, 1), r"dcn_mesh_shape=\(2, 1, 1\) has 3 axes and .* names 2"),
        (
            (-1, 1),
            (-1, 1),
            r"ici_mesh_shape .* and dcn_mesh_shape \(data=-1, model=1\): .* one may",
        ),
        ((3, 1), (2, 1), r"ici_mesh_shape \(data=3.*dcn_mesh_shape \(data=2.*6 devices and .* 8"),
        ((1, 2), (4, 1), r"\(data=4, model=1\) spans 4 .* in 2 slice\(s\) and 1 process\(es\)"),
    ],
)
def test_hybrid_shapes_that_do_not_fit(ici, dcn, message):
    gpus = [Device(i, slice_index=i // 4) for i in range(8)]
    with pytest.raises(MeshError, match=message):
        build_mesh(HybridMeshShape(ici, dcn), ("data", "model"), gpus)


def test_layouts_that_do_not_fit():
    mesh = build_mesh((4, 1), ("data", "model"), devices(4))
    with pytest.raises(MeshError, match=r"m.w is laid out as .* no axis \['expert'\]; it has"):
        named_sharding(mesh, PartitionSpec("expert"), "m.w")
    sharding = named_sharding(mesh, PartitionSpec(None, ("data", "model")), "m.w")
    check_divides("m.w", (3, 8), sharding)
    with pytest.raises(
        MeshError, match=r"m.w of shape \(3, 6\) .* axis 1 of size 6 .* data×model = 4"
    ):
        check_divides("m.w", (3, 6), sharding)


class Doubled(ConfigModifier):
    def __call__(self, cfg):
        cfg.mesh_shape = (2 * cfg.mesh_shape[0],)
        return cfg


class Replaced(ConfigModifier):
    def __call__(self, cfg):
        return types.SimpleNamespace(mesh_shape=(1,))


def test_rules_choose_by_hardware():
    cfg = types.SimpleNamespace(
        mesh_shape=(1,),
        mesh_rules=[
            ("gpu-.*", (8,)),
            ("tpu-v4", None),
            ("tpu-v5p", Doubled.default_config()),
            ("tpu-v6", Replaced.default_config()),
            (".*", (2,)),
        ],
    )
    select_mesh_config(cfg, mesh_selector="tpu-v4")
    assert cfg.mesh_shape == (1,)
    select_mesh_config(cfg, mesh_selector="gpu-h100")
    assert cfg.mesh_shape == (8,)
    select_mesh_config(cfg, mesh_selector="tpu-v5p")
    assert cfg.mesh_shape == (16,)
    with pytest.raises(ConfigModifierError, match=r"mesh_rules\['tpu-v6'\]: Replaced returned"):
        select_mesh_config(cfg, mesh_selector="tpu-v6")
    cfg.mesh_rules = None
    select_mesh_config(cfg, mesh_selector="cpu")
    assert cfg.mesh_shape == (16,)
