"""The demonstration's model: learned, reproducible, and in the form in which a user would bring his own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from autotune.data import load_arrays
from autotune.demo import build_demo, demo_sweep
from autotune.model import IoContract, PyTorchModelHandler, TensorSpec
from autotune.passes.registry import get_pass
from autotune.target import AcceleratorSpec


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo(tmp_path_factory.mktemp("demo"), epochs=3)


def handler(folder: Path) -> PyTorchModelHandler:
    io = IoContract((TensorSpec("x", "float32", ("batch", 1, 8, 8)),))
    return PyTorchModelHandler(folder=folder, io=io, script=folder / "digits_model.py", loader="make_model")


def test_the_network_has_learned_digits_that_it_was_not_shown(demo: Path) -> None:
    evaluation = load_arrays(demo / "eval.npz")
    module = handler(demo).load()

    with torch.no_grad():
        guesses = module(torch.from_numpy(evaluation["x"])).argmax(1).numpy()

    assert (guesses == evaluation["labels"]).mean() > 0.9  # after 3 of 5 epochs


def test_the_three_sets_share_no_image_and_leave_none_out(demo: Path) -> None:
    sets = {name: load_arrays(demo / f"{name}.npz") for name in ("train", "calib", "eval")}

    assert {name: len(arrays["x"]) for name, arrays in sets.items()} == {"train": 897, "calib": 300, "eval": 600}
    assert all(arrays["x"].dtype == np.float32 and arrays["x"].shape[1:] == (1, 8, 8) for arrays in sets.values())
    assert sets["train"]["labels"].dtype == sets["eval"]["labels"].dtype == np.int64
    assert set(sets["calib"]) == {"x"}
    images = [image.tobytes() for arrays in sets.values() for image in arrays["x"]]
    assert len(set(images)) == len(images) == 1797


def test_the_same_seed_writes_the_same_weights(tmp_path: Path) -> None:
    first, second, other = (build_demo(tmp_path / str(i), epochs=1, seed=seed) for i, seed in enumerate((0, 0, 1)))

    weights = [(folder / "weights.pt").read_bytes() for folder in (first, second, other)]
    assert weights[0] == weights[1] != weights[2]


def test_the_sweep_names_files_that_are_there_and_values_that_the_passes_take(demo: Path) -> None:
    sweep = demo_sweep()

    for name in (sweep["model"]["script"], sweep["model"]["weights"], *sweep["data"].values()):
        assert (demo / name).is_file()
    for slot in sweep["chain"]:
        space = get_pass(slot["pass"]).search_space(AcceleratorSpec(), slot.get("params", {}))
        assert space
