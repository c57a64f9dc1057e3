"""OnnxConversion of models that need no script: TorchScript files, torch.export programs, Hugging Face folders, all made here."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray

from autotune.cli import main
from autotune.config import LoadedSweep, parse_sweep
from autotune.errors import AutotuneError, ConfigError, EnvironmentFault, PassError
from autotune.model import (
    TORCH_PROGRAM,
    HuggingFaceModelHandler,
    IoContract,
    ModelHandler,
    ONNXModelHandler,
    TorchProgramHandler,
    handler_from_json,
    ingest_torch,
)
from autotune.passes.onnx_conversion import OnnxConversion
from autotune.passes.torch_sources import describe, error_from, example_rows
from autotune.pipeline import InputFacts, Pipeline
from autotune.session import SessionSettings, create_session
from autotune.target import AcceleratorSpec
from autotune.torch_files import HUGGING_FACE, ONNX_FILE, PROGRAM, TORCHSCRIPT, kind_of, load_huggingface, load_program, source_digest

ONE_THREAD = SessionSettings(intra_op_num_threads=1)
IMAGES = {
    "pixels": np.random.default_rng(0).random((6, 1, 8, 8), np.float32), "scale": np.random.default_rng(1).random((6, 1), np.float32),
}  # fmt: skip
TEXTS = {
    "input_ids": np.random.default_rng(0).integers(5, 30, (6, 12)),
    "attention_mask": (np.arange(12) < np.array([[12], [7], [12], [3], [9], [12]])).astype(np.int64),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 3)

    def forward(self, pixels: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        features = torch.relu(self.norm(self.conv(pixels))).mean((2, 3))
        return {"logits": self.out(features) * scale, "features": features}


class Branch(torch.nn.Module):
    """A branch on data, and an argument that is no tensor: what only a scripted module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        if bool(x.sum() > 0):
            return self.out(x) * times
        return self.out(-x)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of torch in files of every kind, good ones and others."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("files")
    net = Net().eval()
    args = (torch.from_numpy(IMAGES["pixels"][:2]), torch.from_numpy(IMAGES["scale"][:2]))
    traced = torch.jit.trace(net, args, strict=False)
    torch.jit.save(traced, folder / "traced.pt")
    torch.jit.save(torch.jit.freeze(traced), folder / "frozen.ts")
    torch.jit.save(torch.jit.script(Branch().eval()), folder / "scripted.pt")
    rows = torch.export.Dim("rows", min=1, max=5)
    torch.export.save(torch.export.export(net, args, dynamic_shapes={"pixels": {0: rows}, "scale": {0: rows}}), folder / "net.pt2")
    torch.save(net.state_dict(), folder / "weights.pt")
    torch.save(net, folder / "pickled.pt")
    torch.save(net.state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.onnx.export(net, args, str(folder / "net.onnx"), dynamo=False)
    (folder / "cut.pt").write_bytes((folder / "traced.pt").read_bytes()[:500])
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier of texts with its tokenizer, as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hub") / "bert"
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=24, num_labels=3,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.mul_(20)  # so that answers differ from row to row
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "quick", "brown", "fox", "jump", "##s", "over", "lazy", "dog", "twice", ".", ","]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_input_names=["input_ids", "attention_mask"]
    ).save_pretrained(folder)
    return folder


def described(path: Path, arrays: Mapping[str, NDArray[Any]]) -> IoContract:
    """What is known of a model before the sweep, or the error that the user reads."""
    args = {"path": str(path), "kind": kind_of(path), "outputs": [], "arrays": {n: [str(a.dtype), list(a.shape)] for n, a in arrays.items()}}
    told = json.loads(json.dumps(describe(args)))
    if "error" in told:
        raise error_from(told["error"])
    return IoContract.from_json(told["io"])


def ingested(path: Path, folder: Path, arrays: Mapping[str, NDArray[Any]]) -> HuggingFaceModelHandler | TorchProgramHandler:
    """The model as a trial gets it: through JSON."""
    io = described(path, arrays) if arrays else IoContract()
    folder.mkdir()
    handler = ingest_torch(path, kind_of(path), folder, io=io, session=ONE_THREAD, examples=example_rows(io, arrays))
    again = handler_from_json(json.loads(json.dumps(handler.to_json())))
    assert isinstance(again, HuggingFaceModelHandler | TorchProgramHandler)
    assert (again, again.digest) == (handler, handler.digest)
    return again


def convert(model: ModelHandler, folder: Path, **config: object) -> ONNXModelHandler:
    folder.mkdir()
    result = OnnxConversion(AcceleratorSpec(), config).run(model, folder)
    assert isinstance(result, ONNXModelHandler)
    return result


def answers(model: ONNXModelHandler, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    return [np.asarray(o) for o in create_session(model.path, model.session).run(None, dict(feed))]


def expected(path: Path, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """What torch itself says."""
    loaded = torch.export.load(path).module() if path.suffix == ".pt2" else torch.jit.load(path)
    with torch.no_grad():
        outputs = loaded(*(torch.from_numpy(a) for a in feed.values()))
    return [o.numpy() for o in (outputs.values() if isinstance(outputs, dict) else [outputs])]


# ---------------------------------------------------------------------------------------------------------------- kinds


def test_kinds_are_told_apart_by_what_is_in_the_file_whatever_its_name(files: Path, bert: Path, tmp_path: Path) -> None:
    renamed = shutil.copyfile(files / "net.pt2", tmp_path / "model.pt")

    kinds = [
        kind_of(p) for p in (files / "traced.pt", files / "frozen.ts", files / "scripted.pt", files / "net.pt2", renamed, bert, files / "net.onnx")
    ]

    assert kinds == [TORCHSCRIPT, TORCHSCRIPT, TORCHSCRIPT, PROGRAM, PROGRAM, HUGGING_FACE, ONNX_FILE]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weights.pt", "weights alone, or a pickled module, are no model that can be read safely; got weights.pt, from torch.save"),
        ("pickled.pt", "weights alone, or a pickled module, are no model that can be read safely; got pickled.pt, from torch.save"),
        ("old.pt", "a pickle is no model that can be read safely; got old.pt, a pickle. Save the module with torch.export.save"),
        ("cut.pt", "the file must be a whole archive; got cut.pt"),
        ("trace.pt", "Did you mean 'traced.pt'?"),
        (".", "a folder that is a model must be one of Hugging Face, with config.json"),
    ],
)
def test_what_is_no_model_is_refused_with_what_to_do(files: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind_of(files / name)

    assert message in str(caught.value)


def test_weights_of_safetensors_point_to_their_folder(bert: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights alone are no model; got model.safetensors.*Name the folder that holds it and its config.json"):
        kind_of(bert / "model.safetensors")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def rewritten(source: Path, target: Path, member: str, change: Any) -> Path:
    """A copy of an archive in which one member was changed by a function of its bytes."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith(member) else content)
    return target


def test_a_program_with_a_pickle_is_refused_and_not_unpickled(files: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    path = rewritten(files / "net.pt2", tmp_path / "trap.pt2", "sample_inputs/model.pt", lambda _: pickle.dumps(Trap(sprung)))

    with pytest.raises(ConfigError, match=r"must hold nothing that runs as Python when it is read; got trap.pt2 with a pickle"):
        load_program(path)

    assert not sprung.exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("L['pixels'].size()[0] == L['scale'].size()[0]", "__import__('os').system('true') == 0"),
        ("torch.ops.aten.relu.default", "torch.os.system"),
        ("Symbol('", "Symbol('os.system(1)"),
    ],
)
def test_a_program_whose_texts_are_more_than_arithmetic_is_refused(files: Path, tmp_path: Path, old: str, new: str) -> None:
    def change(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode())

    path = rewritten(files / "net.pt2", tmp_path / "trap.pt2", "models/model.json", change)

    with pytest.raises(ConfigError, match="must hold nothing that runs as Python"):
        load_program(path)


# ---------------------------------------------------------------------------------------------------------------- TorchScript


@pytest.mark.parametrize("name", ["traced.pt", "frozen.ts"])
def test_a_traced_file_computes_the_same_as_onnx_under_the_names_it_has(files: Path, tmp_path: Path, name: str) -> None:
    model = ingested(files / name, tmp_path / "in", {"scale": IMAGES["scale"].astype(np.float64), "pixels": IMAGES["pixels"]})

    result = convert(model, tmp_path / "out")

    assert [(s.name, s.dtype, s.shape) for s in result.io.inputs] == [
        ("pixels", "float32", ("batch", 1, 8, 8)), ("scale", "float32", ("batch", 1)),
    ]  # fmt: skip
    assert [(s.name, s.shape) for s in result.io.outputs] == [("logits", ("batch", 3)), ("features", ("batch", 4))]
    for actual, wanted in zip(answers(result, IMAGES), expected(files / name, IMAGES), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-6)
    assert (result.notes["exporter"], result.notes["other_sizes_checked"]) == ("torchscript", True)
    weights = {tuple(i.dims) for i in result.load().graph.initializer}
    assert {(4, 1, 3, 3), (3, 4)} <= weights  # those of a frozen module too, where quantizers look for them
    assert name == "frozen.ts" or "out.weight" in {i.name for i in result.load().graph.initializer}


def test_a_branch_of_a_scripted_file_stays_one(files: Path, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    result = convert(ingested(files / "scripted.pt", tmp_path / "in", {"anything": rows}), tmp_path / "out")

    for feed in (np.abs(rows), -np.abs(rows)):
        np.testing.assert_allclose(answers(result, {"anything": feed})[0], expected(files / "scripted.pt", {"x": feed})[0], atol=1e-6)


def test_the_data_must_name_the_tensors_of_a_torchscript_file(files: Path) -> None:
    with pytest.raises(ConfigError, match=r"an array for each tensor that forward takes \(pixels, scale\); got arrays pixel, scale"):
        described(files / "traced.pt", {"pixel": IMAGES["pixels"], "scale": IMAGES["scale"]})


# ---------------------------------------------------------------------------------------------------------------- torch.export


def test_a_program_becomes_onnx_with_its_dynamic_axes(files: Path, tmp_path: Path) -> None:
    result = convert(ingested(files / "net.pt2", tmp_path / "in", IMAGES), tmp_path / "out")

    assert [(s.name, s.shape) for s in result.io.inputs] == [("pixels", ("batch", 1, 8, 8)), ("scale", ("batch", 1))]
    assert [(s.name, s.shape) for s in result.io.outputs] == [("logits", ("batch", 3)), ("features", ("batch", 4))]
    feed = {n: a[:5] for n, a in IMAGES.items()}
    for actual, wanted in zip(answers(result, feed), expected(files / "net.pt2", feed), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-6)
    assert (result.notes["exporter"], result.notes["other_sizes_checked"]) == ("dynamo", True)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("traced.pt", {"exporter": "dynamo"}, "a TorchScript file is written by exporter 'torchscript' alone; got exporter 'dynamo'"),
        ("net.pt2", {"exporter": "torchscript"}, "a torch.export program is written by exporter 'dynamo' alone; got exporter 'torchscript'"),
        ("net.pt2", {"target_opset": 17}, "target_opset must be from 18 to 28 with exporter 'dynamo'; got 17"),
        ("net.pt2", {"dynamic_axes": {"pixels": {0: "n"}}}, "the axes of a torch.export program change as it says itself; got dynamic_axes"),
    ],
)
def test_what_a_file_can_not_be_exported_with_is_refused(files: Path, tmp_path: Path, name: str, config: dict[str, Any], message: str) -> None:
    model = ingested(files / name, tmp_path / "in", IMAGES)

    with pytest.raises(PassError) as caught:
        convert(model, tmp_path / "out", **config)

    assert message in str(caught.value)


def test_a_pass_that_changes_layers_is_refused_for_a_file_before_any_trial(tmp_path: Path) -> None:
    sweep = {
        "model": {"path": "net.pt2"}, "data": {"eval": "e.npz", "train": "t.npz"}, "metric": "accuracy",
        "chain": [{"pass": "TorchPruning"}, {"pass": "OnnxConversion"}],
    }  # fmt: skip

    with pytest.raises(AutotuneError, match="passes must follow one another in format, from torch program to onnx"):
        Pipeline(LoadedSweep(parse_sweep(sweep), tmp_path), InputFacts(TORCH_PROGRAM))
    assert Pipeline(LoadedSweep(parse_sweep({**sweep, "chain": sweep["chain"][1:]}), tmp_path), InputFacts(TORCH_PROGRAM)).space.valid == 1


# ---------------------------------------------------------------------------------------------------------------- Hugging Face


def of_transformers(folder: Path, feed: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits: NDArray[Any] = model(**{n: torch.from_numpy(a) for n, a in feed.items()}).logits.numpy()
    return logits


def test_a_folder_becomes_onnx_for_texts_of_any_length_with_padding(bert: Path, tmp_path: Path) -> None:
    unpadded = {"attention_mask": np.ones((6, 12), np.int32), "input_ids": TEXTS["input_ids"].astype(np.int32)}
    model = ingested(bert, tmp_path / "in", unpadded)  # such data alone would teach a tracer that nothing is ever masked

    result = convert(model, tmp_path / "out")

    assert [(s.name, s.dtype, s.shape) for s in result.io.inputs] == [
        ("input_ids", "int64", ("batch", "sequence")), ("attention_mask", "int64", ("batch", "sequence")),
    ]  # fmt: skip
    assert [(s.name, s.shape) for s in result.io.outputs] == [("logits", ("batch", 3))]
    assert result.notes["other_sizes_checked"] is True
    for feed in (TEXTS, {n: a[:1, :5] for n, a in TEXTS.items()}):
        np.testing.assert_allclose(answers(result, feed)[0], of_transformers(bert, feed), atol=1e-5)


def test_without_data_the_tokenizer_says_what_goes_in(bert: Path, tmp_path: Path) -> None:
    result = convert(ingested(bert, tmp_path / "in", {}), tmp_path / "from config")  # neither travels with the model: its config tells
    shutil.copytree(bert, tmp_path / "whole")
    whole = HuggingFaceModelHandler(tmp_path / "whole", session=ONE_THREAD)

    tokenized = convert(whole, tmp_path / "from tokenizer", external_data_above=1000)

    assert [s.name for s in tokenized.io.inputs] == [s.name for s in result.io.inputs] == ["input_ids", "attention_mask"]
    assert sorted(p.name for p in tokenized.folder.iterdir()) == ["model.onnx", "model.onnx.data"]
    np.testing.assert_allclose(answers(tokenized, TEXTS)[0], answers(result, TEXTS)[0], atol=1e-6)


@pytest.mark.long
def test_the_newer_exporter_takes_a_folder_too(bert: Path, tmp_path: Path) -> None:
    result = convert(ingested(bert, tmp_path / "in", TEXTS), tmp_path / "out", exporter="dynamo")

    assert [s.shape for s in result.io.inputs] == [("batch", "sequence")] * 2
    np.testing.assert_allclose(answers(result, TEXTS)[0], of_transformers(bert, TEXTS), atol=1e-5)


def test_a_changed_model_of_a_folder_is_written_and_loaded_again(bert: Path, tmp_path: Path) -> None:
    model = ingested(bert, tmp_path / "in", TEXTS)
    assert isinstance(model, HuggingFaceModelHandler)
    module = model.load()
    with torch.no_grad():
        module.classifier.bias.add_(torch.tensor([1.0, 2.0, 3.0]))  # type: ignore[operator, union-attr] # a layer of this class
    (tmp_path / "changed").mkdir()

    again = handler_from_json(model.written(tmp_path / "changed", module=module).to_json())
    result = convert(again, tmp_path / "out")

    np.testing.assert_allclose(answers(result, TEXTS)[0], of_transformers(bert, TEXTS) + np.array([1, 2, 3]), atol=1e-5)


def test_links_of_a_download_cache_are_followed_and_other_files_do_not_count(bert: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for name in ("config.json", "model.safetensors"):
        (linked / name).symlink_to(bert / name)
    (linked / "notes.md").write_text("not part of the model")

    model = ingested(linked, tmp_path / "in", TEXTS)

    assert source_digest(linked) == source_digest(bert)
    assert sorted(p.name for p in model.folder.iterdir()) == ["config.json", "examples.npz", "model.safetensors"]
    assert not any(p.is_symlink() for p in model.folder.iterdir())


def changed_config(bert: Path, folder: Path, **values: Any) -> Path:
    shutil.copytree(bert, folder)
    config = json.loads((bert / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["BertForSequenceClasification"]}, "'BertForSequenceClasification'. Did you mean 'BertForSequenceClassification'?"),
        ({"architectures": ["MyNet"], "auto_map": {"AutoModel": "net.MyNet"}}, "got 'MyNet'. Code that comes with a model is not run"),
        ({"architectures": None}, "config.json must name the model's class in architectures; got none"),
        ({"quantization_config": {"quant_method": "gptq"}}, "must be those of the model before it was quantized; got gptq weights"),
    ],
)
def test_a_folder_that_can_not_be_built_is_refused_before_the_sweep(bert: Path, tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = changed_config(bert, tmp_path / "folder", **values)

    with pytest.raises(ConfigError) as caught:
        described(folder, TEXTS)

    assert message in str(caught.value)


def test_a_folder_without_weights_is_refused(bert: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "folder", ignore=shutil.ignore_patterns("*.safetensors"))

    with pytest.raises(ConfigError, match=r"a Hugging Face folder must hold weights: model.safetensors .*; got config.json, tokenizer.json"):
        described(tmp_path / "folder", TEXTS)


def test_weights_that_lack_a_layer_are_refused_instead_of_filled_with_random_numbers(bert: Path, tmp_path: Path) -> None:
    folder = changed_config(bert, tmp_path / "folder", architectures=["BertForQuestionAnswering"])

    with pytest.raises(ConfigError, match=r"must hold every tensor of BertForQuestionAnswering; got none for qa_outputs.bias, qa_outputs.weight"):
        load_huggingface(folder)


def test_weights_in_an_older_file_load_and_a_pickle_in_it_does_not_run(bert: Path, tmp_path: Path) -> None:
    folder = changed_config(bert, tmp_path / "folder")
    (folder / "model.safetensors").unlink()
    state = {n: t.contiguous() for n, t in load_huggingface(bert).state_dict().items()}
    torch.save(state, folder / "pytorch_model.bin")
    loaded = {n: t.clone() for n, t in load_huggingface(folder).state_dict().items()}  # the file is mapped, and is written anew
    sprung = tmp_path / "sprung"
    torch.save({**state, "trap": Trap(sprung)}, folder / "pytorch_model.bin")

    with pytest.raises(ConfigError, match="the Hugging Face folder must load"):
        load_huggingface(folder)

    assert all(torch.equal(loaded[n], t) for n, t in state.items())
    assert not sprung.exists()


def test_the_data_must_hold_what_the_model_takes(bert: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the inputs of BertForSequenceClassification, input_ids first of all; got arrays attention_mask, inputids"
    ):
        described(bert, {"inputids": TEXTS["input_ids"], "attention_mask": TEXTS["attention_mask"]})


def test_a_missing_package_is_named_with_the_extra_that_brings_it(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # how Python marks a module that can't be imported

    with pytest.raises(EnvironmentFault, match=r"needs the package transformers; got none installed here. Run pip install 'passtune\[huggingface\]'"):
        described(bert, TEXTS)


# ---------------------------------------------------------------------------------------------------------------- a sweep


@pytest.mark.long
def test_a_sweep_of_a_folder_delivers_a_model_that_scores_as_the_folder_does(bert: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "bert")
    rng = np.random.default_rng(3)
    ids = rng.integers(5, 30, (40, 12))
    mask = (np.arange(12) < rng.integers(3, 13, (40, 1))).astype(np.int64)
    labels = of_transformers(bert, {"input_ids": ids, "attention_mask": mask}).argmax(-1)
    np.savez(tmp_path / "eval.npz", attention_mask=mask, input_ids=ids, labels=labels)
    sweep = {
        "model": {"path": "bert", "outputs": ["scores"]}, "data": {"eval": "eval.npz"}, "metric": "accuracy", "target": {"threads": 1},
        "budget": {"trials": 1}, "measure": {"max_time": "500ms", "final_time": "500ms", "final_budget": "1s", "ratio_width": 0.5},
        "chain": [{"pass": "OnnxConversion"}],
    }  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))

    done = CliRunner().invoke(main, ["run", str(tmp_path / "sweep.json"), "--out", str(tmp_path / "out")], catch_exceptions=False)

    assert done.exit_code == 0, done.output
    baseline = json.loads((tmp_path / "out" / "baseline" / "baseline.json").read_text())
    assert baseline["metrics"]["accuracy"]["value"] == 1.0
    (model,) = (tmp_path / "out").glob("best.bundle/**/model.onnx")
    assert [o.name for o in ONNXModelHandler.from_folder(model.parent).io.outputs] == ["scores"]


def test_names_of_outputs_are_for_models_of_torch(files: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "eval.npz", **IMAGES, labels=np.zeros(6, np.int64))
    sweep = {
        "model": {"path": str(files / "net.onnx"), "outputs": ["y"]}, "data": {"eval": "eval.npz"}, "metric": "accuracy",
        "chain": [{"pass": "OrtPerfTuning"}],
    }  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))

    done = CliRunner().invoke(main, ["plan", str(tmp_path / "sweep.json")])

    assert done.exit_code == 2
    assert "outputs" in done.output
    assert "an ONNX file, whose outputs have names" in " ".join(done.output.split())
