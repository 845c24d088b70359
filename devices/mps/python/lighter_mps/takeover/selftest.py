# SPDX-License-Identifier: MIT OR Apache-2.0
def check(torch, layout):
    pass
