"""OrtPerfTuning: every point is a session that ONNX Runtime really runs as asked, and the files stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from autotune.errors import PassConfigError
from autotune.model import ONNXModelHandler
from autotune.passes import ort_perf_tuning
from autotune.passes.ort_perf_tuning import OrtPerfTuning
from autotune.search_spaces.space import compile_space, enumerate_points
from autotune.session import SessionSettings, create_session, not_applied, read_back
from autotune.target import AcceleratorSpec

CPU = AcceleratorSpec()


@pytest.fixture
def model(tmp_path: Path) -> ONNXModelHandler:
    folder = tmp_path / "in"
    folder.mkdir()
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 2]) for n in ("x", "y")]
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Neg", ["x"], ["b"]), helper.make_node("Add", ["a", "b"], ["y"])]
    onnx.save(
        helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 18)]), str(folder / "model.onnx")
    )
    return ONNXModelHandler.from_folder(folder, session=SessionSettings(config_entries={"session.set_denormal_as_zero": "1"}))


def two_cpus(monkeypatch: pytest.MonkeyPatch, cpus: int = 2) -> None:
    monkeypatch.setattr(ort_perf_tuning, "effective_cpus", lambda: cpus)


def points(**user: Any) -> list[dict[str, Any]]:
    return [dict(p) for p in enumerate_points(compile_space(OrtPerfTuning.search_space(CPU, user)))]


@pytest.mark.parametrize("tuning_type", ["latency", "throughput", "memory"])
def test_every_point_runs_under_the_settings_it_says(
    model: ONNXModelHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuning_type: str
) -> None:
    two_cpus(monkeypatch)
    x = np.array([[-1.0, 2.0]], np.float32)

    for number, point in enumerate(points(tuning_type=tuning_type)):
        output = tmp_path / str(number)
        output.mkdir()
        result = OrtPerfTuning(CPU, point).run(model, output)
        session = create_session(result.path, result.session)

        assert not_applied(result.session, read_back(session, result.session)) == []
        assert session.run(None, {"x": x})[0].tolist() == [[1.0, 0.0]]
        assert result.session.intra_op_num_threads == point["intra_op_num_threads"]
        assert result.digest == model.digest


def test_the_space_is_small_and_each_point_a_different_session(monkeypatch: pytest.MonkeyPatch, model: ONNXModelHandler, tmp_path: Path) -> None:
    two_cpus(monkeypatch)

    found = points()

    assert {(p["intra_op_num_threads"], p.get("allow_spinning"), p["graph_optimization_level"]) for p in found} == {
        (threads, spinning, level) for threads, spinning in ((1, None), (2, True), (2, False)) for level in ("all", "extended")
    }
    assert len(found) == 6
    sessions = set()
    for number, point in enumerate(found):
        (tmp_path / str(number)).mkdir()
        sessions.add(str(OrtPerfTuning(CPU, point).run(model, tmp_path / str(number)).session.to_json()))
    assert len(sessions) == 6


def test_the_default_uses_all_cpus_and_is_in_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    two_cpus(monkeypatch)

    assert OrtPerfTuning(CPU).config["intra_op_num_threads"] == 2
    assert OrtPerfTuning(CPU).config in points()


@pytest.mark.parametrize(("cpus", "choices"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_threads_are_bounded_by_the_cpus_that_may_be_used(monkeypatch: pytest.MonkeyPatch, cpus: int, choices: list[int]) -> None:
    two_cpus(monkeypatch, cpus)

    assert sorted({p["intra_op_num_threads"] for p in points()}) == choices
    with pytest.raises(PassConfigError, match=f"intra_op_num_threads must be int, at least 1 and at most {cpus}; got {cpus + 1}"):
        OrtPerfTuning.search_space(CPU, {"intra_op_num_threads": [1, cpus + 1]})


def test_the_tuning_type_says_what_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    two_cpus(monkeypatch)

    def searched(tuning_type: str) -> set[str]:
        found = points(tuning_type=tuning_type)
        return {name for name in {n for p in found for n in p} if len({str(p.get(name)) for p in found}) > 1}

    assert searched("latency") == {"intra_op_num_threads", "allow_spinning", "graph_optimization_level"}
    assert searched("throughput") == searched("latency") | {"execution_mode", "inter_op_num_threads", "enable_mem_pattern"}
    assert searched("memory") == {"enable_cpu_mem_arena", "enable_mem_pattern"}


def test_settings_that_play_no_part_are_refused_when_given(monkeypatch: pytest.MonkeyPatch) -> None:
    two_cpus(monkeypatch)

    for given in (
        {"intra_op_num_threads": 1, "allow_spinning": False},
        {"inter_op_num_threads": 2},
        {"execution_mode": "parallel", "enable_mem_pattern": True},
    ):
        with pytest.raises(PassConfigError, match="plays no part"):
            OrtPerfTuning(CPU, given)


def test_spinning_off_is_written_for_the_pools_that_there_are(model: ONNXModelHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_cpus(monkeypatch)
    sequential, parallel = tmp_path / "s", tmp_path / "p"
    sequential.mkdir()
    parallel.mkdir()

    in_order = OrtPerfTuning(CPU, {"allow_spinning": False}).run(model, sequential).session
    side_by_side = OrtPerfTuning(CPU, {"allow_spinning": False, "execution_mode": "parallel"}).run(model, parallel).session

    kept = {"session.set_denormal_as_zero": "1"}
    assert in_order.config_entries == {**kept, "session.intra_op.allow_spinning": "0"}
    assert side_by_side.config_entries == {**kept, "session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    assert (side_by_side.execution_mode, side_by_side.inter_op_num_threads, side_by_side.enable_mem_pattern) == ("parallel", 2, False)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"session.set_denormal_as_zer": "1"}, "Did you mean 'session.set_denormal_as_zero'?"),
        ({"session.set_denormal_as_zero": "banana"}, "session.set_denormal_as_zero must match 0|1"),
        ({"session.intra_op.allow_spinning": "0"}, "without session.intra_op.allow_spinning, which allow_spinning sets"),
    ],
)
def test_entries_that_onnx_runtime_would_take_in_silence_are_refused(entries: dict[str, str], message: str) -> None:
    with pytest.raises(PassConfigError) as caught:
        OrtPerfTuning.search_space(CPU, {"config_entries": entries})

    assert message in str(caught.value)


def test_entries_are_added_to_those_of_the_model(model: ONNXModelHandler, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    result = OrtPerfTuning(CPU, {"config_entries": {"session.disable_prepacking": True}}).run(model, tmp_path / "out")

    assert result.session.config_entries == {"session.set_denormal_as_zero": "1", "session.disable_prepacking": "1"}
    assert model.session.config_entries == {"session.set_denormal_as_zero": "1"}


def test_run_entries_order_and_reuse_are_part_of_the_session(model: ONNXModelHandler, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    shrink = {"memory.enable_memory_arena_shrinkage": "cpu:0"}

    tuning = OrtPerfTuning(CPU, {"run_config_entries": shrink, "execution_order": "priority_based", "enable_mem_reuse": False})
    result = tuning.run(model, tmp_path / "out")

    session = create_session(result.path, result.session)
    assert not_applied(result.session, read_back(session, result.session)) == []
    assert read_back(session, result.session)["run_config_entries"] == shrink
    assert (result.session.execution_order, result.session.enable_mem_reuse) == ("priority_based", False)
    assert set(result.notes["settings"]) >= {"run_config_entries", "execution_order", "enable_mem_reuse"}


def test_an_entry_that_nothing_shows_to_work_is_taken_and_named(model: ONNXModelHandler, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    result = OrtPerfTuning(CPU, {"config_entries": {"session.intra_op.spin_backoff_max": 8}}).run(model, tmp_path / "out")

    assert result.notes["unproven"][0].startswith("session.intra_op.spin_backoff_max is not shown to do anything: ")


def test_settings_that_the_model_had_already_are_no_change(model: ONNXModelHandler, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    tuning = OrtPerfTuning(CPU, {"intra_op_num_threads": 1})

    first = tuning.run(model, tmp_path / "first")
    second = tuning.run(first, tmp_path / "second")

    assert first.notes["settings"] == {"intra_op_num_threads": [0, 1]}
    assert (second.notes["changed"], second.notes["reason"]) == (False, "these are the settings that the model had already")


def test_external_data_and_folders_come_along(tmp_path: Path, model: ONNXModelHandler) -> None:
    (model.folder / "data").mkdir()
    (model.folder / "data" / "weights.bin").write_bytes(b"1234")
    (tmp_path / "out").mkdir()

    result = OrtPerfTuning(CPU).run(ONNXModelHandler.from_folder(model.folder), tmp_path / "out")

    assert (result.folder / "data" / "weights.bin").read_bytes() == b"1234"
    assert (result.folder / "model.onnx").stat().st_nlink == 1


def test_a_profile_says_where_each_node_ran_and_the_session_is_not_profiled(model: ONNXModelHandler, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    result = OrtPerfTuning(CPU, {"enable_profiling": True, "graph_optimization_level": "disable"}).run(model, tmp_path / "out")

    profile = result.notes["profile"]
    assert profile["nodes_by_provider"] == {"CPUExecutionProvider": 3}
    assert set(profile["microseconds_by_operator"]) == {"Relu", "Neg", "Add"}
    assert {n["operator"] for n in profile["slowest_nodes"]} == {"Relu", "Neg", "Add"}
    assert profile["inputs"].startswith("made-up numbers")
    assert result.session.enable_profiling is False
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.onnx"]


def test_a_model_that_runs_on_nothing_that_was_tried_has_no_profile_and_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(folder / "model.onnx"))
    (tmp_path / "out").mkdir()

    result = OrtPerfTuning(CPU, {"enable_profiling": True}).run(ONNXModelHandler.from_folder(folder), tmp_path / "out")

    assert "unknown rank" in result.notes["profile"]["fault"]
