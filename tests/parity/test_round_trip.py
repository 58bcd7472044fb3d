"""Each family of transformers is tuned, preferred and written back, and the same in both."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import weft
from tests.generation import conftest
from weft.cli import main
from weft.interop import load_tokenizer
from weft.interop.huggingface import FAMILIES, huggingface_model_config

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]
transformers = conftest.transformers

VOCAB_SIZE = 300
TOKENS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
DECODER = {**TOKENS, **ENCODER, "max_position_embeddings": 128}
GROUPED = {**DECODER, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 12}
WINDOW = {"sliding_window": 4}
ALTERNATING = {
    **GROUPED,
    **WINDOW,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}

# Settings of a decoder of each family: the fewest layers that have what is special in it.
DECODERS = {
    "gpt2": {**TOKENS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128},
    "llama": GROUPED,
    "mistral": {**GROUPED, **WINDOW},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "phi3": GROUPED,
    "granite": {**GROUPED, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    "olmo2": GROUPED,
    "smollm3": {**GROUPED, "num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "gemma2": ALTERNATING,
    "gemma3_text": ALTERNATING,
    "mixtral": {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen2_moe": {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**GROUPED, **EXPERTS, "head_dim": 8},
    "gpt_neox": {**DECODER, "rotary_pct": 0.5},
}

RNG = np.random.RandomState(0)
IDS = RNG.randint(3, 40, (4, 6))
LABELS = RNG.randint(0, 2, 4)
IMAGES = RNG.normal(size=(4, 8, 8, 3)).astype(np.float32)
CLASSES = {"num_labels": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# Class and settings of a model that generates no text, the data that it is tuned on, and the
# inputs of transformers.
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]] = {
    "bert": (
        "AutoModelForSequenceClassification",
        {**ENCODER, **CLASSES, "vocab_size": 40},
        {"input_ids": IDS, "label": LABELS},
        {"input_ids": IDS},
    ),
    "vit": (
        "AutoModelForImageClassification",
        {**ENCODER, **CLASSES, "image_size": 8, "patch_size": 4},
        {"image": IMAGES, "label": LABELS},
        {"pixel_values": IMAGES.transpose(0, 3, 1, 2)},
    ),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {
            "vocab_size": 40,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 1,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        {"source_ids": IDS, "input_ids": IDS[:, ::-1], "target_labels": IDS},
        {"input_ids": IDS, "decoder_input_ids": IDS[:, ::-1]},
    ),
}


def test_every_family_has_a_case():
    assert DECODERS.keys() | OTHERS.keys() == FAMILIES.keys()


def write_model(transformers, folder, class_name, name, settings):
    import torch

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **settings)
    model = getattr(transformers, class_name).from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.05, std=0.3)
    model.save_pretrained(folder)


def write_tokenizer(folder):
    conftest.write_tokenizer(folder)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": conftest.TEMPLATE,
    }
    text = json.dumps(tokenizer_config)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def assert_tuned(folder, base):
    """Raises unless a folder has the tensors of its base, with other numbers."""
    tensors, others = (load_file(path / "model.safetensors") for path in (folder, base))
    assert tensors.keys() == others.keys()
    assert any(not np.array_equal(tensor, others[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", DECODERS)
def test_tuned_and_preferred_model_is_the_same_in_transformers(
    transformers,
    name,
    tmp_path,
    monkeypatch,
):
    import torch

    monkeypatch.chdir(tmp_path)
    write_model(transformers, tmp_path / "base", "AutoModelForCausalLM", name, DECODERS[name])
    write_tokenizer(tmp_path / "base")
    chats = []
    for i in range(12):
        question = {"role": "user", "content": f"to be {i}"}
        chats.append({"messages": [question, {"role": "assistant", "content": "or not"}]})
    write_rows(tmp_path / "chat.jsonl", chats)
    pairs = [{"prompt": f"to be {i}", "chosen": "or", "rejected": "or not"} for i in range(12)]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    short = ["steps=2", "batch_size=2", "held_out=0", "learning_rate=0.01"]
    chat = ["data=chat.jsonl", "sequence_length=48", *short]
    for words in (
        ["train", "sft", "base=base", *chat, "tuning=full", "dir=full"],
        ["export", "full", "--to", "tuned"],
        ["train", "sft", "base=tuned", *chat, "tuning=lora", "rank=2", "dir=lora"],
        ["export", "lora", "--to", "adapted", "--merge"],
        ["train", "dpo", "base=adapted", "data=pairs.jsonl", *short, "rank=2", "dir=dpo"],
        ["export", "dpo", "--to", "preferred", "--merge"],
    ):
        assert main(words) == 0, words
    folders = [tmp_path / name for name in ("base", "tuned", "adapted", "preferred")]
    for before, after in itertools.pairwise(folders):
        assert_tuned(after, before)

    prompt = [{"role": "user", "content": "to be"}]
    read: Any = load_tokenizer("preferred")
    ids = read.chat_template.encode(prompt, tokenizer=read.tokenizer, add_generation_prompt=True)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained("preferred")
    their_ids = their_tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_dict=False
    )
    assert ids.tolist() == list(their_ids)

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        "preferred", attn_implementation="eager", dtype=torch.float32
    )
    assert reference.config.model_type == name
    with torch.no_grad():
        tokens = reference.generate(
            torch.tensor(np.asarray(ids)[None]), max_new_tokens=10, do_sample=False
        )
    (completion,) = weft.generate("preferred", [ids], tokens=10, temperature=0)
    assert completion.token_ids == tokens[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", OTHERS)
def test_other_tuned_models_are_the_same_in_transformers(transformers, name, tmp_path):
    import torch

    class_name, settings, data, inputs = OTHERS[name]
    base, out, run = tmp_path / "base", tmp_path / "out", tmp_path / "run"
    write_model(transformers, base, class_name, name, settings)
    result = weft.fit(
        huggingface_model_config(base),
        data,
        base=str(base),
        steps=2,
        batch_size=4,
        learning_rate=0.01,
        dir=str(run),
        progress=False,
    )
    assert main(["export", str(run), "--to", str(out)]) == 0
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert_tuned(out, base)
    model = getattr(transformers, class_name).from_pretrained(out).eval()
    with torch.no_grad():
        logits = model(**{key: torch.tensor(x.copy()) for key, x in inputs.items()}).logits
    np.testing.assert_allclose(result.last.predict(data)["logits"], logits, atol=1e-4)
