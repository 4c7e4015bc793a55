"""Whether a Hugging Face model's name can be one at all, told at once.

Bridge would ask the Hub for a folder that is not there, several times over.
"""

from __future__ import annotations

import os


def what_is_wrong(hf_model_name: str) -> str | None:
    """What a name must be that is neither a Hugging Face id nor a folder with a config.json.

    Args:
        hf_model_name: a Hugging Face id, or a path.

    Returns:
        The end of a message, or None where the name may be right.
    """
    if os.path.isdir(hf_model_name):
        if not os.path.isfile(os.path.join(hf_model_name, "config.json")):
            return "must be a folder with a config.json: this one has none"
    elif not hf_model_name or hf_model_name.startswith(("/", ".", "~")):
        return "must be a Hugging Face id or a folder that is there"
    return None
