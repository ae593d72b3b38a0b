"""The pictures that belong to no claim: the map of the family.

    python experiments/figures.py        draws docs/figures/family_map.png
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from plumbing.style import BLUE, GREY, panels, save                                       # noqa: E402

# ------------------------------------------------------------------------------------------------------------ the family

# (name, x, y): x from a ratio per token to one per answer, y from the objective as it was, patched, to another unit. Judged by losses.OBJECTIVES.
MAP = [("PPO", .10, .10), ("GRPO", .24, .10), ("Dr. GRPO", .13, .24), ("DAPO", .30, .24), ("SRPO", .40, .17), ("GRPO + routing replay", .22, .38),
       ("CISPO", .12, .66), ("SAPO", .30, .74), ("GMPO", .68, .30), ("RSPO", .84, .22), ("GSPO", .84, .82), ("GSPO-token", .68, .70), ("LUSPO", .86, .66),
       ("VESPO", .66, .90), ("sequence IS (∏w)", .86, .94)]


def family_map():
    figure, axes = panels(1, 1, height=4.6, width=7.0)
    axes.axhline(.5, color=GREY, linewidth=1)
    axes.axvline(.5, color=GREY, linewidth=1)
    for name, x, y in MAP:
        sequence = x > .5
        axes.text(x, y, name, ha="center", va="center", fontsize=11, color="white" if name == "GSPO" else "black",
                  bbox=dict(boxstyle="round,pad=0.3", facecolor=BLUE if name == "GSPO" else "#D6E9F5" if sequence else "#FBE8C4", edgecolor="none"))
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xticks=[.25, .75], yticks=[.25, .75])
    axes.set_xticklabels(["a ratio per token", "a ratio per answer\n(product or geometric mean of its tokens')"])
    axes.set_yticklabels(["patches\nPPO's clip", "replaces what\nis clipped"], rotation=90, va="center")
    axes.tick_params(length=0)
    axes.grid(False)
    axes.set_title("The family: what is the ratio of, and is the clip patched or replaced?")
    return figure


if __name__ == "__main__":
    save(family_map(), ROOT / "docs/figures/family_map.png")
    print("docs/figures/family_map.png")
