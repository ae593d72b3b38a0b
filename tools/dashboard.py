"""`eval.py dashboard`: the curves of one or several runs, from metrics.jsonl, one panel per metric.

docs/metrics.md defines the metrics and their normal values.
"""

import json
from pathlib import Path

from plumbing.refusal import Refusal
from tools import style

CURVES = ("reward", "pass_rate", "clip_signal", "log_s_var", "zero_variance_groups", "truncated",
          "length", "entropy", "grad_norm", "log_w_var", "reward_std")
LOGARITHMIC = ("log_w_var", "log_s_var", "grad_norm")
WINDOW = (0.05, 0.1)     # of clip_signal, where the samples are fresh


def write_picture(runs, output=None):
    """Draw the curves of runs; dashboard.png in the first one's folder unless `output` names a
    file."""
    file = Path(output or Path(runs[0]) / "dashboard.png")
    style.save(draw({run: read_lines(Path(run) / "metrics.jsonl") for run in runs}), file)
    print(file)


def draw(runs):
    """The figure of {run: metrics records}, with a color per run. The reward is left out where it
    is the pass rate; else the last of CURVES has no room."""
    same = all(r["reward"] == r["pass_rate"] for r in sum(runs.values(), []))
    figure, axes = style.panels(len(CURVES) // 2, 2, height=12)
    for panel, metric in zip(axes.flat, CURVES[same:]):
        style.label(panel, metric, "rollout batch", "")
        for run, records in runs.items():
            panel.plot([r["step"] for r in records], [r[metric] for r in records], label=run)
        if metric in LOGARITHMIC:
            panel.set_yscale("log")
        if metric == "clip_signal":
            band = panel.axhspan(*WINDOW, alpha=0.2, label="window for fresh samples")
            panel.legend(handles=[band])
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper left")
    return figure


def read_lines(file):
    """The records of a .jsonl file of a run."""
    if not file.is_file():
        raise Refusal(f"there is no {file}: it is not the folder of a run, or the run has not "
                      "completed its first rollout batch, or was without --save_tokens")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
