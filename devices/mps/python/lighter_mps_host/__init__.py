# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs the mps device's operators in the host's own Python and torch, one process for each client.

`PYTHON -I -B THIS worker` is started by lighter's mps service, `… probe` says what this Python's torch can do.
`control` speaks with the service, `session` with one client; nothing here trusts what a client sends.
"""
