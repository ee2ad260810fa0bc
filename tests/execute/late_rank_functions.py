"""Rank 1 takes a while to join, and looks whether rank 0, which has nothing to do, is still there."""

import os
import time
from pathlib import Path

from meshweave.execute.torch import world

join = world.adopt


def late(liveness):
    if liveness.rank:
        time.sleep(1.0)
    join(liveness)


world.adopt = late


def is_there(context, payload):
    key = "process of rank 0"
    if context.rank == 0:
        context.store.set(key, str(os.getpid()))
        return None
    stat = Path(f"/proc/{int(context.store.get(key))}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
