"""What a process says and does when it is ended: in processes of their own, for they install handlers."""

import subprocess
import sys
import threading
import time

import pytest

from meshweave.execute.ranks.last_words import is_transport
from meshweave.execute.ranks.monitor import _WaitingThreads
from meshweave.execute.ranks.patience import call_within

INSTALLED = """
import os, signal, sys, time
from meshweave.execute.ranks.last_words import install_last_words
install_last_words(lambda: None)
"""


def run(code):
    command = [sys.executable, "-c", INSTALLED + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_signal_to_a_fork_is_the_forks_alone():
    done = run(
        """
pid = os.fork()
if pid == 0:
    time.sleep(30)
    os._exit(3)
time.sleep(0.2)
os.kill(pid, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
time.sleep(0.3)
print("goes on")
"""
    )
    assert (done.stdout.split(), done.returncode) == (["-15", "goes", "on"], 0), done.stderr


def test_the_signal_has_its_way():
    assert run("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)").returncode == -15


def test_a_handler_that_is_set_later_is_the_one_that_is_called():
    done = run(
        """
signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.3)
print("goes on")
"""
    )
    assert (done.stdout.split(), done.returncode) == (["mine", "goes", "on"], 0), done.stderr


def test_a_signal_arrives_where_somebody_took_the_wakeup_descriptor():
    assert (
        run("signal.set_wakeup_fd(-1); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)").returncode
        == -15
    )


def test_two_reports_of_one_signal_let_it_have_its_way():
    more = """
from meshweave.execute.ranks.signals import SignalReport, write_stderr
SignalReport(signal.SIGTERM, lambda *_: ("more", ()), write_stderr)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
    done = run(more)
    assert (done.stderr.split(), done.returncode) == (["more"], -15)


def test_errors_that_no_rank_is_to_blame_for_are_printed_as_they_are():
    done = run("raise RuntimeError('[gloo] Connection closed by peer')")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("RuntimeError: [gloo] Connection closed by peer")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("Application timeout caused pair closure", True),
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", True),
        ("Timed out waiting 1000ms for recv operation to complete", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_errors_of_the_transport(text, is_one):
    assert is_transport(RuntimeError(text)) is is_one


def test_a_thread_that_waits_is_told_from_one_that_computes():
    over = threading.Event()
    waits = threading.Thread(target=call_within, args=(30.0, over.wait))
    outside = threading.Thread(target=over.wait)  # it waits for something else than ranks
    waits.start(), outside.start()
    seen = _WaitingThreads()
    try:
        until = time.monotonic() + 20.0
        while seen.longest_s < 0.3 and time.monotonic() < until:
            seen.look()
            time.sleep(0.05)
        assert seen.longest_s >= 0.3
    finally:
        over.set()
        waits.join(), outside.join()
    seen.look()
    assert seen.longest_s == 0.0


def test_a_thread_that_ends_while_it_is_looked_at_is_no_fault():
    done = run(
        """
import threading
from meshweave.execute.ranks import monitor
over, names = threading.Event(), {}
exec(compile("def wait(over): over.wait()", "/torch/distributed/waits.py", "exec"), names)
threads = [threading.Thread(target=names["wait"], args=(over,)) for _ in range(12)]
for thread in threads:
    thread.start()
is_in_a_wait = monitor._is_in_a_wait

def while_they_end(frame):
    over.set()
    for thread in threads:  # more than the C library keeps the stacks of
        thread.join()
    time.sleep(0.1)
    return is_in_a_wait(frame)

monitor._is_in_a_wait = while_they_end
monitor._WaitingThreads().look()
print("goes on")
"""
    )
    assert (done.stdout, done.returncode) == ("goes on\n", 0), done.stderr
