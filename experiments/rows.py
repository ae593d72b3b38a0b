"""Clips that are no algorithm of train.py, for questions about GSPO's own.

    python experiments/rows.py --drop_by_s --algorithm grpo --epsilon 0.03 --epsilon_high 0.04
    python experiments/rows.py --drop_at_random --algorithm grpo --epsilon 3e-4 --epsilon_high 4e-4
    python experiments/rows.py --print_range 0.2 --algorithm grpo

--drop_by_s: every token keeps its own weight w_t, the clip drops whole responses by s. GRPO and
GSPO differ in the weight (w_t or s) and in what the clip leaves out (a token by w_t, a response by
s); this changes only the second. --drop_at_random: as many responses, drawn from those with Â ≠ 0.
--print_range SHARE: the ε, with ε_high = 4/3 ε, at which a clip of s would drop this share of the
tokens with Â ≠ 0 in the last mini-batches. All other flags are train.py's.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch                                                                         # noqa: E402

import losses                                                                        # noqa: E402
import train                                                                         # noqa: E402
from ratios import sequence_log_ratio, sequence_ratio                                # noqa: E402
from session.arguments import parse                                                  # noqa: E402

PLAIN, PLAIN_LOSS = losses.token_surrogate, train.policy_loss
RANDOM = torch.Generator()       # which responses are dropped at random; seeded by the run's seed


def token_surrogate(clip, ratio, A, logp, old_logp, mask, low, high, constants):
    """losses.token_surrogate with the clips "drop by s" and "drop at random"."""
    if clip not in ("drop by s", "drop at random"):
        return PLAIN(clip, ratio, A, logp, old_logp, mask, low, high, constants)
    s = sequence_ratio(logp.detach(), old_logp, mask)                                # [B]
    s = losses.broadcast_to_tokens(s, mask)                                          # [B, T]
    below, above = losses.find_clipped(s, A, low, high)                              # [B, T] each
    if clip == "drop at random":
        below = draw_as_many((below | above) & mask, (A != 0) & mask)                # [B, T]
        above = torch.zeros_like(below)                                              # [B, T]
    return (ratio * A).masked_fill(below | above, 0.0), below, above


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


def split(words):
    """(the flags of this script, the words that are train.py's)."""
    parser = argparse.ArgumentParser(prog="experiments/rows.py", allow_abbrev=False,
                                     add_help=False)
    parser.add_argument("--drop_by_s", action="store_true")
    parser.add_argument("--drop_at_random", action="store_true")
    parser.add_argument("--print_range", type=float, metavar="SHARE")
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
            mock.patch.object(losses, "token_surrogate", token_surrogate), \
            mock.patch.object(train, "policy_loss",
                              recording(seen) if own.print_range else PLAIN_LOSS):
        train.main(words)
    if own.print_range:
        count = settings.updates_per_batch
        print(f"epsilon {find_range(seen[count - 1::count], own.print_range):.3g}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main(sys.argv[1:])
