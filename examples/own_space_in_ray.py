"""Search the parameters of one pass in a Ray Tuner of your own: your objective, your searcher, no sweep file and no run folder.

Prints each configuration that was tried with the size it gives and the error it makes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from autotune.model import ONNXModelHandler
from autotune.passes.registry import get_pass
from autotune.search_spaces import Alternative, Slot, compile_space
from autotune.search_spaces.ray_space import point_from_ray, to_ray_tune
from autotune.target import AcceleratorSpec

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # this Ray listens on this machine only: no token file
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")


def write_model(folder: Path) -> None:
    """Save a small two-layer network as `model.onnx`."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    first = numpy_helper.from_array(random.normal(0, 0.05, (256, 512)).astype(np.float32), "first")
    second = numpy_helper.from_array(random.normal(0, 0.05, (512, 16)).astype(np.float32), "second")
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "first"], ["hidden"], name="hidden"),
            helper.make_node("Relu", ["hidden"], ["active"], name="active"),
            helper.make_node("MatMul", ["active", "second"], ["y"], name="y"),
        ],
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 16])],
        [first, second],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), str(folder / "model.onnx"))


def outputs(model: ONNXModelHandler) -> np.ndarray[Any, Any]:
    """Run the model once on the same 64 rows."""
    import onnxruntime

    rows = np.random.default_rng(1).normal(size=(64, 256)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(model.path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": rows})[0])


def try_one(config: dict[str, Any], *, source: Path) -> dict[str, float]:
    """Apply the pass as the point says; give back what is to be made small."""
    point = point_from_ray(config)
    parameters = {name.removeprefix("quantize."): value for name, value in point.items() if name != "quantize"}
    before = ONNXModelHandler.from_folder(source)
    with tempfile.TemporaryDirectory() as folder:
        after = get_pass("OnnxQuantization")(AcceleratorSpec(), parameters).run(before, Path(folder))
        error = float(np.abs(outputs(after) - outputs(before)).max())
        return {"size_bytes": after.size_bytes, "error": error}


def main() -> None:
    import ray
    from ray import tune

    table = get_pass("OnnxQuantization").search_space(AcceleratorSpec(), {"quant_mode": "dynamic", "op_types_to_quantize": "all"})
    space = compile_space([Slot("quantize", (Alternative("OnnxQuantization", table),))])
    searched = [variable for variable in space.variables if len(space.choices(variable)) > 1]
    print(f"{space.valid} valid points, each tried once")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        write_model(folder / "source")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        results = tune.Tuner(
            tune.with_parameters(try_one, source=folder / "source"),
            param_space=to_ray_tune(space, grid=True),  # without grid: sampled, as num_samples and the seed say
            tune_config=tune.TuneConfig(metric="error", mode="min", reuse_actors=True),
            run_config=tune.RunConfig(storage_path=str(folder / "results"), verbose=0),
        ).fit()
        ray.shutdown()
    if results.errors:
        raise results.errors[0]
    for result in sorted(results, key=lambda r: r.metrics["error"]):
        point = point_from_ray(result.config)
        settings = ", ".join(f"{variable}={point[variable]}" for variable in searched if variable in point)
        print(f"{result.metrics['size_bytes']:>8} bytes, error {result.metrics['error']:.4f}: {settings}")


if __name__ == "__main__":
    main()
