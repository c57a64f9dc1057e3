"""The program that runs passes on real models: its scores on numbers with known answers, its tables, and a tiny run that is taken up again."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, save

COMPARISONS = Path(__file__).resolve().parents[2] / "benchmarks" / "comparisons"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """The program as a module; it stands outside the packages, beside the modules that it takes from there."""
    return imported("real_models")


@pytest.fixture(scope="module")
def scores() -> ModuleType:
    """The functions that it names as metrics."""
    return imported("model_scores")


def imported(name: str) -> ModuleType:
    path = [*sys.path]
    sys.path.insert(0, str(COMPARISONS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = path


def test_a_line_is_right_when_its_characters_are_without_repeats_and_blanks(scores: ModuleType) -> None:
    best = np.array([[0, 3, 3, 0, 3, 5], [3, 3, 3, 0, 0, 5]])  # reads 3 3 5, and 3 5
    labels = np.array([[3, 3, 5, 0], [3, 3, 5, 0]])

    assert scores.lines_right({"characters": np.eye(6)[best]}, labels).tolist() == [1.0, 0.0]


def test_the_loss_is_the_mean_of_a_texts_tokens_that_have_a_next_one(scores: ModuleType) -> None:
    shares = np.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]]])
    labels = np.array([[1, 2, -100]])

    losses = scores.token_loss({"logits": np.log(shares) + 7.0, "present": np.zeros((1, 2))}, labels)

    np.testing.assert_allclose(losses, [-(np.log(0.25) + np.log(0.8)) / 2])


def test_a_model_gets_the_chains_of_the_longest_task_that_its_own_begins_with(program: ModuleType) -> None:
    assert program.chains_for("smollm2_cache") is program.CHAINS["smollm2_cache"]
    assert program.chains_for("smollm2_logits") is program.CHAINS["smollm2"]
    assert program.chains_for("anything") is program.CHAINS[""]


def test_every_chain_is_one_that_its_passes_take(program: ModuleType) -> None:
    for steps in (c for chains in program.CHAINS.values() for c in chains):
        for name, config in steps.steps:
            data = dict.fromkeys(program.get_pass(name).contract.data, "calib.npz")
            program.get_pass(name).resolve(program.AcceleratorSpec(), {**data, **config})


def measured_row(**more: Any) -> dict[str, Any]:
    ratio = {"value": 0.5, "low": 0.49, "high": 0.52}
    score = {"value": 0.9, "low": 0.88, "high": 0.92, "unit": "share", "delta": {"value": -0.004, "low": -0.01, "high": 0.002}}
    latency = {str(n): {"value": 2.0, "ratio": ratio} for n in (1, 2)}
    return {"model": "m", "chain": "a", "key": "k", "size_bytes": 12_340_000, "latency": latency, "score": score, **more}


def test_a_table_gives_ratios_and_points_with_their_intervals_and_words_below(program: ModuleType) -> None:
    coverage = {"operators": 3, "of_operators": 4, "weight_bytes": 50, "of_weight_bytes": 200, "nodes": 2, "of_nodes": 3}
    rows = [
        program.Row(**measured_row(chain="float")),
        program.Row(**measured_row(coverage=coverage)),
        program.Row("m", "b", "k", "refused", "needs\nopset 13"),
    ]

    float_row, row, refused, _, words = program.table(rows).splitlines()[2:]

    assert "| float | 12.3 | 2.000 ms | 2.000 ms | 0.9000 (0.8800-0.9200) | - |" in float_row
    assert "| 0.500 (0.490-0.520) | 0.500 (0.490-0.520) | 0.9000 (0.8800-0.9200) | -0.40 pt (-1.00 to +0.20) |" in row
    assert "operators 75%, weights 25%, 2 of 3 nodes" in row
    assert refused.endswith("| refused |")
    assert words == "- b: refused: needs opset 13"


@pytest.fixture(scope="module")
def models(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one folder of a model, as the program takes it."""
    place = tmp_path_factory.mktemp("models")
    shutil.copytree(digits, place / "tiny", ignore=shutil.ignore_patterns("*.pt", "net.py"))
    for name in ("eval.npz", "calib.npz"):
        with np.load(digits / name) as arrays:
            np.savez(place / "tiny" / name, **{n: a[:60] for n, a in arrays.items()})
    (place / "tiny" / "meta.json").write_text(json.dumps({"metric": "accuracy", "task": "tiny"}))
    (place / "no model").mkdir()
    return place


def test_a_run_measures_each_row_once_and_a_second_one_only_what_is_missing_or_changed(
    program: ModuleType, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOTUNE_LANES", str(tmp_path))  # nothing here needs a quiet machine
    unchanged = program.chain("OnnxOpsetUpgrade")
    refused = program.chain(("OnnxStaticQuantization", {"nodes_to_exclude": ["no such node"]}))
    static = program.chain(program.static())
    monkeypatch.setitem(program.CHAINS, "tiny", [static, unchanged, refused])
    folders, place = program.folders_in(models), program.Place(tmp_path, 0.05, (1,))

    first = program.run(folders, place)
    (tmp_path / "tiny" / "rows" / f"{place.key(folders[0], refused)[:24]}.json").unlink()
    told = capsys.readouterr().out
    monkeypatch.setitem(program.CHAINS, "tiny", [static, refused])
    second = program.run(folders, place)

    rows = {row["chain"]: row for row in first["models"][0]["rows"]}
    assert [f.name for f in folders] == ["tiny"]
    assert {name.partition("(")[0]: row["status"] for name, row in rows.items()} in (
        {"float": "ok", "OnnxStaticQuantization": "refused", "OnnxOpsetUpgrade": "ok"},
        {"float": "ok", "OnnxStaticQuantization": "refused", "OnnxOpsetUpgrade": "unchanged"},
    )
    quantized = rows["OnnxStaticQuantization"]
    assert quantized["size_bytes"] < rows["float"]["size_bytes"]
    assert quantized["latency"]["1"]["ratio"]["low"] > 0
    assert quantized["score"]["samples"] == 60
    assert quantized["coverage"]["operators"] > 0
    assert "no such node" in rows[refused.words()]["message"]
    assert told.count("kept]") == 0
    again = capsys.readouterr().out.splitlines()
    assert [line.endswith("kept]") for line in again] == [True, True, False]
    assert second["models"][0]["rows"][1] == quantized
    assert not (tmp_path / "tiny" / "work").exists()
    assert json.loads((tmp_path / "real_models.json").read_text())["models"] == second["models"]
    text = program.page(second)
    assert "## tiny" in text
    assert "over 60 rows" in text


def test_a_model_that_takes_its_past_is_timed_one_step_after_others(program: ModuleType, tmp_path: Path) -> None:
    ids, past = (helper.make_tensor_value_info(n, t, s) for n, t, s in (
        ("input_ids", TensorProto.INT64, ["batch", "steps"]), ("past_key_values.0.key", TensorProto.FLOAT, ["batch", 1, "past", 1]),
    ))  # fmt: skip
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"])
    present = helper.make_tensor_value_info("present.0.key", TensorProto.FLOAT, ["batch", 1, "all", 1])
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["floats", "axes"], ["new"]),
        helper.make_node("Concat", ["past_key_values.0.key", "new"], ["present.0.key"], axis=2),
        helper.make_node("Identity", ["attention_mask"], ["logits"]),
    ]
    logits = helper.make_tensor_value_info("logits", TensorProto.INT64, ["batch", "total"])
    axes = helper.make_tensor("axes", TensorProto.INT64, [2], [1, 3])
    graph = helper.make_graph(nodes, "cache", [ids, mask, past], [logits, present], [axes])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "model.onnx")
    tokens = np.arange(3 * 70).reshape(3, 70)
    given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "past_key_values.0.key": np.zeros((3, 1, 0, 1), np.float32)}
    np.savez(tmp_path / "eval.npz", labels=tokens, **given)

    program.write_one_step(tmp_path / "model.onnx", tmp_path / "eval.npz", tmp_path / "one.npz")

    assert program.takes_the_past(tmp_path / "eval.npz")
    assert not program.takes_the_past(tmp_path / "one.npz")
    with np.load(tmp_path / "one.npz") as one:
        assert set(one.files) == {"input_ids", "attention_mask", "past_key_values.0.key"}
        assert one["input_ids"].tolist() == [[64], [134], [204]]
        assert one["attention_mask"].shape == (3, 65)
        np.testing.assert_array_equal(one["past_key_values.0.key"][:, 0, :, 0], tokens[:, :64])
