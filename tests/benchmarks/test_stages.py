from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from autotune.benchmarks import stages
from autotune.benchmarks.accuracy import load_outputs
from autotune.benchmarks.denormals import look_for_denormals
from autotune.errors import ConfigError
from autotune.model import ONNXModelHandler, save_onnx
from autotune.records import MetricValue
from autotune.session import SessionSettings

FAST = {"max_time_ns": 150_000_000, "block_time_ns": 3_000_000, "min_rounds": 6, "min_runs": 20}


@dataclass(frozen=True)
class Digits:
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    data: Path
    labels: NDArray[np.int64]
    images: NDArray[np.float32]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    fitted = LogisticRegression(max_iter=200).fit(images[:900], labels[:900])
    data = tmp_path_factory.mktemp("data") / "eval.npz"
    np.savez(data, x=images[900:1300], labels=labels[900:1300].astype(np.int64))
    return Digits(fitted.coef_.T.astype(np.float32), fitted.intercept_.astype(np.float32), data, labels[900:1300], images[900:1300])


Change = Callable[[onnx.ModelProto], None]


def linear(digits: Digits, folder: Path, change: Change = lambda proto: None, *, settings: SessionSettings | None = None) -> ONNXModelHandler:
    """A linear classifier of digits, changed as the test wants."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Add", ["product", "b"], ["logits"])], "digits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])], [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(digits.weight, "w"), numpy_helper.from_array(digits.bias, "b")],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    change(proto)
    folder.mkdir(parents=True, exist_ok=True)
    save_onnx(proto, folder / "model.onnx")
    return ONNXModelHandler.from_folder(folder, session=settings or SessionSettings(intra_op_num_threads=1))


def with_weights(change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Change:
    def apply(proto: onnx.ModelProto) -> None:
        tensor = proto.graph.initializer[0]
        tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), "w"))

    return apply


def check(digits: Digits, model: ONNXModelHandler, baseline: ONNXModelHandler | None, out: Path, **more: Any) -> dict[str, Any]:
    return stages.check(
        {
            "model": model.to_json(), "baseline": baseline.to_json() if baseline else None, "data": str(digits.data),
            "rows": [0, 1, 2, 3, 4], "batch_size": 1, "out": str(out), **more,
        }
    )  # fmt: skip


def score(digits: Digits, model: ONNXModelHandler, out: Path, *, baseline_outputs: Path | None = None, **more: Any) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    return stages.accuracy(
        {
            "model": model.to_json(), "data": str(digits.data), "metric": "accuracy", "root": str(out), "rows": list(range(400)), "batch_size": 16,
            "baseline_outputs": str(baseline_outputs) if baseline_outputs else None, "out": str(out), **more,
        }
    )  # fmt: skip


# check ----------------------------------------------------------------------------------------------------------------------


def test_a_sound_model_passes_with_its_facts(digits: Digits, tmp_path: Path) -> None:
    model = linear(digits, tmp_path / "m")

    found = check(digits, model, None, tmp_path)

    assert (found["verdict"], found["cause"], found["checker"]) == ("ok", None, "")
    assert found["op_histogram"] == {"Add": 1, "MatMul": 1}
    assert found["placement"].keys() == {"CPUExecutionProvider"}
    assert found["size_bytes"] == (tmp_path / "m" / "model.onnx").stat().st_size
    assert found["outputs"] == {"logits": {"dtype": "float32", "shape": [5, 10]}}
    assert found["session"]["intra_op_num_threads"] == 1
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert load_outputs(tmp_path / "outputs.npz").arrays["logits"] == pytest.approx(digits.images[:5] @ digits.weight + digits.bias, abs=1e-4)


def test_a_quantized_model_with_a_larger_error_is_sound(digits: Digits, tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    baseline = linear(digits, tmp_path / "base")
    (tmp_path / "int8").mkdir()
    quantize_dynamic(str(baseline.path), str(tmp_path / "int8" / "model.onnx"), weight_type=QuantType.QInt8)

    found = check(digits, ONNXModelHandler.from_folder(tmp_path / "int8", session=baseline.session), baseline, tmp_path)

    assert found["verdict"] == "ok"
    error = found["error"]["logits"]
    assert 20 < error["sqnr_db"] < 60
    assert not error["identical"]
    assert error["cosine"] > 0.99


def test_a_ruined_model_that_still_answers_is_left_to_accuracy(digits: Digits, tmp_path: Path) -> None:
    ruined = linear(digits, tmp_path / "ruined", with_weights(lambda w: -w))

    found = check(digits, ruined, linear(digits, tmp_path / "base"), tmp_path)

    assert found["verdict"] == "ok"
    assert found["error"]["logits"]["sqnr_db"] < 0


def test_a_copy_is_identical(digits: Digits, tmp_path: Path) -> None:
    found = check(digits, linear(digits, tmp_path / "copy"), linear(digits, tmp_path / "base"), tmp_path)

    assert found["error"]["logits"] == {"identical": True, "max_abs": 0.0, "cosine": pytest.approx(1.0), "sqnr_db": None}


def poisoned(proto: onnx.ModelProto) -> None:
    with_weights(lambda w: np.where(np.arange(w.size).reshape(w.shape) == 205, np.nan, w).astype(np.float32))(proto)


def constant(proto: onnx.ModelProto) -> None:
    with_weights(np.zeros_like)(proto)


def renamed(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].output[0] = proto.graph.output[0].name = "scores"


def in_half(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].output[0] = "wide"
    proto.graph.node.append(helper.make_node("Cast", ["wide"], ["logits"], to=TensorProto.FLOAT16))
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16


def narrowed(proto: onnx.ModelProto) -> None:
    with_weights(lambda w: w[:, :9])(proto)
    proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(proto.graph.initializer[1])[:9], "b"))
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 9


@pytest.mark.parametrize(
    ("change", "cause", "text"),
    [
        (poisoned, "not_finite", "NaN or infinite values in output logits"),
        (constant, "bad_output", "the same output for all 5 rows tried"),
        (renamed, "bad_output", "outputs must be the baseline's, logits float32; the model has scores float32"),
        (in_half, "bad_output", "outputs must be the baseline's, logits float32; the model has logits float16"),
        (narrowed, "bad_output", "output 'logits' must have shape [5, 10]; it has [5, 9]"),
    ],
)
def test_an_unfit_model_is_invalid_with_its_cause(digits: Digits, tmp_path: Path, change: Change, cause: str, text: str) -> None:
    found = check(digits, linear(digits, tmp_path / "bad", change), linear(digits, tmp_path / "base"), tmp_path)

    assert (found["verdict"], found["cause"]) == ("invalid", cause)
    assert text in found["message"]


def test_a_baseline_that_answers_nan_is_invalid(digits: Digits, tmp_path: Path) -> None:
    found = check(digits, linear(digits, tmp_path / "bad", poisoned), None, tmp_path)

    assert (found["verdict"], found["cause"]) == ("invalid", "not_finite")


def test_infinities_that_the_baseline_has_too_are_no_fault(digits: Digits, tmp_path: Path) -> None:
    def masked(proto: onnx.ModelProto) -> None:
        bias = digits.bias.copy()
        bias[3] = -np.inf
        proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(bias, "b"))

    found = check(digits, linear(digits, tmp_path / "m", masked), linear(digits, tmp_path / "base", masked), tmp_path)

    assert found["verdict"] == "ok"


def test_what_the_checker_objects_to_is_told_but_not_fatal_when_the_model_runs(digits: Digits, tmp_path: Path) -> None:
    def contrib(proto: onnx.ModelProto) -> None:
        proto.graph.node[1].output[0] = "raw"
        proto.graph.node.append(helper.make_node("Gelu", ["raw"], ["logits"], domain="com.microsoft"))
        proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        proto.graph.initializer[1].name = proto.graph.node[1].input[1] = "b"
        proto.ir_version = 2  # older than the graph's own ways

    found = check(digits, linear(digits, tmp_path / "m", contrib), None, tmp_path)

    assert found["verdict"] == "ok"
    assert found["checker"]
    assert found["op_histogram"]["com.microsoft.Gelu"] == 1


def test_operators_in_subgraphs_are_counted(tmp_path: Path) -> None:
    def branch(op: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node(op, ["x"], [op])], op, [], [helper.make_tensor_value_info(op, TensorProto.FLOAT, None)])

    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch("Relu"), else_branch=branch("Neg"))], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    onnx.save(helper.make_model(graph), str(tmp_path / "model.onnx"))

    assert stages.op_histogram(tmp_path / "model.onnx") == {"If": 1, "Neg": 1, "Relu": 1}


def test_an_axis_that_the_data_decides_may_differ_and_one_of_the_inputs_may_not() -> None:
    got, wanted = np.zeros((2, 5)), np.zeros((2, 7))

    assert stages.shape_fault("y", got, wanted, ("n", "steps"), {"n", "length"}) == ""
    assert stages.shape_fault("y", got, wanted, ("n", "length"), {"n", "length"}) == "output 'y' must have shape [2, 7]; it has [2, 5]"
    assert stages.shape_fault("y", got, wanted, ("n", 7), {"n"}) != ""
    assert stages.shape_fault("y", got, wanted, ("steps",), set()) == ""  # each example a run
    assert stages.shape_fault("y", np.zeros((3, 7)), wanted, ("steps", "steps2"), set()) != ""  # the examples themselves
    assert stages.shape_fault("y", np.zeros((2, 7, 1)), wanted, None, set()) != ""


def test_small_differences_that_eight_bits_swallow_are_no_constant_answer() -> None:
    quiet = {"p": np.array([[0.001], [0.004], [0.002]], np.float32)}
    loud = {"p": np.array([[0.1], [0.9], [0.2]], np.float32)}
    zero = {"p": np.zeros((3, 1), np.float32)}

    assert not stages.constant_answer(zero, quiet)
    assert stages.constant_answer(zero, loud)
    assert not stages.constant_answer(loud, loud)


# check: where it runs, with what, and what it costs -------------------------------------------------------------------------


def test_a_model_none_of_whose_nodes_run_on_the_provider_is_invalid(digits: Digits, tmp_path: Path) -> None:
    import onnxruntime as ort

    if "AzureExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this build has no provider that starts and then takes no node")
    elsewhere = SessionSettings(intra_op_num_threads=1, execution_provider="AzureExecutionProvider")

    found = check(digits, linear(digits, tmp_path / "m", settings=elsewhere), None, tmp_path)

    assert (found["verdict"], found["cause"]) == ("invalid", "ep_fallback")
    assert "no node runs on AzureExecutionProvider: " in found["message"]
    assert "on CPUExecutionProvider" in found["message"]


@pytest.mark.parametrize("required", ["primary", "all", 0.9])
def test_a_model_that_runs_where_it_should_meets_every_requirement(digits: Digits, tmp_path: Path, required: str | float) -> None:
    found = check(digits, linear(digits, tmp_path / "m"), None, tmp_path, require_ep=required)

    assert found["verdict"] == "ok"


@pytest.mark.parametrize(
    ("placed", "required", "fault"),
    [
        ({"GPU": 9, "CPU": 1}, "primary", ""),
        ({"GPU": 9, "CPU": 1}, 0.9, ""),
        ({"GPU": 9, "CPU": 1}, 0.95, "95% of the nodes must run on GPU: 9 on GPU, 1 on CPU"),
        ({"GPU": 9, "CPU": 1}, "all", "every node must run on GPU: 9 on GPU, 1 on CPU"),
        ({"GPU": 10}, "all", ""),
        ({"CPU": 10}, "primary", "no node runs on GPU: 10 on CPU"),
        ({}, "primary", ""),
        ({}, "all", "every node must run on GPU: this ONNX Runtime does not tell where nodes run"),
    ],
)
def test_placement_is_held_against_what_is_required(placed: dict[str, int], required: str | float, fault: str) -> None:
    assert stages.placement_fault(placed, "GPU", required) == fault


def test_threads_of_a_session_are_seen(digits: Digits, tmp_path: Path) -> None:
    found = check(digits, linear(digits, tmp_path / "m", settings=SessionSettings(intra_op_num_threads=3)), None, tmp_path)

    assert (found["verdict"], found["extra_threads"]) == ("ok", 2)
    assert stages.threads_not_started(SessionSettings(intra_op_num_threads=4), 1) == [
        "intra_op_num_threads: asked 4, the session started 1 beside the caller's"
    ]
    assert stages.threads_not_started(SessionSettings(intra_op_num_threads=1), 0) == []
    assert stages.threads_not_started(SessionSettings(), 0) == []


def tiny_weights(proto: onnx.ModelProto) -> None:
    with_weights(lambda w: np.where(np.arange(w.size).reshape(w.shape) % 10 == 0, np.float32(1e-40), w).astype(np.float32))(proto)


def tiny_products(proto: onnx.ModelProto) -> None:
    """Values that only the run brings forth, and that are gone from the output."""
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(1e-39), "small"))
    proto.graph.node.insert(1, helper.make_node("Mul", ["product", "small"], ["fraction"]))
    proto.graph.node[2].input[0] = "fraction"


@pytest.mark.parametrize(("change", "worst"), [(tiny_weights, "w"), (tiny_products, "fraction")])
def test_denormal_numbers_are_noticed_and_told_how_to_avoid(digits: Digits, tmp_path: Path, change: Change, worst: str) -> None:
    found = check(digits, linear(digits, tmp_path / "m", change), None, tmp_path)["denormals"]

    assert found["looked"]
    assert found["worst"]["tensor"] in (worst, "small")
    assert found["weights"] + found["activations"] > 0
    assert "session.set_denormal_as_zero: '1'" in found["hint"]


def test_a_session_that_takes_them_for_0_gets_no_hint_and_a_model_without_them_neither(digits: Digits, tmp_path: Path) -> None:
    flushing = SessionSettings(intra_op_num_threads=1, config_entries={"session.set_denormal_as_zero": "1"})

    flushed = check(digits, linear(digits, tmp_path / "flushed", tiny_weights, settings=flushing), None, tmp_path)["denormals"]
    sound = check(digits, linear(digits, tmp_path / "sound"), None, tmp_path)["denormals"]

    assert (flushed["weights"] > 0, flushed["hint"]) == (True, "")
    assert (sound["weights"], sound["activations"], sound["worst"], sound["hint"]) == (0, 0, None, "")
    assert sound["activations_of"] == 2 * 2 * 10  # two rows, two tensors of ten values


def test_a_look_that_fails_costs_the_model_nothing(digits: Digits, tmp_path: Path) -> None:
    model = linear(digits, tmp_path / "m")

    found = look_for_denormals(model, [{"x": np.zeros((1, 3), np.float32)}])

    assert not found["looked"]
    assert found["why"]


OPERATORS_SAME = "the model has the baseline's operators"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda proto: None, "the model's bytes are the baseline's"),
        (lambda proto: setattr(proto, "doc_string", "another"), f"{OPERATORS_SAME}, and on the rows tried its outputs to the last bit"),
        (with_weights(lambda w: np.round(w * 4) / 4), OPERATORS_SAME),
    ],
)
def test_a_chain_that_left_the_model_as_it_was_is_told(digits: Digits, tmp_path: Path, change: Change, said: str) -> None:
    found = check(digits, linear(digits, tmp_path / "m", change), linear(digits, tmp_path / "base"), tmp_path)

    assert found["no_op"] == said


def test_a_chain_that_added_an_operator_did_something(digits: Digits, tmp_path: Path) -> None:
    def more(proto: onnx.ModelProto) -> None:
        proto.graph.node[1].output[0] = "raw"
        proto.graph.node.append(helper.make_node("Identity", ["raw"], ["logits"]))

    assert check(digits, linear(digits, tmp_path / "m", more), linear(digits, tmp_path / "base"), tmp_path)["no_op"] == ""


def through_a_hidden_layer(digits: Digits, width: int) -> Change:
    """Put a layer of so many units before the classifier; with the same seed, so that a narrower one is a pruned one."""

    def apply(proto: onnx.ModelProto) -> None:
        inner = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)[:, :width]
        weights = [inner, np.linalg.pinv(inner) @ digits.weight]
        nodes = [helper.make_node("MatMul", ["x", "w0"], ["h"]), helper.make_node("MatMul", ["h", "w1"], ["product"]), proto.graph.node[1]]
        kept = [numpy_helper.from_array(w.astype(np.float32), f"w{i}") for i, w in enumerate(weights)] + [proto.graph.initializer[1]]
        graph = helper.make_graph(nodes, "hidden", list(proto.graph.input), list(proto.graph.output), kept)
        proto.graph.CopyFrom(graph)

    return apply


@pytest.mark.parametrize(("width", "said"), [(32, "the model's bytes are the baseline's"), (24, "")])
def test_a_chain_that_took_out_channels_did_something_though_the_operators_are_the_same(
    digits: Digits, tmp_path: Path, width: int, said: str
) -> None:
    base = linear(digits, tmp_path / "base", through_a_hidden_layer(digits, 32))

    found = check(digits, linear(digits, tmp_path / "m", through_a_hidden_layer(digits, width)), base, tmp_path)

    assert found["op_histogram"] == {"Add": 1, "MatMul": 2}
    assert found["no_op"] == said


# accuracy -------------------------------------------------------------------------------------------------------------------


def test_the_baseline_is_scored_and_then_a_candidate_beside_it(digits: Digits, tmp_path: Path) -> None:
    baseline = linear(digits, tmp_path / "base")
    worse = linear(digits, tmp_path / "worse", with_weights(lambda w: np.round(w * 2) / 2))

    base = score(digits, baseline, tmp_path / "b")
    found = score(digits, worse, tmp_path / "w", baseline_outputs=tmp_path / "b" / "outputs.npz")

    expected_base = (digits.images @ digits.weight + digits.bias).argmax(1) == digits.labels
    expected = (digits.images @ (np.round(digits.weight * 2) / 2) + digits.bias).argmax(1) == digits.labels
    value, base_value = MetricValue.from_json(found["metric"]), MetricValue.from_json(base["metric"])
    assert base_value.value == pytest.approx(expected_base.mean())
    assert base_value.delta is not None
    assert base_value.delta.low == base_value.delta.high == 0.0
    assert value.value == pytest.approx(expected.mean())
    assert value.delta is not None
    assert value.delta.value == pytest.approx(expected.mean() - expected_base.mean())
    with np.load(tmp_path / "w" / "scores.npz") as scores:
        assert scores["column_0"].tolist() == expected.astype(float).tolist()
        assert scores["rows"].tolist() == list(range(400))


def test_only_the_rows_asked_for_are_scored(digits: Digits, tmp_path: Path) -> None:
    rows = [5, 3, 399, 20]

    found = score(digits, linear(digits, tmp_path / "m"), tmp_path / "o", rows=rows)

    expected = (digits.images[rows] @ digits.weight + digits.bias).argmax(1) == digits.labels[rows]
    assert found["metric"]["value"] == expected.mean()
    assert found["metric"]["samples"] == 4


def test_without_labels_agreement_with_the_baseline_is_scored(digits: Digits, tmp_path: Path) -> None:
    data = tmp_path / "unlabelled.npz"
    np.savez(data, x=digits.images)
    baseline, rounded = linear(digits, tmp_path / "b"), linear(digits, tmp_path / "r", with_weights(lambda w: np.round(w * 4) / 4))

    base = score(digits, baseline, tmp_path / "bo", data=str(data), metric="cosine")
    found = score(digits, rounded, tmp_path / "ro", data=str(data), metric="cosine", baseline_outputs=tmp_path / "bo" / "outputs.npz")

    assert base["metric"]["value"] == base["metric"]["low"] == 1.0
    assert 0.9 < found["metric"]["value"] < 1.0
    assert found["metric"]["delta"]["value"] == pytest.approx(found["metric"]["value"] - 1)


def test_outputs_that_are_not_finite_are_invalid(digits: Digits, tmp_path: Path) -> None:
    score(digits, linear(digits, tmp_path / "b"), tmp_path / "bo")

    found = score(digits, linear(digits, tmp_path / "p", poisoned), tmp_path / "po", baseline_outputs=tmp_path / "bo" / "outputs.npz")

    assert (found["verdict"], found["cause"], found["metric"]) == ("invalid", "not_finite", None)


@pytest.mark.parametrize(("body", "cause"), [("return float('nan')", "not_finite"), ("return 'fine'", "bad_output")])
def test_a_users_metric_that_gives_no_score_makes_the_trial_invalid(digits: Digits, tmp_path: Path, body: str, cause: str) -> None:
    (tmp_path / "mine.py").write_text(f"def f(outputs, labels):\n    {body}\n")

    found = score(digits, linear(digits, tmp_path / "m"), tmp_path / "o", metric="mine.py:f", root=str(tmp_path))

    assert (found["verdict"], found["cause"]) == ("invalid", cause)
    assert found["message"].startswith("f: ")


def test_a_users_metric_gets_outputs_and_labels(digits: Digits, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(outputs, labels):\n    return (outputs['logits'].argmax(1) == labels).astype(float)\n")
    model = linear(digits, tmp_path / "m")

    found = score(digits, model, tmp_path / "o", metric="mine.py:f", root=str(tmp_path))

    assert found["metric"]["value"] == score(digits, model, tmp_path / "p")["metric"]["value"]


def test_labels_that_the_metric_cannot_use_are_refused(digits: Digits, tmp_path: Path) -> None:
    data = tmp_path / "eval.npz"
    np.savez(data, x=digits.images, labels=digits.labels.astype(np.float64))

    with pytest.raises(ConfigError, match="labels must be class numbers"):
        score(digits, linear(digits, tmp_path / "m"), tmp_path / "o", data=str(data))


# latency --------------------------------------------------------------------------------------------------------------------


def timed(
    digits: Digits, model: ONNXModelHandler, baseline: ONNXModelHandler | None, out: Path, *, limits: Sequence[Any] = (), **protocol: Any
) -> dict[str, Any]:
    return stages.latency(
        {
            "model": model.to_json(), "baseline": baseline.to_json() if baseline else None, "data": str(digits.data),
            "rows": [0, 1, 2], "batch_size": 2, "protocol": {**FAST, **protocol}, "seed": 0, "out": str(out),
            "limits": limits,
        }
    )  # fmt: skip


def test_a_model_with_much_more_to_do_is_seen_to_be_slower(digits: Digits, tmp_path: Path) -> None:
    def laboured(proto: onnx.ModelProto) -> None:
        proto.graph.node[1].output[0] = "raw"
        proto.graph.initializer.append(numpy_helper.from_array(np.random.default_rng(0).normal(size=(10, 1500)).astype(np.float32), "up"))
        proto.graph.initializer.append(numpy_helper.from_array(np.random.default_rng(1).normal(size=(1500, 1500)).astype(np.float32), "across"))
        proto.graph.initializer.append(numpy_helper.from_array(np.random.default_rng(2).normal(size=(1500, 10)).astype(np.float32), "down"))
        for i, (a, b, c) in enumerate([("raw", "up", "h1"), ("h1", "across", "h2"), ("h2", "down", "logits")]):
            proto.graph.node.append(helper.make_node("MatMul", [a, b], [c], name=f"labour_{i}"))

    found = timed(digits, linear(digits, tmp_path / "slow", laboured), linear(digits, tmp_path / "base"), tmp_path)

    value = MetricValue.from_json(found["metrics"]["latency"])
    assert value.ratio is not None
    assert value.ratio.low > 3
    assert value.unit == "ms"
    with np.load(tmp_path / "latency.npz") as runs:
        assert runs["candidate_ns"].shape == runs["baseline_ns"].shape == (found["rounds"], found["runs_a_block"])
        assert runs["candidate_ns"].dtype == np.int64
        assert np.median(runs["candidate_ns"]) / 1e6 == pytest.approx(value.value, rel=0.5)
    throughput = found["metrics"]["throughput"]["value"]
    assert throughput == pytest.approx(2 * 1000 / value.value)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_baseline_alone_has_a_ratio_of_exactly_one(digits: Digits, tmp_path: Path) -> None:
    found = timed(digits, linear(digits, tmp_path / "base"), None, tmp_path)

    assert found["metrics"]["latency"]["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found["metrics"]["latency"]["delta"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert found["measured_ratio"]["low"] < found["measured_ratio"]["high"]


@pytest.mark.parametrize(("threads", "stopped"), [(1, False), (2, True)])
def test_spinning_is_stopped_where_sessions_have_threads_of_their_own(digits: Digits, tmp_path: Path, threads: int, stopped: bool) -> None:
    model = linear(digits, tmp_path / "m", settings=SessionSettings(intra_op_num_threads=threads))

    assert timed(digits, model, None, tmp_path)["spinning_stopped"] is stopped


def test_fresh_sessions_go_on_with_the_next_feed(digits: Digits, tmp_path: Path) -> None:
    model = linear(digits, tmp_path / "m")
    side = stages._Side(model, {"x": digits.images}, [0, 1, 2], 1, stop_spinning=False)

    first, second = side.open(), side.open()
    results = [run()[0][0] for run in (first, first, second, second)]  # type: ignore[index]

    expected = digits.images @ digits.weight + digits.bias
    for result, row in zip(results, [0, 1, 2, 0], strict=True):
        assert result == pytest.approx(expected[row], abs=1e-4)


def test_what_was_seen_of_the_machine_stands_beside_the_runs_and_in_the_facts(digits: Digits, tmp_path: Path) -> None:
    model = linear(digits, tmp_path / "m")

    found = timed(digits, model, model, tmp_path)

    with np.load(tmp_path / "latency.npz") as kept:
        assert kept["load_wall_s"].shape == kept["load_waiting_s"].shape == kept["used"].shape == kept["disturbed"].shape == (found["rounds"],)
        assert kept["load_wall_s"].sum() <= found["elapsed_s"]
        assert kept["used"].sum() == found["rounds_used"]
        assert kept["disturbed"].sum() == found["rounds_disturbed"]
    assert found["machine"]["cpus"] >= 1
    assert found["machine"]["foreign_share"] == found["foreign_load"]


def test_a_candidate_above_its_limit_is_not_timed_to_the_end(digits: Digits, tmp_path: Path) -> None:
    model = linear(digits, tmp_path / "m")
    limit = {"of": "ratio", "limit": 0.01, "why": "latency <= 0.01x"}

    found = timed(digits, model, model, tmp_path, limits=[limit], max_time_ns=20_000_000_000, min_runs=10**9)
    alone = timed(digits, model, None, tmp_path, limits=[limit])

    assert (found["stopped_by"], found["stopped_why"]) == ("limit", "latency <= 0.01x")
    assert found["session_pairs"] >= 8
    assert alone["stopped_by"] != "limit"  # the baseline has no limits


@pytest.mark.parametrize(
    ("protocol", "metric", "words"),
    [
        ({"pattern": "paced", "interval_ns": 2_000_000}, "latency", "one every 2 ms"),
        ({"pattern": "cold"}, "latency", "each the first of a fresh session"),
        ({"clock": "cpu"}, "latency", "CPU time"),
        ({"concurrency": 2}, "throughput", "2 threads on one session"),
    ],
)
def test_a_declared_way_of_timing_is_followed_and_named(digits: Digits, tmp_path: Path, protocol: dict[str, Any], metric: str, words: str) -> None:
    model = linear(digits, tmp_path / "m")

    found = timed(digits, model, model, tmp_path, **protocol)

    assert found["verdict"] == "ok"
    assert words in found["metrics"][metric]["method"]
    assert found["metrics"][metric]["value"] > 0
    assert found["protocol"] == {**found["protocol"], **protocol}


def test_cpu_time_is_refused_where_it_is_not_the_time_of_a_run(digits: Digits, tmp_path: Path) -> None:
    threads = linear(digits, tmp_path / "m", settings=SessionSettings(intra_op_num_threads=2))

    with pytest.raises(ConfigError, match=r"CPU time counts runs on one thread only; got 2 threads, sequential\. Write `clock: wall`"):
        timed(digits, threads, linear(digits, tmp_path / "base"), tmp_path, clock="cpu")
