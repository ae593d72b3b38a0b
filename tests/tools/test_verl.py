"""python tools/export.py verl against verl 0.9.1 itself: its configuration, its losses, its
advantages. python -m pytest tests/tools/test_verl.py

verl is installed with --no-deps. What it imports beside torch (ray, tensordict, ...) is replaced by
empty modules while core_algos.py and rollout_corr_helper.py load; the functions called here use
none.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import shlex
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import yaml

import session.learner
from advantages import at_last_token, estimate_advantages, gae, token_rewards, whiten
from exports import B, G, T, assert_same, drawn, gap, mini_batch, our_loss
from losses import OBJECTIVES, kl_penalty
from features.dynamic_sampling import keep_signal
from session.arguments import ALGORITHMS, parse
from reference import L_MAX
from tools import export
from tools.verl import ADVANTAGE, LOSS_MODE

VERL = importlib.util.find_spec("verl")
pytestmark = [pytest.mark.trl, pytest.mark.skipif(
    VERL is None, reason="verl is missing: pip install --no-deps verl==0.9.1")]
ABSENT = ("codetiming", "orjson", "ray", "tensordict", "omegaconf")  # packages that verl imports
ACTOR, CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module of stand-ins for each of ABSENT that is not installed."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(name=spec.name, MISSING="???", DictConfig=dict)     # omegaconf's

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module")
def verl():
    """verl's core_algos, its rollout_corr_helper as `correction`, and its configurations."""
    finder, before = Absent(), set(sys.modules)
    package = ModuleType("verl")                             # without __init__.py, which starts ray
    package.__path__ = list(VERL.submodule_search_locations)
    sys.meta_path.append(finder)
    sys.modules["verl"] = package
    try:
        yield SimpleNamespace(
            core=importlib.import_module("verl.trainer.ppo.core_algos"),
            correction=importlib.import_module("verl.trainer.ppo.rollout_corr_helper"),
            config=importlib.import_module("verl.workers.config"),
            optimizer=importlib.import_module("verl.workers.config.optimizer"))
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in (*ABSENT, "verl"):
                del sys.modules[name]


@cache
def source(path):
    return Path(VERL.submodule_search_locations[0], path).read_text()


@cache
def defaults(kind):
    return yaml.safe_load(source(f"trainer/config/_generated_{kind}.yaml"))


@pytest.fixture
def printed(capsys):
    """printed("--flags") is what the export prints: (comments, launch words, {key: value})."""
    def export_of(line):
        export.main(["verl", *line.split()])
        lines = capsys.readouterr().out.splitlines()
        comments = [line for line in lines if line.startswith("#")]
        words = shlex.split("\n".join(line for line in lines if line not in comments))
        keys = [word for word in words if "=" in word and not word.startswith("--")]
        given = dict(word.split("=", 1) for word in keys)
        return (comments, [word for word in words if word not in keys],
                {key: yaml.safe_load(value) for key, value in given.items()})
    return export_of


def missing(args):
    """What verl does not have of these settings."""
    return export.joined(export.verl, args)[1]


def number(value):
    """YAML reads 1e-06 as text; hydra and Python read it as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# ------------------------------------------------------------------------------------- the keys

FLAGS = {
    "beta": ["0.1"], "old_logp": ["sampler"], "dynamic_sampling": ["true"],
    "overlong_cache": ["0.2"], "use_peft": ["true"], "mismatch": ["token_truncate"],
    "mismatch_mask": ["seq", "geo"], "routing_replay": ["old", "rollout"],
    "entropy_coef": ["0.01"], "advantage": [*ADVANTAGE], "scale_rewards": ["none"],
    "micro_batch_size": ["4"], "bf16": ["true"], "save_steps": ["5"], "eval_steps": ["5"],
    "reduction": ["constant", "sequence-sum"], "kl_estimator": ["k2", "k3_st"],
    "lora_target_modules": ["q_proj v_proj"], "dual_clip": ["3"]}
KINDS = {bool: bool, int: (int, float), float: (int, float), list: list}
DATA = "--model_name_or_path some/model --dataset_name rows.jsonl "


@pytest.mark.parametrize("seed", range(80))
def test_every_key_is_one_of_verls(seed, printed):
    line = drawn(seed, DATA + f"--max_completion_length {L_MAX}", FLAGS)
    args = parse(line.split())
    comments, words, given = printed(line)
    if lacking := missing(args):
        assert comments == [f"# no equivalent in verl 0.9.1: it has no {', no '.join(lacking)}"]
        assert not given
        return
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    megatron = args.routing_replay != "none"
    assert megatron == ("--config-name=ppo_megatron_trainer.yaml" in words)
    config = defaults("ppo_megatron_trainer" if megatron else "ppo_trainer")
    for key, value in given.items():
        names, node = key.split("."), config
        if key.startswith("+"):
            manager = source("experimental/reward_loop/reward_manager/dapo.py")
            assert f'"{names[1]}"' in manager and names[-1] in manager, key
            continue
        for name in names:
            assert name in node, key
            node = node[name]
        if type(node) in KINDS:
            value = number(value) if isinstance(node, (int, float)) else value
            assert isinstance(value, KINDS[type(node)]), (key, value)
    for flag in ("use_peft", "micro_batch_size", "save_steps", "eval_steps", "beta",
                 "entropy_coef"):
        if f"--{flag}" in line:
            value = "16" if flag == "use_peft" else str(getattr(args, flag))
            assert value in map(str, given.values()), flag


def test_batches_are_counted_as_verl_counts_them(printed):
    """verl/trainer/ppo/v1/trainer_base.py multiplies the mini-batch by rollout.n, the batch by
    nothing."""
    _, _, given = printed("--prompts_per_step 16 --num_generations 4 --steps_per_generation 2")
    assert {"data.train_batch_size": 16, "actor_rollout_ref.rollout.n": 4,
            ACTOR + "ppo_mini_batch_size": 8,
            ACTOR + "ppo_micro_batch_size_per_gpu": 32}.items() <= given.items()
    assert ("ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n"
            in source("trainer/ppo/v1/trainer_base.py"))


@pytest.mark.parametrize("line", ["--stop END --plain", "--verifier exact mine.py:parts", *(
    f"--verifier {form}" for form in "exact math mine.py:plain mine.py:parts ./mine.py:plain "
                                     "/tmp/mine.py:whole_batch".split())])
def test_what_verl_does_not_have_and_the_verifier_are_named_as_the_user_writes_them(line, printed):
    """No compute_score is printed that could fail: the command names reward.py."""
    comments, _, given = printed(DATA + line)
    left, = [line for line in comments if line.startswith("# not in verl's configuration")]
    assert left.endswith(f"--dataset_name rows.jsonl {line}")
    assert given["reward.custom_reward_function.path"] == "reward.py"
    assert not any("import" in line or "def " in line for line in comments)


# ----------------------------------------------------------------------------------- the losses

def actor_config(verl, given):
    """verl's own ActorConfig from the printed overrides."""
    own = {key.removeprefix(ACTOR): number(value) for key, value in given.items()
           if key.startswith(ACTOR)}
    loss = {key.split(".")[1]: value for key, value in own.items()
            if key.startswith("policy_loss.")}
    top = {key: value for key, value in own.items() if "." not in key}
    return verl.config.ActorConfig(strategy="fsdp", rollout_n=8,
                                   policy_loss=verl.config.PolicyLossConfig(**loss), **top)


def verl_loss(verl, given, batch, size=B):
    """The loss as verl/workers/utils/losses.py adds it up, in micro-batches of `size` rows:
    policy, entropy, KL."""
    config = actor_config(verl, given)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=batch.mask.sum(),
                                    global_batch_size=B,
                                    loss_scale_factor=config.loss_scale_factor)
    added = 0
    for start in range(0, B, size):
        logp, old_logp, A, mask, rho = (x[start:start + size] for x in (*batch[:4], gap()))
        weights = None
        if kind := given.get(CORRECTION + "rollout_is"):
            weights, _ = verl.correction.compute_rollout_correction_weights(
                rho, mask, kind, number(given[CORRECTION + "rollout_is_threshold"]))
        if kind := given.get(CORRECTION + "rollout_rs"):
            mask, _ = verl.correction.compute_rollout_rejection_mask(
                rho, mask.long(), kind, given[CORRECTION + "rollout_rs_threshold"])
            mask = mask.bool()
        loss, _ = verl.core.get_policy_loss_fn(config.policy_loss.loss_mode)(
            old_log_prob=old_logp, log_prob=logp, advantages=A[:, None] * mask,
            response_mask=mask, loss_agg_mode=config.loss_agg_mode, config=config,
            rollout_is_weights=weights)
        mean = lambda x: verl.core.agg_loss(loss_mat=x, loss_mask=mask,
                                            loss_agg_mode=config.loss_agg_mode,
                                            **config.global_batch_info)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * mean(-0.3 * logp)
        if config.use_kl_loss:
            kl = verl.core.kl_penalty(logp, old_logp - 0.2, config.kl_loss_type)
            loss = loss + config.kl_loss_coef * mean(kl)
        added = added + loss
    return added


CASES = {
    "mismatch": ["token_truncate", "seq_truncate", "geo_truncate"], "mismatch_high": ["6"],
    "mismatch_mask": ["token", "seq", "geo"], "mismatch_mask_bounds": ["0.8 1.2"],
    "epsilon": ["0.1"],
    "epsilon_high": ["0.15"], "dual_clip": ["1.2", "3"], "beta": ["0.3"],
    "kl_estimator": ["k1", "k2", "k3_is", "k3_st"], "entropy_coef": ["0.05"],
    "reduction": ["sequence-mean", "token-mean", "constant", "sequence-sum"],
    "overlong_cache": ["0"]}


@pytest.mark.slow
def test_losses_under_the_printed_settings_are_equal_in_value_and_gradient(verl, printed):
    """Every objective with a counterpart at its own settings, then 200 random settings; two rows
    without a loss token, and three micro-batches or one."""
    compared = set()
    lines = [f"--algorithm {name} --overlong_cache 0" for name in ALGORITHMS]
    lines += [lines[[*ALGORITHMS].index("dapo_paper")] + " --reduction token-mean"]  # verl's own
    lines += [drawn(seed, "--advantage group", CASES) for seed in range(200)]
    for number, line in enumerate(lines):
        line += f" --max_completion_length {L_MAX} --micro_batch_size {(64, 4)[number % 2]}"
        args = parse(line.split())
        if missing(args):
            continue
        comments, _, given = printed(line)
        row = OBJECTIVES[args.objective]
        size = min(B, given[ACTOR + "ppo_micro_batch_size_per_gpu"])
        grows = any("geo_mean averages over a micro-batch" in line for line in comments)
        assert grows == (LOSS_MODE[row.ratio, row.clip] == "geo_mean")
        if grows:
            size = B
        batch = mini_batch(empty=(3, 8))
        assert_same(our_loss(args, batch), verl_loss(verl, given, batch, size), batch)
        compared.add(args.objective)
    assert compared == {name for name, row in OBJECTIVES.items()
                        if (row.ratio, row.clip) in LOSS_MODE}


@pytest.mark.parametrize("line, key, value, note", [
    ("--algorithm grpo", "clip_ratio_c", 3.0, "clip_ratio_c: verl's default of 3 is a dual clip"),
    ("--algorithm dppo", "clip_ratio_c", 3.0, "clip_ratio_c is the cap"),
    ("--algorithm cispo", "clip_ratio_low", 0.2, "clip_ratio_low: verl's default of 0.2"),
    ("--algorithm gspo", "loss_agg_mode", "token-mean", "loss_agg_mode: verl's default"),
    ("--algorithm dapo", "clip_ratio_high", 0.2, "verl reads clip_ratio_low and _high, 0.2 each")])
def test_a_comment_names_what_verls_default_would_change(line, key, value, note, printed):
    assert defaults("ppo_trainer")["actor_rollout_ref"]["actor"][key] == value
    comments, _, given = printed(line)
    assert any(note in comment for comment in comments) and given[ACTOR + key] != value


def test_every_weight_decays_in_verls_optimizer_as_in_ours(verl, printed):
    """The optimizer of verl's FSDP worker. Megatron, which is not installed, leaves out biases and
    norms: a comment says so."""
    line = "--weight_decay 0.1 --learning_rate 0.01"
    comments, _, given = printed(line)
    own = {key: number(given[f"{ACTOR}optim.{key}"])
           for key in ("lr", "betas", "weight_decay", "clip_grad")}
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    config = verl.optimizer.FSDPOptimizerConfig(**own)
    for optimizer in (verl.optimizer.build_optimizer(model.parameters(), config),
                      session.learner.make_optimizer(parse(line.split()), model)):
        group, = optimizer.param_groups
        assert (group["lr"], tuple(group["betas"])) == (0.01, (0.9, 0.95))
        assert group["weight_decay"] == 0.1 and len(group["params"]) == 4
    megatron, _, _ = printed("--weight_decay 0.1 --routing_replay old")
    said = [any(line.startswith("# weight decay: Megatron leaves out biases") for line in lines)
            for lines in (comments, megatron)]
    assert said == [False, True]


def test_groups_are_filtered_by_the_number_before_the_overlong_penalty(printed):
    """verl's DAPO reward manager notes acc and then subtracts the penalty. Here, too, right
    responses of unequal length have no signal (dynamic_sampling.keep_signal)."""
    _, _, given = printed("--algorithm dapo --max_completion_length 16 --overlong_cache 0.2")
    zone = "+reward.reward_kwargs.overlong_buffer_cfg."
    assert {"algorithm.filter_groups.metric": "acc", "+reward.reward_kwargs.max_resp_len": 16,
            f"{zone}enable": True, f"{zone}len": 3,
            f"{zone}penalty_factor": 1.0}.items() <= given.items()
    manager = source("experimental/reward_loop/reward_manager/dapo.py")
    lines = 'reward_extra_info["acc"] = score\n', "reward = score\n", "reward += overlong_reward\n"
    order = [manager.index(line) for line in lines]
    assert order == sorted(order)
    found = [(SimpleNamespace(group_size=2), ["x"], torch.ones(2, 1))]
    assert keep_signal(found, 1, lambda parts, G: parts.sum(1), False, None) is None


# ------------------------------------------------------------------------------- the advantages

@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("advantage, scale, lam", [
    *((name, "group", 1.0) for name in ADVANTAGE), ("group", "none", 1.0),
    *(("gae", "group", lam) for lam in (0.0, 0.5, 0.95, 1.0))])
def test_advantages_with_the_kl_in_the_reward_and_without_are_verls(
        verl, printed, advantage, scale, lam, beta):
    """But for the deviation, which is unbiased there. Only the advantage "group" reads
    --scale_rewards. verl's critic is another; its gae whitens and skips what a tool inserted."""
    rng = torch.Generator().manual_seed(1)
    mask = torch.arange(T) < torch.tensor([10, 3, 9, 8, 1, 7, 10, 5, 8, 6, 2, 6])[:, None]  # [B, T]
    if advantage == "gae":                                   # no row is empty: verl knows none
        mask = mask & (torch.arange(T) % 5 != 2)
    rewards = torch.randn(B, generator=rng).double()                                # [B]
    rewards[-G:] = 1                                         # a group without a signal
    logp, ref_logp, values = torch.randn(3, B, T, generator=rng).double()           # [B, T] each
    flags = f"--advantage {'group' if advantage == 'gae' else advantage}"
    flags += f" --scale_rewards {scale}" if scale == "none" else ""
    if beta:
        flags += f" --beta {beta}"
        flags += " --use_kl_in_reward" if advantage != "reinforce_plus_plus" else ""
    comments, _, given = printed(f"--algorithm grpo {flags}")
    kl = kl_penalty(logp, ref_logp, mask, "k1") if beta else None                   # [B, T]
    theirs = at_last_token(rewards, mask)                                           # [B, T]
    if beta:
        assert given["algorithm.use_kl_in_reward"] and f"{ACTOR}use_kl_loss" not in given
        penalty = verl.core.kl_penalty(logp, ref_logp, given["algorithm.kl_penalty"])
        theirs = theirs - given["algorithm.kl_ctrl.kl_coef"] * penalty * mask       # [B, T]
    ours = token_rewards(rewards, mask, kl, beta)                                   # [B, T]
    torch.testing.assert_close(ours[mask], theirs[mask])
    found = estimate_advantages(advantage, rewards, G, scale, mask=mask, old_logp=logp, kl=kl,
                                beta=beta, values=values, lam=lam)
    if advantage == "gae":
        want, targets = verl.core.compute_gae_advantage_return(theirs, values, mask.double(), 1.0,
                                                               lam)
        torch.testing.assert_close(gae(ours, values, mask, lam=lam)[1][mask], targets[mask])
        found = whiten(found, mask)
    else:
        estimator, options = given["algorithm.adv_estimator"], {}
        if estimator == "grpo":
            options["norm_adv_by_std_in_grpo"] = given["algorithm.norm_adv_by_std_in_grpo"]
        want, *_ = verl.core.get_adv_estimator_fn(estimator)(
            token_level_rewards=theirs, response_mask=mask.double(),
            index=[i // G for i in range(B)], config=SimpleNamespace(gamma=1.0), **options)
        exact = advantage == "leave_one_out" or scale == "none"
        assert exact != any("G - 1" in line or "unbiased" in line for line in comments)
    found = found if found.dim() == 2 else found[:, None] * mask                    # [B, T]
    unbiased = {("group", "group"): (1 - 1 / G) ** 0.5, ("group", "none"): 1.0,
                ("leave_one_out", "group"): 1.0}.get(
        (advantage, scale), (1 - 1 / mask.sum()).sqrt())     # population std over unbiased std
    torch.testing.assert_close(found[mask] * unbiased, want[mask], rtol=1e-5, atol=1e-5)
