"""A queue for `StreamWindow` without a device: the calling thread waits and writes, in memory that ranks share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from meshweave.execute.cuda.trigger import reached
from meshweave.execute.memory.shared import SharedMemory
from meshweave.execute.memory.stream_window import StreamWindow, with_words


@dataclass
class ThreadWords:
    """Words that a thread polls, for at most `patience_s`. Then it writes none, as a stream that is stuck."""

    patience_s: float = 20.0
    is_stuck: bool = False

    def wait(self, word, value):
        until = time.monotonic() + self.patience_s
        while not reached(int(word), value) and not self.is_stuck:
            time.sleep(2e-5)
            self.is_stuck = time.monotonic() > until

    def write(self, word, value):
        if not self.is_stuck:
            word.fill_(value)


@dataclass
class ThreadQueue:
    """See the module docstring. Once a wait ran out of patience nothing that was queued gets done."""

    words: ThreadWords
    freed: list = field(default_factory=list)

    def done(self):
        return lambda: not self.words.is_stuck

    def read(self, words):
        return [int(word) for word in words]

    def free(self, waits):
        self.freed += waits


@dataclass
class QueuedMemory(SharedMemory):
    """Shared memory whose windows are those of streams; `words` are those of the last one."""

    words: ThreadWords = field(default_factory=ThreadWords)

    def expose(self, exposure):
        """Return a window with words beside what is wanted."""
        return super().expose(with_words(exposure))

    def _window(self, slots):
        window = super()._window(slots)
        self.words = ThreadWords()
        queue = ThreadQueue(self.words)
        return StreamWindow(**vars(slots), context=self.context, queue=queue, other_updates=window)
