"""The XLA flags of a process that a test starts."""

import os
import re


def xla_flags(devices=1):
    """Those of the tests, which make compiling cheap, with another number of devices."""
    return re.sub(r"(device_count=)\d+", rf"\g<1>{devices}", os.environ["XLA_FLAGS"])
