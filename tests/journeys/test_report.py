"""What a user's own model shows while it trains, and the report that it leaves."""

import errno
import io
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft import linen as nn
from weft.cli import main
from weft.config import config_for_class, config_for_function
from weft.errors import UndefinedLossException
from weft.hierarchy import WeightedScalar
from weft.input.fake import fake_source
from weft.input.grain import Input, per_feed_batch
from weft.trainer import Hook, Learner, SpmdEvaler, SpmdTrainer
from weft.trainer.evaler import every_n_steps_policy
from weft.trainer.optimizers import sgd_optimizer

pytestmark = pytest.mark.usefixtures("one_device")


class Logistic(nn.Module):
    scale: float = 1.0

    @nn.compact
    def __call__(self, input_batch):
        logits = self.scale * nn.Dense(10)(input_batch["pixels"])
        label = input_batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()
        right = jnp.mean(jnp.argmax(logits, -1) == label)
        self.sow("summaries", "accuracy", WeightedScalar(right, len(label)))
        return loss, {"logits": logits}


def images(is_training: bool):
    from sklearn.datasets import load_digits  # slow, and every collection would import it

    data = load_digits()
    rows = range(256) if is_training else range(256, 320)
    examples = [
        {"pixels": np.float32(data.data[i] / 16), "label": np.int32(data.target[i])} for i in rows
    ]
    source = fake_source(is_training, examples, repeat=None if is_training else 1)

    def build_dataset(dispatch_config):
        return per_feed_batch(
            source(dispatch_config), global_batch_size=32, dispatch_config=dispatch_config
        )

    return build_dataset


def input_config(is_training):
    source = config_for_function(images).set(is_training=is_training)
    return Input.default_config().set(source=source)


def trainer(directory, *, learning_rate=0.5, scale=1.0, max_step=20):
    optimizer = config_for_function(sgd_optimizer).set(
        learning_rate=learning_rate, decouple_weight_decay=True
    )
    evaler = SpmdEvaler.default_config().set(
        input=input_config(is_training=False),
        eval_policy=config_for_function(every_n_steps_policy).set(n=10),
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(directory),
        max_step=max_step,
        model=config_for_class(Logistic).set(scale=scale),
        learner=Learner.default_config().set(optimizer=optimizer),
        input=input_config(is_training=True),
        evalers={"held_out": evaler},
        mesh_shape=(1,),
        mesh_axis_names=("data",),
    )
    return cfg.instantiate(parent=None, devices=jax.devices()[:1])


class Steps(Hook):
    def __init__(self):
        self.seen = []

    def on_step(self, step, outputs, batch):
        self.seen.append(step)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "plain"
    trainer(directory).run(progress=False)
    return directory


def test_own_model_shows_progress_on_standard_error(tmp_path, capsys):
    listener = Steps()
    trainer(tmp_path / "run").run(listener=listener)
    out, err = capsys.readouterr()
    assert out == "" and "\x1b" not in err
    assert "model      650 parameters, 2.6 kB" in err
    assert re.search(r"step \d+/20  loss [\d.]+  accuracy 0.*  0:0\d elapsed", err)
    assert re.search(r"step 20  held_out: loss [\d.]+, accuracy 0", err)
    assert "\nstep 20/20  loss " in err
    assert f"report     {tmp_path / 'run' / 'report.html'}" in err
    assert listener.seen == list(range(1, 21))


def test_silent_run_leaves_a_report(run_dir, tmp_path, capsys):
    trainer(tmp_path / "run").run(progress=False)
    assert capsys.readouterr() == ("", "")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for part in (
        "20 steps, finished",
        "650",
        "train, averaged",
        "step 20 · train, averaged",
        "held_out",
    ):
        assert part in page, part


def test_run_ends_though_its_progress_cannot_be_printed(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    assert trainer(tmp_path / "run").run()["loss"] < 3


def test_report_names_the_error_that_ended_the_run(tmp_path):
    with pytest.raises(UndefinedLossException):
        trainer(tmp_path / "run", scale=1e30, learning_rate=1e30).run(progress=False)
    assert "UndefinedLossException: " in (tmp_path / "run" / "report.html").read_text(
        encoding="utf-8"
    )


def test_report_while_the_run_goes_on(tmp_path, capsys):
    directory, pages = tmp_path / "run", []

    class Reader(Hook):
        def on_eval(self, name, step, summaries):
            assert main(["report", str(directory)]) == 0
            pages.append((directory / "report.html").read_text(encoding="utf-8"))

    trainer(directory).run(progress=False, listener=Reader())
    assert "not ended" in pages[0] and "not ended" not in (directory / "report.html").read_text(
        encoding="utf-8"
    )
    assert capsys.readouterr().out == f"report     {directory / 'report.html'}\n" * 2


def test_two_runs_are_compared(run_dir, tmp_path, monkeypatch, capsys):
    trainer(tmp_path / "slow", learning_rate=0.01).run(progress=False)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run_dir), "slow"]) == 0
    assert capsys.readouterr().out == "report     comparison.html\n"
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    for part in ("plain and slow", "held_out accuracy", "learner.optimizer.learning_rate", "0.01"):
        assert part in page, part
    assert main(["report", "slow", "--out", "/dev/null/page.html"]) == 2
    assert "Name another file with --out." in capsys.readouterr().err
