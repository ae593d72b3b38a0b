"""log π(y|x) of given responses under any policy, with its gradient.

The first half is the plain way: a row per response, and only the positions that predict a loss token through the LM head, in chunks, so
that no [B, T, V] tensor exists. The second half is speed: it gives the same numbers and gradients, and can be skipped by a reader who
does not care about it.

1. Responses that occur twice in a group are computed once (`distinct`).
2. The prompt is computed once and its keys and values are shared by its G responses (`shared_hidden`).
3. Where all is short, prompts and responses stand side by side in one row, and a mask keeps them apart (`packed_hidden`).
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from plumbing.caches import has_plain_cache, prompt_inputs

MAX_LOGITS = 2 ** 24             # how many logits may exist at once: 64 MB in float32
MAX_PACKED = 256                 # tokens in a packed row: it pays for attention between responses that must not see each other


class Scores(NamedTuple):
    logp: torch.Tensor           # [B, T] float32 log π(y_t | x, y_<t) in nats, 0 outside the mask
    entropy: torch.Tensor        # [B, T] float32 entropy of the next-token distribution in nats, 0 outside the mask; None if not asked for
    hidden: torch.Tensor         # [B, T, D] last hidden state that predicts token t (PPO's critic reads it)


def response_logp(model, rollout, temperature=1.0, share_prompt=True, entropy=True, entropy_grad=False, max_logits=MAX_LOGITS):
    """log π(y_t | x, y_<t) of a rollout's tokens under any policy, at the temperature they were sampled with.

    share_prompt: compute what is equal once: the prompt of G responses, responses that occur twice. False is the plain way; gradient
    checkpointing, which turns a model's cache off, takes it too. entropy: compute it. entropy_grad: let gradients flow through it (an
    entropy bonus needs them). max_logits: how many logits may exist at once; beyond it the LM head runs in chunks whose backward
    recomputes them. Returns `Scores`.
    """
    fixed, T, where = must_keep_shapes(model), rollout.mask.shape[1], slice(None)
    if share_prompt and not fixed:
        rollout, where = distinct(rollout)
    length = T if fixed else int(rollout.mask.any(0).nonzero().max()) + 1                # the rest is padding in every row
    mask, ids = rollout.mask[:, :length], rollout.response_ids[:, :length]               # [b, T]
    hidden = response_hidden(model, rollout, length, fixed) if share_prompt else plain_hidden(model, rollout, length)   # [b, T, D]

    flat, targets = hidden[mask], ids[mask]                                              # [N, D], [N]  loss tokens only
    head, rows = model.get_output_embeddings(), max(1, max_logits // model.config.vocab_size)
    options = (temperature, entropy, entropy_grad)
    if len(flat) <= rows:
        values = token_logp(head, flat, targets, *options)                               # [N] each
    else:
        parts = [checkpoint(token_logp, head, h, y, *options, use_reentrant=False) for h, y in zip(flat.split(rows), targets.split(rows))]
        values = [torch.cat(p) for p in zip(*parts)]                                     # [N] each
    back = torch.zeros(mask.shape, device=mask.device)                                   # [b, T]
    logp, entropy = [F.pad(back.masked_scatter(mask, x), (0, T - length)) for x in values] + ([] if entropy else [None])   # [b, T]
    hidden = F.pad(hidden, (0, 0, 0, T - length))                                        # [b, T, D]
    return Scores(*(x if x is None else x[where] for x in (logp, entropy, hidden)))      # [B, T]


def token_logp(head, hidden, targets, temperature, entropy=True, entropy_grad=False):
    """LM head and log-softmax in float32: hidden [N, D], targets [N] -> (log-probs [N],) or (log-probs [N], entropies [N])."""
    logits = head(hidden).float()                                                        # [N, V]
    logits = logits if temperature == 1 else logits / temperature                        # [N, V]
    logp = logits.log_softmax(-1)                                                        # [N, V]
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)                               # [N]
    if not entropy:
        return chosen,
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        return chosen, -(logp.exp() * logp).sum(-1)                                      # [N] each


def plain_hidden(model, rollout, T):
    """One pass over prompt and response together [B, P+T-1], a row per response. -> [B, T, D]"""
    prompt_mask = rollout.prompt_mask.repeat_interleave(rollout.group_size, 0)                        # [B, P]
    ids = torch.cat([rollout.prompt_ids.repeat_interleave(rollout.group_size, 0), rollout.response_ids[:, :T - 1]], 1)
    attention = F.pad(prompt_mask.long(), (0, T - 1), value=1)                                        # [B, P+T-1]
    hidden = model.base_model(input_ids=ids, attention_mask=attention, position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
                              use_cache=False).last_hidden_state                                      # [B, P+T-1, D]
    return hidden[:, prompt_mask.shape[1] - 1:]                                                       # [B, T, D]


# ------------------------------------------------------------------------------------------------------------------- speed

def must_keep_shapes(model):
    """Whether the shape of a forward must not follow from what was sampled.

    While routes are recorded or replayed, as they are cut by row; over shards, as all processes must make the same forwards; in
    bfloat16, as old and new log-probs are rounded alike only in like shapes.
    """
    routed = any(m._forward_hooks for m in model.modules() if type(m).__name__.endswith("Router"))
    sharded = any(hasattr(p, "device_mesh") for p in model.parameters())
    return routed or sharded or torch.is_autocast_enabled(model.device.type)


def distinct(rollout):
    """A smaller rollout, without most of what a group holds twice, and which of its rows each response is: an index [B] or slice(None).

    Every group keeps as many rows as the one with most different responses needs, and two at least: groups of one are no groups.
    """
    G, number = rollout.group_size, torch.arange(len(rollout.mask), device=rollout.mask.device)       # [B]
    tokens = rollout.response_ids.masked_fill(~rollout.mask, -1)                                      # [B, T]
    kind = torch.cat([number[:, None] // G, tokens], 1).unique(dim=0, return_inverse=True)[1].view(-1, G)   # [Q, G]  in order of groups
    kind = kind - kind.amin(1, keepdim=True)                                                          # [Q, G]  0, 1, ... in each group
    size = max(2, int(kind.max()) + 1)
    if size >= G:
        return rollout, slice(None)
    number = number.view(-1, G)                                                                       # [Q, G]
    rows = number[:, :1].repeat(1, size).scatter(1, kind, number).flatten()                           # [Q·size]
    small = replace(rollout, response_ids=rollout.response_ids[rows], mask=rollout.mask[rows], sampler_logp=None, truncated=None,
                    texts=None, group_size=size)
    return small, (number[:, :1] // G * size + kind).flatten()                                        # [B]


def response_hidden(model, rollout, T, fixed):
    """The hidden states that predict the first T tokens of each response, by the fastest way there is. -> [B, T, D]

    fixed: must_keep_shapes(model).
    """
    checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    if checkpointing or rollout.group_size == 1 and not rollout.prefix:
        return plain_hidden(model, rollout, T)
    groups = 0 if fixed else groups_per_row(model.config, rollout, T)
    return packed_hidden(model, rollout, T, groups) if groups else shared_hidden(model, rollout, T)


def shared_hidden(model, rollout, T):
    """Prompts once [Q, P], then responses [B, T-1] on their repeated keys and values. -> [B, T, D]"""
    G, prompt_mask = rollout.group_size, rollout.prompt_mask
    cache, padded = DynamicCache(config=model.config), not bool(prompt_mask.all())
    prompts = prompt_inputs(model, rollout.prompt_ids, prompt_mask, rollout.prefix, cache)
    first = model.base_model(**prompts).last_hidden_state[:, -1:].repeat_interleave(G, 0)             # [B, 1, D]
    if T == 1:
        return first
    cache.batch_repeat_interleave(G)
    steps = torch.arange(T - 1, device=prompt_mask.device)                                            # [T-1]
    position = prompt_mask.sum(-1).repeat_interleave(G)[:, None] + steps                              # [B, T-1]
    # Right padding needs no mask: under causal attention nothing to its left can see it.
    attention = F.pad(prompt_mask.repeat_interleave(G, 0).long(), (0, T - 1), value=1) if padded else None   # [B, P+T-1]
    rest = model.base_model(input_ids=rollout.response_ids[:, :T - 1], attention_mask=attention, position_ids=position,
                            past_key_values=cache, use_cache=True).last_hidden_state                  # [B, T-1, D]
    return torch.cat([first, rest], 1)                                                                # [B, T, D]


def groups_per_row(config, rollout, T):
    """How many groups make a packed row; 0: not even one is short enough, or the model does not take positions and any mask."""
    Q, P = rollout.prompt_ids.shape
    each = P - rollout.prefix + rollout.group_size * (T - 1)
    fit = [k for k in range(1, Q + 1) if Q % k == 0 and rollout.prefix + k * each <= MAX_PACKED]
    rotary = getattr(config, "rope_parameters", None) and not getattr(config, "alibi", False)
    able = rotary and config._attn_implementation in ("sdpa", "eager") and has_plain_cache(config)
    return max(fit, default=0) if able else 0


def packed_hidden(model, rollout, T, groups):
    """`groups` groups side by side in one row; a mask shows each token the prefix, its prompt and its own response. -> [B, T, D]

        prefix | rest of prompt 1 | response 1 | response 2 ... | rest of prompt 2 | response 1 | response 2 ...
    """
    (Q, P), G, prefix, device = rollout.prompt_ids.shape, rollout.group_size, rollout.prefix, rollout.mask.device

    def row(prompts, responses):                             # [Q, P], [Q, G(T-1)] -> [R, N]
        own = torch.cat([prompts[:, prefix:], responses], 1).reshape(Q // groups, -1)
        return torch.cat([prompts[::groups, :prefix], own], 1)

    steps = rollout.prompt_mask.sum(-1, keepdim=True) + torch.arange(T - 1, device=device).repeat(G)  # [Q, G(T-1)]
    position = row((rollout.prompt_mask.cumsum(-1) - 1).clamp(min=0), steps)                          # [R, N]
    number = torch.arange(Q, device=device)[:, None]                                                  # [Q, 1]
    of_prompt = number.where(rollout.prompt_mask, -2)                                                 # [Q, P]  -2: padding
    of_prompt[:, :prefix] = -1                                                                        # -1: everybody's
    group = row(of_prompt, number.expand(Q, G * (T - 1)))                                             # [R, N]
    answer = torch.arange(Q * G, device=device).view(Q, G).repeat_interleave(T - 1, 1)                # [Q, G(T-1)]
    answer = row(torch.full_like(of_prompt, -1), answer)                                              # [R, N]
    place = torch.arange(answer.shape[1], device=device)                                              # [N]
    sees = lambda owner: (owner[:, None] == -1) | (owner[:, None] == owner[:, :, None])               # [R, N, N]
    blocked = ~(sees(group) & sees(answer) & (place <= place[:, None]))[:, None]                      # [R, 1, N, N]
    mask = torch.zeros(blocked.shape, dtype=model.get_output_embeddings().weight.dtype, device=device)
    mask = mask.masked_fill(blocked, torch.finfo(torch.bfloat16).min)                                 # [R, 1, N, N]  added to the scores
    ids = row(rollout.prompt_ids, rollout.response_ids[:, :T - 1].reshape(Q, G * (T - 1)))            # [R, N]
    hidden = model.base_model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).last_hidden_state
    hidden = hidden[:, prefix:].reshape(Q, P - prefix + G * (T - 1), -1)                              # [Q, P-prefix+G(T-1), D]
    first = hidden[:, P - prefix - 1:P - prefix].repeat_interleave(G, 0)                              # [B, 1, D]
    return torch.cat([first, hidden[:, P - prefix:].reshape(Q * G, T - 1, hidden.shape[-1])], 1)      # [B, T, D]


if __name__ == "__main__":
    import time

    from rollout import sample
    from plumbing.tasks import builtin_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = builtin_tokenizer()
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=17, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                         head_dim=16, intermediate_size=128, eos_token_id=tokenizer.eos_token_id))
    rollout = sample(model, tokenizer, [f"{i}+8+5+9+2+7+1+9+4+4+4+4=" * 2 for i in range(8)], group_size=8, max_new_tokens=20)
    gap = (response_logp(model, rollout).logp - rollout.sampler_logp).abs().max()
    print(f"64 responses to 8 queries. Log-probs recorded while sampling against recomputed ones: largest difference {gap:.1e}\n"
          "(so the ratio of the first update is 1, its group-normalised loss about 0, and its gradient not 0)\n")
    T, mask = rollout.mask.shape[1], rollout.mask
    ways = {"plain: a row per response": plain_hidden, "shared: each prompt once": shared_hidden,
            "packed: a group in one row": lambda *inputs: packed_hidden(*inputs, groups=1)}
    for _ in range(2):                                       # the first time warms up
        lines = []
        for name, way in ways.items():
            began = time.perf_counter()
            logp, = token_logp(model.lm_head, way(model, rollout, T)[mask], rollout.response_ids[mask], 1.0, entropy=False)   # [N]
            logp.mean().backward()
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            model.zero_grad()
            lines.append(f"{name:28} forward and backward {time.perf_counter() - began:.3f} s   mean {logp.mean():.6f}   gradient norm {norm:.6f}")
    print("\n".join(lines))
