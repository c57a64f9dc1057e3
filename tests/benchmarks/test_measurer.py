"""A user's measurer: what it is given, what it may return, and how its numbers are told from our own timing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from autotune.benchmarks.measurer import get_measurer
from autotune.benchmarks.metrics import BadOutput, NotFiniteScore
from autotune.benchmarks.stages import LATENCY_FILE, latency
from autotune.errors import ConfigError
from autotune.model import ONNXModelHandler, ingest_onnx
from autotune.session import SessionSettings

MINE = """
from pathlib import Path


def mine(*, model, baseline, session, baseline_session, inputs, rounds, seed):
    assert isinstance(model, Path) and model.is_file() and baseline.is_file()
    assert session["graph_optimization_level"] == "basic" and baseline_session["graph_optimization_level"] == "all"
    assert {n: a.shape for n, a in inputs.items()} == {"x": (1, 4)}
    return [2_000_000 + seed] * rounds, [1_000_000] * rounds
"""


@pytest.fixture
def model(tmp_path: Path) -> ONNXModelHandler:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "small", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "source.onnx")
    np.savez(tmp_path / "eval.npz", x=np.ones((8, 4), np.float32))
    (tmp_path / "model").mkdir()
    return ingest_onnx(tmp_path / "source.onnx", tmp_path / "model")


def measured(tmp_path: Path, model: ONNXModelHandler, script: str, **more: Any) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(script)
    candidate = model.with_session(SessionSettings(intra_op_num_threads=1, graph_optimization_level="basic"))
    baseline = model.with_session(SessionSettings(intra_op_num_threads=1))
    return latency({
        "model": candidate.to_json(), "baseline": baseline.to_json(), "data": str(tmp_path / "eval.npz"), "rows": [0, 1, 2], "batch_size": 1,
        "protocol": {"min_runs": 64}, "seed": 3, "out": str(tmp_path), "measurer": "mine.py:mine", "root": str(tmp_path), **more,
    })  # fmt: skip


def test_its_rounds_become_latencies_and_ratios_like_our_own(tmp_path: Path, model: ONNXModelHandler) -> None:
    found = measured(tmp_path, model, MINE)

    p50, p90 = found["metrics"]["latency"], found["metrics"]["latency.p90"]
    assert found["verdict"] == "ok"
    assert (p50["value"], p50["ratio"]["value"], p50["samples"]) == (pytest.approx(2.000003), pytest.approx(2.000003), 64)
    assert p90["value"] == pytest.approx(2.000003)
    assert found["baseline_metrics"]["latency"]["value"] == pytest.approx(1.0)
    with np.load(tmp_path / LATENCY_FILE) as kept:
        assert kept["candidate_ns"].tolist() == [[2_000_003]] * 64


def test_nobody_can_take_its_numbers_for_our_timing(tmp_path: Path, model: ONNXModelHandler) -> None:
    found = measured(tmp_path, model, MINE)

    methods = [m["method"] for m in (*found["metrics"].values(), *found["baseline_metrics"].values())]
    assert methods
    assert all(m.startswith("timed by mine.py:mine") for m in methods)
    assert found["protocol"] == {"measurer": "mine.py:mine", "rounds": 64}
    assert found["stopped_by"] == "measurer"
    assert found["foreign_load"] is None
    assert "latency.first_run" not in found["metrics"]


def test_rounds_of_several_runs_and_a_mapping_are_fine_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef mine(**_):\n    return {'candidate': np.full((10, 7), 5, np.uint16), 'baseline': [[6] * 7] * 10}\n"
    )
    samples = get_measurer("mine.py:mine", root=tmp_path).measure(
        model=Path(), baseline=Path(), session={}, baseline_session={}, inputs={}, rounds=64, seed=0
    )

    assert samples.candidate_ns.shape == samples.baseline_ns.shape == (10, 7)
    assert samples.ratio().value == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("returned", "fault", "words"),
    [
        ("None", BadOutput, "NoneType"),
        ("[1] * 10", BadOutput, "list"),
        ("([1] * 10,)", BadOutput, "tuple"),
        ("{'candidate': [1] * 10}", BadOutput, "the keys 'candidate'"),
        ("{'candidate': [1] * 10, 'baseline': [1] * 10, 'more': 1}", BadOutput, "'more'"),
        ("([1] * 10, [1] * 9)", BadOutput, "equally many"),
        ("([[1, 2], [3]] * 5, [[1, 2], [3]] * 5)", BadOutput, "rounds of unequal length"),
        ("([1.5] * 10, [1] * 10)", BadOutput, "Round them"),
        ("([float('nan')] * 10, [1] * 10)", NotFiniteScore, "10 of 10 that are NaN or infinite"),
        ("([1] * 10, [float('inf')] * 10)", NotFiniteScore, "for the baseline"),
        ("([0] + [1] * 9, [1] * 10)", BadOutput, "all above 0; got 0"),
        ("([-5] * 10, [1] * 10)", BadOutput, "all above 0; got -5"),
        ("(['1'] * 10, [1] * 10)", BadOutput, "<U1"),
        ("('1' * 10, [1] * 10)", BadOutput, "str"),
        ("([True] * 10, [1] * 10)", BadOutput, "bool"),
        ("([10**400] * 10, [1] * 10)", BadOutput, "int"),
        ("([2**63] * 10, [1] * 10)", BadOutput, "uint64"),
        ("([1j] * 10, [1] * 10)", BadOutput, "complex128"),
        ("([None] * 10, [1] * 10)", BadOutput, "NoneType"),
        ("([], [])", BadOutput, ""),
        ("([1] * 5, [1] * 5)", BadOutput, "at least 6 rounds"),
        ("([[[1]]] * 10, [1] * 10)", BadOutput, "shape [10, 1, 1]"),
    ],
)
def test_what_is_no_timing_is_refused_in_words(tmp_path: Path, returned: str, fault: type[Exception], words: str) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(**_):\n    return {returned}\n")
    measurer = get_measurer("mine.py:mine", root=tmp_path)

    with pytest.raises(fault) as error:
        measurer.measure(model=Path(), baseline=Path(), session={}, baseline_session={}, inputs={}, rounds=64, seed=0)

    assert words in str(error.value)
    assert "mine.py:mine must" in str(error.value)


@pytest.mark.parametrize(("body", "cause"), [("return None", "bad_output"), ("return [float('nan')] * 9, [1] * 9", "not_finite")])
def test_the_stage_calls_such_a_candidate_invalid(tmp_path: Path, model: ONNXModelHandler, body: str, cause: str) -> None:
    found = measured(tmp_path, model, f"def mine(**_):\n    {body}\n")

    assert (found["verdict"], found["cause"]) == ("invalid", cause)


@pytest.mark.parametrize(
    ("name", "words"), [("mine.py:other", "must define 'other'"), ("none.py:mine", "the script must exist"), ("mine.txt:mine", "script.py:function")]
)
def test_a_measurer_that_is_not_there_is_refused_by_name(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "mine.py").write_text("def mine(**_):\n    return None\n")

    with pytest.raises(ConfigError, match=words):
        get_measurer(name, root=tmp_path)


def test_a_sweep_is_refused_before_it_starts_when_its_measurer_is_not_there(
    digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    from autotune.sweep.run import run

    with pytest.raises(ConfigError, match="the script must exist"):
        run(sweep_of(digits, measure={"measurer": str(tmp_path / "none.py:mine")}), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"a measurer must be script\.py:function"):
        run(sweep_of(digits, measure={"measurer": "latency"}), tmp_path / "out")

    assert not (tmp_path / "out").exists()
