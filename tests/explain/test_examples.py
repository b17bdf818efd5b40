"""Examples of `explain` that are code are executed: the wrong one gets its code, the right one does not."""

from __future__ import annotations

import pytest

from nkw.errors import RULES
from simulate.explain import load_explanations
from tests.explain.examples import as_code, codes, linted
from tests.explain.lint_settings import LINT
from tests.explain.settings import NOT_RUN, RUN


@pytest.mark.parametrize("code", sorted(RUN))
def test_the_wrong_example_gets_its_code_and_the_right_one_does_not(code: str) -> None:
    setting, explanation = RUN[code], load_explanations()[code]
    wrong = as_code(explanation.wrong, setting.filler)
    assert wrong is not None
    assert code in codes(setting, wrong)
    right = as_code(explanation.right, setting.filler)
    if right is not None:
        reported = codes(setting, right)
        assert code not in reported
        assert not RULES.keys() & set(reported)


@pytest.mark.parametrize("code", sorted(LINT))
def test_lint_finds_the_wrong_example_and_not_the_right_one(code: str) -> None:
    setting, explanation = LINT[code], load_explanations()[code]
    wrong = as_code(explanation.wrong, setting.filler)
    assert wrong is not None
    assert code in linted(setting, wrong)
    right = as_code(explanation.right, setting.filler)
    if right is not None:
        assert code not in linted(setting, right)


def test_every_example_that_is_code_is_run_or_known_not_to_be() -> None:
    code = {
        explanation.code
        for explanation in load_explanations().values()
        if as_code(explanation.wrong) is not None
    }
    assert code - RUN.keys() - LINT.keys() == NOT_RUN
    assert not NOT_RUN & (RUN.keys() | LINT.keys())
