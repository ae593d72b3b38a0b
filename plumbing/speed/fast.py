"""The quick way: the same `sample` and `response_logp` as rollout.py, with the same results.

What is equal is computed once:
    a prefix that all prompts share (few-shot lines, a system prompt)       once for all of them
    the prompt of G responses                                               once for the group
    responses of a group, as long as they are equal so far                  one row of the model
    responses that are the same from beginning to end                       scored once
Rows that have ended leave the batch. Where all is short, prompts and responses stand side by side
in one row, and a mask keeps them apart.

tests/speed/test_fast_paths.py and test_logprobs.py hold both ways' tokens and gradients together.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from transformers import DynamicCache

import rollout as plain
from plumbing.speed.caches import copies_rows, growing_cache, shares_prefix, takes_any_mask
from plumbing.speed.cutting import counted_places
from rollout import (MAX_LOGITS, Scores, draw_token, end_test, finish, left_pad, pad_token,
                     token_ids, use_tool)

MIN_PREFIX = 16   # tokens that all prompts must begin with before a forward of their own pays
MAX_PACKED = 256  # tokens in a packed row: attention between responses that must not meet is wasted


# ---------------------------------------------------------------------------------------- sampling

@torch.no_grad()
def sample(model, tokenizer, prompts, group_size, max_new_tokens, temperature=1.0, uniforms=None,
           stop=(), tool=None, drop_every=None, decoder=None, reads=None):
    """rollout.sample, with equal rows computed once and ended rows dropped.

    drop_every   look for ended rows every so many tokens; if at every one, responses of a group
                 that are equal so far share a row (None: 1 on a CPU; 16 on a GPU, which would wait)
    decoder      compiled.Decoder: token steps under torch.compile; its rows are never dropped
    reads        a list that gets, for each token step, (responses [b], rows that they read [b])
    """
    if not copies_rows(model.config):
        return plain.sample(model, tokenizer, prompts, group_size, max_new_tokens, temperature,
                            uniforms, stop, tool)
    model.eval()
    device, G, T, pad = model.device, group_size, max_new_tokens, pad_token(tokenizer)
    prompts = token_ids(tokenizer, prompts)
    prefix = common_prefix(prompts) if shares_prefix(model.config) else 0
    prompts = left_pad(prompts, pad, device)                                        # [Q, P] each
    B = len(prompts[0]) * G
    uniforms = torch.rand(B, T, device=device) if uniforms is None else uniforms.to(device)
    is_end = end_test(model, tokenizer, stop)
    drop_every = drop_every or (16 if device.type == "cuda" else 1)

    response = torch.full((B, T), pad, device=device)                               # [B, T]
    logp = torch.zeros(B, T, device=device)                                         # [B, T]
    lengths = torch.zeros(B, dtype=torch.long, device=device)                       # [B]
    ended = torch.zeros(B, dtype=torch.bool, device=device)                         # [B]
    inserted = torch.full((B, T), -1, device=device)                                # [B, T]
    live = torch.arange(B, device=device)                            # [b] responses still looked at
    if decoder:
        rows = decoder.begin(*prompts, G, T)
    else:
        rows = Rows(model, *prompts, prefix, G, share=drop_every == 1)

    for t in range(T):
        token, chosen = draw_token(rows.logits[rows.of], uniforms[live, t], temperature)  # [b]
        over, own = ended[live], inserted[live, t] < 0                              # [b]
        token = torch.where(own, token, inserted[live, t]).masked_fill(over, pad)   # [b]
        response[live, t] = token
        logp[live, t] = chosen.masked_fill(over | ~own, 0.0)
        lengths[live] += ~over
        ended[live] = over | own & is_end(response[live, :t + 1])
        if t + 1 == T:
            break
        if tool:
            ready = (inserted[:, t] < 0) & ~ended                                   # [B]
            use_tool(tool, tokenizer, response[:, :t + 1], inserted, ready)
        if (t + 1) % drop_every == 0:
            keep = (~ended[live]).nonzero().squeeze(-1)                             # [b]
            if len(keep) == 0:
                break
            if not decoder:
                live, token = live[keep], token[keep]                               # [b]
                rows.drop(keep, token)
        if reads is not None:
            reads.append((live, rows.of))
        rows.step(token)
    return finish(tokenizer, stop, prompts, G, response, logp, lengths, ended, inserted, prefix)


class Rows:
    """The rows of the model while sampling: n of them, read by b >= n responses."""

    def __init__(self, model, ids, mask, prefix, group_size, share):
        """share: responses that are equal so far read one row; else each has its own."""
        copies = 1 if share else group_size
        self.step_model = torch.inference_mode()(model.__call__)  # 7 % faster than under no_grad
        self.cache, self.share = growing_cache(model.config), share
        inputs = prompt_inputs(model, ids, mask, prefix, self.cache)
        logits = model(**inputs, logits_to_keep=1).logits[:, -1]                    # [Q, V]
        self.logits = logits.repeat_interleave(copies, 0)                           # [n, V]
        self.attention = seen_last(inputs["attention_mask"], copies)                # [n, ..., P]
        self.position = mask.sum(-1).repeat_interleave(copies)               # [n] of the next token
        responses = torch.arange(len(ids) * group_size, device=ids.device)          # [b]
        self.of = responses // (group_size // copies)                  # [b] the row that each reads
        self.own = not share                                  # no two responses read the same row
        if copies > 1:
            self.cache.batch_repeat_interleave(copies)

    def drop(self, keep, token):
        """Go on with the responses `keep` [b], whose last tokens are `token` [b]."""
        self.of = self.of[keep]                                                     # [b]
        if self.share:
            parent, child = equal_so_far(self.of, token)                            # [n], [b]
            self.share = 2 * len(parent) <= len(keep)  # else most differ by now
        if not self.share:
            parent, child = self.of, torch.arange(len(keep), device=keep.device)    # [b] each
        grows = not self.own and len(parent) > len(parent.unique())
        if grows or len(parent) <= 0.9 * len(self.position):  # fewer do not pay for the copy
            self.cache.batch_select_indices(parent)
            self.of, self.position = child, self.position[parent]                   # [b], [n]
            self.own = not self.share
            self.attention = None if self.attention is None else self.attention[parent]

    def step(self, token):
        """The forward of one token per response: token [b] -> self.logits [n, V]."""
        if self.attention is not None:
            self.attention = F.pad(self.attention, (0, 1), value=1)                # [n, .., P+t+1]
        tokens = torch.zeros_like(self.position).scatter(0, self.of, token)         # [n]
        self.logits = self.step_model(
            input_ids=tokens[:, None], attention_mask=self.attention, use_cache=True,
            position_ids=self.position[:, None], past_key_values=self.cache).logits[:, -1]
        self.position = self.position + 1                                           # [n]


def equal_so_far(row, token):
    """Responses that read the same row [b] and drew the same token [b] go on as one:
    (rows to go on [n], which of them each response takes [b])."""
    kind, child = (row * 2**32 + token).unique(return_inverse=True)                 # [n], [b]
    return kind // 2**32, child


def common_prefix(prompts):
    """How many tokens all prompts (lists of ids) begin with, each keeping one of its own, or 0."""
    first, last = min(prompts), max(prompts)  # as lists are ordered, the others lie between
    shared = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), len(first))
    shared = min(shared, min(map(len, prompts)) - 1)
    return shared if shared >= MIN_PREFIX and len(prompts) > 1 else 0


def prompt_inputs(model, ids, mask, prefix, cache):
    """What a forward of prompts [Q, P] into the cache is called with, to the right of the shared
    prefix, which is computed here, in one row for all of them."""
    position = (mask.cumsum(-1) - 1).clamp(min=0)                                   # [Q, P]
    if prefix:
        ids, mask, position = shared_prefix_first(ids, mask, position, prefix)
        model.base_model(input_ids=ids[:1, :prefix], position_ids=position[:1, :prefix],
                         past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(ids))
    return dict(input_ids=ids[:, prefix:], position_ids=position[:, prefix:], use_cache=True,
                attention_mask=seen(model.config, mask, mask.shape[1] - prefix),
                past_key_values=cache)


def seen(config, mask, S):
    """What the last S of the tokens in mask [n, C] see: None, if that is all before them, or a mask
    [n, 1, S, C]. A GPU would have to be waited for to look for padding, so there we do not, nor let
    transformers, which looks wherever it is given a mask [n, C]."""
    if mask.device.type != "cuda" and bool(mask.all()):
        return None
    if not takes_any_mask(config) or config._attn_implementation == "eager":
        return mask.long()                                                          # [n, C]
    key = torch.arange(mask.shape[1], device=mask.device)                           # [C]
    place = key[-S:, None]                                                          # [S, 1]
    return mask[:, None, None] & (key <= place) | (key == place)                    # [n, 1, S, C]


def seen_last(mask, copies):
    """What the last token sees by a mask of `seen`, for copies of each row: [n, C], [n, 1, 1, C]"""
    if mask is not None:
        mask = mask[:, :, -1:] if mask.dim() == 4 else mask
        return mask.repeat_interleave(copies, 0)


def shared_prefix_first(ids, mask, position, prefix):
    """Prompts padded on the left, [Q, P] each, with the shared prefix moved before the padding:

        · · s s s 4 5        s s s · · 4 5
        s s s 1 2 3 4   ->   s s s 1 2 3 4
    """
    start = mask.shape[1] - mask[0].sum()
    first = ids[0, start + torch.arange(prefix, device=ids.device)]                 # [prefix]
    own = mask[:, prefix:] & (position[:, prefix:] >= prefix)                       # [Q, P-prefix]
    first = first.expand(len(ids), -1)                                              # [Q, prefix]
    steps = torch.arange(prefix, device=ids.device).expand(len(ids), -1)            # [Q, prefix]
    return (torch.cat([first, ids[:, prefix:]], 1), torch.cat([steps >= 0, own], 1),
            torch.cat([steps, position[:, prefix:]], 1))                            # [Q, P] each


# --------------------------------------------------------------------------------------- log-probs

def response_logp(model, rollout, temperature=1.0, entropy=True, entropy_grad=False,
                  max_logits=None):
    """rollout.response_logp, with prompts and equal responses computed once; on a GPU in larger
    chunks, which read the LM head's weights less often (None: as the device wants it)."""
    max_logits = max_logits or chunk_logits(model.device.type)
    small, where = (rollout, slice(None)) if keeps_rows(model) else distinct(rollout)
    width, T = rollout.mask.shape[1], rollout.mask.shape[1]
    fixed = keeps_shapes(model)
    if not fixed:
        T = int(small.mask.any(0).nonzero().max()) + 1  # the rest is padding in every row
        small = replace(small, response_ids=small.response_ids[:, :T], mask=small.mask[:, :T])
    hidden = response_hidden(model, small, fixed)                                   # [b, T, D]
    scores = plain.token_scores(model, hidden, small, temperature, entropy, entropy_grad,
                                max_logits, counted_places(small))
    pad = lambda x: x if x is None else F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - T))[where]
    return Scores(pad(scores.logp), pad(scores.entropy), pad(scores.hidden), where)


def chunk_logits(device_type):
    """How many logits may exist at once: 256 MB in float32 on a GPU."""
    return 2**26 if device_type == "cuda" else MAX_LOGITS


def is_sharded(model):
    return any(hasattr(p, "device_mesh") for p in model.parameters())


def keeps_shapes(model):
    """Whether the shape of a forward must not follow from what was sampled: while routes are
    recorded or replayed; over shards, as all processes must make the same forwards; in bfloat16, as
    old and new log-probs are rounded alike only in like shapes."""
    routed = any(m._forward_hooks for m in model.modules() if type(m).__name__.endswith("Router"))
    return routed or keeps_rows(model)


def keeps_rows(model):
    """Whether every response must keep a row of its own: shards, bfloat16, replayed routes. And on
    a GPU, which would have to be waited for to find equal ones."""
    kind = model.device.type
    rounded = kind == "cuda" or torch.is_autocast_enabled(kind)
    return is_sharded(model) or rounded or getattr(model, "replays_routes", False)


def distinct(rollout):
    """(a smaller rollout without most of what a group holds twice, which of its rows each response
    is: an index [B] or slice(None)). Every group keeps as many rows as the one with most different
    responses needs, two at least."""
    G = rollout.group_size
    number = torch.arange(len(rollout.mask), device=rollout.mask.device)            # [B]
    tokens = rollout.response_ids.masked_fill(~rollout.mask, -1)                    # [B, T]
    rows = torch.cat([number[:, None] // G, tokens], 1)                             # [B, 1+T]
    kind = rows.unique(dim=0, return_inverse=True)[1].view(-1, G)        # [Q, G] in order of groups
    kind = kind - kind.amin(1, keepdim=True)                              # [Q, G] 0, 1, ... in each
    size = max(2, int(kind.max()) + 1)
    if size >= G:
        return rollout, slice(None)
    number = number.view(-1, G)                                                     # [Q, G]
    rows = number[:, :1].repeat(1, size).scatter(1, kind, number).flatten()         # [Q·size]
    small = replace(rollout, response_ids=rollout.response_ids[rows], mask=rollout.mask[rows],
                    sampler_logp=None, truncated=None, texts=None, tokens=None, group_size=size)
    return small, (number[:, :1] // G * size + kind).flatten()                      # [B]


def response_hidden(model, rollout, fixed):
    """The hidden states that predict the responses, by the quickest way there is -> [B, T, D].
    fixed: keeps_shapes(model), asked once per forward as it looks at every module."""
    checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    if is_sharded(model):  # FSDP2's backward would never gather the last layer for a forward over
        rollout = replace(rollout, prefix=0)  # the prefix, whose output nobody uses
    alone = rollout.group_size == 1 and not rollout.prefix
    if checkpointing or alone or not copies_rows(model.config):
        return plain.response_hidden(model, rollout, seen)
    groups = 0 if fixed else groups_per_row(model.config, rollout)
    return packed_hidden(model, rollout, groups) if groups else shared_hidden(model, rollout)


def shared_hidden(model, rollout):
    """Prompts once [Q, P], then responses [B, T-1] on their keys and values -> [B, T, D]."""
    G, T, prompt_mask = rollout.group_size, rollout.mask.shape[1], rollout.prompt_mask
    cache = DynamicCache(config=model.config)
    inputs = prompt_inputs(model, rollout.prompt_ids, prompt_mask, rollout.prefix, cache)
    first = model.base_model(**inputs).last_hidden_state[:, -1:]                    # [Q, 1, D]
    first = first.repeat_interleave(G, 0)                                           # [B, 1, D]
    if T == 1:
        return first
    cache.batch_repeat_interleave(G)
    steps = torch.arange(T - 1, device=prompt_mask.device)                          # [T-1]
    position = prompt_mask.sum(-1).repeat_interleave(G)[:, None] + steps            # [B, T-1]
    attention = seen_last(inputs["attention_mask"], G)
    if attention is not None:  # padding on the right needs no mask: nothing to its left can see it
        attention = F.pad(attention, (0, T - 1), value=1)                      # [B, ..., P+T-1]
    if attention is not None and attention.dim() == 4:
        key = torch.arange(attention.shape[-1], device=attention.device)            # [P+T-1]
        attention = attention & (key <= key[1 - T:, None])                  # [B, 1, T-1, P+T-1]
    rest = model.base_model(input_ids=rollout.response_ids[:, :T - 1], attention_mask=attention,
                            position_ids=position, past_key_values=cache,
                            use_cache=True).last_hidden_state                       # [B, T-1, D]
    return torch.cat([first, rest], 1)                                              # [B, T, D]


def groups_per_row(config, rollout):
    """How many groups make a packed row; 0: not even one is short enough, or the model takes no
    positions or no mask of one's own."""
    (Q, P), T = rollout.prompt_ids.shape, rollout.mask.shape[1]
    each = P - rollout.prefix + rollout.group_size * (T - 1)
    fit = [k for k in range(1, Q + 1) if Q % k == 0 and rollout.prefix + k * each <= MAX_PACKED]
    return max(fit, default=0) if takes_any_mask(config) else 0


def packed_hidden(model, rollout, groups):
    """`groups` groups in one row; a token sees the prefix, its prompt, its response -> [B, T, D]

        prefix | prompt 1 | response 1 | response 2 ... | prompt 2 | response 1 | response 2 ...
    """
    (Q, P), G, T = rollout.prompt_ids.shape, rollout.group_size, rollout.mask.shape[1]
    prefix, device = rollout.prefix, rollout.mask.device
    ids, mask = rollout.prompt_ids, rollout.prompt_mask                             # [Q, P]
    position = (mask.cumsum(-1) - 1).clamp(min=0)                                   # [Q, P]
    if prefix:
        ids, mask, position = shared_prefix_first(ids, mask, position, prefix)

    def row(prompts, responses):                                     # [Q, P], [Q, G(T-1)] -> [R, N]
        own = torch.cat([prompts[:, prefix:], responses], 1).reshape(Q // groups, -1)
        return torch.cat([prompts[::groups, :prefix], own], 1)

    number = torch.arange(Q, device=device)[:, None]                                # [Q, 1]
    of_prompt = number.where(mask, -2)                                         # [Q, P]  -2: padding
    of_prompt[:, :prefix] = -1  # everybody's
    group = row(of_prompt, number.expand(Q, G * (T - 1)))                           # [R, N]
    answer = torch.arange(Q * G, device=device).view(Q, G)                          # [Q, G]
    answer = answer.repeat_interleave(T - 1, 1)                                     # [Q, G(T-1)]
    answer = row(torch.full_like(of_prompt, -1), answer)                            # [R, N]
    place = torch.arange(answer.shape[1], device=device)                            # [N]
    sees = lambda owner: (owner[:, None] == -1) | (owner[:, None] == owner[:, :, None])  # [R, N, N]
    blocked = ~(sees(group) & sees(answer) & (place <= place[:, None]))[:, None]    # [R, 1, N, N]
    dtype = model.get_output_embeddings().weight.dtype
    attention = torch.zeros(blocked.shape, dtype=dtype, device=device)
    attention = attention.masked_fill(blocked, torch.finfo(torch.bfloat16).min)

    steps = mask.sum(-1, keepdim=True) + torch.arange(T - 1, device=device).repeat(G)  # [Q, G(T-1)]
    responses = rollout.response_ids[:, :T - 1].reshape(Q, G * (T - 1))             # [Q, G(T-1)]
    hidden = model.base_model(input_ids=row(ids, responses), attention_mask=attention,
                              position_ids=row(position, steps),
                              use_cache=False).last_hidden_state                    # [R, N, D]
    hidden = hidden[:, prefix:].reshape(Q, P - prefix + G * (T - 1), -1)
    first = hidden[:, P - prefix - 1:P - prefix].repeat_interleave(G, 0)            # [B, 1, D]
    rest = hidden[:, P - prefix:].reshape(Q * G, T - 1, hidden.shape[-1])           # [B, T-1, D]
    return torch.cat([first, rest], 1)                                              # [B, T, D]
