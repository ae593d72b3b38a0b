"""What train.py accepts survives the rewards of the first batch: every algorithm, every flag that
shapes rewards or advantages, groups of one and of two.

python -m pytest tests/run/test_accepted.py
"""

from types import SimpleNamespace

import pytest
import torch

from advantages import ADVANTAGES, estimate_advantages
from features.distillation import add_distillation
from features.dynamic_sampling import keep_signal
from features.lengths import Lengths
from features.srpo import SRPO
from plumbing.data.running_sum import running_sum
from plumbing.data.stream import PromptStream
from session.arguments import ALGORITHMS, parse
from session.metrics import rollout_metrics
from plumbing.speed.rollouts import concat
from rollout import Rollout
from train import Batch

TOLD = "--self_distillation answer --distillation_coef 0.5"
SHAPING = ["", "--overlong_cache 0.5", "--mask_truncated_completions",
           "--dynamic_sampling", "--scale_rewards batch", "--scale_rewards mean",
           "--scale_rewards mean --overlong_cache 0.3", TOLD,
           f"{TOLD} --self_distillation sibling", "--advantage distillation "
           "--self_distillation answer", *(f"--advantage {name}" for name in ADVANTAGES)]
T = 6


def first_batch(args, task):
    """The steps of a rollout batch that rewards pass through, without a policy: in the first group
    of two or more, the first response is right and the shorter one."""
    G = args.num_generations
    lengths = torch.tensor([2, *[T] * (2 * G - 1)])                                     # [B]
    mask = torch.arange(T) < lengths[:, None]                                           # [B, T]
    zeros = torch.zeros(2 * G, T)                                                       # [B, T]
    prompts = torch.zeros(2, 4, dtype=torch.long)                                       # [Q, P]
    rollout = Rollout(prompts, prompts == 0, zeros.long(), mask, zeros, lengths == T,
                      [""] * 2 * G, G)
    parts = torch.zeros(2 * G, 1)                                                       # [B, K]
    parts[0] = 1
    problems = task.train[:2]
    if args.dynamic_sampling:
        keep_signal([(rollout, problems, parts)], 2, args.advantage, task.total, True, concat)
    batch = Batch(rollout, problems, parts, zeros, sampled=[(rollout, parts)])
    task.max_completion_length = T
    run = SimpleNamespace(settings=args, task=task, stream=PromptStream([1, 1]))
    for feature in {Lengths, SRPO}.intersection(args.features):
        feature = feature(run)
        run.stream.next(2, step=100)
        feature.after_scoring(None, batch, None)
    batch.rewards = task.total(batch.parts, G)                                          # [B]
    batch.advantages = estimate_advantages(
        args.advantage, batch.rewards, G, args.scale_rewards, mask=mask, old_logp=zeros, kl=None,
        beta=args.beta, parts=batch.parts, part_weights=task.weights(batch.parts), values=zeros,
        teacher_logp=zeros, blamed=mask)
    if args.distillation_coef:
        batch.advantages = add_distillation(batch.advantages, args.distillation_coef, zeros,
                                            zeros, mask)
    assert batch.advantages.isfinite().all()
    return rollout_metrics(batch, task, args.advantage)


def test_what_is_accepted_survives_the_rewards_of_a_first_batch():
    task = running_sum(1, 2)
    accepted = set()
    for algorithm in ALGORITHMS:
        for flags in SHAPING:
            for G in ("1", "2"):
                words = f"--algorithm {algorithm} --num_generations {G} {flags}"
                try:
                    args = parse(words.split())
                except ValueError:
                    continue
                accepted.add((algorithm, flags, G))
                try:
                    first_batch(args, task)
                except Exception as error:
                    pytest.fail(f"{words} is accepted, and its first batch fails: {error!r}")
    assert {name for name, _, _ in accepted} == set(ALGORITHMS)
    assert {flags for _, flags, _ in accepted} == set(SHAPING) - {
        "--scale_rewards mean --overlong_cache 0.3",
        "--advantage turn_returns"}                          # which needs an --environment
    assert {("ppo", "", "1"), ("maxrl", "", "2")} <= accepted
