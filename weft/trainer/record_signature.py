"""Signature of a run's record, to tell what this user has written from what came from elsewhere.

The key is in a file that only the user can read, `weft/key` in `$XDG_CONFIG_HOME` or `~/.config`,
which the first signature makes. A machine with the same home directory has the same key.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SIGNATURE = "signature"
_KEY_BYTES = 32


def signed(record: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Returns a record, of JSON values, signed together with a text if the key can be stored."""
    key = _read_key() or _make_key()
    signed_record = dict(record)
    if key is not None:
        signed_record[_SIGNATURE] = _signature(key, record, text)
    return signed_record


def is_signed(record: Mapping[str, Any], text: str) -> bool:
    """Returns whether `signed` has made a record for this text, with the key of this user."""
    key = _read_key()
    signature = record.get(_SIGNATURE)
    if key is None or not isinstance(signature, str):
        return False
    expected = _signature(key, record, text)
    return hmac.compare_digest(
        expected.encode(), signature.encode(errors="replace")
    )


def _signature(key: bytes, record: Mapping[str, Any], text: str) -> str:
    facts = {
        name: value for name, value in record.items() if name != _SIGNATURE
    }
    message = json.dumps([facts, text], sort_keys=True)
    return hmac.new(key, message.encode(), hashlib.sha256).hexdigest()


def _key_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    if not os.path.isabs(home):
        home = (
            os.devnull
        )  # a key in the current directory would not be this user's
    return Path(home, "weft", "key")


def _read_key() -> bytes | None:
    """Returns the key, None if there is none that only this user can read."""
    with contextlib.suppress(OSError), open(_key_file(), "rb") as file:
        status = os.fstat(file.fileno())
        key = file.read()
        is_private = (
            status.st_uid == os.getuid()
            and not stat.S_IMODE(status.st_mode) & 0o077
        )
        if is_private and len(key) == _KEY_BYTES:
            return key
    return None


def _make_key() -> bytes | None:
    """Stores a new key, in place of one that others can read; returns None if that fails."""
    file = _key_file()
    temporary = file.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
        )
        with open(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(_KEY_BYTES))
        if file.exists():
            os.replace(temporary, file)
        else:
            os.link(
                temporary, file
            )  # fails if another process has just made one
    except FileExistsError:
        pass
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return _read_key()
