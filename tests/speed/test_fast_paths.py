"""The fast sampler is the plain one, and fast paths save what they should (plumbing/speed/fast.py;
benchmarks/ measures it). python -m pytest tests/speed/test_fast_paths.py

References: transformers' own cache; the CPU allocator's peak. Log-probs: test_logprobs.py.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

import rollout
from losses import policy_loss
from plumbing.speed import fast
from test_rollout import PROMPTS, TOKENIZER, assert_same, every_model, make, uniforms

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import memory  # noqa: E402
import scaling  # noqa: E402
import timing  # noqa: E402
import versus_trl  # noqa: E402
from tiny_run import read_json


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
@every_model
def test_the_fast_sampler_draws_the_tokens_of_the_plain_one(kind, temperature):
    model = make(kind)
    assert_same(*(way.sample(model, TOKENIZER, PROMPTS, 3, 20, temperature, uniforms(9, 20))
                  for way in (fast, rollout)))


def test_the_peak_of_an_update_does_not_hold_the_logits_of_all_tokens():
    V = 8192
    model = memory.random_model("qwen2", 16, 1, 2, 2, 16, V, tied=False)

    def peak(T):
        batch = memory.random_rollout(V, 1, 1, 8, T)
        score = lambda: fast.response_logp(model, batch, entropy=False, max_logits=64 * V)
        model.zero_grad()
        return memory.peak_bytes(lambda: score().logp.sum().backward())
    more = peak(512) - peak(256)
    assert more < 0.25 * 256 * V * 4, "256 more tokens cost far less than one row of logits each"


def test_sides_take_turns_and_the_first_round_does_not_count():
    """Two sides, three rounds after the warm-up: their order, and quotients within a round."""
    order, seconds = [], {"a": [9.0, 2.0, 4.0, 6.0], "b": [9.0, 1.0, 1.0, 2.0]}

    def side(name):
        def measure(turn):
            order.append((name, turn))
            return seconds[name][turn]
        return measure
    found = timing.in_turns({name: side(name) for name in seconds}, 3)
    assert order == [(name, turn) for turn in range(4) for name in "ab"]
    assert found == {name: measured[1:] for name, measured in seconds.items()}
    assert timing.quotients(found["a"], found["b"]) == {"min": 2.0, "median": 3.0, "max": 4.0}
    assert timing.timed(lambda turn: turn, iter([3.0, 5.5]).__next__)(0) == 2.5


@pytest.mark.slow
def test_a_benchmark_of_the_loop_measures_and_writes_its_page(tmp_path):
    """python benchmarks/scaling.py --quick --only plain: the other parts of the file stay."""
    file = tmp_path / "scaling.json"
    measured = read_json(ROOT / "experiments/results/scaling.json")
    file.write_text(json.dumps(measured), encoding="utf-8")
    scaling.main(["--quick", "--only", "plain", "--json", str(file)])
    found = read_json(file)
    assert found["plain"]["median"] > 1 and found["plain"]["rounds"] == 2
    assert found["texts"]["plain"] == f"{found['plain']['median']:.1f}"
    assert found["algorithms"] == measured["algorithms"]


@pytest.mark.parametrize("flags, trl, words", [("", False, "pip install trl==1.16.0"),
                                               ("--cases tiny_mo", True, "tiny_mo")])
def test_a_missing_trl_and_an_unknown_case_are_named(flags, trl, words, refused, monkeypatch):
    if trl:
        pytest.importorskip("trl")
    else:
        monkeypatch.setitem(sys.modules, "trl", None)
    assert words in refused(flags, main=versus_trl.main)


@pytest.mark.slow
def test_both_sides_of_the_benchmark_compute_the_same_gradient():
    """TRL's trainer as the benchmark sets it up, on completions that it sampled: its old log-probs
    and its gradient are ours."""
    pytest.importorskip("trl", reason="pip install trl==1.16.0")
    cpu = torch.device("cpu")
    case = versus_trl.Case("", tokens=8, flags="--prompts_per_step 4 --num_generations 4 "
                                               "--steps_per_generation 2")
    args, task, folder = versus_trl.prepare(case)
    ours = versus_trl.Ours(args, task, folder, cpu)
    trainer = versus_trl.Trl(args, task, folder, cpu).trainer
    trainer.model.train()
    batch = trainer._generate_and_score_completions(
        [{"prompt": p.prompt, "number": i} for i, p in enumerate(task.train[:4]) for _ in range(4)])
    trainer._compute_loss(trainer.model, batch).backward()

    mask, old_logp = batch["completion_mask"].bool(), batch["old_per_token_logps"]
    mini = rollout.Rollout(batch["prompt_ids"][::4], batch["prompt_mask"][::4].bool(),
                           batch["completion_ids"], mask, torch.zeros(mask.shape),
                           torch.zeros(len(mask), dtype=torch.bool), [""] * len(mask), 4)
    logp = ours.learner.actor(mini, entropy=False).logp
    policy_loss("gspo", logp, old_logp, batch["advantages"], mask)[0].backward()
    assert mask.all() and torch.allclose(logp, old_logp, atol=1e-5)
    theirs = dict(trainer.model.named_parameters())
    for name, p in ours.learner.policy.named_parameters():
        assert (p.grad - theirs[name].grad).norm() < 1e-4 * p.grad.norm() + 1e-9, name
