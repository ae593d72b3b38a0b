"""A row, a clip, a statistic or an advantage of one's own that does not fit is an error before the
cold start, with a traceback (tests/run/test_tracebacks.py) after a line that names the flag.
python -m pytest tests/run/test_own_rows.py"""

import pytest
import torch

import losses
import train
from advantages import ADVANTAGES, Advantage
from plumbing.model import policy
from session.arguments import parse
from tiny_run import TINY


@pytest.fixture
def before(workplace, monkeypatch, capsys):
    """before(flags): what a run prints that ends before its cold start, and its error."""
    monkeypatch.setattr(policy, "load_cold_start", lambda *_: pytest.fail("the cold start began"))

    def run(flags=""):
        with pytest.raises((Exception, SystemExit)) as error:
            train.main([*TINY, *flags.split()])
        printed = capsys.readouterr().err
        assert error.type is not SystemExit or "--advantage" in printed
        return f"{printed}{error.type.__name__}: {error.value}"
    return run


@pytest.mark.parametrize("returned", [
    lambda found: found[:2], lambda found: [x.sum(-1) for x in found],
    lambda found: [found[0], *(x[:1] for x in found[1:])]])
def test_a_clip_that_returns_the_wrong_shape(returned, before, monkeypatch):
    surrogate = losses.token_surrogate
    monkeypatch.setattr(losses, "token_surrogate", lambda *inputs: returned(surrogate(*inputs)))
    said = before("--algorithm gspo")
    assert "--algorithm gspo fails on two responses" in said
    assert "clip 'min': token_surrogate must return three values for every token" in said


@pytest.mark.parametrize("ratio, high, words", [
    ("tokn", 0.2, "ratio 'tokn' is unknown; known: none, token, "),
    ("token", None, "TypeError: '<' not supported"),
    (lambda logp, old_logp: logp - old_logp, 0.2, "TypeError: ")])
def test_a_row_or_a_ratio_that_does_not_fit(ratio, high, words, before, monkeypatch):
    if callable(ratio):
        monkeypatch.setitem(losses.RATIOS, "own", ratio)
        ratio = "own"
    row = losses.Objective(ratio, "min", 0.2, high, "sequence-mean")
    monkeypatch.setitem(losses.OBJECTIVES, "gspo", row)
    said = before("--algorithm gspo")
    assert "--algorithm gspo fails on " in said and words in said


def test_a_statistic_without_an_entry_of_what_it_is_averaged_over(before, monkeypatch):
    stats = losses.ratio_stats
    monkeypatch.setattr(losses, "ratio_stats",
                        lambda *inputs: stats(*inputs) | {"far": torch.tensor(0.0)})
    assert "statistic far of policy_loss has no entry in losses.STATISTICS: give" in before()
    monkeypatch.setitem(losses.STATISTICS, "far", "tokens")
    parse(TINY)


def over_std(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups / groups.std(-1, keepdim=True)).flatten()


def log_mean(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups.mean(-1, keepdim=True).log() + groups).flatten()


INFINITE = ("a number that is not finite on three groups of 4 rewards (0 and 1 in turn, all 0, "
            "all 1)")


@pytest.mark.parametrize("function, per, words", [
    (lambda rewards, more: rewards, "response",
     "its function reads 'more'; known inputs: rewards, "),
    (lambda rewards: rewards + nowhere, "response",          # noqa: F821
     "NameError: name 'nowhere' is not defined"),
    (lambda rewards, values: rewards * values, "token",
     "fails on three groups of 4 rewards"),
    (lambda rewards, group_size: rewards.view(-1, group_size).mean(-1), "response",
     "one number for every response, as its row"),
    (lambda rewards: rewards, "answer", "per 'answer', which must be 'response' or 'token'"),
    (lambda rewards: rewards[:, None], "token", "one number for every token, as its row"),
    (lambda rewards: rewards, "token",
     "one number for every token, as its row of advantages.ADVANTAGES says: change one of the two"),
    (lambda rewards, mask: rewards[:, None] * mask, "response",
     "one number for every response, as its row"),
    (over_std, "response",
     f"{INFINITE}: fix its function in advantages.py; zero-variance groups"),
    (log_mean, "response", INFINITE),
    (lambda rewards: 1 / rewards, "response", INFINITE)])
def test_an_advantage_that_does_not_fit_its_row(function, per, words, before, monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "mine", Advantage(function, per))
    err = before(f"--advantage mine {'--algorithm grpo' if per == 'token' else ''}")
    assert words in err and "mine" in err


@pytest.mark.parametrize("name", [name for name in ADVANTAGES
                                  if "turn_rewards" not in ADVANTAGES[name].reads])
def test_every_row_is_taken_with_a_scale_where_it_reads_one(name, before):
    reads = ADVANTAGES[name].reads
    flags = f"--algorithm gspo_token --advantage {name}"
    if "teacher_logp" in reads:
        flags += " --self_distillation answer"
    for G in (2, 5):
        parse([*TINY, *flags.split(), "--num_generations", str(G)])
    if "teacher_logp" in reads:
        return
    scaled = f"{flags} --scale_rewards none"
    if "scale" in reads:
        assert parse([*TINY, *scaled.split()]).scale_rewards == "none"
    else:
        assert f"--scale_rewards none has no effect with --advantage {name}" in before(scaled)
    preset = parse([*TINY, "--algorithm", "dr_grpo", "--advantage", name])
    assert preset.scale_rewards == "none", "what a preset fills in, nobody has given"
