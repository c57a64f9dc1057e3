"""The sweep file: what is wrong is said with its place, what must hold, what came, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.config import LoadedSweep, load_sweep, parse_sweep, seconds, size_bytes, write_sweep
from autotune.errors import ConfigError, PassConfigError
from autotune.sweep_text import read_yaml, write_yaml
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
        (GOOD + "budgett: {trials: 3}\n", "sweep.yaml:7:1: keys of the sweep file must be known; got 'budgett'. Did you mean 'budget'?"),
        (GOOD + "budget:\n  trialz: 3\n", "sweep.yaml:8:3: keys of budget must be known; got 'trialz'. Did you mean 'trials'?"),
        (GOOD.replace("- pass: OnnxQuantization", "- pas: OnnxQuantization"), ":6:5: keys of chain.0 must be known; got 'pas'. Did you mean 'pass'?"),
        (GOOD + "  - any_of: [{pass: X}, {pass: Y, parms: {}}]\n", ":7:35: keys of chain.1.any_of.1 must be known; got 'parms'. Did you mean"),
        (GOOD + "threads: 2\n", "sweep.yaml:7:1: keys of the sweep file must be known; got 'threads'. It belongs in target."),
        (GOOD + "budget: {seed: 2}\n", "keys of budget must be known; got 'seed'. It belongs at the top of the file, not in a section."),
        (GOOD + "1: 2\n", "sweep.yaml:7:4: keys of the sweep file must be text; got 1."),
        (GOOD + "  - OnnxQuantization\n", ":7:5: chain.1 must be a mapping; got 'OnnxQuantization'. It takes slot, pass, params, any_of, optional."),
        (GOOD + "  - any_of: [{pass: X}, {pass: X}]\n", ":7:32: chain.1.any_of.1.pass: passes of any_of must differ; got X again."),
        (GOOD + "script: ''\n", "sweep.yaml:7:9: script must not be empty; got ''."),
        (GOOD + "measure: {ratio_width: 0}\n", "sweep.yaml:7:24: measure.ratio_width must be above 0; got 0."),
        (GOOD + "measure: {ratio_width: -.inf}\n", "sweep.yaml:7:24: a number must be finite; got -.inf."),
        (GOOD + "measure: {ratio_width: 1e999}\n", "sweep.yaml:7:24: a number must be finite; got 1e999."),
        (GOOD + "budget: {trials: 1_000}\n", "sweep.yaml:7:18: budget.trials must be a whole number; got '1_000'. Write 1000."),
        (GOOD + "storage: 5432\n", "sweep.yaml:7:10: storage must be text; got 5432. Write '5432', in quotes."),
        (GOOD + "strict: 1\n", "sweep.yaml:7:9: strict must be true or false; got 1. Write true."),
        (GOOD + "strict: Off\n", "sweep.yaml:7:9: Off must be written as false, or as 'Off' in quotes for the word; got Off without quotes."),
        (GOOD + "on: 1\n", "sweep.yaml:7:1: on must be written as true, or as 'on' in quotes for the word; got on without quotes."),
        (GOOD + "script: * x\n", "sweep.yaml:7:9: a text that begins with * must stand in quotes; got '* x'."),
        (GOOD + "script: >= 3\n", "sweep.yaml:7:9: a text that begins with > or | must stand in quotes"),
        (GOOD + "? [a]\n: 1\n", "sweep.yaml:7:3: a key must be one word; got a list or a mapping."),
        (GOOD + "script\n", "sweep.yaml:7:1: a key must be followed by ': ' and its value; got 'script'."),
        (GOOD + "constraints: [*c]\n", "sweep.yaml:7:15: a text that begins with * must stand in quotes; got *c, an alias of nothing."),
        (GOOD + "budget: &b\n  trials: 3\n  time: *b\n", "sweep.yaml:7:9: no value may hold itself"),
        (GOOD + "storage: a${HOME}b\n", "sweep.yaml:7:10: values are taken as they are written"),
        (GOOD.replace("metric: accuracy\n", ""), "sweep.yaml: metric must be given; got nothing."),
        (GOOD.replace("metric: accuracy", "metric:"), "sweep.yaml:4:8: metric must be text; got nothing. Give it a value, or leave it out."),
        (
            GOOD.replace("schema: 1", "schema: '1'"),
            ":1:9: schema must be 1, the one version of sweep files that is known; got '1'. Write schema: 1.",
        ),
        (GOOD.replace("schema: 1", "schema: true"), "sweep.yaml:1:9: schema must be 1, the one version of sweep files that is known; got true."),
        ("hello\n", "sweep.yaml: a sweep file must be a mapping with model, data, metric and chain; got 'hello'."),
        ("# nothing\n", "sweep.yaml: a sweep file must be a mapping with model, data, metric and chain; got nothing."),
        ("model: [1\n", "sweep.yaml:1:8: what stands in [ ] must be closed, with commas between; got the end of the file on line 2."),
        (f"seed: 1{'0' * 5000}\n", "sweep.yaml:1:7: a whole number must have fewer digits; got 5001 of them."),
        ("[" * 100_000, "sweep.yaml:1:41: values must be nested at most 40 deep"),
        ("a: 1\n" * 30_000, "sweep.yaml:10000:4: a sweep file must hold at most 20,000 values"),
        ("#" * 1_000_001, "sweep.yaml: a sweep file must have at most 1,000,000 bytes; got more."),
    ],
    ids=lambda text: text[-40:],
)
def test_a_mistake_in_the_file_gets_one_message_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    assert message in message_of(tmp_path, text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD.encode("utf-16"), "sweep.yaml: the sweep file must be UTF-8 text; got UTF-16. Save it as UTF-8."),
        (GOOD.encode() + "script: é.py\n".encode("latin-1"), "sweep.yaml:7:9: the sweep file must be UTF-8 text; got the byte 0xe9."),
        (GOOD.encode() + b"script: \x00\n", "sweep.yaml:7:9: the sweep file must hold characters that can be seen; got the character U+0000."),
        (b'{"script": "\\ud83d"}', "sweep.yaml:1:12: a text must hold whole characters; got half of a surrogate pair."),
    ],
    ids=["utf-16", "latin-1", "nul", "half a character"],
)
def test_bytes_that_are_no_text_are_refused_with_their_place(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "sweep.yaml").write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        load_sweep(tmp_path / "sweep.yaml")

    assert message in str(caught.value)


def test_several_mistakes_are_counted_and_the_first_is_told(tmp_path: Path) -> None:
    said = message_of(tmp_path, GOOD.replace("eval: ", "evall: ").replace("metric:", "metrik:") + "seed: x\n")

    assert said.startswith("sweep.yaml:3:8: keys of data must be known; got 'evall'. Did you mean 'eval'?")
    assert said.endswith("2 more problems come after this one.")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: "\ufeff" + text, id="byte-order mark"),
        pytest.param(lambda text: text.replace("\n", "\r\n"), id="Windows line ends"),
        pytest.param(lambda text: text.rstrip("\n"), id="no last line end"),
        pytest.param(lambda text: "---\n" + text + "...\n", id="document marks"),
        pytest.param(lambda text: "%YAML 1.2\n---\n" + text, id="directive"),
        pytest.param(lambda text: text.replace("model: {path: model.onnx}", "model: {<<: {path: model.onnx}}"), id="merge key"),
    ],
)
def test_other_ways_to_write_the_same_file_are_read_alike(tmp_path: Path, change: Callable[[str], str]) -> None:
    (tmp_path / "sweep.yaml").write_bytes(change(GOOD).encode())

    assert load_sweep(tmp_path / "sweep.yaml").config == parse_sweep(yaml.safe_load(GOOD))


def test_anchors_and_merge_keys_share_what_is_written_once(tmp_path: Path) -> None:
    text = (
        GOOD
        + """\
  - any_of:
      - {pass: A, params: &both {x: [1, 2], y: 3}}
      - {pass: B, params: {<<: *both, y: 4}}
      - {pass: C, params: *both}
"""
    )
    (tmp_path / "sweep.yaml").write_text(text)

    choices = load_sweep(tmp_path / "sweep.yaml").config.chain[1].choices

    assert [c.params for c in choices] == [{"x": [1, 2], "y": 3}, {"x": [1, 2], "y": 4}, {"x": [1, 2], "y": 3}]


def test_numbers_and_words_are_read_as_editors_read_them() -> None:
    text = "[1e-3, 1E5, .5, -3, 0x1f, 0o17, true, null, ~, 2024-01-01, 12:30, y, '1', \"on\", 1.0, +4, 0, -0.0]"

    data, _ = read_yaml(text, "text")

    assert repr(data) == repr([0.001, 1e5, 0.5, -3, 31, 15, True, None, None, "2024-01-01", "12:30", "y", "1", "on", 1.0, 4, 0, -0.0])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcde01on~", max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_what_is_written_reads_back_exactly_as_yaml_and_as_json(data: object) -> None:
    assert repr(read_yaml(write_yaml(data), "text")[0]) == repr(data)
    assert repr(read_yaml(json.dumps(data), "text")[0]) == repr(data)


@pytest.mark.parametrize(
    "text", ["1e3", "010", "08", "0x1f", "on", "No", "2024-01-01", "12:30", "~", "", "null", "1_000", "%x", "*a", "&a", "a: b", "- a"]
)
def test_words_that_look_like_something_else_survive_writing(text: str) -> None:
    assert read_yaml(write_yaml({"value": text, text: 1}), "text")[0] == {"value": text, text: 1}


def test_a_folder_or_nothing_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the sweep file must be a file; got the folder"):
        load_sweep(tmp_path)


def test_an_error_found_later_is_put_to_its_line(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(GOOD + "    params:\n      quant_mode: [dynamic,\n        statik]\n      per_channel: true\n")
    loaded = load_sweep(tmp_path / "sweep.yaml")

    with pytest.raises(ConfigError) as value, loaded.at("chain", 0, "params"):
        raise PassConfigError("OnnxQuantization", "quant_mode must be one of 'static', 'dynamic'", "'statik'")
    with pytest.raises(ConfigError) as key, loaded.at("chain", 0, "params"):
        raise PassConfigError("OnnxQuantization", "parameters must be those of its table", "'per_channel'")
    with pytest.raises(ConfigError) as unknown, loaded.at("measure", "max_time"):
        raise ConfigError("measure", "not in the file", "its default")

    assert isinstance(value.value, PassConfigError)
    assert value.value.who == "sweep.yaml:9:9: OnnxQuantization"
    assert key.value.who == "sweep.yaml:10:7: OnnxQuantization"
    assert unknown.value.who == "measure"


def test_a_value_changed_by_an_option_has_no_place_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(GOOD + "seed: 3\n")
    loaded = load_sweep(tmp_path / "sweep.yaml").changed({("metric",): "mse", ("budget", "trials"): 7})

    with pytest.raises(ConfigError) as caught, loaded.at("metric"):
        raise ConfigError("metric", "must be another", "'mse'")
    with pytest.raises(ConfigError, match=r"^command line: budget\.trials must be at least 1; got 0\.$"):
        loaded.changed({("budget", "trials"): 0})

    assert caught.value.who == "metric"
    assert (loaded.config.metric, loaded.config.budget.trials, loaded.config.seed) == ("mse", 7, 3)


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
    assert written["search"] == {"enabled": True, "sampler": "tpe", "options": None, "start": []}
    assert parse_sweep(written) == config


def test_the_target_uses_the_threads_named_or_all_there_are() -> None:
    base = {"model": {"path": "m"}, "data": {"eval": "e"}, "metric": "accuracy", "chain": [{"pass": "X"}]}
    named = LoadedSweep(parse_sweep({**base, "target": {"threads": 1}}), Path())
    free = LoadedSweep(parse_sweep(base), Path())

    assert (named.target.run_threads, named.target.threads_fixed) == (1, True)
    assert (free.target.run_threads, free.target.threads_fixed) == (effective_cpus(), False)


@pytest.mark.parametrize(("text", "value"), [("45m", 2700.0), ("1.5h", 5400.0), ("30s", 30.0), ("20", 20.0), ("10ms", 0.01)])
def test_durations_are_read_in_seconds(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(("text", "value"), [("8GB", 8 * 10**9), ("512MiB", 512 * 2**20), ("1.5 kB", 1500)])
def test_sizes_are_read_in_bytes(text: str, value: int) -> None:
    assert size_bytes(text) == value


@pytest.mark.parametrize("text", ["8", "0GB", "8XB", "-1MB", "", "99999999TB"])
def test_a_size_without_a_unit_or_a_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number above 0 with a unit"):
        size_bytes(text)


@pytest.mark.parametrize(
    ("measure", "target", "words"),
    [
        ({"pattern": "paced"}, {}, "measure.pattern: paced runs need an interval"),
        ({"interval": "10ms"}, {}, "measure.interval: interval is for paced runs"),
        ({"pattern": "paced", "interval": 10}, {}, "Write 10ms or 10s"),
        ({"pattern": "cold", "concurrency": 2}, {}, "measure.concurrency: cold runs are made one at a time"),
        ({"clock": "cpu", "concurrency": 2}, {"threads": 1}, "measure.concurrency: CPU time can't tell the throughput"),
        ({"clock": "cpu"}, {}, "measure.clock: CPU time stands for the time of a run on one thread only"),
        ({"clock": "cpu"}, {"threads": 1, "ep": "cuda"}, "measure.clock: CPU time can't tell how long CUDAExecutionProvider takes"),
        ({"measurer": "m.py:f", "clock": "cpu"}, {"threads": 1}, "measure.clock: clock is for timing by autotune"),
        ({"concurrency": 0}, {}, "measure.concurrency"),
        ({}, {"require_ep": "most"}, "target.require_ep: it must be primary, all, or a share of the nodes"),
        ({}, {"require_ep": 0.0}, "target.require_ep: it must be primary, all, or a share of the nodes"),
        ({}, {"require_ep": 2}, "target.require_ep: it must be primary, all, or a share of the nodes"),
    ],
)
def test_ways_of_timing_and_placing_that_cannot_be_followed_are_refused(measure: dict[str, Any], target: dict[str, Any], words: str) -> None:
    base = {"model": {"path": "m"}, "data": {"eval": "e"}, "metric": "accuracy", "chain": [{"pass": "X"}]}

    with pytest.raises(ConfigError) as error:
        parse_sweep({**base, "measure": measure, "target": target})

    assert words in str(error.value)


@pytest.mark.parametrize(
    ("measure", "target"),
    [
        ({"pattern": "paced", "interval": "10ms", "concurrency": 4}, {"require_ep": "all"}),
        ({"pattern": "cold", "clock": "cpu"}, {"threads": 1, "require_ep": 0.9}),
    ],
)
def test_ways_of_timing_and_placing_come_back_from_json(measure: dict[str, Any], target: dict[str, Any]) -> None:
    base = {"model": {"path": "m"}, "data": {"eval": "e"}, "metric": "accuracy", "chain": [{"pass": "X"}]}

    config = parse_sweep({**base, "measure": measure, "target": target})

    assert parse_sweep(config.to_json()) == config
    assert config.to_json()["measure"]["pattern"] == measure["pattern"]
