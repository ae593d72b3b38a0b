"""fast_sample and fast_response_logp: `sample` and `response_logp` of rollout.py, with the same
results in less time.

Identical computations are shared:
    a prefix that all prompts share (few-shot lines, a system prompt)       once for all of them
    the prompt of G responses                                               once for the group
    responses of a group, as long as they are equal so far                  one row of the model
    responses that are equal from beginning to end                          scored once
Rows whose response has ended are dropped from the batch. Short prompts and responses are packed
side by side in one row, and an attention mask keeps them apart.

tests/speed/test_fast_paths.py and test_logprobs.py compare tokens and gradients with rollout.py's.
"""

import os
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from transformers import DynamicCache

import rollout as plain
from plumbing.speed.caches import copies_rows, shares_prefix, takes_any_mask
from rollout import (Sampler, Scores, draw_token, end_test, finish, left_pad, pad_token,
                     take_fields, token_ids)
from routes import Pass, record_routes

MIN_PREFIX = 16   # shortest shared prefix, in tokens, that is worth a forward of its own
ANY = -1          # a token that belongs to every prompt, or to every response, of a packed row
PADDING = -2      # a token that belongs to none
MAX_PACKED = 256  # longest packed row, in tokens: attention between responses is wasted work


# ---------------------------------------------------------------------------------------- sampling

class FastSampler(Sampler):
    """A rollout.Sampler that calls fast_sample. graphs: a graphs.Graphs, with which token steps are
    replayed on a GPU; None: they are not."""

    graphs = None

    def sample(self, prompts, group_size, uniforms=None, temperature=None, **options):
        temperature = self.temperature if temperature is None else temperature
        return fast_sample(self.policy, self.tokenizer, prompts, group_size, self.max_new_tokens,
                           temperature, uniforms, self.stop, graphs=self.graphs, **options)


@torch.no_grad()
def fast_sample(model, tokenizer, prompts, group_size, max_new_tokens, temperature=1.0,
                uniforms=None, stop=(), limits=None, drop_every=None, graphs=None):
    """rollout.sample, with equal rows computed once and ended rows dropped.

    drop_every   number of tokens between two searches for ended rows. At 1, responses of a group
                 that are equal so far share a row. None: 1 on a CPU; 16 on a GPU, where each search
                 synchronizes
    graphs       see FastSampler; needs drop_every > 1
    """
    if not copies_rows(model.config):
        return plain.sample(model, tokenizer, prompts, group_size, max_new_tokens, temperature,
                            uniforms, stop, limits)
    model.eval()
    device = model.device
    G = group_size
    T = max_new_tokens
    pad = pad_token(tokenizer)
    prompts = token_ids(tokenizer, prompts)
    prefix = find_prefix(prompts) if shares_prefix(model.config) else 0
    prompts = left_pad(prompts, pad, device)                                        # [Q, P] each
    B = len(prompts[0]) * G
    uniforms = torch.rand(B, T, device=device) if uniforms is None else uniforms.to(device)
    is_end = end_test(model, tokenizer, stop)
    drop_every = drop_every or (16 if device.type == "cuda" else 1)

    response = torch.full((B, T), pad, device=device)                               # [B, T]
    logp = torch.zeros(B, T, device=device)                                         # [B, T]
    lengths = torch.zeros(B, dtype=torch.long, device=device)                       # [B]
    ended = torch.zeros(B, dtype=torch.bool, device=device)                         # [B]
    longest = T if limits is None else int(limits.max())
    limits = torch.full((B,), T, device=device) if limits is None else limits.to(device)   # [B]
    last = (prompts[1].sum(-1).repeat_interleave(G) + limits).max() - 1
    live = torch.arange(B, device=device)                            # [b] responses not yet dropped
    rows = Rows(model, *prompts, prefix, G, last, drop_every == 1, graphs, longest)

    for t in range(longest):
        logits = rows.logits[rows.source]                                           # [b, V]
        token, chosen = draw_token(logits, uniforms[live, t], temperature)          # [b], [b]
        over = ended[live] | (t >= limits[live])                                    # [b]
        token = token.masked_fill(over, pad)                                        # [b]
        response[live, t] = token
        logp[live, t] = chosen
        lengths[live] += ~over
        ended[live] |= ~over & is_end(response[live, :t + 1])
        if t + 1 == longest:
            break
        if t % drop_every == 0:
            goes_on = ~ended[live] & (t + 1 < limits[live])                         # [b]
            keep = goes_on.nonzero().squeeze(-1)                                    # [b]
            if len(keep) == 0:
                break
            live = live[keep]                                                       # [b]
            token = token[keep]                                                     # [b]
            rows.drop(keep, token)
        rows.step(token)
    rollout = finish(tokenizer, stop, prompts, G, response, logp, lengths, ended)
    return replace(rollout, prefix=prefix)


class Rows:
    """The n rows of the model while sampling; b >= n responses read them."""

    def __init__(self, model, ids, mask, prefix, group_size, last, share, graphs, longest):
        """last: the largest position of a token. share: responses that are equal so far read the
        same row; otherwise each has its own after the first token, and a step of graphs takes over.
        longest: the largest number of tokens of a response."""
        self.graphs = graphs
        self.length = ids.shape[1] + longest
        self.fixed = None                                      # a FixedStep, if it has taken over
        self.step_model = torch.inference_mode()(model.__call__)  # 7 % faster than under no_grad
        self.cache = DynamicCache(config=model.config)
        self.share = share
        inputs = prepare_prompts(model, ids, mask, prefix, self.cache)
        self.logits = model(**inputs, logits_to_keep=1).logits[:, -1]               # [n, V]
        self.attention = cut_mask(inputs["attention_mask"], 1)                      # [n, ..., P]
        self.position = mask.sum(-1)                                         # [n] of the next token
        self.last = last
        responses = torch.arange(len(ids) * group_size, device=ids.device)          # [b]
        self.source = responses // group_size                          # [b] the row that each reads
        self.separate = False                                  # no two responses read the same row

    def drop(self, keep, token):
        """Continue with the responses `keep` [b] only, whose last tokens are `token` [b]."""
        self.source = self.source[keep]                                             # [b]
        if self.share:
            rows, source = merge_equal(self.source, token)                          # [n], [b]
            self.share = 2 * len(rows) <= len(keep)     # else most responses differ by now
        if not self.share:
            rows = self.source                                                      # [b]
            source = torch.arange(len(keep), device=keep.device)                    # [b]
        # rows are copied if responses that read the same one differ from here on, or if at least a
        # tenth of them is no longer read: fewer do not pay for the copy
        splits = not self.separate and len(rows) > len(rows.unique())
        if not self.fixed and (splits or len(rows) <= 0.9 * len(self.position)):
            self.cache.batch_select_indices(rows)
            self.attention = None if self.attention is None else self.attention[rows]
            self.source = source                                                    # [b]
            self.position = self.position[rows]                                     # [n]
            self.separate = not self.share

    def step(self, token):
        """The forward of one token per response: token [b] -> self.logits [n, V]."""
        tokens = torch.zeros_like(self.position).scatter(0, self.source, token)     # [n]
        if self.fixed:
            self.logits = self.fixed(tokens)
            return
        if self.attention is not None:
            self.attention = F.pad(self.attention, (0, 1), value=1)                # [n, .., P+t+1]
        self.logits = self.step_model(
            input_ids=tokens[:, None], attention_mask=self.attention, use_cache=True,
            position_ids=self.position[:, None], past_key_values=self.cache).logits[:, -1]
        if self.graphs and not self.share:
            self.fixed = self.graphs.fix(self, tokens)
            self.graphs = None
        self.position = (self.position + 1).clamp(max=self.last)                    # [n]


def merge_equal(row, token):
    """Merge responses that read the same row [b] and drew the same token [b]: (rows to keep [n],
    which of them each response reads next [b])."""
    pairs, source = (row * 2**32 + token).unique(return_inverse=True)               # [n], [b]
    return pairs // 2**32, source


def find_prefix(prompts):
    """The number of first tokens that all prompts (lists of ids) share, leaving each prompt at
    least one token of its own; 0 if sharing is not worthwhile."""
    shared = min(len(os.path.commonprefix(prompts)), min(map(len, prompts)) - 1)
    return shared if shared >= MIN_PREFIX and len(prompts) > 1 else 0


def prepare_prompts(model, ids, mask, prefix, cache):
    """The arguments of the forward of prompts [Q, P] into the cache. If there is a shared prefix,
    its forward runs here, in one row for all prompts, and the arguments are for the tokens after
    it."""
    if prefix:
        ids, mask = move_prefix_first(ids, mask, prefix)
    position = (mask.cumsum(-1) - 1).clamp(min=0)                                   # [Q, P]
    if prefix:
        model.base_model(input_ids=ids[:1, :prefix], position_ids=position[:1, :prefix],
                         past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(ids))
    return dict(input_ids=ids[:, prefix:], position_ids=position[:, prefix:], use_cache=True,
                attention_mask=make_mask(model.config, mask, mask.shape[1] - prefix),
                past_key_values=cache)


def make_mask(config, mask, S):
    """The attention mask of the last S of the tokens in mask [n, C]: None if they see all tokens
    before them, else a mask [n, 1, S, C]. On a GPU, looking for padding would synchronize, so the
    mask [n, 1, S, C] is always made there; transformers would look for padding in a mask [n, C]."""
    if mask.device.type != "cuda" and bool(mask.all()):
        return None
    if not takes_any_mask(config) or config._attn_implementation == "eager":
        return mask.long()                                                          # [n, C]
    key = torch.arange(mask.shape[1], device=mask.device)                           # [C]
    place = key[-S:, None]                                                          # [S, 1]
    return mask[:, None, None] & (key <= place) | (key == place)                    # [n, 1, S, C]


def cut_mask(mask, copies):
    """The part of make_mask's mask for the last token, repeated for copies of each row: [n, C] or
    [n, 1, 1, C]."""
    if mask is not None:
        mask = mask[:, :, -1:] if mask.dim() == 4 else mask
        return mask.repeat_interleave(copies, 0)


def move_prefix_first(ids, mask, prefix):
    """Prompts padded on the left and their mask, [Q, P] each, with the shared prefix moved before
    the padding:

        · · s s s 4 5        s s s · · 4 5
        s s s 1 2 3 4   ->   s s s 1 2 3 4
    """
    padding = (~mask).sum(-1, keepdim=True)                                         # [Q, 1]
    place = torch.arange(mask.shape[1], device=mask.device)                         # [P]
    source = (place - prefix).where(place < prefix + padding, place)                # [Q, P]
    source = (place + padding).where(place < prefix, source)                        # [Q, P]
    return ids.gather(1, source), mask.gather(1, source)


# --------------------------------------------------------------------------------------- log-probs

def fast_response_logp(model, rollout, temperature=1.0, entropy=True, record=False):
    """rollout.response_logp, with prompts and equal responses computed once. record: also return
    the experts that the routers chose."""
    rollout = replace(rollout, group_size=rollout.readers)   # those that can share a prompt
    # forced routes fit only if every response keeps its row
    keep_rows = rollout.forced_routes is not None or must_keep_rows(model)
    small, source = (rollout, slice(None)) if keep_rows else merge_repeats(rollout)     # [B]
    width = rollout.mask.shape[1]
    T = width
    fixed = record or keep_rows     # the shape of a forward must not depend on what was sampled
    if not fixed:
        used = small.mask.any(0).nonzero()
        T = int(used.max()) + 1 if len(used) else 1     # the rest is padding in every row
        small = small.resize(small.prompt_ids.shape[1], T)
    with record_routes(model) if record else nullcontext() as passes:
        hidden = response_hidden(model, small, fixed)                               # [b, T, D]
    scores = plain.token_scores(model, hidden, small, temperature, entropy)
    pad = lambda x: x if x is None else F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - T))[source]
    scores = Scores(pad(scores.logp), pad(scores.entropy), pad(scores.hidden))
    if record:
        last = passes.passes[-1]
        if small is not rollout and last.indices.shape[1] == len(small.mask):
            passes.passes[-1] = last.take(source)            # equal responses have shared a row
        scores.passes = passes
        scores.routes = select_response_routes(passes, rollout)                     # [L, B, T, ·]
    return scores


def select_response_routes(routes, rollout):
    """The routes of the positions that predict the response tokens (token t is predicted at
    position P - 1 + t): Pass(indices [L, B, T, K], logits). The routes come from forwards over
    [the shared prefix,] the prompts and the responses, or from one forward over all."""
    start = rollout.prompt_ids.shape[1] - 1
    passes = list(routes.passes)
    while start >= passes[0].indices.shape[2]:
        start -= passes.pop(0).indices.shape[2]
    share = len(rollout.mask) // passes[0].indices.shape[1]  # responses that read a row
    first = (x[:, :, start:].repeat_interleave(share, 1) for x in passes[0])
    return Pass(*(torch.cat(parts, 2) for parts in zip(first, *passes[1:])))


def is_sharded(model):
    return any(hasattr(p, "device_mesh") for p in model.parameters())


def must_keep_rows(model):
    """Whether every response must keep its own row. This is so with sharded weights, because all
    processes must run the same forwards; in 16-bit precision, because old and new log-probs are
    rounded in the same way only in equal shapes; and on a GPU, where finding equal responses would
    synchronize."""
    device_type = model.device.type
    rounded = device_type == "cuda" or torch.is_autocast_enabled(device_type)
    return is_sharded(model) or rounded


def merge_repeats(rollout):
    """(a smaller rollout without most of the repeated responses, the row of it that belongs to each
    response: an index [B] or slice(None)). Two responses differ if a token up to their last loss
    token differs, including observations, or if a token was written by the policy in one and
    observed in the other. Every group keeps the same number of rows: as many as
    the group with the most different responses needs, at least two."""
    G = rollout.group_size
    number = torch.arange(len(rollout.mask), device=rollout.mask.device)            # [B]
    ids = rollout.response_ids                                                      # [B, T]
    mask = rollout.mask                                                             # [B, T]
    over = mask.flip(-1).cumsum(-1).flip(-1) == 0             # [B, T] after the last loss token
    tokens = torch.where(mask, ids, -2 - ids).masked_fill(over, -1)                 # [B, T]
    keys = torch.cat([number[:, None] // G, tokens], 1)                             # [B, 1+T]
    distinct = keys.unique(dim=0, return_inverse=True)[1].view(-1, G)    # [Q, G] in order of groups
    distinct = distinct - distinct.amin(1, keepdim=True)                 # [Q, G] 0, 1, ... in each
    size = max(2, int(distinct.max()) + 1)
    if size >= G:
        return rollout, slice(None)
    number = number.view(-1, G)                                                     # [Q, G]
    rows = number[:, :1].repeat(1, size).scatter(1, distinct, number).flatten()     # [Q·size]
    small = replace(take_fields(rollout, rows), group_size=size)
    return small, (number[:, :1] // G * size + distinct).flatten()                  # [B]


def response_hidden(model, rollout, fixed):
    """The hidden states that predict the responses, [B, T, D], computed by the fastest method that
    the model supports. fixed: the shape of a forward must not depend on the sampled tokens."""
    checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    if is_sharded(model):  # FSDP2's backward would never gather the last layer for a forward over
        rollout = replace(rollout, prefix=0)  # the prefix, whose output nobody uses
    alone = rollout.group_size == 1 and not rollout.prefix
    if checkpointing or alone or not copies_rows(model.config):
        return plain.response_hidden(model, rollout, make_mask)
    groups = 0 if fixed else groups_per_row(model.config, rollout)
    return packed_hidden(model, rollout, groups) if groups else shared_hidden(model, rollout)


def shared_hidden(model, rollout):
    """One forward over the prompts [Q, P], then one over the responses [B, T-1] that reads the
    prompts' keys and values -> [B, T, D]."""
    G = rollout.group_size
    T = rollout.mask.shape[1]
    prompt_mask = rollout.prompt_mask[::G]                                          # [Q, P]
    cache = DynamicCache(config=model.config)
    inputs = prepare_prompts(model, rollout.prompt_ids[::G], prompt_mask, rollout.prefix, cache)
    first = model.base_model(**inputs).last_hidden_state[:, -1:]                    # [Q, 1, D]
    first = first.repeat_interleave(G, 0)                                           # [B, 1, D]
    if T == 1:
        return first
    cache.batch_repeat_interleave(G)
    steps = torch.arange(T - 1, device=prompt_mask.device)                          # [T-1]
    position = prompt_mask.sum(-1).repeat_interleave(G)[:, None] + steps            # [B, T-1]
    attention = cut_mask(inputs["attention_mask"], G)
    if attention is not None:  # padding on the right needs no mask: nothing to its left can see it
        attention = F.pad(attention, (0, T - 1), value=1)                      # [B, ..., P+T-1]
        if attention.dim() == 4:
            key = torch.arange(attention.shape[-1], device=attention.device)        # [P+T-1]
            attention = attention & (key <= key[1 - T:, None])              # [B, 1, T-1, P+T-1]
    rest = model.base_model(input_ids=rollout.response_ids[:, :T - 1], attention_mask=attention,
                            position_ids=position, past_key_values=cache,
                            use_cache=True).last_hidden_state                       # [B, T-1, D]
    return torch.cat([first, rest], 1)                                              # [B, T, D]


def groups_per_row(config, rollout):
    """The number of groups in a packed row. 0: not even one group is short enough, or the model
    does not accept custom positions and masks."""
    Q, P = rollout.prompt_ids[::rollout.group_size].shape
    T = rollout.mask.shape[1]
    each = P - rollout.prefix + rollout.group_size * (T - 1)
    fit = [k for k in range(1, Q + 1) if Q % k == 0 and rollout.prefix + k * each <= MAX_PACKED]
    return max(fit, default=0) if takes_any_mask(config) else 0


def packed_hidden(model, rollout, groups):
    """One forward for all: each row of the model holds `groups` groups side by side -> [B, T, D].

        prefix | prompt 1 | response | response ... | prompt 2 | response | response ...

    The attention mask keeps apart what does not belong together, see `packed_mask`.
    """
    G = rollout.group_size
    T = rollout.mask.shape[1]
    prefix = rollout.prefix
    device = rollout.mask.device
    ids = rollout.prompt_ids[::G]                                                   # [Q, P]
    mask = rollout.prompt_mask[::G]                                                 # [Q, P]
    Q, P = ids.shape
    if prefix:
        ids, mask = move_prefix_first(ids, mask, prefix)
    position = (mask.cumsum(-1) - 1).clamp(min=0)                                   # [Q, P]

    def pack(prompts, responses):        # [Q, P], [Q, G(T-1)] -> [R, N], the groups of a row joined
        after = torch.cat([prompts[:, prefix:], responses], 1).reshape(Q // groups, -1)
        return torch.cat([prompts[::groups, :prefix], after], 1)

    # which prompt and which response each token belongs to
    number = torch.arange(Q, device=device)[:, None]                                # [Q, 1]
    prompt = number.where(mask, PADDING)                                            # [Q, P]
    prompt[:, :prefix] = ANY
    response = torch.arange(Q * G, device=device).view(Q, G)                        # [Q, G]
    response = response.repeat_interleave(T - 1, 1)                                 # [Q, G(T-1)]
    attention = packed_mask(pack(prompt, number.expand_as(response)),
                            pack(torch.full_like(prompt, ANY), response),
                            model.get_output_embeddings().weight.dtype)             # [R, 1, N, N]

    # a response continues the positions of its prompt
    steps = mask.sum(-1, keepdim=True) + torch.arange(T - 1, device=device).repeat(G)  # [Q, G(T-1)]
    tokens = rollout.response_ids[:, :T - 1].reshape(Q, G * (T - 1))                # [Q, G(T-1)]
    hidden = model.base_model(input_ids=pack(ids, tokens), attention_mask=attention,
                              position_ids=pack(position, steps),
                              use_cache=False).last_hidden_state                    # [R, N, D]
    hidden = hidden[:, prefix:].reshape(Q, P - prefix + G * (T - 1), -1)
    first = hidden[:, P - prefix - 1:P - prefix].repeat_interleave(G, 0)            # [B, 1, D]
    rest = hidden[:, P - prefix:].reshape(Q * G, T - 1, hidden.shape[-1])           # [B, T-1, D]
    return torch.cat([first, rest], 1)                                              # [B, T, D]


def packed_mask(prompt, response, dtype):
    """The attention mask of packed rows, [R, 1, N, N]: 0 where the token of the line sees the token
    of the column, else a large negative number.

    prompt, response: [R, N], the number of the prompt and of the response that a token belongs to,
    or ANY (-). A token sees itself and the tokens before it whose prompt and response are its own
    or ANY. Here are the prefix s, the prompt a b with the responses c d and e, and the prompt f
    with the response g:

        prompt     -  1  1  1  1  1  2  2
        response   -  -  -  1  1  2  -  3
                   s  a  b  c  d  e  f  g
               s   x
               a   x  x
               b   x  x  x
               c   x  x  x  x
               d   x  x  x  x  x
               e   x  x  x  .  .  x
               f   x  .  .  .  .  .  x
               g   x  .  .  .  .  .  x  x
    """
    place = torch.arange(prompt.shape[1], device=prompt.device)                     # [N]
    visible = place <= place[:, None]                                               # [N, N]
    for owner in (prompt, response):
        same = owner[:, None] == owner[:, :, None]                                  # [R, N, N]
        visible = visible & (same | (owner[:, None] == ANY))                        # [R, N, N]
    mask = torch.zeros(visible.shape, dtype=dtype, device=prompt.device)            # [R, N, N]
    return mask.masked_fill(~visible, torch.finfo(torch.bfloat16).min)[:, None]
