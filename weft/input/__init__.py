"""Input: from files on each process to one global batch in the compiled step.

`Input` is the module; `weft.input.grain` has the one on Grain and the functions for its pipelines,
`weft.input.files` datasets of the records of files, `weft.input.hugging_face` and `weft.input.tfds`
those of others, `weft.input.text` and `weft.input.streaming` sources of packed text,
`weft.input.composite` inputs of inputs, `weft.input.fake` made-up data. They are imported by name,
so that Grain is loaded only where it is used.
"""

# The module, and how processes share a batch.
from weft.input.base import Input, InputPartitionFn, PathAndRank, partition_by_path_rank

# Text.
from weft.input.baselines import Baseline, ngram_baselines
from weft.input.corpus import Corpus, TextFile, folder_corpus, stdlib_corpus
from weft.input.dispatch import BaseInputDispatcher, InputDispatcher, SpmdInputDispatcher
from weft.input.global_batch import (
    global_to_host_array,
    host_to_global_device_array,
    input_partition_spec,
)
from weft.input.packing import PackedSequences, token_stream
from weft.input.prefetch import PrefetchingIterator, SavableIterator
from weft.input.text_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from weft.input.tokenizer import ByteTokenizer, Tokenizer

__all__ = [
    "BaseInputDispatcher",
    "Baseline",
    "ByteTokenizer",
    "Corpus",
    "HuggingFaceTokenizer",
    "Input",
    "InputDispatcher",
    "InputPartitionFn",
    "PackedSequences",
    "PathAndRank",
    "PrefetchingIterator",
    "SavableIterator",
    "SentencePieceTokenizer",
    "SpmdInputDispatcher",
    "TextFile",
    "Tokenizer",
    "folder_corpus",
    "global_to_host_array",
    "host_to_global_device_array",
    "input_partition_spec",
    "ngram_baselines",
    "partition_by_path_rank",
    "stdlib_corpus",
    "token_stream",
]
