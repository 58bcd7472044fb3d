import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import MissingExtraError
from weft.hierarchy.summary import AudioSummary, ImageSummary
from weft.trainer.wandb_writer import WandBWriter


class Shown:
    def __init__(self, value, **kwargs):
        self.value, self.kwargs = value, kwargs


class FakeWandb(types.ModuleType):
    """Records what wandb is asked to do; the real one needs an account or a service process."""

    def __init__(self):
        super().__init__("wandb")
        self.init_kwargs, self.logged, self.configs, self.finished = [], [], [], 0
        self.Image, self.Audio, self.Histogram, self.Settings = (
            type(name, (Shown,), {}) for name in ("Image", "Audio", "Histogram", "Settings")
        )
        self.Settings.__init__ = lambda self, **kwargs: setattr(self, "kwargs", kwargs)
        self.config = types.SimpleNamespace(
            update=lambda config, allow_val_change: self.configs.append(config)
        )

    def init(self, **kwargs):
        self.init_kwargs.append(kwargs)

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def make(path, **kwargs):
    cfg = WandBWriter.default_config().set(name="writer", dir=str(path), **kwargs)
    return cfg.instantiate(parent=None)


def test_without_the_package_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"writer: WandBWriter.*pip install 'weft\[wandb\]"):
        make(tmp_path)


def test_the_run_is_started_as_the_config_says(tmp_path, wandb):
    make(
        tmp_path,
        exp_name="first",
        project="p",
        tags=("a", "b"),
        mode="offline",
        wandb_settings_kwargs={"silent": True},
    )
    (kwargs,) = wandb.init_kwargs
    assert kwargs["settings"].kwargs == {"silent": True}
    assert (kwargs["name"], kwargs["project"], kwargs["tags"]) == ("first", "p", ["a", "b"])
    assert (kwargs["mode"], kwargs["dir"], kwargs["entity"]) == ("offline", str(tmp_path), None)


def test_training_that_is_started_again_goes_on_with_its_run(tmp_path, wandb):
    make(tmp_path)
    make(tmp_path)
    make(tmp_path / "other", resume="must", wandb_dir="/w")
    first, again, other = wandb.init_kwargs
    assert first["id"] == again["id"] != other["id"]
    assert (again["resume"], other["resume"], other["dir"]) == ("allow", "must", "/w")


def test_summaries_of_every_kind(tmp_path, wandb):
    writer = make(tmp_path, prefix="train", write_every_n_steps=5)
    values = {
        "loss": jnp.array(2.0),
        "model": {"w": np.ones((2, 2)), "text": "hi"},
        "image": ImageSummary(jnp.zeros((2, 3, 3, 1))),
        "sound": AudioSummary(jnp.zeros((1, 9, 1)), sample_rate=100),
    }
    writer(4, values)
    writer(5, values)
    ((step, logged),) = wandb.logged
    assert step == 5
    assert (logged["train/loss"], logged["train/model/text"]) == (2.0, "hi")
    assert isinstance(logged["train/model/w"], wandb.Histogram)
    assert [image.value.shape for image in logged["train/image"]] == [(3, 3, 1), (3, 3, 1)]
    assert logged["train/sound"][0].kwargs == {"sample_rate": 100}


def test_matrices_as_images(tmp_path, wandb):
    writer = make(tmp_path, convert_2d_to_image=True)
    writer(1, {"attention": np.ones((2, 2)), "vector": np.ones(3)})
    logged = wandb.logged[0][1]
    assert isinstance(logged["attention"], wandb.Image)
    assert isinstance(logged["vector"], wandb.Histogram)


def test_config_step_times_and_the_end(tmp_path, wandb):
    writer = make(tmp_path)
    cfg = WandBWriter.default_config().set(
        tags=["a", "b"],
        wandb_settings_kwargs={"inner": config_for_function(round), "dtype": jnp.float32},
    )
    writer.log_config(cfg)
    (config,) = wandb.configs
    assert config["klass"] == "'weft.trainer.wandb_writer.WandBWriter'"
    assert (config["dir"], config["tags"], config["prefix"]) == ("REQUIRED", ["a", "b"], None)
    assert config["wandb_settings_kwargs"]["inner"]["number"] == "REQUIRED"
    assert isinstance(config["wandb_settings_kwargs"]["dtype"], str)
    writer.log_average_step_time(3, [1.0, 2.0])
    writer.log_average_step_time(4, [])
    assert wandb.logged == [(3, {"average_step_time": 1.5})]
    writer.close()
    assert wandb.finished == 1
