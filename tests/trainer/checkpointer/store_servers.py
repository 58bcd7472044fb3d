"""Servers of S3 and of Google Cloud Storage on this machine, from the environment of `make stores`.

A server is a process, so that a test may stop it as a server in a network stops.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from tests.sockets import free_port

# Else gcsfs asks Google's own servers for the type of a bucket; it reads this when it is imported.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

BUCKET = "bucket"
_COMMANDS = {
    "s3": ["-m", "moto.server", "-H", "127.0.0.1"],
    "gs": ["-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--in-memory"],
}


class StoreServer:
    """A server with an empty bucket; what is in it goes when it stops.

    Args:
        scheme: of the URLs, `s3` or `gs`.
    """

    def __init__(self, scheme):
        self.url = f"{scheme}://{BUCKET}"
        self._scheme = scheme
        self._port = free_port()
        self._process = None

    def environment(self):
        """Returns the variables by which clients find the server."""
        endpoint = f"http://127.0.0.1:{self._port}"
        if self._scheme == "s3":
            return {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        return {"STORAGE_EMULATOR_HOST": endpoint}

    def start(self):
        """Starts the server, and makes the bucket; its variables must be set."""
        command = [sys.executable, *_COMMANDS[self._scheme]]
        command += ["-p" if self._scheme == "s3" else "--port", str(self._port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_until_it_listens()
        self._make_bucket()

    def stop(self):
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def frozen(self):
        """Lets the server take connections and answer none."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _wait_until_it_listens(self):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            assert self._process.poll() is None, f"the server of {self._scheme} ended"
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            time.sleep(0.05)
        raise TimeoutError(f"the server of {self._scheme} does not listen")

    def _make_bucket(self):
        # Both packages are in the environment of `make stores` only.
        if self._scheme == "s3":
            import s3fs

            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
        else:
            import gcsfs

            gcsfs.GCSFileSystem(skip_instance_cache=True).mkdir(BUCKET)
