"""Real processes that die, fail, hang and dawdle."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from meshweave.base.errors import BindError, DeadlineError, RankLostError
from meshweave.execute.ranks import launch as launcher
from meshweave.execute.ranks.job import report_path, write_json
from meshweave.execute.ranks.launch import RankError, launch
from meshweave.execute.ranks.worker import resolve

pytest.importorskip("torch")
pytestmark = pytest.mark.gloo

HERE = Path(__file__).parent
ENV = {"PYTHONPATH": str(HERE)}


def run(function, num_ranks, payload=None, **options):
    options = {"timeout_s": 60.0, "env": ENV, "interval_s": 0.1, "stale_s": 0.8, **options}
    return launch(f"rank_functions:{function}", num_ranks, payload or {}, **options)


@pytest.fixture(params=["forked ranks", "new interpreters"])
def any_start(request, monkeypatch):
    """Start ranks as other tests do, and as a user does."""
    if request.param == "new interpreters":
        monkeypatch.setattr(launcher, "rank_starter", None)


def test_threads_that_report_at_once_leave_a_whole_report(monkeypatch, tmp_path):
    both, replace = threading.Barrier(2, timeout=20.0), Path.replace
    monkeypatch.setattr(Path, "replace", lambda part, to: (both.wait(), replace(part, to)))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(partial(write_json, report_path(tmp_path, 0)), (1, 2)))
    assert json.loads(report_path(tmp_path, 0).read_text()) in (1, 2)


def test_results_come_back_in_order_and_a_slow_rank_is_not_lost(any_start):
    payload = {"busy_s": 0.8, "a": [1, None]}
    results = run("slow", 2, payload, stale_s=0.6)
    common = {"sum": 3.0, "missing": [], "payload": payload, "threads": 1}
    assert results == [{"rank": rank, **common} for rank in range(2)]


def test_a_thread_that_comes_back_as_its_process_ends_does_not_abort_a_rank_that_is_done(monkeypatch):
    monkeypatch.setattr(launcher, "rank_starter", None)
    assert run("left_behind", 1) == [None]


def test_a_rank_that_is_done_stays_until_all_have_joined():
    """One that leaves before closes connections that others still make."""
    assert launch("late_rank_functions:is_there", 2, {}, timeout_s=60.0, env=ENV) == [None, True]


def test_all_survivors_name_the_killed_rank_and_no_other():
    with pytest.raises(RankLostError, match=r"^rank 2 was killed by SIGKILL$") as caught:
        run("ring", 4, {"victim": 2, "unguarded": 1})
    assert caught.value.missing == (2,)
    assert caught.value.reports == {
        0: "rank 2 stopped answering while waiting for the ring",
        1: "rank 2 stopped answering while waiting for rank_functions:ring",
        2: "was killed by SIGKILL",
        3: "rank 2 stopped answering while waiting for the ring",
    }


@pytest.mark.parametrize("starts_anew", [False, True])
def test_a_rank_that_a_fault_ends_says_where_it_was(monkeypatch, starts_anew):
    monkeypatch.delenv("PYTHONFAULTHANDLER", raising=False)
    if starts_anew:
        monkeypatch.setattr(launcher, "rank_starter", None)
    with pytest.raises(
        RankLostError, match=r"^rank 0 was killed by SIGSEGV\nrank 0: Fatal Python error"
    ) as caught:
        run("read_nothing", 1)
    (note,) = caught.value.__notes__
    assert "in read_nothing" in note and "numpy" not in note


def test_a_mistake_in_a_rank_is_raised_as_the_same_kind():
    with pytest.raises(BindError, match=r"^rank 0: the result of .* is not JSON") as caught:
        run("unprintable", 1)
    assert caught.value.reports[0].startswith("the result of rank_functions:unprintable is not JSON")


def test_any_other_exception_brings_its_traceback():
    with pytest.raises(RankError, match=r"^rank 1: KeyError: 'colour'") as caught:
        run("faulty", 2)
    assert caught.value.rank == 1
    assert "in faulty" in caught.value.remote_traceback
    assert caught.value.reports == {
        0: "rank 1 failed (KeyError: 'colour') while waiting for rank 1",
        1: "KeyError: 'colour'",
    }


def test_an_echo_of_a_failure_is_not_its_cause():
    with pytest.raises(RankError, match=r"^rank 1: KeyError: 'colour'") as caught:
        run("heard_before_it_is_said", 2)
    assert caught.value.reports[0] == "rank 1 failed in ring (call 1): KeyError: 'colour'"


def test_a_hanging_rank_is_a_missed_deadline_and_not_a_lost_rank():
    with pytest.raises(
        DeadlineError, match=r"rank 0: gave up waiting for word from rank 1 after \d+\."
    ) as caught:
        run("hanging", 2, {"deadline_s": 0.5}, grace_s=0.2)
    assert "every rank still answers" in caught.value.reports[0]
    assert "rank 1 got SIGTERM: rank 0 gave up first" in caught.value.reports[1]


def test_ranks_told_to_stop_while_stuck_say_who_is_missing_before_they_go():
    # What torchrun does: one rank dies, rank 0 even, and the others get SIGTERM before they can know.
    with pytest.raises(RankLostError, match=r"^rank 0 was killed by SIGKILL$") as caught:
        run("deserted", 3, grace_s=0.0)
    assert caught.value.missing == (0,)
    stuck, busy = caught.value.reports[1], caught.value.reports[2]
    assert stuck == "meshweave: rank 1 got SIGTERM while waiting for rank 2: rank 0 stopped answering"
    assert busy == "meshweave: rank 2 got SIGTERM: rank 0 stopped answering"


def test_the_time_is_up():
    with pytest.raises(DeadlineError, match=r"^rank 0 had not finished after 0\.5 s"):
        run("hanging", 1, timeout_s=0.5, deadline_s=50.0)


def test_no_rank_is_lost_where_all_are_ended_at_the_same_time():
    with pytest.raises(DeadlineError, match=r"^ranks 0, 1 and 2 had not finished after 1 s"):
        run("sleeping", 3, {"at_start": 2}, timeout_s=1.0, deadline_s=50.0)


def test_the_time_is_up_because_a_rank_was_stopped():
    with pytest.raises(
        RankLostError, match=r"^rank 1 was stopped by a signal; .* had not finished"
    ) as caught:
        run("stopping", 3, timeout_s=3.0, deadline_s=50.0)
    assert caught.value.missing == (1,)
    assert caught.value.reports[0].endswith("got SIGTERM while waiting for rank 1: rank 1 stopped answering")


def test_forming_a_group_ends_at_the_deadline_and_names_the_rank_that_was_stopped():
    """gloo waits 30 s for a connection to a process that was stopped when it had told its address."""
    for _ in range(9):
        with pytest.raises(RankLostError) as caught:
            run("stopped_while_forming", 3, timeout_s=30.0, grace_s=0.0)
        if "killed" not in str(
            caught.value
        ):  # as it is by those that had nothing to wait for, one time in three
            break
    assert re.match(r"rank [01]: rank 2 stopped answering while waiting for ranks", str(caught.value))
    assert caught.value.missing == (2,)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc")
@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("killed_while_others_agree", "the second agreement"),
        ("killed_while_one_looks_late", "the second agreement"),
        ("killed_while_others_form_a_group", "ranks (0, 1, 2) to form a group"),
    ],
)
def test_waits_in_which_no_connection_breaks_notice_a_killed_rank(function, what):
    with pytest.raises(RankLostError, match=r"^rank 2 was killed by SIGKILL$") as caught:
        run(function, 3, timeout_s=120.0, grace_s=30.0)
    said = f"rank 2 stopped answering while waiting for {what}"  # and not that SIGTERM ended the wait
    assert [caught.value.reports[rank] for rank in (0, 1)] == [said] * 2


def test_a_context_has_a_liveness_by_default_and_none_if_told_so():
    assert run("default_liveness", 2) == [{"adopted": True, "own": [True, [], False], "none": True}] * 2


def test_the_store_listens_on_loopback_alone_and_what_ranks_say_is_signed():
    first, second = run("seen_store", 2)
    assert first["addresses"] == ["0100007F"] and first["token"] == second["token"] != ""
    assert run("seen_store", 1)[0]["token"] != first["token"]
    with pytest.raises(BindError, match=r"the store cannot listen on 203\.0\.113\.1:0"):
        run("seen_store", 1, address="203.0.113.1")


@pytest.mark.parametrize("target", ["os", "os:nothing", "nowhere.at_all:function", "os:sep"])
def test_a_target_must_be_a_function(target):
    with pytest.raises(BindError, match=f"target '{target}'"):
        resolve(target)


def test_what_cannot_be_started():
    with pytest.raises(BindError, match=r"payload .* not JSON"):
        run("slow", 1, {"a": {1}})
    with pytest.raises(BindError, match="give at least 1"):
        run("slow", 0)


PATIENCE_S = 240.0
"""A bound on waits for what is certain to come, however loaded the machine is; less than pytest's own timeout."""


@pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="waits for a process that is no child, as Linux can"
)
def test_no_rank_outlives_its_parent(tmp_path):
    script = (
        "from meshweave.execute.ranks.launch import launch; launch('stubborn:rank', 1, {}, timeout_s=1e4)"
    )
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    parents, rank_fds = {}, {}
    try:
        for signum in (signal.SIGKILL, signal.SIGINT):
            env = {**os.environ, "PYTHONPATH": path, "STUBBORN_PID": str(tmp_path / signum.name)}
            command = [sys.executable, "-c", script]
            parents[signum] = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        for signum, parent in parents.items():
            file, until = tmp_path / signum.name, time.monotonic() + PATIENCE_S
            while not file.exists():
                assert time.monotonic() < until and parent.poll() is None
                time.sleep(0.05)
            rank_fds[signum] = os.pidfd_open(int(file.read_text()))
            parent.send_signal(signum)
        for signum, rank_fd in rank_fds.items():  # a descriptor of a process is readable once it has ended
            assert select.select([rank_fd], [], [], PATIENCE_S)[0], signum
    finally:
        for rank_fd in rank_fds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank_fd, signal.SIGKILL)
            os.close(rank_fd)
        for parent in parents.values():
            parent.kill()
            parent.wait()
