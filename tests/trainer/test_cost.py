"""Python cost of the same decoder in each API, and of a step of the trainer, counted.

Counts do not depend on how busy the machine is. The bounds are a tenth above what was counted on
Python 3.11; for how counts depend on its version, see `benchmarks.frame.counting`.
"""

import jax
import jax.numpy as jnp
import pytest

import weft
from benchmarks.frame.counting import (
    Calls,
    Instructions,
    calls,
    equations,
    instructions,
    operations,
)
from tests.keys import quick_key
from tests.trainer.language_models import NNXLM, VOCAB, HierarchyLM, LinenLM
from weft import nnx
from weft.config import config_for_function
from weft.hierarchy.module import functional
from weft.input.fake import FakeLmInput
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.hooks import Hook
from weft.trainer.learner import Learner
from weft.trainer.optimizers import adamw_optimizer
from weft.trainer.trainer import SpmdTrainer

WEFT = weft.__path__[0]
BATCH = {name: jnp.zeros((2, 8), "int32") for name in ("input_ids", "target_labels")}
KEY = jax.random.key(0)


def of_hierarchy(n):
    model = HierarchyLM.default_config().set(name="m", num_layers=n).instantiate(parent=None)
    params = jax.eval_shape(model.initialize_parameters_recursively, KEY)

    def loss(params, batch):
        inputs = {"input_batch": batch}
        return functional(model, KEY, params, inputs, is_training=True)[0][0]

    return jax.jit, loss, params


def of_linen(n):
    model = LinenLM(n)
    params = jax.eval_shape(model.init, KEY, BATCH)
    return jax.jit, lambda params, batch: model.apply(params, batch)[0], params


def of_nnx(n):
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: NNXLM(n, rngs=nnx.Rngs(0)))
    return nnx.jit, lambda model, batch: model(batch)[0], model


def tracing(make, n):
    """Traces a model of n layers, each time as a function that is found in no cache."""
    jit, loss, params = make(n)

    def trace():
        new = object()

        def step(params, batch):
            assert new is not None
            return loss(params, batch)

        return jit(step).trace(params, BATCH)

    return trace


# For each further layer of the decoder, in Weft: calls and instructions; equations of the jaxpr,
# operations of the program.
COSTS = {
    "hierarchy": (of_hierarchy, 1480, 50_600, 119, 153),
    "linen": (of_linen, 1290, 32_600, 113, 153),
    "nnx": (of_nnx, 2590, 72_800, 115, 149),
}


@pytest.mark.parametrize("way", COSTS)
def test_each_layer_of_a_decoder_that_is_traced(way):
    make, *at_most = COSTS[way]

    def cost(n):
        trace = tracing(make, n)
        traced = trace()
        return (
            calls(trace, 1, of=WEFT),
            instructions(trace, of=WEFT),
            equations(traced.jaxpr),
            sum(operations(traced.lower().as_text()).values()),
        )

    per_layer = [(b - a) / 2 for a, b in zip(cost(1), cost(3), strict=True)]
    assert all(x <= bound for x, bound in zip(per_layer, at_most, strict=True)), per_layer


class Counted(Hook):
    """Cost of a step, from the end of one to the end of the next."""

    def __init__(self):
        self.counters = [Calls(WEFT), Instructions(WEFT)]
        self.after = dict(zip((4, 7), self.counters, strict=True))
        self.open = None

    def on_step(self, step, outputs, batch):
        if self.open:
            self.open.__exit__()
        self.open = self.after.get(step)
        if self.open:
            self.open.__enter__()


def step_of_trainer(num_layers, directory):
    optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=1e-2, b1=0.9, b2=0.95, eps=1e-8
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(directory),
        model=HierarchyLM.default_config().set(num_layers=num_layers),
        learner=Learner.default_config().set(optimizer=optimizer),
        input=FakeLmInput.default_config().set(
            is_training=True, global_batch_size=8, source_length=8, max_token_id=VOCAB
        ),
        max_step=9,
        mesh_shape=(1, 1),
        mesh_axis_names=("data", "model"),
    )
    cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=10**6)
    listener = Counted()
    cfg.instantiate(parent=None, devices=jax.devices()[:1]).run(
        quick_key(0), listener=listener, progress=False
    )
    return [counter.count for counter in listener.counters]


@pytest.mark.long
def test_step_of_the_trainer(tmp_path):
    (calls, instructions), larger = (step_of_trainer(n, tmp_path / str(n)) for n in (1, 2))
    assert calls <= 195 and instructions <= 6300
    # However many arrays there are: a layer has twelve parameters, each present three times.
    assert larger[1] == instructions
    assert abs(larger[0] - calls) <= 10  # a step may look again whether the one before has ended
