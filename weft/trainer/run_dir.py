"""Record of a run in its directory: config, data, and starts.

    config.txt    the config, as text that `weft.config.from_text` reads
    run.json      the recipe, the data and its digest, the length of schedules, notes, for each
                  start: time, versions, devices; digests of code; and a copy of the config

If one of them is lost, as in a power loss on some disks, or is damaged, the run continues with what
the other one has, and says so. If both are, it continues with the config of the command line.

A directory with a checkpoint belongs to the config that trained it. Fields that determine the
resulting bits (model, learner, data, seed) must be the same at each start; duration, location and
monitoring of the run may change. Without a checkpoint, the directory is free for any config.

A required argument `max_step` of a schedule anywhere in the learner's config may stay unset. The
trainer then sets it to its own `max_step`:

    learning_rate=config_for_function(cosine_with_linear_warmup).set(peak_lr=0.1)

A run that continues with another `max_step` keeps the curve with which it began: the steps that it
has trained belong to that curve.
"""

import ast
import contextlib
import datetime
import difflib
import errno
import itertools
import json
import logging
import math
import os
import platform
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import weft
from weft.config import (
    REQUIRED,
    ConfigBase,
    diff,
    from_text,
    maybe_instantiate,
    to_text,
)
from weft.errors import ConfigError, InputReadError, RunDirError, ScheduleError
from weft.input.data_files import files_record
from weft.input.records import matching_files
from weft.serialization.directory import Directory
from weft.serialization.untrusted import (
    check_json,
    check_local_path,
    parse_json,
)
from weft.trainer.checkpointer import retries
from weft.trainer.checkpointer.dirs import check_name, has_checkpoint, step_dirs
from weft.trainer.code_record import changes_of_code, code_record
from weft.trainer.record_signature import signed
from weft.trainer.schedule import ScheduleFn, as_schedule_fn
from weft.trainer.trainer_config_modifier import find_values, outermost

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.txt"
RECORD_FILE = "run.json"
CHECKPOINTS_DIR = "checkpoints"
SUMMARIES_DIR = "summaries"
TRACES_DIR = "trace"
MAX_CONFIG_BYTES = 2**22
"""How large the text of a config may be."""
_MAX_RECORD_BYTES = 2**26
_SCHEDULE_STEPS = "schedule_steps"
_MAX_SCHEDULE_STEPS = 2**31 - 1
_CONFIG_COPY = "config"
_CODE = "code"
_RUN = "run"

# Fields that do not affect the parameters after a given step.
MAY_CHANGE = frozenset(
    {
        *(
            "name",
            "dir",
            "max_step",
            "evalers",
            "hooks",
            "checkpointer",
            "summary_writer",
        ),
        *("mesh_shape", "mesh_axis_names", "mesh_rules", "batch_axis_names"),
        *(
            "log_every_n_steps",
            "throughput",
            "status_port",
            "compilation_cache_dir",
        ),
        *(
            "watchdog_timeout_seconds",
            "crash_on_hang_timeout_seconds",
            "readiness_timeout_seconds",
        ),
        # Changed to get past the step at which a run has stopped.
        *("anomaly_policy", "early_stopping"),
        *(
            "start_trace_steps",
            "n_steps_for_each_trace",
            "start_trace_process_indices",
        ),
        *(
            "host_tracer_level",
            "python_tracer_level",
            "context_manager",
            "config_modifiers",
        ),
    }
)


def check_run_dir(cfg: ConfigBase, *, resume: bool = False) -> None:
    """Checks, without changes, that a run may use its directory.

    With `resume`, the run may have another config, code or data than the one that it continues.

    Raises RunDirError for a directory that cannot be written, or has another config's checkpoint;
    PathNotLocalError for a URL;
    FileRefusedError for one with links or other odd files, see `check_places`.
    """
    check_local_path(cfg.dir, "dir")
    check_writable(Path(cfg.dir))
    check_places(cfg.dir)
    if not has_checkpoint(os.path.join(cfg.dir, CHECKPOINTS_DIR)):
        return
    unused_dir = free_dir(cfg.dir)
    choices = (
        f"Choose another directory, such as dir={unused_dir!r}; or start afresh with fresh=True of "
        "weft.fit or --fresh of weft train, which move the old run aside"
    )
    if not was_started(cfg.dir) and not has_steps(cfg.dir):
        raise RunDirError(
            f"dir={cfg.dir!r} holds checkpoints of an unknown run: there is no {CONFIG_FILE}. "
            f"{choices}.",
            free_dir=unused_dir,
        )
    problem = _difference_of_run(cfg)
    if problem and resume:
        logger.warning("The run continues, as resume=True says. %s", problem)
    elif problem:
        raise RunDirError(
            f"{problem}\n{choices}; or continue the old run as it is now, with resume=True or "
            "--resume; or restore what has changed.",
            free_dir=unused_dir,
        )


def _difference_of_run(cfg: ConfigBase) -> str:
    """Returns in what a config differs from that of the run in its directory; "" if in nothing."""
    config_changes = changes_of_run(cfg.dir, cfg)
    if config_changes:
        return (
            f"dir={cfg.dir!r} belongs to a run with another config (its value → the one given):\n"
            f"{_listed(config_changes)}"
        )
    data_changes = _changes_of_data(cfg, _TRAINING)
    if data_changes and not _was_to_be_mended(cfg):
        return f"dir={cfg.dir!r} belongs to a run on other data: {'; '.join(data_changes)}."
    old_code = surviving_record(cfg.dir).get(_CODE)
    if old_code is None:
        return ""
    code_changes = changes_of_code(old_code, code_record(cfg, MAY_CHANGE))
    if not code_changes:
        return ""
    return (
        f"dir={cfg.dir!r} belongs to a run with other code, values in closures or data (before → "
        f"now):\n{_listed(code_changes)}"
    )


def _listed(lines: Sequence[str]) -> str:
    """Returns lines of a message, no more than can be read: they may be a stranger's."""
    listed_lines: list[str] = []
    for line in lines[:_MAX_CHANGES]:
        if len(line) > 2 * _MAX_LETTERS:
            line = line[: 2 * _MAX_LETTERS] + "…"
        listed_lines.append(f"  {line}")
    if len(lines) > _MAX_CHANGES:
        listed_lines.append(f"  and {len(lines) - _MAX_CHANGES} more")
    return "\n".join(listed_lines)


_TRAINING, _EVALUATION = "input", "evalers"


def _changes_of_data(cfg: ConfigBase, field: str) -> list[str]:
    """Returns a text for each change of data since the last start, of a field of the trainer."""
    old_records = surviving_record(cfg.dir).get("corpora", {})
    new_records = data_records(cfg)
    changes: list[str] = []
    for path in sorted(old_records.keys() & new_records.keys()):
        old, new = old_records[path], new_records[path]
        if path.startswith(field) and old["sha256"] != new["sha256"]:
            changes.append(
                f"{path} was {data_text(old)} and is {data_text(new)}"
            )
    return changes


def _was_to_be_mended(cfg: ConfigBase) -> bool:
    """Returns whether the run ended at a record that the user was asked to mend."""
    end = surviving_record(cfg.dir).get("end") or {}
    return InputReadError.__name__ in end.get("reason", "")


def claim_run_dir(
    cfg: ConfigBase,
    recipe: Mapping[str, Any] | None = None,
    *,
    layout: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> bool:
    """Creates the directory of a run and records its start; returns whether it was started before.

    The recipe that made the config is plain JSON values, signed together with the config. The
    `layout` is what `layout_changes` compares between starts. For `resume` and errors see
    `check_run_dir`.
    """
    check_run_dir(cfg, resume=resume)
    directory = Directory(cfg.dir)
    started_before = was_started(cfg.dir) or has_steps(cfg.dir)
    if jax.process_index() != 0:
        return started_before
    run = _number_of_run(cfg)
    try:
        os.makedirs(cfg.dir, exist_ok=True)
        text = to_text(cfg) + "\n"
        if started_before:
            _log_losses(cfg)
            if has_checkpoint(os.path.join(cfg.dir, CHECKPOINTS_DIR)):
                _log_changes_of_data(cfg)
            elif changes_of_run(cfg.dir, cfg):
                # The record is that of another run, which has saved nothing.
                with contextlib.suppress(FileNotFoundError):
                    directory.remove(RECORD_FILE)
        starts = read_record(cfg.dir).get("starts", [])
        starts = [*starts, environment() | dict(layout or {})]
        record: dict[str, Any] = {}
        if recipe is not None:
            record["recipe"] = signed(recipe, text)
        if _unset_lengths(cfg):
            record[_SCHEDULE_STEPS] = schedule_steps(cfg)
        retries.retried(lambda: directory.write(CONFIG_FILE, text))
        record |= {
            "corpora": data_records(cfg),
            "starts": starts,
            _CODE: code_record(cfg, MAY_CHANGE),
            _CONFIG_COPY: text,
            _RUN: run,
        }
        update_record(cfg.dir, **record)
    except OSError as error:
        raise unwritable_error(Path(cfg.dir), error) from error
    return started_before


def _number_of_run(cfg: ConfigBase) -> int:
    """Returns the number of the run that starts, another one if it does not continue the old."""
    old_number = surviving_record(cfg.dir).get(_RUN)
    if old_number is None:
        return secrets.randbits(31)
    has_saved = has_checkpoint(os.path.join(cfg.dir, CHECKPOINTS_DIR))
    # Without a checkpoint, another config, code and data were not refused.
    if not has_saved and _difference_of_run(cfg):
        return secrets.randbits(31)
    return old_number


def number_of_run(directory: str) -> int:
    """Returns the number in `run.json` that tells a run from all others in its directory."""
    return read_record(directory)[_RUN]


def number_in_record(record: bytes) -> int | None:
    """Returns this number from the bytes of a `run.json`; None if it is lost or damaged."""
    try:
        return parse_json(record)[_RUN]
    except (ValueError, LookupError, TypeError):
        return None


def was_started(directory: str) -> bool:
    """Returns whether a run has left its config or its record in a directory."""
    run = Directory(directory)
    return os.path.isdir(directory) and (
        run.has_file(CONFIG_FILE) or run.has_file(RECORD_FILE)
    )


def has_steps(directory: str) -> bool:
    """Returns whether a directory has checkpoints of a run, which may have lost all else."""
    return bool(step_dirs(os.path.join(directory, CHECKPOINTS_DIR)))


def _log_changes_of_data(cfg: ConfigBase) -> None:
    """Logs changes of data with which a run may continue."""
    for change in _changes_of_data(cfg, _TRAINING):
        logger.warning(
            "The data was mended after the run had failed to read it: %s.",
            change,
        )
    for change in _changes_of_data(cfg, _EVALUATION):
        logger.warning(
            "The data to evaluate on has changed: %s. Results from now on cannot be compared with "
            "earlier ones, nor with those by which the best checkpoints were kept.",
            change,
        )


def _log_losses(cfg: ConfigBase) -> None:
    """Logs what is lost or damaged, and what is used instead; renames a damaged record."""
    config_path = os.path.join(cfg.dir, CONFIG_FILE)
    config_bytes = _read_or_empty(cfg.dir, CONFIG_FILE, MAX_CONFIG_BYTES)
    config_remedy = (
        "It is written again, and the given config cannot be compared with it"
    )
    if _CONFIG_COPY in surviving_record(cfg.dir):
        config_remedy = (
            f"It is written again, and compared with its copy in {RECORD_FILE}"
        )
    record_path = os.path.join(cfg.dir, RECORD_FILE)
    record_bytes = _read_or_empty(cfg.dir, RECORD_FILE, _MAX_RECORD_BYTES)
    record_remedy = (
        "It is begun again, without earlier starts and digests of the data"
    )
    if _unset_lengths(cfg):
        steps = schedule_steps(cfg)
        record_remedy += (
            f"; the learner's schedules are taken to have {steps} steps"
        )
    try:
        _parse_record(cfg.dir)
    except ValueError as error:
        new_name = f"{RECORD_FILE}.damaged"
        Directory(cfg.dir).rename(RECORD_FILE, new_name)
        logger.warning(
            "%s is damaged: %s. It is kept as %s. %s.",
            record_path,
            error,
            new_name,
            record_remedy,
        )
    message = "%s is empty or missing, as after a power loss. %s."
    if not config_bytes:
        logger.warning(message, config_path, config_remedy)
    if not record_bytes:
        logger.warning(message, record_path, record_remedy)


def _read_or_empty(directory: str, name: str, at_most: int) -> bytes:
    """Returns the contents of a file, nothing if it is missing or was never written to the disk."""
    run = Directory(directory)
    try:
        data = retries.retried(lambda: run.read_bytes(name, at_most=at_most))
    except FileNotFoundError:
        return b""
    if not data.strip(b"\0 \t\r\n"):
        return b""
    return data


def check_places(directory: str) -> None:
    """Checks that what a run writes to and reads in its directory lies in it.

    Raises FileRefusedError for a link, FIFO, device or socket in place of a file or folder of the
    run, or anywhere below its checkpoints and traces.
    """
    run = Directory(directory)
    if not os.path.isdir(directory):
        return
    run.has_file(CONFIG_FILE)
    run.has_file(RECORD_FILE)
    for folder in (CHECKPOINTS_DIR, TRACES_DIR):
        if run.has_folder(folder):
            run.check(run.walk(folder))
    if not run.has_folder(SUMMARIES_DIR):
        return
    # Deeper, other programs have links of their own, as trackers of experiments do.
    for entry in run.entries(SUMMARIES_DIR):
        run.check([entry])
        if entry.is_folder:
            run.check(run.entries(entry.name))


_RECORD_FORM = {
    "starts?": [{"time": datetime.datetime}],
    "corpora?": {str: {"name": str, "sha256": str}},
    "recipe?": dict,
    "batch?": (None, [{"path": [str], "shape": [int], "dtype": str}]),
    _SCHEDULE_STEPS + "?": float,
    "model?": {"parameters": int, "trained?": int},
    "end?": (None, {"step": int, "reason": str}),
    "samples?": [{"step": int, "prompt": str, "text": str}],
    "baselines?": {str: {"nats_per_token": float, "bits_per_byte": float}},
    _CODE + "?": {str: str},
    _CONFIG_COPY + "?": str,
    _RUN + "?": int,
    "goodput?": [{"step": int, "productive_seconds": float}],
    "times?": {"until": float, "seconds": {str: float}},
}


def read_config(directory: str) -> str:
    """Returns the text of a run's config, from its copy if it is lost.

    Raises FileNotFoundError if there is neither, another OSError if it cannot be read.
    """
    run = Directory(directory)
    if _read_or_empty(directory, CONFIG_FILE, MAX_CONFIG_BYTES):
        return run.read_text(CONFIG_FILE, at_most=MAX_CONFIG_BYTES)
    copy = surviving_record(directory).get(_CONFIG_COPY)
    if copy is None:
        reason = (
            f"empty or missing, and there is no copy of it in {RECORD_FILE}"
        )
        raise FileNotFoundError(
            errno.ENOENT, reason, run.full_path(CONFIG_FILE)
        )
    return copy


def read_record(directory: str) -> dict[str, Any]:
    """Returns the contents of `run.json`, {} if lost; raises a RunDirError if damaged."""
    directory = os.fspath(directory)  # a TypeError for what is not a path
    try:
        return _parse_record(directory)
    except (OSError, ValueError) as error:
        raise _unreadable_record(directory, error) from error


def surviving_record(directory: str) -> dict[str, Any]:
    """Returns the contents of `run.json` for a start, {} if lost or damaged.

    Raises a RunDirError if it is there, and cannot be read.
    """
    directory = os.fspath(directory)
    try:
        return _parse_record(directory)
    except ValueError:
        return {}
    except OSError as error:
        raise _unreadable_record(directory, error) from error


def _unreadable_record(directory: str, error: Exception) -> RunDirError:
    path = os.path.join(directory, RECORD_FILE)
    return RunDirError(
        f"{path} cannot be read: {error}. It is only a record; move it away to continue."
    )


def _parse_record(directory: str) -> dict[str, Any]:
    data = _read_or_empty(directory, RECORD_FILE, _MAX_RECORD_BYTES)
    record = {}
    if data:
        record = parse_json(data)
    check_json(record, _RECORD_FORM)
    return record


def update_record(directory: str, **values: object) -> None:
    """Sets entries of `run.json` to plain JSON values."""
    text = json.dumps({**read_record(directory), **values}, indent=2)
    retries.retried(
        lambda: Directory(directory).write(RECORD_FILE, text + "\n")
    )


def environment() -> dict[str, Any]:
    """Returns versions, devices and time of this process."""
    devices = jax.devices()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(
            timespec="seconds"
        ),
        "weft": weft.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "devices": f"{len(devices)} × {devices[0].device_kind}",
        "processes": jax.process_count(),
    }


_LAYOUT_FACTS = (
    "processes",
    "devices",
    "mesh",
    "rows_per_device",
    "microbatches",
)


def layout_notes(directory: str) -> list[str]:
    """Returns what has changed since the last start of a run that continues elsewhere."""
    with contextlib.suppress(RunDirError):
        starts = read_record(directory).get("starts", [])
        if len(starts) > 1:
            return layout_changes(starts[-2], starts[-1])
    return []


def layout_changes(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    """Returns the differences between two starts, in what they compute on.

    >>> layout_changes({"processes": 4, "mesh": "data=4"}, {"processes": 3, "mesh": "data=3"})
    ['processes 4 → 3', 'mesh data=4 → data=3']
    """
    changes: list[str] = []
    for name in _LAYOUT_FACTS:
        old, new = before.get(name), now.get(name)
        if None not in (old, new) and old != new:
            changes.append(f"{name.replace('_', ' ')} {old} → {new}")
    return changes


def find_fields(name: str, cfg: ConfigBase) -> dict[str, Any]:
    """Returns all values of fields of a name, such as an input's `corpus`, by path, unless None."""
    return find_values(
        cfg, lambda path, x: path.rpartition(".")[2] == name and x is not None
    )


def end_ids(cfg: ConfigBase) -> list[int]:
    """Returns the ids that end a text, of the fields `eos_token_id` of a model's config."""
    ids: list[int] = []
    for value in find_fields("eos_token_id", cfg).values():
        candidates = value if isinstance(value, Sequence) else [value]
        ids += [
            x for x in candidates if isinstance(x, int)
        ]  # not those that are set later
    return ids


def data_records(cfg: ConfigBase) -> dict[str, dict[str, Any]]:
    """Returns descriptions, with digests, of the data that a trainer's config names, by path.

    These are what its input and its evalers read: corpora, and files: those that a field `paths`
    matches, and any other string that is the path of a file, such as that of a tokenizer.
    """
    records = {}
    corpora = find_values(
        cfg, lambda path, value: value is not None and _is_corpus(path)
    )
    for path, value in corpora.items():
        corpus = maybe_instantiate(value)
        if hasattr(corpus, "record"):
            records[path] = corpus.record()

    def may_name_files(path: str, value: object) -> bool:
        return path in corpora or bool(_IN_DATA.match(path) and _texts(value))

    # Outermost, so that files of a corpus, which has its own record, are not named again.
    for path, value in outermost(find_values(cfg, may_name_files)).items():
        if path in corpora:
            continue
        files = _named_files(path, _texts(value))
        if files:
            records[path] = files_record(files)
    return records


_IN_DATA = re.compile(rf"({_TRAINING}|{_EVALUATION})\b.")


def _is_corpus(path: str) -> bool:
    return bool(_IN_DATA.match(path)) and path.rpartition(".")[2] == "corpus"


def _texts(value: object) -> list[str]:
    """Returns the texts of a value that is one, or a list or tuple of texts."""
    texts: list[str] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(item, str):
            return []
        texts.append(item)
    return texts


def _named_files(path: str, texts: Sequence[str]) -> list[str]:
    if path.rpartition(".")[2] == "paths":
        with contextlib.suppress(
            InputReadError
        ):  # the reader says why, or knows more than files
            return matching_files(texts)
        return []
    return [text for text in texts if "\0" not in text and os.path.isfile(text)]


def data_text(record: Mapping[str, Any]) -> str:
    """Returns a short description of data from its record."""
    text = record["name"]
    if record.get("bytes") is not None:
        text += f" of {record['bytes']:,} bytes"
    text += f" with the SHA-256 {record['sha256'][:12]}…"
    if record.get("sampled"):
        text += " of a sample of it"
    return text


def changes_of_run(directory: str, cfg: ConfigBase) -> list[str]:
    """Returns the differences between the text of a run's config and a config that it would run."""
    path = os.path.join(directory, CONFIG_FILE)
    try:
        text = read_config(directory)
    except FileNotFoundError:  # lost
        return []
    except OSError as error:
        raise RunDirError(
            f"{path} cannot be read: {error}. Choose another directory."
        ) from error
    if text == to_text(cfg) + "\n":
        return []
    try:
        # Only compared; nothing is instantiated from it.
        old_config = from_text(text, source=path, allow=("weft.trainer",))
    except ConfigError:
        # It has values without a text form, such as lambdas, which all look the same.
        return list(
            _changed_lines(_field_texts(text), _field_texts(to_text(cfg)))
        )
    return [
        str(change)
        for change in diff(old_config, cfg)
        if not _may_change(change.path)
    ]


# Fields for shardings, anywhere in a model's config.
_LAYOUT = re.compile(
    r"partition_spec$|^(batch|seq)_axis_names$|^dim_to_mesh_axis_map$"
    r"|^context_parallelism$"
)


def _may_change(path: str) -> bool:
    names = re.split(r"[.\[]", path)
    return names[0] in MAY_CHANGE or any(map(_LAYOUT.search, names))


def _field_texts(text: str) -> dict[str, str]:
    """Returns the texts of a config's fields that may not change; the whole text as "config"."""
    try:
        texts = keyword_texts(text)
    except ValueError:
        return {"config": text}
    return {
        name: value for name, value in texts.items() if name not in MAY_CHANGE
    }


def keyword_texts(text: str) -> dict[str, str]:
    """Returns the texts of a config's fields by name; raises a ValueError for another text."""
    data = text.strip().encode()
    try:
        call = ast.parse(data.decode(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the text holds no config: {error}") from error
    if not isinstance(call, ast.Call):
        return {}
    # `ast.get_source_segment` would go through the whole text for each keyword.
    line_starts = [
        0,
        *itertools.accumulate(
            len(line) for line in data.splitlines(keepends=True)
        ),
    ]
    texts: dict[str, str] = {}
    for keyword in call.keywords:
        value = keyword.value
        begin = line_starts[value.lineno - 1] + value.col_offset
        end = line_starts[(value.end_lineno or 1) - 1] + (
            value.end_col_offset or 0
        )
        texts[str(keyword.arg)] = data[begin:end].decode(errors="replace")
    return texts


_MAX_CHANGES, _MAX_LETTERS = 40, 200


def _changed_lines(
    before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[str]:
    """Yields lines that differ, no more than can be read: one of the texts may be a stranger's."""
    num_changes = 0
    for name in sorted(before.keys() | after.keys()):
        lines_before = before.get(name, "").splitlines()
        lines_after = after.get(name, "").splitlines()
        # Comparing lines letter by letter, as `ndiff` does, would take hours.
        diff_lines = difflib.unified_diff(
            lines_before, lines_after, n=0, lineterm=""
        )
        for line in itertools.islice(
            diff_lines, 2, None
        ):  # after the two of the header
            sign, content = line[0], line[1:]
            if sign not in "+-":
                continue
            num_changes += 1
            if num_changes > _MAX_CHANGES:
                yield "and more"
                return
            if len(content) > _MAX_LETTERS:
                content = content[:_MAX_LETTERS] + "…"
            yield f"{name}: {sign} {content}"


def free_dir(directory: str, *, separator: str = "-", first: int = 2) -> str:
    """Returns a name for a directory that does not exist: the given one with a number.

    >>> free_dir("runs/lm")
    'runs/lm-2'
    """
    number = first
    while True:
        path = f"{os.path.normpath(directory)}{separator}{number}"
        if not os.path.lexists(path):
            return path
        number += 1


def check_writable(directory: Path) -> None:
    """Raises a RunDirError if a directory cannot be created or written."""
    check_name(str(directory))
    existing = directory
    while not os.path.exists(existing):
        existing = existing.absolute().parent
    if not existing.is_dir():
        raise unwritable_error(directory, f"{existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise unwritable_error(directory, f"{existing} may not be written")


def unwritable_error(directory: Path, reason: str | OSError) -> RunDirError:
    """Returns the error of a directory that cannot be written."""
    return RunDirError(
        f"dir={str(directory)!r} cannot be written: {reason}. Choose another one with "
        "dir=runs/name."
    )


# The length of schedules.


def learner_config(cfg: ConfigBase) -> Any:
    """Returns the learner of a trainer's config, with the length of all its schedules set.

    Raises ScheduleError if neither a schedule nor the trainer has a length, or it is 0 or too long.
    """
    unset_lengths = _unset_lengths(cfg)
    if not unset_lengths:
        return cfg.learner
    steps = schedule_steps(cfg)
    if math.isinf(steps):
        raise ScheduleError(
            f"learner.{unset_lengths[0]} is the number of steps of a schedule, and neither it nor "
            "the trainer's max_step is set. Set max_step=1000, or the schedule's."
        )
    if steps == 0:
        raise ScheduleError(
            f"max_step=0 trains no steps, and learner.{unset_lengths[0]} has its length. Set "
            "max_step=1000, or the schedule's max_step for a run that only evaluates."
        )
    if steps > _MAX_SCHEDULE_STEPS:
        raise ScheduleError(
            f"learner.{unset_lengths[0]} would be {steps}, the max_step with which the run began; "
            f"a step has 32 bits, so it is at most {_MAX_SCHEDULE_STEPS}. Set the schedule's "
            "max_step."
        )
    return with_length(cfg.learner, steps)


def with_length(cfg: Any, steps: int | float) -> Any:
    """Returns a config whose unset fields `max_step` are set, as in schedules and policies."""
    cfg = cfg.clone()
    for path, length in find_fields("max_step", cfg).items():
        if length is REQUIRED:
            cfg.set_recursively(path, value=steps)
    return cfg


def schedule_steps(cfg: ConfigBase) -> int | float:
    """Returns the length of the schedules of a run that set none: `max_step` at its first start."""
    if has_checkpoint(os.path.join(cfg.dir, CHECKPOINTS_DIR)):
        return surviving_record(cfg.dir).get(
            _SCHEDULE_STEPS, _written_max_step(cfg)
        )
    return cfg.max_step


def _written_max_step(cfg: ConfigBase) -> int | float:
    """Returns the `max_step` of the last start, or else that of the config."""
    with contextlib.suppress(OSError, ValueError):
        text = keyword_texts(read_config(cfg.dir)).get("max_step", "")
        return ast.literal_eval(text)
    return cfg.max_step


def _unset_lengths(cfg: ConfigBase) -> list[str]:
    """Returns the paths of the lengths of schedules that the learner's config leaves unset."""
    if cfg.learner is REQUIRED:
        return []
    lengths = find_fields("max_step", cfg.learner)
    return [path for path, length in lengths.items() if length is REQUIRED]


def length_comments(cfg: ConfigBase) -> list[str]:
    """Returns comments to a config's text, with the lengths of the learner's schedules."""
    steps = schedule_steps(cfg)
    origin = "the max_step with which the run began"
    if steps == cfg.max_step:
        origin = "max_step"
    return [
        f"# learner.{path} is {steps}, {origin}."
        for path in _unset_lengths(cfg)
    ]


def schedule_notes(cfg: ConfigBase) -> list[str]:
    """Returns what a user may not expect of a run's learning rates, one sentence for each.

    That is a schedule that ends before the run, or that keeps a length other than `max_step`.
    """
    unset_lengths = _unset_lengths(cfg)
    learner = learner_config(cfg)
    lengths = find_fields("max_step", learner)
    notes: list[str] = []
    for path, rate in outermost(find_fields("learning_rate", learner)).items():
        longest = None  # of the schedules that the rate is composed of
        steps = 0
        for length_path, length in lengths.items():
            is_part = length_path.startswith(f"{path}.") and isinstance(
                length, int
            )
            if is_part and (longest is None or length > steps):
                longest, steps = length_path, length
        if longest is None or steps == cfg.max_step:
            continue
        origin = f"as learner.{longest} says"
        if longest in unset_lengths:
            origin = "as when the run began"
        note = f"{steps:,} steps, {origin}"
        if steps < cfg.max_step and not math.isinf(cfg.max_step):
            note += f"; {_rate_after(as_schedule_fn(rate), steps, int(cfg.max_step))}"
        notes.append(note)
    return notes


def _rate_after(schedule: ScheduleFn, steps: int, max_step: int) -> str:
    """Returns what the learning rate is after the end of its schedule."""
    rate_at_end = float(schedule(steps))
    last_rate = float(schedule(max_step))
    if rate_at_end != last_rate:
        return (
            f"the learning rate is {rate_at_end:.3g} at step {steps:,} and {last_rate:.3g} at step "
            f"{max_step:,}"
        )
    if last_rate == 0:
        return "then the learning rate is 0, and steps train nothing: start a run in another `dir`"
    return f"then the learning rate stays {last_rate:.3g}"
