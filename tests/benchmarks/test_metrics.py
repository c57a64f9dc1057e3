from __future__ import annotations

import functools
import pickle
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, top_k_accuracy_score

from autotune.benchmarks.metrics import BUILT_IN, BadOutput, NotFiniteScore, check_labels, edit_distance, find_filler, get_metric
from autotune.errors import AutotuneError, ConfigError

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 10, 200)
SCORES = RNG.normal(size=(200, 10)).astype(np.float32)
SCORES[np.arange(200), LABELS] += 2


def score(name: str, outputs: dict[str, np.ndarray], labels: object, *, root: Path | None = None) -> float:
    metric = get_metric(name, root=root)
    examples = max(len(a) for a in outputs.values())
    return metric.value(metric.features(outputs, labels, examples))  # type: ignore[arg-type]


def script(folder: Path, text: str) -> Path:
    (folder / "mine.py").write_text("import numpy as np\n" + text)
    return folder


# Values ---------------------------------------------------------------------------------------------------------------------


def test_accuracy_is_the_share_of_labelled_classes_that_score_highest() -> None:
    assert score("accuracy", {"logits": SCORES}, LABELS) == pytest.approx((SCORES.argmax(1) == LABELS).mean())


def test_accuracy_takes_predicted_labels_when_there_are_no_scores() -> None:
    predicted = SCORES.argmax(1)

    assert score("accuracy", {"label": predicted}, LABELS) == pytest.approx((predicted == LABELS).mean())


def test_accuracy_reads_the_output_named_like_scores_before_another_that_fits() -> None:
    hidden = RNG.normal(size=(200, 64)).astype(np.float32)

    assert score("accuracy", {"hidden": hidden, "logits": SCORES}, LABELS) == score("accuracy", {"logits": SCORES}, LABELS)


def test_accuracy_per_token_leaves_labels_below_zero_out() -> None:
    scores = np.eye(3, dtype=np.float32)[[[0, 1, 2], [0, 0, 0]]]
    labels = np.array([[0, 1, -100], [0, 1, 2]])

    metric = get_metric("accuracy")

    assert metric.features({"logits": scores}, labels, 2).columns[0].tolist() == [1.0, pytest.approx(1 / 3)]


def test_a_single_column_of_scores_is_not_guessed_to_be_classes() -> None:
    with pytest.raises(BadOutput, match=r"accuracy: needs class scores, float \[examples, classes\].*probability float32 \[4, 1\]"):
        score("accuracy", {"probability": np.ones((4, 1), np.float32)}, np.array([0, 1, 1, 0]))


def test_labels_beyond_the_classes_are_refused() -> None:
    with pytest.raises(BadOutput, match="10 in output 'logits'; got label 12"):
        score("accuracy", {"logits": SCORES}, np.full(200, 12))


def test_top_5_agrees_with_scikit_learn() -> None:
    assert score("top-5", {"logits": SCORES - 2 * np.eye(10)[LABELS].astype(np.float32)}, LABELS) == pytest.approx(
        top_k_accuracy_score(LABELS, SCORES - 2 * np.eye(10)[LABELS], k=5)
    )


def test_top_5_of_equal_scores_counts_the_first_five_classes() -> None:
    assert score("top5", {"logits": np.zeros((10, 10), np.float32)}, np.arange(10)) == 0.5


def test_top_5_of_five_classes_is_refused() -> None:
    with pytest.raises(BadOutput, match="more than 5 classes"):
        score("top5", {"logits": SCORES[:, :5]}, LABELS % 5)


def test_mse_averages_over_the_elements_of_each_example() -> None:
    got, labels = RNG.normal(size=(20, 3, 2)).astype(np.float32), RNG.normal(size=(20, 6))

    assert score("mse", {"y": got}, labels) == pytest.approx(((got.reshape(20, 6) - labels) ** 2).mean())


def test_roc_auc_agrees_with_scikit_learn_with_ties_and_labels_of_any_shape() -> None:
    labels = RNG.integers(0, 2, (30, 4)).astype(np.float32)
    scores = np.round(labels + RNG.normal(size=(30, 4)), 0).astype(np.float32)

    assert score("ROC AUC", {"p": scores}, labels) == pytest.approx(roc_auc_score(labels.ravel(), scores.ravel()))


def test_roc_auc_reads_the_second_column_of_two_and_prefers_probabilities() -> None:
    labels = RNG.integers(0, 2, 50)
    probability = np.stack([1 - labels, labels], 1).astype(np.float32)

    assert score("roc_auc", {"logit": RNG.normal(size=50).astype(np.float32), "probabilities": probability}, labels) == 1.0


def test_error_rate_is_edits_over_label_length_without_filler() -> None:
    labels = np.array([[5, 6, 7, 3, 3], [8, 9, 3, 3, 3]])
    got = np.array([[5, 7, 3, -1], [8, 9, 9, 3]])  # one deletion, one insertion

    assert score("phoneme error rate", {"ids": got}, labels) == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("labels", "filler"),
    [([[1, 2, 0, 0], [3, 0, 0, 0]], 0), ([[1, 2, 3], [3, 1, 2]], None), ([[4, 9, 9], [9, 4, 5]], None), ([[1, -1, -1], [2, 3, -1]], -1)],
)
def test_the_filler_is_the_id_that_stands_at_the_end_of_rows_only(labels: list[list[int]], filler: int | None) -> None:
    assert find_filler(np.array(labels)) == filler


def test_edit_distance_agrees_with_the_recursion_that_defines_it() -> None:
    def by_definition(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        @functools.cache
        def at(i: int, j: int) -> int:
            if not i or not j:
                return i + j
            return min(at(i - 1, j) + 1, at(i, j - 1) + 1, at(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

        return at(len(a), len(b))

    rng = np.random.default_rng(3)
    for _ in range(200):
        a, b = rng.integers(0, 3, rng.integers(0, 9)), rng.integers(0, 3, rng.integers(0, 9))
        assert edit_distance(a, b) == by_definition(tuple(a.tolist()), tuple(b.tolist()))


def test_pearson_correlates_cosines_of_all_pairs_with_the_labels() -> None:
    vectors = RNG.normal(size=(12, 5)).astype(np.float32)
    labels = RNG.uniform(size=(12, 12))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = np.triu_indices(12, 1)

    assert score("Pearson correlation", {"v": vectors}, labels) == pytest.approx(np.corrcoef((unit @ unit.T)[pairs], labels[pairs])[0, 1], abs=1e-6)


def test_pearson_over_resampled_rows_leaves_an_example_paired_with_itself_out() -> None:
    vectors = RNG.normal(size=(4, 5)).astype(np.float32)
    metric = get_metric("pearson")
    features = metric.features({"v": vectors}, RNG.uniform(size=(4, 4)), 4)

    once = metric.value(features, np.array([0, 1, 2]))
    doubled = metric.value(features, np.array([0, 1, 2, 0, 1, 2]))  # each pair of different examples four times

    assert doubled == pytest.approx(once)


def test_pearson_takes_rows_and_columns_of_the_labels() -> None:
    labels = np.arange(16).reshape(4, 4)

    assert get_metric("pearson").select(labels, [3, 1]).tolist() == [[15, 13], [7, 5]]
    assert get_metric("accuracy").select(np.arange(4), [3, 1]).tolist() == [3, 1]


def test_cosine_agreement_of_a_copy_is_exactly_one_and_of_the_opposite_minus_one() -> None:
    outputs = {"a": RNG.normal(size=(9, 7)).astype(np.float32)}

    assert score("cosine", outputs, outputs) == 1.0
    assert score("cosine", {"a": -outputs["a"]}, outputs) == pytest.approx(-1.0)


def test_cosine_agreement_of_a_zero_vector_is_one_only_with_another() -> None:
    metric = get_metric("cosine agreement")
    reference = {"a": np.array([[0.0, 0.0], [1.0, 0.0]], np.float32)}

    assert metric.features({"a": np.zeros((2, 2), np.float32)}, reference, 2).columns[0].tolist() == [1.0, 0.0]


def test_cosine_agreement_counts_equal_whole_numbers_and_averages_over_outputs() -> None:
    reference = {"ids": np.array([[1, 2], [3, 4]]), "x": np.ones((2, 3), np.float32)}

    assert score("cosine", {"ids": np.array([[1, 9], [3, 4]]), "x": np.full((2, 3), 2.0, np.float32)}, reference) == pytest.approx(7 / 8)


# Names and labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("top-1 accuracy", "accuracy"), ("Accuracy", "accuracy"), ("top5", "top5"), ("ROC AUC", "roc_auc"), ("mean squared error", "mse"),
        ("word error rate", "error_rate"), ("error-rate", "error_rate"), ("Pearson correlation", "pearson"), ("cosine", "cosine"),
    ],
)  # fmt: skip
def test_metrics_answer_to_the_names_they_go_by(name: str, canonical: str) -> None:
    assert get_metric(name).name == canonical


def test_a_misspelt_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"got 'acuracy'\. Did you mean 'accuracy'\?"):
        get_metric("acuracy")


def test_errors_are_better_small_and_the_rest_large() -> None:
    assert {n for n, m in BUILT_IN.items() if not m.higher_is_better} == {"mse", "error_rate"}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_metric_survives_pickling(name: str) -> None:
    assert pickle.loads(pickle.dumps(BUILT_IN[name])) == BUILT_IN[name]


@pytest.mark.parametrize(
    ("name", "labels", "text"),
    [
        ("accuracy", None, "must hold an array 'labels'; got arrays x. Without labels, use the metric cosine"),
        ("accuracy", np.zeros(6), "labels must be class numbers, integers from 0; got labels float64 [6]"),
        ("accuracy", np.zeros(5, int), "one row for each of the 6 examples; got shape [5]"),
        ("accuracy", np.array([0, 1, -1, 0, 1, 2]), "each example must have a label that is a class"),
        ("roc_auc", np.array([0, 1, 2, 0, 1, 2]), "labels must be 0 or 1"),
        ("roc_auc", np.ones(6), "labels must hold both 0 and 1"),
        ("error_rate", np.zeros(6, int), "labels must be integer ids, [examples, steps]"),
        ("error_rate", np.zeros((6, 3), int), "must hold ids besides the filler"),
        ("pearson", np.zeros((6, 5)), "labels must be a square of numbers"),
        ("mse", np.array([0, 1, 2, np.nan, 1, 2]), "labels must be finite numbers"),
    ],
)
def test_unfit_labels_are_refused_before_any_trial(name: str, labels: np.ndarray | None, text: str) -> None:
    arrays = {"x": np.zeros((6, 2), np.float32), **({} if labels is None else {"labels": labels})}

    with pytest.raises(ConfigError) as error:
        check_labels(get_metric(name), arrays)

    assert text in str(error.value)


def test_a_misspelt_labels_array_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'label'\?"):
        check_labels(get_metric("accuracy"), {"x": np.zeros((6, 2)), "label": np.zeros(6, int)})


def test_fit_labels_pass() -> None:
    x = np.zeros((6, 2))
    check_labels(get_metric("accuracy"), {"x": x, "labels": np.arange(6)})
    check_labels(get_metric("cosine"), {"x": x})
    check_labels(get_metric("roc_auc"), {"x": x, "labels": np.arange(6) % 2 == 0})


def test_one_example_is_too_few() -> None:
    with pytest.raises(ConfigError, match="at least 2 examples"):
        check_labels(get_metric("cosine"), {"x": np.zeros((1, 2))})


# The user's own -------------------------------------------------------------------------------------------------------------


def test_a_function_of_the_users_script_may_give_one_score_per_example(tmp_path: Path) -> None:
    root = script(tmp_path, "def right(outputs, labels):\n    return (outputs['y'] == labels).astype(float)\nright.unit = 'share'\n")
    metric = get_metric("mine.py:right", root=root)

    features = metric.features({"y": np.array([1, 2, 3])}, np.array([1, 2, 0]), 3)

    assert (metric.name, metric.unit, metric.higher_is_better) == ("right", "share", True)
    assert metric.value(features) == pytest.approx(2 / 3)
    assert metric.per_example(features) is not None


def test_a_function_of_the_users_script_may_give_one_number_and_is_asked_again_for_other_rows(tmp_path: Path) -> None:
    root = script(tmp_path, "def worst(outputs, labels):\n    return np.abs(outputs['y'] - labels).max()\nworst.higher_is_better = False\n")
    metric = get_metric("mine.py:worst", root=root)

    features = metric.features({"y": np.array([1.0, 5.0, 3.0]), "fixed": np.ones(7)}, np.array([1.0, 2.0, 2.0]), 3)

    assert not metric.higher_is_better
    assert metric.per_example(features) is None
    assert metric.value(features) == 3.0
    assert metric.value(features, np.array([0, 2, 2])) == 1.0


def test_a_users_metric_survives_pickling_and_still_works(tmp_path: Path) -> None:
    root = script(tmp_path, "def half(outputs, labels):\n    return 0.5\n")

    metric = pickle.loads(pickle.dumps(get_metric("mine.py:half", root=root)))

    assert metric.value(metric.features({"y": np.ones(3)}, None, 3)) == 0.5


@pytest.mark.parametrize(
    ("body", "fault", "text"),
    [
        ("return None", BadOutput, "got None"),
        ("return 'good'", BadOutput, "got 'good'"),
        ("return {'a': 1}", BadOutput, "got {'a': 1}"),
        ("return [1.0, 2.0]", BadOutput, "one score for each of the 3 examples; got 2"),
        ("return np.ones((3, 3))", BadOutput, "an array of shape [3, 3]"),
        ("return [1.0, [2.0]]", BadOutput, "list"),
        ("return float('nan')", NotFiniteScore, "scores must be finite numbers; got nan"),
        ("return [1.0, float('inf'), 2.0]", NotFiniteScore, "1 of 3 that are not"),
        ("return outputs['z'].mean()", BadOutput, "KeyError: 'z'"),
    ],
)
def test_what_is_no_score_is_said_to_be_none(tmp_path: Path, body: str, fault: type[AutotuneError], text: str) -> None:
    root = script(tmp_path, f"def bad(outputs, labels):\n    {body}\n")

    with pytest.raises(fault) as error:
        score("mine.py:bad", {"y": np.ones(3)}, np.ones(3), root=root)

    assert text in str(error.value)


def test_a_zero_dimensional_array_is_one_number(tmp_path: Path) -> None:
    root = script(tmp_path, "def scalar(outputs, labels):\n    return np.array(0.25)\n")

    assert score("mine.py:scalar", {"y": np.ones(3)}, None, root=root) == 0.25


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("other.py:f", "the script must exist"), ("mine.py:qood", "Did you mean 'good'?"), ("mine.py:NUMBER", "must be a function"),
        ("mine.py:undirected", "higher_is_better must be True or False; got 'yes'"), ("mine.py:unitless", "unit must be 'share' or ''; got '%'"),
    ],
)  # fmt: skip
def test_a_users_metric_that_cannot_be_had_is_refused_at_once(tmp_path: Path, name: str, text: str) -> None:
    root = script(
        tmp_path,
        "NUMBER = 3\ndef good(outputs, labels):\n    return 1.0\n"
        "def undirected(outputs, labels):\n    return 1.0\nundirected.higher_is_better = 'yes'\n"
        "def unitless(outputs, labels):\n    return 1.0\nunitless.unit = '%'\n",
    )

    with pytest.raises(ConfigError) as error:
        get_metric(name, root=root)

    assert text in str(error.value)


@pytest.mark.parametrize("fault", [BadOutput, NotFiniteScore])
def test_faults_survive_the_way_back_from_another_process(fault: type[AutotuneError]) -> None:
    error = pickle.loads(pickle.dumps(fault("accuracy", "must", "got", "do")))

    assert type(error) is fault
    assert str(error) == "accuracy: must; got got. do."
