"""A target that never gets ready and minds no signal but SIGKILL. No torch, so that it is soon there."""

import os
import signal
import time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(os.environ["STUBBORN_PID"]).write_text(str(os.getpid()))
time.sleep(100)
