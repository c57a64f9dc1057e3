"""Kinds E, as far as this CPU can hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from autotune.target import surroundings
from tests.failure_kinds.awkward import X, Y, flat, model, node, spread, tensor, two_layers
from tests.failure_kinds.kinds import apply, error, saved, weights

# 34

LARGEST_INT16 = 2**15 - 1
LARGEST_ACTIVATION = 255


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("name", ["OnnxStaticQuantization", "OnnxDynamicQuantization"])
def test_weights_of_7_bits_can_not_overflow_where_two_products_are_added_in_16_bits(name: str, per_channel: bool, tmp_path: Path) -> None:
    given = saved(tmp_path / "in", two_layers())

    for reduce_range in (False, True):
        rows = flat() if name == "OnnxStaticQuantization" else None
        result = apply(name, given, tmp_path / str(reduce_range), rows, reduce_range=reduce_range, per_channel=per_channel)
        held = [numpy_helper.to_array(t).astype(np.int64) for t in weights(result).values() if t.data_type == TensorProto.INT8]
        worst = max(int((np.abs(w[::2]) + np.abs(w[1::2])).max()) for w in held) * LARGEST_ACTIVATION
        assert len(held) == 2
        assert (worst <= LARGEST_INT16) is reduce_range
        assert error(given, result, flat()) < 0.06


def test_the_instruction_sets_are_part_of_the_surroundings() -> None:
    flags = set(surroundings().cpu_flags)

    assert surroundings().cpu_model
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        known = file.read()
    assert all(flag in known for flag in flags)


# 37


def test_models_that_hold_for_one_machine_only_say_so(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"], "m"), node("Add", ["a", "b"], ["s"], "add"), node("Relu", ["s"], ["y"], "relu")]
    given = saved(tmp_path / "in", model(nodes, [X], [Y], [tensor("w", spread(16, 16)), tensor("b", np.zeros(16))]))

    portable = apply("OnnxModelOptimizer", given, tmp_path / "basic", optimizer="ort_basic")
    fused = apply("OnnxModelOptimizer", given, tmp_path / "extended", optimizer="ort_extended")

    assert {o.domain for o in portable.load().opset_import} == {""}
    assert {o.domain for o in fused.load().opset_import} != {""}
    assert fused.notes.get("portable") is False
    assert portable.notes.get("portable") is not False
