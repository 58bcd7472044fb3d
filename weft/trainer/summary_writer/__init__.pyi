from weft.trainer.summary_writer.base import (
    BaseWriter as BaseWriter, CheckpointerAction as CheckpointerAction,
    CompositeWriter as CompositeWriter, NoOpWriter as NoOpWriter, PeriodicWriter as PeriodicWriter,
    processor_zero_only as processor_zero_only, SummaryKind as SummaryKind,
)
from weft.trainer.summary_writer.files import (
    JsonLinesWriter as JsonLinesWriter, read_json_lines as read_json_lines,
    SummaryWriter as SummaryWriter,
)
from weft.trainer.summary_writer.trackers import (
    MLflowWriter as MLflowWriter, WandBWriter as WandBWriter,
)
