"""The beginning of a text, as a tokenizer's own template has it."""

import shutil

import grain
import numpy as np
import pytest

from tests.input import tokenizer_kinds
from weft.cli.configs import load_config
from weft.cli.trained_models import find_tokenizer
from weft.debug.lookup_checks import check_tokens
from weft.errors import TokenizerError
from weft.input.chat import ChatTemplate, encode_example
from weft.input.grain import DispatchConfig
from weft.input.grain_lm import text_to_lm_eval_input, text_to_lm_training_input
from weft.input.grain_text import tokenize_turns
from weft.input.text import lm_documents_source, lm_stream_source
from weft.input.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    encode_prompt,
    with_bos,
)

TEXTS = ["one two", "two"]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")
    folder = tmp_path_factory.mktemp("templates")

    def get(template, **kwargs):
        tokenizer = tokenizer_kinds.byte_level(add_prefix_space=False)
        tokenizer.add_special_tokens(["<|bos|>", "<|user|>"])
        if template:
            special = [(t, tokenizer.token_to_id(t)) for t in template.split() if t != "$A"]
            tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single=template, special_tokens=special
            )
        path = folder / "tokenizer.json"
        tokenizer.save(str(path))
        return HuggingFaceTokenizer(str(path), eos_token="<|end|>", **kwargs), tokenizer

    return get


@pytest.mark.parametrize(
    "template", ["<|bos|> $A", "<|bos|> $A <|end|>", "<|bos|> <|user|> $A", "<|end|> $A"]
)
def test_documents_begin_as_the_template_says(load, template):
    tokenizer, reference = load(template)
    end = tokenizer.eos_id
    # What the library puts before a text; the input puts ends around documents itself.
    want = [end]
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=True).ids
        ids = ids[:-1] if template.endswith("<|end|>") else ids
        want += [*(ids[1:] if ids[0] == end else ids), end]
    documents = grain.MapDataset.source([{"text": text} for text in TEXTS])
    options = {"documents": documents, "tokenizer": tokenizer, "add_bos": True}
    options |= {"sequence_length": 32, "global_batch_size": 1, "is_training": False}
    for source in (lm_documents_source(**options), lm_stream_source(**options)):
        (batch,) = source(DispatchConfig(0, 1))
        live = batch["live_targets"][0]
        assert batch["target_labels"][0][live].tolist() == want[1:]
        # The second document begins with the end of the first.
        assert (batch["input_ids"][0][live] == end).sum() == 2
        assert batch["target_num_bytes"].tolist() == [len("".join(TEXTS))]
    for make in (text_to_lm_training_input, text_to_lm_eval_input):
        examples = list(make(documents, vocab=tokenizer, max_len=32, add_bos=True))
        targets = [one["target_labels"][one["live_targets"]] for one in examples]
        assert np.concatenate(targets).tolist() == want[1:]


def test_conversations_begin_with_bos(load):
    tokenizer, _ = load("<|bos|> $A")
    turns = grain.MapDataset.source([{"prompt": "one", "response": "two"}])
    plain = tokenize_turns(turns, vocab=tokenizer)[0]
    example = tokenize_turns(turns, vocab=tokenizer, add_bos=True)[0]
    assert example["input_ids"].tolist() == [*tokenizer.bos_ids, *plain["input_ids"][1:]]
    np.testing.assert_array_equal(example["target_labels"], plain["target_labels"])


def test_bos_of_sentencepiece(tmp_path):
    pytest.importorskip("sentencepiece", reason="needs the extra text")
    path = tokenizer_kinds.train_pieces(tmp_path / "pieces", model_type="unigram")
    assert SentencePieceTokenizer(path).bos_ids == (1,)
    path = tokenizer_kinds.train_pieces(tmp_path / "none", model_type="unigram", bos_id=-1)
    assert SentencePieceTokenizer(path).bos_ids == ()


def test_tokenizer_without_bos(load):
    documents = grain.MapDataset.source([{"text": "one"}])
    options = {"documents": documents, "add_bos": True, "sequence_length": 4}
    options |= {"global_batch_size": 1, "is_training": False}
    for tokenizer in (ByteTokenizer(), load(None)[0]):
        with pytest.raises(TokenizerError, match=r"no token before a text, so add_bos=True has no"):
            lm_documents_source(tokenizer=tokenizer, **options)


def test_evaluation_and_prompts_begin_as_the_training(load, tmp_path):
    tokenizer, _ = load("<|bos|> $A")
    path = str(tmp_path / "tokenizer.json")
    shutil.copy(tokenizer.__reduce__()[0].args[0], path)
    cfg = load_config("lm-tiny", [f"tokenizer={path}", "input.source.add_bos=True"])
    with pytest.raises(TokenizerError, match=r"set the same `tokenizer` and `add_bos` for both"):
        check_tokens(cfg)
    cfg.evalers["held_out"].input.source.add_bos = True
    check_tokens(cfg)
    found = find_tokenizer(cfg)
    assert found.encode("two").tolist() == [*tokenizer.bos_ids, *tokenizer.encode("two")]
    assert found.decode(found.encode("two")) == "two"


def test_prompts_and_conversations(load):
    tokenizer, reference = load("<|bos|> $A")
    with_beginning = with_bos(tokenizer)
    ids = encode_prompt(with_beginning, "<|user|>one").tolist()
    assert ids == reference.encode("<|user|>one").ids
    # A template writes the beginning itself.
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<|bos|>"})
    messages = [{"role": "user", "content": "<|user|>one"}]
    assert template.encode(messages, tokenizer=with_beginning).tolist() == ids
    tokens = encode_example({"text": "<|user|>"}, tokenizer=with_beginning)
    want = [*tokenizer.bos_ids, *tokenizer.encode("<|user|>"), tokenizer.eos_id]
    assert tokens.ids.tolist() == want
    assert tokens.is_learned.tolist() == [i > 0 for i in range(len(want))]
