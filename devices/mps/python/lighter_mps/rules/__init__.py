# SPDX-License-Identifier: MIT OR Apache-2.0
"""What hot operators give, worked out here: sizes, strides and element type of their results, with no round trip.

`signatures.miss` asks `predict` at the first sight of a signature, so that shapes which change at every step (a growing
cache of keys and values) do not wait for the host. A rule that is not sure gives None, and the host is asked. The host
checks every result against the prediction, so that a wrong rule is an error and never wrong data; strides that differ
are laid out anew. Operators that are put together here: pointwise ones with broadcasting and promotion, products of
matrices, joins, softmax, reductions, normalisation, and indexing with whole numbers. Arguments that a rule would have
to check (and that the user got wrong) also give None: the host's error is then raised at the user's line.
"""

from . import along, indexing, pointwise, products

RULES = {**pointwise.RULES, **products.RULES, **along.RULES, **indexing.RULES}


def predict(name: str, args, kwargs):
    """(shape, results) as a plan has them, or None where the host has to be asked."""
    rule = RULES.get(name)
    if rule is None:
        return None
    try:
        return rule(*args, **kwargs)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        # Forms of arguments that the rule does not have; whether they are right the host says.
        return None
