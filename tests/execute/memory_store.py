"""A store for ranks in one process: no torch, no sockets."""

import threading


class MemoryStore:
    """What `torch.distributed.HashStore` does, with a plug to pull."""

    def __init__(self, data=None, lock=None):
        self.data = {} if data is None else data
        self.lock = lock or threading.Lock()
        self.plugged = True
        self.free_to_answer = threading.Event()
        self.free_to_answer.set()

    def handle(self):
        return MemoryStore(self.data, self.lock)

    def _call(self):
        self.free_to_answer.wait(10.0)
        if not self.plugged:
            raise RuntimeError("Broken pipe")

    def set(self, key, value):
        self._call()
        self.data[key] = value.encode()

    def get(self, key):
        self._call()
        return self.data[key]

    def check(self, keys):
        self._call()
        return all(key in self.data for key in keys)

    def multi_get(self, keys):
        self._call()
        return [self.data[key] for key in keys]

    def compare_set(self, key, expected, desired):
        self._call()
        with self.lock:
            if self.data.get(key, b"").decode() == expected:
                self.data[key] = desired.encode()
            return self.data[key]
