"""`weft sample`: from a run's newest whole checkpoint to text.

Generated text, from a model that says what comes next by a rule.
"""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from tests.keys import quick_key
from weft import linen
from weft.cli import main
from weft.cli.configs import load_config
from weft.cli.sample import of_layer
from weft.cli.trained_models import find_tokenizer, restore_model
from weft.config import config_for_class
from weft.errors import GenerationError
from weft.generation import Generator
from weft.hierarchy.base_layer import BaseModel
from weft.input import ByteTokenizer
from weft.trainer.model import LibraryModel
from weft.trainer.run_dir import claim_run_dir

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Makes the directory "run" of a run of `lm-tiny` with states that were saved by hand."""
    monkeypatch.chdir(tmp_path)

    def save_states(*states, **fields):
        cfg = load_config("lm-tiny", ["dir=run", *(f"{k}={v}" for k, v in fields.items())])
        claim_run_dir(cfg)
        saver = cfg.checkpointer.set(name="saver", dir="run/checkpoints")
        with saver.instantiate(parent=None) as checkpointer:
            for step, make_state in enumerate(states, start=1):
                checkpointer.save(step=step, state=make_state(initial(cfg)), force=True)
        return cfg

    return save_states


def initial(cfg):
    model = cfg.model.set(name="model").instantiate(parent=None)
    return jax.jit(model.initialize_parameters_recursively)(quick_key(0))


def total(params):
    return sum(float(jnp.sum(jnp.abs(leaf))) for leaf in jax.tree.leaves(params))


def test_newest_parameters_are_restored_on_one_device(save):
    cfg = save(
        lambda params: {"model": params, "other": jnp.zeros(3)},
        lambda params: {"model": jax.tree.map(lambda x: 2 * x, params), "other": jnp.zeros(3)},
    )
    _, params = restore_model(cfg)
    assert total(params) == pytest.approx(2 * total(initial(cfg)))
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(params))


def test_averaged_parameters_are_preferred(save):
    def state(params):
        averages = jax.tree.map(lambda x: 3 * x, params)
        return {"model": params, "learner": {"ema": {"count": jnp.array(1), "ema": averages}}}

    cfg = save(state, **{"learner.ema.decay": 0.9})
    _, params = restore_model(cfg)
    assert total(params) == pytest.approx(3 * total(initial(cfg)))


def sample(capsys, *options):
    assert main(["sample", "run", "--prompt", "import ", "--tokens", "8", *options]) == 0
    return capsys.readouterr().out


@pytest.mark.long
def test_sample_depends_on_seed_unless_greedy(save, capsys):
    save(lambda params: {"model": params})
    likeliest = sample(capsys, "--temperature", "0")
    assert likeliest.startswith("import ")
    assert likeliest == sample(capsys, "--temperature=0", "--seed=1")
    assert sample(capsys, "--temperature=9") != sample(capsys, "--temperature=9", "--seed=1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "tokens=0; expected 1, or more"),
        (["--temperature", "-1"], "temperature=-1; expected 0, or more"),
    ],
)
def test_out_of_range_values_are_reported(save, options, message, capsys):
    save(lambda params: {"model": params})
    assert main(["sample", "run", *options]) == 2
    assert message in capsys.readouterr().err


def test_prompt_in_another_encoding_is_rejected(capsys):
    assert main(["sample", "run", "--prompt", "krak\udcf3w"]) == 2
    assert "--prompt 'krak\\udcf3w' has bytes that are not in utf-8" in capsys.readouterr().err


def test_run_without_checkpoint_is_rejected(save, capsys):
    save()
    assert main(["sample", "run"]) == 2
    assert "has not saved a checkpoint yet" in capsys.readouterr().err


def test_run_without_text_input_is_rejected(save, capsys):
    save()
    config = pathlib.Path("run/config.txt")
    tokenizer = "tokenizer=config_for_class(weft.input.ByteTokenizer)()"
    assert tokenizer in config.read_text(encoding="utf-8")
    config.write_text(
        config.read_text(encoding="utf-8").replace(tokenizer, "tokenizer=None"), encoding="utf-8"
    )
    assert main(["sample", "run"]) == 2
    assert "its input has no tokenizer" in capsys.readouterr().err


def test_non_run_directory_is_rejected(tmp_path, capsys):
    assert main(["sample", str(tmp_path)]) == 2
    assert f"has no run in it: there is no {tmp_path}/config.txt" in capsys.readouterr().err


def run(model, *, prompt="xab", num_tokens=2, **settings):
    layer = model.set(name="model").instantiate(parent=None)
    generator = Generator(of_layer(layer, {}, ByteTokenizer()))
    (completion,) = generator.generate(prompt, tokens=num_tokens, **settings)
    return completion.text


class NextByte(linen.Module):
    """After each byte comes the next one; after `e` the text ends."""

    def __call__(self, input_batch):
        return jnp.float32(0), {}

    def predict(self, input_batch):
        following = input_batch["input_ids"] + 1
        following = jnp.where(following > ord("e"), ByteTokenizer.eos_id, following)
        return {"logits": 99.0 * jax.nn.one_hot(following, 264)}


class Undecided(linen.Module):
    """All letters from `b` to `y` are equally likely."""

    def __call__(self, input_batch):
        return jnp.float32(0), {}

    def predict(self, input_batch):
        ids = jnp.arange(264)
        logits = jnp.where((ids >= ord("b")) & (ids <= ord("y")), 1.0, 0.0)
        return {"logits": jnp.broadcast_to(logits, (*input_batch["input_ids"].shape, 264))}


class Silent(linen.Module):
    def __call__(self, input_batch):
        return jnp.float32(0), {}


def of_library(layer):
    inputs = ({"input_ids": jax.ShapeDtypeStruct((1, 4), jnp.int32)},)
    return LibraryModel.default_config().set(layer=config_for_class(layer), inputs=inputs)


@pytest.mark.parametrize(("num_tokens", "text"), [(1, "c"), (9, "cde")])
def test_library_module_with_predict_generates(num_tokens, text):
    assert run(of_library(NextByte), num_tokens=num_tokens) == text
    assert run(of_library(NextByte), num_tokens=num_tokens, temperature=0.0) == text


@pytest.mark.parametrize("seed", [0, 1])
def test_temperature_0_takes_the_first_of_the_likeliest(seed):
    assert run(of_library(Undecided), num_tokens=3, temperature=0.0, seed=seed) == "bbb"


def test_module_without_predict_is_rejected():
    with pytest.raises(GenerationError, match=r"LibraryModel generates no text.*`predict"):
        run(of_library(Silent))


def test_non_text_model_is_rejected():
    with pytest.raises(GenerationError, match="BaseModel generates no text"):
        run(BaseModel.default_config())


def test_tokenizer_of_data_is_found():
    cfg = load_config("lm-tiny")
    assert isinstance(find_tokenizer(cfg), ByteTokenizer)
    cfg.input.source.tokenizer = ByteTokenizer()
    assert find_tokenizer(cfg) is cfg.input.source.tokenizer
    cfg.input.source.tokenizer = None
    assert find_tokenizer(cfg) is None
