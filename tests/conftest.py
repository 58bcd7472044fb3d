"""Fixtures for tests of several folders."""

import subprocess

import pytest

from tests.python_server import PythonServer
from tests.strange_runs import on_one_device


@pytest.fixture(scope="session")
def python_server():
    """Starts Python processes that need not import JAX and Weft."""
    server = PythonServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def one_device():
    """Lets the tests of a module see one device, as most users do.

    A run on all eight virtual devices compiles and takes its steps for several times as long.
    """
    with on_one_device() as patch:
        yield patch


@pytest.fixture
def all_devices(one_device):
    """Lets a test of such a module see all devices."""
    import jax

    replaced = {
        name: getattr(jax, name)
        for name in ("devices", "local_devices", "device_count", "local_device_count")
    }
    one_device.undo()
    yield
    for name, function in replaced.items():
        one_device.setattr(jax, name, function)


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
