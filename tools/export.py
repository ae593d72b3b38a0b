"""The settings of a run in another program's words: --print_trl_config, --print_verl_config."""

from tools.trl import trl_script
from tools.verl import verl_config

EXPORTS = {"print_trl_config": trl_script, "print_verl_config": verl_config}


def exported(args):
    """The text that one of these flags asks for; None without any of them."""
    return next((text(args) for flag, text in EXPORTS.items() if getattr(args, flag)), None)
