import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from weft.cli.collectives import collectives_of
from weft.errors import MeshError, TopologyError
from weft.inference.runner import InferenceRunner
from weft.recipes.lm import lm_tiny
from weft.trainer.aot_compilation import (
    aot_model_analysis,
    compile_inference_programs,
    compile_trainer_programs,
    get_devices_for_topology,
    reshape_devices,
)

needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def tiny():
    cfg = lm_tiny().set(dir="", evalers={}, mesh_shape=(4, 2))
    cfg.model.decoder.transformer.num_layers = 1
    cfg.input.source.sequence_length = 16
    return cfg


@needs_eight
@pytest.mark.long
def test_train_step_is_compiled_for_a_topology():
    cfg = tiny()
    (name, program), *others = compile_trainer_programs(cfg, topology="cpu-8").items()
    assert (name, others) == ("train_step", [])
    analysis = aot_model_analysis(program)
    assert "temp: " in analysis
    trainer = cfg.clone().instantiate(parent=None, devices=jax.devices()[:8])
    assert f"floating-point operations: {trainer.train_step_flops() / 8:.3e}" in analysis
    # More than those that the model needs: a layer is in a loop, but its operations all count.
    assert trainer.train_step_flops() >= 0.95 * trainer.model_flops()
    text = program.as_text() or ""
    axes = {c.axes({"data": 4, "model": 2}) for c in collectives_of(text)}
    assert {("data",), ("model",)} <= axes
    assert cfg.name == "trainer"  # the input is not changed
    cfg.instantiate(parent=None, devices=jax.devices()[:8])


def prefixes(rows):
    return {"prefix": jax.ShapeDtypeStruct((rows, 4), "int32")}


@needs_eight
@pytest.mark.long
def test_method_of_a_model_is_compiled_without_its_parameters():
    cfg = InferenceRunner.config_from_trainer(tiny())
    programs = compile_inference_programs(
        cfg, input_batch_spec=prefixes(8), topology="cpu-8", method="sample_decode"
    )
    assert list(programs) == ["sample_decode"]
    _, params, batch = programs["sample_decode"].input_shardings[0]
    assert batch["prefix"].spec[0] == ("data", "model")
    assert params["decoder"]["emb"]["token_emb"]["weight"].spec[1] == "model"


@needs_eight
def test_indivisible_batch():
    cfg = InferenceRunner.config_from_trainer(tiny())
    with pytest.raises(MeshError, match=r"input_batch_spec prefix of shape .* does not divide"):
        compile_inference_programs(cfg, input_batch_spec=prefixes(3), topology="cpu-8")


def test_more_devices_than_available_in_a_new_process(python_server):
    code = (
        "from weft.trainer.aot_compilation import get_devices_for_topology\n"
        "print(len(get_devices_for_topology('cpu-24', 2)))"
    )
    with python_server.start("-c", code) as process:
        assert process.stdout.read().split() == ["48"]


@pytest.mark.long
def test_programs_for_more_devices_than_xla_counts_for_one_process(python_server):
    code = """
import jax, numpy as np
from weft.trainer.aot_compilation import get_devices_for_topology
devices = get_devices_for_topology("cpu-2050")
sharding = jax.NamedSharding(jax.make_mesh((2050,), ("fsdp",), devices=devices), jax.P("fsdp"))
x = jax.ShapeDtypeStruct((4100, 3), np.float32, sharding=sharding)
text = jax.jit(lambda x: x.sum()).lower(x).compile().as_text()
print(len(devices), "all-reduce(" in text, jax.process_count(), jax.distributed.is_initialized())
"""
    with python_server.start("-c", code) as process:
        assert process.stdout.read().split() == ["2050", "True", "1", "False"]


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5p-127", "unknown topology 'v5p-127'.*v5p-128.*'cpu-64'"),
        ("cpu-0", "unknown topology 'cpu-0'"),
        ("cpu-99999999999999999999", "and there can be 1,048,576"),
        (
            "cpu-1024",
            "1024 virtual CPU devices .* already created .*; request them before JAX is used, or",
        ),
    ],
)
def test_unknown_topologies(topology, message):
    jax.devices()
    with pytest.raises(TopologyError, match=message):
        get_devices_for_topology(topology)


def test_compiler_that_another_process_uses(monkeypatch):
    def refuse(**_):
        # As libtpu does.
        raise RuntimeError("ABORTED: Internal error when accessing libtpu multi-process lockfile.")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(importlib.util, "find_spec", {"libtpu": "its specification"}.get)
    with pytest.raises(
        TopologyError, match=r"lockfile\. libtpu is installed, but only one"
    ) as info:
        get_devices_for_topology("v5p-8")
    assert "pip install" not in str(info.value)


@pytest.mark.skipif(bool(importlib.util.find_spec("libtpu")), reason="libtpu is installed")
def test_without_the_compiler_of_a_topology():
    with pytest.raises(
        TopologyError, match=r"pip install 'jax\[tpu\]'.*virtual CPU devices: 'cpu-64'"
    ):
        get_devices_for_topology("tpu-v5p-128")


@needs_eight
def test_devices_in_the_shape_of_a_mesh():
    devices = jax.devices()[:8]
    grid = reshape_devices(devices=devices, mesh_shape=(1, 4, 2), devices_per_slice=4, num_slices=2)
    ids = np.vectorize(lambda device: device.id)(grid)
    # The slices of devices 0 to 3 and 4 to 7 lie along the first axis that two divide.
    assert ids.tolist() == [[[0, 1], [2, 3], [4, 5], [6, 7]]]


@needs_eight
@pytest.mark.parametrize(
    ("shape", "per_slice", "slices", "message"),
    [
        ((4, 4), 4, 2, r"mesh_shape=\(4, 4\) has 16 places for 8 devices"),
        ((4, 2), 2, 2, "8 devices in num_slices=2 slices of devices_per_slice=2"),
        ((8,), 2, 3, "in num_slices=3"),
    ],
)
def test_mismatched_devices(shape, per_slice, slices, message):
    with pytest.raises(TopologyError, match=message):
        reshape_devices(
            devices=jax.devices()[:8],
            mesh_shape=shape,
            devices_per_slice=per_slice,
            num_slices=slices,
        )


def test_indivisible_slices():
    with pytest.raises(MeshError, match=r"form 4 slices, and no axis of mesh_shape=\(2, 2\)"):
        reshape_devices(devices=range(4), mesh_shape=(2, 2), devices_per_slice=1, num_slices=4)
