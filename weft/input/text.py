"""Text for a language model: packed sequences, as a source for `weft.input.grain.Input`.

Of a corpus in memory, `lm_text_source`:

    source = config_for_function(lm_text_source).set(
        corpus=config_for_function(stdlib_corpus),
        split="train", sequence_length=256, global_batch_size=32, is_training=True, seed=0,
    )
    cfg = Input.default_config().set(source=source)

Of the records of files, or of a mixture of several kinds of them, `lm_documents_source`. In both
the batches are a function of their index, see `weft.input.sequences`.
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
    """A source of batches of `PackedSequences`.

    Args:
        corpus: The text.
        split: Which part of it.
        sequence_length: Tokens per example.
        global_batch_size: Examples per step over all processes.
        is_training: Whether the examples come without end, in a new order in each pass; or once, in
            order, the last batch filled up with padding.
        seed: Decides the order in training.
        tokenizer: From bytes to ids.
        segments: Whether examples tell their documents apart, so that attention does not cross
            from one to the next; see `PackedSequences`.
        max_examples: Use at most so many examples, evenly spaced over the text.
        num_workers: Processes that make batches. With bytes, none are needed: a batch of 32
            takes less than a millisecond.

    Raises:
        EmptyCorpusError: If there is not one batch to train on, or nothing to evaluate.
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
    """A source of batches of `PackedSequences`, from documents that are records by index.

    All documents are tokenized once, before the first batch; see `weft.input.token_files`.

    Args:
        documents: The documents, a `grain.MapDataset` of dicts, such as those of
            `weft.input.files`; or several by name.
        weights: How many sequences come from each of several, relative to the others, in training.
            None: as many as there are.
        text_key: The key of a document's text.
        tokenizer: From text to ids.
        sequence_length: Tokens per example.
        global_batch_size: Examples per step over all processes.
        is_training: Whether the examples come without end, in a new order in each pass; or once, in
            order, the last batch filled up with padding.
        seed: Decides the order in training.
        segments: Whether examples tell their documents apart, so that attention does not cross
            from one to the next; see `PackedSequences`.
        num_workers: Processes that make batches; none are needed.

    Raises:
        EmptyCorpusError: If there are no documents, or there is not one batch to train on.
        InputReadError: If a document cannot be read, tokenized or has no text.
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
    """Documents by name, those that have none as "documents".

    Args:
        documents: The documents.
        weights: What each of them counts, None if nothing is said.

    Raises:
        InputDatasetError: If the weights do not name the documents.
    """
    named = documents if isinstance(documents, Mapping) else {"documents": documents}
    if weights is not None and set(weights) != set(named):
        raise InputDatasetError(
            f"weights are given for {sorted(weights)}, but the documents are {sorted(named)}; give "
            "one positive weight for each of them"
        )
    return named
