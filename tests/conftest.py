"""Models that tests share: small, real, trained here on scikit-learn's bundled digits."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

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
