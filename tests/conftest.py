"""Fixtures for tests of several folders."""

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """Yields a file system of 4 MB, where this process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("only the superuser may mount a small file system")
    yield disk
    # Failed objects may hold files until they are collected.
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
