"""Means with t intervals, verdicts on differences, and Holm's correction.

A verdict is about a difference of two variants, one value per seed:

  ahead, behind   the interval of the mean leaves 0, the mean is at least .01 from it, and p < alpha
                  by Holm over the differences it is one of
  level           the interval lies within ±level
  undecided       else, or with fewer seeds than the rule asks for
"""

import math
from statistics import fmean as mean                 # the same whatever the order of its values
from statistics import stdev

from scipy import stats


def interval(values, alpha=.05):
    """(mean, low, high): t interval of a mean with 1 - alpha confidence; of one value, which has
    none: that value."""
    values = list(values)
    n = len(values)
    middle = mean(values)
    half = float(stats.t.ppf(1 - alpha / 2, n - 1)) * standard_error(values) if n > 1 else 0
    return middle, middle - half, middle + half


def standard_error(values):
    """The standard error of their mean."""
    return stdev(values) / math.sqrt(len(values))


def compare(values, level, least=8, alpha=.05):
    """The verdict on differences, before Holm's correction."""
    middle, low, high = interval(values, alpha)
    if len(values) < max(2, least):
        return "undecided"
    if low * high > 0 and abs(middle) >= .01:
        return "ahead" if middle > 0 else "behind"
    return "level" if -level <= low and high <= level else "undecided"


def p_zero(values):
    """The two-sided p of "the mean is not 0"."""
    error = standard_error(values)
    if error == 0:
        return float(mean(values) == 0)
    return 2 * float(stats.t.sf(abs(mean(values)) / error, len(values) - 1))


def holm(ps):
    """Holm's p of each of several tests, None where there is none: how likely a p as small as this
    is for any of the rows that are not smaller, if nothing were there."""
    places = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])
    found = [None] * len(ps)
    worst = 0.0
    for rank, i in enumerate(places):
        worst = max(worst, min(1.0, (len(places) - rank) * ps[i]))
        found[i] = worst
    return found
