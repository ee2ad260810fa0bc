"""Whom a rank concludes to be lost from the heartbeats that it has read: no clock, no store."""

import pytest

from meshweave.execute.ranks.blame import Beat, HeartbeatWatch, blame, ranks_text


def feed(watch, *rounds, elapsed_s=0.2):
    for beats in rounds:
        watch.feed(elapsed_s, beats)


class TestWatch:
    def watch(self, *others):
        return HeartbeatWatch(others, interval_s=0.2, stale_s=1.0)

    def test_a_beat_that_was_under_way_is_no_sign_of_life(self):
        watch = self.watch(1)
        feed(watch, {1: Beat(7)}, {1: Beat(8)})
        assert watch.is_undecided
        feed(watch, *[{1: Beat(8)}] * 5)
        assert watch.silent == [1] and not watch.is_undecided

    def test_two_more_beats_are(self):
        watch = self.watch(1)
        feed(watch, {1: Beat(7)}, {1: Beat(8)}, {1: Beat(9)})
        assert not watch.is_undecided and watch.silent == []

    def test_a_rank_that_falls_silent_later_is_in_doubt_again(self):
        watch = self.watch(1)
        feed(watch, {1: Beat(7)}, {1: Beat(9)}, *[{1: Beat(9)}] * 4)
        assert watch.is_undecided and watch.silent == []

    def test_a_paused_observer_blames_nobody(self):
        watch = self.watch(1)
        feed(watch, {1: Beat(7)})
        feed(watch, {1: Beat(7)}, {1: Beat(7)}, elapsed_s=3600.0)
        assert watch.silent == []

    def test_a_rank_whose_process_has_ended_is_silent_at_once(self):
        watch = self.watch(1, 2)
        watch.feed(0.2, {1: Beat(7), 2: Beat(9, "done")}, ended=[1, 2])
        assert watch.silent == [1] and watch.suspects == [1] and not watch.is_undecided

    def test_a_launcher_stops_the_others_because_of_the_first(self):
        watch, stopped = self.watch(1, 2, 3), Beat(9, "stopped", "SIGTERM")
        feed(
            watch,
            {1: Beat(7), 2: stopped, 3: Beat(8)},
            {1: Beat(8, "stopped"), 2: stopped, 3: Beat(9, "stopped")},
        )
        found = blame(0, watch, (), None, overdue=True)
        assert found.missing == (2,) and not found.has_left

    def test_a_rank_that_never_came_is_silent(self):
        watch = self.watch(1)
        feed(watch, *[{}] * 6)
        assert watch.silent == [1]

    def test_a_farewell_ends_the_doubt_without_blame(self):
        watch = self.watch(1)
        feed(watch, {1: Beat(7, "done")}, *[{1: Beat(7, "done")}] * 9)
        assert watch.silent == [] and not watch.is_undecided


def test_a_beat_survives_the_store():
    for beat in (Beat(3), Beat(4, "failed", "ValueError: a b  c")):
        assert Beat.decode(beat.encode()) == beat


@pytest.mark.parametrize(
    ("states", "accused", "peers", "overdue", "missing", "reason"),
    [
        # The culprit, and not those who left because of it.
        ({1: "lost", 2: None, 3: "lost"}, (), None, False, (2,), "rank 2 never answered"),
        ({1: "lost", 2: "alive", 3: "stopped"}, (2,), None, False, (2,), "rank 2 stopped answering"),
        ({1: "done", 2: "failed", 3: "alive"}, (), None, False, (2,), "rank 2 failed (why)"),
        ({1: "done", 2: "failed", 3: "alive"}, (3,), None, False, (2, 3), None),
        # Told to stop before left early, and both only for want of anybody lost.
        ({1: "done", 2: "stopped"}, (), None, False, (2,), "rank 2 was told to stop (why)"),
        ({1: "done", 2: "done"}, (), None, False, (1, 2), "ranks 1 and 2 left early"),
        ({1: "done", 2: "done"}, (), [2], False, (2,), "rank 2 left early"),
        # Somebody finished, and the wait for somebody else runs late.
        ({1: "done", 2: "alive"}, (), None, True, (), ""),
        ({1: "done", 2: "alive"}, (), [1], True, (1,), "rank 1 left early"),
        # All the others agree that it is us, and whatever else happens is what became of that.
        ({1: "lost", 2: "lost"}, (0,), None, False, (0,), None),
        ({1: "lost", 2: None, 3: "failed"}, (0,), None, False, (0,), None),
    ],
)
def test_who_is_to_blame(states, accused, peers, overdue, missing, reason):
    watch = HeartbeatWatch(states, interval_s=0.2, stale_s=1.0)
    for count in range(8):
        feed(watch, {r: Beat(count if s == "alive" else 5, s, "why") for r, s in states.items() if s})
    finding = blame(0, watch, accused, peers, overdue)
    assert finding.missing == missing
    assert reason is None or finding.reason == reason


def test_ranks_text():
    assert [ranks_text(ranks) for ranks in ([2], [5, 2], [7, 5, 2])] == [
        "rank 2",
        "ranks 2 and 5",
        "ranks 2, 5 and 7",
    ]
