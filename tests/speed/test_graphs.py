"""Token steps of fixed shape (plumbing/speed/graphs.py): a recording of one samples what other
steps do, and what is wrong with the first is noticed. python -m pytest tests/speed/test_graphs.py

Recorded here by Again, which calls the step once more; with -m gpu by CUDA.
"""

import functools

import pytest
import torch

from plumbing.speed.fast import fast_sample
from plumbing.speed.graphs import FixedStep, Graphs
from rollout import sample
from test_rollout import PROMPTS, TOKENIZER, assert_same, make, rolled, uniforms

SHOTS = "".join(f"{i}+{i}={2 * i % 10}," for i in range(5))         # a prefix of all prompts
sampled = functools.partial(rolled, T=40, draw_with=fast_sample, drop_every=4)


class Again:
    """In the place of a CUDA graph: the call again, into the memory of its first result."""

    def __init__(self, call):
        self.call = call
        self.result = call().clone()

    def __call__(self):
        return self.result.copy_(self.call())


@pytest.mark.parametrize("kind", ["qwen3", "tiny_moe"])
@pytest.mark.parametrize("options", [
    {}, dict(temperature=0), dict(G=1), dict(limits=torch.arange(1, 10)),
    dict(prompts=[SHOTS + prompt for prompt in PROMPTS])], ids=str)
def test_replayed_steps_draw_the_tokens_of_the_plain_sampler(kind, options):
    graphs, steps = Graphs(lambda call: steps.append(call) or Again(call)), []
    for seed in range(2):
        found = sampled(make(kind), graphs=graphs, seed=seed, **options)
        assert_same(found, rolled(make(kind), T=40, draw_with=sample, seed=seed, **options))
    assert graphs.record and len(steps) == 2


def hide(step):
    """A token of the prompts cannot be seen."""
    step.mask[..., 2] = False


def show(step):
    """An empty place can."""
    step.mask[..., -1] = True


def move(step):
    step.shift += 1


def shift(step):
    """Keys and values are written one place too late."""
    step.place += 1


def stale(step):
    """A number that Python gave when the step was recorded."""
    result = step.forward()
    step.replay = lambda: result


def refuse(step):
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


@pytest.mark.parametrize("kind", ["qwen3", "tiny_moe"])
@pytest.mark.parametrize("fault", [hide, show, move, shift, stale, refuse])
def test_a_fault_in_the_first_step_is_noticed_and_sampling_goes_on_eagerly(kind, fault, monkeypatch,
                                                                           capsys):
    made = FixedStep.__init__

    def broken(self, *args):
        made(self, *args)
        fault(self)
    monkeypatch.setattr(FixedStep, "__init__", broken)
    graphs = Graphs(Again)
    for seed in range(2):
        found = sampled(make(kind), graphs=graphs, seed=seed)
        assert_same(found, rolled(make(kind), T=40, draw_with=sample, seed=seed))
    said = capsys.readouterr().err
    assert graphs.record is None and said.count("\n") == 1


def test_rounding_to_bfloat16_is_no_fault():
    """Another length of the cache rounds otherwise."""
    for seed in range(3):
        graphs = Graphs(Again)
        sampled(make("qwen3").bfloat16(), graphs=graphs, seed=seed)
        assert graphs.record


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["qwen3", "tiny_moe"])
def test_a_cuda_graph_samples_what_eager_steps_do(kind):
    graphs, model = Graphs(), make(kind).cuda()
    drawn = [fast_sample(model, TOKENIZER, PROMPTS, 3, 40, 1.0, uniforms(9, 40), graphs=way)
             for way in (graphs, None)]
    assert graphs.record
    assert_same(*drawn)
