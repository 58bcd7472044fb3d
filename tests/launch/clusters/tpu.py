"""Slices of TPUs with two hosts, both on this machine: `gcloud`, and `curl` for their metadata."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

SLICE = Path(os.environ["FAKE_CLUSTER"]) / "slice.json"
HOSTS = 2
URL = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"


def parser():
    """Returns the options of the commands that are used, as `gcloud help` has them."""
    tpus = argparse.ArgumentParser(allow_abbrev=False)
    commands = tpus.add_subparsers(dest="command", required=True)
    words = {
        "queued-resources create": (
            "name --node-id --accelerator-type --runtime-version --metadata --spot"
        ),
        "queued-resources list": "--filter --format",
        "queued-resources delete": "name --force --quiet",
        "tpu-vm ssh": "name --worker --batch-size --command",
    }
    for command, options in words.items():
        added = commands.add_parser(command, allow_abbrev=False)
        added.add_argument("--zone", required=True)
        for option in options.split():
            is_flag = option in ("--spot", "--force", "--quiet")
            kind = {"action": "store_true"} if is_flag else {}
            added.add_argument(
                option, **kind, **({"dest": "text"} if option == "--command" else {})
            )
    return tpus


def gcloud(words):
    assert words[:2] == ["compute", "tpus"]
    args = parser().parse_args([" ".join(words[2:4]), *words[4:]])
    match args.command:
        case "queued-resources create":
            assert not SLICE.exists() and args.node_id == args.name
            metadata = dict(item.split("=", 1) for item in args.metadata.split(","))
            text = json.dumps({"name": args.name, "metadata": metadata})
            SLICE.write_text(text, encoding="utf-8")
        case "queued-resources list":
            assert args.format == "value(state.state)"
            (pattern,) = re.fullmatch(r"name~(\S+)", args.filter).groups()
            if SLICE.exists():
                name = json.loads(SLICE.read_text(encoding="utf-8"))["name"]
                assert re.search(pattern, f"projects/p/locations/z/queuedResources/{name}")
                print("ACTIVE")
        case "queued-resources delete":
            assert args.force and args.quiet
            SLICE.unlink()
        case "tpu-vm ssh":
            assert args.name == json.loads(SLICE.read_text(encoding="utf-8"))["name"]
            return ssh(args)
    return 0


def ssh(args):
    workers = range(HOSTS) if args.worker == "all" else [int(args.worker)]
    if args.worker == "all" and args.batch_size != "all":
        assert int(args.batch_size or 64) >= HOSTS, "not all run at once"
    sessions = []
    for worker in workers:
        env = os.environ | {"FAKE_WORKER": str(worker)}
        # Without a shell's own, which ignores some signals.
        session = subprocess.Popen(["bash", "-c", args.text], env=env, stdin=subprocess.DEVNULL)
        sessions.append(session)
    codes = [session.wait() for session in sessions]
    return next(filter(None, codes), 0)


def curl(words):
    flags, header, value, url = words
    assert (flags, header, value) == ("-sf", "-H", "Metadata-Flavor: Google")
    attributes = json.loads(SLICE.read_text(encoding="utf-8"))["metadata"] | {
        "agent-worker-number": os.environ["FAKE_WORKER"],
        "worker-network-endpoints": ",".join(f"x:{i}:127.0.0.{i + 1}" for i in range(HOSTS)),
    }
    print(attributes[url.removeprefix(URL)], end="")
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:]))
