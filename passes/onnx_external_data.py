"""OnnxExternalData: where weights lie, inside the model file or in data files beside it; what is computed stays the same.

Source: the external data of the ONNX format, by onnx's own writer. Files are named relative to the model, so that the folder can move.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from autotune.errors import PassError
from autotune.model import LARGE_BYTES, MODEL_FILE, ONNXModelHandler
from autotune.passes.base import ONNX, AcceleratorSpec, Pass, PassConfigParam, PassContract
from autotune.passes.onnx_graph import graphs_of, library_errors, lift_constants, load_fixed, operator_counts, quiet, short_message, unchanged
from autotune.passes.registry import register
from autotune.session import SessionSettings, create_session

if TYPE_CHECKING:
    import onnx

WHO = "OnnxExternalData"
CHUNK_BYTES = 1 << 24


def _name_fault(value: str) -> str:
    """What `file_name` should have been; empty when it is fine."""
    path = PurePosixPath(value)
    if not value or path.name != value or value in (".", "..", MODEL_FILE) or any(c in value for c in '\\:*?"<>|') or not value.isprintable():
        return f"a plain file name (no folders; not {MODEL_FILE})"
    return ""


@register
class OnnxExternalData(Pass):
    """Keep large weights in files beside the model, or bring them back into it."""

    contract = PassContract(accepts=ONNX, returns=ONNX, version=1)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "size_threshold": PassConfigParam(
                type_=int, default_value=1024, minimum=128,
                description="weights of at least this many bytes lie outside the model file, smaller ones inside. A threshold above the largest "
                "weight makes one file of a model with external data. Not searched: it changes neither speed nor size",
            ),
            "one_file": PassConfigParam(
                type_=bool, default_value=True, description="one data file for all weights, instead of one (.0, .1, ...) for each",
            ),
            "file_name": PassConfigParam(
                type_=str, default_value=f"{MODEL_FILE}.data", check=_name_fault, description="name of the data file, which lies beside the model",
            ),
        }  # fmt: skip

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        import onnx
        from onnx.external_data_helper import set_external_data

        threshold = config["size_threshold"]
        layout = _layout(onnx.load(str(model.path), load_external_data=False))
        with library_errors(WHO, "the model's external data must be readable", "Save the model again, with its data beside it."):
            proto = load_fixed(model)
        lifted = lift_constants(proto, least_bytes=threshold)
        hashes: dict[tuple[int, str], str] = {}
        wanted: dict[tuple[int, str], str] = {}
        sizes: dict[tuple[int, str], int] = {}
        for key, tensor in _tensors(proto):
            with library_errors(WHO, f"weight {tensor.name!r} must be readable"):
                data = _raw(tensor)
            if data is None:
                continue
            hashes[key], sizes[key] = hashlib.sha256(data).hexdigest(), len(data)
            if len(data) >= threshold:
                wanted[key] = config["file_name"] if config["one_file"] else f"{config['file_name']}.{len(wanted)}"
        outside, total = sum(sizes[k] for k in wanted), sum(sizes.values())
        notes: dict[str, Any] = {
            "weights": len(sizes), "weights_outside": len(wanted), "weight_bytes": total, "bytes_outside": outside,
            "share_of_bytes_outside": round(outside / total, 4) if total else 0.0, "constants_lifted": lifted,
            "data_files": len(set(wanted.values())), "operators_after": operator_counts(proto),
        }  # fmt: skip
        if not lifted and wanted == layout:
            reason = "the weights lie as asked already" if wanted else f"no weight has {threshold} bytes or more; the largest has {_largest(sizes)}"
            return unchanged(model, output_model_path, reason, notes=notes)
        if total - outside >= LARGE_BYTES:
            must = "the weights that stay in the model file must be less than 1.5 GB: the format ends at 2 GiB"
            raise PassError(WHO, must, f"{total - outside} bytes", "Lower size_threshold.")
        for key, tensor in _tensors(proto):
            if key in wanted:
                set_external_data(tensor, wanted[key])
        # Written in one folder, moved and read in another: a path that is not relative would show.
        writing = output_model_path / "writing"
        writing.mkdir()
        with library_errors(WHO, "the model must be written"), quiet():
            onnx.save(proto, str(writing / MODEL_FILE))
        del proto
        for file in sorted(writing.iterdir()):
            shutil.move(file, output_model_path / file.name)
        writing.rmdir()
        self._verify(model, output_model_path, hashes, wanted)
        return model.written(output_model_path, notes={**notes, "changed": True})

    def _verify(self, model: ONNXModelHandler, folder: Path, hashes: Mapping[tuple[int, str], str], wanted: Mapping[tuple[int, str], str]) -> None:
        """Read the files again: each weight has the bytes it had, each data file is a file of this folder, and a session starts."""
        import onnx

        again = onnx.load(str(folder / MODEL_FILE), load_external_data=False)
        if _layout(again) != dict(wanted):
            raise PassError(WHO, "weights must lie where they were to", f"{_layout(again)} instead of {dict(wanted)}")
        found: dict[tuple[int, str], str] = {}
        for key, tensor in _tensors(again):
            if key in wanted:
                found[key] = _hash_outside(tensor, folder)
            elif (data := _raw(tensor)) is not None:
                found[key] = hashlib.sha256(data).hexdigest()
        if found != dict(hashes):
            wrong = sorted(name for (_, name), value in hashes.items() if value not in found.values())
            raise PassError(WHO, "every weight must come back with the same bytes", f"others for {', '.join(wrong[:3])}")
        if self.accelerator_spec.execution_provider != "CPUExecutionProvider":
            return
        settings = SessionSettings(graph_optimization_level="disable", intra_op_num_threads=1)
        try:
            with quiet():
                create_session(folder / MODEL_FILE, settings)
        except Exception as error:  # ONNX Runtime's errors have no common base
            with library_errors(WHO, "the input model must load"), quiet():
                create_session(model.path, settings)
            do = "Raise size_threshold: ONNX Runtime wants some small weights inside the model file."
            raise PassError(WHO, "the model must load with its weights there", short_message(error), do) from error


def _tensors(proto: onnx.ModelProto) -> Iterator[tuple[tuple[int, str], onnx.TensorProto]]:
    """Initializers of all graphs, each with the number of its graph and its name."""
    for number, graph in enumerate(graphs_of(proto.graph)):
        for tensor in graph.initializer:
            yield (number, tensor.name), tensor


def _layout(proto: onnx.ModelProto) -> dict[tuple[int, str], str]:
    """Data file of each initializer that lies outside. The model is one that was read without its data."""
    from onnx.external_data_helper import uses_external_data

    return {key: next((e.value for e in t.external_data if e.key == "location"), "") for key, t in _tensors(proto) if uses_external_data(t)}


def _raw(tensor: onnx.TensorProto) -> bytes | None:
    """Bytes of a tensor as external data has them, moved into its raw_data; None for text, which can't lie outside."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_type == TensorProto.STRING:
        return None
    if not tensor.HasField("raw_data"):
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    return tensor.raw_data


def _largest(sizes: Mapping[tuple[int, str], int]) -> int:
    return max(sizes.values(), default=0)


def _hash_outside(tensor: onnx.TensorProto, folder: Path) -> str:
    """SHA-256 of a tensor's bytes in its data file, which is read piece by piece."""
    entries = {e.key: e.value for e in tensor.external_data}
    path = folder / entries["location"]
    if path.is_symlink() or not path.is_file() or path.resolve().parent != folder.resolve():
        raise PassError(WHO, "a data file must be a file of the model's folder", repr(entries["location"]))
    left = int(entries["length"])
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(int(entries.get("offset", 0)))
        while left > 0 and (part := file.read(min(left, CHUNK_BYTES))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()
