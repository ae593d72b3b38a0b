"""--load_in_4bit: the frozen weights under LoRA's adapters, stored in 4 bits each by bitsandbytes.

The format is QLoRA's NormalFloat (2305.14314): 64 weights share one scale, and 256 scales share a
second-level scale, which makes 0.52 bytes per weight. A layer decodes its weights before it
multiplies, so sampling, scoring and updates use the same values. Only linear layers are quantized.
The LM head, embeddings and norms keep their precision; models with experts are refused, because
experts are not linear layers here.
"""

import torch
from torch import nn

from routes import routers_of


def quantize(policy):
    """Replace all linear layers but the LM head by 4-bit layers. Their weights are quantized when
    the policy is moved to its device. Raises ValueError for a model without linear layers or with
    experts."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    for name, linear in layers_to_quantize(policy):
        small = Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,
                           compute_dtype=torch.float32, quant_type="nf4", device="meta")
        small.weight = Params4bit(linear.weight.data, quant_type="nf4", module=small)
        small.bias = linear.bias
        small.support_avx512bf16_for_cpu = False             # would make sampling alone bfloat16
        policy.set_submodule(name, small)
    policy.is_loaded_in_4bit = True                          # peft reads this attribute
    return policy


def layers_to_quantize(policy):
    """[(name, layer)] of the linear layers but the LM head. Raises ValueError if there are none, or
    if the model has experts."""
    layers = [(name, module) for name, module in policy.named_modules()
              if type(module) is nn.Linear and module is not policy.get_output_embeddings()]
    if routers_of(policy) or not layers:
        raise ValueError("--load_in_4bit quantizes linear layers, and the "
                         f"{'experts' if layers else 'layers'} of {type(policy).__name__} are not "
                         "linear layers; leave out the flag")
    return layers


def round_to_4bit(policy):
    """Round the weights that `quantize` would store in 4 bits to what it would decode. Raises
    ValueError without bitsandbytes."""
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except ImportError:
        raise ValueError("these adapters were trained beside 4-bit weights, which only "
                         "bitsandbytes can compute: pip install bitsandbytes") from None
    for _, layer in layers_to_quantize(policy):
        weight, state = quantize_4bit(layer.weight.data, quant_type="nf4", compress_statistics=True)
        layer.weight.data = dequantize_4bit(weight, state).float()


def small_layers(policy):
    """[(name, layer)] of the 4-bit layers, by their names before adapters were added."""
    return [(name.replace(".base_layer", ""), module) for name, module in policy.named_modules()
            if hasattr(getattr(module, "weight", None), "quant_state")]


def compute_in(policy, dtype):
    """Set the dtype in which 4-bit layers multiply; None means float32."""
    for _, layer in small_layers(policy):
        layer.compute_dtype = dtype or torch.float32
