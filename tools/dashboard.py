"""The curves of a run from metrics.jsonl and summary.json: nine panels, without that of the experts
for dense models, and one for both if the reward is the share of right answers.

Every panel says what is usual; docs/metrics.md says for which models this is true.
"""

import json
import math

from tools import style

MARKERS = "osD^vP"               # of held-out scores, by metric

PANELS = [  # title, unit, metrics (a + sums them), logarithmic, what is usual
    ("right answers: rollouts, held-out (dots)", "share", "pass_rate pass_at_1/0", False,
     "rises; if flat, see the dead groups"),
    ("reward and its parts, held-out (dots)", "mean", "reward held_out_reward/0", False,
     "rises, and so do the parts"),
    ("clipped tokens", "share", "clip_low+clip_high", True,
     "follows the learning rate; near 1: the rate is too high"),
    ("log-ratio spread, last mini-batch", "variance", "log_w_var log_s_var", True,
     "1e-4 to 1e-2; log s about log w / length"),
    ("length", "tokens", "length", False, "steady; a fall to a few tokens is a collapse"),
    ("entropy", "nats per token", "entropy", False, "falls slowly; 0 at the start: no exploration"),
    ("gradient norm before clipping", "", "grad_norm", True,
     "steady; a spike: see ratio_max in metrics.jsonl"),
    ("dead groups: all rewards are equal", "share", "dead_groups", False,
     "rises as responses become right; 1: nothing is learned"),
    ("experts flipped", "share", "flip_rate", False, "below .05; more with larger steps"),
]


def curve(records, metric):
    """[(step, value)] of the records that have the metric. "a+b" is the sum of two metrics, "a/b"
    an entry of a dict or list."""
    def value(record, name):
        for key in name.split("/"):
            record = record[int(key)] if isinstance(record, list) else (record or {}).get(key)
        return record

    rows = [(r["step"], [value(r, name) for name in metric.split("+")]) for r in records]
    return [(step, sum(values)) for step, values in rows if None not in values]


def with_held_out(folder, records):
    """The records of a run with the held-out scores of summary.json: those before training as batch
    0, those after training in the last batch."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):                            # the run has not finished
        return records

    def scores(when):
        names = {"pass_at_1": f"pass_at_1_{when}", "held_out_reward": f"reward_{when}"}
        scores = {name: [summary[key]] for name, key in names.items() if key in summary}
        return scores | {"held_out_parts": summary.get(f"reward_parts_{when}", {})}
    return [{"step": 0, **scores("before")}, *records[:-1], records[-1] | scores("after")]


def is_share(runs):
    """Whether in all runs the mean reward is the share of right answers, so that one panel shows
    both."""
    return all(curve(records, share) == curve(records, reward) for records in runs.values()
               for share, reward in (("pass_rate", "reward"), ("pass_at_1/0", "held_out_reward/0")))


def draw(runs):
    """The figure of {run: metrics records}, with a color per run and a line style per metric."""
    every = [record for records in runs.values() for record in records]
    parts = sorted({part for record in every for part in record.get("reward_parts") or ()})
    held_out = sorted({part for record in every for part in record.get("held_out_parts") or ()})
    one = is_share(runs) and len(parts) <= 1
    left_out = ["reward held_out_reward/0"] if one else []
    if not any(curve(records, "flip_rate") for records in runs.values()):
        left_out.append("flip_rate")                         # dense models
    panels = [panel for panel in PANELS if panel[2] not in left_out]
    rows = math.ceil(len(panels) / 2)
    figure, axes = style.panels(rows, 2, height=2.7 * rows, width=9)
    for place in axes.flat[len(panels):]:
        place.set_axis_off()
    for place, (title, unit, metrics, log, usual) in zip(axes.flat, panels):
        metrics = metrics.split()
        if "reward" in metrics and len(parts) > 1:
            metrics += [f"reward_parts/{part}" for part in parts]
        if "reward" in metrics and len(held_out) > 1:
            metrics += [f"held_out_parts/{part}" for part in held_out]
        title = title.replace("right answers", "reward = right answers") if one else title
        fill(place, runs, metrics, log)
        style.label(place, title, "rollout batch", unit)
        place.set_title(title, pad=16)                       # room for the line below it
        place.xaxis.get_major_locator().set_params(integer=True)     # there is no batch 2.5
        place.text(0, 1.02, f"usual: {usual}", transform=place.transAxes, fontsize=8,
                   color=style.GREY)
    line = style.pyplot().Line2D
    handles = [line([], [], color=colour, label=str(run)[-60:])
               for colour, run in zip(style.COLOURS * len(runs), runs)]
    figure.legend(handles=handles, loc="outside upper left")
    return figure


def named(metric):
    """A metric's name in a legend."""
    if metric in ("pass_at_1/0", "held_out_reward/0"):
        return "held-out"
    if metric.startswith("held_out_parts/"):
        return f"{metric.removeprefix('held_out_parts/')}, held-out"
    return "rollouts" if metric == "pass_rate" else metric.removeprefix("reward_parts/")


def fill(place, runs, metrics, log):
    """Draw the curves of one panel. A logarithmic axis is linear below the smallest positive value,
    so that 0 can be drawn."""
    values = []
    labelled = set()
    present = [m for m in metrics if any(curve(records, m) for records in runs.values())]
    dotted = [m for m in present if m.endswith("/0") or m.startswith("held_out")]
    lines = [m for m in present if m not in dotted]
    for colour, records in zip(style.COLOURS * len(runs), runs.values()):
        for metric in present:
            points = curve(records, metric)
            if not points:
                continue
            dots = metric in dotted                          # held-out: not measured in every batch
            marker = MARKERS[dotted.index(metric) % len(MARKERS)] if dots else "o"
            look = ":" if dots else style.LINES[lines.index(metric) % len(style.LINES)]
            place.plot(*zip(*points), look, color=colour,
                       label=named(metric) if len(present) > 1 and metric not in labelled else None,
                       marker=marker if dots or len(points) == 1 else None, markersize=4)
            values += [y for _, y in points]
            labelled.add(metric)
    positive = [v for v in values if v > 0]
    if not values:
        place.text(.5, .5, "not measured in these runs", ha="center", transform=place.transAxes,
                   color=style.GREY)
    elif log and positive and min(values) == 0:
        place.set_yscale("symlog", linthresh=min(positive), linscale=0.7)
        place.set_ylim(bottom=-min(positive) / 4)
    elif log and positive:
        place.set_yscale("log")
    if len(present) > 1:
        place.legend()
