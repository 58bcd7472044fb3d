"""Files of a Hugging Face folder besides weights: settings, tokenizer, generation, chat template.

    config.json                settings of the model
    generation_config.json     ids at which generation stops, and how it samples
    tokenizer.json             or tokenizer.model, or both
    tokenizer_config.json      special tokens, and the chat template of older folders
    special_tokens_map.json    special tokens, for older readers
    chat_template.jinja        the chat template

Weft has no field for many of these facts. A model that began as a checkpoint keeps them: they are
read again from its `base`, as data of bounded size, and written back; only what training has
changed is replaced. Nothing of them is run, and names of code (`auto_map`) are left out.
"""

import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from weft import errors
from weft._lazy import import_extra
from weft.interop.huggingface.settings import rope_settings
from weft.serialization import untrusted
from weft.serialization.directory import Directory

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"

_OBJECTS = (TOKENIZER_CONFIG, SPECIAL_TOKENS, "added_tokens.json", "chat_template.json")
_TEXTS = ("chat_template.jinja",)
_MAX_BYTES = 2**28
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What is true of the base's folder alone, and names of code.
_NOT_COPIED = ("auto_map", "_name_or_path", "quantization_config", "custom_pipelines")

_PathLike = str | os.PathLike[str]


class SourceFolder:
    """Folder of a checkpoint or tokenizer whose files are copied; it may be a stranger's.

    A link in it is followed only into the `blobs` of Hugging Face's own cache.
    """

    def __init__(self, path: _PathLike):
        self.path = Path(path)

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of a file, None if there is none.

        Raises WeightsReadError if it cannot be read.
        """
        path = self.path / name
        try:
            if path.is_symlink() and self._is_in_cache(path):
                path = path.resolve()
            return Directory(str(path.parent)).read_bytes(path.name, at_most=_MAX_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise errors.WeightsReadError(
                f"{str(path)!r} cannot be read ({error}). Put a copy of the file there."
            ) from error

    def _is_in_cache(self, path: Path) -> bool:
        folder = self.path.resolve()
        blobs = folder.parent.parent / "blobs"
        return folder.parent.name == "snapshots" and path.resolve().parent == blobs

    def read_object(self, name: str) -> dict[str, Any] | None:
        """Returns the JSON object of a file without names of code, None if there is none.

        Raises WeightsReadError if it cannot be read, or holds another JSON value.
        """
        data = self.read(name)
        if data is None:
            return None
        try:
            value = untrusted.parse_json(data)
            if not isinstance(value, dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            raise errors.WeightsReadError(
                f"{str(self.path / name)!r} cannot be read ({error}). Copy the file again."
            ) from error
        for key in _NOT_COPIED:
            value.pop(key, None)
        return value


def merged(
    model_values: Mapping[str, Any],
    base_values: Mapping[str, Any],
    rewritten_values: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns settings of a base, with what training has changed.

    Args:
        model_values: what Weft writes for the model.
        base_values: settings of the base.
        rewritten_values: what Weft writes for the base.
    """
    values = {**model_values, **base_values}
    for key, value in model_values.items():
        if rewritten_values.get(key) != value:
            values[key] = value
    # The same in the older and the newer names.
    rope = model_values.get("rope_parameters")
    if rope is not None:
        if rewritten_values.get("rope_parameters") == rope:
            base_rope = base_values.get("rope_parameters") or base_values.get("rope_scaling") or {}
            rope = {**base_rope, **rope}
        values |= rope_settings(rope)
    return values


def write_generation_config(
    folder: Directory, settings: Mapping[str, Any], base: SourceFolder | None
) -> str:
    """Writes how to generate: as the base says, with the ids of the settings."""
    values: dict[str, Any] = {}
    base_settings: dict[str, Any] = {}
    if base is not None:
        base_values = base.read_object(GENERATION_CONFIG)
        if base_values is not None:
            values = base_values
            base_settings = base.read_object(CONFIG) or {}
    for name in SPECIAL_IDS:
        if name not in values or base_settings.get(name) != settings[name]:
            values[name] = settings[name]
    _write_json(folder, GENERATION_CONFIG, values)
    return GENERATION_CONFIG


def write_tokenizer(
    folder: Directory, settings: Mapping[str, Any], tokenizer: _PathLike
) -> list[str]:
    """Writes the files of a tokenizer, by the names under which they are looked for.

    Args:
        tokenizer: its file, `*.json` or `*.model`; or the folder of a checkpoint that has one.

    Raises WeightsReadError if a file is not what its name says.
    """
    path = Path(tokenizer)
    source = SourceFolder(path if path.is_dir() else path.parent)
    target_names = {TOKENIZER: TOKENIZER, SENTENCEPIECE: SENTENCEPIECE}
    if not path.is_dir():
        is_model = path.suffix.lower() == ".model"
        target_names = {path.name: SENTENCEPIECE if is_model else TOKENIZER}
    tokens: dict[int, str] = {}
    written: list[str] = []
    for source_name, name in target_names.items():
        data = source.read(source_name)
        if data is not None:
            tokens |= _tokens(data, source.path / source_name, name)
            folder.write(name, data)
            written.append(name)
    if not written and not path.is_dir():
        raise errors.WeightsReadError(
            f"there is no {str(path)!r}, the file of the tokenizer. Put it there."
        )
    if not written:
        return []
    if TOKENIZER not in written:
        logger.warning(
            "%s is written as %s. Readers that do not use SentencePiece itself, such as "
            "transformers 5, may tokenize runs of spaces and Unigram models in another way.",
            path,
            SENTENCEPIECE,
        )
    for name in _OBJECTS:
        value = source.read_object(name)
        if value is not None:
            if value.get("tokenizer_class") == "TokenizersBackend":  # its name since version 5
                value["tokenizer_class"] = "PreTrainedTokenizerFast"
            _write_json(folder, name, value)
            written.append(name)
    for name in _TEXTS:
        data = source.read(name)
        if data is not None:
            folder.write(name, data)
            written.append(name)
    return written + _write_special_tokens(folder, settings, tokens, written)


def _tokens(data: bytes, path: Path, name: str) -> dict[int, str]:
    """Returns the tokens of a tokenizer by id, of a `tokenizer.json` the added ones.

    Raises WeightsReadError if it is none: a stranger's config names its path.
    """
    try:
        if name == SENTENCEPIECE:
            sentencepiece = import_extra("sentencepiece", "text", needed_by="this tokenizer")
            model = sentencepiece.SentencePieceProcessor(model_proto=data)
            return {i: model.id_to_piece(i) for i in range(model.get_piece_size())}
        value = untrusted.parse_json(data)
        untrusted.check_json(value, {"model": dict, "added_tokens?": [dict]})
        tokens: dict[int, str] = {}
        vocab = value["model"].get("vocab")
        if isinstance(vocab, dict):
            tokens = {i: token for token, i in vocab.items()}
        for token in value.get("added_tokens", []):
            tokens[token["id"]] = token["content"]
        return tokens
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise errors.WeightsReadError(
            f"{str(path)!r} is not copied as the tokenizer: {error}. Put the file of the tokenizer "
            "there."
        ) from error


def _write_special_tokens(
    folder: Directory,
    settings: Mapping[str, Any],
    tokens: Mapping[int, str],
    copied_files: Collection[str],
) -> list[str]:
    """Writes the files with special tokens that a tokenizer came without."""
    if TOKENIZER_CONFIG in copied_files:
        return []
    special_tokens: dict[str, str] = {}
    for name in SPECIAL_IDS:
        token_id: Any = settings[name]
        if isinstance(token_id, list) and token_id:
            token_id = token_id[0]
        if isinstance(token_id, int) and token_id in tokens:
            special_tokens[name.removesuffix("_id")] = tokens[token_id]
    values: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "clean_up_tokenization_spaces": False,
        **special_tokens,
    }
    if TOKENIZER in copied_files:
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    length = settings.get("max_position_embeddings", settings.get("n_positions"))
    if length is not None:
        values["model_max_length"] = length
    _write_json(folder, TOKENIZER_CONFIG, values)
    if SPECIAL_TOKENS in copied_files:
        return [TOKENIZER_CONFIG]
    _write_json(folder, SPECIAL_TOKENS, special_tokens)
    return [TOKENIZER_CONFIG, SPECIAL_TOKENS]


def _write_json(folder: Directory, name: str, value: Mapping[str, Any]) -> None:
    folder.write(name, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
