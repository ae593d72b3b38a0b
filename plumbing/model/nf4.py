"""What a policy computes after its linear layers are stored in 4 bits (features/four_bit.py), in
float32: an adapter that was trained beside such weights is merged into these.
"""

from torch import nn

from plumbing.refusal import Refusal
from routes import find_routers


def layers_to_quantize(policy):
    """[(name, layer)] of the linear layers but the LM head. Raises Refusal if there are none, or
    if the model has experts."""
    layers = [(name, module) for name, module in policy.named_modules()
              if type(module) is nn.Linear and module is not policy.get_output_embeddings()]
    if find_routers(policy) or not layers:
        raise Refusal("--load_in_4bit quantizes linear layers, and the "
                      f"{'experts' if layers else 'layers'} of {type(policy).__name__} are not "
                      "linear layers; leave out the flag")
    return layers


def round_to_4bit(policy):
    """Round the weights that `quantize` would store in 4 bits to what it would decode. Raises
    Refusal without bitsandbytes."""
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except ImportError:
        raise Refusal("these adapters were trained beside 4-bit weights, which only "
                      "bitsandbytes can compute: pip install bitsandbytes") from None
    for _, layer in layers_to_quantize(policy):
        weight, state = quantize_4bit(layer.weight.data, quant_type="nf4", compress_statistics=True)
        layer.weight.data = dequantize_4bit(weight, state).float()
