"""What clipping is, in five pictures drawn from losses.py itself.

    python experiments/objectives.py

    objectives.png        every member: the integral of its gradient, and its weight of ∇log π
    objectives_six.png    the same of six members that differ in kind
    ratio_units.png       one answer, three units of a ratio: a token, the answer, the product
    gradient_weights.png  GRPO's gradient and GSPO's, with their weights on the same answer
    timeline.png          the family from 2017 to 2026

Every curve and bar is autograd through losses.policy_loss or a function of ratios.py; no formula
is repeated here. The answers are made up, from a fixed seed.
"""

import argparse
import math
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from losses import OBJECTIVES, policy_loss, varied                                    # noqa: E402
from tools import style                                                            # noqa: E402
from ratios import product_ratio, sequence_ratio, token_ratio                         # noqa: E402

OLD = 0.3                        # old probability of the token; only clips of π - μ depend on it
SHIFT = 0.9                      # rspo's router shift
SIX = {                          # of README: objectives that differ in kind, and how
    "grpo": "PPO's clip, per token", "gspo": "PPO's clip, per answer",
    "cispo": "weight capped", "dppo": "mask on π − π_old",
    "ipo": "mask, both signs of A", "sapo": "a smooth gate",
}
ROUND = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]


def zoom(name):
    """The magnification at which the clip range of `name` looks about as wide as PPO's: 1 if it is
    as wide, or if it is not one of the ratio. GSPO's: 500."""
    row = OBJECTIVES[name]
    if row.kind.of != "w" or not row.epsilon_high:
        return 1
    narrower = OBJECTIVES["ppo"].epsilon_high / row.epsilon_high
    return min(ROUND, key=lambda factor: abs(math.log(factor / narrower)))


def ratios(factor=1):
    """The ratios [x] that a panel shows: 0.005 to 2.5, or that range shrunk around 1 by
    `factor`."""
    return 1 + torch.linspace(-0.995, 1.5, 2496, dtype=torch.float64) / factor


def curves(name, A, ratio, **options):
    """(surrogate [x], weight [x]) of objective `name` for answers of one token, on which w, s and
    ∏w are the same ratio [x]. The surrogate is the derivative of the loss with respect to the
    token's weight, and the weight of ∇log π is its derivative with respect to log π, divided by
    A."""
    old = torch.full_like(ratio, OLD).log()[:, None]                                  # [x, 1]
    logp = (old + ratio.log()[:, None]).requires_grad_()                              # [x, 1]
    weights = torch.ones_like(logp).requires_grad_()                                  # [x, 1]
    row = varied(name, **options)
    shift = torch.full_like(old, SHIFT) if row.ratio == "log-shifted" else None       # [x, 1]
    loss, _ = policy_loss(row, logp, old, torch.full_like(ratio, A), torch.ones_like(old).bool(),
                          weights=weights, router_shift=shift)
    by_weight, by_logp = torch.autograd.grad(loss, (weights, logp))
    return -by_weight[:, 0].detach(), -by_logp[:, 0] / A


def climbed(name, A, ratio, **options):
    """The integral [x] of the gradient over the ratio [x], 0 at ratio 1: a function whose gradient
    is that of the loss. It is the surrogate less a constant, unless the objective multiplies log π
    by a weight without gradient: such a surrogate's value does not show where an update leads."""
    slope = A * curves(name, A, ratio, **options)[1] / ratio                          # [x]
    area = torch.cumulative_trapezoid(slope, ratio)                                   # [x - 1]
    area = torch.cat([torch.zeros_like(area[:1]), area])                              # [x]
    return area - area[(ratio - 1).abs().argmin()]


def kept(name, **options):
    """The edges of the clip range: the ratios at which the gradient of good and of bad answers
    ends."""
    row = OBJECTIVES[name]
    if row.clip == "weight":
        return max(1 - row.epsilon, 0), 1 + row.epsilon_high
    if row.kind.pulls:                                       # IPO's acts outside its band too
        options["constants"] = {row.kind.pulls: 0.0}
    outside = torch.logspace(-5, -2, 400, dtype=torch.float64)           # kpop's range is so wide
    beyond = torch.linspace(2.5, 0.999 / OLD, 400, dtype=torch.float64)
    ratio = torch.cat([outside, ratios(), ratios(zoom(name)), beyond]).sort()[0]      # [x]
    above, below = (curves(name, A, ratio, **options)[1] == 0 for A in (1.0, -1.0))   # [x] bool
    low = ratio[below & (ratio < 1)].max().item() if (below & (ratio < 1)).any() else None
    high = ratio[above & (ratio > 1)].min().item() if (above & (ratio > 1)).any() else None
    return low, high


def edge(ratio):
    """An edge of a clip range as text: two decimals, or four where 1 is that close."""
    if 0 < ratio < 0.01:
        return f"{ratio:.1g}"
    return f"{round(ratio, 4 if abs(ratio - 1) < 0.01 else 2):g}"


def draw_member(figure, place, name, title, size=7, **options):
    """Draw the surrogate above and the weight below, with the clip range shaded. A clip range that
    is too narrow to see is drawn larger, and so is the surrogate, around its value at ratio 1.
    size: of the smallest text. Returns both axes."""
    inner = place.subgridspec(2, 1, hspace=0.12, height_ratios=(1.25, 1))
    top = figure.add_subplot(inner[0])
    bottom = figure.add_subplot(inner[1])
    factor = zoom(name)
    ratio = ratios(factor)
    low, high = kept(name, **options)
    for A, line in ((1.0, "-"), (-1.0, "--")):
        look = dict(linestyle=line, color=style.colour(name), linewidth=1.6)
        top.plot(ratio, A + factor * climbed(name, A, ratio, **options), **look)
        bottom.plot(ratio, curves(name, A, ratio, **options)[1], **look)
    for axes in (top, bottom):
        if low is not None:
            axes.axvspan(low, high, color=style.GREY, alpha=0.25, linewidth=0.8)
        axes.axvline(1, color=style.GREY, linewidth=0.5)
        at = [1 + step / factor for step in (-1, 0, 1)]
        axes.set_xticks(at, [f"{x:g}" for x in at] if axes is bottom else ())
        axes.set_xlim(1 - 1 / factor, 1 + 1.5 / factor)
        axes.tick_params(labelsize=size, length=2, pad=2)
    top.set(ylim=(-2.6, 2.6), yticks=(-1, 1))
    bottom.set(ylim=(-0.1, 2.6), yticks=(0, 1, 2))
    if low is not None:
        bottom.text(0.03, 0.97, f"{edge(low)} to {edge(high)}", fontsize=size, va="top",
                    transform=bottom.transAxes)
    top.set_title(title, fontsize=size + 1.5, pad=3)
    return top, bottom


CORNERS = [(1.25, 1.5, "A > 0, above the band:\nno gradient"), (0.03, 0.9, "A > 0, below:\nkept"),
           (0.03, -2.1, "A < 0, below the band:\nno gradient"),
           (1.25, -0.75, "A < 0, above:\nkept, unbounded")]


def legend(place):
    """(handles, labels): what the lines and the shade of every panel mean."""
    place.plot([], [], "-", color=style.BLACK, label="A > 0")
    place.plot([], [], "--", color=style.BLACK, label="A < 0")
    place.fill_between([], [], color=style.GREY, alpha=0.25, linewidth=0, label="the band")
    return place.get_legend_handles_labels()


def objectives():
    """Every objective, for docs/family.md."""
    plt = style.pyplot()
    figure = plt.figure(figsize=(8, 8), layout="none")
    rows = math.ceil((len(OBJECTIVES) + 3) / 4)              # ppo is wide; dual clip, the legend
    figure.set_figheight(0.3 + 2.26 * rows)
    grid = figure.add_gridspec(rows, 4, left=0.055, right=0.99, top=0.942, bottom=0.02,
                               hspace=0.34, wspace=0.2)
    top, bottom = draw_member(figure, grid[0, :2], "ppo", "ppo: the four corners of a clip")
    for x, y, text in CORNERS:
        top.text(x, y, text, fontsize=7, linespacing=1.0)
    top.set_ylabel("surrogate", fontsize=8)
    bottom.set_ylabel("weight of ∇log π", fontsize=8)
    bottom.set_xlabel("ratio", fontsize=8, labelpad=1)
    places = iter([grid[0, 2], grid[0, 3], *(grid[i, j] for i in range(1, rows) for j in range(4))])
    draw_member(figure, next(places), "ppo", "ppo, dual_clip 2", dual_clip=2.0)
    for name, row in OBJECTIVES.items():
        if name == "ppo":
            continue
        note = {"log-shifted": f", γ̃ {SHIFT}", "none": ""}.get(row.ratio, "")
        note = f", π_old {OLD}" if row.kind.of == "π - μ" else note
        note = f", × {zoom(name)}" if zoom(name) > 1 else note
        draw_member(figure, next(places), name, f"{name}{note}\n{row.reduction}")
    last = figure.add_subplot(next(places))
    last.axis("off")
    last.legend(*legend(last), loc="upper left", fontsize=8)
    figure.suptitle("Above: the integral of the gradient, which is A at ratio 1. It is flat where "
                    "an update has no gradient.\nBelow: the weight of ∇log π, and the clip range "
                    "(band) in numbers.\n× 500: drawn 500 times larger, around ratio 1.",
                    fontsize=9, x=0.01, ha="left", y=0.993)
    return figure


def objectives_six():
    """Six objectives that differ in kind, on one screen, for README."""
    figure = style.pyplot().figure(figsize=(6.2, 5), layout="none")
    grid = figure.add_gridspec(2, 3, left=0.09, right=0.985, top=0.815, bottom=0.085, hspace=0.5,
                               wspace=0.2)
    for place, (name, kind) in zip(grid, SIX.items()):
        factor = zoom(name)
        row = OBJECTIVES[name]
        top, bottom = draw_member(figure, place, name, f"{name.upper()}\n{kind}", size=8.5)
        if name == "grpo":
            for x, y, text in ((1.25, 1.5, "no gradient"), (0.03, -1.9, "no gradient"),
                               (1.4, -0.9, "kept"), (0.03, 1.0, "kept")):
                top.text(x, y, text, fontsize=8.5)
        if place.is_first_col():
            top.set_ylabel("surrogate", fontsize=9.5)
            bottom.set_ylabel("weight", fontsize=9.5)
        note = f", drawn × {factor}" if factor > 1 else ""
        note = f", at π_old = {OLD}" if row.kind.of == "π - μ" else note
        bottom.set_xlabel(("s" if row.clips_s else "w") + note, fontsize=9.5, labelpad=1)
    figure.legend(*legend(top), loc="upper right", ncols=3, fontsize=9.5,
                  bbox_to_anchor=(1, 0.935), borderaxespad=0)
    figure.suptitle("Six ways to limit an update. Above: the surrogate, flat where there is no "
                    "gradient.\nBelow: the weight of ∇log π.", fontsize=10, x=0.01, ha="left",
                    y=0.992)
    return figure


# ---------------------------------------------------------------------------- the units of a ratio

def answer(T, spread, seed=0):
    """Log-probs of an invented answer whose tokens changed independently: logp and old_logp, [1,
    T]."""
    generator = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(1, T, generator=generator, dtype=torch.float64)
    return old + spread * torch.randn(1, T, generator=generator, dtype=torch.float64), old


def ratio_units(T=240, spread=0.1):
    logp, old = answer(T, spread)
    prefix = torch.ones(T, T).tril().bool()                                           # [n, T]
    both = logp.expand(T, T), old.expand(T, T), prefix
    w = token_ratio(logp, old, prefix[-1:])[0]                                        # [T]
    s = sequence_ratio(*both)                                                         # [T]
    product = product_ratio(*both)                                                    # [T]
    figure, axes = style.panels(3, 1, height=6.6, sharex=True)
    token = OBJECTIVES["grpo"]
    sequence = OBJECTIVES["gspo"]
    rows = ((w, token, style.colour("grpo"), f"a token: {T} ratios w_t, each with its own noise"),
            (s, sequence, style.colour("gspo"), "the answer: one ratio s = exp(mean log w), "
             "steadier the longer the answer"),
            (product, token, style.colour("sequence_is"), "the product ∏w: one ratio that wanders "
             "off the longer the answer"))
    for place, (x, row, colour, title) in zip(axes, rows):
        band = (1 - row.epsilon, 1 + row.epsilon_high)
        place.axhspan(*band, color=style.GREY, alpha=0.25, linewidth=0)
        look = dict(marker=".", markersize=4, linewidth=0.5) if x is w else {}
        place.plot(range(1, T + 1), x, color=colour, **look)
        place.axhline(1, color=style.GREY, linewidth=0.6)
        style.label(place, title, "", "")
        place.text(1.01, 0.5, f"band\n{band[0]:g}\nto\n{band[1]:g}", fontsize=8, va="center",
                   transform=place.transAxes)
    axes[0].set(ylabel="w_t", xlim=(0, T + 1))
    axes[1].set(ylabel="s of the first n tokens", ylim=(0.985, 1.015))
    axes[2].set(ylabel="∏w of the first n tokens", xlabel="token n of the answer")
    figure.suptitle(f"One answer, three units of a ratio (log w drawn from a normal distribution, "
                    f"standard deviation {spread:g})", fontsize=10.5, x=0.01, ha="left")
    return figure


# ---------------------------------------------------------------------------- the two gradients

EQUATIONS = {
    "grpo": r"$\nabla J = \mathbb{E}\,\frac{1}{G}\sum_i \hat{A}_i\,\frac{1}{|y_i|}\sum_t"
            r"\ w_{i,t}\ \nabla\log\pi(y_{i,t})$",
    "gspo": r"$\nabla J = \mathbb{E}\,\frac{1}{G}\sum_i \hat{A}_i\ s_i\ \frac{1}{|y_i|}\sum_t"
            r"\ \nabla\log\pi(y_{i,t})$",
}


def gradient_weights(T=24, spread=0.2):
    logp, old = answer(T, spread)
    logp = logp - (logp - old).mean()                        # now s is 1
    mask = torch.ones(1, T).bool()
    figure, axes = style.panels(3, 2, height=7.0, sharex=True, sharey=True)
    for column, name in zip(axes.T, EQUATIONS):
        for place, A, shift in zip(column, (1.0, -1.0, 1.0), (1e-4, 1e-4, 1e-3)):
            new = (logp + shift).requires_grad_()
            loss, _ = policy_loss(name, new, old, torch.tensor([A]), mask)
            weight = -torch.autograd.grad(loss, new)[0][0] * T / A                    # [T]
            dropped = [t + 1 for t in range(T) if weight[t] == 0]
            place.bar(range(1, T + 1), weight, color=style.colour(name), width=0.75)
            place.plot(dropped, [0.06] * len(dropped), "x", color=style.RED, markersize=7,
                       markeredgewidth=2)
            place.axhline(1, color=style.GREY, linewidth=0.8)
            s = sequence_ratio(new, old, mask).item()
            title = f"Â = {A:+.0f}, s = {s:.4f}: {len(dropped)} of {T} dropped (×)"
            style.label(place, title, "", "weight of ∇log π" if name == "grpo" else "")
        column[0].set_title(f"{name.upper()}   {EQUATIONS[name]}\n{column[0].get_title('left')}")
        column[-1].set_xlabel("token of the same answer")
    figure.suptitle("GRPO weighs and drops token by token; GSPO gives a whole answer one weight, "
                    "or none.\nThe equations hold inside the band.", fontsize=10.5, x=0.01,
                    ha="left")
    return figure


# ---------------------------------------------------------------------------- the timeline

LANES = ("routers\nheld", "advantages\nand data", "a mask beside\nthe clip", "a ratio\nper token",
         "a ratio\nper answer")
PAPERS = {                       # name: (arXiv id, lane or row of OBJECTIVES)
    "PPO": ("1707.06347", "ppo"),
    "dual clip": ("1912.09729", 2),
    "GRPO": ("2402.03300", "grpo"),
    "DAPO": ("2503.14476", "dapo"),
    "Dr. GRPO": ("2503.20783", "dr_grpo"),
    "DRO": ("2405.19107", "dro"),
    "on-policy\ndistillation": ("2306.13649", 1),
    "SRPO": ("2504.14286", 1),
    "80/20": ("2506.01939", 2),
    "CISPO": ("2506.13585", "cispo"),
    "GSPO": ("2507.18071", "gspo"),
    "GMPO": ("2507.20673", "gmpo"),
    "routing replay R3": ("2510.11370", 0),
    "RSPO": ("2510.23027", "rspo"),
    "SAPO": ("2511.20347", "sapo"),
    "off-policy mask": ("2512.02556", 2),
    "GDPO": ("2601.05242", 1),
    "MaxRL": ("2602.02710", 1),
    "DPPO": ("2602.04879", "dppo"),
    "GLM-5": ("2602.15763", "rollout_is"),
    "IPO": ("2603.00000", "ipo"),                            # prime-rl's, no paper
    "LUSPO": ("2602.05261", "luspo"),
    "VESPO": ("2602.10693", "vespo"),
}


def lane(row):
    """The lane of the timeline that a paper is drawn in, by the ratio of its objective. An int is
    the lane itself."""
    if isinstance(row, int):
        return row
    per_token = OBJECTIVES[row].ratio == "token"
    return 3 if per_token else 4


def timeline():
    figure, axes = style.panels(1, 1, height=4.6)
    last = {}                                                # lane: (place of its last paper, side)
    labels = {}                                              # (lane, side): its last place
    for name, (number, row) in sorted(PAPERS.items(), key=lambda paper: paper[1][0]):
        at = when(number)
        y = lane(row)
        before, side = last.get(y, (-99, 1))
        side = -side if at - before < 3 else 1               # neighbours take turns above and below
        last[y] = at, side
        aside = 32 if at - labels.get((y, side), -99) < 1 else 0     # labels that would touch
        labels[y, side] = at
        colour = style.colour(row) if isinstance(row, str) else style.GREY
        axes.plot(at, y, "o", color=colour, markersize=8)
        said = number if number[5:] != "00000" else f"20{number[:2]}-{number[2:4]}"
        axes.annotate(f"{name}\n{said}", (at, y), (aside, 8 * side), textcoords="offset points",
                      fontsize=7.5, ha="center", va="bottom" if side > 0 else "top", linespacing=1)
    years = {f"{year}01.00000": f"20{year}" for year in (17, 19, 21, 23)}
    months = {f"{year}{month:02}.00000": f"20{year}-{month:02}"
              for year, last in ((25, 12), (26, 3)) for month in range(1, last + 1, 2)}
    axes.set_xticks([when(number) for number in years | months], (years | months).values(),
                    fontsize=8, rotation=45)
    axes.set_yticks(range(len(LANES)), LANES, fontsize=8)
    axes.set(ylim=(-0.6, len(LANES) - 0.35), xlim=(-9, 15.5))
    axes.axvline(0, color=style.GREY, linewidth=0.8, linestyle=":")
    axes.set_title("In 2025 the ratio moved from the token to the answer (before 2025 a year is as "
                   "wide as a month)", fontsize=9.5)
    return figure


def when(number):
    """Position of an arXiv id on the time axis: months since January 2025, and one unit per year
    before that. Ids count up within a month, to about 25,000."""
    months = 12 * (int(number[:2]) - 25) + int(number[2:4]) - 1 + int(number[5:]) / 25_000
    return months if months >= 0 else months / 12


PICTURES = {"objectives": objectives, "objectives_six": objectives_six,
            "ratio_units": ratio_units, "gradient_weights": gradient_weights,
            "timeline": timeline}

if __name__ == "__main__":
    help_form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=help_form).parse_args()
    for name, draw in PICTURES.items():
        style.save(draw(), ROOT / f"docs/figures/{name}.png")
        print(f"docs/figures/{name}.png")
