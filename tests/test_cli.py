"""The command line as a user meets it: exit statuses, one message for each mistake, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.sweep.result import SweepResult


def autotune(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "autotune", *map(str, words)], capture_output=True, text=True, cwd=cwd, check=False)


def refused(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The one message of a command that refused its input."""
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    messages = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, done.stderr
    return messages[0].removeprefix("error: ")


def test_help_names_every_command_and_the_exit_statuses() -> None:
    done = autotune("--help")

    assert done.returncode == 0
    assert all(name in done.stdout for name in ("demo", "doctor", "plan", "run", "report", "passes", "verify"))
    assert "Exit status: 0 delivered" in done.stdout


def test_help_loads_no_slow_library() -> None:
    code = (
        "import sys, runpy; sys.argv = ['autotune', '--help']\n"
        "try: runpy.run_module('autotune', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([m for m in ('ray', 'torch', 'onnxruntime', 'onnx', 'optuna', 'pandas', 'pydantic', 'rich', 'numpy') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stdout.splitlines()[-1] == "[]"


def test_doctor_starts_a_session_and_says_usable() -> None:
    done = autotune("doctor", "--json")

    findings = json.loads(done.stdout)
    assert done.returncode == 0
    assert findings["usable"]
    assert {"name": "CPUExecutionProvider", "started": True, "why": ""} in findings["providers"]


def test_passes_are_listed_and_shown_from_their_tables() -> None:
    listed = autotune("passes", "list", "--json")
    shown = autotune("passes", "show", "OnnxQuantization")
    schema = autotune("passes", "show", "OnnxQuantization", "--json")

    names = [row["name"] for row in json.loads(listed.stdout)]
    assert {
        "OnnxConversion",
        "OnnxQuantization",
        "OnnxFloatToFloat16",
        "OnnxModelOptimizer",
        "OrtTransformersOptimization",
        "TorchPruning",
        "OrtPerfTuning",
    } <= set(names)
    assert "calibrate_method" in shown.stdout
    assert all(word in shown.stdout for word in ("minmax", "entropy", "percentile", "quant_mode"))
    assert json.loads(schema.stdout)["additionalProperties"] is False


def test_plan_counts_what_run_counts_and_writes_nothing(
    digits: Path, sweep_of: Callable[..., dict[str, Any]], finished: SweepResult, tmp_path: Path
) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(sweep_of(digits)))

    done = autotune("plan", "sweep.json", "--json", cwd=tmp_path)

    content = json.loads(done.stdout)
    assert done.returncode == 0
    assert {k: content["space"][k] for k in ("valid", "invalid", "distinct")} == {
        k: finished.summary["space"][k] for k in ("valid", "invalid", "distinct")
    }
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.json"]


def test_the_short_form_runs_end_to_end_and_prints_one_object_last(digits: Path, tmp_path: Path) -> None:
    done = autotune(
        "run", "--model", digits / "model.onnx", "--eval", digits / "eval.npz", "--calib", digits / "calib.npz", "--metric", "accuracy",
        "--constraint", "accuracy >= baseline - 1.0pt", "--trials", "3", "--seed", "0", "--threads", "1", "--out", tmp_path / "RUN", "--json",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["status"] == "delivered"
    assert Path(result["bundle"]).is_dir()
    assert sum(result["trials"].values()) == 3
    assert (tmp_path / "RUN" / "sweep.yaml").exists()
    verified = autotune("verify", result["bundle"])
    assert verified.returncode == 0
    assert verified.stdout.splitlines()[-1] == "verified"
    reported = autotune("report", tmp_path / "RUN")
    assert reported.returncode == 0
    assert reported.stdout.rstrip().splitlines()[-1] == result["bundle"]


def test_verify_names_a_changed_file_and_ends_with_5(finished: SweepResult, tmp_path: Path) -> None:
    import shutil

    source = finished.bundle()
    assert source is not None
    shutil.copytree(source, tmp_path / "b")
    path = tmp_path / "b" / "session.json"
    path.write_text(path.read_text().replace('"sequential"', '"parallel"', 1))

    done = autotune("verify", tmp_path / "b")

    assert done.returncode == 5
    assert "session.json has changed since it was written" in done.stdout
    assert "NOT verified" in done.stdout


@pytest.fixture
def short(digits: Path) -> list[object]:
    return ["--model", digits / "model.onnx", "--eval", digits / "eval.npz", "--calib", digits / "calib.npz", "--metric", "accuracy"]


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (["--ep", "cuda"], 3, "target: a session must start on CUDAExecutionProvider"),
        (["--ep", "cdua"], 2, "target.ep: unknown execution provider 'cdua'. Did you mean 'cuda'?"),
        (["--trials", "0"], 2, "budget.trials must be at least 1; got 0."),
        (["--threads", "4000"], 2, "CPUs this process may use; got 4000"),
        (["--constraint", "accuracy >= baseline - 1"], 2, "constraints: a limit must be a number with a unit"),
        (["--constraint", "accuracy >= baseline - 1%"], 2, "constraints: a limit can't be in %"),
        (["--constraint", "latency <= 5"], 2, "constraints: a limit must be a number with a unit"),
        (["--constraint", "acuracy >= 0.9"], 2, "Did you mean 'accuracy'?"),
        (["--objective", "latensy"], 2, "Did you mean 'latency'?"),
        (["--pick", "quickest"], 2, "pick must be one of fastest, most_accurate"),
        (["--metric", "acuracy"], 2, "Did you mean 'accuracy'?"),
        (["--metric", "nowhere.py:score"], 2, "nowhere.py"),
        (["--time", "soon"], 2, "a duration must be a number above 0 with ms, s, m or h, such as 45m; got 'soon'."),
    ],
)
def test_a_mistake_in_an_option_is_refused_before_any_trial(short: list[object], tmp_path: Path, more: list[str], status: int, message: str) -> None:
    done = autotune("run", *short, *more, "--out", tmp_path / "RUN")

    assert message in refused(done, status)
    assert not list(tmp_path.glob("RUN/trials/*"))


def test_a_missing_model_gets_the_nearest_name(short: list[object], digits: Path) -> None:
    short[1] = digits / "modell.onnx"

    assert "Did you mean 'model.onnx'?" in refused(autotune("run", *short), 2)


def test_a_file_that_is_no_model_is_said_to_be_none(short: list[object], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("hello")
    short[1] = tmp_path / "model.onnx"

    assert "model: the file must be an ONNX model" in refused(autotune("run", *short), 2)


def test_labels_of_the_wrong_length_are_refused(short: list[object], digits: Path, tmp_path: Path) -> None:
    data = dict(np.load(digits / "eval.npz"))
    np.savez(tmp_path / "eval.npz", x=data["x"], labels=data["labels"][:-3])
    short[3] = tmp_path / "eval.npz"

    message = refused(autotune("run", *short), 2)

    assert "must have one row per example" in message
    assert "labels (397,)" in message


def test_missing_labels_are_refused_with_a_way_out(short: list[object], digits: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "eval.npz", x=np.load(digits / "eval.npz")["x"])
    short[3] = tmp_path / "eval.npz"

    assert "cosine" in refused(autotune("run", *short), 2)


def test_an_array_of_another_name_gets_the_nearest_one(short: list[object], digits: Path, tmp_path: Path) -> None:
    data = dict(np.load(digits / "eval.npz"))
    np.savez(tmp_path / "eval.npz", xx=data["x"], labels=data["labels"])
    short[3] = tmp_path / "eval.npz"

    message = refused(autotune("run", *short), 2)

    assert "an array for each model input (x)" in message


def test_calibrating_on_the_evaluation_rows_is_refused(short: list[object], digits: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "calib.npz", x=np.load(digits / "eval.npz")["x"][:50])
    short[5] = tmp_path / "calib.npz"

    assert "must not share examples; got 50 rows of 400 are the same in both" in refused(autotune("run", *short), 2)


def test_an_empty_space_names_the_rule_that_emptied_it(digits: Path, tmp_path: Path) -> None:
    sweep = {
        "model": {"path": str(digits / "model.onnx")}, "data": {"eval": str(digits / "eval.npz")}, "metric": "accuracy",
        "chain": [{"slot": "q", "pass": "OnnxQuantization", "params": {"quant_mode": "static"}}],
    }  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))

    assert "data-needed" in refused(autotune("run", tmp_path / "sweep.json"), 2)


def test_an_unknown_command_gets_the_nearest_one() -> None:
    assert refused(autotune("runn"), 2) == "autotune: a command must be a known one; got 'runn'. Did you mean 'run'?"


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    assert "must hold a result.json" in refused(autotune("report", tmp_path), 2)


def test_errors_are_an_object_too_with_json(tmp_path: Path) -> None:
    done = autotune("run", "--model", tmp_path / "no.onnx", "--eval", tmp_path / "no.npz", "--metric", "accuracy", "--json")

    answer: dict[str, Any] = json.loads(done.stdout)
    assert (answer["status"], answer["exit_status"]) == ("error", 2)
    assert "no.onnx" in answer["error"]


def test_output_cut_short_by_the_reader_is_no_error(finished: SweepResult) -> None:
    done = subprocess.run(f"{sys.executable} -m autotune report {finished.run} | head -1", shell=True, capture_output=True, text=True, check=False)

    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == 1
