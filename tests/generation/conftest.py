"""A tiny Llama and its tokenizer in a folder, written by `transformers`."""

import json
import os
import sys
import warnings

import numpy as np
import pytest

TEXT = "to be or not to be, that is the question: whether 'tis nobler in the mind to suffer"

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def transformers():
    if sys.version_info >= (3, 12):
        pytest.importorskip("transformers", reason="torch's CPU build is there for Python 3.11")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        import torch
        import transformers
        from transformers import LlamaForCausalLM  # noqa: F401 - imported when asked for

        torch.manual_seed(0)
        yield transformers


def write_tokenizer(folder):
    """Writes a tokenizer of some merges of bytes, whose texts begin with `<s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def folder(transformers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer_config["chat_template"] = TEMPLATE
    text = json.dumps(tokenizer_config)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def generator(folder):
    from weft.generation import Generator

    return Generator(folder, batch_size=3)


@pytest.fixture(scope="session")
def reference(folder, transformers):
    """Returns a function of prompts that generates with `transformers`, one by one."""
    import torch

    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()

    def generate(ids, tokens, **settings):
        with torch.no_grad():
            inputs = torch.tensor(np.asarray(ids)[None])
            outputs = model.generate(
                inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **settings
            )
        return outputs[0, len(ids) :].tolist()

    return generate
