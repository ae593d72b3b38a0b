"""What rounding does to log s: measured in the first rollout batch, said in one line where the clip range is narrower.
python -m pytest tests/loop/test_rounding.py"""

import copy
from types import SimpleNamespace

import pytest
import torch

import train
from plumbing.data import running_sum
from plumbing.loop.rounding import Rounding
from plumbing.model.actor import Actor
from plumbing.model.cold_start import tiny_config
from plumbing.run.arguments import parse
from plumbing.run.metrics import noise_note, update_metrics
from moe import TinyMoE
from rollout import response_logp, sample
from tiny_run import TINY, metrics


def trained(*flags):
    train.main([*TINY, "--steps", "2", "--warmup_steps", "0", *flags, "--output_dir", "run", "--overwrite_output_dir"])
    return metrics("run")


def test_16_bits_are_told_that_the_clip_acts_on_rounding_and_float32_is_not(workplace, capsys):
    exact = trained()
    assert "note: log s" not in capsys.readouterr().out
    assert all(0 <= record["log_s_noise"] < 1e-6 for record in exact)
    half = trained("--bf16", "true")
    printed = capsys.readouterr().out
    assert half[0]["log_s_noise"] > 3.5e-4 and printed.count("note: log s") == 1
    assert half[1]["log_s_noise"] >= half[0]["log_s_noise"], "measured once and kept"
    line = next(line for line in printed.splitlines() if line.startswith("note: log s"))
    assert f"{half[0]['log_s_noise']:.1e}" in line and "--fp16, --bf16 false" in line and "bfloat16" in line
    for wider in ("--epsilon 0.5 --epsilon_high 0.5", "--algorithm grpo --epsilon 1e-5 --epsilon_high 1e-5"):
        trained("--bf16", "true", "--steps", "1", *wider.split())
        assert "note: log s" not in capsys.readouterr().out, "wider than the error, or not a fixed clip range of s"


def test_the_error_is_that_of_log_s_and_not_of_a_change_that_both_see():
    """Reference: two policies, two arithmetics, four forwards, the means of a loop over tokens."""
    torch.manual_seed(0)
    args = parse(["--plain", "--bf16", "true", "--hidden_size", "32", "--num_hidden_layers", "1", "--num_generations", "4",
                  "--steps_per_generation", "1"])
    tokenizer = running_sum.builtin_tokenizer()
    policy = TinyMoE(tiny_config(args, tokenizer)).eval()
    rollout = sample(policy, tokenizer, ["1+2=", "3+4="], 4, 6)
    old, rows = copy.deepcopy(policy), rollout.rows(0, 4)
    learner = SimpleNamespace(actor=Actor(policy, args))
    rounding = Rounding(args)
    assert rounding.measure(learner) is None
    rounding.before_updates(learner, SimpleNamespace(rollout=rollout, old_logp=rollout.sampler_logp))
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    measured = rounding.measure(learner)

    def log_s(model, half):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            logp = response_logp(model, rows, entropy=False).logp
        return [sum(float(x) for x, real in zip(line, mask) if real) / int(mask.sum()) for line, mask in zip(logp, rows.mask)]
    new16, old16, new32, old32 = (log_s(model, half) for half in (True, False) for model in (policy, old))
    errors = [(a - b) - (c - d) for a, b, c, d in zip(new16, old16, new32, old32)]
    assert measured == pytest.approx((sum(e * e for e in errors) / len(errors)) ** 0.5, rel=1e-3)
    change = max(abs(c - d) for c, d in zip(new32, old32))
    assert 0 < measured < change / 3, "the change of the policy is no error"
    assert learner.actor.half == torch.bfloat16 and rounding.measure(learner) is None


def test_before_the_first_update_any_log_s_is_an_error():
    first = dict(log_s_mean=3e-4, log_s_var=16e-8, clip_low=0.0, clip_high=0.0, grad_norm=1.0, tokens=9.0, skipped=False, overflow=False, empty=False)
    record = update_metrics([first, first | dict(log_s_mean=1.0, log_s_var=1.0)])
    assert record["log_s_noise"] == pytest.approx(5e-4)


@pytest.mark.parametrize("flags, noise, words", [
    ("", 1e-7, None), ("", 4e-4, ["clip range wider", "float32"]), ("--fp16 true", 1e-2, ["--fp16 false"]),
    ("--old_logp sampler", 1e-2, ["--old_logp recompute"]), ("--bf16 true", 1e-2, ["--fp16, --bf16 false", "0.0003", "1.0e-02"])])
def test_the_note_names_what_helps(flags, noise, words):
    note = noise_note(parse(flags.split()), noise)
    assert (note == "") if words is None else all(word in note for word in words)
