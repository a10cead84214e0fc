"""What the numbers of a tensor have in common: least, greatest, mean, spread, how they are spread.

Reads a few megabytes at a time, once, and once more for a histogram.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsdformat.boxes import Box, whole
from dsdformat.convert.numbers import Readable, as_numbers, has_numbers, need_numpy, pieces
from dsdformat.format.dtypes import DTYPES

__all__ = ["Summary", "find_histogram", "find_summary"]

Told = Callable[[int], None]


@dataclass(slots=True)
class Summary:
    """What the finite elements of a box have in common.

    Attributes:
        low, high: The least and the greatest; None where there is no order, or no element.
        total, count: Their sum and number.
        nan, infinite: How many elements are left out.
        zeros: How many are zero, be it negative.
        spread: Sum of the squared distances from the mean.
    """

    low: Any = None
    high: Any = None
    total: Any = 0
    count: int = 0
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    spread: float = 0.0

    @property
    def mean(self) -> Any:
        """Their mean; None where there is no element."""
        return self.total / self.count if self.count else None

    @property
    def std(self) -> float | None:
        """Their standard deviation, with the number of elements as the divisor, as numpy's."""
        return math.sqrt(self.spread / self.count) if self.count else None


def find_summary(
    tensor: Readable, box: Box | None = None, *, told: Told | None = None
) -> Summary | None:
    """Read a box, and sum it up; None where elements are no numbers.

    Args:
        tensor: Of any checkpoint.
        box: The whole tensor if None.
        told: Called with the number of bytes that were read, each time some were.

    Raises:
        ChecksumError, ConvertError: what is read is damaged.
        DependencyError: `missing_dependency`: numbers need numpy.

    Ranks: local.
    Memory: about 50 MiB, however large the box.
    """
    if not has_numbers(tensor.dtype):
        return None
    np, summary = need_numpy(), Summary()
    itemsize = DTYPES[tensor.dtype].itemsize
    with np.errstate(all="ignore"):
        for piece in pieces(whole(tensor.shape) if box is None else box, itemsize):
            data = tensor.read(piece)
            _add(summary, np, as_numbers(data, tensor.dtype))
            if told is not None:
                told(len(data))
    return summary


def find_histogram(
    tensor: Readable, low: float, high: float, bins: int, *, told: Told | None = None
) -> list[int]:
    """Count the finite elements in equal parts of a range, of which the last has both its ends.

    Raises:
        ChecksumError, ConvertError: what is read is damaged.

    Ranks: local.
    Memory: about 50 MiB.
    """
    np = need_numpy()
    counts = np.zeros(bins, "int64")
    itemsize = DTYPES[tensor.dtype].itemsize
    # Halved, so that the width of a range of all doubles is a double.
    width = high / 2 - low / 2 or 1.0
    with np.errstate(all="ignore"):
        for piece in pieces(whole(tensor.shape), itemsize):
            data = tensor.read(piece)
            numbers = as_numbers(data, tensor.dtype).astype("float64")
            numbers = numbers[np.isfinite(numbers)]
            places = ((numbers / 2 - low / 2) / width * bins).astype("int64")
            counts += np.bincount(np.clip(places, 0, bins - 1), minlength=bins)
            if told is not None:
                told(len(data))
    found: list[int] = counts.tolist()
    return found


def _add(summary: Summary, np: Any, elements: Any) -> None:
    kind = elements.dtype.kind
    if kind in "fc":
        finite = np.isfinite(elements)
        if not finite.all():
            nan = int(np.isnan(elements).sum())
            summary.nan += nan
            summary.infinite += elements.size - int(finite.sum()) - nan
            elements = elements[finite]
    if elements.size == 0:
        return
    total = elements.sum(dtype=elements.dtype if kind in "fc" else "float64").item()
    mean = total / elements.size
    distances = np.abs(elements - mean)
    # The sums of two parts, put together as Chan, Golub and LeVeque do (1979).
    if summary.count:
        share = summary.count * (elements.size / (summary.count + elements.size))
        summary.spread += abs(mean - summary.mean) ** 2 * share
    summary.spread += float(np.dot(distances, distances))
    summary.zeros += elements.size - int(np.count_nonzero(elements))
    summary.count += elements.size
    summary.total += total
    if kind != "c":
        low, high = elements.min().item(), elements.max().item()
        summary.low = low if summary.low is None else min(summary.low, low)
        summary.high = high if summary.high is None else max(summary.high, high)
