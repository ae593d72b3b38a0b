"""Token steps of sampling under torch.compile, on a GPU as CUDA graphs.

Compiled code wants shapes and addresses that stay. So every response keeps its row, prompts are
padded to a multiple of 64 tokens, and there is one static cache for each such bucket in the whole
run: after the first rollout of a bucket nothing is compiled again.
"""

import functools
import sys
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache, StaticCache

from moe import Experts
from plumbing.speed.caches import takes_any_mask
from plumbing.speed.fast import prompt_inputs

BUCKET = 64   # tokens
RUNNING = []  # the decoder of this run, for the metrics


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention of one new token. The query heads that share a key head stand as its rows:
    compiled, transformers would repeat the whole cache for them. query [B, H, 1, d],
    key [B, H_kv, C, d]."""
    B, H, _, d = query.shape
    rows = query.view(B, key.shape[1], -1, d)                                      # [B, H_kv, n, d]
    y = F.scaled_dot_product_attention(rows, key, value, attention_mask, scale=scaling)
    return y.reshape(B, 1, H, -1), None                                             # [B, 1, H, d]


AttentionInterface.register("grouped", grouped_attention)


@contextmanager
def grouped(config):
    """A model of transformers attends by grouped_attention inside; TinyMoE has its own."""
    before = config._attn_implementation
    config._attn_implementation = before and "grouped"
    try:
        yield
    finally:
        config._attn_implementation = before


class Decoder:
    """The token steps of one model; `begin` a rollout, then `step` token by token."""

    def __init__(self, model):
        if not takes_any_mask(model.config):
            raise ValueError(f"--torch_compile: {model.config.model_type} does not take positions "
                             "and a mask of one's own over a static cache; leave the flag out")
        mode = "reduce-overhead" if model.device.type == "cuda" else None
        self.model, self.caches = model, {}
        leave_out_experts()
        self.forward = torch.compile(model.forward, mode=mode, dynamic=False)

    @property
    def buckets(self):
        """The shapes compiled so far: [rows, tokens in the cache]."""
        return sorted(map(list, self.caches))

    def begin(self, ids, mask, group_size, new_tokens):
        """The forward of the prompts [Q, P], and their keys and values for G responses each."""
        width = -(-ids.shape[1] // BUCKET) * BUCKET
        ids, mask = (F.pad(x, (width - ids.shape[1], 0)) for x in (ids, mask))      # [Q, W]
        prompts, config = DynamicCache(config=self.model.config), self.model.config
        inputs = prompt_inputs(self.model, ids, mask, 0, prompts)
        logits = self.model(**inputs, logits_to_keep=1).logits[:, -1]               # [Q, V]
        self.logits = logits.repeat_interleave(group_size, 0)                       # [B, V]
        self.position = mask.sum(-1).repeat_interleave(group_size)[:, None]         # [B, 1]
        B, length = len(self.logits), width + new_tokens
        self.of, self.place = torch.arange(B, device=ids.device), width
        if (B, length) not in self.caches:
            self.caches[B, length] = StaticCache(config=config, max_cache_len=length)
            torch._dynamo.config.recompile_limit = max(8, 2 * len(self.caches))
        self.cache = self.caches[B, length]
        for number, (layer, prompt) in enumerate(zip(self.cache.layers, prompts.layers)):
            both = (prompt.keys, prompt.values)
            keys, values = (x.repeat_interleave(group_size, 0) for x in both)
            if layer.is_initialized:
                layer.cumulative_length.zero_()
            self.cache.update(keys, values, number)                           # [B, heads, W, d]
        low = torch.finfo(self.logits.dtype).min
        real = F.pad(mask, (0, new_tokens)).repeat_interleave(group_size, 0)        # [B, length]
        self.mask = torch.zeros(real.shape, dtype=self.logits.dtype, device=ids.device)
        self.mask = self.mask.masked_fill(~real, low)[:, None, None]             # [B, 1, 1, length]
        return self

    def step(self, token):
        """The forward of one token per response: token [B] -> self.logits [B, V]."""
        self.mask[..., self.place] = 0.0
        with grouped(self.model.config):
            out = self.forward(input_ids=token[:, None], attention_mask=self.mask, use_cache=True,
                               position_ids=self.position, past_key_values=self.cache)
        self.logits = out.logits[:, -1]                                             # [B, V]
        self.position, self.place = self.position + 1, self.place + 1

    def drop(self, keep, token):
        raise ValueError("compiled rows stay: a new number of rows would be compiled again")


@functools.cache
def leave_out_experts():
    """The compiler knows the grouped product in bfloat16 only."""
    Experts.forward = torch.compiler.disable(Experts.forward)


@functools.cache
def can_compile(device_type):
    """Whether torch finds a working compiler; if not, a warning says so, once."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device_type))
        return True
    except Exception as error:  # torch's, the compiler's or the system's
        sys.stderr.write("train.py: warning: no working compiler for --torch_compile, sampling "
                         f"takes the plain path: {' '.join(str(error).split())[:120]}\n")
        return False


@functools.lru_cache(maxsize=1)
def decoder(model):
    """The one decoder of a run; None without a compiler."""
    made = Decoder(model) if can_compile(model.device.type) else None
    RUNNING[:] = [made] if made else []
    return made


def buckets():
    """What this run has compiled so far: [rows, tokens in the cache] of each bucket."""
    return [bucket for made in RUNNING for bucket in made.buckets]
