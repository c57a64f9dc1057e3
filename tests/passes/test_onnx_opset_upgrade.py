from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import PassError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_opset_upgrade import OnnxOpsetUpgrade
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight, run

SPEC = AcceleratorSpec()
IMAGES = ("batch", 4, 8, 8)
X = np.random.default_rng(0).standard_normal((2, 4, 8, 8)).astype(np.float32)
node = helper.make_node


def constant(name: str, *values: float, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def upgrade(model: ONNXModelHandler, folder: Path, target: int, **config: Any) -> ONNXModelHandler:
    folder.mkdir()
    return OnnxOpsetUpgrade(SPEC, {"target_opset": target, **config}).run(model, folder)  # type: ignore[return-value] # an ONNX pass


def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info("t", TensorProto.FLOAT, None)])


NORMALIZED = [constant("scale", 1, 2, 3, 4), constant("shift", 0, 1, 0, 1), constant("mean", 0, 1, 2, 3), constant("variance", 1, 2, 3, 4)]
CHOICE = [
    node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0), node("Greater", ["sum", "zero"], ["positive"], "greater"),
    node(
        "If", ["positive"], ["y"], "if", then_branch=branch("then", node("ReduceSum", ["x"], ["t"], "inner", axes=[1])),
        else_branch=branch("else", node("ReduceMax", ["x"], ["t"], "other", axes=[1])),
    ),
]  # fmt: skip
# Operators whose meaning or form changed between the opset given and 21.
CHANGED = {
    "softmax over the flattened rest": (11, [node("Softmax", ["x"], ["y"], "s")], []),
    "clip with limits as attributes": (9, [node("Clip", ["x"], ["y"], "c", min=0.1, max=0.5)], []),
    "normalization and dropout of old": (
        7, [node("BatchNormalization", ["x", "scale", "shift", "mean", "variance"], ["n"], "bn"), node("Dropout", ["n"], ["y"], "d", ratio=0.5)],
        NORMALIZED,
    ),
    "nearest upsampling": (9, [node("Upsample", ["x", "scales"], ["y"], "u")], [constant("scales", 1, 1, 2, 2)]),
    "linear upsampling": (9, [node("Upsample", ["x", "scales"], ["y"], "u", mode="linear")], [constant("scales", 1, 1, 2, 2)]),
    "linear resize": (10, [node("Resize", ["x", "scales"], ["y"], "r", mode="linear")], [constant("scales", 1, 1, 2, 2)]),
    "resize with a fraction": (10, [node("Resize", ["x", "scales"], ["y"], "r")], [constant("scales", 1, 1, 1.6, 1.6)]),
    "axes in branches": (11, CHOICE, [numpy_helper.from_array(np.array(0, np.float32), "zero")]),
    "pad and slice with attributes": (
        9, [node("Pad", ["x"], ["p"], "p", pads=[0, 0, 1, 1, 0, 0, 1, 1]), node("Slice", ["p"], ["y"], "s", starts=[1], ends=[3], axes=[1])], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_operators_that_changed_compute_the_same_afterwards(name: str, tmp_path: Path) -> None:
    opset, nodes, weights = CHANGED[name]
    model = handler(tmp_path / "in", nodes, weights, x=IMAGES, y=(None,) * 4, opset=opset, ir_version=7)  # type: ignore[arg-type] # unknown sizes
    before = model.digest

    result = upgrade(model, tmp_path / "out", 21)

    assert result.opset == 21
    assert result.io == model.io
    for x in (X, -np.abs(X)):
        np.testing.assert_allclose(run(result, x=x), run(model, x=x), rtol=1e-5, atol=1e-6)
    assert result.notes["redefined_operators"]
    assert 0 < result.notes["redefined_share"] <= 1
    assert ONNXModelHandler.from_folder(model.folder).digest == before


def test_other_domains_and_functions_of_the_model_stay(tmp_path: Path) -> None:
    nodes = [
        node("Gelu", ["x"], ["g"], "gelu", domain="com.microsoft"),
        node("Twice", ["g"], ["s"], "f", domain="own"),
        node("Softmax", ["s"], ["y"], "s"),
    ]
    model = handler(tmp_path / "in", nodes, x=IMAGES, y=IMAGES, opset=11, ir_version=8, domains={"com.microsoft": 1, "own": 1})
    proto = model.load()
    body = [node("Add", ["a", "a"], ["b"])]
    proto.functions.append(helper.make_function("own", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 11)]))
    proto.metadata_props.add(key="author", value="somebody")
    onnx.save(proto, str(model.path))
    model = ONNXModelHandler.from_folder(model.folder)

    result = upgrade(model, tmp_path / "out", 17)

    assert {o.domain: o.version for o in result.load().opset_import} == {"": 17, "com.microsoft": 1, "own": 1}
    assert result.load().metadata_props[0].value == "somebody"
    np.testing.assert_allclose(run(result, x=X), run(model, x=X), rtol=1e-5, atol=1e-6)


def test_weights_keep_their_bytes_and_their_order(tmp_path: Path) -> None:
    weights = [random_weight("large", 64, 64), constant("b", *range(64)), random_weight("larger", 64, 128, seed=1)]
    nodes = [node("MatMul", ["x", "large"], ["m"], "m"), node("Add", ["m", "b"], ["a"], "a"), node("MatMul", ["a", "larger"], ["y"], "n")]
    model = handler(tmp_path / "in", nodes, weights, x=("batch", 64), y=("batch", 128), opset=13)

    result = upgrade(model, tmp_path / "out", 21)

    kept = {t.name: t.SerializeToString() for t in result.load().graph.initializer}
    assert kept == {t.name: t.SerializeToString() for t in weights}
    assert list(kept) == ["large", "b", "larger"]


def test_an_operator_without_adapter_is_named(tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [node("ThresholdedRelu", ["x"], ["y"], "t", alpha=1.0)], x=IMAGES, y=IMAGES, opset=9, ir_version=7)

    with pytest.raises(PassError, match="no adapter for ThresholdedRelu 9 -> 10"):
        upgrade(model, tmp_path / "out", 13)


def test_a_conversion_that_computes_something_else_is_refused_and_its_operator_named(tmp_path: Path) -> None:
    model = handler(
        tmp_path / "in",
        [node("Relu", ["x"], ["r"], "relu"), node("Hardmax", ["r"], ["y"], "hard", axis=1)],
        x=IMAGES,
        y=IMAGES,
        opset=11,
        ir_version=7,
    )

    with pytest.raises(PassError, match=r"computes something else.*Hardmax \(node 'hard'\) differs first"):
        upgrade(model, tmp_path / "out", 13)


def test_a_model_that_is_there_already_comes_back_as_it_was(tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [node("Relu", ["x"], ["y"], "r")], opset=17)

    result = upgrade(model, tmp_path / "out", 17)

    assert result.digest == model.digest
    assert result.notes["reason"] == "the model is at opset 17 already"


@pytest.mark.parametrize(("target", "told"), [(13, "later opsets only"), (999, "the installed onnx knows")])
def test_targets_that_cannot_be_reached_are_refused(target: int, told: str, tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [node("Relu", ["x"], ["y"], "r")], opset=17)

    with pytest.raises(PassError, match=told):
        upgrade(model, tmp_path / "out", target)


def test_real_rows_are_compared_where_made_up_ones_do_not_fit(tmp_path: Path) -> None:
    nodes = [node("Reshape", ["x", "shape"], ["r"], "r"), node("Softmax", ["r"], ["y"], "s")]
    model = handler(tmp_path / "in", nodes, [constant("shape", -1, 7, dtype=np.int64)], x=("length",), y=("rows", 7), opset=13)
    np.savez(tmp_path / "rows.npz", x=np.ones((3, 14), np.float32))

    with pytest.raises(PassError, match="Give calibration data"):
        upgrade(model, tmp_path / "without", 21)
    result = upgrade(model, tmp_path / "with", 21, compare_data_dir=str(tmp_path / "rows.npz"))

    assert result.notes["compared_on"] == "real rows (2 runs)"


def test_a_model_that_does_not_run_is_refused_with_the_cause(tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [node("SecretSauce", ["x"], ["y"], "s", domain="acme")], opset=13, domains={"acme": 1})

    with pytest.raises(PassError, match=r"must run.*SecretSauce"):
        upgrade(model, tmp_path / "out", 17)


def test_random_outputs_do_not_stop_a_conversion(tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [node("RandomNormalLike", ["x"], ["n"], "n"), node("Add", ["x", "n"], ["y"], "a")], opset=13)

    assert upgrade(model, tmp_path / "out", 17).opset == 17
