"""`eval.py dashboard`: the curves of one or several runs, from metrics.jsonl, one panel per metric.

docs/metrics.md defines the metrics and their normal values.
"""

import json
import sys

from plumbing.model.adapters import read_json
from plumbing.refusal import Refusal, refuse_os_errors
from tools import style

CURVES = ("reward", "pass_rate", "clip_low", "clip_high", "log_w_var", "log_s_var", "length",
          "entropy", "grad_norm", "zero_variance_groups")
HELD_OUT = {"reward": "held_out_reward", "pass_rate": "pass_at_1"}   # drawn in one panel
LOGARITHMIC = ("log_w_var", "log_s_var", "grad_norm")
RENAMED = {"dead_groups": "zero_variance_groups"}           # metrics of runs of older versions


def draw(runs):
    """The figure of {run: metrics records}, with a color per run."""
    figure, axes = style.panels(len(CURVES) // 2, 2, height=12)
    for panel, metric in zip(axes.flat, CURVES):
        held_out = HELD_OUT.get(metric)
        style.label(panel, metric, "rollout batch", "dots: held out" if held_out else "")
        for run, records in runs.items():
            points = [(r["step"], r[metric]) for r in records if r.get(metric) is not None]
            marker = "o" if len(points) == 1 else None
            line, = panel.plot([x for x, _ in points], [y for _, y in points], marker=marker,
                               label=str(run)[-60:])
            evaluated = sorted((r["step"], r[held_out][0]) for r in records if r.get(held_out))
            if evaluated:
                panel.plot(*zip(*evaluated), "o:", color=line.get_color())
            if metric in LOGARITHMIC and any(y > 0 for _, y in points):
                panel.set_yscale("log")                      # which leaves out values of 0
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper left")
    return figure


def read_summary(folder):
    """The held-out figures of summary.json before and after the run, as two records. [] if the run
    is not complete or was not evaluated."""
    file = folder / "summary.json"
    summary = read_json(file) if file.is_file() else {}
    return [{"step": step, "pass_at_1": [summary[f"pass_at_1_{when}"]],
             "held_out_reward": [summary[f"reward_{when}"]]}
            for when, step in (("before", 0), ("after", summary.get("steps")))
            if f"reward_{when}" in summary]


@refuse_os_errors()
def read_metrics(folder):
    """The records of a run's metrics.jsonl, under the metrics' present names. Raises Refusal if
    there is none."""
    file = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise Refusal(f"there is no run folder {folder}")
    if not file.is_file():
        raise Refusal(f"{folder} has no metrics.jsonl: it is not the folder of a run, or the "
                      "run has not completed its first rollout batch")
    return [{RENAMED.get(name, name): value for name, value in record.items()}
            for record in read_lines(file)]


def read_lines(file):
    """The records of a .jsonl file of a run. Lines that are incomplete, or no record, are skipped,
    with a note on stderr. Raises Refusal if there is no record."""
    records = []
    skipped = []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
            records.append(record | {"step": int(record["step"])})
        except (ValueError, TypeError, KeyError):
            skipped.append(str(number))
    if not records:
        raise Refusal(f"{file} has no complete line, so there is nothing to show")
    if skipped:
        print(f"eval.py: {file}: skipped {len(skipped)} line(s) that are incomplete or not "
              f"metrics: {', '.join(skipped[:5])}", file=sys.stderr)
    return records
