"""Summary writer of scalars and texts as JSON lines, for scripts and for `tail -f`.

    {"step": 20, "time": 1760000000.0, "values": {"loss": 2.3}}
    {"step": 20, "time": 1760000000.1, "checkpoint": {"action": "SAVE", "dir": "…/step_00000020"}}

A restarted run appends. If it restored an earlier step, its RESTORE line voids the lines of later
steps, and `read_json_lines` omits them.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from weft.config import ConfigBase
from weft.trainer.base_writer import CheckpointerAction, PeriodicWriter, processor_zero_only
from weft.typing import Nested

FILE_NAME = "summaries.jsonl"


class JsonLinesWriter(PeriodicWriter):
    """Writer that appends one JSON object per line to `summaries.jsonl` in `dir`.

    It ignores images, sound and arrays. Each line is flushed when the call returns, so it survives
    the end of the process.
    """

    Config = PeriodicWriter.Config

    @processor_zero_only
    def __call__(self, step: int, values: dict[str, Any]) -> None:
        shown = {
            leaf.path: _to_json(leaf.value)
            for leaf in self._due(step, values)
            if leaf.kind in ("ScalarSummary", "TextSummary")
        }
        if shown:
            self._append(step, values=shown)

    @processor_zero_only
    def log_config(self, config: ConfigBase, step: int = 0) -> None:
        self._append(step, config=config.debug_string())

    @processor_zero_only
    def log_checkpoint(
        self, ckpt_dir: str, *, state: Nested[Any], action: CheckpointerAction, step: int = 0
    ) -> None:
        del state
        self._append(step, checkpoint={"action": action.value, "dir": ckpt_dir})

    @processor_zero_only
    def log_average_step_time(self, step: int, step_times: Sequence[float]) -> None:
        if len(step_times):
            average = sum(step_times) / len(step_times)
            self._append(step, values={"average_step_time": average})

    def _append(self, step: int, **fields: Any) -> None:
        line = json.dumps({"step": int(step), "time": time.time(), **fields}, allow_nan=False)
        path = os.path.join(self.config.dir, FILE_NAME)
        with self._errors_reported():
            os.makedirs(self.config.dir, exist_ok=True)
            with open(path, "a+b") as file:
                _drop_torn_line(file)
                file.write(line.encode() + b"\n")


def _drop_torn_line(file: Any) -> None:
    """Truncates an incomplete last line, left by a killed process or a full disk."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


def _to_json(value: float | str) -> float | str:
    # JSON cannot represent these numbers; `float` parses their names.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_json_lines(path: str) -> list[dict[str, Any]]:
    """Returns the lines of a `JsonLinesWriter`'s file or directory, except voided ones.

    "nan" and infinities in `values` are floats again.
    """
    path = os.path.join(path, FILE_NAME) if os.path.isdir(path) else path
    records: list[dict[str, Any]] = []
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            record = json.loads(line)
            if record.get("checkpoint", {}).get("action") == CheckpointerAction.RESTORE.value:
                records = [r for r in records if r["step"] <= record["step"]]
            values = record.get("values", {})
            values.update({k: float(v) for k, v in values.items() if v in ("nan", "inf", "-inf")})
            records.append(record)
    return records
