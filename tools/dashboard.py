"""A run in pictures: one page of panels from metrics.jsonl, each saying what healthy looks like."""

from tools import style

PANELS = [  # title, unit, metrics (a + sums them), logarithmic, what healthy looks like
    ("pass rate of the rollouts", "share", "pass_rate", False, "rises; flat: look at the groups"),
    ("clipped tokens", "share", "clip_low+clip_high", True, "GSPO .1 to .5, GRPO under .01"),
    ("log-ratio spread, last mini-batch", "variance", "log_w_var log_s_var", True,
     "1e-4 to 1e-2; log s about 1/length of log w"),
    ("length", "tokens", "length", False, "steady; a fall to a few tokens is a collapse"),
    ("entropy", "nats per token", "entropy", False, "falls slowly; 0 early: nothing is explored"),
    ("gradient norm, before its clip", "", "grad_norm", True, ".05 to 1; a spike: see ratio_max"),
    ("perplexity under the old policy", "", "perplexity_old", False, "falls slowly towards 1"),
    ("experts flipped by the updates", "share", "flip_rate", False, "under .03; .1: a large step"),
    ("groups without signal", "share", "dead_groups", False, "below .5, rising towards the end"),
    ("seconds per rollout batch", "s", "seconds_rollout seconds_logp seconds_update", False,
     "steady"),
]
PARTS = ("parts of the reward", "mean", "each rises, or stays where it should")


def curve(records, metric):
    """[(step, value)] of the records that have it; a + sums, reward_parts/x looks inside."""
    def value(record, name):
        for key in name.split("/"):
            record = (record or {}).get(key)
        return record

    rows = [(r["step"], [value(r, name) for name in metric.split("+")]) for r in records]
    return [(step, sum(values)) for step, values in rows if None not in values]


def draw(runs):
    """The figure of {run: metrics records}: a colour per run, a line style per metric."""
    every = [record for records in runs.values() for record in records]
    named = sorted({part for record in every for part in record.get("reward_parts") or ()})
    title, unit, healthy = PARTS
    metrics = " ".join(f"reward_parts/{part}" for part in named)
    chosen = PANELS + [(title, unit, metrics, False, healthy)] * bool(named)
    rows = -(-len(chosen) // 2)
    figure, axes = style.panels(rows, 2, height=2.7 * rows, width=9)
    for place in axes.flat[len(chosen):]:
        place.remove()
    for place, (title, unit, metrics, log, healthy) in zip(axes.flat, chosen):
        fill(place, runs, metrics.split(), log)
        style.label(place, title, "rollout batch", unit)
        place.set_title(title, pad=16)                       # room for the line below it
        place.text(0, 1.02, f"healthy: {healthy}", transform=place.transAxes, fontsize=8,
                   color=style.GREY)
    line = style.pyplot().Line2D
    handles = [line([], [], color=colour, label=str(run)[-60:])
               for colour, run in zip(style.COLOURS * len(runs), runs)]
    figure.legend(handles=handles, loc="outside upper left")
    return figure


def fill(place, runs, metrics, log):
    """One panel's curves. A logarithmic axis turns linear below its smallest value: 0 is drawn."""
    values = []
    for colour, records in zip(style.COLOURS * len(runs), runs.values()):
        for line, metric in zip(style.LINES * len(metrics), metrics):
            if points := curve(records, metric):
                name = metric.removeprefix("seconds_").removeprefix("reward_parts/")
                named = len(metrics) > 1 and records is next(iter(runs.values()))
                place.plot(*zip(*points), line, color=colour, label=name if named else None,
                           marker="o" if len(points) == 1 else None)
                values += [y for _, y in points]
    positive = [v for v in values if v > 0]
    if not values:
        place.text(.5, .5, "not measured in these runs", ha="center", transform=place.transAxes,
                   color=style.GREY)
    elif log and positive and min(values) == 0:
        place.set_yscale("symlog", linthresh=min(positive), linscale=0.3)
        place.set_ylim(bottom=-min(positive) / 4)
    elif log and positive:
        place.set_yscale("log")
    if len(metrics) > 1 and values:
        place.legend()
