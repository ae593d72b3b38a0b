"""Clips that are no algorithm of train.py, for questions about GSPO's own.

    python experiments/rows.py --drop_by_s --algorithm grpo --epsilon 0.03 --epsilon_high 0.04
    python experiments/rows.py --drop_at_random --algorithm grpo --epsilon 3e-4 --epsilon_high 4e-4
    python experiments/rows.py --s_where right --algorithm grpo --epsilon 1 --epsilon_high inf
    python experiments/rows.py --print_range 0.2 --algorithm grpo

--drop_by_s: every token keeps its own weight w_t, the clip drops whole responses by s. GRPO and
GSPO differ in the weight (w_t or s) and in what the clip leaves out (a token by w_t, a response by
s); this changes only the second. --drop_at_random: as many responses, drawn from those with Â ≠ 0.
--s_where right: without a clip, s weighs the tokens of responses with Â > 0, w_t the others;
--s_where wrong: s weighs those with Â < 0. --print_range SHARE: the ε, with ε_high = 4/3 ε, at
which a clip of s would drop this share of the tokens with Â ≠ 0 in the last mini-batches. All other
flags are train.py's.

main returns {"dropped": the share of Σ |Â|·w·(1 − π) over all tokens of the run that the clip left
out}: |Â|·w·(1 − π) is the length of the gradient of a token's term in GRPO, with respect to the
logit of that token, so that clips of tokens and of responses are compared by what they cost.
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
from ratios import (gspo_token_ratio, sequence_log_ratio, sequence_ratio,             # noqa: E402
                    token_ratio)
from session.arguments import parse                                                  # noqa: E402

PLAIN, PLAIN_LOSS = losses.token_surrogate, train.policy_loss
RANDOM = torch.Generator()       # which responses are dropped at random; seeded by the run's seed


def token_surrogate(clip, ratio, A, logp, old_logp, mask, low, high, constants):
    """losses.token_surrogate with four clips more, named in main."""
    if clip in ("s where right", "s where wrong"):
        by_s = (A > 0) == (clip == "s where right")                                  # [B, T]
        weight = torch.where(by_s, gspo_token_ratio(logp, old_logp, mask), ratio)    # [B, T]
        return weight * A, torch.zeros_like(mask), torch.zeros_like(mask)
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


def weighing(sums):
    """token_surrogate that adds Σ |A|·w·(1 − π) of the dropped and of all tokens to `sums`."""
    def surrogate(clip, ratio, A, logp, old_logp, mask, *range_and_constants):
        terms = token_surrogate(clip, ratio, A, logp, old_logp, mask, *range_and_constants)
        w = token_ratio(logp.detach(), old_logp, mask)                               # [B, T]
        push = (A.abs() * w * (1 - logp.detach().exp())).double()                    # [B, T]
        sums[0] += float(push[terms[1] | terms[2]].sum())
        sums[1] += float(push.sum())
        return terms
    return surrogate


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
    parser.add_argument("--s_where", choices=("right", "wrong"))
    parser.add_argument("--print_range", type=float, metavar="SHARE")
    return parser.parse_known_args(words)


def main(argv):
    own, words = split(argv)
    settings = parse(words)
    RANDOM.manual_seed(settings.seed)
    rows = losses.OBJECTIVES
    for on, clip in ((own.drop_by_s, "drop by s"), (own.drop_at_random, "drop at random"),
                     (own.s_where, f"s where {own.s_where}")):
        if on:
            rows = rows | {"grpo": replace(rows["grpo"], clip=clip)}
    seen = []
    sums = [0.0, 0.0]
    with mock.patch.dict(losses.OBJECTIVES, rows), \
            mock.patch.object(losses, "token_surrogate", weighing(sums)), \
            mock.patch.object(train, "policy_loss",
                              recording(seen) if own.print_range else PLAIN_LOSS):
        train.main(words)
    if own.print_range:
        count = settings.updates_per_batch
        print(f"epsilon {find_range(seen[count - 1::count], own.print_range):.3g}")
    return {"dropped": sums[0] / sums[1] if sums[1] else None}


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main(sys.argv[1:])
