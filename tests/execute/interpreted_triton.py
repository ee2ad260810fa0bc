"""Import this before a kernel, so that Triton's interpreter runs it.

TRITON_INTERPRET is read when Triton is imported, and the process that a rank was forked from may have done so.
"""

import os
import sys

if os.environ.get("TRITON_INTERPRET") == "1":
    for name in [name for name in sys.modules if f"{name}.".startswith("triton.") and "._C" not in name]:
        del sys.modules[name]
