"""What fine-tuning computes: which targets count, and the same on eight virtual devices."""

import json
import math
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.hierarchy.lora import adapter_state
from weft.hierarchy.module import functional
from weft.input.grain import DispatchConfig
from weft.interop.huggingface import (
    from_huggingface,
    huggingface_model_config,
    to_huggingface,
)
from weft.recipes import lm_lora
from weft.recipes.sft import sft
from weft.trainer.hooks import Hook
from weft.trainer.parallelism import ParallelismModifier

SMALL = {
    **lm_lora._LLAMA,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base of bytes, which needs no tokenizer, and data."""
    folder = tmp_path_factory.mktemp("devices")
    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    cfg = huggingface_model_config(base)
    model = cfg.clone(name="model").instantiate(parent=None)
    shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(float(x.ndim == 1), 0.2, x.shape), x.dtype), shapes
    )
    to_huggingface(base, cfg, params)
    rows = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}."} for a in range(8) for b in range(5)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "sums.jsonl").write_text(text, encoding="utf-8")
    return folder


class Losses(Hook):
    """The loss of each step, and the step that a run continued from."""

    def __init__(self):
        self.by_step, self.resumed_from = {}, None

    def on_start(self, trainer, resumed_from):
        self.resumed_from = resumed_from

    def on_step(self, step, outputs, batch):
        self.by_step[step] = float(outputs["loss"])


def trained(folder, directory=None, *, tuning="lora", steps=3, **axes):
    """Returns the trainer of a run on a mesh, and its losses."""
    cfg = sft(
        str(folder / "base"),
        str(folder / "sums.jsonl"),
        tuning=tuning,
        rank=2,
        sequence_length=16,
        batch_size=8,
        held_out=0.0,
        steps=3,
        learning_rate=0.02,
    )
    cfg.set(dir=str(directory or tempfile.mkdtemp(dir=folder)), max_step=steps)
    cfg.learner.optimizer.inner.learning_rate.max_step = 3
    # In bfloat16, sums in another order would be rounded to other values.
    cfg.model.set(dtype=jnp.float32, compute_dtype=None)
    count = math.prod(axes.values())
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    cfg = ParallelismModifier.default_config().set(**axes).instantiate()(cfg)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:count])
    losses = Losses()
    trainer.run(listener=losses, progress=False)
    return trainer, losses


def assert_same(run, expected):
    for step, loss in run[1].by_step.items():
        np.testing.assert_allclose(loss, expected[1].by_step[step], rtol=2e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-3),
        run[0].trainer_state.model,
        expected[0].trainer_state.model,
    )


@pytest.fixture(scope="module")
def alone(folder):
    run = trained(folder, data=1)
    adapters = adapter_state(run[0].trainer_state.model)
    assert all(np.asarray(x).any() for x in jax.tree.leaves(adapters))
    return run


@pytest.mark.long
def test_adapters_on_a_mesh_are_those_of_one_device(folder, alone):
    assert_same(trained(folder, fsdp=8), alone)


@pytest.mark.long
def test_adapters_continue_on_another_mesh(folder, alone, tmp_path):
    trainer, losses = trained(folder, tmp_path, steps=2, fsdp=4, model=2)
    feed_forward = trainer.trainer_state.model["decoder"]["transformer"]["repeat"]["layer"][
        "feed_forward"
    ]
    # Adapters are sharded as the weights are, and never over their rank.
    for linear, down, up in (
        ("linear1_0", (1, 4, 2), (1, 2, 8)),
        ("linear2", (1, 8, 2), (1, 2, 4)),
    ):
        adapter = feed_forward[linear]["adapter"]
        for name, shape in (("lora_down", down), ("lora_up", up)):
            assert adapter[name]["weight"].addressable_shards[0].data.shape == shape
    run = trained(folder, tmp_path, data=8)
    assert run[1].resumed_from == 2
    run[1].by_step.update(losses.by_step)
    assert list(run[1].by_step) == [3, 1, 2]
    assert_same(run, alone)


@pytest.mark.long
def test_all_parameters_on_a_mesh_are_those_of_one_device(folder):
    expected = trained(folder, tuning="full", data=1)
    assert_same(trained(folder, tuning="full", fsdp=4, model=2), expected)


# What counts.


@pytest.fixture(scope="module")
def packed(folder):
    """Returns a function for the gradient of a batch's loss, and a batch of two conversations."""
    rows = [{"prompt": "aba", "completion": "bcc"}, {"prompt": "xyx", "completion": "yzz"}]
    path = folder / "letters.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    cfg = sft(
        str(folder / "base"), str(path), tuning="full", sequence_length=16, held_out=0.0, steps=1
    )
    source = cfg.input.source.set(is_training=False).instantiate()
    batch = next(iter(source(DispatchConfig(shard_index=0, num_shards=1))))
    assert sorted(set(batch["input_segment_ids"][0].tolist())) == [0, 1, 2]
    model = cfg.model.clone(name="model").instantiate(parent=None)
    _, params = from_huggingface(folder / "base")

    @jax.jit
    def gradient(batch):
        def loss(params):
            inputs = {"input_batch": batch}
            return functional(model, None, params, inputs, is_training=False)[0][0]

        return jax.grad(loss)(params)

    return gradient, batch


def test_targets_of_prompts_change_no_gradient(packed):
    gradient, batch = packed
    is_prompt = ~batch["live_targets"]
    assert is_prompt[0, 0] and batch["live_targets"].sum() > 4
    expected = gradient(batch)
    # Other words there, of a neighbor too.
    labels = np.where(is_prompt, ord("q"), batch["target_labels"])
    changed = gradient({**batch, "target_labels": labels})
    jax.tree.map(np.testing.assert_array_equal, changed, expected)
    labels = np.where(is_prompt, batch["target_labels"], ord("q"))
    changed = gradient({**batch, "target_labels": labels})
    head = changed["decoder"]["lm_head"]["weight"] - expected["decoder"]["lm_head"]["weight"]
    assert np.abs(head).max() > 1e-3


@pytest.mark.parametrize("segment", [1, 2])
def test_packed_conversations_do_not_see_each_other(packed, segment):
    gradient, batch = packed
    is_of_segment = batch["input_segment_ids"] == segment
    of_segment = gradient({**batch, "live_targets": batch["live_targets"] & is_of_segment})
    embeddings = np.asarray(of_segment["decoder"]["emb"]["token_emb"]["weight"])
    letters = {
        1: set(batch["input_ids"][batch["input_segment_ids"] == 1].tolist()),
        2: set(batch["input_ids"][batch["input_segment_ids"] == 2].tolist()),
    }
    of_neighbor = letters[3 - segment] - letters[segment]
    assert len(of_neighbor) >= 3
    assert not embeddings[sorted(of_neighbor)].any()
    own_letters = letters[segment] - letters[3 - segment]
    assert all(embeddings[letter].any() for letter in own_letters)
