"""Token steps on a GPU as a CUDA graph (--cuda_graphs): the kernels of one step are recorded in
every rollout and then replayed.

A step of 24 layers starts about a thousand kernels. Python needs some 30 µs for each, so the GPU
waits for it. A graph starts them all at once, but always the same ones: no shape, address or Python
number may change from token to token. FixedStep is the forward of one token in that form; whatever
changes is a number in a tensor.

The first rollout compares one replayed step with the eager one. Later faults would show in
mismatch_kl, the sampler's log-probs against recomputed ones, which every batch records.
"""

import copy
import sys

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicLayer


class FixedLayer(DynamicLayer):
    """Keys and values of a cache layer in memory for `length` tokens that is never moved. The next
    token is written at `place` [1]; what lies after it is hidden by the mask of FixedStep."""

    def __init__(self, layer, length, place):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = (F.pad(x, (0, 0, 0, length - x.shape[2]))   # [n, heads, length, d]
                                  for x in (layer.keys, layer.values))
        self.place = place

    def update(self, keys, values, *args, **kwargs):
        self.keys.index_copy_(2, self.place, keys)
        self.values.index_copy_(2, self.place, values)
        return self.keys, self.values


class FixedStep:
    """The forward of one token per row, recorded: step(tokens [n]) -> logits [n, V], in memory that
    the next step reuses. It begins with the token that the eager step before it was for."""

    def __init__(self, rows, record):
        """rows: a fast.Rows. record: makes a function that replays a call (capture)."""
        self.rows = rows
        filled = rows.cache.get_seq_length()
        length = rows.length + -rows.length % 16                   # attention wants it aligned
        self.tokens = torch.zeros_like(rows.position)[:, None]                      # [n, 1]
        self.position = rows.position[:, None].clone()                              # [n, 1]
        self.place = self.position.new_tensor([filled - 1])                         # [1]
        self.mask = F.pad(rows.attention, (0, length - filled))                # [n, 1, 1, length]
        self.cache = copy.copy(rows.cache)
        self.cache.layers = [FixedLayer(layer, length, self.place) for layer in rows.cache.layers]
        self.replay = record(self.forward)

    def forward(self):
        self.mask.index_fill_(3, self.place, True)
        return self.rows.step_model(
            input_ids=self.tokens, attention_mask=self.mask, position_ids=self.position,
            past_key_values=self.cache, use_cache=True).logits[:, -1]               # [n, V]

    def __call__(self, tokens):
        self.tokens.copy_(tokens[:, None])
        logits = self.replay()                                                      # [n, V]
        self.place.add_(1)
        self.position.add_(1).clamp_(max=self.rows.last)
        return logits


def capture(call):
    """Records a call without arguments -> a function that replays it, into the same memory."""
    call()                       # sets up libraries, which a recording cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()

    def replay():
        graph.replay()
        return result
    return replay


class Graphs:
    """Whether a sampler replays its token steps; None before its first rollout."""

    def __init__(self, record=capture):
        self.record = record
        self.works = None

    def fix(self, rows, tokens):
        """The FixedStep that takes over from the Rows after their step of tokens [n]. None, and a
        line the first time, if a step cannot be recorded or does not repeat that one."""
        if self.works is False or rows.attention.dim() != 4:       # fast.make_mask
            return None
        try:
            step = FixedStep(rows, self.record)
            found = step(tokens)                                                    # [n, V]
            if self.works is None:
                check_equal(found, rows.logits)
            self.works = True
            return step
        except RuntimeError as error:
            self.works = False
            print(f"sampling without CUDA graphs: {str(error).splitlines()[0]}", file=sys.stderr)


def check_equal(found, expected):
    """Raise RuntimeError if the log-probs of a row of logits [n, V] differ by more than rounding:
    in the root mean square by 1e-5 nats, in 16 bits and TF32 by 16 units in the last place. The KL
    of sampling and scoring on a GPU was a fortieth of that in float32."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    unit = max(torch.finfo(found.dtype).eps, 2**-10 * tf32)
    gap = found.log_softmax(-1) - expected.log_softmax(-1)                          # [n, V]
    gap = gap.square().mean(-1).sqrt().max()                                        # []
    if not gap < max(1e-5, 16 * unit):                                              # or NaN
        raise RuntimeError(f"log-probs of the first replayed step differ by {gap:.1e} nats")
