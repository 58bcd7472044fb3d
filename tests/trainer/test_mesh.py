import types

import jax
import pytest
from jax.sharding import PartitionSpec

from weft.errors import MeshError
from weft.trainer.mesh import build_mesh, check_divides, named_sharding, select_mesh_config


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


def test_rules_choose_by_hardware():
    cfg = types.SimpleNamespace(
        mesh_shape=(1,), mesh_rules=[("gpu-.*", (8,)), ("tpu-v4", None), (".*", (2,))]
    )
    select_mesh_config(cfg, mesh_selector="tpu-v4")
    assert cfg.mesh_shape == (1,)
    select_mesh_config(cfg, mesh_selector="gpu-h100")
    assert cfg.mesh_shape == (8,)
    cfg.mesh_rules = None
    select_mesh_config(cfg, mesh_selector="cpu")
    assert cfg.mesh_shape == (8,)
