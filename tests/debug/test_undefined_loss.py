"""The message of an undefined loss names its cause first; each cause is made here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import nnx
from weft.config import config_for_class, config_for_function
from weft.debug.anomalies import check_loss
from weft.errors import UndefinedLossException
from weft.input import ArrayInput, Arrays
from weft.trainer import Learner, SpmdTrainer
from weft.trainer.optimizers import sgd_optimizer
from weft.trainer.summary_writer.base import NoOpWriter


class Tower(nnx.Module):
    """Looks up ids of ten words and regresses on them."""

    def __init__(self, fault: str, *, rngs: nnx.Rngs):
        self.fault = fault
        init = nnx.initializers.constant(jnp.inf) if fault == "init" else nnx.initializers.ones
        self.embed = nnx.Embed(10, 4, rngs=rngs)
        self.dense = nnx.Linear(5, 1, kernel_init=init, rngs=rngs)

    def __call__(self, input_batch):
        x = jnp.concatenate([self.embed(jnp.sort(input_batch["ids"])), input_batch["x"]], axis=-1)
        y = self.dense(x)
        if self.fault == "log":
            y = jnp.log(y - y)
        if self.fault == "half":  # XLA computes in float32 on a CPU
            y = jax.lax.reduce_precision(y * jnp.float32(1e6), exponent_bits=5, mantissa_bits=10)
        return jnp.mean(y.astype(jnp.float32) ** 2), {}


def message(tmp_path, fault, *, x=1.0, ids=9, rate=1e-3, **fields):
    """Returns the error of a run, without line breaks."""
    arrays = {"x": np.full((8, 1), x, np.float32), "ids": np.full(8, ids, np.int32)}
    optimizer = config_for_function(sgd_optimizer).set(
        learning_rate=rate, decouple_weight_decay=True
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(tmp_path),
        max_step=20,
        model=config_for_class(Tower).set(fault=fault),
        learner=Learner.default_config().set(optimizer=optimizer),
        input=ArrayInput.default_config().set(arrays=Arrays(arrays), global_batch_size=8),
        mesh_shape=(1,),
        mesh_axis_names=("data",),
        summary_writer=NoOpWriter.default_config(),
        **fields,
    )
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    with pytest.raises(UndefinedLossException) as error:
        trainer.run(progress=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("fault", "fields", "words"),
    [
        ("", {"x": np.nan}, "The batch has undefined numbers in x: look at the input first."),
        ("init", {}, "Initial parameters are undefined: params/dense/kernel. Look first at their"),
        ("", {"ids": 12}, "trainer.model.embed, a Embed (__call__). Look first at its ids, which"),
        ("log", {}, "Look there first for a logarithm or root of 0 or less"),
        ("half", {"train_dtype": jnp.float16}, "Look first at the range of float16, which ends at"),
    ],
    ids=["batch", "initializer", "ids", "logarithm", "half"],
)
def test_first_step(tmp_path, fault, fields, words):
    text = message(tmp_path, fault, **fields)
    assert words in text, text
    assert text.startswith("the loss after step 1 is ")
    if "ids" in fields:
        assert "the batch has ids from 12 to 12" in text


def test_learning_rate_of_a_later_step(tmp_path):
    text = message(tmp_path, "", rate=1e8)
    assert text.startswith("the loss after step 10 is nan; the last checkpoint predates it. The fi")
    assert "so look first at the learning rate, 1e+08 in this step: lower it" in text


def test_advice_is_for_undefined_losses_only():
    check_loss(jnp.ones(()), 3, look_first=pytest.fail)
    with pytest.raises(UndefinedLossException, match="the loss after step 3 is nan; the last chec"):
        check_loss(jnp.array(jnp.nan), 3)
