from weft.input.base import (
    Input as Input, InputPartitionFn as InputPartitionFn,
    partition_by_path_rank as partition_by_path_rank, PathAndRank as PathAndRank,
)
from weft.input.chat import (
    ChatTemplate as ChatTemplate, encode_example as encode_example, LearnedTokens as LearnedTokens,
)
from weft.input.corpus import (
    Baseline as Baseline, Corpus as Corpus, folder_corpus as folder_corpus,
    ngram_baselines as ngram_baselines, Split as Split, stdlib_corpus as stdlib_corpus,
    TextFile as TextFile,
)
from weft.input.dispatch import (
    BaseInputDispatcher as BaseInputDispatcher, global_to_host_array as global_to_host_array,
    host_to_global_device_array as host_to_global_device_array,
    input_partition_spec as input_partition_spec, InputDispatcher as InputDispatcher,
    SpmdInputDispatcher as SpmdInputDispatcher,
)
from weft.input.in_memory import (
    array_source as array_source, ArrayInput as ArrayInput, Arrays as Arrays, Batches as Batches,
    IterableInput as IterableInput,
)
from weft.input.packing import PackedSequences as PackedSequences, token_stream as token_stream
from weft.input.preferences import (
    encode_preference as encode_preference, preference_arrays as preference_arrays,
    prompt_arrays as prompt_arrays,
)
from weft.input.prefetch import (
    PrefetchingIterator as PrefetchingIterator, SavableIterator as SavableIterator,
    savable_iterator as savable_iterator,
)
from weft.input.splits import split as split, split_part as split_part
from weft.input.tokenizers import (
    as_tokenizer as as_tokenizer, ByteTokenizer as ByteTokenizer,
    HuggingFaceTokenizer as HuggingFaceTokenizer, SentencePieceTokenizer as SentencePieceTokenizer,
    Tokenizer as Tokenizer,
)
