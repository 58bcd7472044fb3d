"""Loading of folders: what is read at a time, and onto which devices."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import MeshError
from weft.functional import dequantize_weight, quantize_weight
from weft.hierarchy import set_partition_specs_recursively, set_weight_format_recursively
from weft.hierarchy.module import functional
from weft.interop.huggingface import (
    from_huggingface,
    huggingface_model_config,
    load_huggingface_params,
    parameter_shapes,
    to_huggingface,
)
from weft.interop.huggingface.checkpoint import _family, _settings
from weft.interop.huggingface.tensors import tensor_locations
from weft.serialization import array_parts
from weft.serialization.safetensors import TensorFiles, tensor_names

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "eos_token_id": 1,
}
PHI3 = {**LLAMA, "model_type": "phi3", "num_key_value_heads": 2}


def write(folder, settings, **options):
    """Writes a checkpoint of random numbers, and returns them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    cfg = huggingface_model_config(folder)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: random.normal(size=x.shape).astype(np.float32), parameter_shapes(cfg)
    )
    to_huggingface(folder, cfg, params, base=folder, **options)
    return params


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Returns the folder of a Llama and its parameters."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, write(folder, LLAMA)


@pytest.mark.parametrize("weight_format", [None, "int8"])
def test_host_holds_one_tensor_at_a_time(tmp_path, monkeypatch, weight_format):
    sizes = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 16}
    params = write(tmp_path, {**LLAMA, **sizes}, max_shard_bytes=2**24)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    cfg = huggingface_model_config(tmp_path)
    set_weight_format_recursively(cfg, weight_format)
    target = parameter_shapes(cfg)
    monkeypatch.setattr(array_parts, "MAX_HOST_BYTES", 0)
    load_huggingface_params(tmp_path, target)  # compiles
    tracemalloc.start()
    try:
        loaded = load_huggingface_params(tmp_path, target)
        _, most_bytes = tracemalloc.get_traced_memory()  # of Python and NumPy, not of devices
    finally:
        tracemalloc.stop()
    if weight_format is None:
        jax.tree.map(np.testing.assert_array_equal, loaded, params)
    tensor_bytes = 128 * 1024 * 4
    largest_parameter = max(x.nbytes for x in jax.tree.leaves(params))
    # The program itself needs less than a megabyte.
    assert tensor_bytes < most_bytes < 2 * tensor_bytes + 2**20 < largest_parameter / 3


@pytest.mark.parametrize("settings", [LLAMA, PHI3], ids=lambda x: x["model_type"])
def test_part_of_a_tensor_is_read_alone(tmp_path, settings, monkeypatch):
    """As the devices of one process hold it: half of one axis, or of two."""
    params = write(tmp_path, settings)
    read = TensorFiles.read
    num_read = []

    def counted(files, name, index=None):
        values = read(files, name, index)
        num_read.append(values.size)
        return values

    monkeypatch.setattr(TensorFiles, "read", counted)
    settings_of_file = _settings(tmp_path)
    family = _family(settings_of_file)
    locations = tensor_locations(family, settings_of_file, dict(tensor_names(params)))
    with TensorFiles(tmp_path) as files:
        for location in locations:
            name, index = list(location.pieces(family.prefix))[-1]
            piece = location.parameter[index]
            for axes in [(0,), (piece.ndim - 1,), (0, 1)]:
                box = [slice(0, size) for size in piece.shape]
                for axis in axes:
                    if axis < piece.ndim:
                        box[axis] = slice(piece.shape[axis] // 2, piece.shape[axis])
                values = location.read(files, name, tuple(box))
                np.testing.assert_array_equal(values, piece[tuple(box)])
                # Parts of each head are not next to each other.
                if axes == (0,) or piece.ndim < 3:
                    assert num_read[-1] == values.size
                assert num_read[-1] < piece.size


@pytest.mark.parametrize(("weight_format", "max_host_bytes"), [("int8", 0), ("nf4", 2**26)])
def test_weights_are_rounded_as_they_are_read(llama, weight_format, max_host_bytes, monkeypatch):
    folder, params = llama
    monkeypatch.setattr(array_parts, "MAX_HOST_BYTES", max_host_bytes)
    cfg = huggingface_model_config(folder)
    set_weight_format_recursively(cfg, weight_format)
    loaded = load_huggingface_params(folder, parameter_shapes(cfg))
    layer = loaded["decoder"]["transformer"]["repeat"]["layer"]["feed_forward"]["linear2"]
    weight = params["decoder"]["transformer"]["repeat"]["layer"]["feed_forward"]["linear2"]
    expected = quantize_weight(jnp.asarray(weight["weight"], jnp.bfloat16), weight_format)
    np.testing.assert_array_equal(layer["weight_codes"], expected.codes)
    np.testing.assert_array_equal(layer["weight_scales"], expected.scales)
    assert dequantize_weight(expected).shape == weight["weight"].shape
    table = loaded["decoder"]["emb"]["token_emb"]["weight"]
    np.testing.assert_array_equal(table, params["decoder"]["emb"]["token_emb"]["weight"])
    assert loaded.keys() == from_huggingface(folder)[1].keys()


QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: np.prod(list(sizes.values()))])
    return jax.sharding.Mesh(devices.reshape(*sizes.values()), tuple(sizes))


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (LLAMA, {"fsdp": 2, "model": 4}),
        (QWEN3_MOE, {"data": 2, "expert": 2, "model": 2}),
        (PHI3, {"fsdp": 8}),
    ],
    ids=["llama", "experts", "phi3"],
)
def test_parameters_arrive_on_a_mesh(tmp_path, settings, sizes):
    params = write(tmp_path, settings)
    mesh = mesh_of(**sizes)
    cfg, loaded = from_huggingface(tmp_path, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    model = cfg.clone(name="model").instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    jax.tree.map(
        lambda x, spec: np.testing.assert_equal(x.sharding, spec.sharding(mesh)), loaded, specs
    )
    largest = max(jax.tree.leaves(loaded), key=lambda x: x.size)
    num_parts = largest.size // largest.addressable_shards[0].data.size
    assert num_parts == np.prod([sizes[name] for name in sizes if name != "data"])
    batch = {"input_ids": jnp.arange(16).reshape(8, 2) + 2}
    with jax.set_mesh(mesh):
        sharded = logits(cfg, loaded, batch)
    np.testing.assert_allclose(sharded, logits(*from_huggingface(tmp_path), batch), atol=2e-4)


def logits(cfg, params, batch):
    model = cfg.clone(name="model").instantiate(parent=None)

    @jax.jit
    def call(params):
        return functional(
            model, None, params, (batch,), method="extract_logits", is_training=False
        )[0]

    return call(params)


@pytest.mark.parametrize("weight_format", ["int8", "nf4"])
def test_codes_arrive_on_a_mesh(llama, weight_format):
    folder, _ = llama
    mesh = mesh_of(fsdp=2, model=2)
    cfg = huggingface_model_config(folder)
    set_weight_format_recursively(cfg, weight_format)
    one_device = load_huggingface_params(folder, parameter_shapes(cfg))
    set_partition_specs_recursively(cfg, mesh.axis_names)
    target = parameter_shapes(cfg, mesh)
    loaded = load_huggingface_params(folder, target)
    jax.tree.map(np.testing.assert_array_equal, loaded, one_device)
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.sharding, y.sharding), loaded, target)
    layer = loaded["decoder"]["transformer"]["repeat"]["layer"]["feed_forward"]["linear2"]
    assert layer["weight_codes"].sharding.spec[1:] == ("model", "fsdp")
    assert layer["weight_scales"].sharding.spec[1:] == ("model", None)


def test_meshes_that_do_not_fit(llama):
    folder, _ = llama
    with pytest.raises(MeshError, match=r"k_proj.weight of shape .*4 does not divide over model ="):
        from_huggingface(folder, mesh=mesh_of(model=8))
    message = r"the mesh has the axis 'modl', over .*; expected some of pipe.* mean 'model'\?"
    with pytest.raises(MeshError, match=message):
        from_huggingface(folder, mesh=mesh_of(modl=2))
