"""What a text can mean that says where a file or a model is: a path on this machine, an address, a hub id."""

from __future__ import annotations

import re
from pathlib import Path

# What a hub id looks like; "./x", "/x/y" and "a/b/c" can only be paths.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/\w[\w.-]*)?")


def is_address(place: str) -> bool:
    """Whether `place` is an address (s3://…), which is fetched before it is read."""
    return "://" in place


def is_here(place: str) -> bool:
    """Whether there is such a file or folder on this machine."""
    return not is_address(place) and Path(place).expanduser().exists()


def is_hub_id(place: str) -> bool:
    """Whether `place` is not here and can be the id of a model on the Hugging Face Hub."""
    return not is_here(place) and HUB_ID.fullmatch(place) is not None
