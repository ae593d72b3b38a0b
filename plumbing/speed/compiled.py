"""Token steps of sampling under torch.compile; on a GPU as CUDA graphs.

Compiled code needs constant shapes and addresses. Therefore every response keeps its row, prompts
are padded to a multiple of 64 tokens, and each padded length (bucket) has one static KV cache for
the whole run: after the first rollout of a bucket nothing is compiled again.
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
RUNNING = []  # the decoder of this run, read by the metrics


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention of one new token. The query heads that share a key head are treated as rows of one
    product; transformers' code, when compiled, would repeat the whole cache for them.
    query [B, H, 1, d], key [B, H_kv, C, d]."""
    B, H, _, d = query.shape
    rows = query.view(B, key.shape[1], -1, d)                                      # [B, H_kv, n, d]
    y = F.scaled_dot_product_attention(rows, key, value, attention_mask, scale=scaling)
    return y.reshape(B, 1, H, -1), None                                             # [B, 1, H, d]


AttentionInterface.register("grouped", grouped_attention)


@contextmanager
def grouped(config):
    """Inside the block, a model of transformers uses grouped_attention; TinyMoE keeps its own."""
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
            raise ValueError(f"--torch_compile: a {model.config.model_type} model does not accept "
                             "custom positions and masks with a static KV cache; leave out the "
                             "flag")
        mode = "reduce-overhead" if model.device.type == "cuda" else None
        self.model = model
        self.caches = {}
        leave_out_experts()
        self.forward = torch.compile(model.forward, mode=mode, dynamic=False)

    @property
    def buckets(self):
        """The shapes compiled so far: [rows, tokens in the cache]."""
        return sorted(map(list, self.caches))

    def begin(self, ids, mask, group_size, new_tokens):
        """Run the forward of the prompts [Q, P] and copy their keys and values for G responses
        each."""
        width = -(-ids.shape[1] // BUCKET) * BUCKET
        ids, mask = (F.pad(x, (width - ids.shape[1], 0)) for x in (ids, mask))      # [Q, W]
        prompts = DynamicCache(config=self.model.config)
        config = self.model.config
        inputs = prompt_inputs(self.model, ids, mask, 0, prompts)
        logits = self.model(**inputs, logits_to_keep=1).logits[:, -1]               # [Q, V]
        self.logits = logits.repeat_interleave(group_size, 0)                       # [B, V]
        self.position = mask.sum(-1).repeat_interleave(group_size)[:, None]         # [B, 1]
        B = len(self.logits)
        length = width + new_tokens
        self.of = torch.arange(B, device=ids.device)
        self.place = width
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
        self.position = self.position + 1
        self.place = self.place + 1

    def drop(self, keep, token):
        raise ValueError("rows cannot be dropped under --torch_compile: a new number of rows would "
                         "be compiled again")


@functools.cache
def leave_out_experts():
    """Exclude the tiny MoE's experts from compilation: the compiler supports the grouped product
    only in bfloat16."""
    Experts.forward = torch.compiler.disable(Experts.forward)


@functools.cache
def can_compile(device_type):
    """Whether torch finds a working compiler. If not, a warning is printed once."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device_type))
        return True
    except Exception as error:  # torch's, the compiler's or the system's
        sys.stderr.write("train.py: warning: no working compiler for --torch_compile, sampling "
                         f"is not compiled: {' '.join(str(error).split())[:120]}\n")
        return False


@functools.lru_cache(maxsize=1)
def decoder(model):
    """The decoder of the run, made at the first call; None without a compiler."""
    made = Decoder(model) if can_compile(model.device.type) else None
    RUNNING[:] = [made] if made else []
    return made


def buckets():
    """The buckets that this run has compiled so far: [rows, tokens in the cache] each."""
    return [bucket for made in RUNNING for bucket in made.buckets]
