"""What the tests of `python tools/export.py trl` share: one batch, our loss under the flags of a
run, and random flags."""

import random
from types import SimpleNamespace

import torch

import reference
from features.mismatch import mismatch_correction
from losses import kl_penalty, policy_loss, token_weights
from session.arguments import ALGORITHMS, parse
from reference import L_MAX

B, T, G = 12, 10, 4
SIZES = (f"--prompts_per_step 6 --num_generations {G} --steps_per_generation 2 "
         f"--max_completion_length {L_MAX} ")


def mini_batch(empty=()):
    """Three groups of reference.ragged, one row of which has no loss token, nor have the rows
    `empty`; a ratio of 55, for what is capped; finite padding, as the libraries need it."""
    batch = reference.only(slice(0, B), reference.ragged(absurd=[-1.0]))
    batch.logp[0, 0] = batch.old_logp[0, 0] + 4
    batch.mask[list(empty)] = False
    batch.A[~batch.mask.any(-1)] = 0
    return batch._replace(logp=batch.logp.clamp(max=-1e-3).requires_grad_())


def gap():
    """log π_old - log π_sampler of the tokens of a batch, [B, T]."""
    generator = torch.Generator().manual_seed(2)
    return 0.3 * torch.randn(B, T, generator=generator, dtype=torch.float64)


def our_loss(args, batch):
    """Our loss of a mini-batch with everything that may be added to it. The reference's log-probs
    are old_logp - 0.2, the entropies -0.3·logp."""
    logp, old_logp, A, mask, *_ = batch
    weights = token_weights(mask, args.reduction, group_size=G, max_length=L_MAX)
    rollout = SimpleNamespace(mask=mask, sampler_logp=old_logp - gap())
    loss, _ = policy_loss(args.row, logp, old_logp, A, mask, epsilon=args.epsilon,
                          epsilon_high=args.epsilon_high, weights=weights,
                          mismatch=mismatch_correction(args, old_logp, rollout))
    if args.beta and args.advantage != "reinforce_plus_plus":
        kl = kl_penalty(logp, old_logp - 0.2, mask, args.kl_estimator, old_logp)
        loss = loss + args.beta * (weights * kl).sum()
    entropy = (token_weights(mask, "token-mean") * -0.3 * logp).sum()
    return loss - args.entropy_coef * entropy


def trl_config(text, **more):
    """The GRPOConfig that an export prints, with more fields."""
    from trl import GRPOConfig
    make = SimpleNamespace(GRPOConfig=lambda **fields: GRPOConfig(**fields | more))
    return eval(text, {"trl": make})


def gradient(loss, batch):
    return torch.autograd.grad(loss, batch.logp, retain_graph=True)[0]


def assert_same(ours, theirs, batch):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(gradient(ours, batch), gradient(theirs, batch), rtol=1e-5,
                               atol=1e-10)
    assert gradient(ours, batch).any()


def drawn(seed, start, table):
    """A line of random flags that the command line accepts: any algorithm, and each flag of a table
    {flag: values} in a fifth of the lines."""
    rng = random.Random(seed)
    while True:
        line = f"--algorithm {rng.choice([*ALGORITHMS])} {start}"
        for name, values in table.items():
            if rng.random() < 0.2:
                line += f" --{name} {rng.choice(values)}"
        try:
            parse(line.split())
            return line
        except ValueError:
            pass
