"""Tokenizers, prompts and conversations as in transformers."""

import json
import pickle
import random
import re

import numpy as np
import pytest

from tests.input import tokenizer_kinds
from tests.interop.huggingface import chat_templates
from weft.errors import (
    ChatTemplateError,
    PathNotLocalError,
    TokenizerError,
    WeightsReadError,
)
from weft.input import ChatTemplate, HuggingFaceTokenizer, SentencePieceTokenizer
from weft.input.tokenizers import bos_ids
from weft.interop import load_tokenizer

transformers = pytest.importorskip("transformers", reason="needs the extra parity")

SPECIAL_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
    *("<|system|>", "<|user|>", "<|assistant|>"),
]
TEMPLATES = {
    "chatml": chat_templates.CHATML,
    "llama3": chat_templates.LLAMA3,
    "mistral": chat_templates.MISTRAL,
    "gemma": chat_templates.GEMMA,
    "phi3": chat_templates.PHI3,
    "qwen": chat_templates.QWEN,
}
WORDS = [
    "one",
    " two",
    "Héllo",
    "  ",
    "\n",
    "\n\n",
    "漢字",
    "🙂",
    "<|im_end|>",
    "don't",
    "<s>",
    "!",
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "é": ["<", 1.5, None]}},
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that transformers has written, with its tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizer_kinds.byte_level(add_prefix_space=False)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS,
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(folder):
    return load_tokenizer(folder).tokenizer


def text_of(rng, *, some=False):
    return "".join(rng.choices(WORDS, k=rng.randint(int(some), 6)))


def conversation(rng, name):
    """Returns the messages and tools of a conversation that a template can write."""
    messages = []
    if name != "gemma" and rng.random() < 0.5:
        messages.append({"role": "system", "content": text_of(rng)})
    tools = TOOLS if name in ("llama3", "qwen") and rng.random() < 0.5 else None
    for _ in range(rng.randint(1, 3)):
        content = text_of(rng)
        if name in ("chatml", "llama3", "gemma") and rng.random() < 0.3:
            parts = [text_of(rng) for _ in range(rng.randint(1, 2))]
            content = [{"type": "text", "text": part} for part in parts]
        messages.append({"role": "user", "content": content})
        if tools and rng.random() < 0.7:
            call = {"role": "assistant", "tool_calls": [CALL]}
            if name == "qwen":
                call["content"] = text_of(rng)
            messages += [call, {"role": "tool", "name": "weather", "content": text_of(rng)}]
        answer = {"role": "assistant", "content": text_of(rng, some=True) + "."}
        if name == "qwen" and rng.random() < 0.3:
            answer["reasoning_content"] = text_of(rng)
        messages.append(answer)
    return messages, tools


def conversations(name, n=50):
    rng = random.Random(name)
    return [conversation(rng, name) for _ in range(n)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_of_conversations(name, theirs, ours):
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "<|end|>"})
    for messages, tools in conversations(name):
        kwargs = {"tools": tools, "chat_template": TEMPLATES[name]}
        expected = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **kwargs
        )
        ids, is_learned = template.encode_learned(messages, tokenizer=ours, tools=tools)
        assert ids.tolist() == expected["input_ids"]
        assert is_learned.astype(int).tolist() == expected["assistant_masks"]
        kwargs |= {"add_generation_prompt": True, "return_dict": False}
        prompt = theirs.apply_chat_template(messages[:-1], **kwargs)
        kwargs = {"tools": tools, "add_generation_prompt": True}
        assert template.encode(messages[:-1], tokenizer=ours, **kwargs).tolist() == prompt
        kwargs = {"tools": tools, "continue_final_message": True}
        text = theirs.apply_chat_template(
            messages, tokenize=False, chat_template=TEMPLATES[name], **kwargs
        )
        assert template.render(messages, **kwargs) == text


@pytest.mark.parametrize("name", TEMPLATES)
def test_differences_of_prompts_equal_blocks(name, ours):
    special_tokens = {"bos_token": "<s>", "eos_token": "<|end|>"}
    template = ChatTemplate(TEMPLATES[name], special_tokens)
    blocks = re.compile(r"\{%-? (end)?generation %\}")
    # As the templates are published.
    plain = ChatTemplate(blocks.sub("{#- -#}", TEMPLATES[name]), special_tokens)
    for messages, tools in conversations(name, n=10):
        expected = template.encode_learned(messages, tokenizer=ours, tools=tools)
        tokens = plain.encode_learned(messages, tokenizer=ours, tools=tools)
        assert tokens.ids.tolist() == expected.ids.tolist()
        if name == "phi3":  # the answer ends with eos_token, too
            expected.is_learned[-1] = True
        assert tokens.is_learned.tolist() == expected.is_learned.tolist()


PROMPTS = [
    "",
    "<|end|>",
    "one <keep> two<keep>",
    "  <left>  <right>  one",
    "one<word>two <word> three",
    "Lower<LOWER> <lower>\n<|end|><|end|> \n",
    "<code>one</code>",
    "é<|END|>漢字<|end|>",
    " <|end|>one",
]


@pytest.mark.parametrize("kind", tokenizer_kinds.HUGGING_FACE)
def test_prompts(kind, tmp_path):
    from tokenizers import AddedToken

    tokenizer = tokenizer_kinds.HUGGING_FACE[kind]()
    special = {"special": True, "normalized": False}
    tokenizer.add_special_tokens(
        [
            AddedToken("<left>", lstrip=True, **special),
            AddedToken("<right>", rstrip=True, **special),
            AddedToken("<word>", single_word=True, **special),
        ]
    )
    tokenizer.add_tokens(
        [AddedToken("<lower>", normalized=True), AddedToken("<keep>", lstrip=True, rstrip=True)]
    )
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    theirs.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path).tokenizer
    assert ours.eos_id == ours.pad_id == theirs.eos_token_id
    for text in PROMPTS:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, parse_special=True).tolist() == expected
        assert ours.encode(text.encode(), parse_special=True).tolist() == expected
        ids, offsets = ours.encode_with_offsets(text)
        assert ids.tolist() == expected
        assert offsets.shape == (len(ids), 2)
        # Documents are as before.
        special_ids = theirs.convert_tokens_to_ids(["<left>", "<right>", "<word>"])
        assert not np.isin(ours.encode(text), special_ids).any()


def test_conversation_that_is_not_unicode(ours):
    messages = [{"role": "assistant", "content": "a\ud800"}]
    template = ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    for encode in (template.encode, template.encode_learned):
        with pytest.raises(TokenizerError, match="at 1, half of a surrogate pair"):
            encode(messages, tokenizer=ours)


def test_prompts_of_sentencepiece(tmp_path):
    kwargs = tokenizer_kinds.SENTENCE_PIECE["pieces of BPE"]
    tokenizer_kinds.train_pieces(tmp_path / "tokenizer", **kwargs)
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path).tokenizer
    assert isinstance(ours, SentencePieceTokenizer)
    assert (ours.eos_id, ours.pad_id, bos_ids(ours)) == (2, 2, (1,))
    for text in ["one two", "<s>one two</s> three", "one</s>two <s> Hi\n x", "<s>é</s>漢 <s></s>"]:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, parse_special=True).tolist() == expected
        assert not np.isin(ours.encode(text), [1, 2]).any()


def test_beginning_of_texts_of_sentencepiece(tmp_path):
    kwargs = tokenizer_kinds.SENTENCE_PIECE["pieces of BPE"]
    tokenizer_kinds.train_pieces(tmp_path / "tokenizer", **kwargs)
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    for adds_bos, expected in ((True, (1,)), (False, ())):
        values = {**settings, "add_bos_token": adds_bos}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ours = load_tokenizer(tmp_path).tokenizer
        assert ours.bos_ids == pickle.loads(pickle.dumps(ours)).bos_ids == expected
        assert [*expected, *ours.encode("one two")] == theirs("one two").input_ids


def test_unknown_character_after_a_special_piece(tmp_path):
    path = tokenizer_kinds.train_pieces(
        tmp_path / "tokenizer", **tokenizer_kinds.SENTENCE_PIECE["pieces without bytes"]
    )
    tokenizer = SentencePieceTokenizer(path)
    ids = tokenizer.encode("</s>漢</s>one", parse_special=True).tolist()
    assert ids[:3] == [2, 0, 2]
    assert tokenizer.decode(ids[3:]) == "one"


FOLDERS = {
    "strings": ({"bos_token": "<s>", "eos_token": "<|end|>", "pad_token": "<p>"}, {}),
    "dicts": (
        {
            "eos_token": {"content": "<|end|>", "lstrip": False, "__type": "AddedToken"},
            "additional_special_tokens": [{"content": "<x>", "__type": "AddedToken"}],
        },
        {},
    ),
    "older": ({"eos_token": "one"}, {"eos_token": "<|end|>", "bos_token": {"content": "<s>"}}),
    "named": ({"eos_token": "<|end|>", "extra_special_tokens": {"image_token": "<x>"}}, {}),
    "decoder": (
        {
            "eos_token": "<|end|>",
            "added_tokens_decoder": {
                "301": {"content": "<x>", "special": True},
                "300": {"content": "<s>", "special": True},
            },
        },
        {"eos_token": "one"},
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_special_tokens_of_folders(name, tmp_path):
    settings, special_tokens = FOLDERS[name]
    tokenizer_kinds.byte_level(add_prefix_space=False).save(str(tmp_path / "tokenizer.json"))
    settings = {**settings, "tokenizer_class": "PreTrainedTokenizerFast"}
    settings["chat_template"] = "{{ bos_token }}, {{ eos_token }}, {{ image_token }}{{ pad_token }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if special_tokens:
        content = json.dumps(special_tokens)
        (tmp_path / "special_tokens_map.json").write_text(content, encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours, template = load_tokenizer(tmp_path)
    assert ours.eos_id == theirs.eos_token_id
    if theirs.pad_token_id is not None:
        assert ours.pad_id == theirs.pad_token_id
    text = "<s>one<|end|><x> <p>"
    assert ours.encode(text, parse_special=True).tolist() == theirs(text).input_ids
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == theirs.apply_chat_template(messages, tokenize=False)


def test_templates_of_folders(folder, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "hi"}]
    tokenizer.chat_template = {"default": "d", "tool_use": "t", "rag": "{{ bos_token }}"}
    tokenizer.save_pretrained(tmp_path)
    template = load_tokenizer(tmp_path).chat_template
    assert template.render(messages) == "d"
    assert template.render(messages, tools=TOOLS) == "t"
    assert template.named("rag").render(messages) == "<s>"
    # A file precedes the setting, as in transformers.
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["chat_template"] = [{"name": "default", "template": "s"}]
    path.write_text(json.dumps(settings), encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template.render(messages) == "d"
    (tmp_path / "chat_template.jinja").unlink()
    for file in (tmp_path / "additional_chat_templates").iterdir():
        file.unlink()
    assert load_tokenizer(tmp_path).chat_template.render(messages) == "s"
    del settings["chat_template"]
    path.write_text(json.dumps(settings), encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "j"}', encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template.render(messages) == "j"


def test_tokens_before_a_text(tmp_path):
    from tokenizers import processors

    tokenizer = tokenizer_kinds.byte_level(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>"])
    token_id = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", token_id)]),
        ]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path).tokenizer
    assert bos_ids(ours) == (token_id,)
    _, offsets = ours.encode_with_offsets("one\n\n two")
    # Spaces are part of their tokens.
    assert offsets[:, 1].tolist() == [*offsets[1:, 0].tolist(), 9]


BAD_FOLDERS = {
    "nothing": ({}, TokenizerError, "has neither tokenizer.json nor tokenizer.model; pass the"),
    "no tokenizer": ({"tokenizer.json": "{}"}, TokenizerError, "is not a tokenizer.json: "),
    "no object": ({"tokenizer_config.json": "[]"}, WeightsReadError, "it is not a JSON object"),
    "template of numbers": (
        {"tokenizer_config.json": '{"chat_template": 7}'},
        ChatTemplateError,
        "'chat_template' of .* is of type int; expected a string, or a list of dicts of 'name'",
    ),
    "template without a name": (
        {"tokenizer_config.json": '{"chat_template": [{"template": "x"}]}'},
        ChatTemplateError,
        "'chat_template' of .* is of type list; expected a string",
    ),
    "template of other bytes": (
        {"chat_template.jinja": "\udcff"},
        ChatTemplateError,
        "chat_template.jinja' is not text in UTF-8",
    ),
    "missing token": (
        {"tokenizer_config.json": '{"eos_token": 7}', "tokenizer.json": "{"},
        TokenizerError,
        "is not a tokenizer.json",
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_folders(name, folder, tmp_path):
    files, error, message = BAD_FOLDERS[name]
    if name != "nothing" and "tokenizer.json" not in files:
        content = (folder / "tokenizer.json").read_bytes()
        (tmp_path / "tokenizer.json").write_bytes(content)
    for file, text in files.items():
        (tmp_path / file).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(error, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja"])
def test_links_out_of_a_folder(file, folder, tmp_path):
    content = (folder / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / file).unlink(missing_ok=True)
    (tmp_path / file).symlink_to(folder / "tokenizer.json")
    with pytest.raises(WeightsReadError, match="is a symbolic link, where a file was expected"):
        load_tokenizer(tmp_path)


def test_link_to_further_templates(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "additional_chat_templates").symlink_to(folder)
    with pytest.raises(WeightsReadError, match="is a symbolic link, where a directory was expect"):
        load_tokenizer(tmp_path)


def test_loaded_tokenizers_are_copied(ours):
    import pickle

    copy = pickle.loads(pickle.dumps(ours))
    text = "one<|im_start|>"
    assert (
        copy.encode(text, parse_special=True).tolist()
        == ours.encode(text, parse_special=True).tolist()
    )
    assert copy.fingerprint == ours.fingerprint
    # The file has the tokens that the folder names; other special tokens are other ids.
    kwargs = {"eos_token": "<|end|>", "pad_token": "<|end|>"}
    path = str(ours._arguments[0])
    assert HuggingFaceTokenizer(path, **kwargs).fingerprint == ours.fingerprint
    other = HuggingFaceTokenizer(path, special_tokens=["<think>"], **kwargs)
    assert other.fingerprint != ours.fingerprint


def test_folder_that_is_not_here():
    with pytest.raises(TokenizerError, match="there is no folder 'qwen/qwen3'; download the check"):
        load_tokenizer("qwen/qwen3")
    with pytest.raises(PathNotLocalError, match="folder='hf://qwen/qwen3' is a URL"):
        load_tokenizer("hf://qwen/qwen3")


def test_added_tokens_of_sentencepiece(tmp_path):
    kwargs = tokenizer_kinds.SENTENCE_PIECE["pieces of BPE"]
    tokenizer_kinds.train_pieces(tmp_path / "tokenizer", **kwargs)
    num_pieces = SentencePieceTokenizer(str(tmp_path / "tokenizer.model"))._num_pieces
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            str(num_pieces): {"content": "<|im_start|>", "special": True},
            str(num_pieces + 1): {"content": "<|im_end|>", "special": True},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path).tokenizer
    text = "<|im_start|>one two<|im_end|> three"
    ids = ours.encode(text, parse_special=True)
    assert ids.tolist() == theirs(text, add_special_tokens=False).input_ids
    assert (ours.eos_id, ours.vocab_size) == (num_pieces + 1, num_pieces + 2)
    assert max(ours.encode(text)) < num_pieces
    assert ours.decode(ids) == "one two three"
    assert len(ours.token_num_bytes) == ours.vocab_size
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    added = json.dumps({"<|im_start|>": num_pieces})
    (tmp_path / "added_tokens.json").write_text(added, encoding="utf-8")
    ours = load_tokenizer(tmp_path).tokenizer
    assert ours.encode("<|im_start|>", parse_special=True).tolist() == [num_pieces]


def test_named_tokens_are_special(tmp_path):
    tokenizer = tokenizer_kinds.byte_level(add_prefix_space=False)
    tokenizer.add_tokens(["<x>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<x>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path).tokenizer
    text = "one <x> two"
    assert ours.encode(text, parse_special=True).tolist() == theirs(text).input_ids
    assert ours.eos_id in ours.encode(text, parse_special=True)
    assert ours.eos_id not in ours.encode(text)
