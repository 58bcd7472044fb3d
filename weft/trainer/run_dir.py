"""Record of a run in its directory: config, data, and starts.

    config.txt    the config, as text that `weft.config.from_text` reads
    run.json      the recipe, the data and its digest, the length of schedules, notes, for each
                  start: time, versions, devices; and a copy of the config

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

A record is signed, to tell what this user has written from what came from elsewhere. The key is in
a file that only the user can read, `weft/key` in `$XDG_CONFIG_HOME` or `~/.config`, which the first
signature makes. A machine with the same home directory has the same key.
"""

import ast
import contextlib
import datetime
import difflib
import errno
import hashlib
import hmac
import itertools
import json
import logging
import math
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import weft
from weft.config import REQUIRED, ConfigBase, diff, from_text, maybe_instantiate, to_text
from weft.errors import ConfigError, InputReadError, RunDirError, ScheduleError
from weft.input.data_files import files_record
from weft.input.records import matching_files
from weft.serialization.directory import Directory
from weft.serialization.untrusted import check_json, check_local_path, parse_json
from weft.trainer.checkpointer import retries
from weft.trainer.checkpointer.dirs import check_name, has_checkpoint, step_dirs
from weft.trainer.schedule import as_schedule_fn
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
_SIGNATURE, _SCHEDULE_STEPS, _CONFIG_COPY = "signature", "schedule_steps", "config"
_KEY_BYTES = 32
_LENGTH, _RATE = "max_step", "learning_rate"

# Fields that do not affect the parameters after a given step.
MAY_CHANGE = frozenset(
    {
        *("name", "dir", "max_step", "evalers", "hooks", "checkpointer", "summary_writer"),
        *("mesh_shape", "mesh_axis_names", "mesh_rules", "batch_axis_names"),
        *("log_every_n_steps", "throughput", "status_port", "compilation_cache_dir"),
        *("watchdog_timeout_seconds", "crash_on_hang_timeout_seconds", "readiness_timeout_seconds"),
        # Changed to get past the step at which a run has stopped.
        *("anomaly_policy", "early_stopping"),
        *("start_trace_steps", "n_steps_for_each_trace", "start_trace_process_indices"),
        *("host_tracer_level", "python_tracer_level", "context_manager", "config_modifiers"),
    }
)


def check_run_dir(cfg: ConfigBase) -> None:
    """Checks, without changes, that a run may use its directory.

    Raises RunDirError for a directory that cannot be written, or has another config's checkpoint;
    PathNotLocalError for a URL;
    FileRefusedError for one with links or other odd files, see `check_places`.
    """
    check_local_path(cfg.dir, "dir")
    check_writable(Path(cfg.dir))
    check_places(cfg.dir)
    if not has_checkpoint(os.path.join(cfg.dir, CHECKPOINTS_DIR)):
        return
    free = free_dir(cfg.dir)
    other = f"Choose another directory, such as dir={free!r}"
    if not was_started(cfg.dir) and not has_steps(cfg.dir):
        raise RunDirError(
            f"dir={cfg.dir!r} holds checkpoints of an unknown run: there is no {CONFIG_FILE}. "
            f"{other}.",
            free_dir=free,
        )
    changes = changes_of_run(cfg.dir, cfg)
    if changes:
        raise RunDirError(
            f"dir={cfg.dir!r} belongs to a run with another config (its value → the one given):\n"
            + "\n".join(f"  {change}" for change in changes)
            + f"\n{other}, or restore the values of these fields.",
            free_dir=free,
        )
    changes = _changes_of_data(cfg, _TRAINING)
    if changes and not _was_to_be_mended(cfg):
        raise RunDirError(
            f"dir={cfg.dir!r} belongs to a run on other data: {'; '.join(changes)}. {other}, or "
            "restore the data.",
            free_dir=free,
        )


_TRAINING, _EVALUATION = "input", "evalers"


def _changes_of_data(cfg: ConfigBase, field: str) -> list[str]:
    """Returns a text for each change of data since the last start, of a field of the trainer."""
    before, now = surviving_record(cfg.dir).get("corpora", {}), data_records(cfg)
    changes = []
    for path in sorted(before.keys() & now.keys()):
        if path.startswith(field) and before[path]["sha256"] != now[path]["sha256"]:
            changes.append(f"{path} was {data_text(before[path])} and is {data_text(now[path])}")
    return changes


def _was_to_be_mended(cfg: ConfigBase) -> bool:
    """Returns whether the run ended at a record that the user was asked to mend."""
    end = surviving_record(cfg.dir).get("end") or {}
    return InputReadError.__name__ in end.get("reason", "")


def claim_run_dir(cfg: ConfigBase, recipe: Mapping[str, Any] | None = None) -> bool:
    """Creates the directory of a run and records its start; returns whether it was started before.

    The recipe that made the config is plain JSON values, signed together with the config. For
    errors see `check_run_dir`.
    """
    check_run_dir(cfg)
    directory, checkpoints = Directory(cfg.dir), os.path.join(cfg.dir, CHECKPOINTS_DIR)
    started_before = was_started(cfg.dir) or has_steps(cfg.dir)
    if jax.process_index():
        return started_before
    try:
        os.makedirs(cfg.dir, exist_ok=True)
        text = to_text(cfg) + "\n"
        if started_before:
            _say_what_is_lost(cfg)
            if has_checkpoint(checkpoints):
                _say_what_has_changed(cfg)
        if started_before and changes_of_run(cfg.dir, cfg):
            with contextlib.suppress(FileNotFoundError):  # of a run that saved nothing
                directory.remove(RECORD_FILE)
        starts = [*read_record(cfg.dir).get("starts", []), environment()]
        values: dict[str, Any] = {} if recipe is None else {"recipe": signed(recipe, text)}
        if _unset(cfg):
            values[_SCHEDULE_STEPS] = schedule_steps(cfg)
        retries.retried(lambda: directory.write(CONFIG_FILE, text))
        values |= {"corpora": data_records(cfg), "starts": starts, _CONFIG_COPY: text}
        update_record(cfg.dir, **values)
    except OSError as error:
        raise unwritable_error(Path(cfg.dir), error) from error
    return started_before


def was_started(directory: str) -> bool:
    """Returns whether a run has left its config or its record in a directory."""
    run = Directory(directory)
    return os.path.isdir(directory) and (run.has_file(CONFIG_FILE) or run.has_file(RECORD_FILE))


def has_steps(directory: str) -> bool:
    """Returns whether a directory has checkpoints of a run, which may have lost all else."""
    return bool(step_dirs(os.path.join(directory, CHECKPOINTS_DIR)))


def _say_what_has_changed(cfg: ConfigBase) -> None:
    """Logs changes of data with which a run may continue."""
    for change in _changes_of_data(cfg, _TRAINING):
        logger.warning("The data was mended after the run had failed to read it: %s.", change)
    for change in _changes_of_data(cfg, _EVALUATION):
        logger.warning(
            "The data to evaluate on has changed: %s. Results from now on cannot be compared with "
            "earlier ones, nor with those by which the best checkpoints were kept.",
            change,
        )


def _say_what_is_lost(cfg: ConfigBase) -> None:
    """Logs what is lost or damaged, and what is used instead; keeps a damaged record aside."""
    texts = {CONFIG_FILE: _read_or_empty(cfg.dir, CONFIG_FILE, MAX_CONFIG_BYTES)}
    texts[RECORD_FILE] = _read_or_empty(cfg.dir, RECORD_FILE, _MAX_RECORD_BYTES)
    instead = {
        CONFIG_FILE: f"It is written again, and compared with its copy in {RECORD_FILE}",
        RECORD_FILE: "It is begun again, without earlier starts and digests of the data",
    }
    if _CONFIG_COPY not in surviving_record(cfg.dir):
        instead[CONFIG_FILE] = (
            "It is written again, and the given config cannot be compared with it"
        )
    if _unset(cfg):
        steps = schedule_steps(cfg)
        instead[RECORD_FILE] += f"; the learner's schedules are taken to have {steps} steps"
    try:
        _parse_record(cfg.dir)
    except ValueError as error:
        aside, path = f"{RECORD_FILE}.damaged", os.path.join(cfg.dir, RECORD_FILE)
        Directory(cfg.dir).rename(RECORD_FILE, aside)
        logger.warning(
            "%s is damaged: %s. It is kept as %s. %s.", path, error, aside, instead[RECORD_FILE]
        )
    for name, text in texts.items():
        if not text:
            path = os.path.join(cfg.dir, name)
            logger.warning(
                "%s is empty or missing, as after a power loss. %s.", path, instead[name]
            )


def _read_or_empty(directory: str, name: str, at_most: int) -> bytes:
    """Returns the contents of a file, nothing if it is missing or was never written to the disk."""
    run = Directory(directory)
    try:
        data = retries.retried(lambda: run.read_bytes(name, at_most=at_most))
    except FileNotFoundError:
        return b""
    return data if data.strip(b"\0 \t\r\n") else b""


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
    # Deeper, other programs have links of their own, as trackers of experiments do.
    for entry in run.entries(SUMMARIES_DIR) if run.has_folder(SUMMARIES_DIR) else ():
        run.check([entry])
        if entry.is_folder:
            run.check(run.entries(entry.name))


_RECORD_FORM = {
    "starts?": [{"time": datetime.datetime}],
    "corpora?": {str: {"name": str, "sha256": str}},
    "recipe?": dict,
    _SCHEDULE_STEPS + "?": float,
    "model?": {"parameters": int, "trained?": int},
    "end?": (None, {"step": int, "reason": str}),
    "samples?": [{"step": int, "prompt": str, "text": str}],
    "baselines?": {str: {"nats_per_token": float, "bits_per_byte": float}},
    _CONFIG_COPY + "?": str,
    "goodput?": [{"step": int, "productive_seconds": float}],
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
        why = f"empty or missing, and there is no copy of it in {RECORD_FILE}"
        raise FileNotFoundError(errno.ENOENT, why, run.full_path(CONFIG_FILE))
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
    record = parse_json(data) if data else {}
    check_json(record, _RECORD_FORM)
    return record


def update_record(directory: str, **values: object) -> None:
    """Sets entries of `run.json` to plain JSON values."""
    text = json.dumps({**read_record(directory), **values}, indent=2)
    retries.retried(lambda: Directory(directory).write(RECORD_FILE, text + "\n"))


def environment() -> dict[str, Any]:
    """Returns versions, devices and time of this process."""
    devices = jax.devices()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "weft": weft.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "devices": f"{len(devices)} × {devices[0].device_kind}",
        "processes": jax.process_count(),
    }


def find_fields(name: str, cfg: ConfigBase) -> dict[str, Any]:
    """Returns all values of fields of a name, such as an input's `corpus`, by path, unless None."""
    return find_values(cfg, lambda path, x: path.rpartition(".")[2] == name and x is not None)


def end_ids(cfg: ConfigBase) -> list[int]:
    """Returns the ids that end a text, of the fields `eos_token_id` of a model's config."""
    ids = []
    for found in find_fields("eos_token_id", cfg).values():
        several = found if isinstance(found, Sequence) else [found]
        ids += [i for i in several if isinstance(i, int)]  # not those that are set later
    return ids


def data_records(cfg: ConfigBase) -> dict[str, dict[str, Any]]:
    """Returns descriptions, with digests, of the data that a trainer's config names, by path.

    These are what its input and its evalers read: corpora, and files: those that a field `paths`
    matches, and any other string that is the path of a file, such as that of a tokenizer.
    """
    records = {}
    corpora = find_values(cfg, lambda path, value: value is not None and _is_corpus(path))
    for path, value in corpora.items():
        corpus = maybe_instantiate(value)
        if hasattr(corpus, "record"):
            records[path] = corpus.record()

    def may_name_files(path: str, value: object) -> bool:
        return path in corpora or bool(_IN_DATA.match(path) and _texts(value))

    for path, value in outermost(find_values(cfg, may_name_files)).items():
        files = [] if path in corpora else _named_files(path, _texts(value))
        if files:
            records[path] = files_record(files)
    return records


_IN_DATA = re.compile(rf"({_TRAINING}|{_EVALUATION})\b.")


def _is_corpus(path: str) -> bool:
    return bool(_IN_DATA.match(path)) and path.rpartition(".")[2] == "corpus"


def _texts(value: object) -> list[str]:
    """Returns the texts of a value that is one, or a list or tuple of texts."""
    texts = list(value) if isinstance(value, list | tuple) else [value]
    return [x for x in texts if isinstance(x, str)] if all(map(_is_text, texts)) else []


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _named_files(path: str, texts: Sequence[str]) -> list[str]:
    if path.rpartition(".")[2] == "paths":
        with contextlib.suppress(InputReadError):  # the reader says why, or knows more than files
            return matching_files(texts)
        return []
    return [text for text in texts if "\0" not in text and os.path.isfile(text)]


def data_text(record: Mapping[str, Any]) -> str:
    """Returns a short description of data from its record."""
    size = record.get("bytes")
    shown = "" if size is None else f" of {size:,} bytes"
    of_samples = " of a sample of it" if record.get("sampled") else ""
    return f"{record['name']}{shown} with the SHA-256 {record['sha256'][:12]}…{of_samples}"


def changes_of_run(directory: str, cfg: ConfigBase) -> list[str]:
    """Returns the differences between the text of a run's config and a config that it would run."""
    path = os.path.join(directory, CONFIG_FILE)
    try:
        text = read_config(directory)
    except FileNotFoundError:  # lost
        return []
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {error}. Choose another directory.") from error
    if text == to_text(cfg) + "\n":
        return []
    try:
        # Only compared; nothing is instantiated from it.
        before = from_text(text, source=path, allow=("weft.trainer",))
    except ConfigError:
        # It has values without a text form, such as lambdas, which all look the same.
        return list(_changed_lines(_field_texts(text), _field_texts(to_text(cfg))))
    return [str(c) for c in diff(before, cfg) if not _may_change(c.path)]


# Fields for shardings, anywhere in a model's config.
_LAYOUT = re.compile(r"partition_spec$|^(batch|seq)_axis_names$|^dim_to_mesh_axis_map$")


def _may_change(path: str) -> bool:
    names = re.split(r"[.\[]", path)
    return names[0] in MAY_CHANGE or any(map(_LAYOUT.search, names))


def _field_texts(text: str) -> dict[str, str]:
    try:
        texts = _keywords(text)
    except ValueError:
        return {"config": text}
    return {name: value for name, value in texts.items() if name not in MAY_CHANGE}


def _keywords(text: str) -> dict[str, str]:
    """Returns the texts of a config's fields by name; raises a ValueError for another text."""
    data = text.strip().encode()
    try:
        call = ast.parse(data.decode(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the text holds no config: {error}") from error
    # `ast.get_source_segment` would go through the whole text for each keyword.
    starts = [0, *itertools.accumulate(len(line) for line in data.splitlines(keepends=True))]
    texts = {}
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        value = keyword.value
        begin = starts[value.lineno - 1] + value.col_offset
        end = starts[(value.end_lineno or 1) - 1] + (value.end_col_offset or 0)
        texts[str(keyword.arg)] = data[begin:end].decode(errors="replace")
    return texts


_MAX_SHOWN, _MAX_SHOWN_LETTERS = 40, 200


def _changed_lines(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Yields lines that differ, no more than can be read: one of the texts may be a stranger's."""
    count = 0
    for name in sorted(before.keys() | after.keys()):
        lines = (before.get(name, "").splitlines(), after.get(name, "").splitlines())
        # Comparing lines letter by letter, as `ndiff` does, would take hours.
        for line in itertools.islice(difflib.unified_diff(*lines, n=0, lineterm=""), 2, None):
            if line[0] not in "+-":
                continue
            count += 1
            if count > _MAX_SHOWN:
                yield "and more"
                return
            shown = line[1 : _MAX_SHOWN_LETTERS + 1]
            cut = "…" if len(line) > len(shown) + 1 else ""
            yield f"{name}: {line[0]} {shown}{cut}"


def free_dir(directory: str, *, separator: str = "-", first: int = 2) -> str:
    """Returns a name for a directory that does not exist: the given one with a number.

    >>> free_dir("runs/lm")
    'runs/lm-2'
    """
    name = os.path.normpath(directory)
    numbered = (f"{name}{separator}{n}" for n in itertools.count(first))
    return next(path for path in numbered if not os.path.lexists(path))


def check_writable(directory: Path) -> None:
    """Raises a RunDirError if a directory cannot be created or written."""
    check_name(str(directory))
    paths = (directory, *directory.absolute().parents)
    existing = next(path for path in paths if os.path.exists(path))
    if not existing.is_dir():
        raise unwritable_error(directory, f"{existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise unwritable_error(directory, f"{existing} may not be written")


def unwritable_error(directory: Path, why: object) -> RunDirError:
    """Returns the error of a directory that cannot be written."""
    return RunDirError(
        f"dir={str(directory)!r} cannot be written: {why}. Choose another one with dir=runs/name."
    )


def signed(record: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Returns a record, of JSON values, signed together with a text if the key can be stored."""
    key = _read_key() or _make_key()
    return {**record, _SIGNATURE: _signature(key, record, text)} if key else dict(record)


def is_signed(record: Mapping[str, Any], text: str) -> bool:
    """Returns whether `signed` has made a record for this text, with the key of this user."""
    key, signature = _read_key(), record.get(_SIGNATURE)
    if key is None or not isinstance(signature, str):
        return False
    expected = _signature(key, record, text)
    return hmac.compare_digest(expected.encode(), signature.encode(errors="replace"))


def _signature(key: bytes, record: Mapping[str, Any], text: str) -> str:
    facts = {name: value for name, value in record.items() if name != _SIGNATURE}
    message = json.dumps([facts, text], sort_keys=True)
    return hmac.new(key, message.encode(), hashlib.sha256).hexdigest()


def _key_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home if os.path.isabs(home) else os.devnull, "weft", "key")


def _read_key() -> bytes | None:
    """Returns the key, None if there is none that only this user can read."""
    with contextlib.suppress(OSError), open(_key_file(), "rb") as file:
        status = os.fstat(file.fileno())
        key = file.read()
        is_private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
        return key if is_private and len(key) == _KEY_BYTES else None
    return None


def _make_key() -> bytes | None:
    """Stores a new key, in place of one that others can read; returns None if that fails."""
    file = _key_file()
    temporary = file.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(_KEY_BYTES))
        if file.exists():
            os.replace(temporary, file)
        else:
            os.link(temporary, file)  # fails if another process has just made one
    except FileExistsError:
        pass
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return _read_key()


# The length of schedules.


def learner_config(cfg: ConfigBase) -> Any:
    """Returns the learner of a trainer's config, with the length of all its schedules set.

    Raises ScheduleError if neither a schedule nor the trainer has a length.
    """
    unset = _unset(cfg)
    if not unset:
        return cfg.learner
    steps = schedule_steps(cfg)
    if math.isinf(steps):
        raise ScheduleError(
            f"learner.{unset[0]} is the number of steps of a schedule, and neither it nor the "
            "trainer's max_step is set. Set max_step=1000, or the schedule's."
        )
    learner: Any = cfg.learner.clone()
    for path in unset:
        learner.set_recursively(path, value=steps)
    return learner


def schedule_steps(cfg: ConfigBase) -> Any:
    """Returns the length of the schedules of a run that set none: `max_step` at its first start."""
    if has_checkpoint(os.path.join(cfg.dir, CHECKPOINTS_DIR)):
        return surviving_record(cfg.dir).get(_SCHEDULE_STEPS, _written_max_step(cfg))
    return cfg.max_step


def _written_max_step(cfg: ConfigBase) -> Any:
    """Returns the `max_step` of the last start, or else that of the config."""
    with contextlib.suppress(OSError, ValueError):
        written = _keywords(read_config(cfg.dir)).get("max_step", "")
        return ast.literal_eval(written)
    return cfg.max_step


def _unset(cfg: ConfigBase) -> list[str]:
    if cfg.learner is REQUIRED:
        return []
    return [path for path, x in find_fields(_LENGTH, cfg.learner).items() if x is REQUIRED]


def length_comments(cfg: ConfigBase) -> list[str]:
    """Returns comments to a config's text, with the lengths of the learner's schedules."""
    steps = schedule_steps(cfg)
    why = "max_step" if steps == cfg.max_step else "the max_step with which the run began"
    return [f"# learner.{path} is {steps}, {why}." for path in _unset(cfg)]


def schedule_notes(cfg: ConfigBase) -> list[str]:
    """Returns what a user may not expect of a run's learning rates, one sentence for each.

    That is a schedule that ends before the run, or that keeps a length other than `max_step`.
    """
    unset, learner = _unset(cfg), learner_config(cfg)
    lengths = {p: n for p, n in find_fields(_LENGTH, learner).items() if isinstance(n, int)}
    notes = []
    for path, rate in outermost(find_fields(_RATE, learner)).items():
        inside = {p: steps for p, steps in lengths.items() if p.startswith(f"{path}.")}
        if not inside or max(inside.values()) == cfg.max_step:
            continue
        field, steps = max(inside.items(), key=lambda item: item[1])
        why = "as when the run began" if field in unset else f"as learner.{field} says"
        note = f"{steps:,} steps, {why}"
        if steps < cfg.max_step and not math.isinf(cfg.max_step):
            note += f"; {_after(as_schedule_fn(rate), steps, int(cfg.max_step))}"
        notes.append(note)
    return notes


def _after(rate: Any, steps: int, last: int) -> str:
    at_end, at_last = float(rate(steps)), float(rate(last))
    if at_end != at_last:
        values = f"{at_end:.3g} at step {steps:,} and {at_last:.3g} at step {last:,}"
        return f"the learning rate is {values}"
    if at_last == 0:
        return "then the learning rate is 0, and steps train nothing: start a run in another `dir`"
    return f"then the learning rate stays {at_last:.3g}"
