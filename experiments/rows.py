"""Clips that are no algorithm of train.py, for questions about GSPO's own.

    python experiments/rows.py --drop_by_s --algorithm grpo --epsilon 0.03 --epsilon_high 0.04
    python experiments/rows.py --drop_at_random --algorithm grpo --epsilon 3e-4 --epsilon_high 4e-4
    python experiments/rows.py --print_range 0.2 --algorithm grpo
    python experiments/rows.py --range_exponent 0.5 --algorithm gspo --epsilon 3e-3 \\
        --epsilon_high 4e-3

--drop_by_s: every token keeps its own weight w_t, the clip drops whole responses by s. GRPO and
GSPO differ in the weight (w_t or s) and in what the clip leaves out (a token by w_t, a response by
s); this changes only the second. --range_exponent a: both ends of the clip range are multiplied by
(LENGTH / |y|)^a. Log s of independent tokens spreads as |y|^-½, so that with a = ½ (FSPO,
2509.09177) the clip acts equally often at every length. All other flags are train.py's, and the
summary has the pass@1 of the shortest and of the longest third of the held-out prompts.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch                                                                         # noqa: E402

import losses                                                                        # noqa: E402
import train                                                                         # noqa: E402
from ratios import sequence_log_ratio, sequence_ratio                                # noqa: E402
from session.arguments import parse                                                  # noqa: E402

LENGTH = 16                      # tokens: where a range that depends on |y| is the one given
PLAIN, HELD_OUT = losses.token_surrogate, train.held_out
PLAIN_LOSS = train.policy_loss
RANDOM = torch.Generator()       # which responses are dropped at random; seeded by the run's seed


def token_surrogate(exponent, clip, ratio, A, logp, old_logp, mask, low, high, constants):
    """losses.token_surrogate with the clips "drop by s" and "drop at random", and a clip range that
    depends on |y|."""
    if clip in ("drop by s", "drop at random"):
        s = sequence_ratio(logp.detach(), old_logp, mask)                            # [B]
        s = losses.broadcast_to_tokens(s, mask)                                      # [B, T]
        below, above = losses.find_clipped(s, A, low, high)                          # [B, T] each
        if clip == "drop at random":
            below = draw_as_many((below | above) & mask, (A != 0) & mask)            # [B, T]
            above = torch.zeros_like(below)                                          # [B, T]
        return (ratio * A).masked_fill(below | above, 0.0), below, above
    if exponent:
        lengths = mask.sum(-1, keepdim=True).clamp(min=1)                            # [B, 1]
        wider = (LENGTH / lengths) ** exponent                                       # [B, 1]
        low = 1 - (1 - low) * wider                                                  # [B, 1]
        high = 1 + (high - 1) * wider                                                # [B, 1]
    return PLAIN(clip, ratio, A, logp, old_logp, mask, low, high, constants)


def draw_as_many(dropped, signal):
    """As many rows as `dropped` has, drawn from the rows of `signal`; both [B, T] bool."""
    rows = signal.any(-1).nonzero().flatten()                                        # [n]
    count = dropped.any(-1).sum()
    drawn = torch.zeros(len(signal), dtype=torch.bool)                               # [B]
    drawn[rows[torch.randperm(len(rows), generator=RANDOM)[:count]]] = True
    return signal & drawn[:, None]                                                   # [B, T]


def recording(seen):
    """policy_loss that appends (log s [B], A [B], tokens [B]) of each mini-batch to `seen`."""
    def policy_loss(row, logp, old_logp, advantages, mask, **options):
        seen.append((sequence_log_ratio(logp.detach(), old_logp, mask), advantages, mask.sum(-1)))
        return PLAIN_LOSS(row, logp, old_logp, advantages, mask, **options)
    return policy_loss


def find_range(updates, share):
    """The ε of --print_range, by bisection. updates: (log s, A, tokens) of mini-batches."""
    log_s, A, tokens = (torch.cat(column).double() for column in zip(*updates))      # [n] each
    signal = tokens * (A != 0)                                                       # [n]
    low, high = 0.0, 1.0
    for _ in range(60):
        epsilon = (low + high) / 2
        below, above = losses.find_clipped(log_s.exp(), A, 1 - epsilon, 1 + 4 / 3 * epsilon)
        more = (signal * (below | above)).sum() > share * signal.sum()
        low, high = (epsilon, high) if more else (low, epsilon)
    return epsilon


def held_out(settings, learner, task):
    """eval.held_out with two components more: pass@1 of the prompts with the shortest and with the
    longest answers, a third of them each."""
    answers = HELD_OUT(settings, learner, task)
    if answers:
        right = [sum(r >= 1 for r in row) / len(row) for row in answers["sampled"]["rewards"]]
        order = sorted(range(len(right)), key=lambda i: len(task.test[i].answer))
        third = max(1, len(order) // 3)
        answers["sampled"]["reward_parts"] |= {
            name: sum(right[i] for i in part) / third
            for name, part in (("shortest", order[:third]), ("longest", order[-third:]))}
    return answers


def split(words):
    """(the flags of this script, the words that are train.py's)."""
    parser = argparse.ArgumentParser(prog="experiments/rows.py", allow_abbrev=False,
                                     add_help=False)
    parser.add_argument("--drop_by_s", action="store_true")
    parser.add_argument("--drop_at_random", action="store_true")
    parser.add_argument("--print_range", type=float, metavar="SHARE")
    parser.add_argument("--range_exponent", type=float, default=0)
    return parser.parse_known_args(words)


def main(argv):
    own, words = split(argv)
    settings = parse(words)
    RANDOM.manual_seed(settings.seed)
    rows = losses.OBJECTIVES
    for drop, clip in ((own.drop_by_s, "drop by s"), (own.drop_at_random, "drop at random")):
        if drop:
            rows = rows | {"grpo": replace(rows["grpo"], clip=clip)}
    seen = []
    with mock.patch.dict(losses.OBJECTIVES, rows), \
            mock.patch.object(losses, "token_surrogate",
                              partial(token_surrogate, own.range_exponent)), \
            mock.patch.object(train, "held_out", held_out), \
            mock.patch.object(train, "policy_loss",
                              recording(seen) if own.print_range else PLAIN_LOSS):
        train.main(words)
    if own.print_range:
        count = settings.updates_per_batch
        print(f"epsilon {find_range(seen[count - 1::count], own.print_range):.3g}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main(sys.argv[1:])
