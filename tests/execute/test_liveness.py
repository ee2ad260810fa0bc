"""Liveness over a store of its own making: several ranks in one process, no torch, no sockets."""

import os
import signal
import threading
import time

import pytest
from memory_store import MemoryStore

from meshweave.base.errors import DeadlineError, LayoutError, RankLostError, UnsupportedError
from meshweave.execute.ranks.blame import Beat, News
from meshweave.execute.ranks.heart import Pause
from meshweave.execute.ranks.liveness import Liveness
from meshweave.execute.ranks.signing import TOKEN_VARIABLE, new_token, sign, verify

INTERVAL_S, STALE_S = 0.02, 0.2
PATIENCE_S = 240.0
"""A bound on waits for what is certain to come, however loaded the machine is; less than pytest's own timeout."""
CLOSED = "gloo: Connection closed by peer"


@pytest.fixture
def world():
    """`world(n)`: that many ranks over one store, and their handles of it; all closed at the end."""
    made = []

    def make(num_ranks, **options):
        store = MemoryStore()
        handles = [store.handle() for _ in range(num_ranks)]
        options = {"interval_s": INTERVAL_S, "stale_s": STALE_S, **options}
        made.extend(Liveness(handle, r, range(num_ranks), **options) for r, handle in enumerate(handles))
        until = time.monotonic() + PATIENCE_S
        while not store.check([f"meshweave/hb/{rank}" for rank in range(num_ranks)]):
            assert time.monotonic() < until
            time.sleep(0.001)
        return made, handles

    yield make
    for liveness in made:
        liveness.close()


def fail(liveness, message=CLOSED, deadline_s=None, **options):
    """The message of the error that a failed wait of `liveness` raises."""
    with (
        pytest.raises((RankLostError, DeadlineError)) as caught,
        liveness.guard("the halo", deadline_s, **options),
    ):
        raise RuntimeError(message)
    return caught.value


def test_a_lost_rank_is_named_by_all_and_the_first_to_leave_by_none(world):
    ranks, handles = world(4)
    handles[2].plugged = False
    error = fail(ranks[1])
    assert str(error) == "rank 2 stopped answering while waiting for the halo"
    assert error.missing == (2,)
    assert str(error.__cause__) == CLOSED
    ranks[1].close(error)
    time.sleep(2 * STALE_S)  # rank 1 has been silent for long now
    assert fail(ranks[3]).missing == fail(ranks[0]).missing == (2,)


def test_all_lost_ranks_are_named(world):
    ranks, handles = world(4)
    handles[1].plugged = handles[2].plugged = False
    assert str(fail(ranks[0])) == "ranks 1 and 2 stopped answering while waiting for the halo"
    assert ranks[3].missing() == (1, 2)


def test_nobody_is_missing_while_all_answer(world):
    ranks, _ = world(3)
    ranks[1].close()
    assert ranks[0].missing() == ()


def test_a_failure_of_ones_own_stays_what_it_was(world):
    ranks, _ = world(2)
    with pytest.raises(RuntimeError, match="shapes differ") as caught, ranks[0].guard("the product"):
        raise RuntimeError("shapes differ")
    assert type(caught.value) is RuntimeError
    with pytest.raises(LayoutError), ranks[0].guard("the product"):
        raise LayoutError("no")


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (KeyError("colour"), "KeyError: 'colour'"),
        (ValueError("no caf\udce9.txt"), r"ValueError: no caf\udce9.txt"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_error(world, own, words):
    ranks, _ = world(3)
    ranks[1].close(own)
    error = fail(ranks[0])
    assert str(error) == f"rank 1 failed ({words}) while waiting for the halo"
    assert error.missing == (1,)


def test_a_rank_that_left_in_peace_is_named_only_if_waited_for(world):
    ranks, _ = world(3)
    ranks[1].close()
    assert isinstance(fail(ranks[0], "Timed out waiting 10ms"), DeadlineError)
    error = fail(ranks[2], "Timed out waiting 10ms", peers=[1])
    assert str(error) == "rank 1 left early while waiting for the halo"


@pytest.mark.parametrize("message", ["Timed out waiting 1000ms for recv operation to complete", CLOSED])
def test_an_overdue_wait_is_no_lost_rank(world, message):
    ranks, _ = world(2)
    error = fail(ranks[0], message, deadline_s=0.0 if message == CLOSED else None)
    assert isinstance(error, DeadlineError)
    assert "every rank still answers" in str(error)
    ranks[0].close(error)
    second = fail(ranks[1])
    assert isinstance(second, DeadlineError)
    assert "rank 0 gave up first (gave up waiting for the halo" in str(second)


def test_a_silent_rank_at_the_deadline_is_lost(world):
    ranks, handles = world(2)
    handles[1].free_to_answer.clear()
    assert fail(ranks[0], "Timed out").missing == (1,)
    handles[1].free_to_answer.set()
    until = time.monotonic() + PATIENCE_S
    while 1 not in ranks[1].heart.news.lost:  # a rank that comes back learns what became of it
        assert time.monotonic() < until
        time.sleep(0.001)
    assert "gave rank 1 (this one) up" in str(fail(ranks[1]))


@pytest.mark.parametrize("dead", [True, False])
@pytest.mark.parametrize(("store_rank", "missing"), [(1, (1,)), (None, ())])
def test_a_store_that_is_gone_or_hangs(world, dead, store_rank, missing):
    ranks, handles = world(2, store_rank=store_rank)
    if dead:
        handles[0].plugged = False
    else:
        handles[0].free_to_answer.clear()
    error = fail(ranks[0])
    assert error.missing == missing
    assert "the store" in str(error)
    if store_rank is None:
        with pytest.raises(RankLostError, match="the store is gone"):
            ranks[0].missing()
    handles[0].free_to_answer.set()


def test_a_store_is_hosted_by_whom_it_usually_is_until_that_rank_says_otherwise(world):
    store = MemoryStore()
    lone = Liveness(store, 0, range(2), interval_s=INTERVAL_S, stale_s=STALE_S, likely_store_rank=1)
    store.plugged = False  # before rank 1 could say anything
    assert fail(lone).missing == (1,)
    lone.close()
    ranks, handles = world(2, likely_store_rank=1)  # and rank 1 says that it hosts none
    while ranks[0].heart.news.store_rank is None:
        time.sleep(0.001)
    handles[0].plugged = False
    assert fail(ranks[0]).missing == ()


def test_a_store_whose_host_left_because_of_another_rank(world):
    ranks, handles = world(3, store_rank=0)
    handles[2].plugged = False
    ranks[0].close(fail(ranks[0]))
    handles[1].plugged = False
    assert fail(ranks[1]).missing == (2,)


def test_an_accusation_is_heard_before_the_accuser_may_leave(world):
    ranks, handles = world(4, store_rank=0)
    handles[3].plugged = False
    fail(ranks[0])  # from here on rank 0 may end, and the store with it
    for handle in handles[1:3]:
        handle.plugged = False
    assert fail(ranks[1]).missing == fail(ranks[2]).missing == (3,)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (DeadlineError("gave up waiting"), DeadlineError, "rank 0 gave up first (gave up waiting)"),
        (KeyError("colour"), RankLostError, "rank 0 failed (KeyError: 'colour')"),
    ],
)
def test_the_farewell_of_a_store_host_is_known_without_its_store(world, error, kind, words):
    ranks, handles = world(2, store_rank=0)
    ranks[0].close(error)
    handles[1].plugged = False
    raised = fail(ranks[1])
    assert type(raised) is kind
    assert words in str(raised)


def test_a_store_host_leaves_last_but_not_after_ranks_that_never_leave(world):
    ranks, _ = world(3, store_rank=0)
    leaving = threading.Thread(target=ranks[0].close)
    leaving.start()
    leaving.join(STALE_S / 2)
    assert leaving.is_alive()
    for rank in ranks[1:]:
        rank.close()
    leaving.join(PATIENCE_S)
    assert not leaving.is_alive()
    ranks, _ = world(2, store_rank=0)
    ranks[0].close()  # although rank 1 stays


def test_a_rank_that_was_stopped_is_told_so_even_without_a_store(world):
    ranks, handles = world(2, store_rank=1)
    handles[0].plugged = False
    while not ranks[0].heart.store_gone:
        time.sleep(0.001)
    ranks[0].heart.paused_s = 7.0  # as its thread finds out when it goes on
    error = fail(ranks[0])
    assert error.missing == (0,)
    assert "the other ranks gave rank 0 (this one) up: it did not answer for 7 s" in str(error)


def test_a_store_host_that_was_stopped_blames_itself(world):
    ranks, handles = world(2, store_rank=0)
    handles[1].plugged = False  # it left, and could not say why
    with pytest.raises(RankLostError, match="this one") as caught, ranks[0].guard("the halo"):
        ranks[0].heart.last_pause = Pause(time.monotonic(), 9.0)
        raise RuntimeError(CLOSED)
    assert caught.value.missing == (0,)


def test_a_store_host_that_was_stopped_blames_a_rank_that_beat_on_afterwards(world):
    ranks, handles = world(3, store_rank=0)
    with pytest.raises(RankLostError) as caught, ranks[0].guard("the halo"):
        ranks[0].heart.last_pause = Pause(time.monotonic(), 9.0)  # as of the whole machine
        until = time.monotonic() + PATIENCE_S
        with ranks[0].heart.watch():
            while not ranks[0].heart.has_beaten_since_pause(2):
                assert time.monotonic() < until
                ranks[0].heart.wait_for_beat()
        handles[2].plugged = False
        raise RuntimeError(CLOSED)
    assert caught.value.missing == (2,)


def test_a_missed_deadline_names_the_ranks_that_did_not_come(world):
    ranks, _ = world(3)
    with (
        pytest.raises(DeadlineError, match="rank 2 did not come, and every rank still answers"),
        ranks[0].guard("all to agree") as wait,
    ):
        wait.unheard = (2,)
        raise TimeoutError("timed out")


class TestStrangers:
    """What is not signed with the token of the run."""

    @pytest.fixture(autouse=True)
    def token(self, monkeypatch):
        monkeypatch.setenv(TOKEN_VARIABLE, new_token())

    def test_what_is_signed_is_for_its_key_and_its_run_alone(self, monkeypatch):
        value = sign("a key", "words, with blanks").encode()
        assert verify("a key", value) == "words, with blanks"
        assert verify("another key", value) is None
        assert verify("a key", b"words, with blanks") is None
        assert verify("a key", value + b"!") is None
        monkeypatch.setenv(TOKEN_VARIABLE, new_token())
        assert verify("a key", value) is None

    def test_cannot_accuse_a_rank(self, world):
        ranks, handles = world(3)
        for forged in (News(frozenset({1})).encode(), "nonsense"):
            handles[0].set("meshweave/news", forged)
            assert ranks[0].missing() == ranks[2].missing() == ()

    def test_cannot_silence_a_rank(self, world):
        ranks, handles = world(2)
        stop = threading.Event()

        def overwrite():
            while not stop.is_set():
                handles[0].set("meshweave/hb/1", Beat(10**6, "failed", "never").encode())

        forger = threading.Thread(target=overwrite)
        forger.start()
        try:
            assert ranks[0].missing() == ()
        finally:
            stop.set()
            forger.join()

    def test_do_not_hide_a_rank_that_is_lost(self, world):
        ranks, handles = world(3)
        handles[2].plugged = False
        assert fail(ranks[0]).missing == fail(ranks[1]).missing == (2,)


def test_a_busy_interpreter_raises_no_alarm(world):
    ranks, _ = world(2, interval_s=0.05, stale_s=1.0)
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            sum(range(100))

    spinners = [threading.Thread(target=spin) for _ in range(4)]
    for spinner in spinners:
        spinner.start()
    try:
        assert [liveness.missing() for liveness in ranks] == [(), ()]
    finally:
        stop.set()
        for spinner in spinners:
            spinner.join()


def test_what_is_left_of_the_deadline(world):
    ranks, _ = world(1, deadline_s=1000.0)
    with ranks[0].guard("nothing") as wait:
        assert 1000.0 - PATIENCE_S < wait.timeout.total_seconds() <= 1000.0
    with ranks[0].guard("nothing", 0.0) as wait:
        assert wait.timeout.total_seconds() == 0.001


def test_a_signal_is_reported_and_then_goes_its_way(world):
    ranks, handles = world(3)
    handles[2].plugged = False
    lines, seen = [], []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append((signum, list(lines))))
    try:
        ours = signal.getsignal(signal.SIGTERM)
        ranks[0].install_signal_report(write=lambda line, missing: lines.append((line, missing)))
        with ranks[0].guard("the halo"):
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + PATIENCE_S
            while not seen and time.monotonic() < until:
                time.sleep(0.01)
        line = "meshweave: rank 0 got SIGTERM while waiting for the halo: rank 2 stopped answering"
        assert seen == [(signal.SIGTERM, [(line, (2,))])]
        ranks[0].close()
        assert signal.getsignal(signal.SIGTERM) is ours
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_only_the_main_thread_can_report_signals(world):
    ranks, _ = world(1)
    caught = []

    def install():
        try:
            ranks[0].install_signal_report()
        except UnsupportedError as error:
            caught.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert len(caught) == 1
