"""Check that the tokens of a trainer's inputs fit its model, from their configs alone.

JAX does not fail at a row that a table lacks: the result is NaN, or the last row. A mistake would
therefore train a wrong model. The fields are found by their names:

    vocab_size                     in a model of any library: the number of rows
    pad_token_id, eos_token_id     next to it: the ids that the model pads and ends texts with
    tokenizer, sequence_length     in an input or evaler
"""

from collections.abc import Mapping
from typing import Any

from weft.config import ConfigBase
from weft.errors import InputDatasetError, TokenizerError
from weft.hierarchy import LearnedPositionalEmbedding
from weft.input.tokenizers import Tokenizer, as_tokenizer
from weft.trainer.run_dir import find_fields
from weft.trainer.trainer_config_modifier import find_values

_SPECIAL = {"pad_token_id": "pad_id", "eos_token_id": "eos_id"}


def check_tokens(cfg: ConfigBase) -> None:
    """Checks a trainer's config; loads its tokenizers.

    Raises:
        TokenizerError: if a tokenizer has more ids than the model, if they pad or end texts with
            different ids, if such an id is outside of the vocabulary, or if an evaler has another
            tokenizer than the training.
        InputDatasetError: if a sequence is longer than the model's table of positions.
    """
    fields = find_fields("tokenizer", cfg)
    own_first = sorted(fields, key=lambda path: not path.startswith("input."))
    tokenizers = {path: as_tokenizer(fields[path]) for path in own_first}
    vocabularies = find_values(cfg.model, _is_size)
    if vocabularies:
        # If there are several, those of text are the larger ones.
        field = max(vocabularies, key=lambda path: vocabularies[path])
        special = _special_ids(cfg.model, field)
        _check_special(field, vocabularies[field], special)
        for path, tokenizer in tokenizers.items():
            _check_vocabulary(path, tokenizer, field, vocabularies[field], special)
    _check_equal(tokenizers)
    _check_lengths(cfg)


def _is_size(path: str, value: object) -> bool:
    return path.rpartition(".")[2] == "vocab_size" and isinstance(value, int)


def _special_ids(model: Any, field: str) -> Mapping[str, int]:
    """Returns the model's special ids by path; a negative one is that of no token."""
    parent = field.rpartition(".")[0]
    owner = model.get_recursively(parent) if parent else model
    names = [name for name in _SPECIAL if isinstance(getattr(owner, name, None), int)]
    return {f"{parent}.{name}".lstrip("."): getattr(owner, name) for name in names}


def _check_special(field: str, size: int, special: Mapping[str, int]) -> None:
    for path, value in special.items():
        if value >= size:
            raise TokenizerError(
                f"model.{path}={value} is outside of the vocabulary, model.{field}={size}: its ids "
                f"are 0 to {size - 1}. Set model.{field}={value + 1} or another id."
            )


def _check_vocabulary(
    path: str, tokenizer: Tokenizer, field: str, size: int, special: Mapping[str, int]
) -> None:
    wrong, needed = [], []
    if tokenizer.vocab_size > size:
        wrong.append(f"it has {tokenizer.vocab_size} ids, and model.{field}={size}")
        needed.append(f"model.{field}={tokenizer.vocab_size}")
    for name, value in special.items():
        own_name = _SPECIAL[name.rpartition(".")[2]]
        own = getattr(tokenizer, own_name)
        if own != value:
            wrong.append(f"its {own_name} is {own}, and model.{name}={value}")
            needed.append(f"model.{name}={own}")
    if wrong:
        raise TokenizerError(
            f"the tokenizer of {path} does not fit the model: {'; '.join(wrong)}. Set "
            f"{' '.join(needed)}, or choose the model's own tokenizer."
        )


def _check_equal(tokenizers: Mapping[str, Tokenizer]) -> None:
    """Compares evalers' tokenizers with that of the same field of the input."""
    for path, tokenizer in tokenizers.items():
        trained = path[path.find("].") + 2 :]
        of_training = tokenizers.get(trained, tokenizer)
        if _identity(tokenizer) != _identity(of_training):
            raise TokenizerError(
                f"the tokenizers differ: {trained} is {of_training!r}, and {path} is "
                f"{tokenizer!r}. A model understands the ids of one of them; set the same for both."
            )


def _identity(tokenizer: Tokenizer) -> object:
    return getattr(tokenizer, "fingerprint", type(tokenizer))


def _check_lengths(cfg: ConfigBase) -> None:
    tables = find_values(cfg.model, lambda _, x: isinstance(x, LearnedPositionalEmbedding.Config))
    if not tables:
        return
    field, table = max(tables.items(), key=lambda item: item[1].shape[0])
    for path, length in find_fields("sequence_length", cfg).items():
        if isinstance(length, int) and length > table.shape[0] and not path.startswith("model."):
            raise InputDatasetError(
                f"{path}={length} is longer than the model's table of positions, "
                f"model.{field}.shape={tuple(table.shape)}. Set {path}={table.shape[0]}, or "
                f"model.{field}.shape={length},"
            )
