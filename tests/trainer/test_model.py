"""Models of every way of writing in the trainer, on virtual devices, with real checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.keys import quick_key
from tests.trainer.language_models import NNXLM, RULES, VOCAB, HierarchyLM, LinenLM, from_hierarchy
from weft import linen, nnx
from weft.config import config_for_class, config_for_function
from weft.errors import (
    BatchFieldError,
    ModelCallError,
    ModelOutputError,
    TrainDtypeError,
    UnknownLayerError,
)
from weft.hierarchy.base_layer import BaseModel
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import functional
from weft.input.fake import FakeLmInput
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.evaler import SpmdEvaler
from weft.trainer.evaler import every_n_steps_policy as every_n_steps
from weft.trainer.hooks import Hook
from weft.trainer.learner import Learner
from weft.trainer.model import (
    build_model,
    cast_for_forward,
    per_param_train_dtype_by_path,
)
from weft.trainer.optimizers import adamw_optimizer, param_ema
from weft.trainer.trainer import SpmdTrainer

LENGTH = 8


def input_config(is_training=True):
    return FakeLmInput.default_config().set(
        is_training=is_training,
        global_batch_size=8,
        source_length=LENGTH,
        max_token_id=VOCAB,
        total_num_batches=None if is_training else 2,
    )


def config(directory, model, **kwargs):
    optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(directory),
        model=model,
        learner=Learner.default_config().set(optimizer=optimizer),
        input=input_config(),
        max_step=4,
        mesh_shape=(4, 2),
        mesh_axis_names=("data", "model"),
    )
    cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=10**6)
    return cfg.set(**kwargs)


def trainer_of(cfg):
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    return cfg.instantiate(parent=None, devices=jax.devices()[:8])


class Losses(Hook):
    def __init__(self):
        self.losses, self.summaries, self.evals = [], [], []

    def on_step(self, step, outputs, batch):
        self.losses.append(float(outputs["loss"]))
        self.summaries.append(jax.device_get(outputs["summaries"]))

    def on_eval(self, name, step, summaries):
        self.evals.append(jax.device_get(summaries))


def run(cfg, first_params=None, monkeypatch=None, key=None):
    trainer, listener = trainer_of(cfg), Losses()
    if first_params is not None:
        init = trainer.init

        def init_with(key):
            init(key)
            layouts = jax.tree.map(lambda x: x.sharding, trainer.trainer_state.model)
            params = jax.device_put(first_params, layouts)
            trainer._state = trainer.trainer_state._replace(model=params)

        monkeypatch.setattr(trainer, "init", init_with, raising=False)
    trainer.run(key, listener=listener)
    return trainer, listener


def moments_of(trainer, path):
    """Returns the optimizer's moments of a parameter."""
    found = jax.tree_util.tree_leaves_with_path(trainer.trainer_state.learner)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in found]
    return [x for name, (_, x) in zip(names, found, strict=True) if name.endswith(path)]


@pytest.mark.long
def test_transformer_trains_equally_in_all_three_apis(tmp_path, monkeypatch):
    hierarchy = HierarchyLM.default_config()
    model = hierarchy.clone(name="model").instantiate(parent=None)
    first = jax.device_get(model.initialize_parameters_recursively(quick_key(1)))
    ways = {
        "hierarchy": (hierarchy, first, "layer_0/feed_forward/linear1/weight"),
        "linen": (config_for_class(LinenLM), from_hierarchy(first), "layer_0/up/kernel"),
        "nnx": (config_for_class(NNXLM), from_hierarchy(first), "layer_0/up/kernel"),
    }
    losses = {}
    for name, (model, params, sharded) in ways.items():
        cfg = config(tmp_path / name, model, logical_axis_rules=RULES)
        trainer, listener = run(cfg, params, monkeypatch, quick_key(0))
        losses[name] = listener.losses
        # Axis names or the spec shard both a weight and its moments.
        laid_out = [*moments_of(trainer, sharded), *_at(trainer.trainer_state.model, sharded)]
        assert [x.sharding.spec for x in laid_out] == [P(None, "model")] * 3
        assert all(x.addressable_shards[0].data.size == x.size // 2 for x in laid_out)
    assert len(set(losses["hierarchy"])) == 4
    # Sums are taken in another order: a few units of the last place of float32 after four steps.
    np.testing.assert_allclose(losses["linen"], losses["hierarchy"], rtol=2e-6)
    np.testing.assert_allclose(losses["nnx"], losses["hierarchy"], rtol=2e-6)


def _at(tree, path):
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [
        x for p, x in found if jax.tree_util.keystr(p, simple=True, separator="/").endswith(path)
    ]


# State other than parameters, and noise.


def logits_loss(x, head, input_batch):
    labels = input_batch["target_labels"]
    return optax.softmax_cross_entropy_with_integer_labels(head(x), labels).mean()


class LinenNoisy(linen.Module):
    """With statistics, dropout, a counter, and a key that it carries itself."""

    @linen.compact
    def __call__(self, input_batch, train: bool):
        calls = self.variable("counters", "calls", lambda: jnp.int32(0))
        key = self.variable("keys", "own", lambda: jax.random.key(7))
        if train and not self.is_initializing():
            calls.value += 1
            key.value = jax.random.fold_in(key.value, 1)
        x = linen.Embed(VOCAB, 4)(input_batch["input_ids"])
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        drop = linen.Dropout(0.5, deterministic=not train)
        self.sow("summaries", "kept", (drop(jnp.ones(1000)) > 0).mean())
        return logits_loss(drop(x), linen.Dense(VOCAB), input_batch), {}


class NNXNoisy(nnx.Module):
    """The same, with a stream for dropout."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, VOCAB, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))
        self.own = nnx.Cache(jax.random.key(7))

    def __call__(self, input_batch):
        if not self.norm.use_running_average:
            self.calls[...] += 1
            self.own.set_value(jax.random.fold_in(self.own.get_value(), 1))
        x = self.norm(self.embed(input_batch["input_ids"]))
        self.sow("summaries", "kept", (self.drop(jnp.ones(1000)) > 0).mean())
        return logits_loss(self.drop(x), self.head, input_batch), {}


NOISY = {"linen": LinenNoisy, "nnx": NNXNoisy}


def noisy_config(directory, library, **kwargs):
    cfg = config(directory, config_for_class(NOISY[library]), **kwargs)
    cfg.learner.ema = config_for_function(param_ema).set(decay=0.5)
    evaler = SpmdEvaler.default_config().set(input=input_config(is_training=False))
    evaler.eval_policy = config_for_function(every_n_steps).set(n=4)
    return cfg.set(evalers={"held_out": evaler})


def as_numpy(tree):
    def convert(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(convert, tree)


@pytest.mark.long
@pytest.mark.parametrize("library", NOISY)
def test_resumed_run_restores_statistics_counters_and_keys(tmp_path, library):
    straight, whole = run(noisy_config(tmp_path / "straight", library))
    _, first = run(noisy_config(tmp_path / "cut", library, max_step=2))
    again, second = run(noisy_config(tmp_path / "cut", library))
    assert first.losses + second.losses == whole.losses
    states = [as_numpy(trainer.trainer_state) for trainer in (straight, again)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    # Each step has its own noise, and evaluation has none.
    kept = [float(s["model"]["kept"]) for s in whole.summaries]
    assert len(set(kept)) == 4 and 0.2 < min(kept) < max(kept) < 0.8
    assert float(whole.evals[0]["kept"]) == 1.0
    assert isinstance(whole.evals[0]["loss"], WeightedScalar)
    assert whole.evals[0]["loss"].weight == 16
    # State moves in training alone, and neither optimizer nor average make anything else of it.
    state = states[0]
    found = jax.tree_util.tree_leaves_with_path(state.model)
    by_name = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in found}
    assert [x.tolist() for name, x in by_name.items() if name.endswith("calls")] == [4]
    key = jax.random.key(7)
    for _ in range(4):
        key = jax.random.fold_in(key, 1)
    own = next(x for name, x in by_name.items() if name.endswith("own"))
    np.testing.assert_array_equal(own, jax.random.key_data(key))
    assert any("batch" in name.lower() and np.any(x != 1) for name, x in by_name.items())
    num_trained = len(jax.tree.leaves(state.model["params"]))
    assert len(_at(state.learner["optimizer"], "")) <= 2 * num_trained + 4
    of_average = {k: v for k, v in state.learner["ema"].ema.items() if k != "params"}
    jax.tree.map(
        np.testing.assert_array_equal,
        of_average,
        {k: v for k, v in state.model.items() if k != "params"},
    )


# Errors name the path of the model.


class Returns(linen.Module):
    """Returns its argument."""

    what: str = "pair"

    @linen.compact
    def __call__(self, input_batch):
        x = linen.Embed(VOCAB, 2)(input_batch["input_ids"])
        return {
            "pair": (x.mean(), {}),
            "nothing": None,
            "logits": x,
            "unreduced": (x.mean(-1), {}),
            "integer": (jnp.int32(1), {}),
        }[self.what]

    def predict(self, input_batch):
        return {"twice": 2 * input_batch["input_ids"]}


class HierarchyReturns(BaseModel):
    def forward(self, input_batch):
        return {"loss": input_batch["input_ids"].mean()}


class LooksUp(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(VOCAB, 2, rngs=rngs)

    def __call__(self, input_batch):
        return self.embed(input_batch["target_label"]).mean(), {}


class TakesFields(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(VOCAB, 2, rngs=rngs)

    def __call__(self, image, label):
        return self.embed(image).mean(), {}


class Settings:
    def __init__(self, rate: float = 0.1):
        self.rate = rate


ONE_DEVICE = {"mesh_shape": (1, 1)}


def traced(directory, model):
    trainer = config(directory, model, **ONE_DEVICE).instantiate(
        parent=None, devices=jax.devices()[:1]
    )
    return trainer.compile_train_step()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nothing", r"trainer\.model returned None; expected a pair of the loss"),
        ("logits", r"trainer\.model returned an array of shape \(8, 8, 2\).*`return loss, aux`"),
        ("unreduced", r"shape \(8, 8\) .* as its loss; .* Take its mean: `loss\.mean\(\)`"),
        ("integer", r"dtype int32 as its loss; expected"),
    ],
)
def test_model_must_return_a_scalar_loss(tmp_path, what, said):
    with pytest.raises(ModelOutputError, match=said):
        traced(tmp_path, config_for_class(Returns).set(what=what))


def test_hierarchy_model_loss_is_scalar(tmp_path):
    with pytest.raises(ModelOutputError, match=r"trainer\.model returned a dict; expected a pair"):
        traced(tmp_path, HierarchyReturns.default_config())


def test_missing_batch_field_is_named(tmp_path):
    with pytest.raises(
        BatchFieldError,
        match=r"^trainer\.model looked up 'target_label'.* 'target_labels'.*[Dd]id you mean",
    ):
        traced(tmp_path, config_for_class(LooksUp))


def test_model_gets_only_the_batch(tmp_path):
    with pytest.raises(
        ModelCallError, match=r"more arguments than the batch: 'label' is missing.*input_ba"
    ):
        traced(tmp_path, config_for_class(TakesFields))


def test_unknown_object_is_rejected(tmp_path):
    with pytest.raises(UnknownLayerError, match=r"^trainer\.model: .*Settings.* is not a layer o"):
        traced(tmp_path, config_for_class(Settings))


def test_model_is_built_without_its_trainer(tmp_path):
    model = build_model(config(tmp_path, config_for_class(Returns)))
    state = model.initialize_parameters_recursively(jax.random.key(0))
    batch = {"input_ids": jnp.ones((2, 3), jnp.int32)}
    out, _ = functional(
        model, None, state, {"input_batch": batch}, method="predict", is_training=False
    )
    np.testing.assert_array_equal(out["twice"], 2 * batch["input_ids"])
    hierarchy = build_model(config(tmp_path, HierarchyLM.default_config()))
    assert type(hierarchy) is HierarchyLM


PARAMS = {
    "emb": {"weight": jnp.ones(2)},
    "norm": {"scale": jnp.ones(2), "count": jnp.ones(2, jnp.int32)},
    "linear": {"weight": jnp.ones(2), "bias": jnp.ones(2)},
}
BATCH = {"image": jnp.ones(3), "label": jnp.ones(3, jnp.int32)}


def dtypes_of(tree):
    return jax.tree.map(lambda x: str(x.dtype), tree)


def test_first_matching_rule_sets_the_dtype():
    rules = [("norm/.*", None), ("emb/weight", jnp.float16), (".*/weight", jnp.float32)]
    train_dtype = per_param_train_dtype_by_path(jnp.bfloat16, update_rules=rules)
    params, batch = cast_for_forward(PARAMS, BATCH, train_dtype)
    assert dtypes_of(params) == {
        "emb": {"weight": "float16"},
        "norm": {"scale": "float32", "count": "int32"},
        "linear": {"weight": "float32", "bias": "bfloat16"},
    }
    assert dtypes_of(batch)["image"] == "bfloat16"
    _, batch = cast_for_forward(PARAMS, BATCH, lambda params: jax.tree.map(lambda x: None, params))
    assert dtypes_of(batch)["image"] == "float32"


def test_unmatched_rule_is_named():
    train_dtype = per_param_train_dtype_by_path(update_rules=[("norm/scales", None)])
    with pytest.raises(TrainDtypeError, match=r"'norm/scales' of train_dtype.*norm/scale"):
        cast_for_forward(PARAMS, BATCH, train_dtype)
