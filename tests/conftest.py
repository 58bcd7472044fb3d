"""Fixtures for tests of several folders."""

import subprocess

import jax
import pytest

_DEVICES = {
    name: getattr(jax, name)
    for name in ("devices", "local_devices", "device_count", "local_device_count")
}


@pytest.fixture(scope="module")
def one_device():
    """Lets the tests of a module see one device, as most users do.

    A run on all eight virtual devices compiles and takes its steps for several times as long.
    """
    only = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        for name in _DEVICES:
            found = 1 if name.endswith("count") else only
            patch.setattr(jax, name, lambda *args, found=found, **kwargs: found)
        yield


@pytest.fixture
def all_devices(monkeypatch):
    """Lets a test of such a module see all devices."""
    for name, function in _DEVICES.items():
        monkeypatch.setattr(jax, name, function)


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
