"""A workload chooses prompts by what they are, and says what there is where it finds none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mtp_train.advising.workload import Workload
from mtp_train.records import Acceptance


def test_prompts_of_its_kind(acceptance: Callable[..., Acceptance], workload: Callable[..., Workload]) -> None:
    prompts = acceptance(0.5).prompts
    assert workload().of(prompts) == list(prompts)
    found = workload(categories=("coding",), min_prompt_tokens=100, max_prompt_tokens=200).of(prompts)
    assert {prompt.category for prompt in found} == {"coding"}
    assert [prompt.num_prompt_tokens for prompt in found] == [110, 130, 150, 170, 190]
    with pytest.raises(ValueError, match=r"none among 40: categories coding, writing; 10 to 400 tokens; widen the workload"):
        workload(categories=("poetry",)).of(prompts)


def test_it_says_itself(workload: Callable[..., Workload]) -> None:
    text = workload(categories=("coding",), temperature=0.7, concurrency=8, goal="throughput").text
    assert text == "the categories coding; temperature 0.7; 8 requests at once; for throughput; served with vllm"
    assert workload(max_prompt_tokens=100).text.startswith("any category, 0 to 100 tokens; greedy; 1 request at a time")
    assert "50 or more tokens" in workload(min_prompt_tokens=50).text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"goal": "cost"}, "workload.goal: expected one of"),
        ({"serve": "tgi"}, "workload.serve: expected one of"),
        ({"temperature": -1.0}, "workload.temperature"),
        ({"concurrency": 0}, "workload.concurrency"),
        ({"min_prompt_tokens": 9, "max_prompt_tokens": 8}, "workload.max_prompt_tokens"),
    ],
)
def test_what_cannot_be_is_refused(workload: Callable[..., Workload], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        workload(**changes)
