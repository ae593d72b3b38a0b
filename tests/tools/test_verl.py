"""python tools/export.py verl against verl 0.9.1 itself: its configuration, its losses, its advantages. python -m pytest tests/tools/test_verl.py

verl is installed with --no-deps. What it imports beside torch (ray, tensordict, ...) is replaced by
empty modules while core_algos.py and rollout_corr_helper.py load; the functions called here use none.
"""

import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import random
import shlex
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import yaml

import train
from advantages import group_advantages, leave_one_out, reinforce_plus_plus
from losses import OBJECTIVES, kl_penalty, policy_loss, token_weights
from plumbing.loop.batches import keep_signal
from plumbing.loop.extras import mismatch_correction
from plumbing.run.arguments import ALGORITHMS, parse
from tools import export
from tools.verl import ADVANTAGE, LOSS_MODE

VERL = importlib.util.find_spec("verl")
pytestmark = [pytest.mark.trl, pytest.mark.skipif(VERL is None, reason="verl is missing: pip install --no-deps verl==0.9.1")]
ABSENT = ("codetiming", "orjson", "ray", "tensordict", "omegaconf")          # third-party packages that verl imports
B, T, L_MAX = 12, 14, 20


class Empty(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each of ABSENT that is not installed."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        if module.__name__ == "omegaconf":
            module.MISSING = "???"
            module.DictConfig = dict


@pytest.fixture(scope="module")
def verl():
    """verl's core_algos, and rollout_corr_helper as its attribute `correction`."""
    finder, before = Absent(), set(sys.modules)
    package = ModuleType("verl")                             # without verl/__init__.py, which starts ray
    package.__path__ = list(VERL.submodule_search_locations)
    sys.meta_path.append(finder)
    sys.modules["verl"] = package
    try:
        core = importlib.import_module("verl.trainer.ppo.core_algos")
        helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
        from verl.workers.config import ActorConfig, PolicyLossConfig
        yield SimpleNamespace(core=core, correction=helper, ActorConfig=ActorConfig, PolicyLossConfig=PolicyLossConfig)
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in (*ABSENT, "verl"):
                del sys.modules[name]


def printed(capsys, *flags):
    """(comments, launch words, {key: value}) of what the command line prints."""
    export.main(["verl", *flags])
    text = capsys.readouterr().out
    comments = [line for line in text.splitlines() if line.startswith("#")]
    words = shlex.split("\n".join(line for line in text.splitlines() if not line.startswith("#")))
    given = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("--"))
    return comments, [w for w in words if w not in [f"{k}={v}" for k, v in given.items()]], {
        key: yaml.safe_load(value) for key, value in given.items()}


def missing(args):
    """What verl does not have of these settings."""
    return export.joined(export.verl, args)[1]


def number(value):
    """YAML reads 1e-06 as text; hydra and Python read it as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# ------------------------------------------------------------------------------------------ the keys

FLAGS = {"beta": ["0.1"], "old_logp": ["sampler"], "dynamic_sampling": ["true"], "overlong_cache": ["0.2"], "use_peft": ["true"],
         "mismatch": ["token_truncate"], "mismatch_mask": ["seq", "geo"], "routing_replay": ["old", "rollout"],
         "entropy_coef": ["0.01"], "advantage": [*ADVANTAGE], "scale_rewards": ["none"], "micro_batch_size": ["4"], "bf16": ["true"],
         "save_steps": ["5"], "eval_steps": ["5"], "reduction": ["constant", "sequence-sum"], "kl_estimator": ["k2", "k3_st"],
         "lora_target_modules": ["q_proj v_proj"], "dual_clip": ["3"]}


def drawn(rng, extra=()):
    """Random flags that the command line accepts, and their Settings."""
    while True:
        flags = ["--algorithm", rng.choice([*ALGORITHMS]), "--max_completion_length", str(L_MAX), *extra]
        for name, values in FLAGS.items():
            if rng.random() < 0.2:
                flags += [f"--{name}", *rng.choice(values).split()]
        try:
            return flags, parse(flags)
        except ValueError:
            pass


@pytest.mark.parametrize("seed", range(80))
def test_every_key_is_one_of_verls(seed, capsys):
    flags, args = drawn(random.Random(seed), ["--model_name_or_path", "some/model", "--dataset_name", "rows.jsonl"])
    comments, words, given = printed(capsys, *flags)
    if missing(args):
        assert comments == [f"# no equivalent in verl 0.9.1: it has no {', no '.join(missing(args))}"] and not given
        return
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    megatron = "--config-name=ppo_megatron_trainer.yaml" in words
    assert megatron == (args.routing_replay != "none")
    folder = f"{VERL.submodule_search_locations[0]}/trainer/config"
    kind = "ppo_megatron_trainer" if megatron else "ppo_trainer"
    config = yaml.safe_load(open(f"{folder}/_generated_{kind}.yaml"))
    for key, value in given.items():
        if key.startswith("+"):
            manager = open(f"{VERL.submodule_search_locations[0]}/experimental/reward_loop/reward_manager/dapo.py").read()
            assert f'"{key.split(".")[1]}"' in manager and key.split(".")[-1] in manager, key
            continue
        node = config
        for name in key.split("."):
            assert name in node, key
            node = node[name]
        if isinstance(node, bool):
            assert isinstance(value, bool), (key, value)
        elif isinstance(node, (int, float)):
            assert isinstance(number(value), (int, float)), (key, value)
        elif isinstance(node, list):
            assert isinstance(value, list), (key, value)
    for flag in ("use_peft", "micro_batch_size", "save_steps", "eval_steps", "beta", "entropy_coef"):
        if f"--{flag}" in flags:
            value = str(getattr(args, flag)) if flag != "use_peft" else "16"
            assert value in [str(x) for x in given.values()], flag


def test_batches_are_counted_as_verl_counts_them(capsys):
    """verl/trainer/ppo/v1/trainer_base.py multiplies the mini-batch by rollout.n, the batch by nothing."""
    _, _, given = printed(capsys, "--prompts_per_step", "16", "--num_generations", "4", "--steps_per_generation", "2")
    actor, source = "actor_rollout_ref.actor.", f"{VERL.submodule_search_locations[0]}/trainer/ppo/v1/trainer_base.py"
    assert given["data.train_batch_size"] == 16 and given["actor_rollout_ref.rollout.n"] == 4
    assert given[f"{actor}ppo_mini_batch_size"] == 8 and given[f"{actor}ppo_micro_batch_size_per_gpu"] == 32
    assert "ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n" in open(source).read()


def test_a_flag_that_verl_does_not_have_is_named(capsys):
    comments, _, _ = printed(capsys, "--model_name_or_path", "m", "--dataset_name", "d.jsonl", "--stop", "END", "--plain")
    assert any("not in verl's configuration" in line and "--stop END --plain" in line for line in comments)


# ---------------------------------------------------------------------------------------- the losses

def make_batch(empty=()):
    """Ragged rows, ratios from far below the clip ranges to far above, both signs of A; the rows
    `empty` have no loss token."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor([14, 3, 9, 12, 1, 7, 14, 5, 8, 11, 2, 6])[:, None]
    mask[list(empty)] = False
    old_logp = -0.1 - 3 * torch.rand(B, T, generator=generator, dtype=torch.float64)
    logp = old_logp + 0.4 * draw(B, T) + 0.2 * draw(B, 1)
    logp[0, 0] = old_logp[0, 0] + 4                          # a token ratio of 55
    return logp.clamp(max=-1e-3), old_logp, draw(B), mask, 0.3 * draw(B, T)


def assert_same(ours, theirs, logp):
    (gradient,), (other,) = (torch.autograd.grad(loss, logp, retain_graph=True) for loss in (ours, theirs))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-10)
    assert (gradient != 0).any()


def actor_config(verl, given):
    """verl's own ActorConfig from the printed overrides."""
    own = {key.removeprefix("actor_rollout_ref.actor."): number(value) for key, value in given.items()
           if key.startswith("actor_rollout_ref.actor.")}
    loss = {key.split(".")[1]: value for key, value in own.items() if key.startswith("policy_loss.")}
    top = {key: value for key, value in own.items() if "." not in key}
    return verl.ActorConfig(strategy="fsdp", rollout_n=8, policy_loss=verl.PolicyLossConfig(**loss), **top)


def accumulated(verl, given, *batch):
    """verl's loss of a mini-batch in micro-batches of the printed size."""
    size = min(B, given["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"])
    parts = [[x[i:i + size] for x in batch] for i in range(0, B, size)]
    return sum(verl_loss(verl, given, *part, whole=batch[-1]) for part in parts)


def verl_loss(verl, given, logp, old_logp, ref_logp, gap, A, mask, whole=None):
    """The loss as verl/workers/utils/losses.py adds it up: policy, entropy, KL. whole: the mask of
    the mini-batch of which this is a micro-batch."""
    whole = mask if whole is None else whole
    config, correction, weights = actor_config(verl, given), "algorithm.rollout_correction.", None
    config.global_batch_info.update(dp_size=1, batch_num_tokens=whole.sum(), global_batch_size=len(whole), loss_scale_factor=config.loss_scale_factor)
    if given.get(f"{correction}rollout_is"):
        threshold = number(given[f"{correction}rollout_is_threshold"])
        weights, _ = verl.correction.compute_rollout_correction_weights(gap, mask, given[f"{correction}rollout_is"], threshold)
    if given.get(f"{correction}rollout_rs"):
        mask, _ = verl.correction.compute_rollout_rejection_mask(gap, mask.long(), given[f"{correction}rollout_rs"],
                                                                 given[f"{correction}rollout_rs_threshold"])
        mask = mask.bool()
    loss, _ = verl.core.get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=old_logp, log_prob=logp, advantages=A[:, None] * mask, response_mask=mask,
        loss_agg_mode=config.loss_agg_mode, config=config, rollout_is_weights=weights)
    mean = lambda x: verl.core.agg_loss(loss_mat=x, loss_mask=mask, loss_agg_mode=config.loss_agg_mode, **config.global_batch_info)
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * mean(-0.3 * logp)
    if config.use_kl_loss:
        loss = loss + config.kl_loss_coef * mean(verl.core.kl_penalty(logp, ref_logp, config.kl_loss_type))
    return loss


def our_loss(args, logp, old_logp, ref_logp, gap, A, mask):
    weights = token_weights(mask, args.reduction, max_length=L_MAX)
    rollout = SimpleNamespace(mask=mask, sampler_logp=old_logp - gap)
    loss, _ = policy_loss(args.row, logp, old_logp, A, mask, epsilon=args.epsilon,
                          epsilon_high=args.epsilon_high, weights=weights,
                          mismatch=mismatch_correction(args, old_logp, rollout))
    if args.beta and args.advantage != "reinforce_plus_plus":
        loss = loss + args.beta * (weights * kl_penalty(logp, ref_logp, mask, args.kl_estimator, old_logp)).sum()
    return loss - args.entropy_coef * (token_weights(mask, "token-mean") * -0.3 * logp).sum()


CASES = {"mismatch": ["token_truncate", "seq_truncate", "geo_truncate"], "mismatch_high": ["6"], "mismatch_mask": ["token", "seq", "geo"],
         "mismatch_mask_bounds": ["0.8 1.2"], "objective_constants": ["tau_negative=1.3", "beta=0.2", "cap=1.5"], "epsilon": ["0.1"],
         "epsilon_high": ["0.15"], "dual_clip": ["1.2", "3"], "beta": ["0.3"], "kl_estimator": ["k1", "k2", "k3_is", "k3_st"],
         "entropy_coef": ["0.05"], "reduction": ["sequence-mean", "token-mean", "constant", "sequence-sum"], "overlong_cache": ["0"]}


@pytest.mark.slow
def test_losses_under_the_printed_settings_are_equal_in_value_and_gradient(verl, capsys):
    """Every objective with a counterpart at its own settings, then 200 random settings; two rows without a loss token, and
    three micro-batches or one."""
    compared, rng = set(), random.Random(0)
    own = [["--algorithm", name, "--overlong_cache", "0"] for name in ALGORITHMS]
    own += [["--algorithm", "dapo_paper", "--reduction", "token-mean", "--overlong_cache", "0"]]    # verl lacks its own reduction
    for flags in own + [None] * 200:
        while flags is None:
            flags = ["--algorithm", rng.choice([*ALGORITHMS]), "--advantage", "group"]
            for name, values in CASES.items():
                if rng.random() < 0.2:
                    flags += [f"--{name}", *rng.choice(values).split()]
            try:
                parse(flags)
            except ValueError:
                flags = None
        flags = [*flags, "--max_completion_length", str(L_MAX), "--micro_batch_size", rng.choice(["64", "4"])]
        args = parse(flags)
        if missing(args):
            continue
        _, _, given = printed(capsys, *flags)
        if LOSS_MODE[OBJECTIVES[args.objective].ratio, OBJECTIVES[args.objective].clip] == "geo_mean":
            given["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] = B      # its comment says what smaller ones do
        logp, old_logp, A, mask, gap = make_batch(empty=(3, 8))
        logp.requires_grad_()
        batch = (logp, old_logp, old_logp - 0.2, gap, A, mask)
        assert_same(our_loss(args, *batch), accumulated(verl, given, *batch), logp)
        compared.add(args.objective)
    assert compared == {name for name, row in OBJECTIVES.items() if (row.ratio, row.clip) in LOSS_MODE}


@pytest.mark.slow
@pytest.mark.parametrize("key, value, flags", [
    ("clip_ratio_c", 3.0, "--algorithm grpo"), ("clip_ratio_c", 3.0, "--algorithm dppo"), ("clip_ratio_low", 0.2, "--algorithm cispo"),
    ("loss_agg_mode", "token-mean", "--algorithm gspo"), ("clip_ratio_high", 0.2, "--algorithm dapo --overlong_cache 0")])
def test_verls_default_would_be_another_loss(verl, capsys, key, value, flags):
    """The comments name what verl's own default changes: without the printed key the loss is another one."""
    config = yaml.safe_load(open(f"{VERL.submodule_search_locations[0]}/trainer/config/_generated_ppo_trainer.yaml"))
    assert config["actor_rollout_ref"]["actor"][key] == value
    args = parse(flags.split())
    comments, _, given = printed(capsys, *flags.split())
    assert any(key in line or "clip_ratio_low and _high" in line for line in comments)
    logp, old_logp, A, mask, gap = make_batch()
    A = -A.abs() if key == "clip_ratio_c" else A
    logp.requires_grad_()
    batch = (logp, old_logp, old_logp - 0.2, gap, A, mask)
    ours = our_loss(args, *batch)
    assert ours.item() == pytest.approx(verl_loss(verl, given, *batch).item(), rel=1e-6)
    other = verl_loss(verl, given | {f"actor_rollout_ref.actor.{key}": value}, *batch)
    gradients = [torch.autograd.grad(loss, logp)[0] for loss in (ours, other)]
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3 * gradients[0].abs().max()


@pytest.mark.slow
def test_gmpos_gradient_grows_with_the_number_of_micro_batches(verl, capsys):
    """verl adds the losses of the micro-batches; geo_mean is a mean over each. Its comment says so."""
    comments, _, given = printed(capsys, "--algorithm", "gmpo")
    assert any("geo_mean averages over a micro-batch" in line for line in comments)
    logp, old_logp, A, mask, gap = make_batch()
    logp.requires_grad_()
    batch = (logp, old_logp, old_logp - 0.2, gap, A, mask)
    for algorithm, times in (("gmpo", 2), ("gspo", 1)):
        _, _, given = printed(capsys, "--algorithm", algorithm)
        whole, = torch.autograd.grad(verl_loss(verl, given, *batch), logp)
        parts = sum(verl_loss(verl, given, *(x[rows] for x in batch), whole=mask) for rows in (slice(0, 6), slice(6, 12)))
        added, = torch.autograd.grad(parts, logp)
        torch.testing.assert_close(added, times * whole)


def test_every_weight_decays_in_verls_optimizer_as_in_ours(verl, capsys):
    """The optimizer of verl's FSDP worker. Megatron, which is not installed, leaves out biases and norms: a comment says so."""
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer
    comments, _, given = printed(capsys, "--weight_decay", "0.1", "--learning_rate", "0.01")
    own = {key: number(given[f"actor_rollout_ref.actor.optim.{key}"]) for key in ("lr", "betas", "weight_decay", "clip_grad")}
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    theirs = build_optimizer(model.parameters(), FSDPOptimizerConfig(**own))
    ours = train.make_optimizer(parse(["--weight_decay", "0.1", "--learning_rate", "0.01"]), model)
    for optimizer in (ours, theirs):
        group, = optimizer.param_groups
        assert (group["lr"], tuple(group["betas"]), group["weight_decay"], len(group["params"])) == (0.01, (0.9, 0.95), 0.1, 4)
    said = "# weight decay: Megatron leaves out biases"
    assert not any(line.startswith(said) for line in comments)
    comments, _, _ = printed(capsys, "--weight_decay", "0.1", "--routing_replay", "old")
    assert any(line.startswith(said) for line in comments)


def test_an_optimizer_of_bitsandbytes_is_verls_too(verl, capsys):
    pytest.importorskip("bitsandbytes")
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer
    _, _, given = printed(capsys, "--optim", "adamw_8bit")
    own = {key: given[f"actor_rollout_ref.actor.optim.{key}"] for key in ("optimizer", "optimizer_impl")}
    model = torch.nn.Linear(3, 3)
    theirs = build_optimizer(model.parameters(), FSDPOptimizerConfig(lr=0.01, **own))
    assert type(theirs) is type(train.make_optimizer(parse(["--optim", "adamw_8bit"]), model))
    comments, _, given = printed(capsys, "--optim", "adamw_8bit", "--routing_replay", "old")
    assert any("Megatron has no adamw_8bit" in line for line in comments)
    assert "actor_rollout_ref.actor.optim.optimizer_impl" not in given


def test_groups_are_filtered_by_the_number_before_the_overlong_penalty(capsys):
    """verl's own DAPO reward manager: right responses of unequal length have one acc and two rewards. Here such a group has no
    signal (batches.keep_signal), so the printed metric has to be the first."""
    _, _, given = printed(capsys, "--algorithm", "dapo", "--max_completion_length", str(L_MAX))
    metric = given["algorithm.filter_groups.metric"]
    reward = {key.removeprefix("+reward.reward_kwargs."): value for key, value in given.items() if key.startswith("+reward.reward_kwargs.")}
    zone = SimpleNamespace(**{key.split(".")[1]: value for key, value in reward.items() if "." in key})
    names = dict(register=lambda name: lambda kind: kind, RewardManagerBase=object, DataProto=list)
    source = open(f"{VERL.submodule_search_locations[0]}/experimental/reward_loop/reward_manager/dapo.py").read()
    exec(source[source.index("@register"):], names)          # its imports start servers
    dapo = names["DAPORewardManager"]
    loop = asyncio.new_event_loop()
    manager = SimpleNamespace(loop=loop, tokenizer=SimpleNamespace(decode=lambda *_, **__: "4"), reward_router_address=None,
                              is_async_reward_score=False, compute_score=lambda **_: 1.0, overlong_buffer_cfg=zone,
                              max_resp_len=reward["max_resp_len"])
    scored = []
    for length in (2, L_MAX):
        mask = torch.arange(L_MAX) < length
        row = SimpleNamespace(batch={"responses": torch.zeros(L_MAX, dtype=torch.long), "attention_mask": mask},
                              non_tensor_batch={"data_source": "x", "reward_model": {"ground_truth": "4"}})
        scored.append(loop.run_until_complete(dapo.run_single(manager, [row])))
    loop.close()
    value = lambda found: found["reward_score"] if metric == "reward" else found["reward_extra_info"][metric]
    assert scored[0]["reward_score"] == 1 and scored[1]["reward_score"] == 0
    assert value(scored[0]) == value(scored[1]) == 1
    parts = torch.ones(2, 1)                                 # of the two responses, before the penalty
    rollout = SimpleNamespace(group_size=2)
    assert keep_signal([(rollout, ["x"], parts)], 1, lambda parts, G: parts.sum(1), last=False) is None


FORMS = ["exact", "math", "mine.py:plain", "mine.py:parts", "./mine.py:plain", "/tmp/mine.py:whole_batch", "exact mine.py:parts"]


@pytest.mark.parametrize("form", FORMS)
def test_the_verifier_is_named_as_what_the_user_writes(form, tmp_path, monkeypatch, capsys):
    """No compute_score is printed that could fail: the command names reward.py, a comment the verifier."""
    comments, _, given = printed(capsys, "--model_name_or_path", "m", "--dataset_name", "d.jsonl", "--verifier", *form.split())
    left, = [line for line in comments if line.startswith("# not in verl's configuration")]
    assert left.endswith(f"--dataset_name d.jsonl --verifier {form}") and given["reward.custom_reward_function.path"] == "reward.py"
    assert not any("import" in line or "def " in line for line in comments)


# ------------------------------------------------------------------------------------ the advantages

def estimate(verl, given, rewards, mask, G):
    token_rewards = torch.zeros(mask.shape, dtype=torch.float64)
    token_rewards[torch.arange(len(mask)), mask.sum(-1) - 1] = rewards
    function = verl.core.get_adv_estimator_fn(given["algorithm.adv_estimator"])
    more = {"norm_adv_by_std_in_grpo": given["algorithm.norm_adv_by_std_in_grpo"]} if "grpo" == given["algorithm.adv_estimator"] else {}
    index = [i // G for i in range(len(mask))]
    return function(token_level_rewards=token_rewards, response_mask=mask.double(), index=index,
                    config=SimpleNamespace(gamma=1.0), **more)[0]


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ADVANTAGE)
@pytest.mark.parametrize("scale", ["group", "none"])
def test_advantages_equal_verls_but_for_the_unbiased_deviation(verl, capsys, advantage, scale):
    G, rewards = 4, torch.tensor([1.0, 0, 1, 0, 0.5, 0, 0, 2, 1, 1, 1, 1], dtype=torch.float64)
    mask = make_batch()[3]
    if scale != "group" and advantage != "group":
        pytest.skip("this advantage does not read --scale_rewards, which is refused then")
    flags = ["--algorithm", "grpo", "--advantage", advantage, *(["--scale_rewards", scale] if scale != "group" else [])]
    comments, _, given = printed(capsys, *flags)
    theirs = estimate(verl, given, rewards, mask, G)
    n = mask.sum()
    whitened = (1 - 1 / n).sqrt()                            # population std over unbiased std
    ours = {"group": lambda: group_advantages(rewards, G, scale, unbiased=True)[:, None] * mask,
            "leave_one_out": lambda: leave_one_out(rewards, G)[:, None] * mask,
            "reinforce_plus_plus": lambda: whitened * reinforce_plus_plus(rewards, mask),
            "reinforce_plus_plus_baseline": lambda: whitened * reinforce_plus_plus(rewards, mask, G)}[advantage]()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    exact = advantage == "leave_one_out" or advantage == "group" and scale == "none"
    assert exact != any("G - 1" in line or "unbiased" in line for line in comments)
