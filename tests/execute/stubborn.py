"""A target that never gets ready and minds no signal but SIGKILL. No torch, so that it is soon there."""

import os
import signal
import time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
written = Path(os.environ["STUBBORN_PID"] + ".part")
written.write_text(str(os.getpid()))
written.rename(os.environ["STUBBORN_PID"])  # so that who sees the file sees all of it
time.sleep(1000)
