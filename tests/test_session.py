"""Session settings: known keys only, and a live session that has them."""

from __future__ import annotations

import json
import pickle
import platform
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from autotune.errors import ConfigError, EnvironmentFault
from autotune.runtime_options import CPU, ENTRY, LIVE, UNPROVEN, Option, options_of
from autotune.session import (
    EXECUTION_MODES,
    GRAPH_LEVELS,
    SessionSettings,
    create_session,
    not_applied,
    read_back,
    session_options,
    thread_count,
)

TAKEN = [o for o in options_of().options.values() if o.kind == ENTRY and o.status in (LIVE, UNPROVEN) and o.is_for(CPU, platform.machine())]
SAMPLES = {"session.intra_op_thread_affinities": "1", "optimization.disable_specified_optimizers": "MatMulAddFusion"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = np.eye(3, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    path = tmp_path_factory.mktemp("session") / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


@pytest.mark.parametrize("level", GRAPH_LEVELS)
@pytest.mark.parametrize("mode", EXECUTION_MODES)
def test_a_live_session_has_what_was_asked(model_path: Path, level: str, mode: str) -> None:
    settings = SessionSettings(
        intra_op_num_threads=1, inter_op_num_threads=2, execution_mode=mode, graph_optimization_level=level, enable_cpu_mem_arena=False,
        enable_mem_pattern=False, enable_mem_reuse=False, execution_order="priority_based", config_entries={"session.intra_op.allow_spinning": "0"},
    )  # fmt: skip

    session = create_session(model_path, settings)

    assert not_applied(settings, read_back(session, settings)) == []
    assert read_back(session, settings)["providers"] == ["CPUExecutionProvider"]


def test_a_setting_that_did_not_take_effect_is_named_with_both_values(model_path: Path) -> None:
    asked = SessionSettings(intra_op_num_threads=2, enable_mem_pattern=False)
    session = create_session(model_path, SessionSettings(intra_op_num_threads=1))

    found = not_applied(asked, read_back(session, asked))

    assert found == ["intra_op_num_threads: asked 2, session has 1", "enable_mem_pattern: asked False, session has True"]


def test_parallel_execution_on_one_thread_between_operators_is_found_out(model_path: Path) -> None:
    asked = SessionSettings(execution_mode="parallel", inter_op_num_threads=1)

    session = create_session(model_path, asked)  # the runtime turns it into a sequential one and says nothing

    assert not_applied(asked, read_back(session, asked)) == ["execution_mode: asked 'parallel', session has 'sequential'"]


def test_the_number_of_threads_is_really_started(model_path: Path) -> None:
    before = thread_count()

    session = create_session(model_path, SessionSettings(intra_op_num_threads=3))

    assert before > 0
    assert thread_count() - before == 2  # the caller's own thread is the third
    del session


@pytest.mark.parametrize("option", TAKEN, ids=lambda option: str(option.name))
def test_every_entry_that_is_taken_is_read_back(model_path: Path, option: Option) -> None:
    value = SAMPLES.get(option.name) or (option.values[0] if option.values else "4")
    settings = SessionSettings(intra_op_num_threads=2, config_entries={option.name: value})

    session = create_session(model_path, settings)

    assert not_applied(settings, read_back(session, settings)) == []
    assert len(settings.unproven()) == (option.status == UNPROVEN)


def test_run_options_hold_in_every_run_and_are_read_back(model_path: Path) -> None:
    settings = SessionSettings(run_config_entries={"memory.enable_memory_arena_shrinkage": "cpu:0"})

    session = create_session(model_path, settings)
    without = create_session(model_path, SessionSettings())

    assert session.run(None, {"x": np.ones((1, 3), np.float32)})[0].tolist() == [[1, 1, 1]]
    assert not_applied(settings, read_back(session, settings)) == []
    assert not_applied(settings, read_back(without, settings)) == [
        "run_config_entries: asked {'memory.enable_memory_arena_shrinkage': 'cpu:0'}, session has {'memory.enable_memory_arena_shrinkage': None}"
    ]


def test_a_run_option_that_the_runtime_refuses_reaches_it(model_path: Path) -> None:
    options = {"run_config_entries": {"memory.enable_memory_arena_shrinkage": "cpu:7"}}  # there is no such arena

    session = create_session(model_path, SessionSettings(**options))  # type: ignore[arg-type] # one of its fields

    with pytest.raises(Exception, match="memory arena shrink list"):
        session.run(None, {"x": np.ones((1, 3), np.float32)})


def test_a_session_against_falling_back_names_no_cpu_and_is_refused_by_the_runtime(model_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    if "AzureExecutionProvider" not in ort.get_available_providers():
        pytest.skip("needs a provider beside the CPU's")
    entries = {"session.disable_cpu_ep_fallback": "1"}

    with pytest.raises(Exception, match="fallback to CPU EP has been explicitly disabled"):
        create_session(model_path, SessionSettings(execution_provider="AzureExecutionProvider", config_entries=entries))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"config_entries": {"session.intra_op.allow_spining": "0"}}, "Did you mean 'session.intra_op.allow_spinning'?"),
        ({"config_entries": {"session.intra_op.allow_spinning": "banana"}}, "must match 0|1; got 'banana'"),
        ({"config_entries": {"session.intra_op.allow_spinning": 1}}, "must be text; got 1"),
        ({"graph_optimization_level": "extendet"}, "Did you mean 'extended'?"),
        ({"run_config_entries": {"memory.enable_memory_arena_shrinkage": "gpu:0"}}, "Write 'cpu:0'"),
        (
            {"run_config_entries": {"memory.enable_memory_arena_shrinkage": "cpu:0"}, "enable_cpu_mem_arena": False},
            "without an arena memory is given back",
        ),
        ({"provider_options": {"use_arena": "0"}}, "takes no provider options; got use_arena"),
        ({"execution_order": "memory_efficient"}, "must be one of default, priority_based"),
        ({"execution_mode": "serial"}, "must be one of sequential, parallel"),
        ({"intra_op_num_threads": -1}, "whole number from 0"),
        ({"inter_op_num_threads": True}, "whole number from 0"),
        ({"intra_op_num_threads": "2"}, "whole number from 0"),
    ],
)
def test_settings_that_the_runtime_would_take_in_silence_are_refused(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SessionSettings(**fields)

    assert part in str(caught.value)


def test_a_missing_execution_provider_is_an_obstacle_and_not_a_cpu_session(model_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EnvironmentFault, match="must start on CUDAExecutionProvider"):
        create_session(model_path, SessionSettings(execution_provider="CUDAExecutionProvider"))
    with pytest.raises(EnvironmentFault, match="NoSuchExecutionProvider"):
        create_session(model_path, SessionSettings(execution_provider="NoSuchExecutionProvider"))

    assert capfd.readouterr().out == ""  # the runtime's own complaint would spoil JSON on this stream


def test_settings_come_back_from_json_and_from_workers() -> None:
    shrink = {"memory.enable_memory_arena_shrinkage": "cpu:0"}
    settings = SessionSettings(intra_op_num_threads=2, config_entries={"session.inter_op.allow_spinning": "1"}, run_config_entries=shrink)

    assert SessionSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_an_unknown_field_in_stored_settings_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'intra_op_num_threads'"):
        SessionSettings.from_json({"intra_op_num_thread": 1})


def test_more_entries_make_new_settings() -> None:
    before = SessionSettings(config_entries={"session.disable_prepacking": "1"})

    after = before.with_entries(session__intra_op__allow_spinning="0")

    assert after.config_entries == {"session.disable_prepacking": "1", "session.intra_op.allow_spinning": "0"}
    assert before.config_entries == {"session.disable_prepacking": "1"}


def test_options_can_be_built_without_a_model() -> None:
    options = session_options(SessionSettings(intra_op_num_threads=2, enable_mem_pattern=False))

    assert (options.intra_op_num_threads, options.enable_mem_pattern) == (2, False)
