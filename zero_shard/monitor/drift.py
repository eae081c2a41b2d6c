"""Alarms: a number that leaves the band in which the last ones lay.

# Note [Bands]
The band of a number ends above at the median of the last 64 logged values plus the larger of six robust standard
deviations (1.4826 times the median distance from the median) and a share of the median: a tenth for the loss, which
varies little, twice the median for the norm of the gradient, which varies much. Medians do not move for a single
outlier, so a spike neither hides the next one nor widens the band; a lasting change becomes the new normal after half a
window. So that a slow rise is not taken for normal, the median of the loss itself raises an alarm when it stands so far
above the lowest that it has been. Each alarm sounds once, and again after the number has been back inside. Nothing is
said before 16 values, and nothing about values that are not finite, which are events of their own.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_WINDOW = 64
_NUM_SILENT = 16
_NUM_DEVIATIONS = 6.0
_DEVIATION_PER_MEDIAN_DISTANCE = 1.4826  # of a normal distribution


class Band:
    """The band of one number. See Note [Bands].

    Args:
        name: For messages.
        share: Of the median, that the band is wide at the least.
        has_trend: The median itself must not rise.
    """

    def __init__(self, name: str, share: float, has_trend: bool) -> None:
        self._name, self._share, self._has_trend = name, share, has_trend
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._lowest = math.inf  # median so far
        self._is_above = self._has_risen = False

    def add(self, value: float) -> str | None:
        """Take the next value; return the alarm in words if it sounds one."""
        if not math.isfinite(value):
            return None
        message = None
        if len(self._values) >= _NUM_SILENT:
            message = self._compare(value)
        self._values.append(value)
        return message

    def _compare(self, value: float) -> str | None:
        middle = median(self._values)
        spread = _DEVIATION_PER_MEDIAN_DISTANCE * median(abs(each - middle) for each in self._values)
        was_above, limit = self._is_above, middle + self._width(middle, spread)
        self._is_above = value > limit
        if self._is_above and not was_above:
            num_values = len(self._values)
            return f"{self._name} {value:.4g} is above {limit:.4g}: median {middle:.4g} of the last {num_values}"
        if not self._has_trend or len(self._values) < _WINDOW:
            return None
        had_risen, limit = self._has_risen, self._lowest + self._width(self._lowest, spread)
        self._lowest = min(self._lowest, middle)
        self._has_risen = middle > limit
        if self._has_risen and not had_risen:
            return (
                f"{self._name} is rising: median {middle:.4g} of the last {_WINDOW}, {self._lowest:.4g} at its lowest"
            )
        return None

    def _width(self, middle: float, spread: float) -> float:
        return max(_NUM_DEVIATIONS * spread, self._share * abs(middle))
