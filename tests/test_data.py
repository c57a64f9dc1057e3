"""Data files and how their rows feed a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.data import Feeding, count_rows, feeds, load_arrays, plan_feeding
from autotune.errors import ConfigError
from autotune.model import IoContract, TensorSpec


def contract(**shapes: tuple[int | str | None, ...]) -> IoContract:
    return IoContract(inputs=tuple(TensorSpec(name, "float32", shape) for name, shape in shapes.items()))


# ---- files


def test_an_npz_is_read_as_its_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "eval.npz", x=np.ones((3, 2), np.float32), labels=np.arange(3))

    arrays = load_arrays(tmp_path / "eval.npz")

    assert {n: a.shape for n, a in arrays.items()} == {"x": (3, 2), "labels": (3,)}
    assert count_rows(arrays) == 3


def test_the_files_of_a_folder_are_joined_in_name_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", x=np.array([3.0]))
    np.savez(tmp_path / "a.npz", x=np.array([1.0, 2.0]))

    assert load_arrays(tmp_path)["x"].tolist() == [1.0, 2.0, 3.0]


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "calib.npz", x=np.ones(1))

    with pytest.raises(ConfigError, match=r"Did you mean 'calib\.npz'"):
        load_arrays(tmp_path / "calb.npz")


def test_what_is_no_npz_of_plain_arrays_is_refused_without_a_traceback(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.ones(3))
    np.savez(tmp_path / "objects.npz", x=np.array([{"a": 1}, None], object))
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "good.npz", x=np.ones(1000))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:400])

    for name in ("one.npy", "objects.npz", "text.npz", "empty.npz", "cut.npz"):
        with pytest.raises(ConfigError, match=r"must be an \.npz of plain arrays") as caught:
            load_arrays(tmp_path / name, who="calibration")
        assert str(caught.value).startswith("calibration: ")
        assert name in str(caught.value)


def test_arrays_of_unequal_length_are_refused_with_their_shapes(tmp_path: Path) -> None:
    np.savez(tmp_path / "e.npz", x=np.ones((3, 2)), labels=np.arange(4))
    np.savez(tmp_path / "s.npz", x=np.ones((3, 2)), scale=np.float32(1))

    with pytest.raises(ConfigError, match=r"x \(3, 2\), labels \(4,\)"):
        load_arrays(tmp_path / "e.npz")
    with pytest.raises(ConfigError, match=r"scale \(\)"):
        load_arrays(tmp_path / "s.npz")


def test_data_without_a_row_or_a_file_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz", x=np.ones((0, 2)))
    (tmp_path / "folder").mkdir()

    with pytest.raises(ConfigError, match="at least one example"):
        load_arrays(tmp_path / "none.npz")
    with pytest.raises(ConfigError, match=r"must hold \.npz files"):
        load_arrays(tmp_path / "folder")


def test_files_of_a_folder_with_different_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(1))
    np.savez(tmp_path / "b.npz", x=np.ones(1), y=np.ones(1))

    with pytest.raises(ConfigError, match="must hold the same arrays; got y"):
        load_arrays(tmp_path)


# ---- planning


def test_an_array_of_the_inputs_rank_is_a_batch() -> None:
    assert plan_feeding({"x": np.ones((5, 3))}, contract(x=("n", 3)), batch_size=2) == Feeding(batched=True, batch_size=2)


def test_an_array_of_one_rank_more_is_one_run_an_example() -> None:
    plan = plan_feeding({"x": np.ones((5, 1, 3))}, contract(x=(1, 3)), batch_size=2)

    assert plan == Feeding(batched=False, batch_size=2)
    assert plan.rows_per_run() == 1


def test_a_fixed_batch_of_the_model_overrides_the_one_asked() -> None:
    assert plan_feeding({"x": np.ones((5, 3))}, contract(x=(4, 3)), batch_size=2).batch_size == 4


def test_an_input_without_an_array_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'image'"):
        plan_feeding({"image": np.ones((2, 3))}, contract(images=("n", 3)))


@pytest.mark.parametrize(
    ("array", "shape", "part"),
    [
        (np.ones((5, 3, 2, 2)), ("n", 3), "needs that rank"),
        (np.ones(5), ("n", 3), "needs that rank"),
        (np.ones((5, 4)), ("n", 3), "axis 1 of input 'x' must be 3"),
        (np.ones((5, 2, 3)), (1, 3), "axis 0 of input 'x' must be 1"),
    ],
)
def test_arrays_that_do_not_fit_the_input_are_refused(array: np.ndarray, shape: tuple[int | str, ...], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_feeding({"x": array}, contract(x=shape))

    assert part in str(caught.value)


def test_a_mixture_of_batches_and_single_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match="a mixture: x would be a batch"):
        plan_feeding({"x": np.ones((5, 3)), "state": np.ones((5, 1, 8))}, contract(x=("n", 3), state=(1, 8)))


def test_an_input_that_is_no_tensor_is_refused() -> None:
    io = IoContract(inputs=(TensorSpec("x", "other", None),))

    with pytest.raises(ConfigError, match="must be a tensor"):
        plan_feeding({"x": np.ones(3)}, io)


# ---- feeding


@given(st.integers(1, 17), st.integers(1, 6))
def test_every_row_is_fed_once_in_order_and_the_last_batch_is_filled(rows: int, batch: int) -> None:
    arrays = {"x": np.arange(rows, dtype=np.float32).reshape(rows, 1)}
    io = contract(x=("n", 1))

    runs = list(feeds(arrays, io, Feeding(batched=True, batch_size=batch)))

    assert all(feed["x"].shape == (batch, 1) for feed, _ in runs)
    fed = [float(v) for feed, real in runs for v in feed["x"][:real, 0]]
    assert fed == list(range(rows))


def test_chosen_rows_come_in_the_order_chosen() -> None:
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(6, 1, 1)}

    runs = list(feeds(arrays, contract(x=(1, 1)), Feeding(batched=False), rows=[4, 0, 4]))

    assert [float(feed["x"][0, 0]) for feed, _ in runs] == [4.0, 0.0, 4.0]
    assert all(real == 1 for _, real in runs)


def test_arrays_are_fed_in_the_inputs_own_type() -> None:
    io = IoContract(inputs=(TensorSpec("x", "float16", ("n",)), TensorSpec("text", "string", ("n",))))
    arrays = {"x": np.ones(2), "text": np.array(["a", "bc"]), "unused": np.ones(2)}

    ((feed, _),) = feeds(arrays, io, Feeding(batched=True, batch_size=2))

    assert set(feed) == {"x", "text"}
    assert feed["x"].dtype == np.float16
    assert feed["text"].dtype == object
