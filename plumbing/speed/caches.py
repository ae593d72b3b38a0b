"""Which of fast.py's methods a model supports, decided from its config: its KV cache and masks."""

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
