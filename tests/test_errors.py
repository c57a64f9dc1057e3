"""Errors: their text, their way back from a worker, the nearest name."""

from __future__ import annotations

import pickle

import pytest

from autotune import errors
from autotune.errors import AutotuneError, ConfigError, EnvironmentFault, NoFeasibleModel, VerificationError, nearest

EVERY_KIND = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]


def test_a_message_says_who_what_must_hold_what_came_and_what_to_do() -> None:
    error = ConfigError("pick", "a pick must be known", "'fastst'", "Did you mean 'fastest'?")

    assert str(error) == "pick: a pick must be known; got 'fastst'. Did you mean 'fastest'?"


def test_parts_that_are_empty_leave_no_trace() -> None:
    assert str(ConfigError("data", "rows must be there")) == "data: rows must be there."
    assert str(ConfigError("data", "rows must be there", do="Add some")) == "data: rows must be there. Add some."


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_error_comes_back_from_a_worker_as_it_was(kind: type[AutotuneError]) -> None:
    error = kind("who", "must", "got", "do")

    back = pickle.loads(pickle.dumps(error))

    assert type(back) is kind
    assert (back.who, back.must, back.got, back.do, str(back)) == ("who", "must", "got", "do", str(error))


def test_every_error_of_the_module_is_an_autotune_error() -> None:
    assert len(EVERY_KIND) >= 8
    assert all(issubclass(kind, AutotuneError) for kind in EVERY_KIND)


def test_the_exit_status_follows_from_the_kind() -> None:
    assert (ConfigError.exit_status, EnvironmentFault.exit_status, NoFeasibleModel.exit_status, VerificationError.exit_status) == (2, 3, 4, 5)


def test_the_nearest_name_is_offered() -> None:
    assert nearest("OnnxQuantisation", ["OnnxQuantization", "OnnxConversion"]) == "Did you mean 'OnnxQuantization'?"


def test_a_name_in_the_wrong_case_is_found() -> None:
    assert nearest("SIZE", ["latency", "size"]) == "Did you mean 'size'?"


def test_where_nothing_is_near_everything_is_listed() -> None:
    assert nearest("zzz", ["size", "latency"]) == "Known: latency, size."
    assert nearest("zzz", []) == ""
