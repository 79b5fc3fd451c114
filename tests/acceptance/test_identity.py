"""Two greedy runs are compared token by token, and the target is asked how near the choice was."""

import pytest

from mtp_train.acceptance.identity import compare


def test_equal_runs_ask_nothing():
    def never(token_ids):
        raise AssertionError(token_ids)

    identity = compare(prompts={"a": [1]}, plain={"a": (2, 3)}, speculated={"a": (2, 3)}, logit_gap=never)
    assert identity.holds and (identity.num_prompts, identity.num_identical, identity.num_tokens) == (1, 1, 2)


@pytest.mark.parametrize(("gap", "holds"), [(5e-5, True), (5e-4, False)])
def test_the_first_difference_is_reported_with_its_gap(gap, holds):
    asked = []

    def logit_gap(token_ids):
        asked.append(list(token_ids))
        return gap

    identity = compare(
        prompts={"a": [1, 9], "b": [1], "c": [7]},
        plain={"a": (2, 3, 4), "b": (5,), "c": (1, 1)},
        speculated={"a": (2, 8, 4), "b": (5,), "c": (1, 1, 1)},
        logit_gap=logit_gap,
    )
    assert asked == [[1, 9, 2], [7, 1, 1]]
    one, two = identity.differences
    assert (one.prompt_id, one.index, one.plain_token, one.speculated_token, one.logit_gap) == ("a", 1, 3, 8, gap)
    assert (two.index, two.plain_token, two.speculated_token) == (2, None, 1)
    assert identity.holds is holds and identity.num_identical == 1


def test_runs_of_other_prompts_are_refused():
    with pytest.raises(ValueError, match="same prompts"):
        compare(prompts={"a": [1]}, plain={"a": (1,)}, speculated={"b": (1,)}, logit_gap=lambda ids: 0.0)
