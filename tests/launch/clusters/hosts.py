"""`ssh` to hosts that are all this machine: it runs the command as sshd does."""

import argparse
import signal
import subprocess
import sys

OPTIONS = ("BatchMode", "ConnectTimeout", "ServerAliveInterval")


def ssh(words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-o", action="append", default=[])
    parser.add_argument("host")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)
    assert {option.partition("=")[0] for option in args.o} <= set(OPTIONS)
    # A shell lets what it starts in the background ignore Ctrl-C, sshd does not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.call(["bash", "-c", " ".join(args.words)])


if __name__ == "__main__":
    sys.exit(ssh(sys.argv[2:]))
