"""The style of every figure: one palette, one page width.

The colors are Okabe and Ito's, which color-blind readers can tell apart. Curves also differ in
marker or line style. Where algorithms are compared GSPO is blue and GRPO orange.
"""

from functools import lru_cache
from pathlib import Path

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PINK = "#CC79A7"
SKY = "#56B4E9"
GREY = "#666666"
BLACK = "#000000"
COLOURS = [BLUE, ORANGE, GREEN, RED, PINK, SKY, GREY, BLACK]

STYLE = {
    "figure.dpi": 100, "savefig.dpi": 130, "figure.constrained_layout.use": True, "font.size": 10,
    "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.grid": True, "grid.alpha": 0.25,
    "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.8,
    "legend.frameon": False, "legend.fontsize": 9, "svg.hashsalt": "gspo",
}


@lru_cache(maxsize=1)
def pyplot():
    """matplotlib.pyplot, imported only when something is drawn, so that training starts faster."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams.update(STYLE | {"axes.prop_cycle": plt.cycler(color=COLOURS)})
    return plt


def panels(rows=1, columns=2, height=3.4, width=8.0, **options):
    """(figure, axes). The default width of 8 inches is about that of a page on GitHub."""
    return pyplot().subplots(rows, columns, figsize=(width, height), **options)


def save(figure, *files):
    """Write a figure in the format of each file's name, PNG without one, and create folders."""
    for file in map(Path, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        options = {"metadata": {"Date": None}} if file.suffix == ".svg" else {}     # reproducible
        figure.savefig(file, format=file.suffix.removeprefix(".") or "png", **options)
    pyplot().close(figure)


def label(axes, title, x, y):
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
