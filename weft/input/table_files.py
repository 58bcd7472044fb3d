"""Parquet files by row.

Parquet compresses groups of many rows, so one row costs as much as its group. The file is therefore
unpacked once into Arrow's own format (see `weft.input.file_cache`), which is mapped into memory and
gives any row at once.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, BinaryIO

from weft.errors import InputReadError, MissingExtraError
from weft.input.file_cache import made_once
from weft.input.line_files import file_fingerprint

_ROWS_PER_BATCH = 1024


class ParquetFile:
    """The rows of one file, as dicts of Python values.

    Args:
        path: The file.
        columns: Which columns to read. None: all.

    Raises:
        InputReadError: If it is no Parquet file, or lacks one of the columns.
        MissingExtraError: If pyarrow is not installed.
    """

    def __init__(self, path: str, columns: Sequence[str] | None = None):
        self.path, self._columns = path, None if columns is None else list(columns)
        self.fingerprint = (*file_fingerprint(path), *(columns or ()))
        pyarrow_parquet()
        with self._opened() as file:
            self._num_rows = file.metadata.num_rows
            self.num_bytes = sum(
                file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)
            )
            names = file.schema_arrow.names
            missing = [name for name in self._columns or () if name not in names]
        if missing:
            raise InputReadError(
                f"{path} has no column {missing[0]!r}; it has {names}: change columns"
            )

    def __reduce__(self):
        return type(self), (self.path, self._columns)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = self._reader.get_batch(index // _ROWS_PER_BATCH)
        return batch.slice(index % _ROWS_PER_BATCH, 1).to_pylist()[0]

    def describe(self, index: int) -> str:
        """What to call a record in a message."""
        return f"row {index} of {self.path}"

    def _opened(self) -> Any:
        parquet = pyarrow_parquet()
        try:
            return parquet.ParquetFile(self.path)
        except Exception as error:
            raise InputReadError(
                f"{self.path} is no Parquet file: {type(error).__name__}: {error}"
            ) from error

    @cached_property
    def _reader(self) -> Any:
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        def unpack(out: BinaryIO) -> None:
            with self._opened() as file:
                schema = file.schema_arrow
                if self._columns is not None:
                    schema = pa.schema([schema.field(name) for name in self._columns])
                with pa.ipc.new_file(out, schema) as writer:
                    for table in self._tables(file):
                        writer.write_table(table, max_chunksize=_ROWS_PER_BATCH)

        data = made_once("parquet", self.fingerprint, unpack, num_bytes=self.num_bytes)
        return pa.ipc.open_file(pa.py_buffer(data))

    def _tables(self, file: Any):
        """Tables of whole batches, so that a row's batch follows from its number."""
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        rest = None
        for group in range(file.num_row_groups):
            try:
                table = file.read_row_group(group, columns=self._columns)
            except Exception as error:
                raise InputReadError(
                    f"row group {group} of {self.path} cannot be read: "
                    f"{type(error).__name__}: {error}"
                ) from error
            table = table if rest is None else pa.concat_tables([rest, table])
            whole = len(table) // _ROWS_PER_BATCH * _ROWS_PER_BATCH
            rest = table.slice(whole)
            yield table.slice(0, whole).combine_chunks()
        if rest is not None:
            yield rest.combine_chunks()


def pyarrow_parquet() -> Any:
    """The module `pyarrow.parquet`.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            f"reading Parquet needs the package pyarrow, which cannot be imported ({error}); "
            "install it with `pip install 'weft[parquet]'`"
        ) from error
    return pyarrow.parquet
