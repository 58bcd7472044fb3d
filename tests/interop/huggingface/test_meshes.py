"""Folders onto meshes: models that generate no text, and meshes of several processes."""

import subprocess
from typing import Any

import jax
import numpy as np
import pytest

from tests.flags import xla_flags
from tests.interop.huggingface.test_loading import LLAMA, mesh_of, write
from tests.sockets import free_port
from weft.cli import main
from weft.hierarchy.module import functional
from weft.interop.huggingface import from_huggingface

ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = np.arange(64).reshape(8, 8) % 40
# Settings of models that generate no text, and a batch of each.
OTHERS = {
    "bert": (
        {"architectures": ["BertForMaskedLM"], "vocab_size": 64, **ENCODER},
        {"input_ids": IDS},
    ),
    "vit": (
        {
            "architectures": ["ViTForImageClassification"],
            "num_labels": 4,
            "image_size": 12,
            "patch_size": 4,
            **ENCODER,
        },
        {"image": np.sin(np.arange(8 * 12 * 12 * 3, dtype=np.float32)).reshape(8, 12, 12, 3)},
    ),
    "t5": (
        {
            "architectures": ["T5ForConditionalGeneration"],
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        {"source_ids": IDS, "input_ids": IDS[:, ::-1]},
    ),
}


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "model": 4}, {"data": 4, "fsdp": 2}], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_models_that_generate_no_text_on_a_mesh(tmp_path, name, sizes, capsys):
    settings, batch = OTHERS[name]
    params = write(tmp_path, {"model_type": name, **settings})
    mesh = mesh_of(**sizes)
    cfg, loaded = from_huggingface(tmp_path, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    stack: Any = loaded["decoder" if name == "t5" else "encoder"]
    weight = stack["transformer"]["repeat"]["layer"]["feed_forward"]["linear1"]["weight"]
    layout = (None, "fsdp", "model" if "model" in sizes else None)
    assert tuple(weight.sharding.spec) == layout
    with jax.set_mesh(mesh):
        sharded = logits(cfg, loaded, batch)
    expected = logits(*from_huggingface(tmp_path), batch)
    np.testing.assert_allclose(sharded, expected, atol=1e-3)

    words = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    assert main(["inspect", str(tmp_path), "--mesh", words]) == 0
    row = next(x for x in capsys.readouterr().out.splitlines() if "linear1.weight" in x)
    assert row.rstrip().endswith(f"(-, fsdp, {layout[2] or '-'})")


def logits(cfg, params, batch):
    model = cfg.clone(name="model").instantiate(parent=None)

    def predict(params):
        outputs, _ = functional(model, None, params, (batch,), method="predict", is_training=False)
        return outputs["logits"]

    return jax.jit(predict)(params)


PROGRAM = """
import sys

import jax
import numpy as np

from weft.hierarchy.module import functional
from weft.interop.huggingface import from_huggingface
from weft.serialization.safetensors import TensorFiles

folder, port, index = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(index))
assert jax.local_device_count() == 4 and jax.device_count() == 8
mesh = jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

read, num_read = TensorFiles.read, 0

def counted(files, name, index=None):
    global num_read
    values = read(files, name, index)
    num_read += values.size
    return values

TensorFiles.read = counted
cfg, params = from_huggingface(folder, mesh=mesh)
leaves = jax.tree.leaves(params)
num_values = sum(x.size for x in leaves)
for x in leaves:
    shards = {str(shard.index): shard.data for shard in x.addressable_shards}
    num_held = sum(data.size for data in shards.values())
    assert len(shards) < 2 or num_held == x.size // 2, x.sharding
assert num_values / 2 <= num_read < num_values * 0.55, (num_read, num_values)

batch = {"input_ids": np.arange(16).reshape(8, 2) + 2}
model = cfg.clone(name="model").instantiate(parent=None)

def predict(params):
    outputs, _ = functional(model, None, params, (batch,), method="predict", is_training=False)
    return outputs["logits"]

everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
with jax.set_mesh(mesh):
    logits = jax.jit(predict, out_shardings=everywhere)(params)
np.save(f"{folder}/logits_{index}.npy", np.asarray(logits))
"""


@pytest.mark.long
def test_each_process_reads_and_holds_its_part(python_server, tmp_path):
    write(tmp_path, LLAMA)
    port, env = free_port(), {"XLA_FLAGS": xla_flags(4)}
    processes = [
        python_server.start("-c", PROGRAM, tmp_path, port, i, env=env, stderr=subprocess.PIPE)
        for i in (0, 1)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, output + errors
    batch = {"input_ids": np.arange(16).reshape(8, 2) + 2}
    expected = logits(*from_huggingface(tmp_path), batch)
    for i in (0, 1):
        of_process = np.load(tmp_path / f"logits_{i}.npy")
        np.testing.assert_allclose(of_process, expected, atol=2e-4)
