"""F18: an execution provider that is not there, an option that is misspelt, dead, nonsense or not applied: refused, or invalid by name.

Nodes that fall back to another provider can't be provoked on a build with one provider only, so they are not injected here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import AutotuneError, EnvironmentFault
from autotune.records import Cause, Status
from autotune.sweep.run import run
from autotune.target import effective_cpus
from tests.faults.harm import harm_sweep, trials_of, write_case

Injected = Callable[[str], None]


def tuned(folder: Path, entries: list[dict[str, Any]], *, threads: int = 1) -> dict[str, Any]:
    chain = [{"slot": "harm", "pass": "OrtPerfTuning", "params": {"config_entries": entries}}]
    return harm_sweep(folder, {}, chain=chain, target={"threads": threads})


def test_a_provider_that_this_build_lacks_is_refused_by_name_before_the_first_trial(tmp_path: Path, injected: Injected) -> None:
    injected("F18")
    import onnxruntime as ort

    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this build has CUDA")
    write_case(tmp_path)

    with pytest.raises(EnvironmentFault, match="CUDAExecutionProvider"):
        run(harm_sweep(tmp_path, {"mark": [0]}, target={"threads": 1, "ep": "cuda"}), tmp_path / "out")

    assert not (tmp_path / "out" / "trials").exists()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"session.intra_op.allow_spining": "0"}, "without"),
        ({"session.disable_prepackin": "1"}, "Did you mean 'session.disable_prepacking'"),
        ({"session.intra_op_thread_count": "6"}, "session.intra_op_thread_count"),  # known from a public example; does nothing
        ({"session.enable_quant_qdq": "1"}, "Did you mean"),  # an older name, dead since
        ({"session.disable_prepacking": "banana"}, "session.disable_prepacking must match"),
        ({"session.dynamic_block_base": "-1"}, "session.dynamic_block_base must match"),
    ],
)
def test_an_option_that_does_nothing_is_refused_before_the_first_trial(tmp_path: Path, injected: Injected, entry: dict[str, str], words: str) -> None:
    injected("F18")
    write_case(tmp_path)

    with pytest.raises(AutotuneError) as error:
        run(tuned(tmp_path, [entry]), tmp_path / "out")

    assert next(iter(entry)) in str(error.value)
    assert words in str(error.value) or "Did you mean" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(effective_cpus() < 2, reason="an affinity needs a second thread")
def test_an_option_that_onnx_runtime_only_logs_an_error_about_makes_the_trial_invalid(tmp_path: Path, injected: Injected) -> None:
    injected("F18")
    write_case(tmp_path)
    nowhere, sound = {"session.intra_op_thread_affinities": "1000"}, {"session.disable_prepacking": "1"}

    with trials_of(tuned(tmp_path, [nowhere, sound], threads=2), tmp_path / "out") as trials:
        refused = trials.run(config_entries=nowhere)
        taken = trials.run(config_entries=sound)

    assert (refused.status, refused.cause, refused.stage) == (Status.INVALID, Cause.NOT_APPLIED, "check"), refused.message
    assert "logged an error and went on: pthread_setaffinity_np failed" in refused.message
    assert taken.status is Status.OK, taken.message


def test_a_value_that_the_session_itself_refuses_ends_its_own_trial(tmp_path: Path, injected: Injected) -> None:
    injected("F18")
    write_case(tmp_path)
    too_large, sound = {"session.dynamic_block_base": "99999999999999"}, {"session.dynamic_block_base": "4"}

    with trials_of(tuned(tmp_path, [too_large, sound]), tmp_path / "out") as trials:
        refused = trials.run(config_entries=too_large)
        taken = trials.run(config_entries=sound)

    assert (refused.status, refused.cause, refused.stage) == (Status.FAILED, Cause.EXCEPTION, "check"), refused.message
    assert taken.status is Status.OK, taken.message


def test_what_the_live_session_says_of_its_settings_is_on_record(tmp_path: Path, injected: Injected) -> None:
    injected("F18")
    write_case(tmp_path)
    entry = {"session.disable_prepacking": "1"}

    with trials_of(tuned(tmp_path, [entry, {"session.dynamic_block_base": "4"}]), tmp_path / "out") as trials:
        record = trials.run(config_entries=entry)

    check = next(s for s in record.stages if s.name == "check")
    assert check.notes["session"]["config_entries"]["session.disable_prepacking"] == "1"
    assert set(check.notes["placement"]) == {"CPUExecutionProvider"}
    assert check.notes["log_errors"] == []
