"""Tiny random BERTs and ViTs of `transformers`: the same outputs there and back, also tuned."""

import argparse
import functools
import inspect
import json
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weft
from tests.interop.huggingface import test_checkpoint as checkpoints
from weft import hierarchy
from weft.cli import main
from weft.errors import (
    ArgumentShapeError,
    FitError,
    GenerationError,
    HuggingFaceConfigError,
    LayerConfigError,
    WeightsMismatchError,
)
from weft.evaluation import evaluate
from weft.hierarchy.module import functional as run_method
from weft.interop.huggingface import (
    FAMILIES,
    check_generates_text,
    from_huggingface,
    huggingface_model_config,
    new_classifier,
    to_huggingface,
    to_peft,
)
from weft.interop.huggingface.settings import Settings
from weft.recipes.dpo import dpo
from weft.recipes.lm_lora import lm_lora
from weft.recipes.sft import sft

transformers = checkpoints.transformers
read_json, edit_json = checkpoints.read_json, checkpoints.edit_json

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
BERT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 32}
VIT = {**SIZES, "image_size": [8, 12], "patch_size": 4, "num_channels": 2}
CLASSES = {"id2label": {0: "no", 1: "yes", 2: "perhaps"}}
RANDOM = np.random.RandomState(0)
IDS = RANDOM.randint(3, 40, (2, 12))
MASK = (np.arange(12) < np.array([[12], [7]])).astype(np.int32)
TYPES = (np.arange(12) >= 5).astype(np.int32)[None].repeat(2, axis=0)
TEXTS = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": TYPES}
IMAGES = RANDOM.normal(size=(2, 8, 12, 2)).astype(np.float32)

# Class of transformers, and settings.
MODELS = {
    "bert": ("BertModel", {**BERT, "hidden_act": "relu", "type_vocab_size": 3}),
    "bert-masked": ("BertForMaskedLM", BERT),
    "bert-classes": ("BertForSequenceClassification", {**BERT, **CLASSES}),
    "vit": ("ViTModel", {**VIT, "pooler_output_size": 8}),
    "vit-without-pooler": ("ViTModel", VIT),
    "vit-classes": ("ViTForImageClassification", {**VIT, **CLASSES, "qkv_bias": False}),
}


class Reference(NamedTuple):
    """A folder of transformers, and what its model computes."""

    folder: Any
    outputs: dict[str, np.ndarray]


def their_outputs(model):
    """Returns outputs of a model of transformers under the names that Weft has for them."""
    import torch

    if hasattr(model.config, "image_size"):
        inputs = {"pixel_values": torch.tensor(IMAGES.transpose(0, 3, 1, 2))}
    else:
        inputs = {name: torch.tensor(x) for name, x in TEXTS.items()}
    names = {"logits": "logits", "last_hidden_state": "hidden_states", "pooler_output": "pooled"}
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    values = {}
    for name, weft_name in names.items():
        if outputs.get(name) is not None:
            values[weft_name] = outputs[name].numpy()
    return values


def our_outputs(cfg, params):
    is_encoder = isinstance(cfg, hierarchy.Encoder.Config)
    emb = cfg.emb if is_encoder else cfg.encoder.emb
    batch = {"image": IMAGES} if isinstance(emb, hierarchy.PatchEmbedding.Config) else TEXTS
    model = checkpoints.instantiate(cfg)

    def call(params):
        return run_method(
            model,
            None,
            params,
            [jax.tree.map(jnp.asarray, batch)],
            is_training=False,
            method="forward" if is_encoder else "predict",
        )[0]

    return jax.jit(call)(params)


@pytest.fixture(scope="module")
def references(transformers, tmp_path_factory):
    """Makes the reference of one of `MODELS` by name."""
    import torch

    @functools.cache
    def make(name):
        class_name, settings = MODELS[name]
        cls = getattr(transformers, class_name)
        torch.manual_seed(0)
        options = {"add_pooling_layer": False} if name == "vit-without-pooler" else {}
        model = cls(cls.config_class(**settings), **options)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return Reference(folder, their_outputs(model))

    return make


@pytest.mark.parametrize("name", MODELS)
def test_outputs_match_there_and_back(references, transformers, name, tmp_path):
    reference = references(name)
    cfg, params = from_huggingface(reference.folder)
    outputs = our_outputs(cfg, params)
    assert reference.outputs.keys() <= outputs.keys()
    assert ("pooled" in outputs) == (name in ("bert", "bert-classes", "vit"))
    for key, expected in reference.outputs.items():
        np.testing.assert_allclose(outputs[key], expected, atol=1e-4)

    to_huggingface(tmp_path, cfg, params, base=reference.folder)
    for file_name in ("config.json", "model.safetensors"):
        written = (tmp_path / file_name).read_bytes()
        assert written == (reference.folder / file_name).read_bytes()
    again = tmp_path / "again"
    files = to_huggingface(again, cfg, params)
    assert [file.name for file in files] == ["model.safetensors", "config.json"]
    auto = getattr(transformers, MODELS[name][0])
    options = {"add_pooling_layer": False} if name == "vit-without-pooler" else {}
    model = auto.from_pretrained(again, **options)
    for key, value in their_outputs(model).items():
        np.testing.assert_array_equal(value, reference.outputs[key])
    assert from_huggingface(again)[0] == cfg
    if "classes" in name:
        assert read_json(again / "config.json")["label2id"]["perhaps"] == 2


# What files have besides the parameters of a model.


def copied(reference, folder, **settings):
    shutil.copytree(reference.folder, folder)
    edit_json(folder / "config.json", **settings)
    return folder


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    save_file(edit(dict(tensors)), folder / "model.safetensors", metadata={"format": "pt"})


def as_published(tensors):
    """Returns tensors as those of the first BERT: two tasks, and TensorFlow's names of norms."""
    dim = tensors["cls.predictions.transform.dense.bias"].size
    table, bias = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
    tensors |= {
        "bert.embeddings.position_ids": np.arange(32)[None],
        "bert.pooler.dense.weight": np.ones((dim, dim), np.float32),
        "bert.pooler.dense.bias": np.ones(dim, np.float32),
        "cls.seq_relationship.weight": np.ones((2, dim), np.float32),
        "cls.seq_relationship.bias": np.ones(2, np.float32),
        "cls.predictions.decoder.weight": tensors[table],
        "cls.predictions.decoder.bias": tensors[bias],
    }
    return {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): x
        for name, x in tensors.items()
    }


def test_published_files_of_bert(references, transformers, tmp_path):
    reference = references("bert-masked")
    folder = copied(reference, tmp_path / "base")
    edit_tensors(folder, as_published)
    _, params = from_huggingface(folder)
    jax.tree.map(np.testing.assert_array_equal, params, from_huggingface(reference.folder)[1])

    def with_other_bias(tensors):
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"] + 1
        return tensors

    edit_tensors(folder, with_other_bias)
    message = (
        r"'cls.predictions.decoder.bias' and 'cls.predictions.bias' in .* are not equal, .*Leave"
    )
    with pytest.raises(WeightsMismatchError, match=message):
        from_huggingface(folder)


def test_mask_token_of_a_vit_is_not_needed(references, tmp_path):
    folder = copied(references("vit"), tmp_path / "base")
    mask_token = {"embeddings.mask_token": np.zeros((1, 1, 16), np.float32)}
    edit_tensors(folder, lambda tensors: {**tensors, **mask_token})
    from_huggingface(folder)
    edit_tensors(folder, lambda tensors: {**tensors, "head.bias": np.zeros(3, np.float32)})
    with pytest.raises(WeightsMismatchError, match=r"head\.bias"):
        from_huggingface(folder)


def test_layers_of_a_folder_in_another_stack(references):
    folder = references("bert").folder
    stack = hierarchy.StackedTransformerLayer.default_config()
    cfg = huggingface_model_config(folder, stack=stack)
    assert cfg.transformer.klass is hierarchy.StackedTransformerLayer
    repeated, _ = from_huggingface(folder)
    assert cfg.transformer.num_layers == repeated.transformer.num_layers == 2


TEXT_SETTINGS = {**BERT, "model_type": "bert", "architectures": ["BertForSequenceClassification"]}
IMAGE_SETTINGS = {**VIT, "model_type": "vit", "architectures": ["ViTModel"]}
MASKED = {"architectures": ["BertForMaskedLM"]}


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (TEXT_SETTINGS, {"architectures": ["BertForTokenClassification"]}, r"\['BertModel'\] or "),
        (IMAGE_SETTINGS, {"architectures": ["ViTForMaskedImageModeling"]}, r"\['ViTModel'\] or "),
        (TEXT_SETTINGS, {"is_decoder": True}, "can be False"),
        (TEXT_SETTINGS, {"add_cross_attention": True}, "can be False"),
        (TEXT_SETTINGS, {"position_embedding_type": "relative_key"}, "can be 'absolute'"),
        (TEXT_SETTINGS, {"num_attention_heads": 3}, "divides hidden_size=16"),
        (TEXT_SETTINGS, {"hidden_act": "mish"}, "can be 'silu' or"),
        (TEXT_SETTINGS, {"type_vocab_size": 0}, "can be a whole number from 1"),
        (TEXT_SETTINGS, {"problem_type": "regression"}, "can be 'single_label_classification'"),
        (TEXT_SETTINGS, {"num_labels": 1}, "can have two classes or more, by their numbers, and"),
        (TEXT_SETTINGS, {"id2label": {"0": "score"}}, "can have two classes or more"),
        (TEXT_SETTINGS, {"id2label": {"1": "a", "2": "b"}}, "can have two classes or more"),
        (TEXT_SETTINGS, {"classifier_dropout": 2}, "can be a number from 0 to 1"),
        ({**TEXT_SETTINGS, **MASKED}, {"tie_word_embeddings": False}, "can be True"),
        (IMAGE_SETTINGS, {"patch_size": 3}, r"divides image_size=\[8, 12\]"),
        (IMAGE_SETTINGS, {"image_size": [8, 12, 3]}, r"a number of pixels, or \[height, width\]"),
        (IMAGE_SETTINGS, {"pooler_act": "sine"}, "can be 'tanh' or"),
        (IMAGE_SETTINGS, {"qkv_bias": 1}, "can be true or false"),
    ],
)
def test_unsupported_settings_are_named(settings, changes, message):
    family = FAMILIES[settings["model_type"]]
    family.read(Settings(settings))
    (name,) = changes
    with pytest.raises(HuggingFaceConfigError, match=f"{name}=.* no counterpart .*{message}"):
        family.read(Settings({**settings, **changes}))


def test_model_that_no_family_computes(tmp_path):
    cfg = FAMILIES["vit"].read(Settings(IMAGE_SETTINGS))
    cfg.output_norm = None
    with pytest.raises(HuggingFaceConfigError, match=r"computes what this one does"):
        to_huggingface(tmp_path, cfg, {})
    cfg.set(output_norm=hierarchy.LayerNorm.default_config(), pooler_activation="nn.celu")
    with pytest.raises(HuggingFaceConfigError, match=r"pooler_activation"):
        to_huggingface(tmp_path, cfg, {})


# The layers.


def test_images_of_another_size_are_refused():
    cfg = hierarchy.PatchEmbedding.default_config().set(
        dim=8, image_size=(8, 8), patch_size=(4, 4), num_channels=1
    )
    layer = checkpoints.instantiate(cfg)
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    batch = {"image": jnp.zeros((2, 1, 8, 8))}
    with pytest.raises(ArgumentShapeError, match=r"image has shape \(2, 1, 8, 8\); .*\(8, 8, 1\)"):
        run_method(layer, None, params, [batch], is_training=False)
    cfg.patch_size = (3, 4)
    with pytest.raises(LayerConfigError, match=r"patch_size=\(3, 4\) does not divide image_size="):
        checkpoints.instantiate(cfg)


def test_segments_of_a_packed_text_are_encoded_apart(references):
    cfg, params = from_huggingface(references("bert").folder)
    model = checkpoints.instantiate(cfg)

    @jax.jit
    def hidden_states(batch):
        outputs, _ = run_method(model, None, params, [batch], is_training=False)
        return outputs["hidden_states"]

    segments = np.array([[1] * 5 + [2] * 7])
    positions = np.array([[*range(5), *range(7)]])
    packed = {
        "input_ids": IDS[:1],
        "input_segment_ids": segments,
        "input_positions": positions,
        "token_type_ids": None,
    }
    expected = np.concatenate(
        [hidden_states({"input_ids": IDS[:1, :5]}), hidden_states({"input_ids": IDS[:1, 5:]})],
        axis=1,
    )
    np.testing.assert_allclose(hidden_states(packed), expected, atol=1e-5)


# A new output layer.


@pytest.mark.parametrize("name", ["bert-masked", "bert", "vit", "vit-classes"])
def test_new_classifier_has_the_encoder_of_a_folder(references, transformers, name, tmp_path):
    reference = references(name)
    names = ["never", "now", "often", "always"]
    cfg, params = new_classifier(reference.folder, names)
    to_huggingface(tmp_path, cfg, params, base=reference.folder)
    settings = read_json(tmp_path / "config.json")
    assert [settings["id2label"][str(i)] for i in range(4)] == names
    assert from_huggingface(tmp_path)[0] == cfg and list(cfg.class_names) == names
    cls = getattr(transformers, settings["architectures"][0])
    theirs = cls.from_pretrained(tmp_path)
    assert theirs.config.label2id["always"] == 3
    logits = their_outputs(theirs)["logits"]
    np.testing.assert_allclose(our_outputs(cfg, params)["logits"], logits, atol=1e-4)
    hidden = their_outputs(getattr(theirs, settings["model_type"]))["hidden_states"]
    base_cfg, base_params = from_huggingface(reference.folder)
    expected = our_outputs(base_cfg, base_params)["hidden_states"]
    np.testing.assert_allclose(hidden, expected, atol=1e-4)


def test_new_classifier_needs_an_encoder_and_classes(references, tmp_path):
    settings = {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    message = r"model_type='llama'.*can be 'bert' or 'vit' for a classifier"
    with pytest.raises(HuggingFaceConfigError, match=message):
        new_classifier(tmp_path, ["a", "b"])
    with pytest.raises(HuggingFaceConfigError, match=r"id2label=.* can have two classes or more"):
        new_classifier(references("bert").folder, ["a"])
    cfg, _ = new_classifier(references("bert").folder, ["a", "b"])
    cfg.set(num_classes=3, class_names=None)
    to_huggingface(tmp_path / "out", cfg, new_classifier(references("bert").folder, "abc")[1])
    assert read_json(tmp_path / "out" / "config.json")["id2label"]["2"] == "LABEL_2"
    cfg.class_names = ["a", "b"]
    with pytest.raises(LayerConfigError, match=r"class_names has 2 names, and num_classes=3"):
        checkpoints.instantiate(cfg)


# What encoders are not for.


def test_encoders_generate_no_text(references, tmp_path, capsys):
    folder = str(references("bert-masked").folder)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "a", "completion": "b"}), encoding="utf-8")
    message = r"architectures=\['BertForMaskedLM'\], an encoder, which .*weft\.fit\("
    for refuse in (
        lambda: check_generates_text(folder),
        lambda: weft.generate(folder, "a"),
        lambda: sft(folder, str(data)),
        lambda: dpo(folder, str(data)),
        lambda: weft.finetune(folder, str(data)),
        lambda: evaluate(folder, str(data)),
        lambda: lm_lora(base=folder),
    ):
        with pytest.raises(HuggingFaceConfigError, match=message):
            refuse()
    for command in (["sample", folder, "--prompt", "a"], ["chat", folder], ["eval", folder, "x"]):
        assert main(command) == 2
        assert "an encoder, which reads a whole text" in " ".join(capsys.readouterr().err.split())


def test_adapters_of_encoders_are_merged(references, tmp_path):
    base = references("bert-classes").folder
    cfg, params = from_huggingface(base)
    with_adapters = cfg.clone()
    hierarchy.set_lora_recursively(with_adapters, rank=2, alpha=4.0)
    model = checkpoints.instantiate(with_adapters)
    initial = jax.jit(model.initialize_parameters_recursively)(jax.random.key(0))
    initial = hierarchy.with_base_state(initial, params)
    merged = hierarchy.merge_adapters(model, initial)
    to_huggingface(tmp_path, hierarchy.without_lora(with_adapters), merged, base=base)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (base / name).read_bytes()
    message = r"has an encoder \(model_type='bert'\), .*for causal LMs\. Merge them"
    with pytest.raises(HuggingFaceConfigError, match=message):
        to_peft(tmp_path / "adapter", with_adapters, initial, base=base)


# Tuning.


def lines_of_code_and_comments():
    """Returns lines of Python's library, without marks of comments, and whether each is one."""
    texts, labels = [], []
    for line in inspect.getsource(argparse).splitlines():
        is_comment = line.strip().startswith("# ") and any(map(str.isalpha, line))
        is_code = line.strip().endswith(("(", ")", ":")) and not line.strip().startswith("#")
        if is_comment or (is_code and labels.count(0) < 120):
            texts.append(line.strip().removeprefix("# "))
            labels.append(int(is_comment))
    return texts, np.array(labels)


def save_word_pieces(folder, texts):
    import tokenizers
    import transformers

    trained = tokenizers.BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=300, min_frequency=1, show_progress=False)
    fast = transformers.BertTokenizerFast(tokenizer_object=trained._tokenizer)
    fast.save_pretrained(folder)
    return fast


@pytest.mark.usefixtures("one_device")
def test_bert_is_tuned_to_classify_lines(transformers, tmp_path):
    import torch

    texts, labels = lines_of_code_and_comments()
    assert 60 < labels.sum() < len(labels) - 60
    base = tmp_path / "base"
    tokenizer = save_word_pieces(base, texts)
    settings = {**BERT, "vocab_size": 300, "hidden_dropout_prob": 0.0}
    settings |= {"attention_probs_dropout_prob": 0.0, "id2label": {0: "code", 1: "comment"}}
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**settings))
    model.save_pretrained(base)

    cfg = huggingface_model_config(base)
    batch = tokenizer(texts, padding="max_length", truncation=True, max_length=24)
    data = {name: np.array(batch[name]) for name in batch} | {"label": labels}
    result = weft.fit(
        cfg,
        data,
        base=str(base),
        steps=60,
        learning_rate=5e-3,
        dir=str(tmp_path / "run"),
        progress=False,
    )
    assert result.history.train["loss"][0] == pytest.approx(np.log(2), abs=0.1)
    outputs = result.last.predict(data)
    assert (outputs["logits"].argmax(-1) == labels).mean() > 0.9

    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--to", str(out)]) == 0
    names = {path.name for path in base.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    for name in names - {"model.safetensors"}:
        assert (out / name).read_bytes() == (base / name).read_bytes(), name
    tuned = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    read = transformers.AutoTokenizer.from_pretrained(out)
    inputs = read(texts, padding=True, truncation=True, max_length=24, return_tensors="pt")
    with torch.no_grad():
        logits = tuned(**inputs).logits.numpy()
    np.testing.assert_allclose(logits, outputs["logits"], atol=1e-4)
    assert tuned.config.id2label == {0: "code", 1: "comment"}
    with pytest.raises(GenerationError, match=r"EncoderClassifier generates no text"):
        weft.generate(weft.load(tmp_path / "run"), [1, 2])
    with pytest.raises(FitError, match=r"fit got a base and a loss\. .*leave loss out"):
        weft.fit(cfg, data, "cross_entropy", base=str(base), steps=1)


@pytest.mark.usefixtures("one_device")
def test_vit_is_tuned_on_digits(transformers, tmp_path):
    import torch
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    settings = {**SIZES, "image_size": 8, "patch_size": 2, "num_channels": 1}
    settings["id2label"] = {i: str(i) for i in range(10)}
    base = tmp_path / "base"
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**settings))
    model.save_pretrained(base)
    preprocessor = '{"size": {"height": 8, "width": 8},\n "image_mean": [0.5]}'
    (base / "preprocessor_config.json").write_text(preprocessor, encoding="utf-8")

    cfg = huggingface_model_config(base)
    images = ((digits.images[..., None] / 16 - 0.5) / 0.5).astype(np.float32)
    result = weft.fit(
        cfg,
        {"image": images, "label": digits.target},
        base=str(base),
        steps=250,
        learning_rate=5e-3,
        progress=False,
    )
    outputs = result.last.predict({"image": images[:200]})
    assert (outputs["logits"].argmax(-1) == digits.target[:200]).mean() > 0.7

    out = tmp_path / "out"
    to_huggingface(out, cfg, result.last.variables, base=base)
    assert (out / "preprocessor_config.json").read_text(encoding="utf-8") == preprocessor
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()
    tuned = transformers.AutoModelForImageClassification.from_pretrained(out).eval()
    with torch.no_grad():
        pixels = torch.tensor(images[:200].transpose(0, 3, 1, 2))
        logits = tuned(pixel_values=pixels).logits.numpy()
    np.testing.assert_allclose(logits, outputs["logits"], atol=1e-4)
    to_huggingface(out, cfg, result.last.variables)  # without a base, the images' sizes are unknown
    assert not (out / "preprocessor_config.json").exists()


@pytest.mark.usefixtures("one_device")
def test_masked_language_model_is_tuned(references, tmp_path):
    folder = references("bert-masked").folder
    cfg = huggingface_model_config(folder)
    hierarchy.set_dropout_rate_recursively(cfg, 0.0)
    hidden = RANDOM.uniform(size=IDS.shape) < 0.3
    batch = {"input_ids": np.where(hidden, 1, IDS), "target_labels": np.where(hidden, IDS, -100)}
    result = weft.fit(
        cfg, batch, base=str(folder), steps=12, batch_size=2, learning_rate=1e-2, progress=False
    )
    losses = result.history.train["loss"]
    assert losses[-1] < losses[0]
    # The loss counts hidden words alone.
    logits = our_logits(from_huggingface(folder), batch["input_ids"])
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    nll = -np.take_along_axis(log_probs, IDS[..., None], axis=-1)[..., 0]
    assert losses[0] == pytest.approx(nll[hidden].mean(), rel=1e-5)


def our_logits(model_and_params, ids):
    cfg, params = model_and_params
    model = checkpoints.instantiate(cfg)
    outputs, _ = jax.jit(
        lambda params: run_method(
            model,
            None,
            params,
            [{"input_ids": jnp.asarray(ids)}],
            is_training=False,
            method="predict",
        )
    )(params)
    return outputs["logits"]
