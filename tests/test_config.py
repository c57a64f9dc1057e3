"""The sweep file: what is wrong is said with its place, what must hold, what came, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.config import LoadedSweep, load_sweep, parse_sweep, seconds, size_bytes, write_sweep
from autotune.errors import ConfigError
from autotune.target import effective_cpus

GOOD = """\
schema: 1
model: {path: model.onnx}
data: {eval: eval.npz}
metric: accuracy
chain:
  - pass: OnnxQuantization
"""


def message_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "budgett: {trials: 3}\n", "sweep.yaml:7: keys of the sweep file must be known; got 'budgett'. Did you mean 'budget'?"),
        (GOOD + "budget:\n  trialz: 3\n", "sweep.yaml:8: keys of budget must be known; got 'trialz'. Did you mean 'trials'?"),
        (GOOD + "budget: {trials: 0}\n", "sweep.yaml:7: budget.trials: input should be greater than or equal to 1; got 0."),
        (GOOD + "target: {ep: cpuu}\n", "sweep.yaml:7: target.ep: unknown execution provider 'cpuu'. Did you mean 'cpu'?"),
        (GOOD + "budget: {time: 4 fortnights}\n", "a duration must be a number above 0 with s, m or h, such as 45m; got '4 fortnights'."),
        (GOOD + "budget: {memory: 4}\n", "sweep.yaml:7: budget.memory: input should be a valid string; got 4."),
        (GOOD + "pick: quickest\n", "pick: input should be 'fastest', 'most_accurate', 'smallest', 'knee' or 'nearest_to_baseline'; got 'quickest'."),
        (GOOD + "schema: 2\n", "schema: input should be 1; got 2."),
        (GOOD.replace("- pass: OnnxQuantization", "- pas: OnnxQuantization"), "keys of chain.0 must be known; got 'pas'. Did you mean 'pass'?"),
        (GOOD.replace("  - pass: OnnxQuantization", "  []"), "chain: list should have at least 1 item after validation, not 0"),
        (GOOD + "  - pass: OnnxQuantization\n", "slots need different names: OnnxQuantization is there more than once; give each a `slot:`."),
        (GOOD.replace("metric: accuracy\n", ""), "metric must be given; got nothing."),
        (GOOD.replace("{path: model.onnx}", "{path: a, script: b}"), "model: give either path (an ONNX file) or script"),
        ("- 1\n", "a sweep file must be a mapping with model, data, metric and chain; got list."),
        ("model: [1\n", "the sweep file must be valid YAML"),
        ("", "a sweep file must be a mapping with model, data, metric and chain; got NoneType."),
    ],
)
def test_a_mistake_in_the_file_gets_one_message_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    assert message in message_of(tmp_path, text)


def test_more_threads_than_cpus_are_refused(tmp_path: Path) -> None:
    said = message_of(tmp_path, GOOD + f"target: {{threads: {effective_cpus() + 1}}}\n")

    assert f"threads must be at most the {effective_cpus()} CPUs this process may use; got {effective_cpus() + 1}" in said


def test_a_missing_file_gets_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(GOOD)

    with pytest.raises(ConfigError, match=r"Did you mean 'sweep.yaml'\?"):
        load_sweep(tmp_path / "sweap.yaml")


def test_a_written_sweep_reads_back_as_the_same_sweep(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(GOOD)
    loaded = load_sweep(tmp_path / "sweep.yaml")

    absolute = loaded.absolute()
    (tmp_path / "again.yaml").write_text(write_sweep(absolute))

    assert load_sweep(tmp_path / "again.yaml").config == absolute
    assert absolute.model.path == str(tmp_path / "model.onnx")


def test_every_key_of_the_file_is_written_out_with_its_default() -> None:
    config = parse_sweep({"model": {"path": "m"}, "data": {"eval": "e"}, "metric": "accuracy", "chain": [{"pass": "X"}]})

    written = config.to_json()

    assert written["budget"]["trials"] == 30
    assert written["search"] == {"enabled": True, "sampler": "tpe", "start": []}
    assert parse_sweep(written) == config


def test_the_target_uses_the_threads_named_or_all_there_are() -> None:
    base = {"model": {"path": "m"}, "data": {"eval": "e"}, "metric": "accuracy", "chain": [{"pass": "X"}]}
    named = LoadedSweep(parse_sweep({**base, "target": {"threads": 1}}), Path())
    free = LoadedSweep(parse_sweep(base), Path())

    assert (named.target.run_threads, named.target.threads_fixed) == (1, True)
    assert (free.target.run_threads, free.target.threads_fixed) == (effective_cpus(), False)


@pytest.mark.parametrize(("text", "value"), [("45m", 2700.0), ("1.5h", 5400.0), ("30s", 30.0), ("20", 20.0)])
def test_durations_are_read_in_seconds(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(("text", "value"), [("8GB", 8 * 10**9), ("512MiB", 512 * 2**20), ("1.5 kB", 1500)])
def test_sizes_are_read_in_bytes(text: str, value: int) -> None:
    assert size_bytes(text) == value


@pytest.mark.parametrize("text", ["8", "0GB", "8XB", "-1MB", ""])
def test_a_size_without_a_unit_or_a_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number above 0 with a unit"):
        size_bytes(text)
