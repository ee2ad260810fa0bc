"""The benchmark of training steps in a lab: its calibration, and what it says of its rows."""

from pathlib import Path

import pytest

from meshweave.cost.machine import Machine
from meshweave.simulate import simulate
from meshweave_lab import Lab

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_calibration_gives_back_the_constants_of_a_simulated_lab():
    import step_lab_rank as ranks

    cluster = Lab.load(ROOT / "examples/labs/hosts-4x4.toml").cluster()
    constants = {
        "intra": {"bytes_per_s": 4e8, "step_s": 2e-3, "reduce_step_s": 1e-3, "message_s": 1.5e-3},
        "nic": {"bytes_per_s": 3.5e6, "step_s": 3e-3, "reduce_step_s": 2e-3, "message_s": 2.5e-3},
        "chip": {"launch_s": 1e-4},
    }
    lab = ranks.calibrated(cluster, constants)
    medians = {"between products": 1e-4}
    for kind, link, num_bytes, loops in ranks.CASES:
        program = ranks.axis_program(kind, (4, 4), ranks.AXES[link], num_bytes, loops, 1)
        spans = simulate(program, Machine.of(lab, program)).trace().spans
        ends = [span.end_ps for span in spans if span.lane != "compute"]
        medians[f"{kind} {link} {num_bytes}"] = max(ends) / 1e12 / loops
    again = ranks.constants_of(medians, cluster.network)
    for link, of in constants.items():
        assert again[link] == pytest.approx(of, rel=0.06), (
            link
        )  # the memory of both ends takes part of a message


def test_verdicts_count_pairs_that_differ_and_are_in_another_order():
    from step_lab import verdicts

    def row(name, measured_s, estimated_s):
        return {
            "name": name,
            "median_s": measured_s,
            "estimated_s": estimated_s,
            "simulated_s": measured_s,
        }

    said = verdicts([row("a", 1.0, 1.2), row("b", 1.05, 1.0), row("c", 1.2, 1.1)])
    assert said["pairs_apart"] == 2  # a and b differ by less
    assert said["estimated_s"]["pairs_missed"] == [("a", "c")]
    assert said["estimated_s"]["within"] == 1
    assert said["simulated_s"]["pairs_missed"] == []


def test_the_page_has_a_row_for_each_configuration_and_what_was_missed():
    from step_lab import verdicts
    from step_lab_tables import table

    of = {"bytes_per_s": 1e6, "step_s": 1e-3, "reduce_step_s": 1e-3, "message_s": 1e-3}
    rows = [
        {"name": "slow", "median_s": 2.0, "estimated_s": 1.0, "simulated_s": 2.1, "runs_s": [2.0]},
        {"name": "fast", "median_s": 1.0, "estimated_s": 1.1, "simulated_s": 1.0, "runs_s": [1.0]},
    ]
    result = {
        "model": {"num_layers": 4, "hidden": 128, "vocab_size": 512},
        "batch": 32,
        "seq": 128,
        "constants": {"intra": of, "nic": of},
        "rows": rows,
        "verdicts": verdicts(rows),
    }
    machine = {"date": "today", "versions": {}, "cpu": "one", "cores": 2, "system": "Linux"}
    text = "\n".join(table({"machine": machine, "rows": result}))
    assert text.index("| fast | 1.100 | 1.000 | 1.000 | +10.0 % | +0.0 %") < text.index("| slow |")
    assert "By estimate: mean error 30.0 %, worst -50.0 %; 0 of 2 within 8 %; 0 of the 1 pairs" in text
    assert "Missed: fast was faster than slow." in text


def test_what_is_no_number_is_wrong():
    from step_lab import wrong_rows

    def row(name, loss_error, weight_error):
        return {"name": name, "loss_error": loss_error, "weight_error": weight_error}

    nan = float("nan")
    rows = [row("a", 0.0, 1e-4), row("b", nan, 0.0), row("c", 0.0, nan), row("d", 0.0, 1.0)]
    assert wrong_rows(rows) == ["b", "c", "d"]
