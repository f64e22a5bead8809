"""Python imports this first where the folder is on its path: the process gets the pretended
accelerator.
"""

import tests.pretend.accelerator  # noqa: F401  # registers the device
