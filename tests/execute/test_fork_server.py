"""Ranks forked from processes that have imported torch: as good as new ones, and none outlives its server."""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
from meshweave.base.errors import RankLostError
from meshweave.execute.ranks import launch as launcher
from meshweave.execute.ranks.launch import launch
from meshweave_lab.fork_server import ForkRequest, ForkServer, _import_missing, fork_servers, start_server
from meshweave_lab.shared_fork_servers import shared_fork_servers

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only"),
]

HERE = Path(__file__).parent


def seen_by_ranks(num_ranks=2, **env):
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return launch("rank_functions:seen", num_ranks, {}, timeout_s=60.0, env={"PYTHONPATH": path, **env})


def test_a_fork_sees_what_a_new_interpreter_would(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWEAVE_TEST_WORD", "inherited")
    forked = seen_by_ranks(1, MESHWEAVE_TEST_GIVEN="given")
    output = capfd.readouterr()
    new = seen_by_ranks(1, OMP_NUM_THREADS="2", MESHWEAVE_TEST_GIVEN="given")
    assert all(rank["parent"] != os.getpid() for rank in forked)
    assert all(rank["parent"] == os.getpid() for rank in new), (
        "torch reads OMP_NUM_THREADS when it is imported"
    )
    assert [rank["threads"] for rank in forked] == [1]
    for rank, (fork, interpreter) in enumerate(zip(forked, new, strict=True)):
        assert (
            fork["words"]
            == interpreter["words"]
            == {"GIVEN": "given", "RANK": str(rank), "WORD": "inherited"}
        )
        assert fork["folder"] == interpreter["folder"] == str(tmp_path)
        assert fork["handlers"] == interpreter["handlers"]
        assert f"said by {rank}" in output.out and f"complained by {rank}" in output.err


def test_a_fork_has_imported_what_the_first_dtensor_needs():
    (late,) = launch(
        "rank_functions:imports_of_a_dtensor", 1, {}, timeout_s=60.0, env={"PYTHONPATH": str(HERE)}
    )
    assert len(late) < 20, late


def test_ranks_of_different_servers_have_hash_seeds_of_their_own():
    hashes = [rank["hash"] for rank in seen_by_ranks(4)]  # by the two servers of these tests
    assert hashes[0] == hashes[2] != hashes[1] == hashes[3]


def test_a_killed_server_takes_its_ranks_along_and_is_started_anew_and_the_context_ends_it():
    outer = launcher.rank_starter
    with fork_servers(preload=["torch.distributed"], num_servers=1) as servers:
        assert launcher.rank_starter is servers
        first = seen_by_ranks(1)[0]["parent"]
        with pytest.raises(
            RankLostError, match=r"^rank 0 was killed by SIGKILL, rank 1 was killed by SIGKILL$"
        ):
            launch("rank_functions:kill_parent", 2, {}, timeout_s=60.0, env={"PYTHONPATH": str(HERE)})
        second = seen_by_ranks(1)[0]["parent"]
        assert second != first
        assert Path(f"/proc/{second}").exists()
    assert not Path(f"/proc/{second}").exists() and launcher.rank_starter is outer


def test_a_module_that_cannot_be_imported_does_not_end_the_server(tmp_path, monkeypatch):
    (tmp_path / "no_python_at_all.py").write_text("1 +")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("meshweave_lab.fork_server._keep_from_ranks", lambda: None)
    _import_missing(["no_python_at_all", "no_such_module_at_all"])


def test_owners_of_a_shared_server_have_forks_of_their_own_which_end_with_the_context():
    parents = []
    with shared_fork_servers(["torch.distributed"], num_servers=1) as paths:
        for _ in range(2):
            with fork_servers(shared=paths):
                parents += [rank["parent"] for rank in seen_by_ranks(2)]
        until = time.monotonic() + 20
        while any(Path(f"/proc/{parent}").exists() for parent in parents) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(Path(f"/proc/{parent}").exists() for parent in parents)
    assert len(set(parents)) == 2 and os.getpid() not in parents
    assert not any(Path(path).exists() for path in paths)


def test_a_shared_server_whose_owner_has_gone_while_it_started_ends():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        server = start_server("meshweave_lab.shared_fork_servers", listener, [str(os.getppid())])
    assert server.wait(60.0) == 1


def test_a_rank_has_not_the_end_of_an_earlier_process_of_its_number():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = object.__new__(ForkServer)  # without a process
    vars(server).update(
        _socket=ours, _process=None, _lock=threading.Lock(), _started=[], _running={}, _is_gone=False
    )
    request = ForkRequest("", {}, "/", True)
    with theirs:
        theirs.send(json.dumps([77, None]).encode())
        first = server.start(request)
        theirs.send(json.dumps([77, -11]).encode())
        assert first.poll() == -11
        theirs.send(json.dumps([77, None]).encode())
        second = server.start(request)
        assert second.poll() is None and first.poll() == -11
    assert second.wait(5.0) == -signal.SIGKILL  # with its server
    server.close()


def test_launching_from_several_threads_keeps_the_ranks_apart():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda word: seen_by_ranks(1, MESHWEAVE_TEST_WORD=word), "abc"))
    assert [rank["words"]["WORD"] for (rank,) in answers] == ["a", "b", "c"]
