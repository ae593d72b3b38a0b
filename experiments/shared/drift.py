"""Rollouts and off-policy updates to measure on: train.py's own steps, taken one at a time.

    Lab         a policy, its optimizer and its task; rollout(), minibatches(), update(), score(),
                logp(); twin() to branch off
    journey()   GSPO's training for some rollout batches, with GRPO's updates from the same policies
                on the same mini-batches
    lengths()   answers of 7 to 997 tokens, under the policy that wrote them and after three updates
                on other answers

The policies of lengths() know the form of the verbose task and little of its sums (150 supervised
steps, width 64, 2 layers): a policy that solves sums of 43 terms takes an hour on a CPU, and ratios
do not need one. Their reward is the share of right characters, which every answer has some of.
journey() is the default task and policy. Both are kept under runs/claims/.
"""

import copy
import json
import shutil

import torch

import train
from advantages import group_advantages
from .claim import RUNS, say
from moe import TinyMoE
from plumbing.data import running_sum
from plumbing.data import tasks
from plumbing.model import cold_start
from plumbing.model import policy
from plumbing.run import checkpoints
from plumbing.run.arguments import parse
from plumbing.speed.fast import response_logp, sample
from ratios import cross_entropy
from rollout import Rollout

GRPO = ("--algorithm", "grpo", "--epsilon_high", "0.27")     # the band of GSPO's own baseline, §5.1
REPLAY = ("--routing_replay", "old")                        # R2
TIS = ("--mismatch", "token_truncate", "--mismatch_high", "2")
TERMS = (1, 2, 4, 8, 16, 32, 43)          # of verbose sums: answers of 7, 13, 25, 49, 97, 193, 259
LONGEST = 166                             # never taught: answers of up to 997
GROUPS = 16
LONG = ("--min_terms 1 --max_terms 43 --verbose_answers --hidden_size 64 "
        "--num_hidden_layers 2").split()


class Lab:
    """The state of one run of train.py, whose steps can be called one at a time.

    flags: train.py's; loaded: (task, policy, tokenizer) instead of the built-in ones.
    """

    def __init__(self, seed, *flags, loaded=None):
        self.flags = ["--seed", str(seed), "--device", "cpu", *flags]
        self.args = parse(self.flags)
        self.task = loaded[0] if loaded else tasks.from_arguments(self.args)
        cpu = torch.device("cpu")
        loaded = loaded[1:] if loaded else policy.load_policy(self.args, self.task, cpu)
        self.policy, self.tokenizer = loaded
        self.start()

    def start(self):
        """Make a new learner (optimizer, schedule, stream) for the policy."""
        self.learner = train.make_learner(self.args, self.task, self.policy, self.tokenizer,
                                          torch.device("cpu"))

    def twin(self, *flags):
        """A copy of the policy, the optimizer and the schedule, with some flags changed.

        What the twin does changes nothing here.
        """
        other = copy.copy(self)
        other.args = parse([*self.flags, *flags])
        other.policy = copy.deepcopy(self.policy)
        other.start()
        mine = self.learner
        theirs = other.learner
        theirs.optimizer.load_state_dict(copy.deepcopy(mine.optimizer.state_dict()))
        theirs.schedule.load_state_dict(mine.schedule.state_dict())
        return other

    def rollout(self, step, routes=False):
        """One batch, sampled, verified and scored -> train.Batch with advantages. routes: keep what
        the routers chose, too."""
        learner = self.learner
        rollout, problems, parts, _ = train.collect(self.args, learner, self.task, step)
        old = self.score(rollout, routes)
        advantages = group_advantages(parts[:, 0], self.args.num_generations)          # [B]
        return train.Batch(rollout, problems, parts, old.logp, step=step, advantages=advantages,
                           routes=old.routes, passes=getattr(old, "passes", None))

    def minibatches(self, step, batch):
        """The batch as train.py cuts it: train.Batch of whole groups."""
        return train.mini_batches(self.args, self.task, batch, step)

    def update(self, mini):
        """One optimizer step. -> its stats: clip shares and ratios as they were before it."""
        return train.update(self.args, self.learner, mini)

    def score(self, rollout, routes=False):
        """Scores of a rollout as the policy is now. routes: keep what the routers chose, too."""
        self.learner.has_routes = routes
        return self.learner.score(rollout)

    def logp(self, rollout):
        """log π [B, T] as the policy is now."""
        return self.score(rollout).logp


STATS = ("clip_low", "clip_high", "clip_signal", "log_w_var", "log_s_var", "ratio_max")


def journey(seed, batches):
    """Train with GSPO. At every rollout batch also make GRPO's four updates from the same policy,
    optimizer state and mini-batches.

    -> a list of {step, cross_entropy [B], signal (share of rows with A != 0), gspo and grpo (stats
    per mini-batch), last: {name: log w of the last mini-batch's tokens, log s of its answers,
    before the update on it}}
    """
    file = RUNS / f"journey-{batches}-{seed}.json"
    if file.is_file():
        return json.loads(file.read_text())
    lab = Lab(seed, "--steps", str(batches))
    records = []
    for step in range(1, batches + 1):
        batch = lab.rollout(step)
        labs = {"grpo": lab.twin(*GRPO), "gspo": lab}
        record = dict(step=step, last={}, signal=(batch.advantages != 0).float().mean().item(),
                      cross_entropy=cross_entropy(batch.old_logp, batch.rollout.mask).tolist())
        for name, one in labs.items():
            stats = []
            for mini in one.minibatches(step, batch):
                if len(stats) == one.args.steps_per_generation - 1:
                    mask = mini.rollout.mask                                         # [B, T]
                    log_w = one.logp(mini.rollout) - mini.old_logp                   # [B, T]
                    log_s = log_w.sum(-1) / mask.sum(-1)                             # [B]
                    record["last"][name] = dict(log_w=log_w[mask].tolist(),
                                                log_s=log_s.tolist())
                found = one.update(mini)
                stats.append({key: found[key] for key in STATS})
            record[name] = stats
        records.append(record)
    RUNS.mkdir(parents=True, exist_ok=True)
    checkpoints.write_text(file, json.dumps(records))
    say(f"seed {seed}: {batches} rollout batches followed")
    return records


# ----------------------------------------------------------------------------------- long answers

def lengths(seed, longest=False):
    """Answers of seven lengths, 16 groups of 8 of each; longest: an eighth that was never taught.

    -> (old policy, new policy, {terms: (Rollout, batch)})

    batch: old_logp, new_logp [B, T], advantages [B]. The new policy has taken three updates on
    other responses, which is the state before a fourth mini-batch. Two rollout batches before that
    have warmed up the optimizer.
    """
    folder = RUNS / f"lengths-{LONGEST}-{seed}"
    if not (folder / "answers.pt").is_file():
        make_lengths(seed, folder)
    old, new = (TinyMoE.from_pretrained(folder / name) for name in ("old", "new"))
    answers = torch.load(folder / "answers.pt", weights_only=True)
    return old, new, {n: (with_texts(a["rollout"]), a["batch"])
                      for n, a in answers.items() if n in TERMS or longest}


def with_texts(tensors):
    """A cached rollout. Its texts were not saved and are not needed."""
    return Rollout(**tensors, texts=[""] * len(tensors["mask"]), group_size=8)


@torch.enable_grad()                     # whoever asks may be measuring without gradients
def make_lengths(seed, folder):
    args = parse(["--seed", str(seed), "--cold_start_steps", "150", *LONG])
    task = tasks.from_arguments(args)
    tokenizer = running_sum.builtin_tokenizer()
    terms = lambda problem: sum(c.isdigit() for c in problem.prompt)
    by_length = {n: [p for p in task.train if terms(p) == n] for n in TERMS}
    task.train = [p for found in by_length.values() for p in (found * 200)[:200]]    # each as often
    task.verify = share_right
    task.sizes = (len(task.train),)
    torch.manual_seed(seed)
    cold = TinyMoE(cold_start.tiny_config(args, tokenizer))
    before = cold_start.BATCH
    cold_start.BATCH = 8
    cold_start.supervise(cold, tokenizer, task, args)
    cold_start.BATCH = before
    say(f"seed {seed}: a policy for long answers")

    flags = ("--prompts_per_step 16 --steps 40 --lr_scheduler_type constant_with_warmup "
             "--max_completion_length 259").split()
    lab = Lab(seed, *LONG, *flags, loaded=(task, cold.eval(), tokenizer))
    for step in (1, 2, 3):
        if step == 3:
            old = copy.deepcopy(lab.policy)
        minis = list(lab.minibatches(step, lab.rollout(step)))
        for mini in minis[:3] if step == 3 else minis:
            lab.update(mini)
    by_length[LONGEST] = running_sum.running_sum(LONGEST, LONGEST, verbose=True).train
    answers = {n: measured(lab, old, (found * GROUPS)[:GROUPS], seed)
               for n, found in by_length.items()}
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    old.save_pretrained(partial / "old")
    lab.policy.save_pretrained(partial / "new")
    torch.save(answers, partial / "answers.pt")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    say(f"seed {seed}: answers of {len(answers)} lengths before and after three updates")


@torch.no_grad()
def measured(lab, old, problems, seed):
    """Eight responses of the old policy to each problem, with log-probs under both policies."""
    width = 1 + len(problems[0].answer)
    uniforms = torch.rand(len(problems) * 8, width, generator=torch.Generator().manual_seed(seed))
    rollout = sample(old, lab.tokenizer, [p.prompt for p in problems], 8, width, uniforms=uniforms)
    rewards = torch.tensor([share_right(text, problems[i // 8])
                            for i, text in enumerate(rollout.texts)])                # [B]
    old_logp, new_logp = (response_logp(model, rollout).logp
                          for model in (old, lab.policy))                            # [B, T]
    tensors = {k: v for k, v in vars(rollout).items() if isinstance(v, torch.Tensor)}
    batch = {"old_logp": old_logp, "new_logp": new_logp, "advantages": group_advantages(rewards, 8)}
    return {"rollout": tensors, "batch": batch}


def share_right(response, problem):
    """The share of the characters of a response that are right, at most 1."""
    right = sum(a == b for a, b in zip(response, problem.answer))
    return right / max(len(problem.answer), len(response))


def variances(batch, mask):
    """(Var log w over the loss tokens, Var log s over the answers, mean of 1/L) of a rollout."""
    log_w = batch["new_logp"] - batch["old_logp"]                                    # [B, T]
    log_s = log_w.sum(-1) / mask.sum(-1)                                             # [B]
    lengths = mask.sum(-1)                                                           # [B]
    variances = (x.var(unbiased=False).item() for x in (log_w[mask], log_s))
    return *variances, (1 / lengths).mean().item()
