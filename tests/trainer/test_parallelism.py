"""Parallel transformers, on eight virtual devices: what they compute and what each device holds."""

import math
import re

import jax
import numpy as np
import pytest

from tests.keys import quick_key
from weft.cli.collectives import collectives_of
from weft.config import config_for_function
from weft.errors import ConfigModifierError
from weft.hierarchy.attention.multihead_attention import GroupedQueryAttention
from weft.hierarchy.attention.qkv_linear import GroupedQKVLinear
from weft.hierarchy.attention.rope import RoFormerQKVLinear
from weft.hierarchy.attention.stack import (
    PipelinedTransformerLayer,
    RepeatedTransformerLayer,
    StackedTransformerLayer,
)
from weft.hierarchy.attention.transformer import TransformerLayer
from weft.hierarchy.causal_lm import metrics_config
from weft.hierarchy.layers.linear import Linear
from weft.hierarchy.mixture_of_experts.feed_forward import (
    TransformerFeedForwardDropFreeMoE,
    TransformerFeedForwardMoE,
)
from weft.hierarchy.param_init import ConstantInitializer, DefaultInitializer
from weft.hierarchy.pipeline import InterleavedSchedule
from weft.input import host_to_global_device_array
from weft.recipes.lm import lm_tiny
from weft.trainer.optimizers import adafactor_optimizer
from weft.trainer.parallelism import (
    ParallelismModifier,
    mesh_shape_from_axes,
)
from weft.trainer.trainer_config_modifier import GradientAccumulationModifier

NUM_LAYERS = 5  # unlike every other size


def config(prepare=lambda cfg: cfg, /, **axes):
    cfg = lm_tiny().set(dir="", evalers={})
    cfg.model.decoder.set(dim=16)
    cfg.model.decoder.transformer.num_layers = NUM_LAYERS
    layer = cfg.model.decoder.transformer.layer
    layer.self_attention.attention.num_heads = 4
    layer.feed_forward.hidden_dim = 32
    cfg.input.source.set(sequence_length=16)
    cfg.learner.optimizer.inner.learning_rate = 1e-3
    return ParallelismModifier.default_config().set(**axes).instantiate()(prepare(cfg))


def set_initializer(cfg, weights):
    """Draws all weights like this: what draws nothing compiles in a fraction of the time."""
    init = DefaultInitializer.default_config().set(init_by_param_name={".*weight$": weights})
    cfg.model.param_init = init
    layer = cfg.model.decoder.transformer.layer
    layer.self_attention.attention.output_linear.param_init = init
    layer.feed_forward.linear2.param_init = init


def trainer_of(cfg):
    count = math.prod(cfg.mesh_shape)
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    return cfg.instantiate(parent=None, devices=jax.devices()[:count])


class Run:
    """Three steps of training."""

    def __init__(self, cfg):
        self.trainer = trainer_of(cfg)
        self.trainer.init(quick_key(0))
        state, self.losses = self.trainer.trainer_state, []
        self.step = self.trainer.compile_train_step(trainer_state=state)
        batch = next(iter(self.trainer.input.dataset()))
        with self.trainer.mesh():
            partition = self.trainer._batch_partition()
            batch = host_to_global_device_array(batch, partition=partition)
            for _ in range(3):
                state, outputs = self.step(state, batch)
                self.losses.append(float(outputs["loss"]))
        self.trainer._state = state


@pytest.fixture(scope="module")
def alone():
    return Run(config())


@pytest.fixture(scope="module")
def fsdp():
    return Run(config(fsdp=8))


@pytest.mark.long
@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 8},
        {"fsdp": 2, "seq": 2, "model": 2},
        {"fsdp": 2, "seq": 2, "model": 2, "context_parallelism": "all_to_all"},
        {"seq": 8},
        {"seq": 4, "context_parallelism": "all_to_all"},
        {"seq": 4, "context_parallelism": None},
    ],
    ids=lambda axes: ",".join(f"{name}={size}" for name, size in axes.items()),
)
def test_losses_match_on_mesh(alone, fsdp, axes):
    run = fsdp if axes == {"fsdp": 8} else Run(config(**axes))
    assert run.losses[2] < run.losses[0]
    np.testing.assert_allclose(run.losses, alone.losses, rtol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-3),
        run.trainer.trainer_state.model,
        alone.trainer.trainer_state.model,
    )


def with_experts(cfg):
    layer = cfg.model.decoder.transformer.layer
    layer.feed_forward = TransformerFeedForwardMoE.default_config().set(
        norm=layer.feed_forward.norm, hidden_dim=32, num_experts=4, num_groups=8
    )
    return cfg


def with_drop_free_experts(cfg):
    layer = cfg.model.decoder.transformer.layer
    layer.feed_forward = TransformerFeedForwardDropFreeMoE.default_config().set(
        norm=layer.feed_forward.norm, hidden_dim=32, num_experts=8
    )
    return cfg


def with_experts_in_four_layers(cfg):
    return with_four_layers(with_drop_free_experts(cfg))


def with_balanced_experts(cfg):
    cfg = with_experts_in_four_layers(cfg)
    cfg.model.decoder.transformer.layer.feed_forward.load_balance_loss_weight = 0.5
    cfg.model.decoder.transformer.repeat.drop_output.rules = [r"module_outputs(?!.*/aux_loss$).*"]
    cfg.model.metrics = metrics_config(aux_loss_regex="decoder/transformer/.*/aux_loss")
    return cfg


def with_four_layers(cfg):
    cfg.model.decoder.transformer.num_layers = 4
    return cfg


def with_eight_layers(cfg):
    cfg.model.decoder.transformer.num_layers = 8
    return cfg


INTERLEAVED = {"pipeline_schedule": "interleaved"}
ONE_F_ONE_B = {"pipeline_schedule": "1f1b"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("prepare", "axes"),
    [
        (with_experts, {"expert": 2, "fsdp": 2, "model": 2}),
        (with_drop_free_experts, {"expert": 2, "fsdp": 2, "model": 2}),
        (with_drop_free_experts, {"expert": 8}),
        (with_drop_free_experts, {"expert": 4, "fsdp": 2}),
        (with_four_layers, {"pipeline": 4, "fsdp": 2, "num_microbatches": 4}),
        (with_experts, {"expert": 2, "seq": 4}),
        (with_four_layers, {"pipeline": 4, "seq": 2, "num_microbatches": 4}),
        (with_eight_layers, {"pipeline": 4, "fsdp": 2, "num_microbatches": 4, **INTERLEAVED}),
        (with_four_layers, {"pipeline": 2, "fsdp": 2, "model": 2, **INTERLEAVED}),
        (with_experts_in_four_layers, {"pipeline": 2, "expert": 2, "num_microbatches": 2}),
        (with_balanced_experts, {"pipeline": 2, "expert": 2, **ONE_F_ONE_B}),
        (with_four_layers, {"pipeline": 4, "fsdp": 2, "num_microbatches": 4, **ONE_F_ONE_B}),
        (with_four_layers, {"pipeline": 2, "fsdp": 2, "model": 2, **ONE_F_ONE_B}),
    ],
    ids=[
        "experts",
        "drop-free experts",
        "drop-free experts=8",
        "drop-free experts,fsdp",
        "pipeline",
        "experts,seq",
        "pipeline,seq",
        "interleaved",
        "interleaved,model",
        "drop-free experts,pipeline",
        "balanced experts,1f1b",
        "1f1b",
        "1f1b,model",
    ],
)
def test_losses_of_experts_and_pipelines_match_on_mesh(prepare, axes):
    # On one device by GPipe, which `tests/hierarchy` compares with a stack.
    axes_alone = {**axes, "pipeline_schedule": "gpipe"} if "1f1b" in axes.values() else axes
    alone = config(prepare, **axes_alone).set(mesh_shape=mesh_shape_from_axes())
    np.testing.assert_allclose(Run(config(prepare, **axes)).losses, Run(alone).losses, rtol=2e-5)


def with_shared_key_heads(num_kv_heads):
    def prepare(cfg):
        cfg.model.decoder.transformer.layer.self_attention.attention = (
            GroupedQueryAttention.default_config().set(
                num_heads=8,
                hidden_dim=32,
                causal=True,
                input_linear=RoFormerQKVLinear.default_config().set(
                    input_linear=GroupedQKVLinear.default_config().set(num_kv_heads=num_kv_heads),
                    rotary_value=False,
                ),
            )
        )
        return cfg

    return prepare


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_kv_heads", "axes"),
    [
        (4, {"model": 8}),
        (1, {"fsdp": 4, "model": 2}),
        (2, {"seq": 2, "model": 4}),
        (2, {"seq": 2, "model": 4, "context_parallelism": "all_to_all"}),
    ],
)
def test_losses_match_beyond_the_number_of_key_heads(num_kv_heads, axes):
    cfg = config(with_shared_key_heads(num_kv_heads), **axes)
    alone = cfg.clone(mesh_shape=mesh_shape_from_axes())
    run = Run(cfg)
    np.testing.assert_allclose(run.losses, Run(alone).losses, rtol=2e-5)
    if num_kv_heads == 4:
        # Each device projects one head of keys, for 8 sequences of 16 tokens, and not all four.
        product = r"= (f32\[[\d,]+\])\S* dot\(.*/jvp\(model\)/\S*/[kv]_proj/"
        assert set(re.findall(product, run.step.as_text())) == {"f32[128,4]"}


@pytest.mark.long
def test_drop_free_experts_apply_to_the_tokens_of_each_device_only():
    cfg = config(with_drop_free_experts, fsdp=8)
    cfg.input.source.global_batch_size = 64
    text = trainer_of(cfg).compile_train_step().as_text()
    # Two experts for each of 64 sequences of 16 tokens: an eighth of these rows on each device.
    assert "f32[256,16]" in text
    assert "f32[2048,16]" not in text


@pytest.mark.long
def test_devices_of_experts_exchange_an_eighth_of_the_tokens():
    cfg = config(with_drop_free_experts, expert=8)
    cfg.input.source.global_batch_size = 64
    program = trainer_of(cfg).compile_train_step()
    # Each device has room for half as many again as its 256 choices, 48 from each device.
    text = program.as_text()
    assert "f32[384,16]" in text
    assert "f32[2048,16]" not in text
    exchanged = [c for c in collectives_of(text) if c.kind == "all-to-all"]
    assert {c.axes({"expert": 8}) for c in exchanged} == {("expert",)}
    # The number of rounds is not known before the tokens: one in each layer counts.
    assert {c.times for c in exchanged} == {NUM_LAYERS}


def bytes_per_device(tree):
    held = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


@pytest.mark.parametrize("n", [2, 8])
def test_fsdp_shards_parameters_and_optimizer_state(n):
    cfg = config(fsdp=n)
    set_initializer(cfg, ConstantInitializer.default_config().set(value=0.1))
    trainer = trainer_of(cfg)
    trainer.init(jax.random.key(0))
    state = (trainer.trainer_state.model, trainer.trainer_state.learner)
    held = bytes_per_device(state)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert len(held) == n
    # Step counters, a few bytes, are replicated.
    assert max(held.values()) == pytest.approx(whole / n, rel=0.002)


@pytest.fixture(scope="module")
def compiled_init(fsdp):
    """Returns the program that draws the state on all devices."""
    trainer = fsdp.trainer
    init = jax.jit(trainer._new_state, out_shardings=trainer._shardings)
    with trainer.mesh():
        return init.lower(jax.random.key(0)).compile()


def test_no_device_holds_a_whole_parameter(fsdp, compiled_init):
    trainer = fsdp.trainer
    for leaf in jax.tree.leaves(trainer.trainer_state.model):
        pieces = [shard.data.size for shard in leaf.addressable_shards]
        assert pieces == [leaf.size // 8] * 8
    # Nor does one while the values are drawn: results, and everything in between.
    memory = compiled_init.memory_analysis()
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(trainer.trainer_state.model))
    assert memory.temp_size_in_bytes < largest


def test_scanned_transformer_gathers_one_layer_at_a_time(fsdp):
    text = fsdp.step.as_text()
    found = collectives_of(text)
    in_loop = [c for c in found if c.kind == "all-gather" and c.in_loop]
    gathered = {size for c in in_loop for size in map(elements, c.shapes)}
    layers = fsdp.trainer.trainer_state_specs.model["decoder"]["transformer"]["repeat"]["layer"]
    for spec in jax.tree.leaves(layers):
        assert "fsdp" in spec.partition_spec
        # A layer's slice is gathered in the body of the loop, and the stack is nowhere whole:
        # neither as a parameter, nor as a gradient, nor in the optimizer.
        assert math.prod(spec.shape[1:]) in gathered
        assert f"f32[{','.join(map(str, spec.shape))}]" not in text
    assert {c.times for c in in_loop} == {NUM_LAYERS}
    assert all(c.axes(fsdp.trainer._mesh.shape) == ("fsdp",) for c in in_loop)


def test_scanned_transformer_scatters_gradients(fsdp):
    text = fsdp.step.as_text()
    # XLA sums gradients of a layer in the body of the loop, and each device keeps its part of them
    # there: on a CPU by an all-reduce and a slice, which others merge into a reduce-scatter.
    summed = [c for c in collectives_of(text) if c.kind in ("all-reduce", "reduce-scatter")]
    in_loop = [c for c in summed if c.in_loop]
    assert {c.times for c in in_loop} == {NUM_LAYERS}
    shapes = [shape for c in in_loop for shape in c.shapes]
    layers = fsdp.trainer.trainer_state_specs.model["decoder"]["transformer"]["repeat"]["layer"]
    specs = jax.tree.leaves(layers)
    assert sorted(map(elements, shapes)) == sorted(math.prod(s.shape[1:]) for s in specs)
    # After the loop, no gradient of a layer is summed or moved.
    after_loop = [shape for c in summed if not c.in_loop for shape in c.shapes]
    assert not set(map(elements, after_loop)) & {math.prod(s.shape) for s in specs}
    gathered = [c for c in collectives_of(text) if c.kind == "all-gather" and not c.in_loop]
    assert not any(shape.startswith(f"f32[{NUM_LAYERS},") for c in gathered for shape in c.shapes)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_layouts_are_the_same_for_other_devices(fsdp, platform):
    trainer = fsdp.trainer
    with trainer.mesh():
        traced = trainer.trace_train_step(*trainer._step_shapes())
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert layouts(text) == layouts(traced.lower().as_text())
    # Stacks of all layers come in and go out in parts of an axis of a layer, and nothing gathers
    # them in between.
    stacks = re.findall(
        rf"tensor<({NUM_LAYERS}x[\dx]+)xf32>[^,]*?sdy.sharding = #sdy.sharding<@mesh, \[(.*?)\]>",
        text,
    )
    specs = trainer.trainer_state_specs
    layers = specs.model["decoder"]["transformer"]["repeat"]["layer"]
    shapes = {"x".join(map(str, s.shape)) for s in jax.tree.leaves(layers)}
    assert {shape for shape, _ in stacks} == shapes
    assert all('"fsdp"' in sharding for _, sharding in stacks)
    constraints = re.findall(r"sdy.sharding_constraint .* : tensor<(\w+)>", text)
    assert constraints
    assert not any(x.startswith(f"{NUM_LAYERS}x") for x in constraints)


def layouts(stablehlo):
    """Returns the layouts of arrays that a program asks for, with their shapes."""
    constraint = r"sdy.sharding_constraint .*? (<@mesh, .*>) : (tensor<\w+>)"
    of_argument = r"(tensor<\w+>)[^%]*?(sdy.sharding = .*?>)"
    return sorted(re.findall(constraint, stablehlo) + re.findall(of_argument, stablehlo))


def elements(shape):
    return math.prod(int(n) for n in shape.partition("[")[2].rstrip("]").split(",") if n)


@pytest.mark.long
def test_optimizer_state_may_be_sharded_without_parameters(alone, fsdp):
    cfg = config(fsdp=8)
    cfg.rules_by_kind.parameters = [("fsdp", None)]
    run = Run(cfg)
    np.testing.assert_allclose(run.losses, alone.losses, rtol=2e-5)
    of_run, of_fsdp = run.trainer.trainer_state, fsdp.trainer.trainer_state
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(of_run.model))
    assert set(bytes_per_device(of_run.model).values()) == {whole}
    assert bytes_per_device(of_run.learner) == bytes_per_device(of_fsdp.learner)
    # Parameters are gathered once, after their update, and not in each layer.
    found = collectives_of(run.step.as_text())
    gathered = [c for c in found if c.kind == "all-gather"]
    assert gathered
    assert not any(c.in_loop for c in gathered)


def test_factored_optimizer_state_follows_the_parameters():
    cfg = config(fsdp=4, model=2)
    cfg.learner.optimizer = config_for_function(adafactor_optimizer).set(
        learning_rate=0.1,
        b1=0.9,
        b2=0.98,
        multiply_by_parameter_scale=False,
        clipping_threshold=None,
    )
    trainer = trainer_of(cfg)
    specs = jax.tree_util.tree_leaves_with_path(trainer.trainer_state_specs.learner)
    found = [
        (tuple(spec.shape), tuple(spec.partition_spec))
        for path, spec in specs
        if jax.tree_util.keystr(path, simple=True, separator="/").endswith("linear1_0/weight")
    ]
    weight = ((NUM_LAYERS, 16, 32), (None, "fsdp", "model"))
    by_row = ((NUM_LAYERS, 32), (None, "model"))
    by_column = ((NUM_LAYERS, 16), (None, "fsdp"))
    unused = ((1,), (None,))
    assert set(found) == {weight, by_row, by_column, unused}


def test_model_without_transformer_layers():
    cfg = lm_tiny().set(model=Linear.default_config())
    with pytest.raises(ConfigModifierError, match=r"finds no attention .* in Linen and NNX with"):
        ParallelismModifier.default_config().set(fsdp=2).instantiate()(cfg)


def test_stacks_become_pipelines():
    cfg = config(pipeline=2, fsdp=2).model.decoder.transformer
    assert cfg.klass is PipelinedTransformerLayer
    assert (cfg.num_layers, cfg.num_stages, cfg.num_microbatches) == (NUM_LAYERS, 2, 4)
    assert cfg.stage.klass is RepeatedTransformerLayer


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_idle_steps_are_no_operations_of_the_model(schedule):
    cfg = config(with_eight_layers, pipeline=4, pipeline_schedule=schedule)
    piped = trainer_of(cfg.set(mesh_shape=mesh_shape_from_axes()))
    assert piped.model_flops() == trainer_of(config(with_eight_layers)).model_flops()


@pytest.mark.parametrize("axes", [{"expert": 8}, {"expert": 2, "fsdp": 2, "model": 2}], ids=str)
def test_padding_of_experts_is_no_operation_of_the_model(axes):
    sharded = trainer_of(config(with_drop_free_experts, **axes))
    alone = trainer_of(config(with_drop_free_experts))
    assert sharded.model_flops() == alone.model_flops()


@pytest.mark.parametrize("kind", [RepeatedTransformerLayer, StackedTransformerLayer])
def test_losses_of_layers_leave_a_pipeline(kind):
    def prepare(cfg):
        cfg = with_balanced_experts(cfg)
        transformer = cfg.model.decoder.transformer
        if kind is StackedTransformerLayer:
            cfg.model.decoder.transformer = StackedTransformerLayer.default_config().set(
                num_layers=transformer.num_layers, layer=transformer.layer
            )
        return cfg

    is_dropped = config(prepare, pipeline=2).model.decoder.transformer.pipeline.drop_output
    is_dropped = is_dropped.instantiate()
    assert not is_dropped("module_outputs/layer0/feed_forward/aux_loss")
    assert is_dropped("module_outputs/layer0/self_attention/probs")


def test_1f1b_takes_the_place_of_gradient_accumulation():
    def accumulating(cfg):
        modifier = GradientAccumulationModifier.default_config().set(grad_acc_steps=2)
        return modifier.instantiate()(with_four_layers(cfg))

    with pytest.raises(ConfigModifierError, match="a Learner has one already"):
        config(accumulating, pipeline=2, **ONE_F_ONE_B)


def test_stages_are_interleaved():
    cfg = config(with_eight_layers, pipeline=2, num_pipeline_repeats=4, **INTERLEAVED)
    pipeline = cfg.model.decoder.transformer.pipeline
    assert pipeline.schedule.klass is InterleavedSchedule
    assert pipeline.schedule.num_repeats == 4


@pytest.mark.parametrize("stages", [-1, 0])
def test_invalid_stages(stages):
    with pytest.raises(ConfigModifierError, match=f"pipeline={stages} stages: expected a positive"):
        config(pipeline=stages)


def test_context_parallelism_is_set_where_a_layer_leaves_it_open():
    def with_all_to_all(cfg):
        cfg.model.decoder.transformer.layer.self_attention.attention.context_parallelism = (
            "all_to_all"
        )
        return cfg

    def way(*args, **axes):
        cfg = config(*args, **axes)
        return cfg.model.decoder.transformer.layer.self_attention.attention.context_parallelism

    assert way(fsdp=8) is None
    assert way(seq=8) == way(seq=-1) == "ring"
    assert way(seq=8, context_parallelism=None) is None
    assert way(with_all_to_all, seq=8) == "all_to_all"


def test_pipeline_without_a_stack():
    cfg = lm_tiny().set(model=TransformerLayer.default_config())
    with pytest.raises(ConfigModifierError, match="and a RepeatedTransformerLayer or"):
        ParallelismModifier.default_config().set(pipeline=2).instantiate()(cfg)


def test_rules_for_stages_may_differ_by_kind():
    cfg = config(with_four_layers, pipeline=4, num_microbatches=4)
    cfg.rules_by_kind.parameters = [("pipeline", None)]
    layouts = trainer_of(cfg).trainer_state_partition_specs
    layers = layouts.model["decoder"]["transformer"]["pipeline"]["layer"]
    assert {spec[0] for spec in jax.tree.leaves(layers)} == {None}
    moments = layouts.learner["optimizer"].inner_state[0].mu["decoder"]["transformer"]
    assert {spec[0] for spec in jax.tree.leaves(moments["pipeline"]["layer"])} == {"pipeline"}
