"""Token steps of fixed shape (plumbing/speed/graphs.py): they sample what other steps do, a
recording of them can be replayed, and what is wrong with one is noticed.
python -m pytest tests/speed/test_graphs.py; -m slow: all families of models

Recorded here by tests/gpu/tape.py, in CUDA's place; with -m gpu by CUDA.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

import models
from plumbing.speed import graphs
from plumbing.speed.caches import takes_any_mask
from plumbing.speed.experts import move_to_device
from plumbing.speed.fast import FastSampler, fast_response_logp, fast_sample
from rollout import sample
from session.metrics import mismatch_kl
from test_rollout import PROMPTS, TOKENIZER, assert_same, make, rolled, uniforms

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "model")]
import test_families as families  # noqa: E402
from tape import Tape  # noqa: E402

SLOW = {**families.DENSE, **families.HEADS, **families.MIXTURES}
REFUSES = {"longcat_flash", "jetmoe"}        # their experts ask on the CPU how many tokens they get


@pytest.fixture(autouse=True)
def guard(monkeypatch):
    guard = graphs.Guard()
    for module in (graphs, sys.modules["plumbing.speed.fast"], sys.modules["session.metrics"]):
        monkeypatch.setattr(module, "guard", guard)
    return guard


def sampled(model, record=None, T=40, drop_every=4, **options):
    return rolled(model, T=T, draw_with=fast_sample, drop_every=drop_every, record=record,
                  **options)


def recorder(tapes):
    def record(call):
        tapes.append(Tape(call))
        return tapes[-1]
    return record


@pytest.mark.parametrize("temperature", [1.0, 0])
@pytest.mark.parametrize("kind", ["qwen3", "tiny_moe"])
def test_recorded_steps_draw_the_tokens_of_the_plain_sampler(kind, temperature):
    """Also as rows are dropped: then memory is smaller, and the step is recorded anew."""
    model, tapes = make(kind), []
    found = sampled(model, recorder(tapes), temperature=temperature)
    assert found.replayed
    assert_same(found, rolled(model, T=40, temperature=temperature, draw_with=sample))
    rows = [len(tape.result) for tape in tapes]
    assert 5 < rows[0] <= 9 and all(2 * b <= a for a, b in zip(rows, rows[1:])), rows
    assert temperature == 0 or len(rows) > 1
    called = sampled(model, lambda call: call, temperature=temperature)
    assert torch.equal(called.sampler_logp, found.sampler_logp), "a replay is a call, to the bit"


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_family_is_recorded_or_says_that_it_is_not(name, capsys):
    sizes = {key: size for key, size in (families.SHAPE | SLOW[name]).items() if key != "head_dim"}
    try:
        model = models.make(name.split(",")[0], **sizes)
    except AttributeError as error:                          # a config without such a name
        pytest.skip(str(error))
    if "eager" in name:
        model.set_attn_implementation("eager")
    tapes = []
    found = sampled(model, recorder(tapes), T=24)
    assert_same(found, sampled(model, T=24))
    expected = takes_any_mask(model.config) and "eager" not in name and name not in REFUSES
    assert bool(tapes) == expected
    assert ("without CUDA graphs" in capsys.readouterr().err) == (name in REFUSES)


@pytest.mark.parametrize("kind", ["qwen3", "tiny_moe"])
def test_rounding_to_bfloat16_is_no_fault(kind, guard, capsys):
    """On a CPU another number of rows changes nothing there, but another length of the cache does.
    3 % of all logits is more than rounding."""
    for seed in range(3):
        assert sampled(make(kind).bfloat16(), recorder([]), seed=seed).replayed
    assert guard.works, capsys.readouterr().err
    init = graphs.FixedStep.__init__

    def scaled(self, *args):
        init(self, *args)
        scale(self)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.FixedStep, "__init__", scaled)
        assert not sampled(make(kind).bfloat16(), recorder([])).replayed


def test_one_group_size_and_limits_and_a_shared_prefix():
    shots = "".join(f"{i}+{i}={2 * i % 10}," for i in range(5))
    for options in (dict(G=1), dict(limits=torch.arange(1, 10)),
                    dict(prompts=[shots + p for p in PROMPTS])):
        tapes = []
        assert_same(sampled(make(), recorder(tapes), **options), sampled(make(), **options))
        assert tapes, options


class Broken:
    """A graph that cannot be recorded, that is wrong in one row, or that repeats what it once
    recorded."""

    def __init__(self, call, how):
        if how == "refuses":
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        self.result = call().clone()
        if how == "wrong":
            self.result[-1] = self.result[-1].roll(1)

    def __call__(self):
        return self.result


@pytest.mark.parametrize("how", ["refuses", "wrong", "stale"])
def test_what_cannot_be_trusted_is_not_used(how, capsys, guard):
    model = make()
    guard.eager_mismatch = 1e-12

    found = sampled(model, lambda call: Broken(call, how))
    assert_same(found, sampled(model))
    said = capsys.readouterr().err
    assert said.startswith("sampling without CUDA graphs: ") and said.count("\n") == 1
    assert not guard.ready, "it is not tried again"


# ------------------------------------------------------------------- faults of the fixed step

def hide(step):
    """One token of the prompts cannot be seen."""
    step.mask[..., 1] = torch.finfo(step.mask.dtype).min


def show(step):
    """One empty place can."""
    step.mask[..., -1] = 0.0


def move(step):
    """Positions are off by one."""
    step.position += 1


def scale(step):
    forward = step.forward
    step.forward = lambda: forward() * 1.03


def late(step):
    """Wrong from the ninth step on."""
    advance, count = step.advance, [0]

    def advance_wrongly():
        count[0] += 1
        advance()
        if count[0] == 9:
            hide(step)
    step.advance = advance_wrongly


FAULTS = [hide, show, move, scale, late]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_noticed(fault, monkeypatch, capsys, guard):
    assert_noticed(fault, make(), recorder([]), monkeypatch, capsys, guard)


def assert_noticed(fault, model, record, monkeypatch, capsys, guard):
    """By the first step, or by the batch's mismatch_kl, of which the eager batch shows the size."""
    kl = lambda x: mismatch_kl(fast_response_logp(model, x, entropy=False).logp,    # noqa: E731
                               x.sampler_logp, x.mask)
    eager = sampled(model)
    guard.watch(kl(eager), eager.replayed)
    init = graphs.FixedStep.__init__

    def broken(self, *args):
        init(self, *args)
        fault(self)
    monkeypatch.setattr(graphs.FixedStep, "__init__", broken)
    found = sampled(model, record)
    assert found.replayed == (fault is late)
    guard.watch(kl(found), found.replayed)
    assert not guard.ready and "sampling without CUDA graphs: " in capsys.readouterr().err


def test_a_right_batch_passes_and_a_resumed_run_compares_with_its_first(tmp_path, guard):
    assert not guard.ready
    guard.watch(None, False)                     # all responses were cut off and are masked
    assert not guard.ready
    guard.watch(2e-12, False)
    guard.watch(None, True)
    guard.watch(5e-12, True)
    guard.watch(3e-5, False)                     # a batch too short to be recorded
    assert guard.ready and guard.eager_mismatch == 2e-12
    file = tmp_path / "metrics.jsonl"
    guard.resume(file)
    assert not guard.ready
    lines = [json.dumps({"mismatch_kl": x}) + "\n" for x in (4e-12, 1.0)]
    file.write_text("".join(lines), encoding="utf-8")
    guard.resume(file)
    assert guard.ready and guard.eager_mismatch == 4e-12
    guard.watch(float("nan"), True)
    assert not guard.ready


def test_a_sampler_replays_only_where_it_may(guard, monkeypatch):
    asked = []
    monkeypatch.setattr("plumbing.speed.fast.fast_sample",
                        lambda *args, record, **options: asked.append(bool(record)))
    sampler = FastSampler(make(), TOKENIZER, 8)
    for flag, mismatch in ((False, 1e-12), (True, None), (True, 1e-12)):
        sampler.cuda_graphs, guard.eager_mismatch = flag, mismatch
        sampler.sample(PROMPTS, 2)
    assert asked == [False] * 3, "never on a CPU"


def test_nothing_moves_and_nothing_grows():
    """Memory for all tokens is there from the first recorded step on."""
    model, seen = make(), []

    class Watched(Tape):
        def __call__(self):
            found = super().__call__()
            seen.append((found.data_ptr(), found.shape, len(self.calls)))
            return found
    sampled(model, Watched, drop_every=1000)
    assert len(seen) > 30 and len(set(seen)) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["qwen3", "tiny_moe"])
def test_a_cuda_graph_samples_what_eager_steps_do(kind, guard):
    model = move_to_device(make(kind), torch.device("cuda"))
    drawn = [fast_sample(model, TOKENIZER, PROMPTS, 3, 40, 1.0, uniforms(9, 40), record=record)
             for record in (graphs.CudaGraph, None)]
    assert guard.works and [x.replayed for x in drawn] == [True, False]
    assert_same(*drawn)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_noticed_on_a_gpu(fault, monkeypatch, capsys, guard):
    model = move_to_device(make(), torch.device("cuda"))
    assert_noticed(fault, model, graphs.CudaGraph, monkeypatch, capsys, guard)
