"""A small server with the four routes of SGLang that matter here, and its answers as SGLang 0.5.23
gives them. It loads files from the path in a request, and records all requests."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class FakeSGLang:
    """`fails` maps a route to what happens there: a status, "hang", "close", "text"; or a function
    of the body that returns a status or None."""

    def __init__(self, api_key: str = "") -> None:
        self.asked: list[str] = []
        self.bodies: dict[str, dict[str, Any]] = {}
        self.fails: dict[str, Any] = {}
        self.paused = False
        self.loaded: dict[str, torch.Tensor] = {}
        self.loaded_while_paused = True
        self.version = ""
        self.api_key = api_key
        self._hanging = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner._answer(self, body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _answer(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.asked.append(to.path)
        self.bodies[to.path] = body
        if self.api_key and to.headers.get("Authorization") != f"Bearer {self.api_key}":
            _send(to, 401, {"error": "Unauthorized"})
            return
        fault = self.fails.get(to.path)
        fault = fault(body) if callable(fault) else fault
        if fault == "hang":
            self._hanging.wait(30)
            fault = "close"
        if fault == "close":
            to.close_connection = True
        elif fault == "text":
            _send(to, 200, "not JSON")
        elif fault is not None:
            _send(to, fault, {"success": False, "message": "out of memory"} if fault == 400 else {})
        elif to.path == "/pause_generation":
            self.paused = True
            _send(to, 200, {"message": "Generation paused successfully.", "status": "ok"})
        elif to.path == "/continue_generation":
            self.paused = False
            _send(to, 200, {"message": "Generation continued successfully.", "status": "ok"})
        else:
            self._load(body)
            _send(to, 200, {"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    def _load(self, body: dict[str, Any]) -> None:
        self.loaded_while_paused &= self.paused
        self.loaded = {}
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            self.loaded.update(load_file(file))
        self.version = body["weight_version"]
        time.sleep(0.01)

    def close(self) -> None:
        self._hanging.set()
        self._server.shutdown()
        self._server.server_close()


def _send(to: BaseHTTPRequestHandler, status: int, answer: dict[str, Any] | str) -> None:
    data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    to.send_response(status)
    to.send_header("Content-Length", str(len(data)))
    to.end_headers()
    to.wfile.write(data)
