"""The pictures that belong to no claim: the map of the family.

    python experiments/figures.py        draws docs/figures/family_map.png
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from losses import OBJECTIVES                                                           # noqa: E402
from tools.style import GREY, colour, panels, save                                   # noqa: E402

# What a ratio is of, and what is done with it: every kind that losses.py knows, from a token's own
# to a whole answer's, and from PPO's clip to its replacements.
RATIOS = {"none": "none", "token": "one per token", "log-token": "per token,\nthen their mean",
          "log-shifted": "per token,\nthen their mean",
          "gspo-token": "per answer, gradient\nper token",
          "sequence": "per answer:\ngeometric mean", "product": "per answer:\nproduct ∏w"}
CLIPS = {"none": "no clip", "min": "PPO's clip: no gradient\noutside the band",
         "log-min": "the same, token by token,\nbefore the mean",
         "tv": "masked by the change\nof probability",
         "kl": "masked by the change\nof probability",
         "tv-two-sided": "the same, whatever\nthe sign of A",
         "kl-two-sided": "the same, whatever\nthe sign of A",
         "two-sided": "no gradient outside the\nband, whatever the sign of A",
         "square": "no clip, a square\npulls back", "weight": "weight cut,\nno token dropped",
         "sigmoid": "a smooth gate", "gamma": "a smooth weight"}


def family_map():
    """Draw each objective in the cell of its ratio and its clip, as its row in losses.OBJECTIVES
    says."""
    ratios, clips = ({**{x: x for x in found}, **names} for found, names in (
        ([row.ratio for row in OBJECTIVES.values()], RATIOS),
        ([row.clip for row in OBJECTIVES.values()], CLIPS)))     # a new one under its own name
    columns, rows = (list(dict.fromkeys([*known.values(), *names.values()]))
                     for known, names in ((RATIOS, ratios), (CLIPS, clips)))
    cells = {}
    for name, row in OBJECTIVES.items():
        cell = columns.index(ratios[row.ratio]), rows.index(clips[row.clip])
        cells.setdefault(cell, []).append(name)
    figure, axes = panels(1, 1, height=0.6 * len(rows), width=10)
    for (x, y), names in cells.items():
        for place, name in enumerate(names):
            column, line = divmod(place, 3)
            shown = min(3, len(names) - 3 * column)
            axes.text(x + 0.24 * (2 * column - (len(names) - 1) // 3),
                      y + 0.27 * (line - (shown - 1) / 2), name, ha="center", va="center",
                      fontsize=7.5, color="white",
                      bbox=dict(boxstyle="round,pad=0.25", facecolor=colour(name), lw=0))
    axes.set(xlim=(-.5, len(columns) - .5), ylim=(len(rows) - .5, -.5))
    axes.set_xticks(range(len(columns)), columns, fontsize=8.5)
    axes.set_yticks(range(len(rows)), rows, fontsize=8.5)
    axes.set_xticks([x + .5 for x in range(len(columns) - 1)], minor=True)
    axes.set_yticks([y + .5 for y in range(len(rows) - 1)], minor=True)
    axes.grid(False, which="major")
    axes.grid(True, which="minor", color=GREY, alpha=.25)
    axes.tick_params(length=0, which="both")
    axes.set_title("The family: what is the ratio of (across), and what is done with it (down)?")
    return figure


if __name__ == "__main__":
    help_form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=help_form).parse_args()
    save(family_map(), ROOT / "docs/figures/family_map.png")
    print("docs/figures/family_map.png")
