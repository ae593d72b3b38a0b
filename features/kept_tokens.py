"""Kept tokens: top-p and top-k while training. Tokens are drawn from the likeliest ones alone.

The distribution that is sampled must be the one whose log-probs the loss uses: every log-prob of a
token, under any policy, is renormalized over the set that was kept when it was drawn (DeepSeek-V3.2
2512.02556 §3.1; slime and prime-rl do so, too). Otherwise each ratio is wrong by the mass that was
cut off.

The sets travel with the rollout, as its kept_tokens, and are cut and joined with it; whoever
scores such a rollout reads them (rollout.token_scores). A greedy evaluation needs none.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from features.feature import Feature, flag
from plumbing.engines.wrapper import Wrapper
from plumbing.refusal import Refusal

OWN = {"sampler=vllm": "only the built-in sampler returns the tokens that it left to draw from, "
                       "over which log-probs are renormalized",
       "environment": "the sets of tokens of several turns are not joined"}


@dataclass(frozen=True)
class Flags:
    top_p: float = flag(
        1.0, "draw tokens only from the likeliest ones that together have this probability; all "
             "log-probs are renormalized over them; 1: from all", above=0, at_most=1, without=OWN,
        evaluation="kept", section="the tokens that can be drawn")
    top_k: int = flag(0, "draw tokens only from this many of the likeliest; 0: from all",
                      at_least=0, without=OWN, evaluation="kept")


class KeptTokens(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.top_p < 1 or settings.top_k > 0

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        return sampler if settings.sampler else KeepingSampler(sampler, settings)

    def __init__(self, run):
        self.sampler_name = run.settings.sampler
        self.tokenizer = run.tokenizer

    def after_scoring(self, learner, batch, old):
        if batch.rollout.kept_tokens is None:
            raise Refusal(f"--sampler {self.sampler_name} does not return the kept tokens "
                          '(Rollout.kept_tokens, of features/kept_tokens.py: KeptSets), '
                          "which --top_p and --top_k need: leave these two out")

    def tokens(self, rollout):
        ids = rollout.kept_tokens.ids.tolist()                                      # [G][T][K]
        return {"kept": [[[self.tokenizer.decode([k]) for k in dict.fromkeys(kept)] for kept in row]
                         for row in ids]}


class KeepingSampler(Wrapper):
    """Draws from the kept tokens, and attaches their sets to what it samples."""

    def sample(self, prompts, group_size, uniforms=None, temperature=None, **options):
        settings = self.settings
        temperature = settings.temperature if temperature is None else temperature
        steps = []                                           # (rows [b], t, ids [b, K])

        def leave(logits, t, rows):
            kept = kept_tokens(logits.float() / temperature, settings.top_p, settings.top_k)
            steps.append((rows, t, kept))                                           # [b, K]
            return mask_others(logits, kept)                                        # [b, V]
        if temperature:
            options["leave"] = leave
        rollout = self.sampler.sample(prompts, group_size, uniforms, temperature, **options)
        if not temperature:
            return rollout
        return replace(rollout, kept_tokens=join_sets(steps, rollout.mask))


def kept_tokens(logits, top_p, top_k):
    """The ids [b, K] of the tokens that are left of logits [b, V]: the top_k likeliest (0: all), of
    these the fewest whose probability is at least top_p. Smaller sets are padded with their
    likeliest token."""
    values, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))     # [b, k] each
    probability = values.softmax(-1)                                                # [b, k]
    kept = probability.cumsum(-1) - probability < top_p                             # [b, k]
    return torch.where(kept, ids, ids[:, :1])[:, :int(kept.sum(-1).max())]          # [b, K]


def mask_others(logits, kept):
    """logits [b, V] with -inf outside the tokens kept [b, K]."""
    cut = torch.ones_like(logits, dtype=torch.bool).scatter(1, kept, False)         # [b, V]
    return logits.masked_fill(cut, -torch.inf)                                      # [b, V]


def padded(ids, width):
    """Sets of tokens [..., K] with `width` tokens each, padded with the last token of the set."""
    return ids[..., torch.arange(width).clamp(max=ids.shape[-1] - 1)]               # [..., width]


def join_sets(steps, mask):
    """The KeptSets of the token steps (rows [b], t, ids [b, K]) of a rollout with this mask."""
    steps = steps[:mask.shape[1]]                            # later ones followed the last end
    K = max(ids.shape[1] for _, _, ids in steps)
    whole = torch.zeros(*mask.shape, K, dtype=torch.long, device=mask.device)       # [B, T, K]
    for rows, t, ids in steps:
        whole[rows, t] = padded(ids, K)
    return KeptSets(whole)


@dataclass
class KeptSets:
    """The tokens that could be drawn, a set for every token of a rollout."""

    ids: torch.Tensor            # [B, T, K], smaller sets padded with a token of the set

    def take(self, rows):
        return KeptSets(self.ids[rows.to(self.ids.device)])                         # [n, T, K]

    def join(self, others, P, T):
        """All of these as one, padded to responses of T tokens."""
        parts = [self.ids, *(other.ids for other in others)]
        K = max(ids.shape[2] for ids in parts)
        return KeptSets(torch.cat([padded(F.pad(ids, (0, 0, 0, T - ids.shape[1])), K)
                                   for ids in parts]))                              # [B, T, K]

    def leave(self, where, size):
        """For the places `where` [N] among the B·T, `size` at a time: functions that put -inf into
        the logits [n, V] of the tokens that could not be drawn there."""
        ids = self.ids.flatten(0, 1).index_select(0, where)                         # [N, K]
        return [partial(mask_others, kept=chunk) for chunk in ids.split(size)]
