"""Sweeps whose every number follows from bytes: a measurer that makes latencies up from the model's content.

The same sweep then has the same trials, verdicts and front in every run, whatever the machine does meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

MEASURER = '''
"""A measurer that times nothing: nanoseconds from the model's size and bytes, and from the session's settings."""

import hashlib
import json

import numpy as np


def nominal_ns(model, session):
    """Small files run faster here; content and settings make up to 5 %."""
    data = model.read_bytes()
    digest = hashlib.sha256(data + json.dumps(session, sort_keys=True).encode()).digest()
    return len(data) + len(data) * int.from_bytes(digest[:2], "big") // (20 * 65536)


def latency(*, model, baseline, session, baseline_session, inputs, rounds, seed):
    wobble = np.random.default_rng([seed, rounds]).integers(0, 20, (2, rounds))  # about 0.1 % of a small model's
    return {
        "candidate": nominal_ns(model, session) + wobble[0],
        "baseline": nominal_ns(baseline, baseline_session) + wobble[1],
    }
'''


def deterministic_sweep(sweep_of: Callable[..., dict[str, Any]], digits: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """The small sweep over `digits` (both are fixtures), timed by the measurer, whose script is written into `folder`.

    Keyword arguments replace parts of the sweep, as in `sweep_of`. The chain has 36 points, and the untouched model is one more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "measure.py"
    script.write_text(MEASURER)
    chain = [
        {"slot": "quantize", "pass": "OnnxQuantization", "optional": True,
         "params": {"quant_mode": ["static", "dynamic"], "per_channel": [True, False], "calibrate_method": "minmax",
                    "op_types_to_quantize": "all", "weight_type": ["int8", "uint8"]}},
        {"slot": "session", "pass": "OrtPerfTuning", "params": {"graph_optimization_level": ["all", "basic", "extended", "disable"]}},
    ]  # fmt: skip
    measure = {"max_time": "1s", "final_time": "1s", "measurer": f"{script}:latency"}
    return sweep_of(digits, **{"chain": chain, "measure": measure, **more})
