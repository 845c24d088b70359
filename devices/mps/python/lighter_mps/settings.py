# SPDX-License-Identifier: MIT OR Apache-2.0
"""The client's settings, read from the environment once, at import.

Everything else in the package takes them from here, so that no other file reads the environment. A value that is none of
the ones below is refused by name: a typing error must not silently leave the default in force.
"""

import os
from typing import NamedTuple

DEFAULT_ENDPOINT = "unix:/run/lighter/mps/socket"


class Settings(NamedTuple):
    """What the user can set with variables that begin with LIGHTER_MPS."""

    endpoint: str
    # Wait for the host after each operator, so that an error is raised where it arises.
    sync: bool
    # Use the Rust core where it is installed.
    core: bool
    # Send bulk data through shared memory instead of in the stream.
    ring: bool


def _switch(environment, name: str, default: bool) -> bool:
    value = environment.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value!r} is neither 0 nor 1")
    return default if value == "" else value == "1"


def read(environment=os.environ) -> Settings:
    """The settings of this process."""
    endpoint = environment.get("LIGHTER_MPS", "") or DEFAULT_ENDPOINT
    kind, _, path = endpoint.partition(":")
    if kind != "unix" or not path:
        raise ValueError(f"LIGHTER_MPS={endpoint!r} names no unix socket; write it as unix:/path/of/the/socket")
    return Settings(
        endpoint=path,
        sync=_switch(environment, "LIGHTER_MPS_SYNC", False),
        core=_switch(environment, "LIGHTER_MPS_CORE", True),
        ring=_switch(environment, "LIGHTER_MPS_RING", True),
    )
