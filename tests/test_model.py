"""Model handlers: self-contained folders, contracts, digests, and what is refused on the way in."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from autotune.errors import ConfigError
from autotune.model import (
    IoContract,
    ONNXModelHandler,
    PyTorchModelHandler,
    TensorSpec,
    handler_from_json,
    ingest_onnx,
    load_object,
    read_onnx_head,
)
from autotune.session import SessionSettings

WEIGHTS = np.arange(6, dtype=np.float32).reshape(3, 2)

SCRIPT = """
import torch

def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))

def make_nothing():
    return 7
"""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def proto() -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3]), helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [onnx.numpy_helper.from_array(WEIGHTS, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def saved(folder: Path, name: str = "model.onnx", *, location: str = "") -> Path:
    """Write the small model, with its weights in a file of their own when `location` names one."""
    folder.mkdir(parents=True, exist_ok=True)
    if location:
        onnx.save(proto(), str(folder / name), save_as_external_data=True, location=location, size_threshold=0)
    else:
        onnx.save(proto(), str(folder / name))
    return folder / name


def moved_data(path: Path, location: str) -> Path:
    """Make the model at `path` say that its weights lie somewhere else."""
    model = onnx.load(str(path), load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(model.SerializeToString())
    return path


def output_of(folder: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.ones((1, 3), np.float32)})
    return np.asarray(result)


# ---- reading


def test_the_contract_holds_real_inputs_only_and_keeps_symbolic_axes(tmp_path: Path) -> None:
    io, opset = read_onnx_head(saved(tmp_path))

    assert io == IoContract((TensorSpec("x", "float32", ("n", 3)),), (TensorSpec("y", "float32", ("n", 2)),))
    assert opset == 17


def test_the_head_is_read_without_the_weights(tmp_path: Path) -> None:
    path = saved(tmp_path, location="weights.bin")
    (tmp_path / "weights.bin").unlink()

    assert read_onnx_head(path)[1] == 17


def test_what_is_no_onnx_model_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("hello, I am no model")
    (tmp_path / "empty.onnx").write_bytes(b"")

    with pytest.raises(ConfigError, match="must exist"):
        read_onnx_head(tmp_path / "missing.onnx")
    for name in ("text.onnx", "empty.onnx"):
        with pytest.raises(ConfigError, match="ONNX model") as caught:
            read_onnx_head(tmp_path / name)
        assert name in str(caught.value)


def test_axes_without_a_name_and_shapes_unknown_are_none(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    onnx.save(helper.make_model(graph), str(tmp_path / "model.onnx"))

    io, _ = read_onnx_head(tmp_path / "model.onnx")

    assert (io.inputs[0].shape, io.outputs[0].shape) == ((None, 3), None)


# ---- ingest


def test_a_model_is_copied_under_its_fixed_name(tmp_path: Path) -> None:
    source = saved(tmp_path / "user", "net.onnx")
    (tmp_path / "run").mkdir()

    handler = ingest_onnx(source, tmp_path / "run")

    assert handler.path == tmp_path / "run" / "model.onnx"
    assert handler.path.read_bytes() == source.read_bytes()


def test_external_data_comes_along_from_its_own_folder(tmp_path: Path) -> None:
    source = saved(tmp_path / "user", "net.onnx", location="net.onnx.data")
    before = source.read_bytes()
    (tmp_path / "run").mkdir()

    handler = ingest_onnx(source, tmp_path / "run")
    (tmp_path / "user" / "net.onnx.data").unlink()

    assert output_of(handler.folder).tolist() == [WEIGHTS.sum(axis=0).tolist()]
    assert source.read_bytes() == before


def test_a_cache_of_links_is_resolved_into_real_files(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    saved(blobs, "aaaa", location="bbbb")
    moved_data(blobs / "aaaa", "model.onnx_data")
    snapshot.mkdir()
    (snapshot / "model.onnx").symlink_to(blobs / "aaaa")
    (snapshot / "model.onnx_data").symlink_to(blobs / "bbbb")
    (tmp_path / "run").mkdir()

    handler = ingest_onnx(snapshot / "model.onnx", tmp_path / "run")

    assert sorted(p.name for p in handler.folder.iterdir()) == ["model.onnx", "model.onnx_data"]
    assert not any(p.is_symlink() for p in handler.folder.iterdir())
    assert output_of(handler.folder).tolist() == [WEIGHTS.sum(axis=0).tolist()]


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/hostname", "sub/../../outside.bin"])
def test_external_data_outside_the_models_folder_is_refused(tmp_path: Path, location: str) -> None:
    source = saved(tmp_path / "user", location="w.bin")
    (tmp_path / "outside.bin").write_bytes(b"\0" * 24)
    (tmp_path / "run").mkdir()

    with pytest.raises(ConfigError, match="inside the model's folder"):
        ingest_onnx(moved_data(source, location), tmp_path / "run")


def test_a_data_file_that_links_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "user", location="w.bin")
    (tmp_path / "secret").write_bytes(b"\0" * 24)
    (tmp_path / "user" / "w.bin").unlink()
    (tmp_path / "user" / "w.bin").symlink_to(tmp_path / "secret")
    (tmp_path / "run").mkdir()

    with pytest.raises(ConfigError, match="inside the model's folder"):
        ingest_onnx(source, tmp_path / "run")


def test_missing_external_data_is_refused_by_name(tmp_path: Path) -> None:
    source = saved(tmp_path / "user", location="w.bin")
    (tmp_path / "user" / "w.bin").unlink()
    (tmp_path / "run").mkdir()

    with pytest.raises(ConfigError, match=r"no 'w\.bin' beside model\.onnx"):
        ingest_onnx(source, tmp_path / "run")


def test_a_data_file_that_has_the_models_own_name_in_a_run_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "user", "net.onnx", location="model.onnx")
    (tmp_path / "run").mkdir()

    with pytest.raises(ConfigError, match=r"model\.onnx"):
        ingest_onnx(source, tmp_path / "run")


# ---- handlers


def test_a_handler_comes_back_from_json_and_from_a_worker(tmp_path: Path) -> None:
    saved(tmp_path)
    handler = ONNXModelHandler.from_folder(tmp_path, session=SessionSettings(intra_op_num_threads=2), notes={"nodes": 3})

    assert handler_from_json(json.loads(json.dumps(handler.to_json()))) == handler
    assert pickle.loads(pickle.dumps(handler)) == handler


def test_the_digest_is_that_of_every_byte_and_not_of_the_settings(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    saved(tmp_path / "b")
    saved(tmp_path / "c")
    (tmp_path / "c" / "extra").write_bytes(b"x")
    a, b, c = (ONNXModelHandler.from_folder(tmp_path / n) for n in "abc")

    assert a.digest == b.digest == a.with_session(SessionSettings(intra_op_num_threads=2)).digest
    assert c.digest != a.digest
    assert c.size_bytes == a.size_bytes + 1


def test_a_result_keeps_the_session_and_not_the_notes_of_its_input(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    before = ONNXModelHandler.from_folder(tmp_path / "a", session=SessionSettings(intra_op_num_threads=2), notes={"old": 1})
    changed = before.load()
    changed.graph.doc_string = "changed"
    (tmp_path / "b").mkdir()

    after = before.written(tmp_path / "b", proto=changed, notes={"new": 2})

    assert after.load().graph.doc_string == "changed"
    assert before.load().graph.doc_string == ""
    assert (after.session, dict(after.notes)) == (before.session, {"new": 2})


def test_a_torch_model_is_its_loader_and_its_tensors(tmp_path: Path) -> None:
    script = tmp_path / "nets.py"
    script.write_text(SCRIPT)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    fresh = PyTorchModelHandler(folder=tmp_path / "a", script=script, loader="make_model")
    module = fresh.load()
    with torch.no_grad():
        module[0].weight.fill_(0.5)

    stored = handler_from_json(json.loads(json.dumps(fresh.written(tmp_path / "b", module=module).to_json())))

    assert isinstance(stored, PyTorchModelHandler)
    again = stored.load()
    assert not again.training
    assert torch.equal(again(torch.ones(1, 4)), module(torch.ones(1, 4)))
    assert not torch.equal(again(torch.ones(1, 4)), fresh.load()(torch.ones(1, 4)))


def test_a_loader_that_returns_no_module_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "nets.py"
    script.write_text(SCRIPT)

    with pytest.raises(ConfigError, match=r"make_nothing in nets\.py must return a torch\.nn\.Module; got int"):
        PyTorchModelHandler(folder=tmp_path, script=script, loader="make_nothing").load()


def test_weights_that_are_pickled_code_are_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (open, (str(tmp_path / "owned"), "w"))  # type: ignore[return-value] # a pickle may call anything

    script = tmp_path / "nets.py"
    script.write_text(SCRIPT)
    torch.save({"0.weight": Evil()}, tmp_path / "weights.pt")

    with pytest.raises(pickle.UnpicklingError):
        PyTorchModelHandler(folder=tmp_path, script=script, loader="make_model").load()
    assert not (tmp_path / "owned").exists()


# ---- user scripts


def test_a_script_is_run_once_and_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "a_neighbour_of_mine.py").write_text("VALUE = 3\n")
    (tmp_path / "mine.py").write_text("from a_neighbour_of_mine import VALUE\nruns = []\nruns.append(1)\n")
    before = list(sys.path)

    assert load_object(tmp_path / "mine.py", "VALUE", who="test") == 3
    assert load_object(tmp_path / "mine.py", "runs", who="test") is load_object(tmp_path / "mine.py", "runs", who="test")
    assert load_object(tmp_path / "mine.py", "runs", who="test") == [1]
    assert sys.path == before


def test_a_script_that_fails_is_not_half_there_the_next_time(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("first = 1\nraise ValueError('no')\n")

    for _ in range(2):
        with pytest.raises(ConfigError, match=r"must run when it is imported; got ValueError: no \(broken.py:2\)"):
            load_object(tmp_path / "broken.py", "first", who="test")


def test_scripts_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(f"VALUE = {name!r}\n")

    assert [load_object(tmp_path / n / "same.py", "VALUE", who="test") for n in ("a", "b")] == ["a", "b"]


def test_a_missing_script_or_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make_model(): ...\n")

    with pytest.raises(ConfigError, match="the script must exist"):
        load_object(tmp_path / "yours.py", "x", who="test")
    with pytest.raises(ConfigError, match="Did you mean 'make_model'"):
        load_object(tmp_path / "mine.py", "make_modle", who="test")
