"""The Linen network classifies digits, and its statistics are carried as state."""

import sys

import jax
import numpy as np
import pytest

from weft.errors import MissingExtraError
from weft.input.grain import DispatchConfig
from weft.recipes.digits import digits, digits_source


@pytest.mark.long
def test_held_out_accuracy_exceeds_95_percent_in_a_third_of_the_steps(tmp_path):
    cfg = digits().set(dir=str(tmp_path), max_step=70, mesh_shape=(1, 1))
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    summaries = trainer.run(return_evaler_summaries=True)["evaler_summaries"]["held_out"]
    assert summaries["accuracy"].mean > 0.95
    assert summaries["accuracy"].weight == 359  # without what fills up the last batch
    statistics = trainer.trainer_state.model["batch_stats"]["BatchNorm_0"]
    assert np.all(np.asarray(statistics["mean"]) != 0)


def batches(split, is_training, size=64, num=3, part=(0, 1)):
    source = digits_source(split=split, global_batch_size=size, is_training=is_training)
    iterator = iter(source(DispatchConfig(*part)))
    return [batch for batch, _ in zip(iterator, range(num), strict=False)]


def test_each_held_out_image_occurs_once():
    (first, second, third) = batches("held_out", is_training=False, size=128, num=9)
    assert first["image"].shape == (128, 8, 8, 1)
    labels = np.concatenate([first["label"], second["label"], third["label"]])
    assert (labels >= 0).sum() == 359
    assert set(labels[-25:]) == {-1}


def test_batches_do_not_depend_on_the_number_of_processes():
    whole = batches("train", is_training=True)
    parts = [batches("train", is_training=True, part=(i, 2)) for i in range(2)]
    for k, batch in enumerate(whole):
        images = np.concatenate([part[k]["image"] for part in parts])
        np.testing.assert_array_equal(images, batch["image"])


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        MissingExtraError, match=r"scikit-learn.*pip install 'weft-jax\[examples\]'"
    ):
        digits_source(split="train", global_batch_size=8, is_training=True)
