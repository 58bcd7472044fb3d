"""Starts `training.py` or `policies.py` repeatedly, but imports only once.

For each line of JSON on stdin, {"arguments": [...], "env": {...}, "stdout": path, "stderr": path},
a process is forked, before JAX has started any thread or found any device. It then runs, and ends,
as a program of its own. It prints {"started": pid}, and later {"ended": pid, "code": …}.
"""

import json
import os
import select
import sys


def answer(**told):
    os.write(1, json.dumps(told).encode() + b"\n")


def become(order):
    """Makes this process the one that was asked for."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(order[name], os.O_WRONLY), number)
    sys.argv = ["training.py", *order["arguments"]]


def serve():
    """Starts processes until stdin ends; returns in each of them."""
    running = set()
    while True:
        if select.select([0], [], [], 0.05)[0]:
            line = sys.stdin.readline()
            if not line:
                sys.exit()
            pid = os.fork()
            if pid == 0:
                return become(json.loads(line))
            running.add(pid)
            answer(started=pid)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                answer(ended=pid, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    import policies
    import training

    serve()
    (policies if "policies" in sys.argv else training).main()
