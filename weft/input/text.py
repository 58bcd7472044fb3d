"""Packed text for language models, as sources for `weft.input.grain.Input`.

`lm_text_source` reads a corpus in memory:

    source = config_for_function(lm_text_source).set(
        corpus=config_for_function(stdlib_corpus),
        split="train", sequence_length=256, global_batch_size=32, is_training=True, seed=0,
    )
    cfg = Input.default_config().set(source=source)

`lm_documents_source` reads records of files, or a mixture of several. For both, batches are a
function of their index, see `weft.input.sequences`.
"""

from collections.abc import Mapping
from typing import Any

from weft.config import ConfigOr, config_for_class, config_for_function, maybe_instantiate
from weft.errors import InputDatasetError
from weft.input.corpus import Corpus, Split, stdlib_corpus
from weft.input.grain import BuildDatasetFn
from weft.input.packing import PackedSequences, token_stream
from weft.input.sequences import sequence_batches
from weft.input.token_files import tokens_of_documents
from weft.input.tokenizer import ByteTokenizer, Tokenizer

STDLIB = config_for_function(stdlib_corpus)
BYTES = config_for_class(ByteTokenizer)


def lm_text_source(
    *,
    corpus: ConfigOr[Corpus] = STDLIB,
    split: Split,
    sequence_length: int,
    global_batch_size: int,
    is_training: bool,
    seed: int = 0,
    tokenizer: ConfigOr[Tokenizer] = BYTES,
    segments: bool = False,
    max_examples: int | None = None,
    num_workers: int = 0,
) -> BuildDatasetFn:
    """Returns a source of batches of `PackedSequences`.

    Args:
        is_training: Whether examples are endless, reshuffled in each pass; or in order, once, with
            padding in the last batch.
        segments: Whether examples have segment ids, which keep attention within documents; see
            `PackedSequences`.
        max_examples: Maximum number of examples, evenly spaced over the text.
        num_workers: Processes that create batches. Not needed for bytes: a batch of 32 takes less
            than a millisecond.

    Raises:
        EmptyCorpusError: If there is no batch to train on, or nothing to evaluate.
    """
    corpus, tokenizer = maybe_instantiate(corpus), maybe_instantiate(tokenizer)
    documents = (tokenizer.encode(file.text) for file in corpus.split(split))
    source = PackedSequences(
        token_stream(documents, eos_id=tokenizer.eos_id),
        sequence_length=sequence_length,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        drop_remainder=is_training,
        pad_to_multiple_of=1 if is_training else global_batch_size,
        segments=segments,
        max_examples=max_examples,
        token_num_bytes=tokenizer.token_num_bytes,
    )
    return sequence_batches(
        [source],
        global_batch_size=global_batch_size,
        is_training=is_training,
        seed=seed,
        num_workers=num_workers,
        name=f"the {split!r} part of {corpus}",
    )


def lm_documents_source(
    *,
    documents: ConfigOr[Any] | Mapping[str, ConfigOr[Any]],
    weights: Mapping[str, float] | None = None,
    text_key: str = "text",
    tokenizer: ConfigOr[Tokenizer] = BYTES,
    sequence_length: int,
    global_batch_size: int,
    is_training: bool,
    seed: int = 0,
    segments: bool = False,
    num_workers: int = 0,
) -> BuildDatasetFn:
    """Returns a source of batches of `PackedSequences`, from documents with random access.

    All documents are tokenized once, before the first batch; see `weft.input.token_files`. For
    other arguments see `lm_text_source`.

    Args:
        documents: A `grain.MapDataset` of dicts, such as those of `weft.input.files`; or several by
            name.
        weights: Relative number of sequences from each of several, in training. Defaults to their
            sizes.

    Raises:
        EmptyCorpusError: If there are no documents, or no batch to train on.
        InputReadError: If a document cannot be read or tokenized, or has no text.
        InputDatasetError: If the weights do not name the documents.

    >>> import grain
    >>> from weft.input.grain import DispatchConfig
    >>> documents = grain.MapDataset.source([{"text": "one"}, {"text": "two"}])
    >>> source = lm_documents_source(
    ...     documents=documents, sequence_length=4, global_batch_size=2, is_training=False)
    >>> next(iter(source(DispatchConfig(0, 1))))["input_ids"].tolist()
    [[256, 111, 110, 101], [256, 116, 119, 111]]
    """
    named = named_documents(documents, weights)
    loaded: Tokenizer = maybe_instantiate(tokenizer)
    sources = [
        PackedSequences(
            tokens_of_documents(maybe_instantiate(one), loaded, text_key=text_key),
            sequence_length=sequence_length,
            eos_id=loaded.eos_id,
            pad_id=loaded.pad_id,
            drop_remainder=is_training,
            pad_to_multiple_of=1 if is_training else global_batch_size,
            segments=segments,
            token_num_bytes=loaded.token_num_bytes,
        )
        for one in named.values()
    ]
    return sequence_batches(
        sources,
        weights=None if weights is None else [weights[name] for name in named],
        global_batch_size=global_batch_size,
        is_training=is_training,
        seed=seed,
        num_workers=num_workers,
        name=f"the text of {', '.join(named)}",
    )


def named_documents(
    documents: ConfigOr[Any] | Mapping[str, ConfigOr[Any]], weights: Mapping[str, float] | None
) -> Mapping[str, ConfigOr[Any]]:
    """Returns documents by name, unnamed ones as "documents".

    Raises:
        InputDatasetError: If the weights do not name the documents.
    """
    named = documents if isinstance(documents, Mapping) else {"documents": documents}
    if weights is not None and set(weights) != set(named):
        raise InputDatasetError(
            f"weights are given for {sorted(weights)}, but the documents are {sorted(named)}; "
            "pass one positive weight for each of them"
        )
    return named
