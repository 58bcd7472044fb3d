from weft.inference.decoding_evaler import (
    DecodingEvaler as DecodingEvaler, SampleDecoding as SampleDecoding,
)
from weft.inference.output import (
    BaseOutputWriter as BaseOutputWriter, BaseRecordSink as BaseRecordSink,
    JsonlExampleRecordSink as JsonlExampleRecordSink, OutputRecordWriter as OutputRecordWriter,
)
from weft.inference.pipeline import (
    InferencePipeline as InferencePipeline,
    merge_with_string_tensors as merge_with_string_tensors,
    pop_string_tensors as pop_string_tensors,
)
from weft.inference.runner import (
    DataPartitionType as DataPartitionType, InferenceRunner as InferenceRunner,
    MethodRunner as MethodRunner,
)
