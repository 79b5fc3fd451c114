"""The process that holds one vLLM engine: reads requests as JSON lines on stdin, answers as JSON lines on stdout.

``python -m mtp_train.engine.vllm_worker SPEC.json``; only ``engine/vllm_process.py`` starts it. vLLM cannot be taken
down cleanly inside a living process, so each engine gets one of its own, and what it prints goes to stderr. Requests
join the running batch as they come, and each is answered as it finishes; those sent apart are a batch of their own. The
end of stdin ends the process at once: whoever started it has gone, or has no more use for it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from mtp_train.faults import told
from mtp_train.runtime import read_json

_Inbox = queue.SimpleQueue[dict[str, Any]]


def _own_pipes() -> tuple[TextIO, TextIO]:
    """The real stdin and stdout as our channels; whatever else reads finds nothing, and what it writes to stdout is sent to stderr.

    A thread of ours always waits in a read, so that it must not be Python's own stdin: a forked child closes that, and would
    wait for the thread's lock.
    """
    commands, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, answers


def _listen(commands: TextIO, inbox: _Inbox) -> None:
    """Read commands until they end, and end the process then. vLLM's shutdown handlers are left out: they can hang or complain."""
    for line in commands:
        inbox.put(json.loads(line))
    sys.stderr.flush()
    os._exit(0)


class _Server:
    """One vLLM engine and its two pipes."""

    def __init__(self, spec: dict[str, Any], *, inbox: _Inbox, channel: TextIO) -> None:
        from vllm import LLM

        from mtp_train.engine.vllm_plugin import register

        register()  # what vLLM's plugin loader does in processes of its own, for a checkout that isn't installed
        self.inbox, self.channel = inbox, channel
        self.llm = LLM(**spec["llm"])
        self.engine = self.llm.llm_engine
        self.waiting: dict[str, dict[str, Any]] = {}
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.written: dict[str, list[tuple[list[int], int]]] = {}
        if spec["target_layer_ids"] is not None:
            self._call("mtp_train_tap_target", spec["target_layer_ids"])
        if spec["tap_draft"]:
            self._call("mtp_train_tap_draft")
        self.steps: list[tuple[float, int, int]] | None = [] if spec["time_steps"] else None
        self.scheduled: list[int] = []
        if self.steps is not None:
            self._note_what_is_scheduled()
        repaired = self._call("mtp_train_repair")[0]
        self.send({"kind": "ready", "description": {**self._call("mtp_train_describe")[0], "repaired": repaired}})

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self.llm.collective_rpc(method, args=args)

    def send(self, message: dict[str, Any]) -> None:
        _send(self.channel, message)

    def serve(self) -> None:
        """Answer what comes, until stdin ends."""
        while True:
            while not self.waiting or not self.inbox.empty():
                self._receive(self.inbox.get())
            self._step()

    def _note_what_is_scheduled(self) -> None:
        """Keep how many tokens each sequence brings to the step that the scheduler plans."""
        schedule = self.scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            planned = schedule(*args, **kwargs)
            self.scheduled = list(planned.num_scheduled_tokens.values())
            return planned

        self.scheduler.schedule = noted

    def _step(self) -> None:
        started = time.perf_counter()
        outputs = self.engine.step()
        if self.steps is not None:
            counts = set(self.scheduled)
            self.steps.append((time.perf_counter() - started, len(self.scheduled), counts.pop() if len(counts) == 1 else 0))
        for output in outputs:
            self.written.setdefault(output.request_id, []).append((list(output.outputs[0].token_ids), self._num_verifications(output)))
            if output.finished:
                self._answer(output)

    def _num_verifications(self, output: Any) -> int:
        """How often this request's drafts have been verified so far: vLLM's own record, which it hands out at the end only."""
        request = self.scheduler.requests.get(output.request_id)
        metrics = output.outputs[0].spec_decode_metrics if output.finished or request is None else request.spec_decode_metrics
        return 0 if metrics is None else len(metrics.per_step_accepted)

    def _receive(self, message: dict[str, Any]) -> None:
        if message["kind"] == "take_draft":
            self._call("mtp_train_take_draft", message["path"])
            self.send({"kind": "take_draft", "path": message["path"]})
        elif message["kind"] == "fix_drafts":
            self._call("mtp_train_fix_drafts", message["token_ids"])
            self.send({"kind": "fix_drafts"})
        elif message["kind"] == "take_steps":
            self.send({"kind": "take_steps", "steps": self.steps})
            self.steps = []
        elif message["kind"] == "counters":
            self.send({"kind": "counters", **self._counters()})
        else:
            assert message["kind"] == "requests", message["kind"]
            for request in message["requests"]:
                self._enter(request)
            while message["apart"] and self.waiting:
                self._step()

    def _enter(self, request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.waiting[request["request_id"]] = request
        # Step by step where it is counted what each step emitted; else vLLM need not build outputs that nobody reads.
        kind = RequestOutputKind.DELTA if request["by_step"] else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(detokenize=False, output_kind=kind, **request["sampling"])
        self.engine.add_request(request["request_id"], {"prompt_token_ids": request["token_ids"]}, params)

    def _answer(self, output: Any) -> None:
        request = self.waiting.pop(output.request_id)
        completion, steps = output.outputs[0], self.written.pop(output.request_id)
        steps = [(tokens, num_verifications) for tokens, num_verifications in steps if tokens]
        answer: dict[str, Any] = {
            "kind": "answer",
            "request_id": output.request_id,
            "token_ids": [token for tokens, _ in steps for token in tokens],
            "emitted_per_step": [len(tokens) for tokens, _ in steps],
            "verifications_up_to_step": [num_verifications for _, num_verifications in steps],
            "finish_reason": completion.finish_reason,
        }
        metrics = completion.spec_decode_metrics
        if metrics is not None:
            answer["accepted_per_step"], answer["drafted_per_step"] = metrics.per_step_accepted, metrics.per_step_drafted
        take = request["take"]
        if take is not None:
            self._call("mtp_train_take_target", output.request_id, request["token_ids"], take["rows"], take["top_k"], take["path"])
            answer["path"] = take["path"]
        self.send(answer)

    def _counters(self) -> dict[str, Any]:
        """vLLM's own totals of this process."""
        found = {metric.name: metric for metric in self.llm.get_metrics()}
        prefix = "vllm:spec_decode_num_"
        if prefix + "drafts" not in found:
            return {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "accepted_per_position": []}
        return {
            "drafts": found[prefix + "drafts"].value,
            "draft_tokens": found[prefix + "draft_tokens"].value,
            "accepted_tokens": found[prefix + "accepted_tokens"].value,
            "accepted_per_position": list(found[prefix + "accepted_tokens_per_pos"].values),
        }


def _send(channel: TextIO, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def main() -> None:
    """Start the engine and serve until stdin ends. What the machine lacks (room, memory) is said on the way we answer on: the log
    stands on the same disk."""
    commands, answers = _own_pipes()
    inbox: _Inbox = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands, inbox), daemon=True).start()  # before vLLM is: we may be left while it starts
    try:
        _Server(read_json(Path(sys.argv[1])), inbox=inbox, channel=answers).serve()
    except Exception as error:
        said = None if isinstance(error, ValueError) else told(error)
        if said is not None:
            _send(answers, {"kind": "failed", "said": said})
        raise


if __name__ == "__main__":
    main()
