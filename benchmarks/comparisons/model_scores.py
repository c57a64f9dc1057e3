"""Scores of real models that no built-in metric gives, as functions that a sweep's metric may name: `model_scores.py:token_loss`.

Only numpy is imported: children load this file by its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def lines_right(outputs: Mapping[str, NDArray[Any]], labels: NDArray[Any]) -> NDArray[np.float64]:
    """1 for each line of text that is read without an error, else 0.

    The output of rank 3, (lines, steps, characters), is read as connectionist temporal classification: the best character of each step, repeats
    taken once, then blanks, which are character 0, left out. Labels: (lines, length), filled up with 0.
    """
    steps = next(a for a in outputs.values() if a.ndim == 3).argmax(-1)
    right = np.zeros(len(labels))
    for row, (best, want) in enumerate(zip(steps, labels, strict=True)):
        once = best[np.r_[True, best[1:] != best[:-1]]]
        right[row] = once[once > 0].tolist() == want[want > 0].tolist()
    return right


lines_right.unit = "share"  # type: ignore[attr-defined]  # what the metric reads beside the scores


def token_loss(outputs: Mapping[str, NDArray[Any]], labels: NDArray[Any]) -> NDArray[np.float64]:
    """Mean loss of each text in nats a token: the logarithm of its perplexity.

    The output of rank 3, (texts, steps, tokens), holds logits; labels (texts, steps) hold the next token, or a negative number for none.
    """
    logits = next(a for a in outputs.values() if a.ndim == 3)
    losses = np.zeros(len(labels))
    for row, (text, want) in enumerate(zip(logits, labels, strict=True)):  # one at a time: all at once would take gigabytes
        told = want >= 0
        values = text[told].astype(np.float64)
        top = values.max(-1)
        total = top + np.log(np.exp(values - top[:, None]).sum(-1))
        losses[row] = float((total - values[np.arange(len(values)), want[told]]).mean())
    return losses


token_loss.higher_is_better = False  # type: ignore[attr-defined]
