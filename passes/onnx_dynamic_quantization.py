"""OnnxDynamicQuantization: OnnxQuantization with its mode fixed, and without what only the other mode has."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from autotune.passes.base import AcceleratorSpec, PassConfigParam
from autotune.passes.onnx_quantization import STATIC_ONLY, OnnxQuantization
from autotune.passes.registry import register


@register
class OnnxDynamicQuantization(OnnxQuantization):
    """OnnxQuantization in dynamic mode: no calibration data, activation ranges found while the model runs."""

    contract = replace(OnnxQuantization.contract, needs_calibration_when={}, data={})

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        table = {name: row for name, row in super()._default_config(accelerator_spec).items() if name not in STATIC_ONLY}
        mode = replace(table["quant_mode"], type_=Literal["dynamic"], default_value="dynamic", search_defaults=None)
        return {**table, "quant_mode": mode, "weight_type": replace(table["weight_type"], type_=Literal["int8", "uint8"])}
