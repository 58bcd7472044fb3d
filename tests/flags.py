"""The XLA flags of a process that a test starts."""

import os
import re


def xla_flags(devices=1):
    """Returns the XLA flags of the tests, which compile cheaply, for a number of devices."""
    return re.sub(r"(device_count=)\d+", rf"\g<1>{devices}", os.environ["XLA_FLAGS"])
