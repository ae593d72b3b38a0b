"""The likelihood of right responses as a further loss (VAPO 2504.05118 eq. 10): the mean over their
tokens of -log π_θ.
"""

from dataclasses import dataclass

from features.feature import Feature, flag


@dataclass(frozen=True)
class Flags:
    positive_example_nll_weight: float = flag(
        0.0, "VAPO: coefficient of the negative log-likelihood of right responses, which is added "
             "to the loss; 0: nothing is added", at_least=0, section="right responses")


class Likelihood(Feature):
    flags = Flags
    adds_gradient = True

    @classmethod
    def on(cls, settings):
        return settings.positive_example_nll_weight > 0

    @classmethod
    def trl(cls, settings):
        return "likelihood of right responses"

    verl = trl

    def __init__(self, run):
        self.coef = run.settings.positive_example_nll_weight

    def in_loss(self, part, new, mini):
        right = [x.rollout.mask & (x.parts[:, :1] >= 1) for x in (part, mini)]      # [b, T] each
        share = right[0] / right[1].sum().clamp(min=1)                              # [b, T]
        return {"likelihood_loss": -self.coef * (share * new.logp).sum()}
