"""A row, a clip, a statistic or an advantage of one's own that does not fit is refused before the cold start.
python -m pytest tests/run/test_own_rows.py"""

from pathlib import Path

import pytest
import torch

import advantages
import losses
import train
from advantages import ADVANTAGES, Advantage
from losses import OBJECTIVES
from plumbing.model import cold_start
from plumbing.run.arguments import parse
from tiny_run import TINY


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused(flags) -> the one line of a run that ends before its cold start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cold_start, "cold_start", lambda *inputs: pytest.fail("the cold start began"))

    def run(*flags):
        with pytest.raises(SystemExit) as stop:
            train.main([*TINY, *flags])
        err = capsys.readouterr().err
        assert stop.value.code == 2 and err.count("\n") == 1 and not list(Path().iterdir()) and "torch" not in err and "[2" not in err, err
        return err
    return run


@pytest.mark.parametrize("returned", [
    lambda found: found[0], lambda found: found[:2], lambda found: [x.sum(-1) for x in found],
    lambda found: [x[:, :1] for x in found], lambda found: [found[0], *(x[:1] for x in found[1:])]])
def test_a_clip_that_returns_the_wrong_shape(returned, refused, monkeypatch):
    surrogate = losses.token_surrogate
    monkeypatch.setattr(losses, "token_surrogate", lambda *inputs: returned(surrogate(*inputs)))
    err = refused("--algorithm", "gspo")
    assert "--algorithm gspo: clip 'min': token_surrogate must return three values for every token" in err


def test_a_statistic_without_an_entry_of_what_it_is_averaged_over(refused, monkeypatch):
    stats = losses.ratio_stats
    monkeypatch.setattr(losses, "ratio_stats", lambda *inputs: stats(*inputs) | {"far": torch.tensor(0.0)})
    assert "--algorithm gspo: statistic far of policy_loss has no entry in losses.STATISTICS: give what" in refused()
    monkeypatch.setitem(losses.STATISTICS, "far", "tokens")
    parse(TINY)


@pytest.mark.parametrize("function, per, reads, words", [
    (lambda rewards, more: rewards, "response", ("rewards",), "its inputs do not fit its function"),
    (lambda rewards: rewards + nowhere, "response", ("rewards",), "NameError: name 'nowhere' is not defined"),   # noqa: F821
    (lambda rewards, values: rewards * values, "token", ("rewards", "values"), "fails on three groups of 4 rewards"),
    (lambda rewards, group_size: rewards.view(-1, group_size).mean(-1), "response", ("rewards", "group_size"), "one number for every response: mend"),
    (lambda rewards: rewards[:, None], "token", ("rewards",), "one number for every token: mend"),
    (lambda rewards: rewards, "token", ("rewards",), "its function returns one per response: change one of the two"),
    (lambda rewards, mask: rewards[:, None] * mask, "response", ("rewards", "mask"), "its function returns one per token: change"),
    (lambda rewards, group_size: (rewards.view(-1, group_size) / rewards.view(-1, group_size).std(-1, keepdim=True)).flatten(), "response",
     ("rewards", "group_size"), "not finite where all rewards of a group are equal: mend its function in advantages.py; groups of equal"),
    (lambda rewards, group_size: (rewards.view(-1, group_size).mean(-1, keepdim=True).log() + rewards.view(-1, group_size)).flatten(), "response",
     ("rewards", "group_size"), "not finite where all rewards of a group are equal"),
    (lambda rewards: 1 / rewards, "response", ("rewards",), "not finite for rewards of 0 and 1: mend its function")])
def test_an_advantage_that_does_not_fit_its_row(function, per, reads, words, refused, monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "mine", Advantage(function, per, reads))
    monkeypatch.setitem(OBJECTIVES, "mine", OBJECTIVES["grpo"])
    flags = ["--advantage", "mine", *(["--algorithm", "grpo"] if per == "token" else [])]
    err = refused(*flags)
    assert words in err and "mine" in err


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("G", [2, 5])
def test_every_row_is_taken(name, G):
    reads = advantages.ADVANTAGES[name].reads
    parse([*TINY, "--algorithm", "gspo_token", "--advantage", name, "--num_generations", str(G),
           *(["--self_distillation", "answer"] if "teacher_logp" in reads else [])])


@pytest.mark.parametrize("name, reads_scale", [(name, "scale" in row.reads) for name, row in ADVANTAGES.items() if "teacher_logp" not in row.reads])
def test_scale_rewards_is_refused_where_the_row_does_not_read_it(name, reads_scale, refused):
    flags = [*TINY, "--algorithm", "gspo_token", "--advantage", name, "--scale_rewards", "none"]
    if reads_scale:
        assert parse(flags).scale_rewards == "none"
    else:
        assert f"--scale_rewards none has no effect with --advantage {name}" in refused(*flags[len(TINY):])
    preset = parse([*TINY, "--algorithm", "dr_grpo", "--advantage", name])     # what a preset fills in, nobody has given
    assert preset.scale_rewards == "none"
