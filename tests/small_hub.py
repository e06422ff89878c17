"""A Hugging Face Hub in miniature, on this machine: the routes that huggingface_hub asks for when it fetches a model."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = 1000  # bytes from which a file is stored as a large one, by its SHA-256
PIECE = 1 << 16


@dataclass
class Repository:
    """Files by commit, and the commits of branches and tags."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def add(self, files: dict[str, bytes], *revisions: str) -> str:
        """A commit of these files, to which main leads, and so do `revisions`."""
        commit = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[commit] = files
        self.revisions |= dict.fromkeys(("main", commit, *revisions), commit)
        return commit


@dataclass
class Hub:
    """`served` has file names and bytes of their contents; `breaks` bytes after which a file's connection ends, once;
    `holds` files in the middle of which a connection stays silent while `held` is not set."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    served: list[tuple[str, int]] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    holds: set[str] = field(default_factory=set)
    down: set[str] = field(default_factory=set)  # files for which the answer is 404
    reached: threading.Event = field(default_factory=threading.Event)
    held: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

    def bytes_of(self, file: str) -> int:
        return sum(size for name, size in self.served if name == file)


def digest(data: bytes) -> str:
    """The name of a content: git's for a small file, SHA-256 for a large one."""
    return hashlib.sha256(data).hexdigest() if len(data) >= LARGE else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def small_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"] and parts[4:5] == ["revision"]:
                self.answer_listing("/".join(parts[2:4]), "/".join(parts[5:]))
            elif parts[2:3] == ["resolve"]:
                self.answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
            else:
                self.refuse(404, "EntryNotFound")

        def answer_listing(self, name: str, revision: str):
            if (repository := hub.repositories.get(name)) is None:
                return self.refuse(401, "RepoNotFound")
            if (commit := repository.revisions.get(revision)) is None:
                return self.refuse(404, "RevisionNotFound")
            files = [listed(file, data) for file, data in repository.commits[commit].items()]
            return self.answer(json.dumps({"id": name, "sha": commit, "siblings": files}).encode(), {})

        def answer_file(self, name: str, revision: str, file: str):
            repository = hub.repositories[name]
            if repository.gated:
                return self.refuse(403, "GatedRepo")
            commit = repository.revisions[revision]
            if (data := repository.commits[commit].get(file)) is None or file in hub.down:
                return self.refuse(404, "EntryNotFound")
            return self.answer(data, {"ETag": f'"{digest(data)}"', "X-Repo-Commit": commit}, file)

        def answer(self, data: bytes, headers: dict[str, str], file: str = ""):
            first = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
            self.send_response(206 if first else 200)
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            for key, value in {**headers, "Content-Length": str(len(data) - first)}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.send(data[first:], file)

        def send(self, data: bytes, file: str):
            if file in hub.breaks:
                data = data[: hub.breaks.pop(file)]
                self.close_connection = True
            if file in hub.holds:
                self.wfile.write(data[: len(data) // 2])
                hub.reached.set()
                hub.held.wait()
                self.close_connection = True
                return
            for start in range(0, len(data), PIECE):
                self.wfile.write(data[start : start + PIECE])
            hub.served += [(file, len(data))] if file else []

        def refuse(self, status: int, code: str):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.held.set()
        server.shutdown()
        server.server_close()


def listed(file: str, data: bytes) -> dict:
    """A file in the list of a repository."""
    large = {"sha256": digest(data), "size": len(data), "pointerSize": 130}
    return {"rfilename": file, "size": len(data), "blobId": digest(data), **({"lfs": large} if len(data) >= LARGE else {})}
