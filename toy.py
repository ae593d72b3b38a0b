"""A policy of a thousand numbers, for questions that a language model answers too slowly.

    π(y_t | y_{t-1}, x_t) = softmax(logits[y_{t-1}, x_t])        logits [10, 10, 10]

The task is gspo.py's, without separators: x_t is the next term, y_t the running sum modulo 10, and
a response of L digits is right if every digit is. At this size the pass rate is exact: no held-out
set, no noise of sampling. Loss and advantages are those of train.py.

`python toy.py` shows that one learning rate is no comparison: at 24 digits GSPO is behind at one,
ahead at another; at 8 behind at its best, too. Seeds are trained side by side, lengths do not vary.

Every random number is a hash of (seed, batch, stream, index), so that a page in JavaScript draws
the same ones. Streams, and what their index counts:

    0  start      2·i and 2·i + 1 are the two uniforms of the normal of logit i (batch 0)
    1  terms      prompt · L + t
    2  sampling   row · L + t; a row is a response, those to one prompt are neighbours
    3  order      prompt; the groups, sorted by these, are split into mini-batches
"""

import argparse
from functools import partial

import torch

from advantages import group_advantages
from losses import OBJECTIVES, policy_loss

DIGITS = torch.arange(10)
START, TERMS, SAMPLING, ORDER = range(4)
G = 8                        # responses per prompt
NOISE = 0.7                  # std of the first logits
OPTIMIZERS = {"adam": partial(torch.optim.Adam, betas=(0.9, 0.95)), "sgd": torch.optim.SGD}


# --------------------------------------------------------------------------------- random numbers

def mix(h):
    """The hash lowbias32 (C. Wellons) of 32-bit integers, held in int64."""
    h = ((h ^ h >> 16) * 0x7feb352d) & 0xffffffff
    h = ((h ^ h >> 15) * 0x846ca68b) & 0xffffffff
    return h ^ h >> 16


def uniforms(seeds, batch, stream, count):
    """Numbers between 0 and 1, [S, count] float64: those of a stream at the indices 0 to count - 1.
    seeds [S] int64, from 1 on, because mix(0) is 0."""
    key = mix(mix(mix(seeds) ^ batch) ^ stream)                                  # [S]
    return (mix(key[:, None] ^ torch.arange(count)).double() + 0.5) / 2**32      # [S, count]


# ------------------------------------------------------------------------------------- the policy

def exact_pass_rate(logits, length):
    """The probability that a response of `length` digits is right, over all prompts: [] from logits
    [10, 10, 10], [S] from [S, 10, 10, 10]; differentiable. A recursion over the running sum: from a
    sum a to the sum c leads the term c - a, with probability 1/10, and then the digit c."""
    a = DIGITS[:, None]
    step = logits.softmax(-1)[..., a, (DIGITS - a) % 10, DIGITS] / 10            # [..., 10, 10]
    return torch.linalg.matrix_power(step, length)[..., 0, :].sum(-1)            # from the sum 0


def start(seeds, length, pass_rate=0.35):
    """The first logits, [S, 10, 10, 10]: noise, and `extra` on the logit of every right digit. It
    is found by bisection, so that the exact pass rate of each seed is `pass_rate`."""
    u, v = uniforms(seeds, 0, START, 2000).view(-1, 10, 10, 10, 2).unbind(-1)
    noise = NOISE * (-2 * u.log()).sqrt() * (2 * torch.pi * v).cos()             # Box-Muller
    right = torch.nn.functional.one_hot((DIGITS[:, None] + DIGITS) % 10)         # [10, 10, 10]
    extra = noise.new_zeros(len(seeds), 1, 1, 1)
    for k in range(40):
        more = extra + 16 / 2**k                                                 # [S, 1, 1, 1]
        below = exact_pass_rate(noise + more * right, length) < pass_rate        # [S]
        extra[below] = more[below]
    return noise + extra * right                                                 # [S, 10, 10, 10]


def sample(logits, terms, u):
    """Responses to terms [S, B, L] from uniforms u [S, B, L], by the inverse of the distribution
    function. Returns which of all logits each digit was drawn with: [S, B, L] int64, of seed i
    1000·i + 100·y_{t-1} + 10·x_t + y_t. The digit before the first is 0."""
    cumulative = logits.softmax(-1).cumsum(-1).flatten(0, 2)[:, :9]     # [S·100, 9]
    first = 100 * torch.arange(len(terms))[:, None]                              # [S, 1]
    y, chosen = 0, []
    for x, threshold in zip(terms.unbind(-1), u.unbind(-1)):
        row = first + 10 * y + x                                                 # [S, B]
        y = (cumulative[row] <= threshold[..., None]).sum(-1)                    # [S, B]
        chosen.append(10 * row + y)
    return torch.stack(chosen, -1)                                               # [S, B, L]


# --------------------------------------------------------------------------------------- the loop

def draw(logits, seeds, batch, length, prompts):
    """A rollout batch: what `sample` returns, and rewards, [S·B, L] and [S·B]. A seed has B rows in
    succession."""
    terms = 10 * uniforms(seeds, batch, TERMS, prompts * length)                 # [S, Q·L]
    terms = terms.long().view(-1, prompts, length).repeat_interleave(G, 1)       # [S, B, L]
    u = uniforms(seeds, batch, SAMPLING, terms[0].numel()).view_as(terms)        # [S, B, L]
    chosen = sample(logits, terms, u)
    right = (chosen % 10 == terms.cumsum(-1) % 10).all(-1)                       # [S, B]
    return chosen.flatten(0, 1), right.flatten().double()


def split(seeds, batch, prompts, mini_batches):
    """The rows of each mini-batch, [S·b]: whole groups of every seed in a random order."""
    order = uniforms(seeds, batch, ORDER, prompts).argsort(dim=-1, stable=True)  # [S, Q]
    groups = order + prompts * torch.arange(len(seeds))[:, None]                 # [S, Q]
    rows = groups[..., None] * G + torch.arange(G)                               # [S, Q, G]
    return [part.flatten() for part in rows.chunk(mini_batches, 1)]


def train(algorithm, length, learning_rate, epsilon=None, epsilon_high=None, mini_batches=4,
          prompts=16, batches=16, seeds=torch.arange(1, 17), optimizer="adam", pass_rate=0.35,
          lag=0, objective=policy_loss):
    """Train a policy per seed, on samples that are `lag` batches old. objective: called and
    returning as losses.policy_loss. Returns the exact pass rate of the policy before each batch
    [S, batches], clip_signal over all mini-batches, and the last logits [S, 10, 10, 10]."""
    logits = start(seeds, length, pass_rate).requires_grad_()                    # [S, 10, 10, 10]
    stepper = OPTIMIZERS[optimizer]([logits], learning_rate)
    policies, dropped, signal = [], 0, 0
    for batch in range(batches):
        policies.append(logits.detach().clone())
        sampler = policies[max(0, batch - lag)]                                  # [S, 10, 10, 10]
        chosen, rewards = draw(sampler, seeds, batch, length, prompts)           # [S·B, L], [S·B]
        advantages = group_advantages(rewards, G)                                # [S·B]
        old_logp = sampler.log_softmax(-1).take(chosen)                          # [S·B, L]
        for rows in split(seeds, batch, prompts, mini_batches):
            logp = logits.log_softmax(-1).take(chosen[rows])                     # [S·b, L]
            loss, stats = objective(
                algorithm, logp, old_logp[rows], advantages[rows], torch.ones_like(logp).bool(),
                epsilon=epsilon, epsilon_high=epsilon_high, group_size=G, max_length=length)
            grad, = torch.autograd.grad(len(seeds) * loss, logits)     # of each seed's own loss
            logits.grad = grad.renorm(2, 0, 1.0)
            stepper.step()
            dropped += stats["clip_signal"] * stats["signal_tokens"]
            signal += stats["signal_tokens"]
    rates = exact_pass_rate(torch.stack(policies, 1), length)                    # [S, batches]
    return rates, (dropped / signal).item(), logits.detach()


# ------------------------------------------------------------------------------------- the script

def compare(algorithm="gspo", length=(24, 240), learning_rate=(0.05, 0.4), epsilon=None,
            epsilon_high=None, seeds=16, **options):
    """Print GRPO, `algorithm` and GSPO's wide range at each length and learning rate. `options` are
    train's; seeds: their number."""
    print(f"""Exact pass rate, mean over batches and {seeds} seeds. Policies of a thousand numbers:
for a transformer they predict at most.

digits  rate   algorithm  pass rate  clip_signal  minus GRPO (two standard errors)""")
    arms = {"grpo": ("grpo",), algorithm: (algorithm, epsilon, epsilon_high),
            "wide": ("gspo", 0.03, 0.04)}                 # a hundred times the paper's range
    for digits in length:
        for rate in learning_rate:
            means = {}                                                           # [S] each
            for name, (objective, *clip) in arms.items():
                rates, share, _ = train(objective, digits, rate, *clip, **options,
                                        seeds=torch.arange(1, seeds + 1))
                means[name] = rates.mean(1)
                more = means[name] - means["grpo"]
                print(f"{digits:6}  {rate:<5g}  {name:9}  {rates.mean():9.3f}  {share:11.3f}  "
                      f"{more.mean():+.3f} ({2 * more.std() / seeds**0.5:.3f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     argument_default=argparse.SUPPRESS)
    parser.add_argument("--algorithm", choices=OBJECTIVES)
    parser.add_argument("--optimizer", choices=OPTIMIZERS)
    parser.add_argument("--length", type=int, nargs="+")
    parser.add_argument("--learning_rate", type=float, nargs="+")
    for name in ("epsilon", "epsilon_high"):
        parser.add_argument(f"--{name}", type=float)
    for name in ("mini_batches", "prompts", "batches", "seeds"):
        parser.add_argument(f"--{name}", type=int)
    compare(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
