"""Tokenizer and chat template of a Hugging Face folder.

tokenizer.json, or tokenizer.model    the tokens
tokenizer_config.json                 which of them are special; the chat template, too
added_tokens.json                     further tokens of a tokenizer.model
special_tokens_map.json               in folders of older libraries: which are special
chat_template.jinja                   the chat template
additional_chat_templates/*.jinja     further ones, by name
chat_template.json                    in folders of models with images
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import ChatTemplateError, TokenizerError
from weft.input.chat import ChatTemplate
from weft.input.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)
from weft.interop.huggingface.folder import (
    ADDED_TOKENS,
    SENTENCEPIECE,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    SourceFolder,
)
from weft.serialization.untrusted import check_local_path

_TEMPLATE, _TEMPLATE_OBJECT = "chat_template.jinja", "chat_template.json"
_NAMED_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token"),
    *("cls_token", "mask_token"),
)


class LoadedTokenizer(NamedTuple):
    """Tokenizer and chat template of a folder.

    Attributes:
        tokenizer: The tokenizer.
        chat_template: Its chat template, None if the folder has none.
    """

    tokenizer: HuggingFaceTokenizer | SentencePieceTokenizer
    chat_template: ChatTemplate | None


def has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    """Returns whether a folder has a file that `load_tokenizer` reads a tokenizer from."""
    paths = [os.path.join(folder, name) for name in (TOKENIZER, SENTENCEPIECE)]
    return any(map(os.path.lexists, paths))


def load_tokenizer(folder: str | os.PathLike[str]) -> LoadedTokenizer:
    """Reads the tokenizer and the chat template of a Hugging Face folder.

        tokenizer, chat_template = weft.interop.load_tokenizer("qwen3-0.6b")

    `eos_id` and `pad_id` are those of the folder. Without a token for padding, `pad_id` is
    `eos_id`, so that no id is beyond the rows of the model. `weft.input.tokenizers.bos_ids` are
    what the tokenizer's own post-processor puts before a text. Links in the folder are followed
    only within Hugging Face's own cache.

    Raises:
        TokenizerError: If there is no folder, it has no `tokenizer.json` or `tokenizer.model`, or
            that cannot be loaded.
        PathNotLocalError: If the folder is a URL.
        ChatTemplateError: If the chat template is not text.
        WeightsReadError: If another file cannot be read.
        MissingExtraError: If the extra `text` is not installed.
    """
    check_local_path(folder, "folder")
    source = SourceFolder(folder)
    if not source.path.is_dir():
        raise TokenizerError(
            f"there is no folder {str(folder)!r}; download the checkpoint, and pass its folder"
        )
    settings = source.read_object(TOKENIZER_CONFIG) or {}
    named_tokens = _named_tokens(source, settings)
    return LoadedTokenizer(
        _tokenizer(source, settings, named_tokens),
        _chat_template(source, settings, named_tokens),
    )


def _named_tokens(
    source: SourceFolder, settings: Mapping[str, Any]
) -> dict[str, str]:
    """Returns the special tokens by name, such as `eos_token`."""
    values = dict(settings)
    # Newer folders list all tokens in one file.
    if "added_tokens_decoder" not in settings:
        values |= source.read_object(SPECIAL_TOKENS) or {}
    extra_tokens = values.get("extra_special_tokens")
    if isinstance(extra_tokens, dict):
        values |= extra_tokens
        names = (*_NAMED_TOKENS, *extra_tokens)
    else:
        names = _NAMED_TOKENS
    tokens: dict[str, str] = {}
    for name in names:
        token = _content(values.get(name))
        if token is not None:
            tokens[name] = token
    return tokens


def _content(token: object) -> str | None:
    """Returns the text of a token, which may be written with how it is found in a text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _tokenizer(
    source: SourceFolder,
    settings: Mapping[str, Any],
    named_tokens: Mapping[str, str],
) -> HuggingFaceTokenizer | SentencePieceTokenizer:
    eos_token = named_tokens.get("eos_token")
    pad_token = named_tokens.get("pad_token", eos_token)
    # Read here for its checks: no link out of the folder, a bounded size.
    if source.read(TOKENIZER) is not None:
        return HuggingFaceTokenizer(
            str(source.path / TOKENIZER),
            eos_token=eos_token,
            pad_token=pad_token,
            special_tokens=_special_tokens(settings, named_tokens),
        )
    if source.read(SENTENCEPIECE) is not None:
        return SentencePieceTokenizer(
            str(source.path / SENTENCEPIECE),
            eos_token=eos_token,
            pad_token=pad_token,
            special_tokens=_added_ids(source, settings),
            adds_bos=settings.get("add_bos_token") is not False,
        )
    raise TokenizerError(
        f"{str(source.path)!r} has neither {TOKENIZER} nor {SENTENCEPIECE}; pass the folder of a "
        "checkpoint with the file of its tokenizer"
    )


def _added_ids(
    source: SourceFolder, settings: Mapping[str, Any]
) -> dict[str, int]:
    """Returns the ids of tokens that are not in the file of the tokenizer."""
    ids: dict[str, int] = {}
    for token, token_id in (source.read_object(ADDED_TOKENS) or {}).items():
        if isinstance(token_id, int):
            ids[token] = token_id
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for token_id, token in decoder.items():
            content = _content(token)
            if content and token_id.isdecimal():
                ids[content] = int(token_id)
    return ids


def _special_tokens(
    settings: Mapping[str, Any], named_tokens: Mapping[str, str]
) -> list[str]:
    """Returns all special tokens that the folder names, those with an id in the order of ids."""
    tokens: list[str] = []
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        ids = [key for key in decoder if key.isdecimal()]
        for key in sorted(ids, key=int):
            token = decoder[key]
            if isinstance(token, dict) and token.get("special"):
                tokens.append(_content(token) or "")
    tokens.extend(named_tokens.values())
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(name)
        if isinstance(value, list):
            tokens.extend(_content(token) or "" for token in value)
    return [token for token in dict.fromkeys(tokens) if token]


def _chat_template(
    source: SourceFolder,
    settings: Mapping[str, Any],
    named_tokens: Mapping[str, str],
) -> ChatTemplate | None:
    templates = _template_files(source)
    if not templates:
        value = settings.get("chat_template")
        if value is None:
            values = source.read_object(_TEMPLATE_OBJECT) or {}
            value = values.get("chat_template")
        if value is None:
            return None
        templates = _templates_by_name(value, source.path)
    if list(templates) == ["default"]:
        return ChatTemplate(templates["default"], named_tokens)
    return ChatTemplate(templates, named_tokens)


def _template_files(source: SourceFolder) -> dict[str, str]:
    """Returns the chat templates of the folder that are files, by name."""
    names = {"default": _TEMPLATE}
    for file in source.template_names():
        names[Path(file).stem] = file
    templates: dict[str, str] = {}
    for name, file in names.items():
        data = source.read(file)
        if data is None:
            continue
        try:
            templates[name] = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ChatTemplateError(
                f"{str(source.path / file)!r} is not text in UTF-8 ({error.reason}); copy the file "
                "again"
            ) from error
    return templates


def _templates_by_name(value: object, path: Path) -> dict[str, str]:
    """Returns the templates of a setting: one, or a list of `name` and `template`."""
    if isinstance(value, str):
        return {"default": value}
    templates: dict[str, str] = {}
    if isinstance(value, list):
        for entry in value:
            if not isinstance(entry, dict):
                break
            name, template = entry.get("name"), entry.get("template")
            if not isinstance(name, str) or not isinstance(template, str):
                break
            templates[name] = template
        else:
            if templates:
                return templates
    raise ChatTemplateError(
        f"'chat_template' of {str(path)!r} is of type {type(value).__name__}; expected a string, "
        "or a list of dicts of 'name' and 'template'"
    )
