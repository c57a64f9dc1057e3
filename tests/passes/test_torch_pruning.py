"""TorchPruning: networks of several kinds are cut, trained, written and loaded again; digits show that it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from autotune.errors import ConfigError, PassConfigError, PassError
from autotune.model import IoContract, PyTorchModelHandler, TensorSpec, load_fitting
from autotune.passes.torch_pruning import TorchPruning
from autotune.target import AcceleratorSpec

CPU = AcceleratorSpec()
NETS = """
import torch
from torch import nn


def plain():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 16, 24), nn.ReLU(), nn.Linear(24, 10))


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.skip = nn.Identity() if stride == 1 else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


def residual():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Block(16, 32, 2), Block(32, 32, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def depthwise():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def grouped():
    return nn.Sequential(
        nn.Conv2d(1, 16, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, groups=4, padding=1), nn.GroupNorm(8, 32), nn.PReLU(32), nn.Conv2d(32, 64, 3, groups=32),
        nn.ConvTranspose2d(64, 16, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(32, 24, 1)
        self.norm, self.first, self.second = nn.LayerNorm(24), nn.Linear(24, 5), nn.Linear(24, 3)

    def forward(self, x):
        x = torch.relu(self.a(x))
        x = torch.cat([x, torch.relu(self.b(x))], 1)
        x = self.norm(torch.relu(self.c(x)).mean((2, 3)))
        return torch.softmax(self.first(x), 1), self.second(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.recur, self.hidden, self.out = nn.Linear(8, 16), nn.LSTM(16, 12, batch_first=True), nn.Linear(12, 20), nn.Linear(20, 4)

    def forward(self, x):
        steps, _ = self.recur(torch.relu(self.before(x[:, 0])))
        return self.out(torch.relu(self.hidden(steps[:, -1])))


def features():
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten())


class SizeInCode(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(16 * 64, 4)

    def forward(self, x):
        return self.out(torch.relu(self.conv(x)).reshape(-1, 16 * 64))


def two_heads(): return TwoHeads()
def recurrent(): return Recurrent()
def size_in_code(): return SizeInCode()
def single(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def train(model, arrays, *, epochs, learning_rate, batch_size, seed):
    with torch.no_grad():
        model[-1].bias += epochs * 100 + batch_size + len(arrays["weights"])
"""
IO = IoContract((TensorSpec("x", "float32", ("batch", 1, 8, 8)),))
NO_TRAINING = {"fine_tune_epochs": 0, "round_to": 1}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    data = load_digits()
    x, labels = (data.images / 16).astype(np.float32)[:, None], data.target.astype(np.int64)
    path = tmp_path_factory.mktemp("digits") / "train.npz"
    np.savez(path, x=x[:1200], labels=labels[:1200])
    return path, x[1200:], labels[1200:]


def network(folder: Path, loader: str, io: IoContract = IO) -> PyTorchModelHandler:
    """A seeded network with statistics and weights that a reload must bring back."""
    script, weights = folder / "nets.py", folder / "weights"
    script.write_text(NETS)
    weights.mkdir()
    model = PyTorchModelHandler(folder=weights, io=io, script=script, loader=loader)
    torch.manual_seed(0)
    module = model.load()
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_mean.uniform_(-0.5, 0.5)
            part.running_var.uniform_(0.5, 2.0)
    return model.written(weights, module=module)


def prune(model: PyTorchModelHandler, output: Path, **config: object) -> PyTorchModelHandler:
    output.mkdir()
    result = TorchPruning(CPU, config).run(model, output)
    assert isinstance(result, PyTorchModelHandler)
    return result


def widths(module: torch.nn.Module) -> list[int]:
    layers = (torch.nn.modules.conv._ConvNd, torch.nn.Linear)
    return [getattr(m, "out_channels", None) or m.out_features for m in module.modules() if isinstance(m, layers)]


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        ("plain", [8, 16, 12, 10]),
        ("residual", [8, 16, 16, 16, 16, 16, 10]),
        ("depthwise", [8, 8, 16, 10]),
        ("grouped", [8, 32, 64, 8, 10]),  # channels that a multiplying depthwise layer takes are left alone
        ("two_heads", [8, 8, 12, 5, 3]),
        ("recurrent", [16, 10, 4]),  # what feeds a recurrent layer is left alone
        ("features", [8, 32]),  # the last layer is the output
    ],
)
def test_half_of_the_channels_are_kept_and_those_of_outputs_all(tmp_path: Path, loader: str, expected: list[int]) -> None:
    result = prune(network(tmp_path, loader), tmp_path / "out", keep_ratio=0.5, **NO_TRAINING)

    assert widths(result.load()) == expected
    assert result.notes["channels_after"] == sum(expected) < result.notes["channels_before"]
    assert result.notes["changed"] is True


def test_what_is_kept_are_the_channels_of_the_original_that_weigh_most(tmp_path: Path) -> None:
    model = network(tmp_path, "features")
    importance = model.load()[0].weight.abs().sum((1, 2, 3)) + model.load()[2].weight.abs().sum((0, 2, 3))

    result = prune(model, tmp_path / "out", keep_ratio=0.5, **NO_TRAINING)

    kept = torch.sort(torch.topk(importance, 8).indices).values
    # The library weighs both sides of a channel by their means over kernels, so agreement is large, not always complete.
    original = model.load()[0].weight
    matches = [int((original == row).flatten(1).all(1).nonzero()) for row in result.load()[0].weight]
    assert matches == sorted(matches)
    assert len(set(matches) & set(kept.tolist())) >= 6


@pytest.mark.parametrize("importance", ["l1", "l2", "lamp", "fpgm", "random"])
def test_every_importance_gives_equal_bytes_twice(tmp_path: Path, importance: str) -> None:
    model = network(tmp_path, "residual")

    first = prune(model, tmp_path / "first", importance=importance, **NO_TRAINING)
    second = prune(model, tmp_path / "second", importance=importance, **NO_TRAINING)

    assert first.digest == second.digest
    assert widths(first.load()) == [8, 16, 16, 16, 16, 16, 10]


def test_the_seed_chooses_among_random_channels(tmp_path: Path) -> None:
    model = network(tmp_path, "plain")

    digests = {prune(model, tmp_path / str(seed), importance="random", seed=seed, **NO_TRAINING).digest for seed in (0, 1)}

    assert len(digests) == 2


def test_global_pruning_keeps_the_share_over_all_layers_and_something_of_each(tmp_path: Path) -> None:
    result = prune(network(tmp_path, "plain"), tmp_path / "out", keep_ratio=0.25, global_pruning=True, **NO_TRAINING)

    *inner, last = widths(result.load())
    assert last == 10
    assert sum(inner) == pytest.approx(0.25 * (16 + 32 + 24), abs=3)
    assert min(inner) >= 1


def test_channels_come_in_steps_and_narrow_layers_in_smaller_ones(tmp_path: Path) -> None:
    steps_of_8 = prune(network(tmp_path, "plain"), tmp_path / "out", keep_ratio=0.3, fine_tune_epochs=0, round_to=8)

    assert widths(steps_of_8.load()) == [4, 8, 6, 10]  # of 16 in steps of 4, of 32 in steps of 8, of 24 in steps of 6


def test_layers_that_the_user_names_stay_whole(tmp_path: Path) -> None:
    result = prune(network(tmp_path, "plain"), tmp_path / "out", ignored_layers=["3"], **NO_TRAINING)

    assert widths(result.load()) == [8, 32, 12, 10]


def test_the_input_and_its_files_stay_as_they_were(tmp_path: Path) -> None:
    model = network(tmp_path, "plain")
    before = model.digest

    prune(model, tmp_path / "out", keep_ratio=0.25, **NO_TRAINING)

    assert PyTorchModelHandler(folder=model.folder).digest == before
    assert widths(model.load()) == [16, 32, 24, 10]


def test_nothing_to_prune_is_said(tmp_path: Path) -> None:
    whole = prune(network(tmp_path, "single"), tmp_path / "single_out", **NO_TRAINING)
    (tmp_path / "again").mkdir()
    kept = prune(network(tmp_path / "again", "plain"), tmp_path / "out", keep_ratio=1.0, **NO_TRAINING)

    assert (whole.notes["changed"], whole.notes["reason"]) == (False, "no layer has channels to spare: each makes an output, or is too narrow")
    assert (kept.notes["changed"], kept.notes["reason"]) == (False, "keep_ratio 1 keeps every channel")


def test_a_network_whose_code_holds_a_size_is_refused_with_the_mend(tmp_path: Path) -> None:
    model = network(tmp_path, "size_in_code")

    with pytest.raises(PassError, match=r"the module must run on x \[2, 1, 8, 8\].*name the layer in ignored_layers"):
        prune(model, tmp_path / "out", **NO_TRAINING)


def test_training_after_pruning_brings_accuracy_back(tmp_path: Path, digits: tuple[Path, np.ndarray, np.ndarray]) -> None:
    path, x, labels = digits
    model = network(tmp_path, "residual")
    trained = prune(model, tmp_path / "base", keep_ratio=1.0, fine_tune_epochs=4, learning_rate=4e-3, train_data_dir=str(path))

    def accuracy(handler: PyTorchModelHandler) -> float:
        with torch.no_grad():
            return float((handler.load()(torch.from_numpy(x)).argmax(1).numpy() == labels).mean())

    untuned = prune(trained, tmp_path / "untuned", keep_ratio=0.5, fine_tune_epochs=0)
    tuned = prune(trained, tmp_path / "tuned", keep_ratio=0.5, fine_tune_epochs=4, learning_rate=4e-3, train_data_dir=str(path))

    assert accuracy(trained) > 0.9
    assert accuracy(tuned) > max(0.85, accuracy(untuned) + 0.1)
    assert widths(tuned.load()) == widths(untuned.load())


def test_training_gives_equal_bytes_twice_and_puts_the_threads_back(tmp_path: Path, digits: tuple[Path, np.ndarray, np.ndarray]) -> None:
    model = network(tmp_path, "depthwise")
    torch.set_num_threads(2)
    state = torch.get_rng_state()

    results = [prune(model, tmp_path / str(i), fine_tune_epochs=1, train_data_dir=str(digits[0])) for i in range(2)]

    assert results[0].digest == results[1].digest
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_are_fitted_by_their_squared_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.random((256, 1, 8, 8)).astype(np.float32)
    targets = np.stack([x.mean((1, 2, 3)), *([x[:, 0, 0, 0]] * 9)], 1)
    np.savez(tmp_path / "train.npz", x=x, labels=targets)
    model = network(tmp_path, "single")

    result = prune(model, tmp_path / "out", keep_ratio=1.0, fine_tune_epochs=20, learning_rate=0.01, train_data_dir=str(tmp_path / "train.npz"))

    def error(handler: PyTorchModelHandler) -> float:
        with torch.no_grad():
            return float(((handler.load()(torch.from_numpy(x)).numpy() - targets) ** 2).mean())

    assert error(result) < 0.2 * error(model)


@pytest.mark.parametrize("loop", ["train", "script.py:train"])
def test_the_users_own_training_loop_takes_the_place_of_the_built_in_one(tmp_path: Path, loop: str) -> None:
    np.savez(tmp_path / "train.npz", x=np.zeros((3, 1, 8, 8), np.float32), weights=np.ones(3))
    model = network(tmp_path, "single")
    (tmp_path / "out").mkdir()
    named = loop if loop == "train" else f"{model.script}:train"
    config = {"keep_ratio": 1.0, "fine_tune_epochs": 2, "batch_size": 5, "training_loop": named, "train_data_dir": str(tmp_path / "train.npz")}

    result = TorchPruning(CPU, config, user_script=model.script).run(model, tmp_path / "out")

    difference = result.load()[-1].bias - model.load()[-1].bias
    torch.testing.assert_close(difference, torch.full((10,), 208.0))


def test_training_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="fine_tune_epochs above 0 takes training data; got no train_data_dir"):
        prune(network(tmp_path, "plain"), tmp_path / "out", fine_tune_epochs=1)
    assert TorchPruning.needed_data(TorchPruning(CPU).config) == {"train"}
    assert TorchPruning.needed_data(TorchPruning(CPU, {"fine_tune_epochs": 0}).config) == frozenset()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "training data must hold an array 'labels'; got x"),
        (np.zeros((4, 3), np.int64), "labels of classes must have the output's shape without its axis of classes; got [4, 3] for [4, 10]"),
        (np.zeros((4, 3), np.float32), "labels of floats must have the shape of the output; got [4, 3] for [4, 10]"),
        (np.full(4, 99), "training must go through; got IndexError"),
    ],
)
def test_labels_that_do_not_fit_are_refused_in_words(tmp_path: Path, labels: np.ndarray | None, message: str) -> None:
    arrays = {"x": np.zeros((4, 1, 8, 8), np.float32)} | ({} if labels is None else {"labels": labels})
    np.savez(tmp_path / "train.npz", **arrays)

    with pytest.raises(PassError) as caught:
        prune(network(tmp_path, "plain"), tmp_path / "out", fine_tune_epochs=1, train_data_dir=str(tmp_path / "train.npz"))

    assert message in str(caught.value)


def test_layers_and_shares_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PassConfigError, match=r"keep_ratio must be float, at least 0.01 and at most 1; got 0"):
        TorchPruning(CPU, {"keep_ratio": 0.0})
    with pytest.raises(PassConfigError, match=r"importance must be one of 'l1', .*; got 'l3'"):
        TorchPruning(CPU, {"importance": "l3"})
    with pytest.raises(PassError, match=r"ignored_layers must name submodules; got 'bodi'"):
        prune(network(tmp_path, "plain"), tmp_path / "out", ignored_layers=["bodi"], **NO_TRAINING)


def test_weights_of_another_network_are_refused_when_loaded() -> None:
    small, large = torch.nn.Linear(4, 2), torch.nn.Linear(4, 3)

    with pytest.raises(ConfigError, match=r"weights must fit the module that the loader builds: weight has shape \[2, 4\] there; got \[3, 4\]"):
        load_fitting(small, large.state_dict())
    with pytest.raises(ConfigError, match="weights must have the names of the loader's module"):
        load_fitting(large, {"weight": small.weight.detach()})
