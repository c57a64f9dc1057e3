"""OnnxDynamicToFixedShape without a word of what to fix, or of an axis that is not there, is refused before the first trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from autotune.config import LoadedSweep, parse_sweep
from autotune.errors import ConfigError
from autotune.sweep.prepare import Prepared, prepare


def prepared(folder: Path, shape: Sequence[int | str | None], params: dict[str, Any], **more: Any) -> Prepared:
    ends = [helper.make_tensor_value_info(n, 1, list(shape)) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(folder / "m.onnx"))
    np.savez(folder / "eval.npz", x=np.random.default_rng(0).random((20, 7), np.float32), labels=np.arange(20) % 7)
    slot = {"slot": "fix", "pass": "OnnxDynamicToFixedShape", "params": params}
    sweep = {"model": {"path": "m.onnx"}, "data": {"eval": "eval.npz"}, "metric": "accuracy", "chain": [slot], **more}
    return prepare(LoadedSweep(parse_sweep(sweep), folder))


@pytest.mark.parametrize(
    ("shape", "written", "params"),
    [
        (["batch", "sequence"], "{dim_param: {batch: 4, sequence: 7}}", {"dim_param": {"batch": 4, "sequence": 7}}),
        ([None, "s"], "{dim_param: {s: 7}, input_shapes: {x: [4, 7]}}", {"dim_param": {"s": 7}, "input_shapes": {"x": [4, 7]}}),
        ([None, 7], "{input_shapes: {x: [4, 7]}}", {"input_shapes": {"x": [4, 7]}}),
        (["n", "n"], "{input_shapes: {x: [4, 7]}}", None),  # one name for two sizes, which onnx allows and the pass refuses
    ],
)
def test_the_axes_are_named_with_what_to_write_for_rows_like_the_evaluations(
    shape: list[Any], written: str, params: dict[str, Any] | None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path, shape, {}, target={"batch_size": 4})

    assert str(caught.value).startswith(
        "OnnxDynamicToFixedShape: dim_param, input_shapes or fixed_inputs must say what gets which size or value; got none"
    )
    assert str(caught.value).endswith(f"For rows like those of data.eval write params: {written}.")
    if params is not None:
        assert prepared(tmp_path, shape, params, target={"batch_size": 4}).pipeline.space.valid == 1


def test_a_model_without_dynamic_axes_is_told_to_leave_the_pass_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no input has a dynamic axis: x \[1, 7\]. Leave the pass out"):
        prepared(tmp_path, [1, 7], {})


def test_to_fix_the_value_of_an_input_is_enough(tmp_path: Path) -> None:
    assert prepared(tmp_path, ["batch", 7], {"fixed_inputs": {"x": [[0.0] * 7]}}).pipeline.space.valid == 1


@pytest.mark.parametrize("given", [{"bach": 1}, [{"batch": 1}, {"bach": 1}]])
def test_an_axis_that_the_model_has_not_gets_the_nearest_one(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dim_param must name axes of the model's inputs; got 'bach'. Did you mean 'batch'\?"):
        prepared(tmp_path, ["batch", "sequence"], {"dim_param": given})
