"""Which of fast.py's methods a model supports, decided from its config: its KV cache and masks."""

import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def copies_rows(config):
    """Whether the KV cache of one row can be copied for other rows. This is not possible for the
    states of Mamba and similar models, which are sampled and scored without sharing."""
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


def shares_prefix(config):
    """Whether padding may follow the shared prefix of the prompts. This is not possible in models
    that measure distance by positions in the cache, where padding counts."""
    return has_plain_cache(config) and config.model_type not in ("mpt", "gpt_neo")


def has_plain_cache(config):
    """Whether every layer keeps all keys and values. A sliding window does not: its length would
    include padding."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def takes_any_mask(config):
    """Whether a model takes positions only from position_ids and uses a mask as given."""
    rotary = getattr(config, "rope_parameters", None) and not getattr(config, "alibi", False)
    attention = config._attn_implementation in (None, "sdpa", "eager")  # None: TinyMoE's own
    return bool(rotary and attention and has_plain_cache(config))


class GrowingLayer(DynamicLayer):
    """Keys and values with memory allocated for future tokens. transformers' own layer copies the
    whole cache at every token. 12 layers sample 32 responses of 256 tokens an eighth faster with
    this layer; responses of 64 tokens gain next to nothing."""

    memory = None        # the keys and values are the beginning of these, [n, heads, ·, d] each

    def update(self, keys, values, *args, **kwargs):
        old = self.get_seq_length()
        length = old + keys.shape[2]
        if not old:
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
        moved = not self.memory or self.keys.data_ptr() != self.memory[0].data_ptr()   # other rows
        if moved or length > self.memory[0].shape[2]:
            extra = length - old + max(32, old // 2)
            self.memory = [F.pad(x, (0, 0, 0, extra)) for x in (self.keys, self.values)]
        for memory, x in zip(self.memory, (keys, values)):
            memory[:, :, old:length] = x
        self.keys, self.values = (memory[:, :, :length] for memory in self.memory)
        return self.keys, self.values


def make_cache(config):
    """The cache that a sampler fills token by token."""
    cache = DynamicCache(config=config)
    if has_plain_cache(config):
        cache.layers = [GrowingLayer() for _ in cache.layers]
    return cache
