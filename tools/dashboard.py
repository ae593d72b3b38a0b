"""`eval.py dashboard`: the curves of one run or of several, from metrics.jsonl: a panel per metric.

docs/metrics.md says what each metric is and what is normal.
"""

from tools import style

CURVES = ("reward", "pass_rate", "clip_low", "clip_high", "log_w_var", "log_s_var", "length",
          "entropy", "grad_norm", "dead_groups")
LOGARITHMIC = ("log_w_var", "log_s_var", "grad_norm")


def draw(runs):
    """The figure of {run: metrics records}, with a color per run."""
    figure, axes = style.panels(len(CURVES) // 2, 2, height=12)
    for place, metric in zip(axes.flat, CURVES):
        style.label(place, metric, "rollout batch", "")
        for run, records in runs.items():
            points = [(r["step"], r[metric]) for r in records if r.get(metric) is not None]
            marker = "o" if len(points) == 1 else None
            place.plot([x for x, _ in points], [y for _, y in points], marker=marker,
                       label=str(run)[-60:])
            if metric in LOGARITHMIC and any(y > 0 for _, y in points):
                place.set_yscale("log")                      # which leaves out values of 0
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper left")
    return figure
