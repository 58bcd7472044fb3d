"""The programs that the concepts of AXLearn are explained with, with their ellipses filled in."""

import dataclasses
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from weft.config import (
    REQUIRED,
    ConfigBase,
    Configurable,
    InstantiableConfig,
    Required,
    config_class,
    config_for_class,
    config_for_function,
)
from weft.errors import RequiredFieldMissingError
from weft.hierarchy.attention import (
    BaseTransformerLayer,
    GroupedQKVLinear,
    GroupedQueryAttention,
    MultiheadAttention,
    StackedTransformerLayer,
    TransformerAttentionLayer,
    TransformerLayer,
)
from weft.hierarchy.base_layer import BaseLayer, BaseModel, ParameterSpec
from weft.hierarchy.layers import LayerNorm, Linear, RMSNorm
from weft.hierarchy.module import Module, current_context, functional
from weft.hierarchy.module import functional as F
from weft.hierarchy.param_init import ConstantInitializer, DefaultInitializer
from weft.input import global_to_host_array, host_to_global_device_array
from weft.input.fake import fake_source
from weft.input.grain import DispatchConfig, Input, per_feed_batch, shard_dataset
from weft.trainer.evaler import SpmdEvaler
from weft.trainer.hooks import Hook
from weft.trainer.learner import Learner
from weft.trainer.optimizers import sgd_optimizer
from weft.trainer.trainer import SpmdTrainer
from weft.typing import NestedTensor, Tensor

# Introduction to the config library.


def test_example_of_configuring_gqa_and_rmsnorm():
    # An example of configuring GQA and RMSNorm.

    layer_cfg = TransformerAttentionLayer.default_config().set(
        attention=GroupedQueryAttention.default_config(),
        norm=RMSNorm.default_config(),
    )

    default = TransformerAttentionLayer.default_config()
    assert default.attention.klass is MultiheadAttention
    assert default.norm.klass is LayerNorm
    layer_cfg.set(name="layer", source_dim=8, target_dim=8)
    layer_cfg.attention.set(
        num_heads=4, input_linear=GroupedQKVLinear.default_config().set(num_kv_heads=2)
    )
    layer = layer_cfg.instantiate(parent=None)
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    assert set(params["norm"]) == {"scale"}
    assert params["attention"]["i_proj"]["k_proj"]["weight"].shape == (8, 2, 2)
    outputs, _ = F(
        layer,
        prng_key=None,
        state=params,
        inputs={"target": jnp.ones((1, 3, 8))},
        is_training=False,
    )
    assert outputs.data.shape == (1, 3, 8)


def build_layer_config(i):
    layer_cfg = TransformerLayer.default_config()
    layer_cfg.self_attention.attention.set(num_heads=2)
    layer_cfg.feed_forward.set(hidden_dim=8 * (i + 1))
    return layer_cfg


def test_contrived_example_of_building_a_transformer_stack():
    # A contrived example of building a Transformer stack.

    stack_cfg = StackedTransformerLayer.default_config().set(num_layers=12)

    layer_cfgs = []
    for i in range(stack_cfg.num_layers):
        layer_cfgs.append(build_layer_config(i))

    stack_cfg.set(layer=layer_cfgs)

    # An example of instantiating a layer from a config.

    stack: StackedTransformerLayer = stack_cfg.set(name="stack", input_dim=4).instantiate(
        parent=None
    )

    specs = stack.create_parameter_specs_recursively()
    assert specs["layer11"]["feed_forward"]["linear1"]["weight"].shape == (4, 96)
    # The config was copied: later changes of its parts do not affect it.
    layer_cfgs[0].feed_forward.hidden_dim = 1
    assert stack_cfg.layer[0].feed_forward.hidden_dim == 8


def test_required_fields_are_validated_and_instances_are_unique():
    linear_cfg = Linear.default_config().set(name="linear", input_dim=2)
    with pytest.raises(RequiredFieldMissingError, match="output_dim"):
        linear_cfg.instantiate(parent=None)
    linear_cfg.set(output_dim=3)
    assert linear_cfg.instantiate(parent=None) is not linear_cfg.instantiate(parent=None)


# Configurable functions and classes.


@dataclasses.dataclass(frozen=True)
class PretrainedConfig:
    factor: float = 1.0


class ThirdPartyTransformerLayer:
    # A contrived example of a third-party Transformer layer implementation.

    def __init__(self, config: PretrainedConfig, training: bool = False):
        self.config = config
        self.training = training

    def __call__(self, x):
        return x * self.config.factor

    @staticmethod
    def from_pretrained(config, input_dim, name, parent):
        cfg = config_for_class(ThirdPartyTransformerLayer).set(config=config)
        cfg = InTree.default_config().set(name=name, input_dim=input_dim, wrapped=cfg)
        return cfg.instantiate(parent=parent)


class InTree(BaseTransformerLayer):
    """Gives a layer of another library a place in the tree of modules."""

    @config_class
    class Config(BaseTransformerLayer.Config):
        wrapped: Required[InstantiableConfig] = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self.wrapped = cfg.wrapped.instantiate()

    def forward(self, data, **kwargs):
        return self.Output(data=self.wrapped(data))


def assert_stack_of_three_multiplies_by_eight(stack_cfg):
    stack = stack_cfg.set(name="stack", num_layers=3, input_dim=2).instantiate(parent=None)
    x = jnp.ones((1, 2, 2))
    output, _ = functional(stack, prng_key=None, state={}, inputs=[x], is_training=False)
    np.testing.assert_array_equal(output.data, 8 * x)


def test_third_party_class_is_configured_and_composed():
    # Generate a config using `config_for_class`.
    custom_layer_cfg = config_for_class(ThirdPartyTransformerLayer)

    # Set some of the attribute(s).
    custom_layer_cfg.set(config=PretrainedConfig(factor=2.0))
    layer = custom_layer_cfg.instantiate()
    assert type(layer) is ThirdPartyTransformerLayer
    assert layer.config == PretrainedConfig(factor=2.0)
    assert layer.training is False
    stack_cfg = StackedTransformerLayer.default_config().set(
        layer=custom_layer_cfg,
    )
    assert stack_cfg.layer == custom_layer_cfg
    assert stack_cfg.layer.config.factor == 2.0
    # A stack calls modules; a small one wraps the other library's layer.
    stack_cfg.set(layer=InTree.default_config().set(wrapped=stack_cfg.layer))
    assert_stack_of_three_multiplies_by_eight(stack_cfg)


def layer_from_pretrained(config: PretrainedConfig, input_dim: int, name: str, parent: Module):
    return ThirdPartyTransformerLayer.from_pretrained(config, input_dim, name, parent)


def test_layer_function_is_configured_and_composed():
    # Generate a config using `config_for_function`.
    custom_layer_cfg = config_for_function(layer_from_pretrained)

    # Set some of the attribute(s).
    custom_layer_cfg.set(config=PretrainedConfig(factor=2.0))

    # Compose with other configs.
    stack_cfg = StackedTransformerLayer.default_config().set(
        layer=custom_layer_cfg,
    )
    assert_stack_of_three_multiplies_by_eight(stack_cfg)


# Beyond Machine Learning


class Job(Configurable):
    """Of the kind that the page points to: something that runs a command, and no layer."""

    @config_class
    class Config(Configurable.Config):
        name: Required[str] = REQUIRED
        command: Required[str] = REQUIRED
        max_tries: int = 1

    def execute(self):
        for _ in range(self.config.max_tries):
            done = subprocess.run(self.config.command, shell=True, check=False)
            if done.returncode == 0:
                break
        return done.returncode


class Bastion(Configurable):
    @config_class
    class Config(Configurable.Config):
        job: Job.Config = Job.default_config().set(max_tries=3)

    def run(self):
        return self.config.job.instantiate().execute()


def test_non_layers_are_configurable(tmp_path):
    cfg = Bastion.default_config()
    cfg.job.set(name="count", command=f"echo tried >> {tmp_path}/log; false")
    assert cfg.instantiate().run() == 1
    assert (tmp_path / "log").read_text(encoding="utf-8") == "tried\n" * 3
    cfg.job.command = f"echo done > {tmp_path}/log"
    assert cfg.instantiate().run() == 0
    with pytest.raises(RequiredFieldMissingError, match="command"):
        Job.default_config().set(name="nothing").instantiate()


# Module


class BarModule(BaseLayer):
    def _create_layer_parameter_specs(self):
        return {"scale": ParameterSpec(shape=(), initializer=initializer(2.0))}

    def forward(self, x: Tensor) -> Tensor:
        self.add_summary("x", x)
        return x * self.parameters["scale"]

    def my_method(self, y: Tensor) -> Tensor:
        self.add_state_update("scale", self.parameters["scale"] + 1)
        self.add_module_output("path", self.path())
        return y + self.parameters["scale"]


def initializer(value):
    return ConstantInitializer.default_config().set(value=value).instantiate()


# The anatomy of a `Module`: it has a `@config_class`. One page has three blocks of one class.
class FooModule(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        bar: InstantiableConfig = BarModule.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        bar_cfg: BarModule.Config = cfg.bar

        # Add child modules by invoking `_add_child` with a name and a fully-specified config.
        self._add_child("bar1", bar_cfg)
        self._add_child("bar2", bar_cfg)

    def forward(self, x: Tensor) -> Tensor:
        # Child modules can be accessed as attributes.
        # By default, this is equivalent to `self.bar1.forward(x)`.
        y = self.bar1(x)

        # We can also invoke other methods on the child modules.
        z = self.bar2.my_method(y)

        # Return some outputs.
        return z


def make_foo():
    cfg: FooModule.Config = FooModule.default_config().set(name="foo", vlog=1)
    foo_module: FooModule = cfg.instantiate(parent=None)
    return cfg, foo_module


def test_module_is_a_node_of_a_tree():
    cfg, foo_module = make_foo()
    assert isinstance(cfg, ConfigBase) and isinstance(foo_module, Configurable)
    assert foo_module.parent is None
    # The entire hierarchy has been instantiated.
    assert list(foo_module.children) == ["bar1", "bar2"]
    assert foo_module.bar1 is foo_module.children["bar1"]
    assert foo_module.bar1.parent is foo_module
    assert foo_module.bar1.children == {}
    assert foo_module.path() == "foo"
    assert foo_module.bar1.path() == "foo.bar1"
    assert foo_module.bar2.path() == "foo.bar2"


# Invoking Modules and the InvocationContext


def invoke(foo_module, x, **kwargs):
    from weft.hierarchy.module import functional as F

    # Invoke `foo_module.forward` via functional API.
    outputs, output_collection = F(
        foo_module,
        # Specify parameters for `foo_module` and its descendants.
        state={"bar1": {"scale": jnp.asarray(2.0)}, "bar2": {"scale": jnp.asarray(5.0)}},
        # Specify inputs to `forward`.
        inputs={"x": x},
        prng_key=None,
        is_training=True,
        **kwargs,
    )
    return outputs, output_collection


def test_functional_returns_outputs_and_output_collection():
    _, foo_module = make_foo()
    outputs, output_collection = invoke(foo_module, jnp.asarray(3.0))
    assert outputs == 3 * 2 + 5
    assert output_collection.summaries == {"bar1": {"x": 3.0}}
    assert output_collection.state_updates["bar2"] == {"scale": 6.0}
    assert output_collection.module_outputs == {}
    _, output_collection = invoke(foo_module, jnp.asarray(3.0), drop_output_collections=())
    assert output_collection.module_outputs == {"bar2": {"path": "foo.bar2"}}


def test_invocation_is_a_pure_function():
    _, foo_module = make_foo()
    grad, output_collection = jax.grad(lambda x: invoke(foo_module, x), has_aux=True)(3.0)
    assert grad == 2
    assert output_collection.summaries == {"bar1": {"x": 3.0}}
    xs = jnp.arange(4.0)
    outputs, output_collection = jax.jit(jax.vmap(lambda x: invoke(foo_module, x)))(xs)
    np.testing.assert_array_equal(outputs, 2 * xs + 5)
    np.testing.assert_array_equal(output_collection.summaries["bar1"]["x"], xs)


class Watching(Module):
    @config_class
    class Config(Module.Config):
        depth: int = 1

    def __init__(self, cfg: Config, *, parent):
        super().__init__(cfg, parent=parent)
        if cfg.depth:
            self._add_child("inner", cfg.clone(depth=cfg.depth - 1))

    def forward(self, seen):
        context = current_context()
        below = self.inner(seen) if self.config.depth else []
        assert current_context() is context  # the stack is empty again
        return [context, *below]


def test_contexts_form_a_stack():
    cfg = Watching.default_config().set(name="root", depth=2)
    root = cfg.instantiate(parent=None)
    assert current_context() is None
    state = {"x": 1, "inner": {"x": 2, "inner": {"x": 3}}}
    contexts, _ = functional(root, prng_key=None, state=state, inputs=[()], is_training=False)
    assert current_context() is None
    assert [context.parent for context in contexts] == [None, *contexts[:-1]]
    assert [context.module for context in contexts] == [root, root.inner, root.inner.inner]
    assert [context.state["x"] for context in contexts] == [1, 2, 3]


# BaseLayer


class Mlp(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED

    def __init__(self, cfg: Config, *, parent):
        super().__init__(cfg, parent=parent)
        linear = Linear.default_config().set(input_dim=cfg.dim, output_dim=cfg.dim)
        linear.param_partition_spec = (None, "model")
        self._add_child("hidden", linear)
        constant = ConstantInitializer.default_config().set(value=0.5)
        init = DefaultInitializer.default_config().set(init_by_param_name={".*": constant})
        self._add_child("out", linear.set(param_init=init, bias=False))

    def forward(self, x):
        return self.out(self.hidden(x))


def test_parameters_are_a_nested_dict_as_the_modules_are():
    layer = Mlp.default_config().set(name="mlp", dim=3).instantiate(parent=None)
    specs = layer.create_parameter_specs_recursively()
    assert specs["hidden"]["weight"].mesh_axes == P(None, "model")
    assert specs["hidden"]["weight"].dtype == jnp.float32
    params: NestedTensor = layer.initialize_parameters_recursively(jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == {
        "hidden": {"weight": (3, 3), "bias": (3,)},
        "out": {"weight": (3, 3)},
    }
    # By `param_init`: of the child's config, or inherited.
    assert len(np.unique(params["hidden"]["weight"])) == 9
    assert len(np.unique(params["out"]["weight"])) == 1


def test_one_layer_serves_several_sets_of_parameters():
    layer = Mlp.default_config().set(name="mlp", dim=3).instantiate(parent=None)
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    rounded = jax.tree.map(lambda w: jnp.round(w, 1), params)
    x = jnp.ones((1, 3))
    for used in (params, rounded, params):
        y, _ = functional(layer, prng_key=None, state=used, inputs=[x], is_training=False)
        hidden = x @ used["hidden"]["weight"] + used["hidden"]["bias"][None]
        np.testing.assert_allclose(y, hidden @ used["out"]["weight"], rtol=1e-5, atol=1e-6)


# SPMD Trainer


class Mean(BaseModel):
    def _create_layer_parameter_specs(self):
        return {"scale": ParameterSpec(shape=(), initializer=initializer(1.0))}

    def forward(self, input_batch):
        loss = jnp.mean(input_batch["x"] * self.parameters["scale"])
        self.add_summary("rows", jnp.asarray(input_batch["x"].shape[0]))
        return loss, {}


def batches_of_numbers(global_batch_size):
    """Returns the numbers read by a process, in batches of its share of the rows."""
    numbers = [{"x": np.float32(i)} for i in range(64)]
    source = fake_source(is_training=False, examples=numbers, repeat=1)

    def build(dispatch_config):
        return per_feed_batch(
            source(dispatch_config),
            global_batch_size=global_batch_size,
            dispatch_config=dispatch_config,
        )

    return build


def make_trainer(directory):
    input_cfg = Input.default_config().set(
        source=config_for_function(batches_of_numbers).set(global_batch_size=16)
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(directory),
        max_step=2,
        model=Mean.default_config(),
        learner=Learner.default_config().set(
            optimizer=config_for_function(sgd_optimizer).set(
                learning_rate=0.5, decouple_weight_decay=True
            )
        ),
        input=input_cfg,
        evalers={"held_out": SpmdEvaler.default_config().set(input=input_cfg)},
        mesh_shape=(-1,),
        mesh_axis_names=("data",),
    )
    return cfg.instantiate(parent=None)


def test_trainer_is_the_root_module(tmp_path):
    trainer = make_trainer(tmp_path)
    assert isinstance(trainer, Module) and trainer.parent is None
    wanted = {"model", "learner", "input", "held_out", "checkpointer", "summary_writer"}
    assert wanted == set(trainer.children)
    assert trainer.model.path() == "trainer.model"
    assert next(iter(trainer.input.dataset()))["x"].shape == (16,)


# Input Batch Sharding


def test_process_rows_form_one_global_array():
    # 1. The split that each process has, here of two that read evenly.
    numbers = fake_source(is_training=False, examples=range(8))(DispatchConfig(0, 1))
    splits = [shard_dataset(numbers, DispatchConfig(shard_index=i, num_shards=2)) for i in range(2)]
    assert [list(split) for split in splits] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # 2. In each step a process reads an array of its own rows.
    local = [np.asarray(list(split)[:2]) for split in splits]
    assert [type(rows) for rows in local] == [np.ndarray, np.ndarray]
    # 3. The rows become a global array, with each device of the mesh having its part.
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows = np.arange(2.0 * jax.device_count())
    batch = host_to_global_device_array({"x": rows}, partition=P("data"), mesh=mesh)
    assert batch["x"].shape == rows.shape and batch["x"].sharding.spec == P("data")
    for i, shard in enumerate(batch["x"].addressable_shards):
        np.testing.assert_array_equal(shard.data, rows[2 * i : 2 * i + 2])
    np.testing.assert_array_equal(global_to_host_array(batch)["x"], rows)


def test_train_step_gets_the_global_batch(tmp_path):
    trainer = make_trainer(tmp_path)
    given = []

    class Watcher(Hook):
        def on_step(self, step, outputs, batch):
            given.append(batch["x"])

    trainer.run(listener=Watcher())
    assert [x.shape for x in given] == [(16,), (16,)]
    assert all(x.sharding.spec == P("data") for x in given)
    np.testing.assert_array_equal(given[1], np.arange(16.0, 32.0))
    # The losses' gradients are the means of the batches, so this many rows reached the model.
    expected = 1 - 0.5 * (np.mean(np.arange(16.0)) + np.mean(np.arange(16.0, 32.0)))
    np.testing.assert_allclose(trainer.trainer_state.model["scale"], expected, rtol=1e-6)


# Config APIs


def test_field_has_a_name_a_type_and_a_default():
    cfg = Linear.default_config()
    assert cfg.input_dim is REQUIRED and cfg.bias is True
    assert {"input_dim", "output_dim", "bias", "name"} <= set(cfg.keys())


def test_optax_function_is_configured():
    cfg = config_for_function(optax.sgd).set(learning_rate=0.5)
    sgd = cfg.instantiate()
    params = jnp.asarray([1.0, 2.0])
    updates, _ = sgd.update(jnp.asarray([2.0, 4.0]), sgd.init(params), params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates), [0.0, 0.0])
    with pytest.raises(RequiredFieldMissingError, match="learning_rate"):
        config_for_function(optax.sgd).instantiate()
