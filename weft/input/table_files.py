"""Random access to rows of Parquet files.

Parquet compresses groups of many rows, so reading a row costs as much as its group. The file is
therefore converted once to Arrow's own format (see `weft.input.file_cache`), and mapped into
memory.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, BinaryIO

from weft.errors import InputReadError, MissingExtraError
from weft.input.file_cache import made_once
from weft.input.line_files import file_fingerprint

_ROWS_PER_BATCH = 1024


class ParquetFile:
    """Rows of one file, as dicts of Python values.

    Raises:
        InputReadError: If it is not a Parquet file, or lacks a column.
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
        """Returns the name of a record for messages."""
        return f"row {index} of {self.path}"

    def _opened(self) -> Any:
        parquet = pyarrow_parquet()
        try:
            return parquet.ParquetFile(self.path)
        except Exception as error:
            raise InputReadError(
                f"{self.path} is not a Parquet file: {type(error).__name__}: {error}"
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
        """Yields tables of equal sizes, so that a row's number determines its table."""
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
    """Imports `pyarrow.parquet`.

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
