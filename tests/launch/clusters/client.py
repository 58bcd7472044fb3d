"""`weft` on the PATH of a fake cluster: asks the test to run it, which need not import JAX.

    client                      test
    {"arguments", "env", "cwd"}
                                {"pid"}, {"text"} …, {"code"}

Signals go to the process. It is killed when its client is.
"""

import json
import os
import signal
import socket
import sys
import threading


def main():
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    order = {"arguments": sys.argv[2:], "env": dict(os.environ), "cwd": os.getcwd()}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["WEFT_SERVER"])
    with connection.makefile("rw", encoding="utf-8") as lines:
        print(json.dumps(order), file=lines, flush=True)
        pid = json.loads(next(lines))["pid"]

        def forward():
            while True:
                os.kill(pid, signal.sigwait(signals))

        threading.Thread(target=forward, daemon=True).start()
        for line in lines:
            told = json.loads(line)
            if "code" in told:
                code = told["code"]
                os._exit(128 - code if code < 0 else code)
            os.write(1, told["text"].encode())


if __name__ == "__main__":
    main()
