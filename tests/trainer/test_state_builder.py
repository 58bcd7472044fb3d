"""Builders that read checkpoints; more of them in test_state_builder.py.

A run that starts with imported parameters and added adapters.

Converters as functions of states; with checkpoints in test_state_builder.py.

New runs that begin with parts of the checkpoint of another: real checkpoints, a tiny state.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.checkpoint_files import file_of
from weft.config import config_class, config_for_function
from weft.errors import (
    CheckpointNotFoundError,
    CheckpointStructureError,
    StateBuilderError,
    WeightsMismatchError,
)
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.layers import Linear
from weft.hierarchy.layers.embedding import LearnedPositionalEmbedding
from weft.hierarchy.lora import base_state, set_lora_recursively
from weft.input.fake import FakeLmInput
from weft.interop.huggingface import huggingface_model_config, to_huggingface
from weft.serialization import save_safetensors
from weft.trainer.checkpointer import Checkpointer, CheckpointValidationType
from weft.trainer.learner import Learner
from weft.trainer.optimizers import sgd_optimizer
from weft.trainer.optimizers.transformations import ParamEmaState
from weft.trainer.state_builder import (
    BaseConverterFromPretrainedModel,
    Builder,
    ImportedWeightsBuilder,
    MergeStateConverter,
    MergeStateSelection,
    ModelStateScopeConverter,
    OrbaxStateBuilder,
    PosEmbeddingConverter,
    PruneEmaStateBuilder,
    RestoreAndConvertBuilder,
    TensorStoreStateStorageBuilder,
    import_weights,
    initial_state,
    traverse_and_set_target_state_parameters,
)
from weft.trainer.train_step import TrainerState
from weft.trainer.trainer import SpmdTrainer
from weft.utils import flatten_items


def test_damaged_checkpoint_is_named_and_skipped(tmp_path, caplog):
    cfg = Checkpointer.default_config().set(name="c", dir=str(tmp_path), keep_last_n=2)
    with cfg.instantiate(parent=None) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step=step, state={"model": {"w": jnp.full(3, float(step))}})
    damaged_file = file_of(tmp_path / "step_00000002", "model-w/0")
    damaged_file.write_bytes(b"x" * damaged_file.stat().st_size)

    cfg = TensorStoreStateStorageBuilder.default_config().set(
        name="builder",
        base_dir=str(tmp_path),
        validation=CheckpointValidationType.CONTAINS_STATE,
    )
    wanted = TrainerState(
        prng_key={}, model={"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, learner={}
    )
    state = cfg.instantiate(parent=None)(Builder.State(0, wanted, {"learner/x"}))
    assert (state.step, state.built_keys) == (1, {"model/w", "learner/x"})
    assert float(state.trainer_state.model["w"][0]) == 1.0
    damage = f"arrays/d/{damaged_file.name}: its content has changed"
    assert f"step_00000002 ({damage}) is damaged" in caplog.text


QWEN = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns a checkpoint: its folder, the config of its model, and its parameters."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    cfg = huggingface_model_config(folder)
    params = jax.tree.map(
        lambda x: jnp.asarray(0.3 * np.sin(np.arange(x.size)).reshape(x.shape), x.dtype),
        shapes_of(cfg),
    )
    to_huggingface(folder, cfg, params)
    return folder, cfg, params


def shapes_of(cfg):
    model = cfg.clone(name="model").instantiate(parent=None)
    return jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))


def test_run_starts_from_checkpoint_and_draws_adapters(base, tmp_path):
    folder, cfg, params = base
    model = cfg.clone()
    set_lora_recursively(model, rank=2, alpha=4.0)
    trainer = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(tmp_path),
        model=model,
        learner=Learner.default_config().set(
            optimizer=config_for_function(sgd_optimizer).set(
                learning_rate=0.1, decouple_weight_decay=True
            )
        ),
        input=FakeLmInput.default_config().set(is_training=True, global_batch_size=8),
        mesh_shape=(4, 2),
        mesh_axis_names=("data", "model"),
        init_state_builder=ImportedWeightsBuilder.default_config().set(path=str(folder)),
    )
    trainer = trainer.instantiate(parent=None)
    trainer.init(jax.random.key(0))
    begun = trainer.trainer_state.model
    jax.tree.map(np.testing.assert_array_equal, base_state(begun), params)
    specs = trainer.trainer_state_partition_specs.model
    layouts = jax.tree.map(lambda x: x.sharding.spec, begun)
    assert layouts == specs and any("model" in spec for spec in jax.tree.leaves(specs))
    adapters = {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(begun)
        if "adapter" in jax.tree_util.keystr(path)
    }
    assert adapters
    for name, value in adapters.items():
        assert np.any(value) == ("lora_down" in name)


def test_exported_files_are_read_by_the_names_of_the_parameters(base, tmp_path):
    _, cfg, params = base
    path = tmp_path / "m.safetensors"
    save_safetensors(path, params)
    given = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), params)
    read = import_weights(str(path), given)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype("bfloat16")), read, params)
    other = cfg.clone()
    other.decoder.dim = 16
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes_of(other))
    with pytest.raises(
        WeightsMismatchError, match=r"shape: decoder.emb.token_emb.weight \[16, 8\]"
    ):
        import_weights(str(path), zeros)


def test_values_get_target_dtype_and_sharding():
    spec = jax.ShapeDtypeStruct((2,), jnp.bfloat16, sharding=jnp.ones(2).sharding)
    target = Builder.State(0, TrainerState(prng_key={}, model={"a": spec, "b": spec}, learner={}))
    pairs = [("model/a", "model/x/y")]
    cfg = MergeStateConverter.default_config().set(name="c", selection_regexes=pairs)
    converter = cfg.instantiate(parent=None)
    source, aux = converter.target_to_source(target)
    assert source.trainer_state == TrainerState({}, {"x": {"y": spec}}, {})
    read = Builder.State(5, TrainerState({}, {"x": {"y": jnp.full(2, 1.5)}}, {}), {"model/x/y"})
    result = converter.source_to_target(read, aux)
    assert (result.step, result.built_keys) == (5, {"model/a"})
    assert result.trainer_state.model["a"].dtype == jnp.bfloat16
    assert result.trainer_state.model["b"] is spec


@pytest.mark.parametrize("scopes", [("y", "z"), ("y", ""), ("n", "z")], ids=str)
def test_mismatched_layers_are_rejected(scopes):
    with pytest.raises(StateBuilderError, match=r"has other parameters than the source"):
        traverse_and_set_target_state_parameters(
            target_state={"x": {"w": 1}, "y": {"w": 2, "b": 3}},
            target_scope=scopes[0],
            source_params={"z": {"w": 5}},
            source_scope=scopes[1],
        )


PART = CheckpointValidationType.CONTAINS_STATE


def layer(fill):
    return {"weight": jnp.full((4, 2), fill), "bias": jnp.full((2,), fill + 0.5)}


def state_of(fill, *, ema=True, **layers):
    """Returns a state whose layers hold numbers that tell them apart."""
    model = {"decoder": {"a": layer(fill), "b": layer(fill + 1)}, **layers}
    learner = {"optimizer": (jax.tree.map(jnp.zeros_like, model), jnp.int32(fill))}
    if ema:
        averages = jax.tree.map(lambda x: x + 100, model)
        learner["ema"] = ParamEmaState(jnp.int32(fill), averages)
    return TrainerState(prng_key=jax.random.key(int(fill)), model=model, learner=learner)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the checkpoints of a run with layers filled with 10 and 11, then 20 and 21."""
    directory = tmp_path_factory.mktemp("source") / "checkpoints"
    cfg = Checkpointer.default_config().set(name="c", dir=str(directory), keep_last_n=5)
    with cfg.instantiate(parent=None) as checkpointer:
        for step in (10, 20):
            state = state_of(float(step), pos_emb={"weight": jnp.arange(8.0).reshape(1, 4, 2)})
            checkpointer.save(step=step, state={**state._asdict(), "next_step": step + 1})
    return directory


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def run_initial(cfg, like):
    """Returns the initial state of a run for a state like `like`; weights are sharded over two
    devices.
    """

    def init(key):
        return jax.tree.map(lambda x: x * 0 - 1 if x.dtype != key.dtype else key, like)

    def sharding(x):
        return NamedSharding(mesh(), PartitionSpec(*(("data",) if x.ndim == 2 else ())))

    builder = cfg.set(name="init_state_builder").instantiate(parent=None)
    with jax.set_mesh(mesh()):
        state = initial_state(builder, init, jax.random.key(7), jax.tree.map(sharding, like))
    assert jax.tree.structure(state) == jax.tree.structure(like)
    return state


def filled(x):
    """Returns the number that an array is filled with."""
    (number,) = set(np.asarray(x).ravel().tolist())
    return number


def storage(saved, **kwargs):
    return TensorStoreStateStorageBuilder.default_config().set(base_dir=str(saved), **kwargs)


def converted(saved, converter, **kwargs):
    builder = storage(saved, validation=PART, **kwargs)
    return RestoreAndConvertBuilder.default_config().set(builder=builder, converter=converter)


def merge(*pairs):
    return MergeStateConverter.default_config().set(selection_regexes=list(pairs))


WHOLE = {"pos_emb": {"weight": np.zeros((1, 4, 2), np.float32)}}


def test_whole_state_of_the_newest_or_of_any_step(saved):
    state = run_initial(storage(saved), state_of(0.0, **WHOLE))
    assert filled(state.model["decoder"]["a"]["weight"]) == 20
    assert state.model["decoder"]["a"]["weight"].sharding.spec == PartitionSpec("data")
    assert state.prng_key == jax.random.key(20)
    assert int(state.learner["ema"].count) == 20
    of_ten = OrbaxStateBuilder.default_config().set(base_dir=str(saved), step=10)
    assert filled(run_initial(of_ten, state_of(0.0, **WHOLE)).model["decoder"]["b"]["bias"]) == 11.5
    by_dir = TensorStoreStateStorageBuilder.default_config().set(dir=f"{saved}/step_00000010/")
    assert int(run_initial(by_dir, state_of(0.0, **WHOLE)).learner["ema"].count) == 10


def test_renamed_part_is_read_and_the_rest_drawn(saved):
    like = state_of(0.0, ema=False, head=layer(0.0))
    cfg = converted(
        saved,
        merge(
            ("model/decoder/a/bias", MergeStateSelection.TARGET),
            ("model/decoder/a/.*", MergeStateSelection.SOURCE),
            (r"model/head/(.*)", r"model/decoder/b/\1"),
        ),
    )
    state = run_initial(cfg, like)
    assert filled(state.model["decoder"]["a"]["weight"]) == 20
    assert filled(state.model["head"]["bias"]) == 21.5
    for drawn in (state.model["decoder"]["a"]["bias"], state.model["decoder"]["b"]["weight"]):
        assert filled(drawn) == -1
    assert filled(state.learner["optimizer"][1]) == -1
    assert state.prng_key == jax.random.key(7)


def test_selections_of_axlearn():
    def taken(*pairs):
        state = TrainerState(
            prng_key=np.zeros(2, np.uint32),
            model={"a": {"w": np.zeros(2)}, "b": {"w": np.zeros(2)}},
            learner={"count": np.zeros(1)},
        )
        converter = merge(*pairs).set(name="c").instantiate(parent=None)
        source, aux = converter.target_to_source(Builder.State(0, state))
        ones = jax.tree.map(np.ones_like, source.trainer_state)
        result = converter.source_to_target(Builder.State(1, ones), aux)
        return {path for path, x in flatten_items(result.trainer_state._asdict()) if x.all()}

    assert MergeStateSelection("SOURCE") is MergeStateSelection.SOURCE
    everything = {"prng_key", "model/a/w", "model/b/w", "learner/count"}
    assert taken() == everything
    assert taken(("model/a/.*", "TARGET")) == everything - {"model/a/w"}
    assert taken(("model/a/.*", "SOURCE"), (".*", MergeStateSelection.TARGET)) == {"model/a/w"}


class TwoLinears(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        inner: Linear.Config = Linear.default_config().set(
            input_dim=4, output_dim=2, param_partition_spec=None
        )

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        for name in ("a", "b"):
            self._add_child(name, cfg.inner)


class SourceModel(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        decoder: TwoLinears.Config = TwoLinears.default_config()
        pos_emb: LearnedPositionalEmbedding.Config = (
            LearnedPositionalEmbedding.default_config().set(
                dim=2, shape=(4,), param_partition_spec=None
            )
        )

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("decoder", cfg.decoder)
        self._add_child("pos_emb", cfg.pos_emb)


def source_trainer():
    from weft.recipes.lm import lm_tiny

    return lm_tiny().set(model=SourceModel.default_config())


def from_source(cls, **kwargs):
    source = config_for_function(source_trainer)
    return cls.default_config().set(source_trainer_config=source, **kwargs)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("decoder/a", [20, -1, -1]),
        ({"decoder/b": "decoder/a", "head": "decoder/b"}, [-1, 20, 21]),
    ],
    ids=["the same name", "other names"],
)
def test_layers_of_other_model(saved, scope, expected):
    like = state_of(0.0, ema=False, head=layer(0.0))
    state = run_initial(converted(saved, from_source(ModelStateScopeConverter, scope=scope)), like)
    found = [*state.model["decoder"].values(), state.model["head"]]
    assert [filled(x["weight"]) for x in found] == expected


@pytest.mark.parametrize(
    ("strategy", "length", "expected"),
    [
        ("truncate", 2, [0, 2]),
        ("interpolate", 2, [10 / 7, 32 / 7]),
        ("interpolate", 8, [0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6]),
    ],
)
def test_positions_are_fitted(saved, strategy, length, expected):
    like = state_of(0.0, ema=False, pos_emb={"weight": jnp.zeros((1, length, 2))})
    converter = from_source(PosEmbeddingConverter, strategy=strategy)
    state = run_initial(converted(saved, converter), like)
    np.testing.assert_allclose(state.model["pos_emb"]["weight"][0, :, 0], expected, rtol=1e-6)
    assert filled(state.model["decoder"]["a"]["weight"]) == 20


class OnePosition(BaseConverterFromPretrainedModel):
    """Adds up a table of positions, as one would the channels of a kernel."""

    def source_to_target(self, source, aux):
        table = source.trainer_state.model["pos_emb"]["weight"].sum(axis=1, keepdims=True)
        model = {**aux.trainer_state.model, "pos_emb": {"weight": table}}
        state = aux.trainer_state._replace(model=model)
        return Builder.State(source.step, state, aux.built_keys | {"model/pos_emb/weight"})


def test_custom_converter_may_change_shapes(saved):
    like = state_of(0.0, ema=False, pos_emb={"weight": jnp.zeros((1, 1, 2))})
    state = run_initial(converted(saved, from_source(OnePosition)), like)
    np.testing.assert_array_equal(state.model["pos_emb"]["weight"], [[[12.0, 16.0]]])
    assert filled(state.model["decoder"]["a"]["weight"]) == -1


def test_averages_of_unknown_parameters_are_pruned():
    state = state_of(1.0, extra=layer(3.0))
    model = {"decoder": state.model["decoder"]}
    builder = PruneEmaStateBuilder.default_config().set(name="b").instantiate(parent=None)
    before = Builder.State(
        3,
        state._replace(model=model),
        {"learner/ema/ema/extra/bias", "learner/ema/ema/decoder/a/bias", "model/decoder/a/bias"},
    )
    assert builder.input_state_type() is Builder.StateType.TENSORS
    after = builder(before)
    assert jax.tree.structure(after.trainer_state.learner["ema"].ema) == jax.tree.structure(model)
    assert after.built_keys == {"learner/ema/ema/decoder/a/bias", "model/decoder/a/bias"}
    assert builder(Builder.State(3, state_of(1.0, ema=False))).step == 3


# Mismatches.


def test_shape_mismatches_are_named(saved):
    like = state_of(0.0, ema=False, pos_emb={"weight": jnp.zeros((1, 8, 2))})
    take_all = merge(("model/.*", MergeStateSelection.SOURCE))
    with pytest.raises(CheckpointStructureError, match=r"model/pos_emb/weight: checkpoint .*4, 2"):
        run_initial(converted(saved, take_all), like)
    truncate = converted(saved, from_source(PosEmbeddingConverter, strategy="truncate"))
    with pytest.raises(StateBuilderError, match=r"weight' is .*\[1, 8, 2\].*'interpolate'"):
        run_initial(truncate, like)
    scope = converted(saved, from_source(ModelStateScopeConverter))
    with pytest.raises(StateBuilderError, match=r"weight' is \[1, 4, 2\].*\[1, 8, 2\] in this run"):
        run_initial(scope, like)
    with pytest.raises(CheckpointStructureError, match=r"model/pos_emb/weight.*not in the state"):
        run_initial(storage(saved), state_of(0.0))


def test_empty_selection_and_missing_layer(saved):
    like = state_of(0.0, ema=False)
    with pytest.raises(StateBuilderError, match=r"no path of the state matches.*decoder/a/bias"):
        run_initial(converted(saved, merge(("decoder/.*", "source"))), like)
    no_part = merge((r"model/decoder/./(.*)", r"model/decoder/a/\1"), ("prng_key", "key"))
    with pytest.raises(StateBuilderError, match=r"'key' is not a path of a state"):
        run_initial(converted(saved, no_part), like)
    no_layer = from_source(ModelStateScopeConverter, scope={"decoder/a": "encoder"})
    with pytest.raises(StateBuilderError, match=r"has no layer 'encoder'; its parameters are"):
        run_initial(converted(saved, no_layer), like)
    other = from_source(ModelStateScopeConverter, scope={"decoder/a": "pos_emb"})
    with pytest.raises(StateBuilderError, match=r"decoder/a \(from pos_emb\) has other parameters"):
        run_initial(converted(saved, other), like)


def test_bad_configs(saved, tmp_path):
    like = state_of(0.0)
    with pytest.raises(StateBuilderError, match=r"dir=None and base_dir=None; expected one"):
        run_initial(TensorStoreStateStorageBuilder.default_config(), like)
    with pytest.raises(StateBuilderError, match=r"base_dir is None; expected the directory"):
        run_initial(OrbaxStateBuilder.default_config(), like)
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint in"):
        run_initial(storage(tmp_path / "none"), like)
    with pytest.raises(StateBuilderError, match=r"strategy='cut'; expected 'truncate' or"):
        run_initial(converted(saved, from_source(PosEmbeddingConverter, strategy="cut")), like)


class Lies(Builder):
    """Says that it has built what it has not."""

    def input_state_type(self):
        return Builder.StateType.TENSOR_SPECS

    def __call__(self, state):
        return Builder.State(0, state.trainer_state, {"model/decoder/a/weight"})


def test_builder_returning_no_array_is_named():
    with pytest.raises(StateBuilderError, match=r"a Lies, lists 'model/decoder"):
        run_initial(Lies.default_config(), state_of(0.0))
