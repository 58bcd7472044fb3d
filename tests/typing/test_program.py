"""A program as users write it: pyright checks its types in strict mode, and it runs as a test."""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax  # pyright: ignore[reportMissingTypeStubs]

import weft
from weft import linen as nn
from weft import nnx
from weft.config import (
    REQUIRED,
    Required,
    config_class,
    config_for_class,
    config_for_function,
    maybe_instantiate,
)
from weft.hierarchy import BaseLayer, LayerNorm, Linear, Module, functional
from weft.trainer import FitResult, SpmdTrainer
from weft.training.train_state import EarlyStopping

Array = jax.Array


def ones(*shape: int) -> Array:
    return jnp.ones(shape)  # pyright: ignore[reportUnknownMemberType]


class Block(nnx.Module):
    def __init__(self, features: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(features, features, rngs=rngs)
        self.scale = nnx.Param(ones())
        self.n_calls = nnx.Variable(ones())

    def __call__(self, x: Array) -> Array:
        self.n_calls[...] += 1
        return nnx.relu(self.linear(x)) * self.scale

    @nnx.jit
    def scaled(self, x: Array) -> Array:
        return x @ self.linear.kernel * self.scale


def loss_of(model: Block, x: Array) -> Array:
    return jnp.mean(model(x) ** 2)


@nnx.jit
def train_step(model: Block, optimizer: nnx.Optimizer[Block], x: Array) -> Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    assert_type(loss, Array)
    optimizer.update(model, grads)
    return loss


def fitted(model: Block, x: Array) -> FitResult[Block]:
    result = weft.fit(model, (x, x), "mse", steps=1)
    assert_type(result.model, Block)
    assert_type(result.last.step, int)
    return result


def evaluated(trainer: SpmdTrainer) -> float:
    assert_type(trainer.run(), dict[str, Any] | None)
    summaries = trainer.run(return_evaler_summaries={"held_out"})
    assert_type(summaries, dict[str, Any])
    return trainer.run(return_evaler_summaries=True)["evaler_summaries"]["held_out"]["loss"].mean


@nnx.jit(static_argnames="factor", donate_argnums=0)
def multiply(x: Array, factor: float = 2.0) -> Array:
    return x * factor


@nnx.vmap(in_axes=(None, 0))
def per_example(model: Block, x: Array) -> Array:
    return model.scaled(x)


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def cumulative(total: Array, x: Array) -> tuple[Array, Array]:
    return total + x, total + x


@nnx.value_and_grad(has_aux=True)
def with_aux(model: Block, x: Array) -> tuple[Array, int]:
    return loss_of(model, x), 1


def test_nnx_objects_and_transformed_functions_keep_their_types():
    model, x = Block(4, rngs=nnx.Rngs(0)), ones(2, 4)
    assert_type(model.scale, nnx.Param[Array])
    assert_type(model.linear.kernel, nnx.Param[Array])
    assert_type(model.scale[...], Array)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = assert_type(train_step(model, optimizer, x), Array)
    assert train_step(model, optimizer, x) < before
    assert assert_type(multiply(ones(4), factor=3.0), Array)[0] == 3
    assert assert_type(model.scaled(x), Array).shape == (2, 4)
    assert assert_type(per_example(model, x), Array).shape == (2, 4)
    assert assert_type(nnx.vmap(jnp.sin)(x), Array).shape == (2, 4)
    assert assert_type(nnx.remat(loss_of)(model, x), Array).shape == ()
    total, totals = assert_type(cumulative(x[0], x), tuple[Array, Array])
    assert (total.shape, totals.shape) == ((4,), (2, 4))
    (loss, aux), _ = with_aux(model, x)
    assert (assert_type(loss, Array).shape, assert_type(aux, int)) == ((), 1)
    assert nnx.grad(loss_of)(model, x).scale.shape == ()
    assert assert_type(nnx.Rngs(0).noise.normal((2,)), Array).shape == (2,)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    merged = assert_type(nnx.merge(graphdef, params, rest), Block)
    assert merged.n_calls == model.n_calls
    graphdef, state = assert_type(nnx.split(model), tuple[nnx.GraphDef[Block], nnx.State])
    assert assert_type(nnx.merge(graphdef, state), Block).scale == model.scale
    filters: list[type[nnx.Variable[Any]]] = [nnx.Param, nnx.Variable]
    graphdef, _, _ = nnx.split(model, *filters)
    assert multiply.lower(x, factor=2.0).compile()(x).shape == (2, 4)


class Stack(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List([Block(4, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Array) -> Array:
        for layer in self.layers:
            x = assert_type(layer, Block)(x)
        return nnx.cond(x.sum() > 0, lambda: x, lambda: -x)


def test_lists_and_shapes_of_nnx_modules_keep_their_types():
    stack = assert_type(nnx.eval_shape(lambda: Stack(rngs=nnx.Rngs(0))), Stack)
    assert stack.layers[1].linear.kernel.shape == (4, 4)
    assert assert_type(Stack(rngs=nnx.Rngs(0))(ones(2, 4)), Array).shape == (2, 4)


class MLP(nn.Module):
    features: int
    hidden: int = 8

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(self.hidden)(x))
        bias = self.param("bias", nn.initializers.zeros_init(), ())
        return nn.Dense(self.features)(x + bias)


class Encoder(nn.Module):
    features: int

    def setup(self) -> None:
        self.mlp = nn.remat(MLP)(self.features)
        self.norm = nn.LayerNorm()

    def __call__(self, x: Array) -> Array:
        return self.norm(self.mlp(x))

    def width(self) -> int:
        return self.features


def test_linen_modules_keep_their_types():
    model, x = Encoder(features=4), ones(2, 4)
    variables = model.init(jax.random.key(0), x)
    y, updates = model.apply(variables, x, mutable=["batch_stats"])
    assert (assert_type(y, Array).shape, assert_type(updates, dict[str, Any])) == ((2, 4), {})
    assert_type(model.apply(variables, x), Array)
    assert_type(model.apply(variables, method=Encoder.width), int)
    widths = model.apply(variables, method=Encoder.width, mutable=True)
    assert assert_type(widths, tuple[int, dict[str, Any]])[0] == 4
    y, variables = model.init_with_output(jax.random.key(0), x)
    assert_type(y, Array)
    bound = assert_type(model.bind(variables), Encoder)
    assert_type(bound.mlp, MLP)
    assert assert_type(bound(x), Array).shape == (2, 4)
    assert assert_type(model.clone(features=5), Encoder).features == 5
    mapped = nn.vmap(MLP, variable_axes={"params": 0}, split_rngs={"params": True})
    assert_type(mapped, type[MLP])
    assert mapped(3).init(jax.random.key(0), x)["params"]["bias"].shape == (2,)


class Residual(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED
        linear: Linear.Config = Linear.default_config().set(bias=False)
        norm: LayerNorm.Config | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("linear", cfg.linear.set(input_dim=cfg.dim, output_dim=cfg.dim))

    def forward(self, x: Array) -> Array:
        return x + self.linear(x)


def test_configs_keep_their_types():
    cfg = Residual.default_config().set(name="residual", dim=4)
    assert_type(cfg, Residual.Config)
    assert assert_type(cfg.dim, int) == 4
    assert assert_type(cfg.linear.clone(bias=True), Linear.Config).bias
    assert_type(cfg.set(linear=Linear.default_config()), Residual.Config)
    cfg.norm = LayerNorm.default_config()
    layer = cfg.instantiate(parent=None)
    assert layer.create_parameter_specs_recursively()["linear"]["weight"].shape == (4, 4)
    module = Residual(cfg, parent=None)
    state = module.initialize_parameters_recursively(jax.random.key(0))
    y, _ = functional(module, None, state, [ones(2, 4)], is_training=False)
    assert assert_type(y, Array).shape == (2, 4)
    trainer = SpmdTrainer.default_config().set(name="trainer", max_step=3)
    trainer.mesh_axis_names = ("data", "model")
    trainer.evalers = {}
    trainer.model = Residual.default_config()
    trainer.model.dim = 4  # a field of a class that type checkers do not know here
    assert assert_type(trainer.seed, int) == 0


def half(x: float, *, factor: float = 0.5) -> float:
    return factor * x


def test_configs_of_functions_and_classes_know_what_they_create():
    cfg = config_for_function(half).set(x=4.0)
    assert assert_type(cfg.instantiate(), float) == 2.0
    number = config_for_class(complex).set(imag=1.0).clone(real=2.0)
    assert assert_type(number.instantiate(), complex) == 2.0 + 1.0j
    assert assert_type(maybe_instantiate(cfg), float) == assert_type(maybe_instantiate(2.0), float)


def test_packages_export_names():
    assert assert_type(weft.nnx.Linear, type[nnx.Linear]) is nnx.Linear
    assert assert_type(weft.linen.Dense, type[nn.Dense]) is nn.Dense
    assert assert_type(weft.hierarchy.Linear, type[Linear]) is Linear
    assert assert_type(weft.trainer.SpmdTrainer, type[SpmdTrainer]) is SpmdTrainer


def test_paths_that_lead_elsewhere_keep_their_types():
    stopping = weft.training.train_state.EarlyStopping(patience=1).update(0.5)
    assert assert_type(stopping, EarlyStopping).best_metric == 0.5
    assert assert_type(weft.io.isdir("/"), bool)
    assert assert_type(weft.utils.get_or_none({"a": 1}, "a"), int | None) == 1
