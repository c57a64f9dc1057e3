from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from autotune.benchmarks import accuracy
from autotune.benchmarks.accuracy import RunOutputs, compare_features, load_outputs, run_outputs, save_outputs
from autotune.benchmarks.metrics import Metric, Outputs, get_metric
from autotune.data import Feeding
from autotune.errors import AutotuneError
from autotune.model import IoContract, read_onnx_head
from autotune.records import Interval, MetricValue
from autotune.session import SessionSettings, create_session

RNG = np.random.default_rng(0)


def opened(
    folder: Path, nodes: Sequence[onnx.NodeProto], inputs: dict[str, tuple[int, list[object]]], outputs: dict[str, int]
) -> tuple[ort.InferenceSession, IoContract]:
    graph = helper.make_graph(
        list(nodes), "g",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, None) for n, t in outputs.items()],
    )  # fmt: skip
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return create_session(path, SessionSettings(intra_op_num_threads=1)), read_onnx_head(path)[0]


# Outputs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 4, 16])
def test_outputs_stand_in_the_order_of_the_rows_whatever_the_batch(tmp_path: Path, batch: int) -> None:
    session, io = opened(tmp_path, [helper.make_node("Neg", ["x"], ["y"])], {"x": (TensorProto.FLOAT, ["n", 2])}, {"y": TensorProto.FLOAT})
    x = RNG.normal(size=(10, 2)).astype(np.float32)
    rows = [7, 0, 3, 3, 9, 1, 2]

    got = run_outputs(session, {"x": x}, io, Feeding(batched=True, batch_size=batch), rows)

    assert np.array_equal(got.arrays["y"], -x[rows])
    assert got.finite


def test_a_model_of_one_example_a_run_has_its_outputs_stacked(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0)]
    session, io = opened(tmp_path, nodes, {"x": (TensorProto.FLOAT, [2, 3])}, {"y": TensorProto.FLOAT, "total": TensorProto.FLOAT})
    x = RNG.normal(size=(5, 2, 3)).astype(np.float32)

    got = run_outputs(session, {"x": x}, io, Feeding(batched=False))

    assert np.array_equal(got.arrays["y"], -x)
    assert got.arrays["total"] == pytest.approx(x.sum((1, 2)), abs=1e-5)


def test_an_output_without_examples_is_stacked_by_run(tmp_path: Path) -> None:
    nodes = [helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0), helper.make_node("Neg", ["x"], ["y"])]
    session, io = opened(tmp_path, nodes, {"x": (TensorProto.FLOAT, ["n", 2])}, {"total": TensorProto.FLOAT, "y": TensorProto.FLOAT})

    got = run_outputs(session, {"x": np.ones((6, 2), np.float32)}, io, Feeding(batched=True, batch_size=3))

    assert got.arrays["total"].tolist() == [6.0, 6.0]
    assert got.arrays["y"].shape == (6, 2)


def test_outputs_of_uneven_length_are_padded_at_their_ends_and_still_finite(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Range", ["zero", "count", "one"], ["flat"]), helper.make_node("Unsqueeze", ["flat", "axis"], ["ids"]),
        helper.make_node("Cast", ["ids"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Constant", [], ["zero"], value_int=0), helper.make_node("Constant", [], ["one"], value_int=1),
        helper.make_node("Constant", [], ["axis"], value_ints=[0]),
        helper.make_node("Squeeze", ["x"], ["count"]),
    ]  # fmt: skip
    nodes = nodes[3:] + nodes[:3]
    session, io = opened(tmp_path, nodes, {"x": (TensorProto.INT64, ["n"])}, {"ids": TensorProto.INT64, "floats": TensorProto.FLOAT})

    got = run_outputs(session, {"x": np.array([2, 0, 3])}, io, Feeding(batched=True))

    assert got.arrays["ids"].tolist() == [[0, 1, -1], [-1, -1, -1], [0, 1, 2]]
    assert np.isnan(got.arrays["floats"]).tolist() == [[False, False, True], [True, True, True], [False, False, False]]
    assert got.finite


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_one_value_that_is_not_finite_is_noticed_in_an_output_that_is_not_kept(tmp_path: Path, poison: float) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Identity", ["z"], ["w"])]
    session, io = opened(
        tmp_path, nodes, {"x": (TensorProto.FLOAT, ["n", 1]), "z": (TensorProto.FLOAT, ["n", 1])}, {"y": TensorProto.FLOAT, "w": TensorProto.FLOAT}
    )
    z = np.zeros((4, 1), np.float32)
    z[3] = poison

    got = run_outputs(session, {"x": np.ones((4, 1)), "z": z}, io, Feeding(batched=True), keep=lambda first, rows: ["y"], always=True)

    assert list(got.arrays) == ["y"]
    assert not got.finite


def test_outputs_too_large_to_keep_are_cut_to_those_the_metric_reads_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Concat", ["x"] * 50, ["large"], axis=1)]
    session, io = opened(tmp_path, nodes, {"x": (TensorProto.FLOAT, ["n", 4])}, {"y": TensorProto.FLOAT, "large": TensorProto.FLOAT})
    arrays = {"x": np.ones((100, 4), np.float32)}
    monkeypatch.setattr(accuracy, "ALL_OUTPUTS_BYTES", 50_000)
    monkeypatch.setattr(accuracy, "KEPT_OUTPUTS_BYTES", 60_000)

    assert list(run_outputs(session, arrays, io, Feeding(batched=True), keep=lambda first, rows: ["y"]).arrays) == ["y"]
    assert list(run_outputs(session, arrays, io, Feeding(batched=True), range(10), keep=lambda first, rows: ["y"]).arrays) == ["y", "large"]
    with pytest.raises(AutotuneError, match="outputs over all 100 rows must fit"):
        run_outputs(session, arrays, io, Feeding(batched=True))


def test_a_classifiers_map_of_probabilities_becomes_an_array(tmp_path: Path) -> None:
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])))
    graph = helper.make_graph(
        [helper.make_node("ZipMap", ["x"], ["p"], domain="ai.onnx.ml", classlabels_int64s=[4, 7])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_value_info("p", maps)],
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)], ir_version=8), str(path))
    x = RNG.uniform(size=(5, 2)).astype(np.float32)

    got = run_outputs(
        create_session(path, SessionSettings(intra_op_num_threads=1)), {"x": x}, read_onnx_head(path)[0], Feeding(batched=True, batch_size=2)
    )

    assert got.arrays["p"] == pytest.approx(x)


def test_outputs_come_back_from_their_file_whatever_their_names(tmp_path: Path) -> None:
    outputs = RunOutputs({"file": np.arange(3), "/model/head/out:0": np.ones((3, 2), np.float16), "words": np.array(["a", "bc", ""])}, finite=False)

    save_outputs(tmp_path / "outputs.npz", outputs)
    back = load_outputs(tmp_path / "outputs.npz")

    assert list(back.arrays) == list(outputs.arrays)
    assert all(np.array_equal(back.arrays[n], a) and back.arrays[n].dtype == a.dtype for n, a in outputs.arrays.items())
    assert back.finite is False


def test_a_run_that_is_stopped_at_a_look_has_the_outputs_of_the_rows_done(tmp_path: Path) -> None:
    session, io = opened(tmp_path, [helper.make_node("Neg", ["x"], ["y"])], {"x": (TensorProto.FLOAT, ["n", 2])}, {"y": TensorProto.FLOAT})
    x = RNG.normal(size=(20, 2)).astype(np.float32)
    seen: list[tuple[int, int]] = []

    def stop(fresh: RunOutputs, done: int) -> bool:
        seen.append((len(fresh.arrays["y"]), done))
        return done == 12

    got = run_outputs(session, {"x": x}, io, Feeding(batched=True, batch_size=3), looks=(3, 5, 12, 15), stop=stop)

    assert seen == [(3, 3), (9, 12)]  # 5 falls into a batch
    assert np.array_equal(got.arrays["y"], -x[:12])


# Comparison -----------------------------------------------------------------------------------------------------------------


def compare(metric: Metric, candidate: Outputs, baseline: Outputs | None, labels: np.ndarray | None, *, seed: int) -> MetricValue:
    reference = labels if labels is not None else candidate if baseline is None else baseline
    examples = len(next(iter(candidate.values())))
    features = [None if outputs is None else metric.features(outputs, reference, examples) for outputs in (candidate, baseline)]
    assert features[0] is not None
    return compare_features(metric, features[0], features[1], seed=seed)


def class_scores(right: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    return {"logits": np.eye(3, dtype=np.float32)[np.where(right, labels, (labels + 1) % 3)]}


def checked(value: MetricValue) -> MetricValue:
    for interval in (value.interval, value.delta, value.ratio):
        assert interval is None or interval.low <= interval.value <= interval.high
    return value


def test_accuracy_is_compared_example_by_example() -> None:
    labels = RNG.integers(0, 3, 400)
    base = RNG.random(400) < 0.9
    cand = base.copy()
    cand[np.flatnonzero(base)[:6]] = False
    cand[np.flatnonzero(~base)[:2]] = True

    value = checked(compare(get_metric("accuracy"), class_scores(cand, labels), class_scores(base, labels), labels, seed=0))

    assert value.value == pytest.approx(cand.mean())
    assert value.delta is not None
    assert value.delta.value == pytest.approx(-0.01)
    assert value.delta.high - value.delta.low < 0.7 * (value.high - value.low)  # two separate intervals would give 1.4 times
    assert value.ratio is not None
    assert value.ratio.value == pytest.approx(cand.mean() / base.mean())
    assert (value.samples, value.unit) == (400, "share")


@pytest.mark.parametrize("name", ["accuracy", "roc_auc", "mse", "cosine"])
def test_the_baseline_differs_from_itself_by_exactly_nothing(name: str) -> None:
    labels = RNG.integers(0, 2, 60)
    outputs = {"p": RNG.normal(size=(60, 2)).astype(np.float32)} if name != "mse" else {"p": RNG.normal(size=60).astype(np.float32)}

    value = checked(compare(get_metric(name), outputs, None, None if name == "cosine" else labels, seed=0))

    assert value.delta == Interval(0.0, 0.0, 0.0)
    assert value.ratio == Interval(1.0, 1.0, 1.0)


def test_equal_predictions_leave_the_doubt_that_the_count_allows() -> None:
    labels = RNG.integers(0, 3, 100)
    right = RNG.random(100) < 0.8

    value = checked(compare(get_metric("accuracy"), class_scores(right, labels), class_scores(right, labels), labels, seed=0))

    assert value.delta is not None
    assert (value.delta.value, round(value.delta.low, 3), round(value.delta.high, 3)) == (0.0, -0.037, 0.037)


def test_errors_of_examples_are_compared_by_pairs_and_by_ratio() -> None:
    labels = RNG.normal(size=200)
    noise = RNG.normal(size=200)

    value = checked(
        compare(get_metric("mse"), {"y": (labels + 2 * noise).astype(np.float32)}, {"y": (labels + noise).astype(np.float32)}, labels, seed=0)
    )

    assert value.ratio is not None
    assert value.ratio.value == pytest.approx(4.0, rel=1e-4)
    assert value.delta is not None
    assert value.delta.low > 0


def test_a_metric_over_a_set_is_resampled_by_example_and_repeats_with_its_seed() -> None:
    labels = RNG.integers(0, 2, 150)
    base = {"p": (labels + RNG.normal(size=150)).astype(np.float32)}
    cand = {"p": (base["p"] + 0.3 * RNG.normal(size=150)).astype(np.float32)}
    metric = get_metric("roc_auc")

    one, again, other = (checked(compare(metric, cand, base, labels, seed=seed)) for seed in (1, 1, 2))

    assert one == again
    assert one != other
    assert one.delta is not None
    assert one.delta.high - one.delta.low < one.high - one.low
    assert "1000 resamples" in one.method


def test_agreement_is_taken_with_the_baseline_when_there_are_no_labels() -> None:
    base = {"y": RNG.normal(size=(40, 8)).astype(np.float32)}
    cand = {"y": base["y"] + np.float32(0.1) * RNG.normal(size=(40, 8)).astype(np.float32)}

    value = checked(compare(get_metric("cosine"), cand, base, None, seed=0))

    assert 0.98 < value.value < 1
    assert value.delta is not None
    assert value.delta.value == pytest.approx(value.value - 1)
    assert value.delta.high < 0
    assert value.high <= 1


def test_a_users_number_over_the_set_is_resampled(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def median_error(o, labels):\n    import numpy as np\n    return float(np.median(np.abs(o['y'] - labels)))\n")
    labels = RNG.normal(size=80)
    metric = get_metric("mine.py:median_error", root=tmp_path)

    value = checked(compare(metric, {"y": labels + 0.2}, {"y": labels + 0.1}, labels, seed=0))

    assert value.value == pytest.approx(0.2)
    assert value.delta is not None
    assert value.delta.value == pytest.approx(0.1)


def test_a_set_that_is_too_small_to_resample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def all_needed(o, labels):\n    return 1.0 if len(set(labels)) == 12 else float('nan')\n")

    with pytest.raises(AutotuneError, match="a number on most resamples"):
        compare(get_metric("mine.py:all_needed", root=tmp_path), {"y": np.ones(12)}, None, np.arange(12), seed=0)


def test_a_baseline_that_scores_nothing_has_no_ratio() -> None:
    labels = RNG.integers(0, 3, 50)

    value = checked(
        compare(get_metric("accuracy"), class_scores(np.ones(50, bool), labels), class_scores(np.zeros(50, bool), labels), labels, seed=0)
    )

    assert value.ratio is None
    assert value.delta is not None
    assert value.delta.value == 1.0
