"""`reproduce published`: files of training runs, what rows ask of a prediction, their figures and their scores."""

from __future__ import annotations

import json
import random
import re
import runpy
import tomllib
from collections import defaultdict
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median

import pytest

import meshweave as mw
from meshweave.algorithms.step import SoftwareStack, Step, load_stack, memory_of, stack_names, step_of
from meshweave.algorithms.step.stacks import stack_table
from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.cli.app import run_app
from meshweave_studies.training_runs.best_of_sweeps import cells_line, cells_table, sweep_cells
from meshweave_studies.training_runs.cases import RunCase, case_of
from meshweave_studies.training_runs.figures import (
    model_flops,
    peak,
    published_bytes,
    published_seconds,
)
from meshweave_studies.training_runs.models import NoPredictionError, has_experts, model_of, stated_parameters
from meshweave_studies.training_runs.rows import ALSO_SHIPPED, COLUMNS, PublishedRun, parse_runs, shipped_runs
from meshweave_studies.training_runs.score import (
    MEMORY_GOAL,
    ScoredRun,
    run_bytes,
    score_run,
    score_runs,
    source_scores,
    summary_of,
)
from meshweave_studies.training_runs.split import family_of, is_fitted
from meshweave_studies.training_runs.sweeps import RunSweep, sweep_table, sweeps_of
from meshweave_studies.training_runs.tables import runs_page, runs_table, scores_csv, worst_memory_table

RUNS = shipped_runs()
ROOT = Path(__file__).parents[2]
SCORES = ROOT / "src" / "meshweave" / "catalog" / "scores.csv"
HEADER = ",".join(COLUMNS) + "\n"
ROW = "S,GPT 22B,8 A100,8,1,,,,,4,4,2048,full recompute,step time s,1.42,\n"


def error_of(text: str) -> list[str]:
    with pytest.raises(DescriptionError) as raised:
        parse_runs(text, "f.csv")
    return str(raised.value).splitlines()


def reason_of(run: PublishedRun) -> str:
    with pytest.raises(NoPredictionError) as raised:
        case_of(run)
    return str(raised.value)


def run_at(line: int) -> PublishedRun:
    return next(run for run in RUNS if run.line == line)


def test_a_row_and_a_user_who_names_its_stack_get_the_same_time() -> None:
    """What software does stands with the stack; a row says dtypes, degrees and what it makes of them."""
    seen = set()
    for run in (*RUNS, *shipped_runs("dense_runs.csv"), *shipped_runs("vtrain_runs.csv")[:5]):
        try:
            case = case_of(run)
        except NoPredictionError:
            continue
        of, chosen = case.problem, case.choices[0]
        name, key = of.stack.name, (of.stack.name, of.cluster.chip.name)
        if key in seen or of.stack != load_stack(name) or of.loss is not None:
            continue
        try:
            step = mw.step(
                of.model, of.cluster, of.batch, of.sequence, dtype=of.dtype, gradient_dtype=of.gradient_dtype,
                stack=name, precision=of.precision, overlap="layers", **asdict(chosen),
            )  # fmt: skip
        except UnsupportedError:  # a row's software can do more than the stack
            continue
        seen.add(key)
        assert step.time_s == step_of(of, chosen).time_s
    named = {name for name, _ in seen}
    assert named == set(stack_names()) - {"meshweave", "meshweave-eager"}
    assert {chip for name, chip in seen if name == "maxtext"} == {"TPU v5e", "TPU v5p", "TPU v6e"}


def run_of(**columns: str) -> PublishedRun:
    row = dict(zip(COLUMNS, ROW.strip().split(","), strict=True)) | columns
    text = HEADER + ",".join(f'"{row[name]}"' for name in COLUMNS)
    return parse_runs(text, "f.csv")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.csv: line 1: no column 'source'"),
        (HEADER, "f.csv: has no rows; give one at least"),
        (HEADER.replace("chips", "chip") + ROW, "no column 'chips'"),
        (HEADER.replace("\n", ",tp\n") + ROW, "f.csv: line 1: column 'tp' stands twice"),
        (HEADER + "a,b\n", "f.csv: line 2: has 2 values where line 1 has 16 columns"),
        (
            HEADER + ROW + ROW.replace("1.42", "fast"),
            "f.csv: line 3, column value: 'fast' is no number above",
        ),
        (HEADER + ROW.replace(",8,1,", ",8,-1,"), "line 2, column pp: '-1' is no whole number from 1"),
        (HEADER + ROW.replace("S,", ","), "line 2, column source: is empty"),
        (
            HEADER.replace("\n", ",etp\n") + ROW.replace("\n", ",two\n"),
            "line 2, column etp: 'two' is no whole number",
        ),
        (HEADER + '"\n', "is no row of comma-separated values"),
    ],
)
def test_bad_files(text: str, message: str) -> None:
    (line,) = error_of(text)
    assert message in line


def test_every_bad_row_has_a_line() -> None:
    lines = error_of(HEADER + ROW.replace("1.42", "x") + ROW + ROW.replace("2048", "2k"))
    assert len(lines) == 3 and "line 2, column value" in lines[1] and "line 4, column seq" in lines[2]


def test_columns_in_any_order_with_others_beside() -> None:
    names = [*reversed(COLUMNS), "remark"]
    cells = dict(zip(COLUMNS, ROW.strip().split(","), strict=True)) | {"remark": "x"}
    text = ",".join(names) + "\n" + ",".join(cells[name] for name in names) + "\n"
    assert replace(parse_runs(text, "f")[0], line=2) == parse_runs(HEADER + ROW, "f")[0]


def test_seeded_damage_is_refused_or_read_and_never_an_exception() -> None:
    draw, refused = random.Random(19), 0
    whole = HEADER + "\n".join(",".join(f'"{x}"' for x in ("s", "GPT 22B", "8 A100", "8", "1", *[""] * 4, "4", "4",
                               "2048", "", "step time s", "1", "")) for _ in range(3))  # fmt: skip
    for _ in range(200):
        text = list(whole)
        for _ in range(draw.randint(1, 3)):
            text[draw.randrange(len(text))] = draw.choice([*"\0\n\r,\"'-e.9 é", ""])
        try:
            for run in parse_runs("".join(text), "f.csv"):
                try:
                    case_of(run)
                except NoPredictionError as error:
                    assert str(error)
        except DescriptionError as error:
            refused += 1
            assert str(error).startswith("f.csv: ")
    assert refused > 50


def test_every_shipped_row_is_a_case_or_has_a_reason() -> None:
    cases, reasons = [], []
    for run in RUNS:
        try:
            cases.append(case_of(run))
        except NoPredictionError as error:
            reasons.append(str(error))
    assert len(RUNS) == 461 and len(cases) >= 231
    assert all(reason and "\n" not in reason for reason in reasons)
    assert all(
        choice.num_ranks == case.problem.cluster.num_chips and case.problem.batch % choice.data == 0
        for case in cases
        for choice in case.choices
    )


def test_what_rows_say() -> None:
    megatron = case_of(run_at(6))
    assert (megatron.problem.model.num_layers, megatron.problem.cluster.name) == (105, "selene")
    assert {choice.virtual_stages for choice in megatron.choices} == {1, 3}
    assert {choice.recompute for choice in megatron.choices} == {"full"}
    zero = case_of(run_at(8))
    assert (zero.choices[0].data, zero.choices[0].zero, zero.stack.name) == (640, 3, "megatron-2021")
    readme = next(case_of(run) for run in RUNS if "Megatron-LM README" in run.source)
    assert (readme.problem.batch, readme.choices[0].strategy) == (4, "megatron_sp")
    assert readme.choices[0].recompute == "selective"
    bubble = next(case_of(run) for run in RUNS if run.config == "ZB-2p, 32 microbatches")
    assert (bubble.problem.batch, bubble.choices[0].pipeline, bubble.choices[0].schedule) == (192, 8, "zb-2p")
    shared = next(case_of(run) for run in RUNS if "SHARD_GRAD_OP" in run.config)
    assert shared.choices[0].zero == 2 and shared.problem.cluster.name == "dgx-h100"
    titan = next(case_of(run) for run in RUNS if "torchtitan" in run.source)
    assert (titan.problem.batch, titan.recomputed_share) == (16, 0.5)
    scaled = next(case_of(run) for run in RUNS if "configs/v5e" in run.source and "2 x" in run.chips)
    assert (scaled.problem.batch, scaled.choices[0].zero_group, scaled.choices[0].micro_batch) == (
        3072,
        256,
        6,
    )
    assert 1.5e10 < scaled.problem.model.num_parameters < 1.7e10


def test_recipes_name_products_that_are_kept() -> None:
    """Of Llama 3 8B without queries, keys, values and out: two products of 4096 x 14336, and attention."""
    words = "BF16 FULL_SHARD full recompute but qkv, out"
    own = {"model": "Llama3.1-8B", "chips": "8 v6e", "gbs": "24", "seq": "8192", "source": "MaxText"}
    case = case_of(run_of(**own, tp="", pp="", config=words))
    attention = case.problem.model.layer.attention_flops(8192) / (2 * 8192)
    again = 2 * 4096 * 14336 + attention
    assert case.recomputed_share == pytest.approx(again / (again + 4096 * (6144 + 4096)))
    assert (case.choices[0].zero, case.choices[0].zero_group, case.stack.name) == (3, None, "maxtext")
    case = case_of(run_of(**own, tp="", pp="", config="BF16 FULL_SHARD full recompute but attention"))
    products = 4096 * (6144 + 4096 + 2 * 14336)
    assert case.recomputed_share == pytest.approx(products / (products + attention))
    assert sum(node.parameters[0].size for node in case.problem.model.layer.linears[:-1]) == products


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"model": "Mixtral 8x7B"}, "experts"),
        ({"model": "Qwen3_30B_a3B"}, "experts"),
        ({"model": "nothing"}, "the sizes of the model are not known"),
        ({"model": "GPT h4096 l36 a0"}, "the sizes of the model are not known"),
        ({"model": "GPT h4096 l999999999 a32"}, "layers"),
        ({"config": "zero-9"}, "zero is 9"),
        ({"config": "HSDP=3", "tp": "1"}, "zero_group is 3"),
        ({"config": "MXFP4"}, "products in eight or four bits"),
        ({"config": "MXFP8"}, "precision mxfp8: its products were not measured on chip A100"),
        ({"chips": "8 Z100"}, "the catalog has no cluster of Z100"),
        ({"chips": "A100"}, "the number of chips is not stated"),
        ({"chips": "13 A100"}, "13 chips do not fill hosts of 8 evenly"),
        ({"dp": "3"}, "dp 3 is stated, and the chips are enough for 1"),
        ({"tp": "", "pp": ""}, "the degrees of parallelism are not stated"),
        ({"gbs": ""}, "the batch is not stated"),
        ({"seq": ""}, "the sequence length is not stated"),
        ({"mbs": "3"}, "do not divide 4 sequences"),
        ({"mbs": "1", "tp": "1", "pp": "8", "gbs": "99999"}, "99999 micro-batches are more than 16384"),
        ({"chips": "99999999 A100"}, "chips"),
        ({"seq": "99999999999"}, "sequence is 99999999999"),
    ],
)
def test_reasons(columns: dict[str, str], reason: str) -> None:
    assert reason in reason_of(run_of(**columns))


def test_an_unknown_source_is_predicted_without_constants() -> None:
    case = case_of(run_of())
    assert (case.stack.name, case.problem.stack.name, case.choices[0].micro_batch) == ("ideal", "ideal", 4)


def test_llm_foundrys_formula_gives_its_own_tokens_per_second() -> None:
    """MFU and tokens/s of each row are one measurement, which ties FLOP formula and peak."""
    rows = [run for run in RUNS if stated_parameters(run)]
    assert len(rows) == 155
    for run in rows:
        case, tokens = case_of(run), re.search(r"(\d+) tok/s/GPU", run.second)
        assert tokens is not None
        seconds = published_seconds(case, unpriced(case))
        per_chip = case.problem.batch * case.problem.sequence / seconds / case.problem.cluster.num_chips
        assert per_chip == pytest.approx(float(tokens[1]), rel=3e-3)


def test_nanotrons_formula_gives_its_own_tokens_per_second() -> None:
    rows = [run for run in RUNS if "tok/s/gpu" in run.second]
    for run in rows:
        case = case_of(run)
        seconds = published_seconds(case, unpriced(case))
        tokens = case.problem.batch * case.problem.sequence / seconds / case.problem.cluster.num_chips
        assert tokens == pytest.approx(float(run.second.split()[0]), rel=1e-3)
    assert len(rows) == 3


def test_narayanans_formula() -> None:
    case = case_of(run_at(6))
    of, m = case.problem, case.problem.model
    flops = 96 * of.batch * of.sequence * m.num_layers * m.hidden**2
    flops *= 1 + of.sequence / (6 * m.hidden) + (m.vocab_size or 0) / (16 * m.num_layers * m.hidden)
    assert unpriced(case).flops("all", recomputed=True) == pytest.approx(flops, rel=1e-3)
    assert published_seconds(case, unpriced(case)) == pytest.approx(flops / (163e12 * 2520), rel=1e-3)


def test_peaks_and_memory() -> None:
    case = case_of(next(run for run in RUNS if "torchtitan" in run.source))
    assert peak(case) == 989e12 and published_bytes(case) == pytest.approx(82.4 * 2**30)
    assert published_bytes(case_of(run_at(2))) is None
    assert published_bytes(replace(case, run=replace(case.run, second="0 GB"))) is None
    with pytest.raises(NoPredictionError, match="the metric 'miles/s' is not known"):
        published_seconds(case_of(run_of(metric="miles/s")), unpriced(case))
    assert model_flops(case, unpriced(case)) == unpriced(case).flops("all")


def test_memory_of_published_runs() -> None:
    """The median over sources of each one's median error is within the goal, also on families that judge."""
    errors: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    for run in RUNS:
        if not re.search(r" Gi?B", run.second) or "ZB-" in run.config:
            continue  # stashes of zero-bubble schedules take long to count
        try:
            case = case_of(run)
        except NoPredictionError:
            continue
        stated = published_bytes(case)
        if stated is not None and len(case.choices) == 1 and case.problem.precision is None:
            error = abs(run_bytes(case, case.choices[0]) / stated - 1)
            errors[is_fitted(case.problem.model)].setdefault(run.source, []).append(error)
    assert sum(len(each) for side in errors.values() for each in side.values()) > 30
    for side in errors.values():
        assert median(median(each) for each in side.values()) <= MEMORY_GOAL


def test_memory_is_that_of_the_rank_that_a_source_prints() -> None:
    """nanotron's log has the first rank, which under its division of layers has most of them."""
    case = case_of(next(run for run in RUNS if "nanotron docs" in run.source and (run.count("pp") or 1) > 8))
    memory = memory_of(case.problem, case.choices[0])
    assert run_bytes(case, case.choices[0]) == memory.ranks[0].total
    others = replace(case, stack=replace(case.stack, memory_of_first_rank=False))
    assert run_bytes(others, case.choices[0]) == memory.total
    kept = case_of(next(run for run in RUNS if "SAC compile" in run.config and "202412" in run.source))
    assert kept.kept == "compiled-operators" and kept.problem.loss == "eager"
    assert kept.problem.stack.recomputes_gate and not kept.problem.stack.copies_norm_inputs


def unpriced(case: RunCase) -> Step:
    """Return a step of which only the FLOPs are looked at: those follow from problem and parallelism."""
    step = object.__new__(Step)
    object.__setattr__(step, "problem", case.problem)
    object.__setattr__(step, "parallelism", case.choices[0])
    return step


def test_a_family_is_on_one_side() -> None:
    sides: dict[str, set[bool]] = {}
    for run in RUNS:
        try:
            model = model_of(run)
        except NoPredictionError:
            continue
        sides.setdefault(family_of(model), set()).add(is_fitted(model))
    assert all(len(side) == 1 for side in sides.values())
    assert {True, False} == {side for each in sides.values() for side in each}


def test_scores_and_tables() -> None:
    row = ScoredRun(2, "A", "m", "8 A100", "step time s", 1.0, 1.1, 10.0, 9.0)
    rows = [
        row,
        replace(row, line=3, predicted=0.7),
        replace(row, line=4, predicted=1.02, counts=False),
        replace(row, line=5, source="B", predicted=1.0, published_gb=None),
        replace(row, line=6, source="B", predicted=None, published_gb=None, reason="no reason"),
    ]
    first, second = source_scores(rows)
    assert (first.rows, first.predicted, first.num_within) == (3, 2, 1)
    assert first.median == pytest.approx(0.2) and first.worst == pytest.approx(0.3)
    assert first.memory_median == pytest.approx(0.1) and second.memory_median is None
    summary = summary_of(rows)
    assert (summary.sources, summary.rows) == (2, 3) and summary.median == pytest.approx(0.1)
    text = runs_table(rows, 1)
    assert "| 3 | A |" in text and "| 2 | A |" not in text and "no reason" in text
    page = runs_page(rows)
    assert "3 of 5 rows scored, 2 sources" in text and "# Published" in page
    assert (
        "| 2 | A | m | 8 A100 | 10.0 GB | 9.0 GB | -10.0% |" in page
        and worst_memory_table(rows[-1:], 3) == ""
    )


def test_a_run_counts_once_over_sources() -> None:
    twice = [run_of(source="one"), run_of(source="two", metric="MFU %", value="41.5")]
    rows = score_runs(twice)
    assert [row.counts for row in rows] == [True, False]


def test_a_time_that_the_step_itself_gives_has_no_error() -> None:
    run = run_of()
    case = case_of(run)
    time_s = step_of(case.problem, case.choices[0]).time_s
    (row,) = score_runs([replace(run, value=time_s)])
    assert row.error == pytest.approx(0.0)
    (row,) = score_runs([replace(run, metric="samples/s/GPU", value=4 / time_s / 8)])
    assert row.error == pytest.approx(0.0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(HEADER + ROW + ROW.replace("GPT 22B", "Kimi"))
    page = tmp_path / "page.md"
    assert run_app(["reproduce", "published", "--cases", str(file), "--json", "--report", str(page)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["line"] for row in data["rows"]] == [2, 3] and data["summary"]["rows"] == 1
    assert data["rows"][1]["error"] is None and "experts" in data["rows"][1]["reason"]
    assert page.read_text().startswith("# Published training runs")
    assert run_app(["reproduce", "published", "--cases", str(file)]) == 0
    assert "1 of 2 rows scored" in capsys.readouterr().out
    file.write_text(HEADER + ROW.replace("1.42", "-1"))
    assert run_app(["reproduce", "published", "--cases", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "runs.csv: line 2, column value: '-1' is no number" in line


def test_rank_correlations_of_sweeps() -> None:
    lines = [
        ROW.replace("2048", seq).replace("1.42", value)
        for seq, value in (("512", "1"), ("1024", "2"), ("2048", "3"))
    ]
    runs = parse_runs(HEADER + "".join(lines), "f")
    row = ScoredRun(2, "S", "GPT 22B", "8 A100", "step time s", 1.0)

    def correlation(*predicted: float) -> float:
        rows = [
            replace(row, published=run.value, predicted=x) for run, x in zip(runs, predicted, strict=True)
        ]
        (sweep,) = sweeps_of(runs, rows)
        assert (sweep.varies, sweep.rows) == ("sequence", 3)
        return sweep.correlation

    assert correlation(0.1, 0.2, 0.3) == 1 and correlation(3, 2, 1) == -1
    assert correlation(1, 3, 2) == 0.5 and correlation(1, 2, 2) == pytest.approx(0.866, abs=1e-3)
    assert sweeps_of(runs, [replace(row, predicted=None)] * 3) == []
    sweeps = [
        RunSweep("S", "22b", "sequence", 3, 1.0, 0.5),
        RunSweep("S", "7b", "sequence", 3, 0.5, 0.04),
        RunSweep("S", "1b", "sequence", 3, -1.0, 0.03),
    ]
    page = sweep_table(sweeps)
    assert "| S | sequence | 3 | 9 | 0.17 | -1.00 |" in page
    assert page.startswith("1 of 2 sweeps whose figures differ by more than 3% reach 0.7\n")
    others = [
        replace(row, predicted=1.0),
        replace(row, predicted=2.0, stack="other"),
        replace(row, predicted=3.0),
    ]
    assert sweeps_of(runs, others) == []


def test_with_experts_no_scores_of_dense_models_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dense = [run for run in RUNS if run.source.startswith("calculon")][:1]
    monkeypatch.setattr("meshweave_studies.training_runs.rows.shipped_runs", lambda name="": tuple(dense))
    scores = tmp_path / "scores.csv"
    for option, lines in (("--experts", 1), ("--json", 2)):
        assert run_app(["reproduce", "published", option, "--scores", str(scores)]) == 0
        assert len(set(scores.read_text().splitlines())) == lines


@pytest.mark.slow
def test_the_saved_page_is_what_is_computed() -> None:
    rows = score_runs(RUNS)
    page = (ROOT / "validation" / "results" / "published.md").read_text("utf-8")
    cells = sweep_cells(RUNS)
    cells_text = f"{cells_line(cells)}\n\n{cells_table(cells)}"
    assert page == runs_page(rows, sweep_table(sweeps_of(RUNS, rows)), cells_text)
    others = [run for name in ALSO_SHIPPED for run in shipped_runs(name)]
    routed = [run for run in (*RUNS, *others) if has_experts(run)]
    every = [*rows, *score_runs(others), *score_runs(routed, experts=True)]
    assert scores_csv(every) == SCORES.read_text("utf-8")
    calculon = [row for row in rows if row.source.startswith("calculon")]
    assert len(calculon) == 8 and all(row.error is not None for row in calculon)


def test_the_scores_that_ship_are_those_that_are_computed() -> None:
    """Of a few runs; of all on demand, above."""
    saved = SCORES.read_text("utf-8").splitlines()
    for line in random.Random(1).sample(range(len(RUNS)), 12):
        row, _ = score_run(RUNS[line])
        if (
            row.error is not None and not row.precision
        ):  # those below 16 bits recur in later tables, and count once
            assert row.counts and scores_csv([row]).splitlines()[1] in saved
    for run in random.Random(2).sample([run for run in RUNS if has_experts(run)], 8):
        row, case = score_run(run, experts=True)
        assert case is None or scores_csv([row]).splitlines()[1] in saved
    assert {line.split(",")[-3] for line in saved[1:]} == {"yes", "no"}
    judged = [run for run in shipped_runs("dense_runs.csv") if "tpu-recipes" in run.source]
    assert {run.chips.split()[1] for run in judged} == {"v6e", "v5p"}
    for run in judged:
        row, _ = score_run(run)
        assert scores_csv([row]).splitlines()[1] in saved


def test_the_rates_of_transformer_engine_are_those_of_measured_times() -> None:
    script = runpy.run_path(str(ROOT / "validation/fit_stacks.py"))
    saved = stack_table()["attention"][script["MEASURED_KERNEL"]]
    assert saved == {chip: float(f"{rate:.3g}") for chip, rate in script["measured_rates"]().items()}
    text = script["stacks_toml"](defaultdict(lambda: 1.0), saved)
    kept = tomllib.loads(text)["stacks"]
    assert {name: {key for key in of if "host" in key} for name, of in kept.items()} == {
        name: {key for key in of if "host" in key} for name, of in stack_table()["stacks"].items()
    }, "what is fitted elsewhere stays"
    assert set(script["UNKNOWN"]) == {"nvfp4"}, "the products that no fitted run has"
    fitted = [run for run in shipped_runs() if run.line in (416, 417, 421, 422, 427, 428)]
    kinds = [case_of(run).problem.products for run in fitted]
    assert all(kinds) and "nvfp4" not in {kind for each in kinds for kind in each or ()}


def test_constants_of_stacks_are_few_and_named() -> None:
    stacks = tomllib.loads((ROOT / "src/meshweave/catalog/stacks.toml").read_text("utf-8"))
    constants = {field.name for field in fields(SoftwareStack) if field.type == "float"}
    assert len(constants) == 6 and stacks["stacks"]
    for of in stacks["stacks"].values():
        numbers = [value for name, value in of.items() if name not in ("host", "routed_hosts")]
        numbers += [value for name, value in of.get("host", {}).items() if name != "waits"]
        numbers += {rates["kernel_s"] for rates in of.get("routed_hosts", {}).values()}
        assert set(of) <= {*constants, "host", "routed_hosts"} and sum(bool(value) for value in numbers) <= 5


def test_the_validation_page_quotes_the_saved_scores() -> None:
    page = (ROOT / "validation" / "results" / "published.md").read_text("utf-8")
    saved = [line for line in page.splitlines() if "rows scored" in line]
    readme = (ROOT / "validation" / "README.md").read_text("utf-8")
    of_all, _, of_judges, of_fitted = saved
    assert all(f": {line}\n" in readme for line in (of_all, of_judges, of_fitted))


ROUTED = {
    "model": "Qwen3_30B_a3B", "config": "MXFP8", "metric": "tokens/s/GPU",
    "source": "Megatron-Bridge 26.04 NeMo Container",
    "counts": {"tp": 1, "pp": 1, "cp": 1, "ep": 8, "mbs": 4, "gbs": 64, "seq": 4096},
}  # fmt: skip


def routed_stack(**more: str) -> tuple[SoftwareStack, str]:
    """Return the stack and the dispatcher of a run with experts."""
    given = {key: value for key, value in ROUTED.items() if key != "counts"}
    run = replace(run_of(**{"chips": "8 DGX-GB300", **given, **more}), counts=ROUTED["counts"])  # type: ignore[arg-type]
    of = case_of(run, experts=True).problem
    return of.stack, of.dispatcher


def test_recipes_say_how_tokens_travel_and_what_is_captured() -> None:
    stack, dispatcher = routed_stack()
    assert (dispatcher, stack.captured, stack.overlaps_exchanges) == ("hybridep", 0.3, False)
    stack, _ = routed_stack(source="Megatron-Bridge 26.08 NeMo Container")
    assert (stack.captured, stack.overlaps_exchanges) == (1.0, True)
    assert (
        stack.biased_experts == SoftwareStack().biased_experts != load_stack("megatron-core").biased_experts
    )
    _, dispatcher = routed_stack(model="Qwen3_235B_a22B", chips="8 DGX-B200")
    assert dispatcher == "all_to_all"


def test_experts_that_are_computed_again_alone_are_a_share_of_a_layer() -> None:
    words = "BF16; selective recompute of layernorm, moe; no a2a overlap"
    run = replace(
        run_of(chips="8 DGX-H100", **{**ROUTED, "config": words, "counts": None}), counts=ROUTED["counts"]
    )  # type: ignore[arg-type]
    case = case_of(run, experts=True)
    assert case.choices[0].recompute == "full" and 0.3 < case.recomputed_share < 0.6
    long = replace(run, counts={**ROUTED["counts"], "seq": 131072, "gbs": 8, "mbs": 1})  # type: ignore[dict-item]
    assert case_of(long, experts=True).recomputed_share < 0.5 * case.recomputed_share
    other = replace(run, config="BF16; selective recompute of layernorm, act")
    assert case_of(other, experts=True).choices[0].recompute == "none"


def test_runs_of_models_with_experts_are_predicted_where_they_are_asked_for() -> None:
    run = replace(
        run_of(model="Qwen3_30B_a3B", chips="8 DGX-H100", metric="tokens/s/GPU"),
        counts={"tp": 1, "pp": 1, "cp": 1, "ep": 8, "mbs": 1, "gbs": 64, "seq": 4096},
        config="BF16",
        source="Megatron-Bridge",
    )
    with pytest.raises(NoPredictionError, match="experts"):
        case_of(run)
    (choice,) = case_of(run, experts=True).choices
    assert (choice.expert, choice.expert_tensor, choice.zero) == (8, 1, 1)
    for model, words in (("Nemotron_3_Super", "state-space"), ("Qwen3-Next-80B-A3B", "linear attention")):
        with pytest.raises(NoPredictionError, match=words):
            case_of(replace(run, model=model), experts=True)
    with pytest.raises(NoPredictionError, match="how evenly"):
        case_of(replace(run, others={"balance": "dropless"}), experts=True)
