"""The features: what a run may add to the core, one file each, in the order in which they act.

To remove one, delete its file, its import and its name in FEATURES. To add one, see feature.py.
"""

from features.critic import Critic
from features.entropy import Entropy
from features.feature import Features
from features.likelihood import Likelihood
from features.mismatch import Mismatch
from features.reference_kl import ReferenceKL
from features.rounding import Rounding
from features.trackers import Trackers

# The order is also that of their loss terms, which are added up from left to right.
FEATURES = (Rounding, ReferenceKL, Mismatch, Entropy, Critic, Likelihood, Trackers)


def switched_on(settings):
    """The classes of the features that a run has."""
    return [feature for feature in FEATURES if feature.on(settings)]


def make_features(run):
    """The Features of a run. run: a plumbing.model.actor.Run."""
    return Features(feature(run) for feature in switched_on(run.settings))
