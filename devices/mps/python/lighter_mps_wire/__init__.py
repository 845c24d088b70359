# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the client in a container and the host's worker say to each other, in bytes.

Both `lighter_mps` and `lighter_mps_host` import this package; it needs no torch. `protocol` holds the numbers and
caps, `values` the codec of everything that is not a plain number, `dtypes` the table of element types, and `frames`
the fixed-size heads around them. Everything decoded here may come from a stranger: lengths are checked before memory
is taken, and nothing decoded is ever code.
"""
