"""Whether an engine samples from the weights that are trained.

Weights that do not arrive stop nothing by themselves: the engine goes on sampling from a mixture of
old and new ones. (A tied LM head, for example, is missing from named_parameters(); the log-probs
are then 0.3 nats off after one update.) So after every transfer the policy scores a few of the
tokens that were sampled.
"""

import torch

from rollout import response_logp

ROWS = 8         # responses that are compared, of one prompt

# The largest mean difference of a log-prob in nats. Measured on SmolLM2: 6e-6 in float32, 0.006 in
# float16, 0.03 to 0.05 in bfloat16, where missing weights show only after a few updates.
NOISE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


@torch.no_grad()
def check_agreement(name, policy, rollout, temperature, dtype):
    """Compare the log-probs that an engine recorded with those of the policy.

    name: of the sampler, for the error. temperature: of sampling; 0: greedy, where log-probs have
    temperature 1. dtype: of the engine's arithmetic. Raises ValueError if they differ by more than
    rounding in `dtype` explains."""
    part = rollout.rows(0, min(ROWS, rollout.group_size))
    logp = response_logp(policy, part, temperature or 1.0, entropy=False).logp      # [b, T]
    difference = (logp - part.sampler_logp)[part.mask].abs().mean().item()
    if not difference <= NOISE[dtype]:                       # NaN, too
        raise ValueError(
            f"--sampler {name}: its log-probs differ from the policy's by {difference:.2g} nats "
            f"per token, more than {NOISE[dtype]:g}, which rounding in {str(dtype)[6:]} explains: "
            "it does not sample from the weights that are trained; leave out --sampler")
