"""Input pipelines, from files on each process to a global batch in the compiled step.

`Input` is the base module. Grain is only imported by the submodules:

- `weft.input.grain`: an input for Grain datasets, and functions for pipelines;
- `weft.input.files`, `weft.input.hugging_face`, `weft.input.tfds`: datasets of records;
- `weft.input.text`, `weft.input.streaming`: sources of packed text;
- `weft.input.composite`, `weft.input.fake`: combined inputs and fake data.
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
