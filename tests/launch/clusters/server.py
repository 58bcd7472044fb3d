"""The test's side of `weft` on the PATH of a fake cluster, see client.py."""

import contextlib
import json
import socket
import threading

from tests.weft_process import WEFT


def _serve(connection, python_server):
    client_killed = contextlib.suppress(BrokenPipeError)
    with client_killed, connection, connection.makefile("rw", encoding="utf-8") as lines:
        order = json.loads(next(lines))
        env = {name: x for name, x in order["env"].items() if name != "XLA_FLAGS"}
        arguments = [*WEFT[1:], *order["arguments"]]
        process = python_server.start(*arguments, env=env, cwd=order["cwd"])

        def tell(**told):
            print(json.dumps(told), file=lines, flush=True)

        def kill_with_client():
            # It sends nothing more.
            with contextlib.suppress(OSError):
                while connection.recv(1):
                    pass
            process.kill()

        threading.Thread(target=kill_with_client, daemon=True).start()
        with process:
            tell(pid=process.pid)
            for text in process.stdout:
                tell(text=text)
            tell(code=process.wait())


@contextlib.contextmanager
def weft_server(path, python_server):
    """Runs what clients at this path ask for."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def accept():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(
                    target=_serve, args=(connection, python_server), daemon=True
                ).start()

        threading.Thread(target=accept, daemon=True).start()
        yield
        listening.shutdown(socket.SHUT_RDWR)
