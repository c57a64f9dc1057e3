"""What makes a model good: built-in metrics and the user's own functions, each as features per example and a number made of them.

A metric first turns outputs and labels into features, one row per example; its value is then a function of some of these rows. So
the paired comparison with the baseline, and its resampling by example, need no model and no outputs any more.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.data import LABELS, count_rows
from autotune.errors import AutotuneError, ConfigError, nearest
from autotune.model import load_object

Array = NDArray[Any]
Outputs = Mapping[str, Array]
Labels = Array | Mapping[str, Array] | None  # the baseline's outputs for a metric that compares with them

SPOKEN_FOR_SCORES = re.compile("logit|prob|score", re.IGNORECASE)


class NotFiniteScore(AutotuneError):
    """A score is NaN or infinite; the trial is `invalid: not_finite`."""


class BadOutput(AutotuneError):
    """The model's outputs, or what a user's metric made of them, can't be scored; the trial is `invalid: bad_output`."""


@dataclass(frozen=True)
class Features:
    """What a metric keeps of a model: columns of shape (examples, ...).

    A user's function that gives one number has to be asked again for other rows: then outputs and labels are held too.
    """

    columns: tuple[Array, ...]
    outputs: Outputs | None = None
    labels: Array | None = None

    @property
    def examples(self) -> int:
        return len(self.columns[0])


@dataclass(frozen=True)
class Metric:
    """A name, a direction, and how outputs become a score.

    `kind` is `mean` (one score per example, averaged), `set` (one number from all examples) or `found` (a user's function: known
    when it has returned). `unit` is `share` where a point is 0.01, else empty. `reference` says what the outputs are compared with:
    `labels`, `baseline` (its outputs) or `optional` (labels where there are some). Picklable.
    """

    name: str
    features_of: Callable[[str, Outputs, Any, int], Features]
    value_of: Callable[[Features, NDArray[np.int64]], float] | None = None  # None: the mean of the one feature
    check: Callable[[str, Array], None] | None = None  # refuses labels of another kind
    used: Callable[[Outputs, Any, int], list[str]] | None = None  # the outputs it reads; None: all
    higher_is_better: bool = True
    unit: str = ""
    kind: str = "mean"
    reference: str = "labels"
    square_labels: bool = False  # labels are example by example
    right_or_wrong: bool = False  # scores that are all 0 or 1 count right answers, and are judged as proportions
    bounds: tuple[float, float] | None = None  # between which every score per example lies; needed to judge by a part of the examples

    def features(self, outputs: Outputs, labels: Labels, examples: int) -> Features:
        """Turn stacked outputs into features.

        Raises `BadOutput` when no output fits the labels, `NotFiniteScore` when a score is not a finite number.
        """
        return self.features_of(self.name, outputs, labels, examples)

    def value(self, features: Features, rows: NDArray[np.int64] | None = None) -> float:
        """Return the metric over the rows of the features (all, when None; a row may come more than once).

        May be NaN for a resample that holds too little, such as one class only.
        """
        chosen = np.arange(features.examples) if rows is None else rows
        scores = self.per_example(features)
        if scores is not None or self.value_of is None:
            return float(np.mean(features.columns[0][chosen], dtype=np.float64))
        return float(self.value_of(features, chosen))

    def per_example(self, features: Features) -> Array | None:
        """Scores of shape (examples,) whose mean is the metric, or None for a metric over sets."""
        if self.kind == "mean" or (self.kind == "found" and features.outputs is None):
            return features.columns[0]
        return None

    def outputs_used(self, outputs: Outputs, labels: Labels, examples: int) -> list[str]:
        """Names of the outputs that the metric reads, judged by the shapes of a few examples."""
        return self.used(outputs, labels, examples) if self.used else list(outputs)

    def select(self, labels: Array, rows: Sequence[int] | NDArray[np.int64]) -> Array:
        """Labels of some rows, in their order."""
        index = np.asarray(rows, np.int64)
        return labels[np.ix_(index, index)] if self.square_labels else labels[index]


# Which output ---------------------------------------------------------------------------------------------------------------


def _by_example(outputs: Outputs, examples: int) -> dict[str, Array]:
    """Outputs that have one row per example, those named like scores first, else in the model's order."""
    fitting = {n: a for n, a in outputs.items() if a.ndim and len(a) == examples}
    return dict(sorted(fitting.items(), key=lambda item: not SPOKEN_FOR_SCORES.search(item[0])))


def _shapes(outputs: Outputs) -> str:
    return ", ".join(f"{n} {a.dtype} {list(a.shape)}" for n, a in outputs.items()) or "none"


def _row_shape(labels: Array) -> tuple[int, ...]:
    """Shape of one example's label; a single trailing column counts as none."""
    return () if labels.shape[1:] == (1,) else labels.shape[1:]


def _class_scores(outputs: Outputs, labels: Array, examples: int) -> str | None:
    for name, array in _by_example(outputs, examples).items():
        if array.dtype.kind == "f" and array.ndim >= 2 and array.shape[-1] > 1 and array.shape[1:-1] == _row_shape(labels):
            return name
    return None


def _predicted_labels(outputs: Outputs, labels: Array, examples: int) -> str | None:
    for name, array in _by_example(outputs, examples).items():
        if array.dtype.kind in "iu" and _row_shape(array) == _row_shape(labels):
            return name
    return None


def _accuracy_uses(outputs: Outputs, labels: Array, examples: int) -> list[str]:
    name = _class_scores(outputs, labels, examples) or _predicted_labels(outputs, labels, examples)
    return [name] if name else []


def _same_size(outputs: Outputs, labels: Array, examples: int) -> str | None:
    size = labels.size // max(len(labels), 1)
    for name, array in _by_example(outputs, examples).items():
        if array.dtype.kind == "f" and array.size // examples == size:
            return name
    return None


def _mse_uses(outputs: Outputs, labels: Array, examples: int) -> list[str]:
    name = _same_size(outputs, labels, examples)
    return [name] if name else []


def _roc_auc_uses(outputs: Outputs, labels: Array, examples: int) -> list[str]:
    size = labels.size // max(len(labels), 1)
    fitting = [
        n
        for n, a in _by_example(outputs, examples).items()
        if a.dtype.kind == "f" and (a.size // examples == size or (size == 1 and a.shape[1:] == (2,)))
    ]
    fitting.sort(key=lambda n: "prob" not in n.lower())
    return fitting[:1]


def _error_rate_uses(outputs: Outputs, labels: Array, examples: int) -> list[str]:
    del labels
    return [n for n, a in _by_example(outputs, examples).items() if a.dtype.kind in "iu" and a.ndim == 2][:1]


def _pearson_uses(outputs: Outputs, labels: Array, examples: int) -> list[str]:
    del labels
    return [n for n, a in outputs.items() if a.dtype.kind == "f" and a.ndim == 2 and len(a) == examples][:1]


def _need(who: str, found: list[str], wanted: str, outputs: Outputs) -> str:
    if not found:
        raise BadOutput(who, f"needs {wanted}", _shapes(outputs), "Choose another metric, or write one: script.py:function(outputs, labels).")
    return found[0]


# Built-in metrics -----------------------------------------------------------------------------------------------------------


def _accuracy(who: str, outputs: Outputs, labels: Array, examples: int, *, top: int = 1) -> Features:
    """1 where the labelled class is among the `top` best; labels below 0 are ignored (an example of several labels gets their share)."""
    name = _class_scores(outputs, labels, examples)
    if name is None and top == 1:
        name = _predicted_labels(outputs, labels, examples)
    shape = ", ".join(["examples", *map(str, _row_shape(labels))])
    name = _need(
        who, [name] if name else [],
        f"class scores, float [{shape}, classes] with 2 classes or more" + (f", or predicted labels, integer [{shape}]" if top == 1 else ""),
        outputs,
    )  # fmt: skip
    wanted = labels.reshape(examples, *_row_shape(labels)).astype(np.int64)
    got = outputs[name]
    if got.dtype.kind in "iu":
        right = got.reshape(wanted.shape) == wanted
    else:
        classes = got.shape[-1]
        if classes <= top and top > 1:
            raise BadOutput(who, f"needs more than {top} classes", f"{name} with {classes}")
        if wanted.size and wanted.max() >= classes:
            raise BadOutput(who, f"labels must lie under the number of classes, {classes} in output {name!r}", f"label {wanted.max()}")
        if top == 1:
            right = got.argmax(-1) == wanted
        else:
            own = np.take_along_axis(got, np.maximum(wanted, 0)[..., None], -1)
            earlier = np.arange(classes) < wanted[..., None]  # among equal scores the lower class comes first, as argmax has it
            right = ((got > own) | ((got == own) & earlier)).sum(-1) < top
    counted = wanted >= 0
    right, counted = (right & counted).reshape(examples, -1), counted.reshape(examples, -1)
    return Features((right.sum(1) / np.maximum(counted.sum(1), 1),))


def _top_5(who: str, outputs: Outputs, labels: Array, examples: int) -> Features:
    return _accuracy(who, outputs, labels, examples, top=5)


def _mse(who: str, outputs: Outputs, labels: Array, examples: int) -> Features:
    """Mean of the squared differences over the elements of each example; what padding left open counts as 0."""
    name = _need(who, _mse_uses(outputs, labels, examples), f"a float output as large as the labels, {list(labels.shape)}", outputs)
    got = np.nan_to_num(outputs[name].astype(np.float64), nan=0.0).reshape(examples, -1)
    return Features((np.mean((got - labels.astype(np.float64).reshape(examples, -1)) ** 2, axis=1),))


def _cosine(who: str, outputs: Outputs, labels: Mapping[str, Array], examples: int) -> Features:
    """Cosine of the angle between the model's and the baseline's outputs of each example; of several outputs the mean.

    Integer outputs count the share of equal elements. Two zero vectors agree, a zero vector and another don't.
    """
    columns = []
    for name, wanted in labels.items():
        if wanted.dtype.kind not in "fiub" or wanted.ndim == 0 or len(wanted) != examples:
            continue
        if name not in outputs or len(outputs[name]) != examples or outputs[name].ndim != wanted.ndim:
            raise BadOutput(who, f"needs the baseline's output {name!r}, {list(wanted.shape)}", _shapes(outputs))
        got, reference = (a.reshape(examples, -1) for a in _same_shape(outputs[name], wanted))
        if reference.dtype.kind != "f":
            columns.append(np.mean(got == reference, axis=1) if reference.shape[1] else np.ones(examples))
            continue
        a, b = np.nan_to_num(got.astype(np.float64), nan=0.0), np.nan_to_num(reference.astype(np.float64), nan=0.0)
        norms = np.sqrt((a * a).sum(1) * (b * b).sum(1))
        both_zero = (a == 0).all(1) & (b == 0).all(1)
        cosine = np.clip((a * b).sum(1) / np.where(norms > 0, norms, 1.0), -1.0, 1.0)
        # Equal outputs agree exactly: rounding must not make a copy of the baseline worse than the baseline.
        columns.append(np.where(both_zero | (a == b).all(1), 1.0, cosine))
    if not columns:
        raise BadOutput(who, "needs an output of numbers with one row per example", _shapes(outputs))
    return Features((np.mean(columns, axis=0),))


def _same_shape(got: Array, reference: Array) -> tuple[Array, Array]:
    """Pad both to a common shape: outputs of a length that the data decides."""
    shape = tuple(map(max, got.shape, reference.shape))

    def grown(array: Array) -> Array:
        if array.shape == shape:
            return array
        larger = np.full(shape, np.nan if array.dtype.kind == "f" else -1, array.dtype if array.dtype.kind == "f" else np.int64)
        larger[tuple(map(slice, array.shape))] = array
        return larger

    return grown(got), grown(reference)


def _roc_auc(who: str, outputs: Outputs, labels: Array, examples: int) -> Features:
    name = _need(
        who, _roc_auc_uses(outputs, labels, examples),
        f"a float output of scores as large as the labels, {list(labels.shape)}, or [examples, 2]", outputs,
    )  # fmt: skip
    scores = outputs[name]
    if scores.size != labels.size:
        scores = scores[:, 1]
    return Features((scores.reshape(examples, -1).astype(np.float64), labels.reshape(examples, -1).astype(bool)))


def _roc_auc_value(features: Features, rows: NDArray[np.int64]) -> float:
    """Area under the ROC curve from ranks; ties share their mean rank. NaN with one class only."""
    scores, positive = (column[rows].ravel() for column in features.columns)
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[group]
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return float("nan")
    return float((rank[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def _error_rate(who: str, outputs: Outputs, labels: Array, examples: int) -> Features:
    """Edit distance and label length of each example. Ids below 0 and the labels' filler are no tokens, on both sides."""
    name = _need(who, _error_rate_uses(outputs, labels, examples), "an integer output of ids, [examples, steps]", outputs)
    filler = find_filler(labels)
    distances, lengths = np.zeros(examples, np.int64), np.zeros(examples, np.int64)
    for row in range(examples):
        got, want = (a[(a >= 0) & (a != filler)] if filler is not None else a[a >= 0] for a in (outputs[name][row], labels[row]))
        distances[row], lengths[row] = edit_distance(got, want), len(want)
    return Features((distances, lengths))


def _error_rate_value(features: Features, rows: NDArray[np.int64]) -> float:
    distances, lengths = features.columns
    total = int(lengths[rows].sum())
    return float(distances[rows].sum()) / total if total else float("nan")


def find_filler(labels: Array) -> int | None:
    """Find the id that fills label rows up: it stands at the end of rows only, and at least twice at the end of some row.

    Of several such ids, the one that ends most rows. None when there is none.
    """
    if labels.shape[1] < 2:
        return None
    values, counts = np.unique(labels[labels[:, -1] == labels[:, -2], -1], return_counts=True)
    for value in values[np.argsort(-counts, kind="stable")]:
        here = labels == value
        if not (here[:, :-1] & ~here[:, 1:]).any():
            return int(value)
    return None


def edit_distance(got: Array, want: Array) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions that turn one id sequence into the other."""
    steps = np.arange(len(want) + 1)
    row = steps.copy()
    for done, token in enumerate(got.tolist(), 1):
        best = np.minimum(row[1:] + 1, row[:-1] + (want != token))
        # Insertions run along the row: a running minimum of (cost - position) takes them all at once.
        row = np.minimum.accumulate(np.concatenate([[done], best]) - steps) + steps
    return int(row[-1])


def _pearson(who: str, outputs: Outputs, labels: Array, examples: int) -> Features:
    name = _need(who, _pearson_uses(outputs, labels, examples), "a float output of vectors, [examples, size]", outputs)
    vectors = outputs[name].astype(np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.where(norms > 0, norms, 1.0)
    return Features((vectors @ vectors.T, labels.astype(np.float64)))


def _pearson_value(features: Features, rows: NDArray[np.int64]) -> float:
    """Correlation over all pairs of different examples; a pair of an example with itself, as resampling makes them, is left out."""
    first, second = np.triu_indices(len(rows), 1)
    # Above the diagonal, whatever order the rows come in: labels need not be the same below it.
    a, b = np.minimum(rows[first], rows[second]), np.maximum(rows[first], rows[second])
    a, b = a[a != b], b[a != b]
    x, y = (column[a, b] for column in features.columns)
    if len(x) < 2:
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale > 0 else float("nan")


# Labels ---------------------------------------------------------------------------------------------------------------------


def _wrong_labels(who: str, must: str, labels: Array, do: str = "") -> ConfigError:
    return ConfigError(who, must, f"labels {labels.dtype} {list(labels.shape)}", do)


def _class_labels(who: str, labels: Array) -> None:
    if labels.dtype.kind not in "iub":
        raise _wrong_labels(who, "labels must be class numbers, integers from 0", labels, "Save them as integers, or choose the metric mse.")
    if labels.dtype.kind == "i" and (labels.reshape(len(labels), -1) < 0).all(axis=1).any():
        raise _wrong_labels(who, "each example must have a label that is a class, 0 or more (those below 0 are ignored)", labels)


def _numbers(who: str, labels: Array) -> None:
    if labels.dtype.kind not in "fiub" or not np.isfinite(labels.astype(np.float64)).all():
        raise _wrong_labels(who, "labels must be finite numbers", labels)


def _two_classes(who: str, labels: Array) -> None:
    if labels.dtype.kind not in "fiub" or not np.isin(labels, (0, 1)).all():
        raise _wrong_labels(who, "labels must be 0 or 1", labels)
    if len(np.unique(labels)) < 2:
        raise _wrong_labels(who, "labels must hold both 0 and 1", labels, "Use more, or other, evaluation examples.")


def _id_rows(who: str, labels: Array) -> None:
    if labels.dtype.kind not in "iu" or labels.ndim != 2:
        raise _wrong_labels(who, "labels must be integer ids, [examples, steps], the rows filled up with one id", labels)
    filler = find_filler(labels)
    if not ((labels >= 0) & (labels != filler)).any():
        raise _wrong_labels(who, "labels must hold ids besides the filler", labels)


def _square(who: str, labels: Array) -> None:
    if labels.dtype.kind not in "fiu" or labels.ndim != 2 or labels.shape[0] != labels.shape[1]:
        raise _wrong_labels(who, "labels must be a square of numbers, example by example", labels)
    if len(labels) < 3:
        raise _wrong_labels(who, "labels must hold at least 3 examples", labels)


def check_labels(metric: Metric, arrays: Mapping[str, Array]) -> None:
    """Refuse, before any trial, evaluation data that the metric can't use: `ConfigError` for missing, short or unfit labels."""
    rows = count_rows({n: a for n, a in arrays.items() if n != LABELS} or arrays)
    labels = arrays.get(LABELS)
    if labels is None:
        if metric.reference == "labels":
            near = nearest(LABELS, arrays)
            raise ConfigError(
                metric.name, f"the evaluation data must hold an array {LABELS!r}", f"arrays {', '.join(sorted(arrays))}",
                near if near.startswith("Did") else "Without labels, use the metric cosine: agreement with the original model.",
            )  # fmt: skip
    elif metric.reference != "baseline":
        if labels.ndim == 0 or len(labels) != rows:
            raise ConfigError(metric.name, f"labels must have one row for each of the {rows} examples", f"shape {list(labels.shape)}")
        if metric.check is not None:
            metric.check(metric.name, labels)
    if rows < 2:
        raise ConfigError(metric.name, "the evaluation data must hold at least 2 examples", str(rows), "One example says nothing of others.")


# The user's own -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UserFunction:
    """A function of a user's script, by name, so that it travels to another process."""

    script: Path
    function: str

    def load(self) -> Callable[[dict[str, Array], Array | None], object]:
        """Fetch the function. Raises `ConfigError` when it is missing or can't be called."""
        found = load_object(self.script, self.function, who="metric")
        if not callable(found):
            raise ConfigError("metric", f"{self.script.name}:{self.function} must be a function of (outputs, labels)", type(found).__name__)
        return found  # type: ignore[no-any-return]  # what it returns is checked after each call

    def call(self, who: str, outputs: Outputs, labels: Array | None) -> Array:
        """Call it and return its score, 0-d, or its scores, 1-d; float64, all finite."""
        try:
            returned = self.load()(dict(outputs), labels)
        except (AutotuneError, MemoryError):
            raise
        except Exception as error:
            raise BadOutput(who, "the metric function must work on the model's outputs", _words(error)) from error
        must = "the metric function must return a number, or an array of one score per example"
        if returned is None or isinstance(returned, str | bytes | Mapping):
            raise BadOutput(who, must, _shown(returned))
        try:
            if isinstance(returned, np.ma.MaskedArray):
                returned = np.ma.filled(returned.astype(np.float64), np.nan)  # masked is missing, whatever number lies below
            found = np.asarray(returned)
            if found.dtype.kind not in "fiub" and (found.dtype.kind != "O" or not _all_numbers(found)):
                raise TypeError(f"values of type {found.dtype}" if found.dtype.kind != "O" else _shown(returned))
            scores = found.astype(np.float64)
        except OverflowError:
            raise NotFiniteScore(who, "scores must be finite numbers", "one too large for a float") from None
        except Exception as error:  # an object of the user's may do anything when it is looked at
            raise BadOutput(who, must, f"{type(returned).__name__}: {_words(error)}") from error
        if scores.ndim > 1:
            raise BadOutput(who, must, f"an array of shape {list(scores.shape)}")
        if not np.isfinite(scores).all():
            count = int((~np.isfinite(scores)).sum())
            raise NotFiniteScore(
                who, "scores must be finite numbers", str(float(scores)) if scores.ndim == 0 else f"{count} of {scores.size} that are not"
            )
        return scores


def _all_numbers(found: Array) -> bool:
    """Whether objects are whole numbers too large for numpy, or other real numbers such as fractions."""
    return all(isinstance(v, numbers.Real | Decimal) for v in found.ravel())


def _shown(value: object) -> str:
    """A value for a message; its own `repr` may fail."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return type(value).__name__


def _words(error: Exception) -> str:
    """Type and text of an exception, whose own text may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text can't be had"


@dataclass(frozen=True)
class _UserFeatures:
    """Features of a user's metric: its scores per example, or, for one number, all that it needs to be called again."""

    function: UserFunction

    def __call__(self, who: str, outputs: Outputs, labels: Array | None, examples: int) -> Features:
        scores = self.function.call(who, outputs, labels)
        if scores.ndim == 1:
            if len(scores) != examples:
                raise BadOutput(who, f"the metric function must return one score for each of the {examples} examples", str(len(scores)))
            return Features((scores,))
        return Features((np.full(examples, scores),), outputs=dict(outputs), labels=labels)


@dataclass(frozen=True)
class _UserValue:
    """One number over some rows: the whole set's is known, a resample's is asked of the function again."""

    name: str
    function: UserFunction

    def __call__(self, features: Features, rows: NDArray[np.int64]) -> float:
        if np.array_equal(rows, np.arange(features.examples)):
            return float(features.columns[0][0])
        held = features.outputs or {}
        outputs = {n: a[rows] if a.ndim and len(a) == features.examples else a for n, a in held.items()}
        try:
            return float(self.function.call(self.name, outputs, None if features.labels is None else features.labels[rows]))
        except (BadOutput, NotFiniteScore, TypeError):
            return float("nan")  # a resample may be one that the function can't score


# Names ----------------------------------------------------------------------------------------------------------------------

BUILT_IN: Mapping[str, Metric] = {
    m.name: m
    for m in (
        Metric("accuracy", _accuracy, check=_class_labels, used=_accuracy_uses, unit="share", right_or_wrong=True, bounds=(0.0, 1.0)),
        Metric("top5", _top_5, check=_class_labels, used=_accuracy_uses, unit="share", right_or_wrong=True, bounds=(0.0, 1.0)),
        Metric("mse", _mse, check=_numbers, used=_mse_uses, higher_is_better=False),
        Metric("cosine", _cosine, unit="share", reference="baseline", bounds=(-1.0, 1.0)),
        Metric("roc_auc", _roc_auc, _roc_auc_value, check=_two_classes, used=_roc_auc_uses, unit="share", kind="set"),
        Metric("error_rate", _error_rate, _error_rate_value, check=_id_rows, used=_error_rate_uses, higher_is_better=False, unit="share", kind="set"),
        Metric("pearson", _pearson, _pearson_value, check=_square, used=_pearson_uses, unit="share", kind="set", square_labels=True),
    )
}

ALIASES: Mapping[str, str] = {
    "top 1": "accuracy", "top1": "accuracy", "top 1 accuracy": "accuracy", "acc": "accuracy", "top 5": "top5", "top 5 accuracy": "top5",
    "mean squared error": "mse", "cosine agreement": "cosine", "cosine similarity": "cosine", "roc auc": "roc_auc", "auc": "roc_auc",
    "auroc": "roc_auc", "error rate": "error_rate", "phoneme error rate": "error_rate", "token error rate": "error_rate",
    "word error rate": "error_rate", "pearson correlation": "pearson", "pearson r": "pearson",
}  # fmt: skip


def get_metric(name: str, *, root: Path | None = None) -> Metric:
    """Return the built-in metric of that name or alias, or the user's function for `script.py:function`.

    A script's path is relative to `root` (the working folder, when None). The function takes (outputs, labels), a dict of stacked
    outputs and the labels or None, and returns a number or one score per example; its attributes `higher_is_better` (default True),
    `unit` ("share": one point is 0.01) and `bounds` (between which every score lies) say the rest. Raises `ConfigError` for an unknown name.
    """
    script, colon, function = name.rpartition(":")
    if colon and script.endswith(".py"):
        user = UserFunction((root or Path()) / script, function)
        found = user.load()
        higher = getattr(found, "higher_is_better", True)
        unit = getattr(found, "unit", "")
        if not isinstance(higher, bool):
            raise ConfigError("metric", f"{function}.higher_is_better must be True or False", repr(higher))
        if unit not in ("", "share"):
            raise ConfigError("metric", f"{function}.unit must be 'share' or ''", repr(unit))
        bounds = _bounds(function, getattr(found, "bounds", None))
        return Metric(
            function,
            _UserFeatures(user),
            _UserValue(function, user),
            higher_is_better=higher,
            unit=unit,
            kind="found",
            reference="optional",
            right_or_wrong=True,
            bounds=bounds,
        )
    words = re.sub(r"[\s_\-]+", " ", name.strip().lower())
    key = ALIASES.get(words, words.replace(" ", "_"))
    if key not in BUILT_IN:
        known = {*BUILT_IN, *ALIASES}
        near = nearest(words, known)
        raise ConfigError(
            "metric", "the metric must be a built-in one or script.py:function", repr(name),
            near if near.startswith("Did") else f"Built in: {', '.join(BUILT_IN)}.",
        )  # fmt: skip
    return BUILT_IN[key]


def _bounds(function: str, given: object) -> tuple[float, float] | None:
    """The bounds that a user's function has as an attribute, checked."""
    if given is None:
        return None
    try:
        low, high = (1.0, 0.0) if isinstance(given, str | bytes) else map(float, given)  # type: ignore[call-overload]  # checked below
    except (TypeError, ValueError, OverflowError):
        low, high = 1.0, 0.0
    if not (np.isfinite((low, high)).all() and low < high):
        raise ConfigError("metric", f"{function}.bounds must be two finite numbers, the lower one first", _shown(given), "Such as bounds = (0, 1).")
    return low, high
