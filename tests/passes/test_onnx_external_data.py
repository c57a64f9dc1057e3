from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from autotune.errors import PassConfigError, PassError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_external_data import OnnxExternalData
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight, run

SPEC = AcceleratorSpec()
X = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
node = helper.make_node


def lay(model: ONNXModelHandler, folder: Path, **config: Any) -> ONNXModelHandler:
    folder.mkdir()
    return OnnxExternalData(SPEC, config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def network(folder: Path) -> ONNXModelHandler:
    """Two weights of 4096 bytes, one of them in a Constant node, and a bias of 128."""
    nodes = [
        node("Constant", [], ["v"], "constant", value=random_weight("", 32, 32, seed=1)),
        node("MatMul", ["x", "w"], ["m"], "m"), node("Add", ["m", "b"], ["a"], "a"), node("MatMul", ["a", "v"], ["y"], "n"),
    ]  # fmt: skip
    return handler(folder, nodes, [random_weight("w", 32, 32), random_weight("b", 32)], x=("batch", 32), y=("batch", 32))


def files(model: ONNXModelHandler) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in sorted(model.folder.iterdir())}


def outside(model: ONNXModelHandler) -> dict[str, str]:
    proto = onnx.load(str(model.path), load_external_data=False)
    return {t.name: t.external_data[0].value for t in proto.graph.initializer if uses_external_data(t)}


def test_large_weights_lie_beside_the_model_those_in_constant_nodes_too(tmp_path: Path) -> None:
    model = network(tmp_path / "in")
    before = model.digest

    result = lay(model, tmp_path / "out")

    assert outside(result) == {"w": "model.onnx.data", "v": "model.onnx.data"}
    assert files(result)["model.onnx.data"] == 8192
    assert files(result)["model.onnx"] < 1024
    assert {k: result.notes[k] for k in ("weights_outside", "bytes_outside", "constants_lifted", "data_files")} == {
        "weights_outside": 2, "bytes_outside": 8192, "constants_lifted": 1, "data_files": 1,
    }  # fmt: skip
    np.testing.assert_array_equal(run(result, x=X), run(model, x=X))
    assert ONNXModelHandler.from_folder(model.folder).digest == before


def test_the_folder_can_move_and_holds_no_links(tmp_path: Path) -> None:
    model = network(tmp_path / "in")
    expected = run(model, x=X)
    result = lay(model, tmp_path / "out", file_name="weights.bin")
    shutil.rmtree(model.folder)

    moved = ONNXModelHandler.from_folder(Path(shutil.move(result.folder, tmp_path / "elsewhere")))

    np.testing.assert_array_equal(run(moved, x=X), expected)
    assert files(moved).keys() == {"model.onnx", "weights.bin"}
    assert all(not p.is_symlink() and p.stat().st_nlink == 1 for p in moved.folder.iterdir())


def test_each_weight_can_have_a_file_of_its_own(tmp_path: Path) -> None:
    result = lay(network(tmp_path / "in"), tmp_path / "out", one_file=False)

    assert outside(result) == {"w": "model.onnx.data.0", "v": "model.onnx.data.1"}
    np.testing.assert_array_equal(run(result, x=X), run(network(tmp_path / "again"), x=X))


def test_weights_come_back_into_one_file_below_the_threshold(tmp_path: Path) -> None:
    model = network(tmp_path / "in")
    scattered = lay(model, tmp_path / "scattered", one_file=False)

    result = lay(scattered, tmp_path / "out", size_threshold=1_000_000)

    assert list(files(result)) == ["model.onnx"]
    assert result.notes["changed"] is True
    np.testing.assert_array_equal(run(result, x=X), run(model, x=X))


def test_a_model_without_large_weights_comes_back_as_it_was(tmp_path: Path) -> None:
    model = network(tmp_path / "in")

    result = lay(model, tmp_path / "out", size_threshold=5000)

    assert result.digest == model.digest
    assert result.notes["reason"] == "no weight has 5000 bytes or more; the largest has 4096"


def test_a_layout_that_is_there_already_is_left_alone(tmp_path: Path) -> None:
    first = lay(network(tmp_path / "in"), tmp_path / "first")

    second = lay(first, tmp_path / "second")

    assert second.digest == first.digest
    assert second.notes["reason"] == "the weights lie as asked already"


def test_weights_of_branches_go_outside_too(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("t", TensorProto.FLOAT, ["batch", 32])
    graphs = [
        helper.make_graph([node("MatMul", ["x", "u"], ["t"], "m")], name, [], [value], [random_weight("u", 32, 32, seed=seed)])
        for seed, name in enumerate(("then", "else"))
    ]
    nodes = [
        node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0), node("Greater", ["sum", "zero"], ["positive"], "greater"),
        node("If", ["positive"], ["y"], "if", then_branch=graphs[0], else_branch=graphs[1]),
    ]  # fmt: skip
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    model = handler(tmp_path / "in", nodes, [zero], x=("batch", 32), y=("batch", 32))

    result = lay(model, tmp_path / "out")

    assert files(result)["model.onnx.data"] == 8192
    for x in (np.abs(X), -np.abs(X)):
        np.testing.assert_array_equal(run(result, x=x), run(model, x=x))


def test_missing_data_is_told(tmp_path: Path) -> None:
    first = lay(network(tmp_path / "in"), tmp_path / "first")
    (first.folder / "model.onnx.data").unlink()

    with pytest.raises(PassError, match="external data must be readable"):
        lay(ONNXModelHandler.from_folder(first.folder), tmp_path / "out", one_file=False)


@pytest.mark.parametrize("name", ["", "../weights", "/tmp/weights", "folder/weights", "model.onnx", "a\\b", "..", "new\nline"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(PassConfigError, match="plain file name"):
        OnnxExternalData(SPEC, {"file_name": name})


@pytest.mark.slow
def test_a_model_beyond_two_gigabytes_is_laid_out_anew(tmp_path: Path) -> None:
    size = 1 << 30
    weights = []
    with (tmp_path / "parts").open("wb") as data:
        data.truncate(2 * size + 4096)  # a file with holes: it takes no room
    for index in range(2):
        tensor = onnx.TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[32, size // 128], data_location=TensorProto.EXTERNAL)
        for key, value in {"location": "parts", "offset": index * size, "length": size}.items():
            tensor.external_data.add(key=key, value=str(value))
        weights.append(tensor)
    nodes = [
        node("MatMul", ["x", "w0"], ["a"], "m"), node("MatMul", ["x", "w1"], ["b"], "n"), node("Add", ["a", "b"], ["s"], "s"),
        node("ReduceSum", ["s", "axes"], ["y"], "r"),
    ]  # fmt: skip
    weights.append(numpy_helper.from_array(np.array([1], np.int64), "axes"))
    model = handler(tmp_path / "in", nodes, weights, x=("batch", 32), y=("batch", 1))
    shutil.move(tmp_path / "parts", model.folder / "parts")

    result = lay(ONNXModelHandler.from_folder(model.folder), tmp_path / "out", one_file=False)

    assert files(result)["model.onnx.data.0"] == files(result)["model.onnx.data.1"] == size
    assert not run(result, x=X).any()
    with pytest.raises(PassError, match="Lower size_threshold"):
        lay(result, tmp_path / "whole", size_threshold=2 * size)
