"""Trains and saves in forked children that are killed at the n-th thing that they do to the file system.

    python kill_points.py FOLDER SEED NUM_RANDOM STRIDE

prints, as JSON, how many children were killed, and what was wrong with any of the folders that they left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshweave as mw
from meshweave.nn.training.folder import whole_steps

KEEP, LAST = 2, 5
_EVENTS = (
    "open",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.remove",
    "os.scandir",
    "os.listdir",
    "os.truncate",
)


class Training:
    """A small training, the same in each process."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = mw.nn.TrainingState([self.model], self.optimizer, rank=0)
        self.checkpoints = mw.Checkpoints(folder, keep=KEEP)
        self.num_steps = 0

    def resume(self, step: int | None = None) -> None:
        """Go on from a step, the last whole one by default."""
        step = self.checkpoints.latest() if step is None else step
        if step is not None:
            self.state.load(self.checkpoints, step)
            self.num_steps = step

    def step(self) -> None:
        """Train a step on random numbers, whose generator is a part of the state."""
        self.optimizer.zero_grad()
        self.model(torch.rand(5, 4)).square().sum().backward()
        self.optimizer.step()
        self.num_steps += 1

    def save(self) -> None:
        """Save, and wait until it is whole."""
        self.state.save(self.checkpoints, self.num_steps)
        self.checkpoints.wait()

    def bits(self) -> list[Any]:
        """Return all that the training is."""
        kept = [value for each in self.optimizer.state.values() for value in each.values()]
        return [each.detach().tolist() for each in (*self.model.parameters(), *kept, torch.get_rng_state())]


def goes_on(training: Training) -> None:
    """Train and save the next step."""
    training.resume()
    training.step()
    training.save()


def again(training: Training) -> None:
    """Save the last step once more."""
    training.resume()
    training.save()


def rewinds(training: Training) -> None:
    """Go back to the step before the last, and save the one after it again."""
    training.resume(LAST - 1)
    training.step()
    training.save()


def begins(training: Training) -> None:
    """Begin in an empty folder."""
    training.save()


SCENARIOS: tuple[Callable[[Training], None], ...] = (goes_on, again, rewinds, begins)


def killed_at(limit: int, after_s: float | None) -> None:
    """Let this process be killed at the `limit`-th thing it does to the file system, or after some time."""
    count = [0]

    def see(*_: object) -> None:
        count[0] += 1
        if count[0] == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(lambda event, args: see() if event in _EVENTS else None)
    for name in ("fsync", "fdatasync", "fdopen", "replace"):
        real = getattr(os, name)
        setattr(os, name, lambda *args, _real=real, **options: (see(), _real(*args, **options))[1])
    if after_s is not None:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, after_s)


def child(act: Callable[[], None]) -> int:
    """Run something in a child. Return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def wrong_after(folder: Path, scenario: Callable[[Training], None], bits: list[Any]) -> list[str]:
    """Return what is wrong with a folder whose writer was killed: what was whole is, and a training goes on."""
    wrong = []
    steps = whole_steps(folder)
    expected = [] if scenario is begins else [LAST]
    if not set(expected) <= set(steps) and not (scenario is goes_on and LAST + 1 in steps):
        wrong.append(f"whole are {steps}")
    training = Training(folder)
    with warnings.catch_warnings(record=True) as told:
        training.resume()
    if told:
        wrong.append(f"told of {told[0].message}")
    while training.num_steps < LAST + 3:
        training.step()
    if training.bits() != bits:
        wrong.append("other bits than those of a training that was never stopped")
    training.save()
    left = sorted(path.name for path in folder.iterdir())
    if any("." in name for name in left) or len(left) > KEEP or f"step-{LAST + 3:08d}" not in left:
        wrong.append(f"left are {left}")
    if training.checkpoints.latest() != LAST + 3:
        wrong.append(f"the latest is {training.checkpoints.latest()}")
    return wrong


def main() -> None:
    """See the module."""
    base, seed, num_random, stride = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    straight = Training(base / "straight")
    straight.step()
    while straight.num_steps < LAST:
        straight.step()
        straight.save()
    pristine = base / "pristine"
    shutil.copytree(base / "straight", pristine)
    while straight.num_steps < LAST + 3:
        straight.step()
    bits, draw = straight.bits(), random.Random(seed)
    killed, wrong, points = 0, [], {}
    for scenario in SCENARIOS:
        begun = time.monotonic()

        def run(limit: int, after_s: float | None, scenario: Any = scenario) -> int:
            folder = base / "case"
            shutil.rmtree(folder, ignore_errors=True)
            if scenario is not begins:
                shutil.copytree(pristine, folder)
            training = Training(folder)

            def act() -> None:
                killed_at(limit, after_s)
                scenario(training)

            return child(act)

        def look(where: str, scenario: Any = scenario) -> None:
            wrong.extend(f"{where}: {each}" for each in wrong_after(base / "case", scenario, bits))

        limit = 1
        while status := run(limit, None):
            if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
                wrong.append(f"{scenario.__name__} at {limit}: ended with {status}")
                break
            killed += 1
            look(f"{scenario.__name__} at {limit}")
            limit += stride
        points[scenario.__name__] = limit
        took_s = 1.5 * (time.monotonic() - begun) / max(limit // stride, 1)
        for _ in range(num_random):
            if run(0, draw.uniform(0.001, max(took_s, 0.01))):
                killed += 1
            look(f"{scenario.__name__} at random")
    print(json.dumps({"killed": killed, "wrong": wrong, "points": points}))


if __name__ == "__main__":
    main()
