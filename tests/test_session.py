"""Session settings: known keys only, and a live session that has them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from autotune.errors import ConfigError, EnvironmentFault
from autotune.session import (
    EXECUTION_MODES,
    GRAPH_LEVELS,
    KNOWN_CONFIG_ENTRIES,
    SessionSettings,
    create_session,
    not_applied,
    read_back,
    session_options,
    thread_count,
)

SAMPLES = {r"\d+": "4", r"[\d,;\- ]+": "1", ".+": "MatMulAddFusion"}  # a value for each pattern that is not [01]


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
        enable_mem_pattern=False, config_entries={"session.intra_op.allow_spinning": "0"},
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


@pytest.mark.parametrize("key", sorted(KNOWN_CONFIG_ENTRIES))
def test_every_known_entry_is_taken_and_read_back(model_path: Path, key: str) -> None:
    settings = SessionSettings(intra_op_num_threads=2, config_entries={key: SAMPLES.get(KNOWN_CONFIG_ENTRIES[key], "0")})

    session = create_session(model_path, settings)

    assert not_applied(settings, read_back(session, settings)) == []


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"config_entries": {"session.intra_op.allow_spining": "0"}}, "Did you mean 'session.intra_op.allow_spinning'?"),
        ({"config_entries": {"session.intra_op.allow_spinning": "banana"}}, "must match [01]; got 'banana'"),
        ({"config_entries": {"session.intra_op.allow_spinning": 1}}, "must be text; got 1"),
        ({"graph_optimization_level": "extendet"}, "Did you mean 'extended'?"),
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
    settings = SessionSettings(intra_op_num_threads=2, config_entries={"session.inter_op.allow_spinning": "1"}, provider_options={"a": "b"})

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
