"""OnnxStaticQuantization: OnnxQuantization with its mode fixed."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from autotune.passes.base import AcceleratorSpec, PassConfigParam
from autotune.passes.onnx_quantization import OnnxQuantization
from autotune.passes.registry import register


@register
class OnnxStaticQuantization(OnnxQuantization):
    """OnnxQuantization in static mode: activation ranges from calibration data."""

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        table = super()._default_config(accelerator_spec)
        return {**table, "quant_mode": replace(table["quant_mode"], type_=Literal["static"], search_defaults=None)}
