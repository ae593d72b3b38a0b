"""Keys and values while sampling: a cache that grows without copying, and one of fixed size for compiled code.

Only speed is in here; transformers' own DynamicCache in place of `sampling_cache` gives the same tokens (tests/test_fast_paths.py).
"""

from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """transformers' dynamic cache layer with room to spare: appending a token writes one slot instead of copying all of them."""

    def update(self, key_states, value_states, *args, **kwargs):
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if old == 0 or new > self.room[0].shape[-2]:
            shape = (*key_states.shape[:2], max(new + 32, new * 3 // 2))
            room = [key_states.new_empty(*shape, key_states.shape[-1]), value_states.new_empty(*shape, value_states.shape[-1])]
            if old:
                room[0][:, :, :old], room[1][:, :, :old] = self.keys, self.values
            self.room = room
        self.room[0][:, :, old:new], self.room[1][:, :, old:new] = key_states, value_states
        self.keys, self.values = self.room[0][:, :, :new], self.room[1][:, :, :new]     # [B, heads, new, d]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats):
        self._rows(lambda room: room.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices):
        self._rows(lambda room: room.index_select(0, indices))

    def _rows(self, change):
        length = self.get_seq_length()
        self.room = [change(room) for room in self.room]
        self.keys, self.values = self.room[0][:, :, :length], self.room[1][:, :, :length]


def sampling_cache(model):
    """A growing cache; for models with sliding windows or other special layers, the one transformers makes from the config."""
    return Cache(layer_class_to_replicate=GrowingLayer) if has_plain_cache(model.config) else DynamicCache(config=model.config)


def has_plain_cache(config):
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def static_cache(cache, config, group_size, length):
    """A prompt cache repeated for its G responses, with room for `length` tokens at addresses that stay: what compiled code wants."""
    if not all(isinstance(layer, GrowingLayer) for layer in cache.layers):
        raise ValueError(f"--torch_compile: {config.model_type} has other layers than plain attention in its cache; leave the flag out")
    static = StaticCache(config=config, max_cache_len=length)
    for i, layer in enumerate(cache.layers):
        static.update(layer.keys.repeat_interleave(group_size, 0), layer.values.repeat_interleave(group_size, 0), i)
    return static


def prompt_inputs(model, ids, mask, prefix, cache):
    """What a forward of prompts [Q, P] into the cache is called with; their common prefix is computed here, one row for all."""
    position = (mask.cumsum(-1) - 1).clamp(min=0)                                        # [Q, P]
    if prefix:
        model.base_model(input_ids=ids[:1, :prefix], position_ids=position[:1, :prefix], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(ids))
    return dict(input_ids=ids[:, prefix:], attention_mask=None if bool(mask.all()) else mask.long(), position_ids=position[:, prefix:],
                past_key_values=cache, use_cache=True)
