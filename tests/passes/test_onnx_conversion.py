"""OnnxConversion on networks small enough to export in moments, by both exporters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from autotune.errors import PassConfigError, PassError
from autotune.model import IoContract, ONNXModelHandler, PyTorchModelHandler, TensorSpec
from autotune.passes.onnx_conversion import OnnxConversion
from autotune.session import SessionSettings, create_session
from autotune.target import AcceleratorSpec

CPU = AcceleratorSpec()
NETS = '''
import torch
from torch import nn


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, pixels):
        return self.out(torch.relu(self.norm(self.conv(pixels))).mean((2, 3)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 6), nn.Linear(6, 2)

    def forward(self, ids, positions=None, mask=None):
        weights = mask.unsqueeze(-1).float()
        vectors = self.table(ids) * weights
        return {"tokens": self.out(vectors), "pooled": vectors.sum(1) / weights.sum(1).clamp(min=1)}


class Frozen(nn.Module):
    """Tracing takes the length of the second axis for a constant."""

    def forward(self, x):
        return x.flatten(1) + torch.arange(int(x.shape[1]) * 8)


class Branches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x - 1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.layer(x)


class Weighted(nn.Module):
    """Numbers among the defaults, which tracing would make inputs of."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, first, second, share=2.0, keep=0):
        return self.out(first * share) - second[:, keep:]


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def build(kind):
    torch.manual_seed(0)
    return kind()


def images(): return build(Images)
def tokens(): return build(Tokens)
def frozen(): return build(Frozen)
def branches(): return build(Branches)
def attention(): return build(Attention)
def weighted(): return build(Weighted)
def wide(): return build(lambda: nn.Linear(64, 32))
def noise(): return build(Noise)
'''
PIXELS = IoContract((TensorSpec("pixels", "float32", ("batch", 1, 8, 8)),), (TensorSpec("logits", "float32", None),))
IDS = IoContract((TensorSpec("ids", "int64", ("batch", "length")), TensorSpec("mask", "int64", ("batch", "length"))))
ROWS = IoContract((TensorSpec("x", "float32", ("batch", "time", 8)),))
EXPORTERS = pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def network(folder: Path, loader: str, io: IoContract) -> PyTorchModelHandler:
    script = folder / "nets.py"
    script.write_text(NETS)
    (folder / "weights").mkdir(exist_ok=True)
    return PyTorchModelHandler(folder=folder / "weights", io=io, script=script, loader=loader, session=SessionSettings(intra_op_num_threads=1))


def convert(model: PyTorchModelHandler, output: Path, **config: object) -> ONNXModelHandler:
    output.mkdir()
    result = OnnxConversion(CPU, config).run(model, output)
    assert isinstance(result, ONNXModelHandler)
    return result


@EXPORTERS
def test_the_graph_computes_what_the_module_does_at_any_batch_size(tmp_path: Path, exporter: str) -> None:
    model = network(tmp_path, "images", PIXELS)

    result = convert(model, tmp_path / "out", exporter=exporter)

    assert result.io == IoContract((TensorSpec("pixels", "float32", ("batch", 1, 8, 8)),), (TensorSpec("logits", "float32", ("batch", 3)),))
    assert (result.opset, result.session) == (18, model.session)
    pixels = np.random.default_rng(0).normal(size=(7, 1, 8, 8)).astype(np.float32)
    actual = create_session(result.path, result.session).run(None, {"pixels": pixels})[0]
    with torch.no_grad():
        expected = model.load()(torch.from_numpy(pixels)).numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert result.notes["largest_error"] < 1e-5
    assert result.notes["other_sizes_checked"] is True


@EXPORTERS
def test_inputs_go_in_by_name_and_outputs_keep_their_keys(tmp_path: Path, exporter: str) -> None:
    result = convert(network(tmp_path, "tokens", IDS), tmp_path / "out", exporter=exporter)

    assert [(s.name, s.shape) for s in result.io.inputs] == [("ids", ("batch", "length")), ("mask", ("batch", "length"))]
    assert [(s.name, s.shape) for s in result.io.outputs] == [("tokens", ("batch", "length", 2)), ("pooled", ("batch", 6))]


def test_an_order_other_than_that_of_forward_feeds_each_input_its_own(tmp_path: Path) -> None:
    io = IoContract((TensorSpec("second", "float32", ("batch", 2)), TensorSpec("first", "float32", ("batch", 3))))
    model = network(tmp_path, "weighted", io)

    result = convert(model, tmp_path / "out")

    rng = np.random.default_rng(0)
    feed = {"second": rng.random((4, 2), np.float32), "first": rng.random((4, 3), np.float32)}
    with torch.no_grad():
        expected = model.load()(**{n: torch.from_numpy(a) for n, a in feed.items()}).numpy()
    np.testing.assert_allclose(create_session(result.path, result.session).run(None, feed)[0], expected, atol=1e-6)
    assert {i.name for i in result.load().graph.initializer} >= {"out.weight", "out.bias"}


@EXPORTERS
def test_weights_above_a_size_lie_in_one_file_beside_the_model(tmp_path: Path, exporter: str) -> None:
    io = IoContract((TensorSpec("x", "float32", ("batch", 64)),))
    model = network(tmp_path, "wide", io)
    weight_bytes = 4 * (64 * 32 + 32)

    outside = convert(model, tmp_path / "outside", exporter=exporter, external_data_above=weight_bytes - 1)
    inside = convert(model, tmp_path / "inside", exporter=exporter, external_data_above=weight_bytes)

    x = np.random.default_rng(0).random((3, 64), np.float32)
    np.testing.assert_array_equal(*(create_session(r.path, r.session).run(None, {"x": x})[0] for r in (outside, inside)))
    assert sorted(p.name for p in outside.folder.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert [p.name for p in inside.folder.iterdir()] == ["model.onnx"]
    assert (outside.notes["external_data"], inside.notes["external_data"]) == (True, False)


def test_dynamic_shapes_name_axes_and_their_ranges(tmp_path: Path) -> None:
    shapes = {"x": [{"name": "rows", "min": 2, "max": 8}, "length", None]}

    result = convert(network(tmp_path, "frozen", ROWS), tmp_path / "out", dynamic_shapes=shapes)

    assert [s.shape for s in result.io.inputs] == [("rows", "length", 8)]
    assert (result.notes["exporter"], result.notes["other_sizes_checked"]) == ("dynamo", True)


@EXPORTERS
def test_the_same_module_gives_the_same_bytes_in_one_file_that_names_no_path(tmp_path: Path, exporter: str) -> None:
    model = network(tmp_path, "images", PIXELS)

    first = convert(model, tmp_path / "first", exporter=exporter)
    second = convert(model, tmp_path / "second", exporter=exporter)

    assert first.digest == second.digest
    assert [p.name for p in first.folder.iterdir()] == ["model.onnx"]
    content = first.path.read_bytes()
    assert str(tmp_path).encode() not in content
    assert b".py" not in content


@EXPORTERS
@pytest.mark.parametrize("opset", [18, 20])
def test_the_opset_asked_for_is_the_opset_written(tmp_path: Path, exporter: str, opset: int) -> None:
    assert convert(network(tmp_path, "images", PIXELS), tmp_path / "out", exporter=exporter, target_opset=opset).opset == opset


def test_an_opset_beyond_the_exporter_is_refused_before_any_run() -> None:
    with pytest.raises(PassConfigError, match="target_opset must be from 18 to 28 with exporter 'dynamo'; got 17"):
        OnnxConversion(CPU, {"exporter": "dynamo", "target_opset": 17})
    with pytest.raises(PassConfigError, match="target_opset must be from 7 to 23 with exporter 'torchscript'; got 24"):
        OnnxConversion(CPU, {"exporter": "torchscript", "target_opset": 24})
    with pytest.raises(PassConfigError, match="must be from 18 to 28 with exporter 'dynamo', which dynamic_shapes need; got 17"):
        OnnxConversion(CPU, {"dynamic_shapes": {}, "target_opset": 17})
    assert OnnxConversion(CPU, {"target_opset": 17}).config["target_opset"] == 17


def test_axes_are_named_for_the_exporter_that_is_used_and_once() -> None:
    with pytest.raises(PassConfigError, match="dynamic_shapes is for exporter 'dynamo'; got exporter 'torchscript'"):
        OnnxConversion(CPU, {"exporter": "torchscript", "dynamic_shapes": {}})
    with pytest.raises(PassConfigError, match="axes must be named once; got dynamic_axes and dynamic_shapes"):
        OnnxConversion(CPU, {"dynamic_axes": {}, "dynamic_shapes": {}})


@EXPORTERS
def test_dynamic_axes_may_be_named_and_the_others_stay_fixed(tmp_path: Path, exporter: str) -> None:
    model = network(tmp_path, "tokens", IDS)
    axes = {"ids": {0: "rows"}, "mask": {"0": "rows"}}  # keys from JSON are texts

    result = convert(model, tmp_path / "out", exporter=exporter, dynamic_axes=axes, input_shapes={"ids": [2, 5], "mask": [2, 5]})

    assert [s.shape for s in result.io.inputs] == [("rows", 5), ("rows", 5)]


def test_no_dynamic_axes_fix_every_size(tmp_path: Path) -> None:
    result = convert(network(tmp_path, "images", PIXELS), tmp_path / "out", dynamic_axes={}, input_shapes=[[3, 1, 8, 8]])

    assert result.io.inputs[0].shape == (3, 1, 8, 8)
    assert result.io.outputs[0].shape == (3, 3)
    assert result.notes["other_sizes_checked"] is False


def test_an_axis_fixed_without_a_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="axis 0 of 'pixels' must have a size when dynamic_axes leaves it fixed"):
        convert(network(tmp_path, "images", PIXELS), tmp_path / "out", dynamic_axes={})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dynamic_axes": {"pixel": {0: "n"}}}, "dynamic_axes must name inputs of the model; got 'pixel'. Did you mean 'pixels'?"),
        ({"dynamic_axes": {"pixels": {4: "n"}}}, "dynamic_axes of 'pixels' must be from 0 to 3; got 4"),
        ({"dynamic_shapes": {"pixels": {0: {"least": 2}}}}, "an axis in dynamic_shapes of 'pixels' takes name, min and max; got 'least'"),
        ({"dynamic_shapes": {"pixels": {0: {"min": 9, "max": 3}}}}, "whole numbers from 1 on, min below max; got min 9, max 3"),
        ({"input_shapes": {"pixel": [1, 1, 8, 8]}}, "input_shapes must name inputs of the model; got 'pixel'. Did you mean 'pixels'?"),
        ({"input_shapes": [1, 8, 8]}, "input 'pixels' has 4 axes; got shape [1, 8, 8]"),
        ({"input_shapes": [[1, 1, 8, 8], [1]]}, "input_shapes must hold one shape for each input (pixels); got 2 shapes"),
        ({"input_shapes": [2, 3, 8, 8]}, "the module must run on pixels [2, 3, 8, 8]; got RuntimeError"),
    ],
)
def test_wrong_axes_and_shapes_are_refused_in_words(tmp_path: Path, config: dict[str, object], message: str) -> None:
    with pytest.raises(PassError) as caught:
        convert(network(tmp_path, "images", PIXELS), tmp_path / "out", **config)

    assert message in str(caught.value)


def test_output_names_must_be_as_many_as_the_outputs(tmp_path: Path) -> None:
    io = IoContract(IDS.inputs, (TensorSpec("only", "float32", None),))

    with pytest.raises(PassError, match="outputs must name each of the 2 tensors that the module returns; got only"):
        convert(network(tmp_path, "tokens", io), tmp_path / "out")


def test_a_size_frozen_by_tracing_is_found_and_dynamo_follows_it(tmp_path: Path) -> None:
    model = network(tmp_path, "frozen", ROWS)

    with pytest.raises(PassError, match=r"must run on other sizes of its dynamic axes.*Try exporter 'dynamo'"):
        convert(model, tmp_path / "traced")
    assert convert(model, tmp_path / "exported", exporter="dynamo").notes["other_sizes_checked"] is True


def test_a_branch_frozen_by_tracing_is_noted(tmp_path: Path) -> None:
    result = convert(network(tmp_path, "branches", ROWS), tmp_path / "out")

    assert any("Python boolean" in text for text in result.notes["traced_as_constant"])


def test_an_exporter_that_can_not_follow_says_so_and_names_the_other(tmp_path: Path) -> None:
    with pytest.raises(PassError, match=r"dynamo must be able to export the module.*data-dependent.*Try exporter 'torchscript'"):
        convert(network(tmp_path, "branches", ROWS), tmp_path / "out", exporter="dynamo")


def test_fused_attention_is_exported_as_plain_operators(tmp_path: Path) -> None:
    io = IoContract((TensorSpec("x", "float32", (2, 5, 8)),))
    before = torch.backends.mha.get_fastpath_enabled()

    result = convert(network(tmp_path, "attention", io), tmp_path / "out")

    assert "Softmax" in {n.op_type for n in onnx.load(str(result.path)).graph.node}
    assert torch.backends.mha.get_fastpath_enabled() is before


def test_a_graph_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PassError, match=r"must be the module's within 0.001 of its largest magnitude on the traced shapes; got an error of"):
        convert(network(tmp_path, "noise", ROWS), tmp_path / "out")


@EXPORTERS
def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder, exporter: str) -> None:
    convert(network(tmp_path, "images", PIXELS), tmp_path / "out", exporter=exporter)

    assert capfd.readouterr() == ("", "")
    assert len(recwarn) == 0
