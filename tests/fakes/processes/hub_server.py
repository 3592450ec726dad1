"""A small Hugging Face Hub on this machine: it takes repositories, large files by LFS, and commits."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml


@dataclass
class Hub:
    """Repositories that the server has received."""

    address: str = ""
    answer: int = 200
    """Status of each answer; another than 200 refuses."""
    tokens: set[str] = field(default_factory=set)
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name the body of the request that made it."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by their sha256."""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Committed files by repository and path."""


@contextlib.contextmanager
def served_hub() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _send(self, found: Any, status: int = 200) -> None:
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_PUT(self) -> None:
            content = self._body()
            hub.objects[hashlib.sha256(content).hexdigest()] = content
            self._send({})

        def do_GET(self) -> None:
            self._send({"error": "not found"}, 404)

        def do_POST(self) -> None:
            content = self._body()
            hub.tokens.add(self.headers.get("Authorization", ""))
            if hub.answer != 200:
                self._send({"error": "refused"}, hub.answer)
            else:
                self._send(self._answer(self.path.partition("?")[0], content))

        def _answer(self, path: str, content: bytes) -> Any:
            if path == "/api/repos/create":
                given = json.loads(content)
                name = f"{given['organization']}/{given['name']}" if given.get("organization") else given["name"]
                hub.repositories[name] = given
                return {"url": f"{hub.address}/{name}"}
            if path == "/api/validate-yaml":
                head = re.match(r"---\n(.*?)\n---\n", json.loads(content)["content"], re.DOTALL)
                assert head is not None and isinstance(yaml.safe_load(head[1]), dict)
                return {"errors": [], "warnings": []}
            if "/preupload/" in path:
                files = json.loads(content)["files"]
                large = (".safetensors", ".png")
                return {
                    "files": [
                        {
                            "path": each["path"],
                            "uploadMode": "lfs" if each["path"].endswith(large) else "regular",
                            "shouldIgnore": False,
                        }
                        for each in files
                    ]
                }
            if path.endswith("/info/lfs/objects/batch"):
                objects = json.loads(content)["objects"]
                actions = [{"upload": {"href": f"{hub.address}/objects/{each['oid']}"}} for each in objects]
                found = [each | {"actions": action} for each, action in zip(objects, actions, strict=True)]
                return {"transfer": "basic", "objects": found}
            (repository,) = re.fullmatch(r"/api/models/(.+)/commit/main", path).groups()  # type: ignore[union-attr]
            hub.files.setdefault(repository, {}).update(_committed(content, hub.objects))
            return {"commitUrl": f"{hub.address}/{repository}/commit/{'0' * 40}", "commitOid": "0" * 40}

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


def _committed(content: bytes, objects: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a commit's lines of JSON."""
    found = {}
    for line in content.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "file":
            found[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            found[value["path"]] = objects[value["oid"]]
    return found
