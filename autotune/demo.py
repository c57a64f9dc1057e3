"""The demonstration's model: a convolutional network trained on scikit-learn's bundled digits, and the sweep over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from autotune.errors import EnvironmentFault
from autotune.model import WEIGHTS_FILE, load_object

SCRIPT = "digits_model.py"
SCRIPT_TEXT = '''"""The network of the demonstration, as a user would bring it: a function that builds a torch.nn.Module."""

import torch
from torch import nn


class DigitsNet(nn.Module):
    """Ten classes of handwritten digits from images of 8 by 8 pixels: float32 [N, 1, 8, 8], values 0 to 1, to logits [N, 10]."""

    def __init__(self, first: int = 64, second: int = 128) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU(),
            nn.Conv2d(first, second, 3, padding=1), nn.BatchNorm2d(second), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(second, second, 3, padding=1), nn.BatchNorm2d(second), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classify = nn.Linear(second, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(x).flatten(1))


def make_model() -> nn.Module:
    return DigitsNet()
'''

TRAIN_ROWS, CALIBRATION_ROWS, EVALUATION_ROWS = 897, 300, 600  # of 1797


def build_demo(folder: Path, *, epochs: int = 5, seed: int = 0) -> Path:
    """Train the network and write `digits_model.py`, `weights.pt`, `train.npz`, `calib.npz` and `eval.npz` into `folder`; return it.

    The rows of the three files are disjoint. Arrays: `x` float32 [N, 1, 8, 8] and, but for calibration, `labels` int64 [N]. One
    thread and a seed, so that the same machine writes the same bytes. Raises `EnvironmentFault` without scikit-learn.
    """
    import torch

    arrays, labels = _digits(seed)
    folder.mkdir(parents=True, exist_ok=True)
    train, calibration, evaluation = np.split(np.arange(len(labels)), [TRAIN_ROWS, TRAIN_ROWS + CALIBRATION_ROWS])
    np.savez(folder / "train.npz", x=arrays[train], labels=labels[train])
    np.savez(folder / "calib.npz", x=arrays[calibration])
    np.savez(folder / "eval.npz", x=arrays[evaluation], labels=labels[evaluation])
    (folder / SCRIPT).write_text(SCRIPT_TEXT, encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads are slower for a network of this size, and sum in no fixed order
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = load_object(folder / SCRIPT, "make_model", who="demo")()
            _train(module, torch.from_numpy(arrays[train]), torch.from_numpy(labels[train]), epochs)
    finally:
        torch.set_num_threads(threads)
    torch.save(dict(module.state_dict()), folder / WEIGHTS_FILE)
    return folder


def demo_sweep() -> dict[str, Any]:
    """Return the sweep of the demonstration: prune and train further, convert, quantize, choose the session. Small enough to try whole."""
    return {
        "schema": 1,
        "model": {"script": SCRIPT, "loader": "make_model", "weights": WEIGHTS_FILE, "outputs": ["logits"]},
        "data": {"eval": "eval.npz", "calibration": "calib.npz", "train": "train.npz"},
        "metric": "accuracy",
        "target": {"ep": "cpu", "threads": 1, "batch_size": 16},
        "constraints": ["accuracy >= baseline - 10.0pt"],  # wide, so that there is a front to see
        "pick": "knee",
        "objectives": ["latency", "accuracy"],
        "budget": {"trials": 28}, "measure": {"max_time": "1s", "final_time": "3s", "ratio_width": 0.02},
        "seed": 0,
        "chain": [
            {
                "slot": "prune", "pass": "TorchPruning", "optional": True,
                "params": {
                    "keep_ratio": [0.75, 0.5, 0.375, 0.25, 0.1875, 0.125], "fine_tune_epochs": 4, "learning_rate": 0.004,
                    "round_to": 4,
                },
            },
            {"slot": "convert", "pass": "OnnxConversion"},
            {
                "slot": "quantize", "pass": "OnnxQuantization", "optional": True,
                "params": {
                    "quant_mode": "static", "calibrate_method": "minmax", "op_types_to_quantize": "all", "per_channel": True, "exclude_top_k": 0,
                },
            },
            {"slot": "session", "pass": "OrtPerfTuning"},
        ],
    }  # fmt: skip


def _digits(seed: int) -> tuple[Any, Any]:
    """All 1797 images in a seeded order: float32 [N, 1, 8, 8] from 0 to 1, and int64 labels [N]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentFault(
            "demo", "scikit-learn must be installed: its digits are the data", "no scikit-learn", "pip install 'passtune[demo]'"
        ) from error
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    arrays = (digits.images[order] / 16.0).astype(np.float32)[:, None]
    return arrays, digits.target[order].astype(np.int64)


def _train(module: Any, images: Any, labels: Any, epochs: int) -> None:
    import torch

    batch_size = 64
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(1, epochs * -(-len(labels) // batch_size)))
    module.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(batch_size):  # type: ignore[no-untyped-call] # torch's own gap
            loss = torch.nn.functional.cross_entropy(module(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # as above
            optimizer.step()
            schedule.step()
    module.eval()
