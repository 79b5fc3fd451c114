"""vLLM's steps are told apart by what its scheduler ran: with processes that are made up, and with a real one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm_for_tests as own

from mtp_train.engine.base import CostsAsked
from mtp_train.engine.vllm import VllmEngine
from mtp_train.engine.vllm_costs import time_steps
from mtp_train.exporter.served import Served, write_served

ASKED = CostsAsked(batch_sizes=(1, 3), num_tokens=(1, 2, 4), draft_lengths=(1, 3), context_tokens=20, num_repeats=4, seed=0)


class MadeUp:
    """Stands for a process: a step of b sequences with n tokens takes b n seconds, and half a second more per drafted token of a
    head; the steps that read prompts, and one that the scheduler ran with fewer sequences, take other times."""

    def __init__(self, llm: Mapping[str, Any]) -> None:
        self.description = {"device_name": "a device", "attention": ["none"]}
        speculative = llm.get("speculative_config")
        self.drafts = 0 if speculative is None else speculative["num_speculative_tokens"]
        self.head = speculative is not None and speculative["method"] != "ngram"
        self.fixed: list[int] | None = None
        self.steps: list[list[float]] = []

    def ask(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if message["kind"] == "fix_drafts":
            self.fixed = message["token_ids"]
            return [{}]
        steps, self.steps = self.steps, []
        return [{"steps": steps}]

    def run_apart(self, batches: Sequence[Sequence[dict[str, Any]]], *, max_batches: int) -> Iterator[dict[str, Any]]:
        (batch,) = batches
        assert self.head or self.drafts == len(self.fixed or [])
        count, tokens = len(batch), 1 + self.drafts
        self.steps += [[99.0, count, 0], [77.0, count - 1, tokens]]
        self.steps += [[count * tokens + 0.5 * self.drafts * self.head, count, tokens]] * (batch[0]["limit"] // 2)
        yield from batch


@contextmanager
def made_up(llm: Mapping[str, Any]) -> Iterator[MadeUp]:
    yield MadeUp(llm)


def message(request_id: str, token_ids: list[int], sampling: Any) -> dict[str, Any]:
    return {"request_id": request_id, "token_ids": token_ids, "limit": sampling.max_new_tokens}


@pytest.fixture
def served(tmp_path: Path, tiny_target: Path) -> Path:
    write_served(
        tmp_path,
        Served(
            class_name="C", speculative_config={"method": "mtp", "model": "."}, hf_overrides=None, plugin=None, target_path=str(tiny_target)
        ),
    )
    return tmp_path


def test_only_steps_of_the_whole_batch_count(served: Path, tiny_target: Path) -> None:
    settings = own.make_vllm(tiny_target).settings
    found = time_steps(settings, served, ASKED, open_pool=made_up, message=message)  # type: ignore[arg-type]
    assert {(cell.batch_size, cell.num_tokens): cell.seconds for cell in found.verify} == {(b, n): b * n for b in (1, 3) for n in (1, 2, 4)}
    assert {(cell.batch_size, cell.num_tokens): cell.seconds for cell in found.drafting} == {
        (b, k): 0.5 * k for b in (1, 3) for k in (1, 3)
    }
    assert found.device == "a device" and found.notes["attention"] == ["none"]


def test_too_few_steps_are_refused(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUp, "run_apart", lambda self, batches, max_batches: iter(()))
    settings = own.make_vllm(tiny_target).settings
    with pytest.raises(ValueError, match="expected at least 3 steps of 1 sequences with 1 tokens each, found 0"):
        time_steps(settings, None, ASKED, open_pool=made_up, message=message)  # type: ignore[arg-type]


@own.NEEDS_VLLM[0]
@own.NEEDS_VLLM[1]
@own.NEEDS_VLLM[2]
def test_a_real_process_runs_the_batches_that_are_asked_for(vllm_target: Path) -> None:
    engine = own.make_vllm(vllm_target)
    assert isinstance(engine, VllmEngine)
    asked = CostsAsked(batch_sizes=(1, 3), num_tokens=(1, 3), draft_lengths=(), context_tokens=24, num_repeats=4, seed=0)
    found = engine.time_steps(None, asked)
    assert [(cell.batch_size, cell.num_tokens) for cell in found.verify] == [(1, 1), (1, 3), (3, 1), (3, 3)]
    assert all(cell.num_repeats >= 3 and 0 < cell.low_s <= cell.seconds <= cell.high_s for cell in found.verify)
    assert found.drafting == () and found.device.startswith("cpu, 1 thread")
