"""Interpolation on measured grids, linear in every axis and going on linearly outside."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from slidingserve.contract.values import Floats


class Curve:
    """Piecewise linear in one variable; right of the last point it goes on with the slope of the last quarter."""

    def __init__(self, points: Floats, values: Floats) -> None:
        self._points, self._values = points.tolist(), values.tolist()
        back = max(1, len(points) // 4)
        self._slope = max(0.0, float((values[-1] - values[-1 - back]) / (points[-1] - points[-1 - back])))

    def __call__(self, x: float) -> float:
        """Returns the value at ``x``; left of the first point its value. O(log n)."""
        points, values = self._points, self._values
        if x >= points[-1]:
            return float(values[-1] + self._slope * (x - points[-1]))
        i = bisect_right(points, x)
        if i == 0:
            return float(values[0])
        share = (x - points[i - 1]) / (points[i] - points[i - 1])
        return float(values[i - 1] + share * (values[i] - values[i - 1]))


class Grid:
    """Multilinear on a full grid.

    ``values`` has one dimension per axis; each axis rises and has at least 2 points. Above an axis' last point the last
    cell goes on linearly; below its first point the value there holds.
    """

    def __init__(self, axes: Sequence[Floats], values: Floats) -> None:
        if values.shape != tuple(len(a) for a in axes) or not np.isfinite(values).all():
            raise ValueError(
                f"grid of shape {values.shape} for axes {[len(a) for a in axes]}: needs one finite value each"
            )
        self._axes = [a.tolist() for a in axes]
        self._values = values.ravel().tolist()
        self._strides = [int(np.prod(values.shape[i + 1 :])) for i in range(values.ndim)]

    def __call__(self, *point: float) -> float:
        """Returns the value at ``point``. O(2^d log n)."""
        corners = [(0, 1.0)]
        for axis, stride, x in zip(self._axes, self._strides, point, strict=True):
            x = max(x, axis[0])
            i = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
            share = (x - axis[i]) / (axis[i + 1] - axis[i])
            if share == 0.0:
                corners = [(at + i * stride, w) for at, w in corners]
            else:
                near, far = i * stride, (i + 1) * stride
                corners = [
                    corner for at, w in corners for corner in ((at + near, w * (1.0 - share)), (at + far, w * share))
                ]
        values = self._values
        return sum(w * values[at] for at, w in corners)


def fill_gaps(values: Floats, axes: Sequence[Floats]) -> Floats:
    """Returns ``values`` with its NaNs filled, last axis first; linear beyond the last known point."""
    filled = values.copy()
    for axis in range(values.ndim - 1, -1, -1):
        moved = np.moveaxis(filled, axis, -1)
        for index in np.ndindex(moved.shape[:-1]):
            moved[index] = _fill_line(moved[index], axes[axis])
    return filled


def _fill_line(line: Floats, points: Floats) -> Floats:
    known = np.flatnonzero(~np.isnan(line))
    if len(known) in (0, len(line)):
        return line
    filled: Floats = np.interp(points, points[known], line[known])
    last = known[-1]
    if len(known) > 1:
        before = known[-2]
        slope = (line[last] - line[before]) / (points[last] - points[before])
        filled[last + 1 :] = line[last] + slope * (points[last + 1 :] - points[last])
    return filled
