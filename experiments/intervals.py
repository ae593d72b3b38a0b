"""Means with 95 % intervals, verdicts by the rules of evidence, and Holm's correction.

A verdict is about a claim. The 95 % t interval over seeds decides, by the bounds that the rule of
the claim names:

  supported               the interval lies inside the bounds for it
  contradicted            it lies inside the bounds against it, or within ±nothing ("equal")
  undecided (n seeds)     it covers a bound, or there are fewer seeds than the rule asks for, or
                          all values are the same, which has no interval
  identical (n pairs)     the runs of every pair are the same: the variant changes nothing here
  k of n supported        some rules of a question are supported, others contradicted

A verdict has a p: the probability of an interval at least as far from the bound if the true value
were on the bound. Results files record the first two as `held` and `refuted`.
"""

import math
from statistics import fmean as mean                 # the same whatever the order of its values
from statistics import stdev

from scipy import stats

HELD = "held"
REFUTED = "refuted"
IDENTICAL = "identical"


class Verdict(str):
    """A verdict that knows its p, None where there is none."""

    def __new__(cls, text, p=None):
        self = super().__new__(cls, text)
        self.p = p
        return self


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


def decide(values, supported, contradicted=None, nothing=0, least=8):
    """HELD, REFUTED or undecided by the interval of the mean of `values`, one per seed.

    supported, contradicted: bounds (low, high) between which the whole interval must lie, not on
    them; contradicted None: it must lie outside those of `supported`. nothing: an interval within
    ±nothing contradicts as well.
    """
    values = list(values)
    undecided = f"undecided ({len(values)} seed{'s' * (len(values) != 1)})"
    if len(values) < max(2, least):
        return Verdict(undecided)
    _, low, high = interval(values)
    if nothing and -nothing <= low and high <= nothing:
        return Verdict(REFUTED, p_within(values, (-nothing, nothing)))
    if low == high:
        return Verdict(undecided)
    yes = p_within(values, supported)
    no = (p_within(values, contradicted) if contradicted is not None
          else p_outside(values, supported))
    if supported[0] < low and high < supported[1]:
        return Verdict(HELD, yes)
    outside = high < supported[0] or low > supported[1]
    if outside if contradicted is None else contradicted[0] < low and high < contradicted[1]:
        return Verdict(REFUTED, no)
    return Verdict(undecided, min(yes, no))


def compare(values, level, least=8, alpha=.05, smallest=.01):
    """Which of two variants is ahead, from one difference per seed: "ahead" or "behind" if the
    interval of the mean, with 1 - alpha confidence, leaves 0 and the mean is at least `smallest`
    from it; "level" if the interval lies within ±level; else undecided."""
    values = list(values)
    middle, low, high = interval(values, alpha)
    if len(values) >= least and low * high > 0 and abs(middle) >= smallest:
        return Verdict("ahead" if middle > 0 else "behind", p_zero(values))
    if len(values) >= least and -level <= low and high <= level:
        return Verdict("level", p_within(values, (-level, level)))
    return Verdict(f"undecided ({len(values)} seeds)", p_zero(values) if len(values) > 1 else None)


def seeds_needed(values, supported, contradicted=None, nothing=0):
    """About how many seeds an undecided claim would take: with 80 % probability the interval then
    clears a bound, if mean and spread stay what they are. None if no number of seeds decides: the
    mean lies between the bounds, or on one."""
    below, above = (-math.inf, supported[0]), (supported[1], math.inf)
    regions = [supported, *([below, above] if contradicted is None else [contradicted])]
    regions += [(-nothing, nothing)] * (nothing > 0)
    rooms = [min(mean(values) - low, high - mean(values)) for low, high in regions]
    room = max(rooms)
    if room <= 0:
        return None
    return max(2, math.ceil((2.8 * stdev(values) / room) ** 2 + 2))   # 1.96 + 0.84, and t's tails


def decide_exact(values, bounds):
    """HELD if every value lies between the bounds, else REFUTED. Without a p: nothing is drawn."""
    return Verdict(HELD if all(bounds[0] < x < bounds[1] for x in values) else REFUTED)


def in_words(verdict):
    """A verdict as it is printed."""
    return {HELD: "supported", REFUTED: "contradicted"}.get(verdict, str(verdict))


def p_within(values, bounds):
    """The p of "the mean lies within bounds": two-sided, of the nearer finite bound."""
    return max(p_beyond(values, bound, side)
               for bound, side in zip(bounds, (1, -1)) if math.isfinite(bound))


def p_outside(values, bounds):
    return min(p_beyond(values, bound, -side)
               for bound, side in zip(bounds, (1, -1)) if math.isfinite(bound))


def p_beyond(values, bound, side):
    """Twice the one-sided p of "the mean is above (side 1) or below (-1) the bound", at most 1."""
    beyond = side * (mean(values) - bound)
    error = standard_error(values)
    if error == 0:
        return 0.0 if beyond > 0 else 1.0
    return min(1.0, 2 * float(stats.t.sf(beyond / error, len(values) - 1)))


def join_verdicts(verdicts):
    """The verdict on several claims joined by 'and'. Its p: HELD, the largest of theirs; REFUTED,
    the smallest times their number, as any of them would do; none if there are both."""
    if REFUTED in verdicts and HELD in verdicts:
        return Verdict(f"{verdicts.count(HELD)} of {len(verdicts)} supported")
    if REFUTED in verdicts:
        no = [v.p for v in verdicts if v == REFUTED and v.p is not None]
        return Verdict(REFUTED, min(1.0, min(no) * len(verdicts)) if no else None)
    unsure = [v for v in verdicts if v != HELD]
    return Verdict(unsure[0] if unsure else HELD,
                   max((v.p for v in verdicts if v.p is not None), default=None))


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


def p_zero(values):
    """The two-sided p of "the mean is not 0"."""
    return min(1.0, *(p_beyond(values, 0, side) for side in (1, -1)))
