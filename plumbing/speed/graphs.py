"""Token steps on a GPU as a CUDA graph (--cuda_graphs): the kernels of one step are recorded in
every rollout and then replayed.

A step of 24 layers starts about a thousand kernels. Python needs some 30 µs for each, so the GPU
waits for it. A graph starts them all at once, but always the same ones: no shape, address or Python
number may change from token to token. FixedStep is the forward of one token in that form; whatever
changes is a number in a tensor.

Each rollout compares its first replayed step with the eager one. Later faults would show in
mismatch_kl, the sampler's log-probs against recomputed ones, which every batch records.
"""

import sys

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, StaticLayer


class FixedStep:
    """The forward of one token per row, recorded: step(tokens [n]) -> logits [n, V], in memory that
    the next step reuses. It begins with the token that the eager step before it was for."""

    def __init__(self, rows, record):
        """rows: a fast.Rows. record: makes a function that replays a call (capture)."""
        self.rows = rows
        filled = rows.cache.get_seq_length()
        length = rows.length + -rows.length % 16                   # attention wants it aligned
        self.tokens = torch.zeros_like(rows.position)                               # [n]
        self.place = self.tokens.new_tensor(filled - 1)        # [] of the token in the cache
        self.shift = rows.position[:, None] - self.place       # [n, 1] from there to its position
        self.mask = F.pad(rows.attention, (0, length - filled))                # [n, 1, 1, length]
        self.cache = Cache(layers=[StaticLayer(length) for _ in rows.cache.layers])
        for number, layer in enumerate(rows.cache.layers):
            self.cache.update(layer.keys, layer.values, number)
        self.replay = record(self.forward)

    def forward(self):
        self.mask.index_fill_(-1, self.place, True)
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(self.place)    # where its update writes
        return self.rows.step_model(
            input_ids=self.tokens[:, None], attention_mask=self.mask,
            position_ids=torch.minimum(self.place + self.shift, self.rows.last),    # [n, 1]
            past_key_values=self.cache, use_cache=True).logits[:, -1]               # [n, V]

    def __call__(self, tokens):
        self.tokens.copy_(tokens)
        logits = self.replay()                                                      # [n, V]
        self.place.add_(1)
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
    """The token steps of a sampler. record makes a function that replays a call; None after a step
    that could not be recorded, or did not repeat the eager one."""

    def __init__(self, record=capture):
        self.record = record

    def fix(self, rows, tokens):
        """The FixedStep that takes over from the Rows after their step of tokens [n]; None: none
        does."""
        if self.record:
            try:
                step = FixedStep(rows, self.record)
                check_equal(step(tokens), rows.logits)
                return step
            except RuntimeError as error:
                self.record = None
                print("sampling without CUDA graphs:", str(error).splitlines()[0], file=sys.stderr)


def check_equal(found, expected):
    """Raise RuntimeError if the log-probs of a row of logits [n, V] differ by more than rounding:
    in the root mean square by 1e-5 nats, in 16 bits and TF32 by 16 units in the last place. The KL
    of sampling and scoring on a GPU was a fortieth of that in float32."""
    least = 6.25e-7 if torch.get_float32_matmul_precision() == "highest" else 2**-10     # of TF32
    gap = found.log_softmax(-1) - expected.log_softmax(-1)                          # [n, V]
    gap = gap.square().mean(-1).sqrt().max()                                        # []
    if not gap < 16 * max(torch.finfo(found.dtype).eps, least):                     # or NaN
        raise RuntimeError(f"log-probs of the first replayed step differ by {gap:.1e} nats")
