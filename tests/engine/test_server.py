"""engine=server against a server in this process: ids in and out, limits, retries, refusals."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mtp_train.engine.base import GenerateRequest, PrefillSettings, Sampling
from mtp_train.engine.server import ServerEngine

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=5, seed=3)


class Completions(http.server.BaseHTTPRequestHandler):
    """Answers with the prompt's ids counted up; fails as often as the test asks for."""

    def do_POST(self) -> None:
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with state["lock"]:
            state["bodies"].append(body)
            state["keys"].add(self.headers["Authorization"])
            state["open"] += 1
            state["most"] = max(state["most"], state["open"])
            failing = state["failures"].pop() if state["failures"] else None
        time.sleep(0.02)
        with state["lock"]:
            state["open"] -= 1
        if failing == "cut":
            self.close_connection = True
            return
        ids = [token + 1 for token in body["prompt"]][: body["max_tokens"]]
        choice = {"text": "x", "finish_reason": "length"} | ({"token_ids": ids} if state["gives_ids"] else {})
        self._answer(failing or 200, {"choices": [choice]} if failing is None else {"error": "on purpose"})

    def do_GET(self) -> None:
        self._answer(200, {"version": "9.9"})

    def _answer(self, status: int, document: dict) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server():
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    served.state = {"lock": threading.Lock(), "bodies": [], "keys": set(), "open": 0, "most": 0, "failures": [], "gives_ids": True}
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def engine(server, target: Path, **changes) -> ServerEngine:
    settings = {
        "target_path": target,
        "trust_remote_code": False,
        "load_head": None,
        "url": f"http://127.0.0.1:{server.server_address[1]}/v1",
        "model": "m",
        "api_key_file": None,
        "concurrency": 3,
        "num_tries": 4,
        "first_wait_s": 0.01,
        "timeout_s": 10.0,
        "retokenize": False,
        "dtype": "bfloat16",
    }
    return ServerEngine(**{**settings, **changes})


def asked(count: int) -> list[GenerateRequest]:
    return [GenerateRequest(request_id=f"r{i}", token_ids=(10 + i, 20, 30), max_new_tokens=2 + i % 3) for i in range(count)]


def test_ids_go_in_and_come_out_within_the_limit(server, tiny_target: Path, stop_ids, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    ours = engine(server, tiny_target, api_key_file=key)
    found = {answer.request_id: answer for answer in ours.generate(asked(12), SAMPLING)}
    assert {name: answer.token_ids for name, answer in found.items()} == {f"r{i}": (11 + i, 21, 31)[: min(2 + i % 3, 5)] for i in range(12)}
    assert 1 < server.state["most"] <= 3 and server.state["keys"] == {"Bearer secret"}
    bodies = {tuple(body["prompt"]): body for body in server.state["bodies"]}
    assert len({body["seed"] for body in bodies.values()}) == 12, "each request draws by a seed of its own"
    one = bodies[(10, 20, 30)]
    assert (one["temperature"], one["top_p"], one["max_tokens"], one["stop_token_ids"]) == (0.7, 0.9, 2, sorted(stop_ids))
    assert ours.version == "server 9.9"


def test_failures_that_pass_are_tried_again(server, tiny_target: Path) -> None:
    server.state["failures"] = [503, 429, "cut", 500]
    assert len(list(engine(server, tiny_target).generate(asked(3), SAMPLING))) == 3
    assert len(server.state["bodies"]) == 7


def test_failures_that_stay_end_with_what_the_server_said(server, tiny_target: Path) -> None:
    server.state["failures"] = [503] * 9
    with pytest.raises(ValueError, match=r"within 4 tries, found status 503: .*on purpose"):
        list(engine(server, tiny_target, concurrency=1).generate(asked(1), SAMPLING))
    assert len(server.state["bodies"]) == 4
    server.state["failures"] = [400]
    with pytest.raises(ValueError, match="status 400"):
        list(engine(server, tiny_target, concurrency=1).generate(asked(1), SAMPLING))
    assert len(server.state["bodies"]) == 5, "a refusal is not tried again"


def test_text_without_ids_is_refused_unless_allowed(server, tiny_llama: Path) -> None:
    server.state["gives_ids"] = False
    with pytest.raises(ValueError, match="retokenize=true"):
        list(engine(server, tiny_llama, concurrency=1).generate(asked(1), SAMPLING))
    answer = next(iter(engine(server, tiny_llama, retokenize=True).generate(asked(1), SAMPLING)))
    assert len(answer.token_ids) == 1


def test_regenerate_goes_on_where_the_server_left_off(server, tiny_llama: Path, tmp_path: Path) -> None:
    """The server fails in the middle: what was answered stays, and the same command asks for the rest alone."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}?"}) + "\n" for i in range(8)), encoding="utf-8")
    words = [
        *("target=local", f"target.path={tiny_llama}", "target.name=tiny", f"run={tmp_path / 'run'}"),
        *("prompt=file", f"prompt.source=[{prompts}]", "sampling.max_new_tokens=6"),
        *("engine=server", f"engine.url=http://127.0.0.1:{server.server_address[1]}/v1", "engine.model=m"),
        *("engine.concurrency=1", "engine.num_tries=1"),
    ]

    def regenerate() -> subprocess.CompletedProcess[str]:
        command, environment = [sys.executable, "-m", "mtp_train.regenerate", *words], {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    server.state["failures"] = [500, None, None, None]  # taken from the end
    stopped = regenerate()
    assert stopped.returncode == 2 and "found status 500" in stopped.stderr and "Traceback" not in stopped.stderr, stopped.stderr
    done = regenerate()
    assert done.returncode == 0 and "3 of 8 answers are there already" in done.stderr, done.stderr
    bodies = server.state["bodies"]
    assert len(bodies) == 9
    rows = [json.loads(line) for line in (tmp_path / "run" / "responses" / "responses.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({row["prompt_id"] for row in rows}) == len(rows) == 8
    given = {(*body["prompt"], *(token + 1 for token in body["prompt"][:6])) for body in bodies}
    assert {tuple(row["token_ids"]) for row in rows} == given, "the ids that the server gave"


def test_what_it_cannot_do_names_who_can(server, tiny_target: Path) -> None:
    with pytest.raises(NotImplementedError, match="engine=vllm"):
        engine(server, tiny_target).prefill([], PrefillSettings(target_layer_ids=(), top_k=None))
    with pytest.raises(ValueError, match=r"engine\.url"):
        engine(server, tiny_target, url="ftp://x")
