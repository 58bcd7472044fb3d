"""A folder of transformers is tuned, preferred and written back, and the same in both libraries."""

import json

import numpy as np
import pytest

import weft
from tests.generation import conftest
from tests.interop.huggingface.test_families import MODELS
from weft.cli import main
from weft.interop import load_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]
transformers = conftest.transformers


def write_base(transformers, folder, name):
    import torch

    class_name, settings = MODELS[name]
    cls = getattr(transformers, class_name)
    sizes = dict.fromkeys({"max_position_embeddings", "n_positions"} & settings.keys(), 128)
    tokens = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = cls(cls.config_class(**{**settings, **sizes, **tokens}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.05, std=0.3)
    folder.mkdir()
    model.save_pretrained(folder)
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


# The three ways in which a family is stored: fused kernels, layers that differ, experts.
@pytest.mark.parametrize("name", ["gpt2-untied", "gemma3_text", "qwen2_moe"])
def test_tuned_and_preferred_model_is_the_same_in_transformers(
    transformers,
    name,
    tmp_path,
    monkeypatch,
):
    import torch

    monkeypatch.chdir(tmp_path)
    write_base(transformers, tmp_path / "base", name)
    chats = []
    for i in range(12):
        question = {"role": "user", "content": f"to be {i}"}
        chats.append({"messages": [question, {"role": "assistant", "content": "or not"}]})
    write_rows(tmp_path / "chat.jsonl", chats)
    pairs = [{"prompt": f"to be {i}", "chosen": "or", "rejected": "or not"} for i in range(12)]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    short = ["steps=2", "batch_size=2", "held_out=0"]
    for words in (
        ["train", "sft", "base=base", "data=chat.jsonl", "dir=sft", "sequence_length=48", *short],
        ["export", "sft", "--to", "tuned", "--merge"],
        ["train", "dpo", "base=tuned", "data=pairs.jsonl", "dir=dpo", *short],
        ["export", "dpo", "--to", "preferred", "--merge"],
    ):
        assert main(words) == 0, words

    prompt = [{"role": "user", "content": "to be"}]
    tokenizer, template = load_tokenizer("preferred")
    ids = template.encode(prompt, tokenizer=tokenizer, add_generation_prompt=True)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained("preferred")
    their_ids = their_tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_dict=False
    )
    assert ids.tolist() == list(their_ids)

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        "preferred", attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        tokens = reference.generate(
            torch.tensor(np.asarray(ids)[None]), max_new_tokens=10, do_sample=False
        )
    (completion,) = weft.generate("preferred", [ids], tokens=10, temperature=0)
    assert completion.token_ids == tokens[0, len(ids) :].tolist()
