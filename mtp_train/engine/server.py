"""``engine=server``: answers from any OpenAI-compatible server (vLLM, SGLang, TensorRT-LLM, llama.cpp), by token ids."""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from mtp_train.acceptance.verify import request_generator
from mtp_train.engine.base import (
    Baseline,
    Engine,
    Generated,
    GenerateRequest,
    PrefillSettings,
    Sampling,
    SpeculateRequest,
    SpeculateSettings,
)
from mtp_train.engine.stop import stop_token_ids
from mtp_train.records import Acceptance, FinishReason, Response, Sample
from mtp_train.runtime import log

# Statuses that a later try may mend: the server is busy, restarting, or behind a proxy that is.
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_WAIT_S = 60.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host: it is an error instead."""

    def redirect_request(self, *args: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class ServerEngine(Engine):
    """Sends token ids to ``/v1/completions`` and wants token ids back (vLLM: ``return_token_ids``).

    A server that returns text only is refused by default, since text that is tokenized again need not be the tokens that
    were drawn; ``retokenize=True`` allows it. ``concurrency`` requests are open at once; each is tried ``num_tries``
    times, waiting ``first_wait_s`` after the first failure and twice as long after each further one (or as long as the server asks for).
    Settings: ``conf/engine/server.yaml``.
    """

    word = "server"

    def __init__(
        self,
        *,
        target_path: Path,
        trust_remote_code: bool,
        load_head: Callable[..., object] | None,
        url: str,
        model: str,
        api_key_file: Path | None,
        concurrency: int,
        num_tries: int,
        first_wait_s: float,
        timeout_s: float,
        retokenize: bool,
        dtype: str,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"engine.url: expected http://host:port/v1 or https://..., found {url!r}")
        for name, value in (("concurrency", concurrency), ("num_tries", num_tries)):
            if value < 1:
                raise ValueError(f"engine.{name}: expected at least 1, found {value}")
        self.url, self.model = url.rstrip("/"), model
        self.concurrency, self.num_tries, self.first_wait_s, self.timeout_s = concurrency, num_tries, first_wait_s, timeout_s
        self._key = None if api_key_file is None else Path(api_key_file).read_text(encoding="utf-8").strip()
        self._dtype, self._version = dtype, ""
        self._target_path, self._trust_remote_code = Path(target_path), trust_remote_code
        self._stop_ids = stop_token_ids(self._target_path, trust_remote_code=trust_remote_code)
        self.retokenize = retokenize
        self._tokenizer: Any = None

    @property
    def version(self) -> str:
        """What the server says it is at ``/version`` (vLLM does); else its address."""
        if not self._version:
            root = self.url.removesuffix("/v1")
            try:
                self._version = f"server {self._request(f'{root}/version', None)['version']}"
            except (ValueError, KeyError):
                self._version = f"server at {root}"
        return self._version

    @property
    def dtype(self) -> str:
        """As stated in the settings: the API does not tell."""
        return self._dtype

    def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> Iterator[Generated]:
        yield from _concurrently(lambda request: self._complete(request, sampling), requests, concurrency=self.concurrency)

    def _complete(self, request: GenerateRequest, sampling: Sampling) -> Generated:
        """One answer. ValueError where the server refuses, keeps failing, or answers without what is needed."""
        seed = request_generator(seed=sampling.seed, request_id=request.request_id).initial_seed() % 2**31
        body = {
            "model": self.model,
            "prompt": list(request.token_ids),
            "max_tokens": min(request.max_new_tokens, sampling.max_new_tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "stop_token_ids": list(self._stop_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
        }
        choice = self._request(f"{self.url}/completions", body)["choices"][0]
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise ValueError(f"request {request.request_id}: expected finish_reason stop or length, found {reason!r}")
        return Generated(request_id=request.request_id, token_ids=self._token_ids(choice, reason), finish_reason=reason)

    def _token_ids(self, choice: Mapping[str, Any], reason: FinishReason) -> tuple[int, ...]:
        ids = choice.get("token_ids")
        if ids is not None:
            return tuple(ids)
        if not self.retokenize:
            raise ValueError(
                f"{self.url}: expected token_ids in the answer (vLLM gives them for return_token_ids), found text only; text that is "
                "tokenized again need not be the tokens that were drawn: set engine.retokenize=true to accept that"
            )
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(
                self._target_path, local_files_only=True, trust_remote_code=self._trust_remote_code
            )
        found = tuple(self._tokenizer(choice["text"], add_special_tokens=False).input_ids)
        # Servers leave the end-of-turn token out of the text.
        ends = reason == "stop" and self._stop_ids and (not found or found[-1] not in self._stop_ids)
        return (*found, self._tokenizer.eos_token_id) if ends and self._tokenizer.eos_token_id is not None else found

    def _request(self, url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """POST ``body`` (GET where None), tried again where that may help."""
        headers = {"Content-Type": "application/json"} | ({} if self._key is None else {"Authorization": f"Bearer {self._key}"})
        data = None if body is None else json.dumps(body).encode()
        for trial in range(1, self.num_tries + 1):
            wait_s = min(self.first_wait_s * 2 ** (trial - 1), _LONGEST_WAIT_S)
            try:
                with _OPENER.open(urllib.request.Request(url, data=data, headers=headers), timeout=self.timeout_s) as answer:
                    found: dict[str, Any] = json.loads(answer.read())
                    return found
            except urllib.error.HTTPError as error:
                said = error.read().decode("utf-8", "replace")[:500]
                if error.code not in _TRY_AGAIN:
                    raise ValueError(f"{url}: expected an answer, found status {error.code}: {said}") from None
                wait_s = _retry_after_s(error.headers.get("Retry-After"), wait_s)
                problem = f"status {error.code}: {said}"
            except (urllib.error.URLError, TimeoutError, ConnectionError, json.JSONDecodeError) as error:
                problem = str(error)
            if trial < self.num_tries:
                log(f"{url}: {problem}; trying again in {wait_s:g} s ({trial} of {self.num_tries})")
                time.sleep(wait_s)
        raise ValueError(
            f"{url}: expected an answer within {self.num_tries} tries, found {problem}; is the server running? The same command continues"
        )

    def _cannot(self, what: str) -> NoReturn:
        raise NotImplementedError(f"engine=server cannot {what} through the OpenAI API; engine=vllm can (and engine=hf, slower)")

    def prefill(self, responses: Iterable[Response], settings: PrefillSettings) -> Iterator[Sample]:
        self._cannot("hand out hidden states")

    def speculate(self, requests: Sequence[SpeculateRequest], draft: Path | None, settings: SpeculateSettings) -> Acceptance:
        self._cannot("load a head and count what is accepted")

    def baseline(self, requests: Sequence[SpeculateRequest], settings: SpeculateSettings) -> Baseline:
        self._cannot("be compared with its own speculation")

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.word,
            "version": self.version,
            "url": self.url,
            "model": self.model,
            "dtype": self.dtype,
            "concurrency": self.concurrency,
            "retokenize": self.retokenize,
            "stop_ids": list(self._stop_ids),
        }


def _retry_after_s(header: str | None, default_s: float) -> float:
    """The wait that a server asks for, in seconds; dates are not understood and count as not said."""
    return min(float(header), _LONGEST_WAIT_S) if header is not None and header.isdigit() else default_s


def _concurrently(call: Callable[[Any], Any], items: Sequence[Any], *, concurrency: int) -> Iterator[Any]:
    """Call for every item, ``concurrency`` at a time, and yield results as they come; the first error ends it."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((call(item), None))
            except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
                done.put((None, error))
                return

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(items)))]
    for thread in threads:
        thread.start()
    try:
        for _ in items:
            result, error = done.get()
            if error is not None:
                raise error
            yield result
    finally:
        stopped.set()
