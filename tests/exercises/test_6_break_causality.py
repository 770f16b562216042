"""Exercise 6 (30 minutes): break causality, and find the test that catches it.

Write a rule that cheats: the strength with which token t is written depends on token t+1. Such a bug is easy
to make (a wrong roll, a bidirectional normalisation) and looks like progress: the loss falls. Which test of
tests/test_linear_attn.py notices, and which do not? Fill in both:

    class Leaky       a subclass of UpdateRule; overriding `strengths` is enough
    CAUGHT_BY         the name of the test that fails for it, among those with "every_rule" in their names

Every rule that anyone registers is run through those tests without a line of new test code.
"""

import pytest
import test_linear_attn

from linear_attn import RULES, UpdateRule, register  # noqa: F401

CAUGHT_BY = ""


class Leaky(UpdateRule):
    decay, delta = "head", True

    def strengths(self, k_btgk, log_decay, beta):
        raise NotImplementedError("exercise 6: return (log_decay, erase, write) that look one token ahead")


@pytest.mark.exercise
def test_6_the_leak_is_caught_by_the_test_named_and_by_no_test_of_the_kernel(monkeypatch):
    monkeypatch.setitem(RULES, "leaky", Leaky)
    test_linear_attn.test_every_rule_is_chunked_equals_recurrent("leaky", 2)  # a recurrence like any other
    check = getattr(test_linear_attn, CAUGHT_BY, None)
    assert check is not None, f"CAUGHT_BY = {CAUGHT_BY!r} is no test of test_linear_attn.py"
    with pytest.raises(AssertionError):
        check("leaky")
