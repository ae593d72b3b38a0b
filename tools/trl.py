"""A script for TRL 1.16 that is equivalent to a run, or the reasons why there is none.

tests/concepts/test_losses_against_trl.py gives the printed trl.GRPOConfig to TRL and compares the
losses; tests/tools/test_trl.py runs the script. Settings that TRL does not have are printed as
comments.
"""

import ast
import shlex
from pathlib import Path
from pprint import pformat

import torch

from advantages import ADVANTAGES, group_advantages
from losses import OBJECTIVES
from plumbing.data.datafiles import ANSWER_COLUMNS, PROMPT_COLUMNS
from plumbing.data.tasks import text_or_file, with_length_limit
from plumbing.engines.vllm import GPU_SHARE
from plumbing.run import band
from plumbing.run.advice import command
from plumbing.run.arguments import as_words

# reductions that TRL has for rows of losses.OBJECTIVES with PPO's clip
TRL_REDUCTION = {"sequence-mean": "grpo", "token-mean": "dapo", "constant": "dr_grpo",
                 "sequence-sum": "luspo"}
# loss_type of the other rows, which have one reduction each, by their ratio and clip
TRL_CLIP = {("token", "weight"): "cispo", ("token", "sigmoid"): "sapo",
            ("product", "gamma"): "vespo"}
TRL_CONSTANTS = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg",
                 "k_positive": "vespo_k_pos", "lambda_positive": "vespo_lambda_pos",
                 "k_negative": "vespo_k_neg", "lambda_negative": "vespo_lambda_neg"}
TRL_LEVEL = {"token": "token", "seq": "sequence"}             # level of the mismatch weights
# flags that both exports express, or that have no effect in a run that `missing` accepts
IN_BOTH = set(
    "algorithm epsilon epsilon_high objective_constants reduction dual_clip off_policy_mask "
    "advantage advantage_clip scale_rewards length_penalty overlong_cache dynamic_sampling "
    "entropy_quantile beta kl_estimator entropy_coef positive_example_nll_weight "
    "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps mask_truncated_completions "
    "teacher_model_name_or_path teacher_model_kind teacher_update_rate self_distillation "
    "self_distillation_hint hint_template distillation_coef old_logp sampler_dtype mismatch "
    "mismatch_high mismatch_mask mismatch_mask_bounds routing_replay router_aux_loss_coef "
    "model_name_or_path dataset_name columns verifier system_prompt prompt_template "
    "max_prompt_length stage2_step steps prompts_per_step num_generations steps_per_generation "
    "num_iterations "
    "micro_batch_size max_completion_length temperature top_p top_k learning_rate "
    "lr_scheduler_type warmup_steps max_grad_norm weight_decay gradient_checkpointing bf16 fp16 "
    "output_dir save_steps save_tokens seed print_trl_config print_verl_config".split())
IN_CONFIG = IN_BOTH | set("chat_template device report_to reward_weights".split())
LORA = set("use_peft lora_r lora_alpha lora_target_modules".split())     # GRPOTrainer(peft_config=)
ENGINE = {"sampler", "vllm_gpu_memory_utilization"}


def trl_loss(row, reduction=None):
    """(loss_type, importance_sampling_level) of a row of losses.OBJECTIVES with this reduction
    (None: its own), or None if TRL does not have it."""
    reduction = reduction or row.reduction
    if row.clip == "min" and row.ratio in ("token", "sequence") and reduction in TRL_REDUCTION:
        return TRL_REDUCTION[reduction], row.ratio
    if (row.ratio, row.clip) in TRL_CLIP and reduction == row.reduction:
        return TRL_CLIP[row.ratio, row.clip], "token"
    return None


def missing(args):
    """The settings of this run that trl.GRPOConfig does not have, as a list of names."""
    row = OBJECTIVES[args.objective]
    reductions = TRL_REDUCTION if row.clip == "min" else (row.reduction,)
    sequence = row.ratio == "sequence"
    return [name for name, on in (
        (f"objective {args.objective}", not trl_loss(row)),
        (f"advantage {args.advantage}",
         ADVANTAGES[args.advantage].function is not group_advantages),
        (f"reduction {args.reduction} for {args.objective}", args.reduction not in reductions),
        ("lower bound on CISPO's weight", row.clip == "weight" and args.epsilon < 1),
        ("dual clip inside the clip range",
         args.dual_clip and args.dual_clip < 1 + args.epsilon_high),
        (f"KL estimator {args.kl_estimator}", args.beta and (
            args.kl_estimator not in ("k3", "k3_is") or sequence and args.kl_estimator == "k3_is")),
        ("distillation beside another advantage (DistillationTrainer has it alone)",
         args.distillation_coef),
        ("overlong penalty (it is a reward function: trl.rewards)", args.overlong_cache),
        ("dynamic sampling", args.dynamic_sampling),
        ("sampler's log-probs as old ones", args.old_logp == "sampler"),
        ("rounded sampler", args.sampler_dtype != str(args.half or torch.float32)[6:]),
        ("mismatch weights of this kind",
         (args.mismatch or args.mismatch_mask) and not vllm_options(args)),
        ("routing replay", args.routing_replay != "none"),
        ("advantages over the mean", args.scale_rewards == "mean"),
        ("quantile of the rollout batch's entropies (top_entropy_quantile is the micro-batch's)",
         args.entropy_quantile),
        ("off-policy mask against recomputed log-probs beside mismatch weights",
         args.off_policy_mask and (args.mismatch or args.mismatch_mask)),
    ) if on] + only_here(args)


def only_here(args):
    """The settings of this run that neither TRL nor verl has, as a list of names."""
    return [name for name, on in (
        ("clip range that follows log s (--epsilon auto)", band.is_auto(args)),
        ("clip of the advantages", args.advantage_clip is not None),
        ("log-probs renormalized over the tokens that top-p and top-k keep",
         args.top_p < 1 or args.top_k),
        ("length penalty times the pass rate", args.length_penalty),
        ("likelihood of right responses", args.positive_example_nll_weight),
        ("history resampling", args.history_resampling),
        ("second stage", args.stage2_step),
        ("load-balancing loss over responses alone", args.router_aux_loss_coef),
    ) if on]


def vllm_options(args):
    """The fields for mismatch weights, which TRL has only with vLLM; {} without an equivalent."""
    level, _, _ = (args.mismatch or "").partition("_")
    if level not in TRL_LEVEL or OBJECTIVES[args.objective].clip == "gamma":
        return {}                                            # TRL's enters VESPO's own weight
    mode = f"{TRL_LEVEL[level]}_truncate"
    low = None
    high = args.mismatch_high
    if args.mismatch_mask:                                   # TRL: the weight, 0 out of bounds
        mode = f"{TRL_LEVEL[level]}_mask"
        low, high = args.mismatch_mask_bounds
        if args.mismatch_mask != level or high > args.mismatch_high:
            return {}
    prefix = "vllm_importance_sampling"
    return {"use_vllm": True, f"{prefix}_mode": mode, f"{prefix}_clip_min": low,
            f"{prefix}_clip_max": high}


def beside(args):
    """Lines about settings of this run that the script does not have."""
    notes = []
    if args.stop:
        notes.append(f"stop strings {args.stop!r}: under vLLM generation_kwargs={{'stop': ...}}; "
                     "transformers' generate would need the tokenizer, which TRL does not give it")
    if args.reward_weights and not weights_of(args):
        notes.append(f"--reward_weights {args.reward_weights!r} has one number per part of the "
                     "reward, TRL one per function: split the function that returns the parts")
    known = IN_CONFIG | (LORA if args.use_peft else set()) | {"stop"}
    known |= ENGINE if args.sampler == "vllm" else set()
    others = other_flags(args, known)
    return notes + ([f"not in TRL's script: {' '.join(others)}"] if others else [])


def weights_of(args):
    """reward_weights for GRPOConfig, one per reward function; None if that cannot be."""
    whole = from_project(args) or len(args.reward_weights) != max(1, len(args.verifier))
    return None if whole else args.reward_weights


def from_project(args):
    """Whether the script takes prompts and rewards from this project: the built-in task, a problem
    generator, and a verifier that reads the data row."""
    name = args.dataset_name or ""
    rows = any(takes(verifier, "problem") for verifier in args.verifier)
    return not name or name.startswith("reasoning_gym:") or rows


def takes(verifier, parameter):
    """Whether the function of a verifier FILE.py:FUNCTION has a parameter of this name, as far as
    the text of the file shows it."""
    path, _, name = verifier.rpartition(":")
    if not Path(path).is_file():
        return False
    functions = [node for node in ast.walk(ast.parse(Path(path).read_text()))
                 if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name]
    return any(parameter == a.arg for node in functions
               for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def other_flags(args, known):
    """The flags that this run was given and that are not in `known`, as on a command line."""
    return [as_words(name, value) for name, value in args.given.items() if name not in known]


def trl_config(args):
    """The equivalent `trl.GRPOConfig(...)` as text, or one line that says why there is none."""
    lacks = missing(args)
    if lacks:
        return f"no equivalent in trl.GRPOConfig: it has no {', no '.join(lacks)}"
    return call("trl.GRPOConfig", config_of(args))


def call(function, arguments):
    """`function(key=value, ...)` as text, a line per argument."""
    lines = [f"    {key}={value!r}," for key, value in arguments.items() if value is not None]
    return "\n".join([f"{function}(", *lines, ")"])


def config_of(args):
    """The fields of trl.GRPOConfig of a run that TRL can express; None: TRL's default."""
    args = with_length_limit(args)
    row = OBJECTIVES[args.objective]
    loss_type, level = trl_loss(row, args.reduction)
    rows, accumulated = batch_rows(args)
    if loss_type == "dapo" and accumulated == 1:
        loss_type = "bnpo"                                   # the mini-batch's own tokens, exactly
    config = dict(
        loss_type=loss_type, importance_sampling_level=level, scale_rewards=args.scale_rewards,
        epsilon=args.epsilon, epsilon_high=args.epsilon_high, delta=args.dual_clip, beta=args.beta,
        use_bias_correction_kl=args.kl_estimator == "k3_is", entropy_coef=args.entropy_coef,
        router_aux_loss_coef=0.0, num_generations=args.num_generations,
        temperature=args.temperature, top_p=1.0, top_k=0,
        off_policy_mask_threshold=args.off_policy_mask,
        max_completion_length=args.max_completion_length,
        learning_rate=args.learning_rate, lr_scheduler_type=args.lr_scheduler_type,
        warmup_steps=args.warmup_steps, max_grad_norm=args.max_grad_norm,
        weight_decay=args.weight_decay, optim="adamw_torch_fused", adam_beta1=0.9, adam_beta2=0.95,
        # TRL counts its steps_per_generation in micro-batches
        steps_per_generation=args.steps_per_generation * accumulated,
        per_device_train_batch_size=rows, gradient_accumulation_steps=accumulated,
        num_iterations=args.num_iterations,
        max_steps=args.steps * args.updates_per_batch, bf16=args.bf16, fp16=args.fp16,
        reward_weights=weights_of(args) or None,
        gradient_checkpointing=args.gradient_checkpointing, seed=args.seed)
    config |= {TRL_CONSTANTS[name]: value for name, value in args.constants.items()}
    if row.clip == "weight":
        config["epsilon_high"] = 1 + args.epsilon_high       # TRL's cap is absolute
    if args.mask_truncated_completions:
        config["mask_truncated_completions"] = True
    if args.sync_ref_model:                                  # TRL counts optimizer steps
        config |= dict(sync_ref_model=True, ref_model_mixup_alpha=args.ref_model_mixup_alpha,
                       ref_model_sync_steps=args.ref_model_sync_steps * args.updates_per_batch)
    return config | of_engine(args) | vllm_options(args)


def of_engine(args):
    """The fields of --sampler vllm."""
    if args.sampler != "vllm":
        return {}
    fields = dict(use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True,
                  vllm_gpu_memory_utilization=args.vllm_gpu_memory_utilization or GPU_SHARE)
    if not args.mismatch and not args.mismatch_mask:         # TRL's default drops responses whose
        fields["vllm_importance_sampling_correction"] = False     # product of ratios is above 3
    return fields


def batch_rows(args):
    """(responses per forward and backward pass, such passes per optimizer step): the largest size
    up to --micro_batch_size that divides the mini-batch, as TRL needs it."""
    rows = args.prompts_per_step * args.num_generations // args.steps_per_generation
    micro = min(args.micro_batch_size or rows, rows)
    micro = next(n for n in range(micro, 0, -1) if rows % n == 0)
    return micro, rows // micro


def differences(args):
    """Lines about what TRL does otherwise under these settings, without an error."""
    loss_type, _ = trl_loss(OBJECTIVES[args.objective], args.reduction)
    accumulated = batch_rows(args)[1]
    notes = []
    if args.scale_rewards != "none":
        notes.append("TRL divides by the standard deviation with G - 1: its advantages are smaller")
    averaged = loss_type in ("cispo", "vespo") or loss_type == "dapo" and accumulated > 1
    if averaged and args.steps_per_generation > 1:
        notes.append("TRL divides by the rollout batch's mean number of tokens in a mini-batch")
    if args.num_iterations > 1:
        notes.append("TRL uses a batch again in the same order; train.py draws a new one")
    if args.steps_per_generation > 1:
        notes.append("TRL shuffles responses into mini-batches; train.py keeps groups together")
    if args.sampler == "vllm":
        notes.append("vLLM in TRL: pip install trl[vllm], and a GPU")
    if args.warmup_steps:
        notes.append("TRL's warm-up starts at learning rate 0, ours one step later")
    if not from_project(args) and not args.test_dataset_name:
        notes.append("train.py holds out a test split if the data has none; here all rows train")
    return notes


# ------------------------------------------------------------------------------------- the script

TEXTS = '''def texts(completions):
    return [c if isinstance(c, str) else c[-1]["content"] for c in completions]
'''
REWARDS = {"math": '''def right_answer(answer):
    """A reference answer as math-verify reads it."""
    if "$" in answer or "boxed" in answer:
        return parse(answer)
    return parse(f"${answer}$") or parse(answer)


def math(completions, answer, **columns):
    return [float(verify(right_answer(right), parse(text)))
            for text, right in zip(texts(completions), answer)]
''', "exact": '''def exact(completions, answer, **columns):
    return [float(text.strip() == right.strip()) for text, right in zip(texts(completions), answer)]
'''}
OWN = '''{name}_of_file = runpy.run_path({path!r})[{name!r}]


def {name}(completions, answer, **columns):
    values = [{name}_of_file(text, right) for text, right in zip(texts(completions), answer)]
    return [sum(value.values()) if isinstance(value, dict) else float(value) for value in values]
'''
OWN_BATCH = '''{name}_of_file = runpy.run_path({path!r})[{name!r}]


def {name}(prompts, completions, **columns):
    return {name}_of_file(prompts=texts(prompts), completions=texts(completions), **columns)
'''
PROJECT = '''args = parse({flags})
task = from_arguments(args)
rows = [{{"prompt": problem.prompt, "index": i}} for i, problem in enumerate(task.train)]
dataset = Dataset.from_list(rows)


def reward(completions, index, **columns):
    problems = [task.train[i] for i in index]
    return task.total(task.judge(texts(completions), problems)).tolist()
'''
DATA = '''dataset = load_dataset({source}split="train")
columns = dataset.column_names
prompt_column = next(name for name in {prompts} if name in columns)
answer_column = next(name for name in {answers} if name in columns)


def as_trl_reads_it(row):
    """The columns prompt and answer: text, or messages where the tokenizer has a chat template."""
    text = {template}.replace("{{prompt}}", str(row[prompt_column]))
    answer = str(row[answer_column]).rpartition("####")[2].strip()
    system = {system}
    if {chat}:
        before = [{{"role": "system", "content": system}}] if system else []
        return {{"prompt": [*before, {{"role": "user", "content": text}}], "answer": answer}}
    return {{"prompt": f"{{system}}\\n\\n{{text}}" if system else text, "answer": answer}}


def fits(row):
    if isinstance(row["prompt"], str):
        return len(tokenizer(row["prompt"])["input_ids"]) <= {longest}
    ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
    return len(ids) <= {longest}


dataset = dataset.map(as_trl_reads_it, load_from_cache_file=False)
dataset = dataset.filter(fits, load_from_cache_file=False)
'''


def trl_script(args):
    """A Python script that trains with TRL as this run would; or one line that says why there is
    none."""
    lacks = missing(args)
    if lacks:
        return f"no equivalent in trl.GRPOConfig: it has no {', no '.join(lacks)}"
    config = config_of(args)
    imports, data, functions = from_task(args) if from_project(args) else from_file(args)
    where = repr(args.model_name_or_path)
    if not args.model_name_or_path:
        imports = ["import sys", *imports]
        where = "sys.argv[1]"
    trainer = {"reward_funcs": Code(f"[{', '.join(functions)}]"), "args": Code("config"),
               "train_dataset": Code("dataset"), "processing_class": Code("tokenizer")}
    if args.use_peft:
        imports.append("from peft import LoraConfig")
        targets = args.lora_target_modules or "all-linear"
        trainer["peft_config"] = Code(f"LoraConfig(r={args.lora_r}, lora_alpha={args.lora_alpha}, "
                                      f"target_modules={targets!r}, lora_dropout=0.0,\n"
                                      f"                           task_type='CAUSAL_LM')")
    arguments = call("trl.GRPOTrainer", trainer).replace("(\n", "(\n    MODEL,\n", 1)
    checkpoint = "" if args.model_name_or_path else "   # a checkpoint's folder"
    return "\n".join([
        f'"""{args.algorithm} by TRL 1.16 (pip install trl==1.16.0), with the settings of a run of '
        'train.py."""',
        *[f"\n{line}" for line in imports if line.startswith("import ")],
        "\nimport trl",
        *sorted(line for line in [*imports, "from transformers import AutoTokenizer"]
                if line.startswith("from ")), "",
        f"MODEL = {where}{checkpoint}",
        'tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")\n\n',
        f"{TEXTS}\n", f"{data}\n",
        *(f"# {note}" for note in [*differences(args), *beside(args)]),
        f"config = {call('trl.GRPOConfig', config | of_run(args))}",
        f"trainer = {arguments}", "trainer.train()", "trainer.save_model()"])


class Code(str):
    """A name or an expression, which is printed without quotes."""

    __repr__ = str.__str__


def of_run(args):
    """The fields of GRPOConfig that are about the run, not about what it computes."""
    saving = {"save_strategy": "no"}
    if args.save_steps:
        saving = {"save_strategy": "steps",
                  "save_steps": args.save_steps * args.updates_per_batch}
    return {"output_dir": args.output_dir or f"runs/trl-{args.algorithm}",
            "report_to": args.report_to or "none", "logging_steps": args.updates_per_batch,
            "use_cpu": True if args.device == "cpu" else None,
            "model_init_kwargs": {"dtype": "float32"}} | saving


def from_task(args):
    """(imports, lines, names of reward functions) for a task whose code is in this project."""
    imports = ["from datasets import Dataset",
               "from plumbing.data.tasks import from_arguments     # run in train.py's folder",
               "from plumbing.run.arguments import parse"]
    flags = pformat(shlex.split(command(args))[2:], width=88, compact=True)
    return imports, PROJECT.format(flags=flags.replace("\n", "\n             ")), ["reward"]


def from_file(args):
    """(imports, lines, names of reward functions) for a data file or a hub id."""
    kind = {".jsonl": "json"}.get(Path(args.dataset_name).suffix,
                                  Path(args.dataset_name).suffix[1:])
    source = f"{args.dataset_name!r}, "
    if kind in ("json", "csv", "parquet"):
        source = f"{kind!r}, data_files={args.dataset_name!r}, "
    elif args.dataset_name == "openai/gsm8k":
        source += "'main', "
    columns = [(name,) for name in args.columns] or [PROMPT_COLUMNS, ANSWER_COLUMNS]
    data = DATA.format(
        source=source, prompts=columns[0], answers=columns[1], longest=args.max_prompt_length,
        template=repr(text_or_file(args, "prompt_template") or "{prompt}"),
        system=repr(text_or_file(args, "system_prompt")),
        chat="tokenizer.chat_template" if args.chat_template else False)
    imports = ["from datasets import load_dataset"]
    functions = []
    bodies = []
    for verifier in args.verifier or ["math"]:
        path, _, name = verifier.rpartition(":")
        if verifier == "math":
            imports.append("from math_verify import parse, verify")
        if verifier in REWARDS:
            bodies.append(REWARDS[verifier])
        else:
            imports.append("import runpy")
            body = OWN_BATCH if takes(verifier, "completions") else OWN
            bodies.append(body.format(path=path, name=name))
        functions.append(name or verifier)
    return imports, data + "".join(f"\n\n{body}" for body in bodies), functions
