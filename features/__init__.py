"""The features: what a run may add to the core, one file each, in the order in which they act.

To remove one, delete its file, its import and its name in FEATURES. To add one, see feature.py.
"""

from features.critic import Critic
from features.dynamic_sampling import DynamicSampling
from features.entropy import Entropy, HighEntropy
from features.lengths import Lengths
from features.load_balancing import LoadBalancing
from features.lora import LoRA
from features.minibatches import Minibatches
from features.mismatch import Mismatch
from features.reference_kl import KLTerm, ReferenceKL
from features.routing_replay import RoutingReplay
from features.sampler_format import SamplerFormat
from features.srpo import SRPO
from features.trackers import Trackers
from features.turns import Turns
from features.vllm import VLLM

# The order is also that of their loss terms, which are added up from left to right, and of what
# they wrap around the sampler, from the inside: RoutingReplay and VLLM replace it, Turns play with
# whatever samples, SamplerFormat replaces the weights that are sampled.
FEATURES = (RoutingReplay, LoRA, VLLM, Turns, SamplerFormat, DynamicSampling, SRPO, Lengths,
            ReferenceKL, KLTerm, Mismatch, Entropy, HighEntropy, Critic, LoadBalancing, Minibatches,
            Trackers)
