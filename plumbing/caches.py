"""What a model's cache and masks allow, by its config: which of fast.py's ways are open to it."""

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def copies_rows(config):
    """Whether the cache of one row can be copied for others: not the states of Mamba and the like,
    which take the plain way."""
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


def shares_prefix(config):
    """Whether padding may follow what all prompts begin with: not in models that measure distance
    by places in the cache, where padding counts."""
    return has_plain_cache(config) and config.model_type not in ("mpt", "gpt_neo")


def has_plain_cache(config):
    """Whether every layer keeps all keys and values: a sliding window would count padding."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def takes_any_mask(config):
    """Whether a model reads positions from position_ids alone and a mask as given."""
    rotary = getattr(config, "rope_parameters", None) and not getattr(config, "alibi", False)
    attention = config._attn_implementation in (None, "sdpa", "eager")  # None: TinyMoE's own
    return bool(rotary and attention and has_plain_cache(config))
