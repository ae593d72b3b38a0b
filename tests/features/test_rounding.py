"""What rounding does to log s, measured in the first rollout batch of a run in 16 bits.
python -m pytest tests/features/test_rounding.py"""

from types import SimpleNamespace

import pytest
import torch

import models
from features.rounding import Rounding
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model.actor import Actor
from session.arguments import parse
from rollout import response_logp, sample


def test_16_bits_are_told_that_the_clip_acts_on_rounding_and_float32_is_not(run, capsys):
    exact = run("--steps 2 --warmup_steps 0", folder="exact")
    assert "note: log s" not in capsys.readouterr().out
    assert all(0 <= record["log_s_noise"] < 1e-6 for record in exact)
    half = run("--steps 2 --warmup_steps 0 --bf16", folder="half")
    [line] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("note: log s")]
    assert half[0]["log_s_noise"] > 3.5e-4
    assert half[1]["log_s_noise"] >= half[0]["log_s_noise"], "measured once and kept"
    assert f"{half[0]['log_s_noise']:.1e}" in line and "bfloat16" in line
    assert "--fp16, --bf16 false" in line


@pytest.mark.parametrize("flags", [
    "--epsilon 0.5 --epsilon_high 0.5",                          # wider than the error
    "--algorithm grpo --epsilon 1e-5 --epsilon_high 1e-5"])      # no fixed clip range of s
def test_no_note_where_rounding_removes_nothing(flags, run, capsys):
    run("--warmup_steps 0 --bf16 " + flags)
    assert "note: log s" not in capsys.readouterr().out


@pytest.mark.parametrize("more, count", [("", 4), ("--micro_batch_size 4", 2)])
def test_the_error_is_that_of_log_s_and_not_of_a_change_that_both_see(more, count):
    """Of a group, or of half a micro-batch. Reference: two policies, two arithmetics, four
    forwards, the means of a loop over tokens."""
    settings = parse("--plain --bf16 --num_generations 4 --steps_per_generation 1 "
                     f"--temperature 0.7 {more}".split())
    old, policy = (models.make("tiny_moe", num_hidden_layers=1) for _ in range(2))
    rollout = sample(policy, builtin_tokenizer(), ["1+2=", "3+4="], 4, 6, 0.7)
    rows = rollout.rows(0, count)
    actor = Actor(policy, settings)
    rounding = Rounding(SimpleNamespace(settings=settings, actor=actor))
    batch = SimpleNamespace(rollout=rollout, old_logp=rollout.sampler_logp)
    rounding.before_updates(SimpleNamespace(world=1), batch, None)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    record = {"step": 1, "log_s_noise": 0.0}
    rounding.report(None, record)

    def log_s(model, half):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            logp = response_logp(model, rows, 0.7, entropy=False).logp              # [R, T]
        return [sum(float(x) for x, real in zip(line, mask) if real) / int(mask.sum())
                for line, mask in zip(logp, rows.mask)]
    new16, old16 = log_s(policy, True), log_s(old, True)
    new32, old32 = log_s(policy, False), log_s(old, False)
    errors = [(a - b) - (c - d) for a, b, c, d in zip(new16, old16, new32, old32)]
    mean_square = sum(e * e for e in errors) / len(errors)
    assert record["log_s_noise"] == pytest.approx(mean_square ** 0.5, rel=1e-3)
    change = max(abs(c - d) for c, d in zip(new32, old32))
    assert 0 < record["log_s_noise"] < change / 3, "the change of the policy is no error"
    assert actor.half == torch.bfloat16
