"""Wrapper: a sampler that changes what another one does."""


class Wrapper:
    """A sampler around another one: what a feature's wrap_sampler returns. Subclasses define
    `sample`, which calls self.sampler.sample."""

    def __init__(self, sampler, settings=None):
        self.sampler = sampler
        self.settings = settings
        self.tokenizer = sampler.tokenizer

    policy = property(lambda self: self.sampler.policy,
                      lambda self, policy: setattr(self.sampler, "policy", policy))
