"""Files of a Hugging Face folder besides weights: settings, tokenizer, generation, chat templates.

    config.json                settings of the model
    generation_config.json     ids at which generation stops, and how it samples
    tokenizer.json             or tokenizer.model, vocab.json and merges.txt, …
    tokenizer_config.json      special tokens, and the chat template of older folders
    special_tokens_map.json    special tokens, for older readers
    preprocessor_config.json   sizes and scales of images
    chat_template.jinja        the chat template, and more in additional_chat_templates/

Weft has no field for many of these facts. A model that began as a checkpoint keeps them: they are
read again from its `base`, as data of bounded size, and written back, in the same bytes unless
training has changed a value in them. Nothing of them is run, and names of code (`auto_map`) are
left out.
"""

import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weft import errors
from weft._lazy import import_extra
from weft.serialization import untrusted
from weft.serialization.directory import Directory

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
PREPROCESSOR = "preprocessor_config.json"
TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DECODER_START = "decoder_start_token_id"  # of sequence-to-sequence models

# Next to any tokenizer.
_OBJECTS = (
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    ADDED_TOKENS,
    PREPROCESSOR,
    "chat_template.json",
)
_TEXTS = ("chat_template.jinja",)
# The vocabulary in other forms, which belong to a whole folder.
_VOCABULARIES = (
    TOKENIZER,
    SENTENCEPIECE,
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_TEMPLATES = "additional_chat_templates"
_MAX_TEMPLATES = 100
_MAX_BYTES = 2**28
_MAX_TEMPLATE_BYTES = 2**20
_WITH_NAMES_OF_CODE = (CONFIG, TOKENIZER_CONFIG)
# What is true of the base's folder alone, and names of code.
_NOT_COPIED = (
    "auto_map",
    "_name_or_path",
    "quantization_config",
    "custom_pipelines",
)

_PathLike = str | os.PathLike[str]


class ObjectFile(NamedTuple):
    """A JSON object, and the bytes of its file.

    >>> file = ObjectFile({"a": 1e-5}, b'{"a": 1e-5}')
    >>> file.bytes_of({"a": 1e-5})
    b'{"a": 1e-5}'
    """

    values: dict[str, Any]
    data: bytes

    def bytes_of(self, values: Mapping[str, Any]) -> bytes:
        """Returns the file of other values; of the same ones, the bytes as they are."""
        return self.data if values == self.values else json_bytes(values)


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a JSON file."""
    text = json.dumps(values, indent=2, ensure_ascii=False)
    return (text + "\n").encode()


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
        folder = self.path
        is_template = path.suffix == ".jinja"
        at_most = _MAX_TEMPLATE_BYTES if is_template else _MAX_BYTES
        try:
            if path.is_symlink() and self._is_in_cache(path):
                path = path.resolve()
                folder, name = path.parent, path.name
            return Directory(str(folder)).read_bytes(name, at_most=at_most)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise errors.WeightsReadError(
                f"{str(path)!r} cannot be read ({error}). Put a copy of the file there."
            ) from error

    def _is_in_cache(self, path: Path) -> bool:
        folder = self.path.resolve()
        blobs = folder.parent.parent / "blobs"
        return (
            folder.parent.name == "snapshots" and path.resolve().parent == blobs
        )

    def read_object_file(self, name: str) -> ObjectFile | None:
        """Returns the JSON object of a file without names of code, None if there is none.

        Raises WeightsReadError if it cannot be read, or holds another JSON value.
        """
        data = self.read(name)
        if data is None:
            return None
        try:
            values = untrusted.parse_json(data)
            if not isinstance(values, dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            raise errors.WeightsReadError(
                f"{str(self.path / name)!r} cannot be read ({error}). Copy the file again."
            ) from error
        if name not in _WITH_NAMES_OF_CODE:
            return ObjectFile(values, data)
        without_code = dict(values)
        for key in _NOT_COPIED:
            without_code.pop(key, None)
        if len(without_code) < len(values):
            data = json_bytes(without_code)
        return ObjectFile(without_code, data)

    def read_object(self, name: str) -> dict[str, Any] | None:
        """Returns the values of `read_object_file`, None if there is no file."""
        file = self.read_object_file(name)
        return None if file is None else file.values

    def template_names(self) -> list[str]:
        """Returns the names of further chat templates.

        Raises WeightsReadError if their folder cannot be read, or has too many.
        """
        try:
            folder = Directory(str(self.path))
            if not folder.has_folder(_TEMPLATES):
                return []
            file_names = sorted(folder.names(_TEMPLATES))
            if len(file_names) > _MAX_TEMPLATES:
                raise ValueError(
                    f"it has {len(file_names)} files; at most {_MAX_TEMPLATES} are copied"
                )
        except (OSError, ValueError) as error:
            raise errors.WeightsReadError(
                f"{str(self.path / _TEMPLATES)!r} cannot be read ({error}). Put a folder of chat "
                "templates there, or none."
            ) from error
        return [
            f"{_TEMPLATES}/{file_name}"
            for file_name in file_names
            if file_name.endswith(".jinja")
        ]


def generation_file(
    settings: Mapping[str, Any],
    base: SourceFolder | None,
    changed_ids: Mapping[str, Any],
) -> dict[str, bytes]:
    """Returns the file that says how to generate: that of the base, with the ids that changed.

    A base without such a file gets none: its readers take the ids of `config.json`.
    """
    if base is None:
        ids = {name: settings[name] for name in SPECIAL_IDS}
        if DECODER_START in settings:
            ids[DECODER_START] = settings[DECODER_START]
        return {GENERATION_CONFIG: json_bytes(ids)}
    generation = base.read_object_file(GENERATION_CONFIG)
    if generation is None:
        return {}
    values = {**generation.values, **changed_ids}
    return {GENERATION_CONFIG: generation.bytes_of(values)}


def tokenizer_files(
    settings: Mapping[str, Any],
    tokenizer: _PathLike | None,
    base: SourceFolder | None,
) -> dict[str, bytes]:
    """Returns the files of a tokenizer, by the names under which they are looked for.

    Args:
        tokenizer: its file, `*.json` or `*.model`, or a folder that has it; that of the base if
            None. Files next to it belong to it.

    Raises WeightsReadError if a file is not what its name says.
    """
    if tokenizer is None:
        return {} if base is None else _all_files(base)
    path = Path(tokenizer)
    source = SourceFolder(path if path.is_dir() else path.parent)
    if not path.is_dir() and source.read(path.name) is None:
        raise errors.WeightsReadError(
            f"there is no {str(path)!r}, the file of the tokenizer. Put it there."
        )
    is_whole_folder = path.is_dir() or path.name in _VOCABULARIES
    if (
        base is not None
        and is_whole_folder
        and source.path.resolve() == base.path.resolve()
    ):
        return _all_files(base)
    files: dict[str, bytes] = {}
    tokens: dict[int, str] = {}
    target_names = {TOKENIZER: TOKENIZER, SENTENCEPIECE: SENTENCEPIECE}
    if not path.is_dir():
        is_model = path.suffix.lower() == ".model"
        target_names = {path.name: SENTENCEPIECE if is_model else TOKENIZER}
    for source_name, name in target_names.items():
        data = source.read(source_name)
        if data is not None:
            tokens |= _tokens(data, source.path / source_name, name)
            files[name] = data
    if not files:
        return {}
    if TOKENIZER not in files:
        logger.warning(
            "%s is written as %s. Readers that do not use SentencePiece itself, such as "
            "transformers 5, may tokenize runs of spaces and Unigram models in another way.",
            path,
            SENTENCEPIECE,
        )
    files |= _files_next_to_a_tokenizer(source)
    return files | _special_token_files(settings, tokens, files)


def outdated_names(folder: SourceFolder, files: Collection[str]) -> list[str]:
    """Returns the names of files in a folder that would contradict new ones next to them.

    Readers would take the chat template of an earlier model for that of the new one.
    """
    names = [GENERATION_CONFIG, PREPROCESSOR]
    if TOKENIZER in files or SENTENCEPIECE in files:
        names += [*_VOCABULARIES, *_OBJECTS, *_TEXTS, *folder.template_names()]
    return [
        name
        for name in names
        if name not in files and os.path.lexists(folder.path / name)
    ]


def _all_files(source: SourceFolder) -> dict[str, bytes]:
    """Returns the files of a whole tokenizer as they are."""
    files: dict[str, bytes] = {}
    for name in _VOCABULARIES:
        if name.endswith(".json"):
            vocabulary = source.read_object_file(name)
            data = None if vocabulary is None else vocabulary.data
        else:
            data = source.read(name)
        if data is not None:
            files[name] = data
    return files | _files_next_to_a_tokenizer(source)


def _files_next_to_a_tokenizer(source: SourceFolder) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name in _OBJECTS:
        file = source.read_object_file(name)
        if file is not None:
            files[name] = file.data
    for name in (*_TEXTS, *source.template_names()):
        data = source.read(name)
        if data is not None:
            files[name] = data
    return files


def _tokens(data: bytes, path: Path, name: str) -> dict[int, str]:
    """Returns the tokens of a tokenizer by id, of a `tokenizer.json` the added ones.

    Raises WeightsReadError if it is none: a stranger's config names its path.
    """
    try:
        if name == SENTENCEPIECE:
            sentencepiece = import_extra(
                "sentencepiece", "text", needed_by="this tokenizer"
            )
            model = sentencepiece.SentencePieceProcessor(model_proto=data)
            return {
                i: model.id_to_piece(i) for i in range(model.get_piece_size())
            }
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


def _special_token_files(
    settings: Mapping[str, Any],
    tokens: Mapping[int, str],
    copied_files: Collection[str],
) -> dict[str, bytes]:
    """Returns the files with special tokens that a tokenizer came without."""
    if TOKENIZER_CONFIG in copied_files:
        return {}
    special_tokens: dict[str, str] = {}
    for name in SPECIAL_IDS:
        token_id: Any = settings.get(name)
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
    length = settings.get(
        "max_position_embeddings", settings.get("n_positions")
    )
    if length is not None:
        values["model_max_length"] = length
    files = {TOKENIZER_CONFIG: json_bytes(values)}
    if SPECIAL_TOKENS not in copied_files:
        files[SPECIAL_TOKENS] = json_bytes(special_tokens)
    return files
