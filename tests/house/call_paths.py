"""Counts Weft's frames on the way to a function, and the Python calls of a training step."""

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import jax
import jax.numpy as jnp

import weft
from benchmarks.frame.counting import Calls
from weft import linen, nnx
from weft.config import config_for_function
from weft.hierarchy.base_layer import BaseLayer, BaseModel
from weft.hierarchy.layers import Linear
from weft.hierarchy.module import functional
from weft.hierarchy.repeat import Repeat
from weft.input.fake import FakeLmInput
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.hooks import Hook
from weft.trainer.learner import Learner
from weft.trainer.optimizers import sgd_optimizer
from weft.trainer.trainer import SpmdTrainer

WEFT = weft.__path__[0]
# A frame of Weft: its file, relative to the repository, and its function.
Frame = tuple[str, str]
# Weft's frames in the last path, innermost first.
_path: list[Frame] = []


def _record(caller: str) -> None:
    """Notes Weft's frames between this function's caller and the function `caller` of this file."""
    _path.clear()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != (
        __file__,
        caller,
    ):
        if frame.f_code.co_filename.startswith(WEFT):
            file = Path(frame.f_code.co_filename).relative_to(Path(WEFT).parent).as_posix()
            _path.append((file, frame.f_code.co_name))
        frame = frame.f_back


class _Block(linen.Module):
    def __call__(self, x, _=None):
        _record("call_lifted")
        return x, None


class _Caller(linen.Module):
    lift: Callable

    @linen.compact
    def __call__(self, x):
        return self.call_lifted(x)

    @linen.nowrap
    def call_lifted(self, x):
        return self.lift(_Block)()(x, None)


def _apply_linen(lift: Callable) -> None:
    _Caller(lift).apply({}, jnp.ones((2, 1)))


def _call_nnx(transform: Callable) -> None:
    def body(model, x):
        _record("_call_nnx")
        return model(x)

    transform(body)(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), jnp.ones((2, 1)))


class _Layer(BaseLayer):
    def forward(self, x):
        _record("call_repeated")
        return x


class _Repeated(Repeat):
    def forward(self, x):
        return self.call_repeated(x)

    def call_repeated(self, x):
        return self._run(lambda carry, _: (self.layer(carry), None), carry=x)


def _call_repeat() -> None:
    cfg = _Repeated.default_config().set(name="repeat", layer=_Layer.default_config(), num_layers=2)
    layer, key = cfg.instantiate(parent=None), jax.random.key(0)
    state = layer.initialize_parameters_recursively(key)
    functional(layer, key, state, {"x": jnp.ones(())}, is_training=True)


class _Model(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("linear", Linear.default_config().set(input_dim=1, output_dim=1))

    def forward(self, input_batch):
        _record("_train")
        x = input_batch["input_ids"][..., None].astype("float32")
        return self.linear(x).mean(), {}


class _StepCalls(Hook):
    """Counts the calls from the end of one warm step to the end of the next."""

    def __init__(self):
        self.counter = Calls(WEFT)

    def on_step(self, step, outputs, batch):
        if step == 4:
            self.counter.__enter__()
        elif step == 5:
            self.counter.__exit__()


def _train(directory: str) -> int:
    """Trains for some steps; returns the Python calls in Weft of one."""
    optimizer = config_for_function(sgd_optimizer).set(
        learning_rate=0.1, decouple_weight_decay=True
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=directory,
        model=_Model.default_config(),
        learner=Learner.default_config().set(optimizer=optimizer),
        input=FakeLmInput.default_config().set(
            is_training=True, global_batch_size=8, source_length=8, max_token_id=8
        ),
        max_step=6,
        mesh_shape=(1, 1),
        mesh_axis_names=("data", "model"),
    )
    cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=10**6)
    listener = _StepCalls()
    cfg.instantiate(parent=None, devices=jax.devices()[:1]).run(listener=listener, progress=False)
    return listener.counter.count


def paths() -> Iterator[tuple[str, list[Frame]]]:
    """Yields each call path with its frames in Weft, outermost first."""

    _apply_linen(lambda module: linen.scan(linen.remat(module), length=2))
    yield "nn.scan(nn.remat(Block)) in apply", _path[::-1]
    _apply_linen(lambda module: linen.vmap(module, in_axes=(0, None)))
    yield "nn.vmap(Module)", _path[::-1]
    _call_nnx(nnx.jit)
    yield "nnx.jit, first call", _path[::-1]
    _call_nnx(functools.partial(nnx.vmap, in_axes=(None, 0)))
    yield "nnx.vmap(f)", _path[::-1]
    _call_repeat()
    yield "Repeat to the child's forward", _path[::-1]


def trainer() -> tuple[list[Frame], int]:
    """Returns the frames from `run` to the model's forward, and the calls in Weft of a step."""
    with tempfile.TemporaryDirectory() as directory:
        calls = _train(directory)
    return _path[::-1], calls
