"""Runs inside vLLM's workers: picks up hidden states, teacher distributions and draft steps where they are computed.

vLLM mixes this class into its worker (``worker_extension_cls``), and its methods are called on all workers of a tensor
parallel group at once (``collective_rpc``). Hooks sit on the module that serves, so what is kept is what the kernels
that will serve computed: the rows of the post-norm hidden state that the lm_head reads, the decoder layers' outputs,
and ``compute_logits`` itself. Every row is filed under its request, position and token id; a request is handed out only
when each of its positions has exactly one row and the ids are those that were asked for.

Needs vLLM's V1 model runner (``VLLM_USE_V2_MODEL_RUNNER=0``), whose ``input_batch`` says which rows belong to whom.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtp_train.engine.hf_model import device_name
from mtp_train.engine.hf_prefill import top_candidates
from mtp_train.engine.vllm_repair import repair

# Rows per call of compute_logits. On a CPU 128 x 49152 in float32 are 25 MB, near what two cores' caches like.
_LOGITS_CHUNK_ROWS = {"cpu": 128, "cuda": 1024}


class _Kept:
    """What one request's prefill left: rows by position, and which have come."""

    def __init__(self, *, num_tokens: int, num_taps: int, size: int, dtype: torch.dtype) -> None:
        self.token_ids_T = torch.zeros(num_tokens, dtype=torch.int64)
        self.hidden_TD = torch.zeros((num_tokens, size), dtype=dtype)
        self.taps_TLD = torch.zeros((num_tokens, num_taps, size), dtype=dtype)
        self.times_T = torch.zeros(num_tokens, dtype=torch.int64)


class TargetTap:
    """Hooks on the target's module that file the rows of every forward under their requests."""

    def __init__(self, runner: Any, *, target_layer_ids: tuple[int, ...]) -> None:
        self.runner = runner
        self.target_layer_ids = target_layer_ids
        self.kept: dict[str, _Kept] = {}
        self._layer_TD: dict[int, torch.Tensor] = {}
        model = runner.model
        for layer_id in target_layer_ids:
            model.model.layers[layer_id].register_forward_hook(self._layer_hook(layer_id))
        model.register_forward_hook(self._model_hook, with_kwargs=True)

    def _layer_hook(self, layer_id: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # vLLM's layers return (mlp output, residual stream before it): their sum is the layer's output.
            self._layer_TD[layer_id] = output[0] + output[1] if isinstance(output, tuple) else output

        return hook

    def _model_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        batch = self.runner.input_batch
        if batch.num_reqs == 0:  # a profiling run
            return
        if not isinstance(output, torch.Tensor):
            raise RuntimeError(f"expected the target's forward to return its post-norm hidden state, found {type(output).__name__}")
        bounds = self.runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        # The whole forward's rows at once: on a GPU each way to the host waits for all work in flight.
        rows_T = slice(0, bounds[-1])
        ids_T = kwargs["input_ids"][rows_T].to("cpu", torch.int64)
        position_T = kwargs["positions"][rows_T].to("cpu", torch.int64)
        hidden_TD = output[rows_T].to("cpu")
        taps_TLD = (
            torch.stack([self._layer_TD[i][rows_T] for i in self.target_layer_ids], dim=1).to("cpu") if self.target_layer_ids else None
        )
        for index, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
            rows = slice(bounds[index], bounds[index + 1])
            self._file(request_id, ids_T[rows], position_T[rows], hidden_TD[rows], None if taps_TLD is None else taps_TLD[rows])

    def _file(
        self, request_id: str, ids_R: torch.Tensor, position_R: torch.Tensor, hidden_RD: torch.Tensor, taps_RLD: torch.Tensor | None
    ) -> None:
        if request_id not in self.kept:
            num_tokens = self.runner.requests[request_id].num_prompt_tokens
            self.kept[request_id] = _Kept(
                num_tokens=num_tokens, num_taps=len(self.target_layer_ids), size=hidden_RD.shape[-1], dtype=hidden_RD.dtype
            )
        kept = self.kept[request_id]
        inside = position_R < len(kept.times_T)  # a preempted request may come back with its answer's first token behind the prompt
        at = position_R[inside]
        kept.token_ids_T[at] = ids_R[inside]
        kept.hidden_TD[at] = hidden_RD[inside]
        if taps_RLD is not None:
            kept.taps_TLD[at] = taps_RLD[inside]
        kept.times_T[at] += 1

    def take(self, request_id: str) -> _Kept:
        """Hand out and forget a request's rows. RuntimeError where a position has no row."""
        kept = self.kept.pop(request_id, None)
        if kept is None:
            raise RuntimeError(f"request {request_id}: expected hidden states, found that none were computed")
        missing = int((kept.times_T == 0).sum())
        if missing:
            raise RuntimeError(
                f"request {request_id}: expected one hidden vector per token, found {missing} of {len(kept.times_T)} missing"
            )
        return kept


class DraftTap:
    """Hooks on the draft head's module that keep every forward's inputs, outputs and logits, in order."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.calls: list[dict[str, Any]] = []
        runner.drafter.model.register_forward_hook(self._hook, with_kwargs=True)

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        batch = self.runner.input_batch
        if batch.num_reqs == 0:
            return
        hidden, feedback = output if isinstance(output, tuple) else (output, output)
        bounds = self.runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        first = not self.calls or self.calls[-1]["step"] != self.runner.mtp_train_step
        rows = bounds[-1] if first else batch.num_reqs
        self.calls.append(
            {
                "step": self.runner.mtp_train_step,
                "request_ids": list(batch.req_ids[: batch.num_reqs]),
                "bounds": bounds if first else list(range(batch.num_reqs + 1)),
                "input_ids": kwargs["input_ids"][:rows].to("cpu", torch.int64, copy=True),
                "positions": kwargs["positions"][:rows].to("cpu", torch.int64, copy=True),
                "read": kwargs["hidden_states"][:rows].to("cpu", copy=True),
                "hidden": hidden[:rows].to("cpu", copy=True),
                "feedback": feedback[:rows].to("cpu", copy=True),
                "logits": self.runner.drafter.model.compute_logits(hidden[:rows]).to("cpu", torch.float32, copy=True),
            }
        )


class VllmProbe:
    """The calls that our engine makes on vLLM's workers; names are prefixed so that they collide with none of vLLM's."""

    model_runner: Any
    rank: int

    def mtp_train_describe(self) -> dict[str, Any]:
        """Which attention kernels serve, on what device."""
        groups = [group for per_cache in self.model_runner.attn_groups for group in per_cache]
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "attention": sorted({group.backend.get_name() for group in groups}),
            "device": str(self.model_runner.device),
            "device_name": device_name(self.model_runner.device),
            "model_class": type(self.model_runner.model).__name__,
            "draft_class": self._mtp_train_draft_class(),
        }

    def _mtp_train_draft_class(self) -> str | None:
        """The head's class; the proposer's where it has no model (ngram); None without speculation."""
        if not hasattr(self.model_runner, "drafter"):
            return None
        drafter = self.model_runner.drafter
        return type(drafter.model if hasattr(drafter, "model") else drafter).__name__

    def mtp_train_repair(self) -> list[str]:
        """Mend what ``vllm_repair`` knows to be broken in this build; returns what was mended."""
        return repair()

    def mtp_train_tap_target(self, target_layer_ids: list[int]) -> None:
        """Start to keep the target's hidden states; ids as in DESIGN.md: ``i`` is the output of decoder layer ``i``."""
        if self.model_runner.cache_config.enable_prefix_caching:
            raise RuntimeError("expected prefix caching off, found it on: positions whose keys are cached would have no hidden state")
        layers = len(self.model_runner.model.model.layers)
        if not all(0 <= i < layers for i in target_layer_ids):
            raise ValueError(f"target_layer_ids: expected ids from 0 to {layers - 1}, found {target_layer_ids}")
        self.mtp_train_target = TargetTap(self.model_runner, target_layer_ids=tuple(target_layer_ids))

    @torch.inference_mode()
    def mtp_train_take_target(self, request_id: str, token_ids: list[int], rows: list[int], top_k: int | None, path: str) -> None:
        """Write a request's rows, and the teacher at ``rows``, into one safetensors file (by the first worker)."""
        kept = self.mtp_train_target.take(request_id)
        if kept.token_ids_T.tolist() != token_ids:
            raise RuntimeError(f"request {request_id}: the tokens that vLLM computed are not those that were asked for")
        tensors = {"hidden": kept.hidden_TD}
        if kept.taps_TLD.shape[1]:
            tensors["taps"] = kept.taps_TLD
        if top_k is not None:
            tensors.update(self._mtp_train_teacher(kept.hidden_TD, rows, top_k))
        if self.rank == 0:
            from safetensors.torch import save_file

            save_file(tensors, Path(path))

    def _mtp_train_teacher(self, hidden_TD: torch.Tensor, rows: list[int], top_k: int) -> dict[str, torch.Tensor]:
        ids, log_probs, log_sums = [], [], []
        chunk = _LOGITS_CHUNK_ROWS.get(self.model_runner.device.type, 1024)
        for first in range(0, len(rows), chunk):
            hidden_RD = hidden_TD[rows[first : first + chunk]].to(self.model_runner.device)
            logits = self.model_runner.model.compute_logits(hidden_RD)  # all workers take part; only some get the result
            if logits is None:
                continue
            top_RC, ids_RC = top_candidates(logits, min(top_k, logits.shape[-1]))
            best_R1 = top_RC[:, :1].float()
            log_sum_R = best_R1[:, 0] + (logits.float() - best_R1).exp_().sum(-1).log()
            ids.append(ids_RC.to("cpu", torch.int64))
            log_probs.append((top_RC.float() - log_sum_R[:, None]).to("cpu"))
            log_sums.append(log_sum_R.to("cpu"))
        if not ids:
            return {
                "teacher_ids": torch.zeros((0, top_k), dtype=torch.int64),
                "teacher_log_probs": torch.zeros((0, top_k)),
                "teacher_log_sum_exp": torch.zeros(0),
            }
        return {"teacher_ids": torch.cat(ids), "teacher_log_probs": torch.cat(log_probs), "teacher_log_sum_exp": torch.cat(log_sums)}

    def mtp_train_tap_draft(self) -> None:
        """Start to keep what the draft head reads and says, for ``tools/compare_engines.py``."""
        runner = self.model_runner
        runner.mtp_train_step = 0
        execute = runner.execute_model

        def counted(*args: Any, **kwargs: Any) -> Any:
            runner.mtp_train_step += 1
            return execute(*args, **kwargs)

        runner.execute_model = counted
        self.mtp_train_draft = DraftTap(runner)

    def mtp_train_fix_drafts(self, token_ids: list[int]) -> None:
        """From now on draft these tokens for every sequence, in place of what the proposer (ngram) would look up: to time verifying."""
        drafter = self.model_runner.drafter
        if type(drafter).__name__ != "NgramProposer":
            raise RuntimeError(f"expected vLLM's ngram proposer, whose drafts are lists of tokens, found {type(drafter).__name__}")

        def propose(num_tokens: int, sampled: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
            return [list(token_ids[:num_tokens]) if tokens else [] for tokens in sampled]

        drafter.propose = propose

    def mtp_train_take_draft(self, path: str) -> None:
        """Write all draft calls kept so far: tensors in ``path``, their request ids and bounds in its metadata."""
        if self.rank != 0:
            return
        import json

        from safetensors.torch import save_file

        calls = self.mtp_train_draft.calls
        names = ("input_ids", "positions", "read", "hidden", "feedback", "logits")
        tensors = {f"{index}.{name}": call[name] for index, call in enumerate(calls) for name in names}
        layout = [{name: call[name] for name in ("step", "request_ids", "bounds")} for call in calls]
        save_file(tensors, Path(path), metadata={"calls": json.dumps(layout)})
