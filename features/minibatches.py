"""Records of mini-batches: --save_minibatches writes the log-probs of whole batches as they were
before each optimizer step, in RUN/minibatches.jsonl.

Unlike tokens.jsonl, which has one group after the updates, it shows what the clip acted on. Groups
without a gradient are not scored, and therefore not recorded, except with --plain. Of several
processes the first one's responses are recorded.
"""

from dataclasses import dataclass

from features.feature import Feature, flag


@dataclass(frozen=True)
class Flags:
    save_minibatches: bool = flag(
        False, "save the log-probs of whole batches before each optimizer step in "
               "RUN/minibatches.jsonl (large)", section="records of mini-batches")


class Minibatches(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.save_minibatches

    def __init__(self, run):
        self.last = None         # the mini-batch whose micro-batches arrive
        self.found = []          # of the mini-batches of this rollout batch: lists of responses

    def loss(self, part, new, mini):
        """Add nothing to the loss; record the micro-batch. A response: its reward, its advantage
        (a number, or one per token), old_logp and logp of its loss tokens in nats."""
        if mini is not self.last:
            self.last = mini
            self.found.append([])
        for mask, old, logp, A, reward in zip(
                part.rollout.mask, part.old_logp, new.logp.detach(), part.advantages,
                part.rewards.tolist()):
            self.found[-1].append({"reward": reward, "old_logp": old[mask].tolist(),
                                   "logp": logp[mask].tolist(),
                                   "advantage": A.tolist() if A.dim() == 0 else A[mask].tolist()})
        return {}

    def report(self, folder, record):
        from session.checkpoints import append               # imports what --help does not wait for
        if self.found:
            append(folder / "minibatches.jsonl", {"step": record["step"],
                                                  "minibatches": self.found})
        self.found, self.last = [], None
