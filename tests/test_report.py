"""The terminal report: what stands on it and in which order, on narrow pages, without Unicode, with hostile names."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.constraints import judge_all, parse_constraint
from autotune.digest import dump_json
from autotune.pipeline import Pipeline
from autotune.records import Cause, Interval, MetricValue, StageRecord, Status, TrialRecord
from autotune.report import clean, hints, print_report, render_report, scatter
from autotune.selection import Objective, select, verdict_sentence
from autotune.sweep.result import SweepResult
from autotune.trial import TrialPlan, TrialRunner

PATH = "/a/long/path/to/a/folder/of/runs/that/does/not/fit/on/forty/columns/best.bundle"
UNITS = {"accuracy": "share", "latency": "ms", "size": "bytes"}
ONE_POINT = parse_constraint("accuracy >= baseline - 1.0pt", metrics=UNITS)
OBJECTIVES = [Objective("latency"), Objective("accuracy", minimize=False)]


def metrics(ratio: float, drop: float, size: float) -> dict[str, MetricValue]:
    doubt = 0.004 if ratio != 1 else 0.0
    return {
        "latency": MetricValue(
            8 * ratio, 7.9 * ratio, 8.1 * ratio, "ms", ratio=Interval(ratio, ratio * (1 - doubt), ratio * (1 + doubt)), samples=99
        ),
        "accuracy": MetricValue(0.98 + drop, 0.96 + drop, 0.99 + drop, "share", delta=Interval(drop, drop - doubt, drop + doubt), samples=600),
        "size": MetricValue(1e5 * size, 1e5 * size, 1e5 * size, "bytes", ratio=Interval.exactly(size), samples=1),
    }


BASELINE = metrics(1.0, 0.0, 1.0)


def trial(number: int, ratio: float, drop: float, size: float, point: dict[str, Any], origin: str = "sampler") -> TrialRecord:
    found = judge_all([ONE_POINT], metrics(ratio, drop, size), BASELINE)
    status = Status.OK if found[0].amount >= 0 else Status.INFEASIBLE
    constraints = tuple(j.to_json() for j in found)
    return TrialRecord(number, point, status, origin=origin, metrics=metrics(ratio, drop, size), constraints=constraints)


RECORDS = [
    trial(0, 1.0, 0.0, 1.0, {"prune": None, "quantize": None}, "untouched"),
    trial(1, 0.5, -0.001, 0.3, {"prune": None, "quantize": "OnnxQuantization", "quantize.mode": "static"}, "default"),
    trial(2, 0.2, -0.008, 0.1, {"prune": "TorchPruning", "prune.keep": 0.4, "quantize": "OnnxQuantization", "quantize.mode": "dynamic"}),
    trial(3, 0.1, -0.3, 0.05, {"prune": "TorchPruning", "prune.keep": 0.1, "quantize": None}),
    TrialRecord(4, {}, Status.FAILED, cause=Cause.SIGNAL, stage="quantize", message="killed by signal 11 (SIGSEGV)"),
    TrialRecord(5, {}, Status.FAILED, cause=Cause.SIGNAL, stage="quantize", message="killed by signal 11, again"),
    TrialRecord(6, {}, Status.INVALID, cause=Cause.NOT_FINITE, stage="check", message="output 'logits' holds NaN"),
]


def summary(records: list[TrialRecord], **more: Any) -> dict[str, Any]:
    """What a run leaves in its result file, read back from JSON."""
    selection = select(records, OBJECTIVES, [ONE_POINT], baseline=BASELINE, score="accuracy")
    best = next((r for r in records if r.id == selection.best), None)
    chosen = selection.to_json()
    data = {
        "status": "delivered" if best else "none-feasible",
        "verdict": verdict_sentence(selection, records, baseline=BASELINE, score="accuracy"),
        "baseline": {"metrics": {k: v.to_json() for k, v in BASELINE.items()}},
        "best": None if best is None else {
            "id": best.id, "point": dict(best.point), "metrics": {k: v.to_json() for k, v in best.metrics.items()},
            "holdout": MetricValue(0.975, 0.96, 0.985, "share", delta=Interval(-0.005, -0.011, 0.001), samples=300).to_json(),
            "constraints": [j.to_json() for j in selection.judgements[best.id]],
        },
        **{k: chosen[k] for k in ("front", "groups", "picks", "near_misses", "notes", "membership", "eps")},
        "trials": {"ok": 3, "failed": 2, "invalid": 1, "infeasible": 1}, "space": {"valid": 312, "invalid": {"qnn-limits": 8}, "distinct": 312},
        "bundle": PATH if best else None, "seconds": 133.0,
        "surroundings": {
            "cpu_model": "Some CPU", "cpu_flags": ["avx2"], "effective_cpus": 2, "governor": "performance", "platform": "Linux x86_64",
            "python": "3.11.7", "versions": {"onnxruntime": "1.32.0"}, "ort_variables": {},
        },
    }  # fmt: skip
    read: dict[str, Any] = json.loads(dump_json({**data, **more}))
    return read


def page(width: int = 100, records: list[TrialRecord] | None = None, *, ascii_only: bool = False, **more: Any) -> str:
    records = RECORDS if records is None else records
    return render_report(summary(records, **more), records, width=width, ascii_only=ascii_only)


def test_the_sections_come_in_the_order_a_reader_wants_and_the_bundle_last() -> None:
    text = page()

    places = [
        text.index(part) for part in ("t-0002: p50 8.00", "Front", "Picks", "t-0002 against the default", "did not end well", "Measured on", PATH)
    ]
    assert places == sorted(places)
    assert text.endswith(f"{PATH}\n")


def test_the_verdict_is_first_and_has_the_baseline_before_the_result() -> None:
    assert page().startswith("t-0002: p50 8.00 → 1.60 ms (5.0x faster")
    assert "Baseline: latency 8.00 ms (7.90 to 8.10 ms), accuracy 0.9800" in page()


def test_the_front_has_each_member_with_its_interval_and_marks_what_is_delivered() -> None:
    text = page(140)

    assert "t-0002 *" in text
    assert "1.60 ms, 0.200x (0.199 to 0.201)" in text
    assert "0.9720, -0.8 pt (-1.2 to -0.4)" in text
    assert "TorchPruning > OnnxQuantization" in text
    assert re.search(r"baseline +8\.00 ms", text)


def test_the_scatter_spans_front_and_baseline_and_counts_what_lies_outside() -> None:
    text = page()

    assert "1 more outside" in text  # the ruined model
    assert re.search(r"\|.*#", text)


def test_the_picks_have_their_margin_to_each_limit() -> None:
    text = page(140)

    assert re.search(r"fastest +t-0002 .* accuracy >= baseline - 1\.0pt: 0\.2 pt of room \(met\)", text)


def test_a_margin_written_without_unit_is_read_from_its_expression() -> None:
    bare = [replace(r, constraints=tuple({k: c[k] for k in ("expr", "verdict", "amount", "needed")} for c in r.constraints)) for r in RECORDS]

    assert page(140, bare).count("0.2 pt of room (met)") == page(140).count("0.2 pt of room (met)") > 0


def test_the_best_is_told_apart_from_the_default_by_what_differs_only() -> None:
    text = page()
    part = text[text.index("against the default") : text.index("did not end well")]

    assert "prune: left out → TorchPruning" in part
    assert "prune.keep: not in use → 0.4" in part
    assert "quantize.mode: static → dynamic" in part
    assert "quantize: " not in part


def test_failures_are_counted_by_cause_with_one_message_each() -> None:
    text = page()

    assert "2 x failed: signal in quantize" in text
    assert "killed by signal 11 (SIGSEGV)" in text
    assert "signal 11, again" not in text
    assert "1 x invalid: not_finite in check" in text
    assert "1 x infeasible: accuracy >= baseline - 1.0pt" in text
    assert "29.0 pt missing (violated)" in text


def test_the_hold_out_and_what_would_settle_a_doubt_are_said() -> None:
    text = page(200)

    assert "On the hold-out, 300 rows that no choice was made on: accuracy 0.9750, -0.5 pt (-1.1 to +0.1 pt)" in text
    assert re.search(r"accuracy >= baseline - 1\.0pt is met: about [\d,]+ more rows would settle it", text)


def test_the_page_says_how_sure_the_front_is_what_leaves_it_open_and_what_counts_for_nothing() -> None:
    near = replace(trial(7, 0.2, -0.006, 0.1, {"prune": None, "quantize": "OnnxQuantization"}), number=7)
    spent = {"seconds": 14.0, "budget_s": 120.0, "turns": {"t-0002": 4, "t-0007": 3}, "not_resolved": ["t-0002"]}

    text = render_report(summary([*RECORDS, near], resolution=spent), RECORDS, width=200)

    assert re.search(r"On the front, with 95 % for all together, not resolved: t-0000, t-0001, t-0002, t-0007 ", text)
    assert "differences below 3 % of latency and 0.3 pt count for nothing" in text
    assert re.search(r"t-0002 may be beaten by t-0007; open: accuracy", text)
    assert "2 models were timed again in turns to settle it: 14 s of at most 2 min" in text


def test_a_candidate_settled_on_all_rows_is_said_to_be_and_shown_by_its_difference() -> None:
    best = RECORDS[2]
    whole = replace(best.metrics["accuracy"], value=0.952, samples=900)
    records = [replace(r, metrics={**r.metrics, "accuracy": whole}) if r is best else r for r in RECORDS]
    written = summary(records)
    written["best"] |= {"settled_on_all_rows": True, "baseline_all_rows": replace(BASELINE["accuracy"], value=0.96, samples=900).to_json()}

    text = render_report(written, records, width=200)

    assert "On the hold-out, 300 rows that were also used, once, to settle this candidate" in text
    assert "Over all 900 rows: accuracy 0.9600 → 0.9520" in text
    assert re.search(r"t-0002 \*.*-0\.8 pt \(.*\) on 900 rows", text)
    assert "0.9520, -0.8 pt" not in text


def test_trials_space_and_time_are_counted() -> None:
    assert "7 trials: 3 ok, 2 failed, 1 invalid, 1 infeasible; space: 312 valid points, 8 refused; 2 min" in page(200)


def test_where_it_was_measured_is_said() -> None:
    text = page(target={"ep": "cpu", "threads": 1, "batch_size": 16})

    assert "Some CPU, 2 CPUs, avx2" in text
    assert "cpu, threads: 1, batch size 16" in text
    assert "governor performance" in text
    assert "onnxruntime 1.32.0" in text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_page_but_for_the_path(width: int, ascii_only: bool) -> None:
    lines = page(width, ascii_only=ascii_only).splitlines()

    assert [line for line in lines if len(line) > width and line != PATH] == []
    assert lines[-1] == PATH


def test_an_ascii_page_holds_nothing_else_and_no_escapes() -> None:
    text = page(80, ascii_only=True)

    assert text.isascii()
    assert "\x1b" not in text
    assert "8.00 -> 1.60 ms" in text


def test_a_page_without_a_terminal_has_no_escapes() -> None:
    assert "\x1b" not in page()


def test_names_that_steer_terminals_are_disarmed() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07name\r\n\x9b31m\u202eesrever\u200b\ud800 [red]markup[/red] :smile:"
    records = [
        *RECORDS[:4],
        TrialRecord(4, {}, Status.FAILED, cause=Cause.EXCEPTION, stage=evil, message=evil),
        replace(RECORDS[2], number=8, point={"quantize": evil, f"quantize.{evil}": evil}),
    ]

    text = page(100, records, notes=[evil], verdict=evil)

    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\ud800-\udfff]", text)
    assert "owned" not in text
    assert "name esrever [red]markup[/red] :smile:" in text
    text.encode()


def test_endless_messages_are_cut() -> None:
    assert len(clean("x" * 10_000)) < 300
    assert clean("a\tb\nc") == "a b c"
    assert clean("é → µs", ascii_only=True) == "\\xe9 -> us"


def test_an_untouched_model_is_reported_as_plainly_as_a_winner() -> None:
    text = page(100, RECORDS[:1] + RECORDS[3:])

    assert text.startswith("No pass helps here: the untouched model is delivered")
    assert text.endswith(f"{PATH}\n")


def test_a_run_without_a_feasible_model_reports_near_misses_and_no_bundle() -> None:
    text = page(100, RECORDS[3:])

    assert text.startswith("No candidate meets every constraint")
    assert "Nearest misses" in text
    assert "meets accuracy >= baseline - 30pt. It would give: 10x faster" in re.sub(r"\s+", " ", text)
    assert "Bundle" not in text
    assert "Front" not in text


def test_a_run_stopped_before_anything_was_measured_still_has_a_report() -> None:
    text = render_report({"status": "interrupted"}, [], width=40)

    assert text == "The sweep ended: interrupted.\n"


def test_unfinished_numbers_in_the_file_do_not_stop_the_report() -> None:
    data = summary(RECORDS)
    data["baseline"]["metrics"]["latency"]["value"] = None
    data["best"]["constraints"][0]["amount"] = None

    assert "Baseline: latency not known" in render_report(data, RECORDS, width=100)


def test_a_stream_that_is_no_terminal_gets_plain_text_in_its_own_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")

    print_report(summary(RECORDS), RECORDS, file=stream)

    text = raw.getvalue().decode("ascii")
    assert "8.00 -> 1.60 ms" in text
    assert max(len(line) for line in text.splitlines() if line != PATH) <= 40


def test_a_terminal_gets_bold_headings_unless_it_wants_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"  # type: ignore[assignment] # a property of the class above

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    print_report(summary(RECORDS), RECORDS, file=coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    print_report(summary(RECORDS), RECORDS, file=plain)

    assert "\x1b[1mFront\x1b[0m" in coloured.getvalue()
    assert "\x1b" not in plain.getvalue()


# ---- what the evidence of the stages holds


def with_notes(number: int, *, key: str = "k", unchanged: str = "", check: Any = None, latency: Any = None) -> TrialRecord:
    stages = (StageRecord("quantize", 0.1, key=key), StageRecord("check", 0.1, notes=check or {}), StageRecord("latency", 1.0, notes=latency or {}))
    return replace(RECORDS[2], number=number, stages=stages, unchanged=unchanged)


def test_passes_without_effect_are_called_so_and_settings_alone_are_not() -> None:
    same = "the model has the baseline's operators"
    records = [with_notes(n, check={"no_op": same}) for n in (3, 4)]
    records += [with_notes(5, unchanged="no byte differs"), with_notes(6, key="", check={"no_op": same}), with_notes(7, check={"no_op": ""})]

    assert hints(records) == [f"passes without effect in t-0003, t-0004: {same}", "passes without effect in t-0005: no byte differs"]


def test_denormal_numbers_are_told_with_what_to_try() -> None:
    words = "5.0% of the values of 'w' are denormal, which is slow on many CPUs; try the session's config entry session.set_denormal_as_zero: '1'"
    records = [with_notes(n, check={"denormals": {"looked": True, "hint": hint}}) for n, hint in ((3, words), (4, ""), (5, words))]

    assert hints(records) == [f"t-0003, t-0005: {words}"]


def test_a_baseline_that_moves_between_trials_is_told_and_so_is_a_trial_that_met_it_far_off() -> None:
    calm, moved = ({"occasions": {"sd": sd, "count": count, "away": away}} for sd, count, away in ((0.004, 9, 0.01), (0.034, 12, 0.16)))

    found = hints([with_notes(3, latency=calm), with_notes(4, latency=moved)])

    assert found == [
        "the baseline's own latency moved by 3% (standard deviation) between measurements; intervals are widened by that",
        "timed while the baseline took 10% longer or shorter than it usually did, so with wide intervals: t-0004",
    ]
    assert hints([with_notes(3, latency=calm)]) == []


def test_disturbed_rounds_are_counted_and_named_the_worst_first() -> None:
    quiet = {"rounds": 20, "rounds_disturbed": 0, "rounds_used": 20, "noisy": False, "foreign_load": 0.01}
    some, most = {**quiet, "rounds_disturbed": 2, "rounds_used": 18}, {**quiet, "rounds_disturbed": 15, "noisy": True}

    found = hints([with_notes(3, latency=quiet), with_notes(4, latency=some), with_notes(5, latency=most)])

    assert found == [
        "17 of 60 timed rounds were disturbed by something else on the machine, and repeated (t-0005 15 of 20, t-0004 2 of 20)",
        "too few rounds were left undisturbed, so all of them count, in t-0005",
        "noisy, the interval of the ratio being wider than a tenth of it: t-0005",
    ]
    assert hints([with_notes(3, latency={**quiet, "foreign_load": 0.4})]) == [
        "others took 40% of the CPUs' time while models were timed (median of the trials)"
    ]
    assert hints([with_notes(3, latency={"rounds": 4, "rounds_disturbed": None})]) == []  # where nobody watched


def test_the_page_has_them_before_its_notes_and_without_what_steers_a_terminal() -> None:
    records = [*RECORDS, with_notes(8, check={"denormals": {"hint": "\x1b[2J50% of the values of '\u202ew' are denormal"}})]

    text = page(140, records, notes=["a note"])

    assert text.index("Worth knowing") < text.index("- t-0008: 50% of the values of 'w' are denormal") < text.index("- a note")
    assert "Worth knowing" not in page()


def test_a_real_pass_that_finds_nothing_to_do_is_said_to_have_had_no_effect(finished: SweepResult, tmp_path: Path) -> None:
    plan = TrialPlan.load(finished.run)
    chain = [{"slot": "upgrade", "pass": "OnnxOpsetUpgrade", "params": {"target_opset": plan.facts.opset}}]
    sweep = plan.sweep.changed({("chain",): chain})
    pipeline = Pipeline(sweep, plan.facts)
    with TrialRunner(tmp_path, sweep) as runner:
        record = runner.run(replace(plan, run=tmp_path, sweep=sweep), pipeline, 7, pipeline.default_point(), "sampler")

    assert record.stages[0].pass_name == "OnnxOpsetUpgrade"
    assert hints([record]) == ["passes without effect in t-0007: no byte of the model and no session setting differs from the baseline"]
    assert not [h for h in hints(finished.records) if h.startswith("passes without effect")]  # each of its passes quantizes


# ---- scatter


def test_a_scatter_puts_each_mark_where_its_numbers_say() -> None:
    lines = scatter([(0.0, 0.0, "a"), (1.0, 1.0, "b"), (0.5, 0.5, "c")], width=40, height=5)

    rows = {mark: next(i for i, line in enumerate(lines) if f"{mark}" in line.partition("|")[2]) for mark in "abc"}
    columns = {mark: lines[rows[mark]].index(mark, lines[rows[mark]].index("|")) for mark in "abc"}
    assert rows["b"] < rows["c"] < rows["a"]
    assert columns["a"] < columns["c"] < columns["b"]
    assert all(len(line) <= 40 for line in lines)


def test_points_far_outside_what_matters_are_counted_and_do_not_flatten_the_rest() -> None:
    points = [(0.2, 0.97, "o"), (1.0, 0.98, "B"), (0.1, 0.02, "x"), (float("nan"), 0.5, "x")]

    lines = scatter(points, keep=[(0.2, 0.97), (1.0, 0.98)], width=40, height=5)

    assert lines[-1] == "1 more outside"
    assert not any("x" in line.partition("|")[2] for line in lines)


def test_one_spot_or_nothing_makes_no_scatter() -> None:
    assert scatter([]) == []
    assert scatter([(1.0, 1.0, "B"), (1.0, 1.0, "o")]) == []
