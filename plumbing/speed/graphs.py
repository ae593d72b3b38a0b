"""Token steps on a GPU as CUDA graphs (--cuda_graphs): the kernels of a step are recorded once and
then replayed.

A step of 24 layers starts about a thousand kernels. Python needs some 30 µs for each, so the GPU
waits for it. A graph starts them all at once, but always the same ones: no shape, address or Python
branch may change from token to token. FixedStep is the forward of one token in that form; whatever
changes is a number in a tensor. Graphs live for one call of fast_sample: the next one may sample
from other tensors (merged adapters, a rounded copy).

Nothing here is trusted:
    the first FixedStep     must repeat the eager step before it, row by row
    the first two replays   must repeat the call that was recorded: in the second, a number that
                            Python had given would be out of date
    every rollout batch     its mismatch_kl, the sampler's log-probs against recomputed ones, must
                            stay near that of the run's first batch, which is sampled eagerly
Otherwise one line says so, and sampling goes on without graphs.
"""

import copy
import json
import sys

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicLayer

TOLERANCE = 1e-4    # of the norm of a row's logits in float32: kernels add in another order
LAST_BITS = 2       # in 16 bits: units in the last place, also where rows change nothing
NOISE = 4           # in 16 bits and TF32: times what another number of rows changes, at most MOST
MOST = 0.2
MISMATCH = 100      # times the mismatch_kl of an eager batch


class FixedLayer(DynamicLayer):
    """Keys and values of a cache layer in memory for `length` tokens that is never moved. The next
    token is written at `place` [1]; what lies after it is hidden by the mask of FixedStep."""

    def __init__(self, keys, values, length, place):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = (F.pad(x, (0, 0, 0, length - x.shape[2]))   # [n, heads, length, d]
                                  for x in (keys, values))
        self.place = place

    def update(self, keys, values, *args, **kwargs):
        self.keys.index_copy_(2, self.place, keys)
        self.values.index_copy_(2, self.place, values)
        return self.keys, self.values


class FixedStep:
    """The forward of one token per row -> logits [n, V], with fixed shapes and addresses."""

    def __init__(self, model, cache, seen, position, place, last, length, record):
        """cache: the n rows so far. seen [n, 1, 1, C] bool: the places that are no padding.
        position [n] and place [1]: of the next token. last: the largest position. length: places
        in memory. record: makes a function that replays a call (CudaGraph)."""
        self.model = model
        self.last = last
        self.length = length
        self.record = record
        self.replay = None
        self.steps = 0
        self.place = place.clone()                                                  # [1]
        self.cache = copy.copy(cache)
        self.cache.layers = [FixedLayer(layer.keys, layer.values, length, self.place)
                             for layer in cache.layers]
        self.position = position[:, None].clone()                                   # [n, 1]
        self.tokens = torch.zeros_like(self.position)                               # [n, 1]
        seen = F.pad(seen, (0, length - seen.shape[-1]))                       # [n, 1, 1, length]
        dtype = self.cache.layers[0].keys.dtype     # not bool, which every layer would convert
        self.mask = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)

    def forward(self):
        self.mask.index_fill_(3, self.place, 0.0)
        return self.model(input_ids=self.tokens, attention_mask=self.mask, use_cache=True,
                          position_ids=self.position, past_key_values=self.cache).logits[:, -1]

    def check_first(self, tokens, expected):
        """Raise RuntimeError unless the step of tokens [n] repeats the eager one, whose logits
        [n, V] are `expected`, but for rounding."""
        self.tokens.copy_(tokens[:, None])
        own = self.forward()                                                        # [n, V]
        tolerance = TOLERANCE
        if own.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest":
            rows = torch.arange(max(2, len(tokens) // 2), device=tokens.device) % len(tokens)
            some = self.select(rows)
            some.tokens.copy_(self.tokens[rows])
            noise = row_gaps(some.forward(), own[rows]).max().item()
            rounding = LAST_BITS * torch.finfo(own.dtype).eps
            tolerance = max(TOLERANCE, rounding, min(NOISE * noise, MOST))
        check_equal(own, expected, tolerance)

    def step(self, tokens):
        """tokens [n] -> the logits [n, V] of the next ones, in memory that the next step reuses."""
        self.tokens.copy_(tokens[:, None])
        if self.replay is None:
            self.replay = self.start_replay()
        logits = self.replay()                                                      # [n, V]
        self.steps += 1
        if self.steps <= 2 and self.replay != self.forward:
            try:
                check_equal(logits, self.forward())
            except RuntimeError as error:
                guard.give_up(error)
                self.replay = self.forward
                logits = self.forward()                                             # [n, V]
        self.advance()
        return logits

    def start_replay(self):
        """What replays a step: a recording of it, or the step itself if that fails."""
        try:
            return self.record(self.forward) if guard.works else self.forward
        except RuntimeError as error:
            guard.give_up(error)
            return self.forward

    def advance(self):
        self.place.add_(1)
        self.position.add_(1).clamp_(max=self.last)

    def select(self, rows):
        """The same for the rows [m] only, to be recorded anew."""
        cache = copy.copy(self.cache)
        cache.layers = [FixedLayer(layer.keys[rows], layer.values[rows], self.length, self.place)
                        for layer in self.cache.layers]
        return FixedStep(self.model, cache, self.mask[rows] == 0, self.position[rows, 0],
                         self.place, self.last, self.length, self.record)


class CudaGraph:
    """A call without arguments that is recorded when this is made; each call replays it."""

    def __init__(self, call):
        stream = torch.cuda.Stream()         # the first call sets up libraries, which a graph can't
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = call()

    def __call__(self):
        self.graph.replay()
        return self.result


def row_gaps(found, expected):
    """Differences of logits [n, V] as shares of the norm of each row, [n]."""
    found, expected = found.float(), expected.float()
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def check_equal(found, expected, tolerance=TOLERANCE):
    """Raise RuntimeError if the logits of any row differ by more than the tolerance."""
    gap = row_gaps(found, expected).max().item()
    if not gap < tolerance:                                                          # or NaN
        raise RuntimeError(f"logits of a row differ by {gap:.1e} of their norm, more than "
                           f"{tolerance:.1e}")


class Guard:
    """Whether this process may sample with graphs. A run with --cuda_graphs begins without, so that
    there is an eager mismatch_kl to compare with; a resumed one reads it from metrics.jsonl."""

    def __init__(self):
        self.works = True
        self.eager_mismatch = None

    @property
    def ready(self):
        return self.works and self.eager_mismatch is not None

    def resume(self, metrics):
        """Take up the first batch of a run from its metrics.jsonl (a Path)."""
        self.__init__()
        if metrics.is_file():
            with open(metrics, encoding="utf-8") as lines:
                self.eager_mismatch = json.loads(next(lines, "{}")).get("mismatch_kl")

    def watch(self, mismatch_kl, replayed):
        """Look at a rollout batch: its mismatch_kl, None without loss tokens, and whether its token
        steps were replayed."""
        if mismatch_kl is None:
            return
        if not replayed and self.eager_mismatch is None:
            self.eager_mismatch = mismatch_kl
        elif replayed and not mismatch_kl <= MISMATCH * max(self.eager_mismatch, 1e-12):    # or NaN
            self.give_up(f"mismatch_kl is {mismatch_kl:.1e}, in the first batch, without them, it "
                         f"was {self.eager_mismatch:.1e}")

    def give_up(self, error):
        """Say once that this process samples without graphs from here on."""
        if self.works:
            print(f"sampling without CUDA graphs: {str(error).splitlines()[0]}", file=sys.stderr)
        self.works = False


guard = Guard()
