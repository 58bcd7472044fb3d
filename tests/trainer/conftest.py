"""Readers of files for tests of the trainer."""

import os
import pathlib
import resource
import struct
from contextlib import contextmanager

import pytest

from weft.trainer.summary_writer.event_file import Event


def crc32c(data):
    """Computes bit by bit, from the polynomial of RFC 3720."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read_events(path, *, check=False):
    """Returns the events of a file, or of all files of a directory in order; a torn end is left
    out.
    """
    if os.path.isdir(path):
        names = sorted(os.listdir(path))
        return [event for name in names for event in _read_events(os.path.join(path, name))]
    data = pathlib.Path(path).read_bytes()
    events = []
    while len(data) >= 12:
        (length,) = struct.unpack("<Q", data[:8])
        record = data[12 : 12 + length]
        if len(data) < 16 + length:
            break
        if check:
            assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
            assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked(record)
        events.append(Event.FromString(record))
        data = data[16 + length :]
    return events


@contextmanager
def _files_limited_to(size):
    """Yields a write beyond `size` bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def read_events():
    return _read_events


@pytest.fixture
def files_limited_to():
    return _files_limited_to
