"""The responses of an inference engine, lists of token ids and log-probs -> a Rollout.

Where a response ends is decided here, by the same rule as in rollout.sample: at the first
end-of-sequence token (a model can have several) or stop string, which is a loss token; what the
engine wrote after it is dropped.
"""

import torch
from torch.nn.utils.rnn import pad_sequence

from plumbing.refusal import Refusal
from rollout import end_test, end_tokens, finish, left_pad, pad_token, token_ids


def as_rollout(policy, tokenizer, prompts, group_size, responses, logps, stop=()):
    """B responses to Q = B / group_size prompts -> Rollout on the policy's device.

    prompts: Q lists of token ids, or strings. responses, logps: B lists, a token id and its
    log-prob (nats, at the temperature of sampling) for each token; the responses of a prompt are
    adjacent. A response without an end is truncated. Raises Refusal if a response is empty, or has
    another number of log-probs."""
    device = policy.device
    pad = pad_token(tokenizer)
    sizes = [len(ids) for ids in responses]
    if sizes != [len(logp) for logp in logps] or 0 in sizes:
        raise Refusal("the engine must return at least one token for every response, and one "
                      "log-prob for every token")
    prompts = left_pad(token_ids(tokenizer, prompts), pad, device)         # [Q, P] ids and mask
    response = pad_right(responses, pad).to(device)                                 # [B, T]
    logp = pad_right(logps, 0.0, torch.float32).to(device)                          # [B, T]

    is_end = end_test(policy, tokenizer, stop)
    lengths = torch.tensor(sizes, device=device)                                    # [B]
    ended = torch.zeros(len(sizes), dtype=torch.bool, device=device)                # [B]
    for t in range(max(sizes)):
        ends = ~ended & (t < lengths) & is_end(response[:, :t + 1])                 # [B]
        lengths = torch.where(ends, t + 1, lengths)                                 # [B]
        ended |= ends
    return finish(tokenizer, stop, prompts, group_size, response, logp, lengths, ended)


def pad_right(rows, fill, dtype=None):
    """Lists of numbers, padded on the right with `fill` -> tensor [B, T]. dtype: that of the
    tensor; None: that of the first row."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True,
                        padding_value=fill)


def ending_tokens(policy, tokenizer, stop):
    """The ids of all tokens that end a response by themselves: end-of-sequence tokens, and those
    that contain a stop string."""
    every = torch.arange(len(tokenizer), device=policy.device)[:, None]             # [V, 1]
    single = end_test(policy, tokenizer, stop)(every).nonzero()[:, 0].tolist()
    return sorted({*single, *end_tokens(policy, tokenizer)})
