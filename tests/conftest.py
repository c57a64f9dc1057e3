"""Models that tests share: small, real, trained here on scikit-learn's bundled digits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from autotune.sweep.result import SweepResult

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# The same examples in every run, so that a failure is one that everybody sees; HYPOTHESIS_PROFILE=default looks for new ones.
settings.register_profile("same_everywhere", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same_everywhere"))

SCRIPT = '''
"""A small convolutional network for 8x8 digits."""


def make_model():
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
    )
'''


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained network as ONNX (`model.onnx`) and as torch (`net.py`, `weights.pt`), and its data."""
    import torch
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("digits")
    (folder / "net.py").write_text(SCRIPT)
    data = load_digits()
    x = (data.images / 16).astype(np.float32)[:, None]
    y = data.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    train, calib, evaluation = slice(0, 900), slice(900, 1100), slice(1100, 1500)
    np.savez(folder / "train.npz", x=x[train], labels=y[train])
    np.savez(folder / "calib.npz", x=x[calib])
    np.savez(folder / "eval.npz", x=x[evaluation], labels=y[evaluation])

    torch.set_num_threads(1)
    torch.manual_seed(0)
    space: dict[str, object] = {}
    exec(SCRIPT, space)
    net = space["make_model"]()  # type: ignore[operator] # defined by the script above
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    xt, yt = torch.from_numpy(x[train]), torch.from_numpy(y[train])
    net.train()
    for _ in range(5):
        for batch in torch.randperm(len(yt)).split(64):
            loss = torch.nn.functional.cross_entropy(net(xt[batch]), yt[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval()
    torch.save(net.state_dict(), folder / "weights.pt")
    torch.onnx.export(
        net, (xt[:1],), str(folder / "model.onnx"), input_names=["x"], output_names=["logits"],
        dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}}, opset_version=17, dynamo=False,
    )  # fmt: skip
    return folder


QUICK = {"max_time": "1s", "final_time": "1s", "ratio_width": 0.1, "looks": False}  # each trial is measured whole, however fast the machine is


@pytest.fixture(scope="session")
def sweep_of() -> Callable[..., dict[str, Any]]:
    """A function that writes a small sweep over a folder like `digits`; keyword arguments replace its parts."""

    def sweep(folder: Path, **more: Any) -> dict[str, Any]:
        return {
            "model": {"path": str(folder / "model.onnx")}, "data": {"eval": str(folder / "eval.npz"), "calibration": str(folder / "calib.npz")},
            "metric": "accuracy", "constraints": ["accuracy >= baseline - 2.0pt"], "target": {"threads": 1}, "budget": {"trials": 5},
            "measure": QUICK,
            "chain": [
                {"slot": "quantize", "pass": "OnnxQuantization", "optional": True,
                 "params": {"quant_mode": ["static", "dynamic"], "per_channel": True, "calibrate_method": "minmax", "op_types_to_quantize": "all",
                            "exclude_top_k": 0}},
                {"slot": "session", "pass": "OrtPerfTuning", "params": {"graph_optimization_level": ["all", "basic"]}},
            ],
            **more,
        }  # fmt: skip

    return sweep


@pytest.fixture(scope="session")
def finished(digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    """The result of that sweep, run once for all tests that only look at it."""
    from autotune.sweep.run import run

    return run(sweep_of(digits), tmp_path_factory.mktemp("run") / "out")
