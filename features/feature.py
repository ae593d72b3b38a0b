"""What a run may add: the hooks at which a feature enters, and how a flag is described.

A feature is one file of this folder: its flags in a frozen dataclass, and a class with the hooks it
needs. features/__init__.py lists it in two lines. Without the file and its two lines the flags are
unknown, and runs without them are the same to the last bit. Where the hooks stand in the loop:
.github/CONTRIBUTING.md.

Imports: torch and the concept files that are quick to import. What needs transformers, such as a
second policy, is reached through the Learner that a feature is made with (session/learner.py),
because train.py --help imports this folder. A feature does not import another one, and reads what
another one adds only as the parameter of an advantage; where it looks at another's flag, it takes
getattr(settings, name, 0).
"""

from dataclasses import field, fields

from advantages import ADVANTAGES, find_missing
from plumbing.refusal import Refusal

HOOKS = ("resample", "after_scoring", "advantages", "before_loss", "loss", "after_step", "metrics",
         "tokens", "report")


class Feature:
    """What one feature adds to a run. A hook that is not overridden is never called. What else a
    class has begins with _."""

    flags = None                 # a frozen dataclass, whose fields are made by flag()
    needs = ""                   # what turns it on, for a refusal; "": its first flag
    presets = {}                 # {algorithm: {flag: value}}, as arguments.PRESETS
    provides = ()                # what it puts into batch.extras for an --advantage to read
    records = ()                 # files of the run to which `report` appends lines with a "step"

    # ------------------------------------------------- without a run: training and evaluation both

    @classmethod
    def on(cls, settings):
        """Whether the run has the feature: here, whether its first flag is on."""
        return bool(getattr(settings, fields(cls.flags)[0].name))

    @classmethod
    def check_off(cls, settings):
        """Refuse its flags where it is off, and an --advantage that reads what it provides."""
        if not cls.flags or cls.on(settings):
            return
        names = [f.name for f in fields(cls.flags)]
        needs = cls.needs or f"--{names[0]}"
        for name in names:
            if getattr(settings, name) != getattr(cls.flags(), name):
                refuse(settings, name, f"needs {needs}")
        if {*cls.provides} & {*find_missing(ADVANTAGES[settings.advantage], {})}:
            refuse(settings, "advantage", f"needs {needs}")

    @classmethod
    def check(cls, settings):
        """Validate flags beyond what flag() can express: call refuse(). Also where it is off."""

    @classmethod
    def task(cls, settings, task, load):
        """The task that the flags name, in place of this one. load(dataset_name) makes one of other
        data with the same flags."""
        return task

    @classmethod
    def load(cls, settings, policy, folder):
        """The policy that is trained, in place of this one, which is on the CPU. folder: the
        checkpoint of this run that is resumed, or None."""
        return policy

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        """The sampler in place of this one. training: for rollouts, not for an evaluation."""
        return sampler

    # ------------------------------------------------------------------------------- with a run

    def __init__(self, learner):
        """learner: the session.learner.Learner, of which only a part is made yet. A feature may set
        its stream and its reference, add a critic to its actor, which is not wrapped for several
        processes yet, and ask for what its hooks read: learner.needs_old_entropy = True."""
        self.learner = learner
        self.settings = learner.settings

    def resample(self, rounds, draw):
        """After the first round of sampling: the (rollout, problems, parts [B, K]) that make up the
        batch. rounds: the list of those that were sampled, to which further ones are appended;
        draw(number) samples one more."""

    def after_scoring(self, learner, batch, old):
        """After the old log-probs, before rewards and advantages: change the batch (its parts, of
        which the rewards follow; its clip_range), or put into batch.extras what updates, metrics
        and an --advantage (by the names of `provides`) read. old: the Scores of π_old. A tensor or
        a list with an entry per response is cut into mini-batches by itself; another object needs a
        method take(rows [n])."""

    def advantages(self, batch):
        """Change batch.advantages, [B] or [B, T], which the --advantage has computed, or return
        batch.take(rows) of as many responses of every group: the others are then in no average."""

    def before_loss(self, micro, scores, mini):
        """Record the micro-batch `micro`, or change it before its loss: micro.scale_surrogate(…).
        scores: its Scores under π_θ. mini: the whole mini-batch. Groups that have no gradient are
        left out."""

    def loss(self, micro, scores, mini):
        """{NAME_loss: term}: what is added to the loss of the micro-batch; no group is left out.
        Means are over the whole mini-batch, because the terms of its micro-batches are added up.
        They are logged, too."""

    def after_step(self, learner, mini, stats):
        """After the optimizer step of a mini-batch. stats: its statistics, {name: number}."""

    def metrics(self, batch, mini, new):
        """{name: number or None} for metrics.jsonl. mini: the last mini-batch; new: its Scores
        under the policy after the updates."""

    def tokens(self, rollout):
        """{name: [G][T] lists, or a tensor [G, T]} for the line of tokens.jsonl that shows the one
        group of this rollout."""

    def report(self, folder, record):
        """In the first process: a record of metrics.jsonl, {"step": n, name: value, …}, before it
        is written: change it, or send it elsewhere. folder: the run's."""

    def state_dict(self, folder):
        """What a checkpoint keeps of it, nothing or {name: list of tensors, number or text}. In the
        first process, before the checkpoint has its name; folder: where further files may go."""

    def load_state_dict(self, state, folder):
        """The reverse of state_dict; state: None if the checkpoint has none."""


def find_hooks(features):
    """{hook: its functions} of the features of a run, in the order in which they act."""
    return {hook: [getattr(f, hook) for f in features if has_hook(f, hook)] for hook in HOOKS}


def has_hook(feature, hook):
    """Whether a feature of a run overrides a hook."""
    return getattr(type(feature), hook) is not getattr(Feature, hook)


def refuse(settings, name, words):
    """Raise the one line about a flag and its value: what it must be or needs."""
    value = getattr(settings, name)
    text = " ".join(map(str, value)) if isinstance(value, list) else value
    raise Refusal(f"--{name} {text} {words}")


def unescape(text):
    """The text of a flag, in which \\n stands for a line break."""
    return text.replace("\\n", "\n")


def flag(default, help, **words):
    """A flag with all that the program knows of it. words:

    choices, at_least, above, at_most   the allowed values
    must             (a function that tells whether a value is allowed, what it must be or do)
    needs, without   a condition, or {condition: why or ""} for several: a value other than the
                     default needs all of them, or none of them. A condition is FLAG (it is on) or
                     FLAG=VALUE; FLAG|FLAG: one of the two (checks.check_conditions)
    unset            the text that --help shows as the default if `default` is None or empty
    section          the heading of --help that begins with this flag
    read             the function that reads its text, if that is not the type
    """
    for kind in words.keys() & {"needs", "without"}:
        conditions = {words[kind]: ""} if isinstance(words[kind], str) else words[kind]
        words[kind] = {condition: why and f": {why}" for condition, why in conditions.items()}
    several = isinstance(default, (list, dict))
    default = {"default_factory": default.copy} if several else {"default": default}
    return field(**default, metadata={"help": help, **words})
