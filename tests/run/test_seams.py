"""What a reader changes acts where it is written: at the hooks of an update, in the batch.

python -m pytest tests/run/test_seams.py
"""

import copy
from dataclasses import dataclass

import pytest
import torch

import session.learner
import train
from features.feature import Feature
from plumbing.speed import fast
from rollout import Rollout
from session import arguments
from tiny_run import differences, read_json

FAST = "--warmup_steps 0 --learning_rate 0.002 --lr_scheduler_type constant_with_warmup "


@pytest.fixture
def add(monkeypatch):
    """add(hook=function, ...) adds a feature with these hooks to the runs from now on."""
    def a_feature(**hooks):
        mine = type("Mine", (Feature,), {"on": classmethod(lambda cls, settings: True), **hooks})
        monkeypatch.setattr(arguments, "FEATURES", (*arguments.FEATURES, mine))
    return a_feature


@pytest.mark.parametrize("hook", ["before_loss", "loss"])
def test_what_is_scaled_before_the_loss_acts_and_is_in_the_records(hook, run, add):
    plain, = run("--micro_batch_size 4 --save_tokens", folder="plain")
    add(**{hook: lambda self, micro, scores, mini: micro.scale_surrogate(0.5) or {}})
    half, = run("--micro_batch_size 4 --save_tokens")
    for before, after in zip(plain["minibatches"][:1], half["minibatches"]):
        assert after["grad_norm"] == pytest.approx(before["grad_norm"] / 2, rel=1e-4)
    line, = read_json("run/tokens.jsonl")
    assert {x for row in line["factors"] for x in row} == {0.5}


def test_what_only_records_changes_nothing(run):
    run(f"{FAST} --steps 2 --save_minibatches", folder="recorded")
    run(f"{FAST} --steps 2", folder="plain")
    assert differences("recorded", "plain", 2) == ["state.pt/features: keys or length"]
    for line in read_json("recorded/minibatches.jsonl"):
        for mini in line["minibatches"]:
            groups = [{row["reward"] for row in mini[i:i + 4]} for i in range(0, len(mini), 4)]
            assert len(groups) == 1 or all(len(rewards) > 1 for rewards in groups)


def test_a_clip_range_that_moves_acts_and_is_recorded(run, add):
    def after_scoring(self, learner, batch, old):
        batch.clip_range = [(0.0, None), (1.0, float("inf"))][batch.step - 1]
        with pytest.raises(AttributeError, match="clip_range"):
            learner.settings = learner.settings
        with pytest.raises(AttributeError):
            batch.rewards = -batch.rewards
    add(after_scoring=after_scoring)
    first, second = run(f"{FAST} --steps 2")
    assert (first["epsilon"], first["epsilon_high"]) == (0, 0) and first["clip_signal"] > 0
    assert (second["epsilon"], second["epsilon_high"]) == (1, None) and second["clip_signal"] == 0


def test_as_many_responses_of_every_group_may_be_trained(run, add):
    """The first two of four: as if only they had been sampled, but for the advantages."""
    seen = []
    def advantages(self, batch):
        return batch.take(torch.arange(len(batch.problems)).view(-1, 4)[:, :2].flatten())
    def before_loss(self, micro, scores, mini):
        seen.append((mini.group_size, mini.weights.sum(-1).tolist()))
    add(advantages=advantages, before_loss=before_loss)
    record, = run(f"{FAST} --steps 1")
    assert seen == [(2, pytest.approx([1 / 4] * 4))] * 2 and record["discarded_groups"] == 0


def keep_average(self, learner, mini, stats):
    self.mean = getattr(self, "mean", None) or copy.deepcopy(learner.policy)
    for mean, p in zip(self.mean.parameters(), learner.policy.parameters(), strict=True):
        mean.data.lerp_(p.data, 0.1)


def save_average(self, folder):
    self.mean.save_pretrained(folder / "mean")
    return {"updates": self.learner.updates}


def load_average(self, state, folder):
    self.mean = type(self.learner.policy).from_pretrained(folder / "mean")
    assert state["updates"] == self.learner.updates


def test_an_average_of_the_weights_is_one_feature_and_resumes_exactly(run, killed, add):
    add(after_step=keep_average, state_dict=save_average, load_state_dict=load_average)
    line = f"{FAST} --save_steps 1 --steps"
    run(f"{line} 3", folder="whole")
    killed(2, f"{line} 3")
    run("--resume")
    assert differences("whole", "run", 3) == []
    one, other, raw = (open(f"{name}/model.safetensors", "rb").read() for name in (
        "whole/checkpoints/step_3/mean", "run/checkpoints/step_3/mean", "run/checkpoints/step_3"))
    assert one == other != raw


def test_a_group_of_parameters_keeps_its_own_rate(run, first, monkeypatch):
    """Times the schedule; also in a run that goes on with another --learning_rate."""
    rates = []
    def two_groups(settings, actor):
        first, *rest = actor.parameters()
        return torch.optim.AdamW([{"params": rest}, {"params": [first], "lr": 0.02}],
                                 settings.learning_rate)
    monkeypatch.setattr(session.learner, "make_optimizer", two_groups)
    first(train, "update", lambda learner, mini: rates.append(
        [group["lr"] for group in learner.optimizer.param_groups]))
    run("--warmup_steps 2 --learning_rate 0.004 --lr_scheduler_type constant_with_warmup")
    run("--resume --steps 2 --learning_rate 0.001")
    assert rates == [[0.002, 0.01], [0.004, 0.02], [0.001, 0.02], [0.001, 0.02]]


@dataclass
class Wide(Rollout):
    """A Rollout with a field of one's own, which here shows the token."""

    kept: torch.Tensor = None                                # [B, T, 1]


def test_a_new_tensor_of_rollout_is_cut_joined_and_merged_with_it(run, then):
    seen = []

    then(fast, "fast_sample", lambda rollout, *_, **__: Wide(
        **vars(rollout), kept=rollout.response_ids[..., None]))
    then(fast.plain, "token_scores", lambda scores, *args: seen.append(args[2]))
    run(f"{FAST} --dynamic_sampling")
    assert any(rollout.group_size < 4 for rollout in seen), "equal responses were merged"
    for rollout in seen:
        assert rollout.kept[..., 0].equal(rollout.response_ids)


def test_two_features_may_each_add_a_term_to_the_reward(run, add):
    def init(self, learner):
        Feature.__init__(self, learner)
        learner.task.penalties += ("mine",)

    def after_scoring(self, learner, batch, old):
        batch.parts = torch.cat([batch.parts, torch.full_like(batch.parts[:, :1], -2.0)], 1)
        batch.sampled = ((batch.rollout, batch.parts),)
        assert (batch.rewards <= -1).all()
    add(__init__=init, after_scoring=after_scoring)
    record, = run("--overlong_cache 0.5")
    assert [*record["reward_parts"]] == ["correct", "overlong", "mine"]
    assert record["reward"] == pytest.approx(sum(record["reward_parts"].values()))


def test_the_mismatch_of_a_sampler_whose_log_probs_are_the_old_ones(run):
    """The mean over what the first update scores."""
    record, = run("--old_logp sampler --sampler_dtype int4 --save_minibatches")
    first = read_json("run/minibatches.jsonl")[0]["minibatches"][0]
    drift = [old - new for response in first
             for old, new in zip(response["old_logp"], response["logp"])]
    assert record["mismatch_kl"] == pytest.approx(sum(drift) / len(drift), rel=1e-4)
    assert record["mismatch_kl"] > 1e-4
