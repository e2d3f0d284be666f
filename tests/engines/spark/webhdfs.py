"""Stand-in for HDFS: a directory of this host through WebHDFS's REST interface, as fsspec's client knows it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_PREFIX = "/webhdfs/v1"


def _status(path: Path, name: str = "") -> dict[str, Any]:
    found = path.stat()
    kind, length = ("DIRECTORY", 0) if path.is_dir() else ("FILE", found.st_size)
    times = {"accessTime": int(found.st_atime * 1000), "modificationTime": int(found.st_mtime * 1000)}
    names = {"owner": "root", "group": "root", "permission": "755", "pathSuffix": name, "type": kind}
    return {**times, **names, "length": length, "blockSize": 1 << 27, "replication": 1}


class _Handler(BaseHTTPRequestHandler):
    """Name node and data node in one: content goes through a second request, as on a cluster."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815  the library's names

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        options = {name.lower(): values[0] for name, values in parse_qs(url.query).items()}
        path = self.server.root / unquote(url.path).removeprefix(_PREFIX).strip("/")
        operation = options["op"].upper()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) if "data" in options else self._drain()
        self.server.operations.append((operation, self.headers.get("User-Agent", "")))
        try:
            getattr(self, f"_{operation.lower()}")(path, options, body)
        except FileNotFoundError as error:
            reason = {"exception": "FileNotFoundException", "javaClassName": "java.io.FileNotFoundException"}
            self._reply(404, {"RemoteException": {**reason, "message": str(error)}})

    def _drain(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _reply(self, code: int, value: object = None, *, data: bytes = b"", location: str = "") -> None:
        content = data if value is None else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/octet-stream" if value is None else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")  # nothing is left of a test
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(content)

    def _redirects(self, options: dict[str, str]) -> bool:
        """Send the client to the data node, unless it is there."""
        if "data" in options:
            return False
        host = self.headers["Host"]
        self._reply(307, location=f"http://{host}{self.path}&data=true")
        return True

    def _getfilestatus(self, path: Path, options: dict[str, str], body: bytes) -> None:
        self._reply(200, {"FileStatus": _status(path)})

    def _liststatus(self, path: Path, options: dict[str, str], body: bytes) -> None:
        children = [(each, each.name) for each in sorted(path.iterdir())] if path.is_dir() else [(path, "")]
        self._reply(200, {"FileStatuses": {"FileStatus": [_status(each, name) for each, name in children]}})

    def _mkdirs(self, path: Path, options: dict[str, str], body: bytes) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._reply(200, {"boolean": True})

    def _create(self, path: Path, options: dict[str, str], body: bytes) -> None:
        if not self._redirects(options):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
            self._reply(201)

    def _append(self, path: Path, options: dict[str, str], body: bytes) -> None:
        if not self._redirects(options):
            with path.open("ab") as file:
                file.write(body)
            self._reply(200)

    def _open(self, path: Path, options: dict[str, str], body: bytes) -> None:
        content = path.read_bytes()
        if not self._redirects(options):
            begin = int(options.get("offset", 0))
            end = begin + int(options["length"]) if "length" in options else len(content)
            self._reply(200, data=content[begin:end])

    def _rename(self, path: Path, options: dict[str, str], body: bytes) -> None:
        target = self.server.root / options["destination"].strip("/")
        if target.is_dir():
            target /= path.name
        can_be = not target.exists()  # HDFS replaces nothing
        if can_be:
            path.rename(target)
        self._reply(200, {"boolean": can_be})

    def _delete(self, path: Path, options: dict[str, str], body: bytes) -> None:
        is_there = path.exists()
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        self._reply(200, {"boolean": is_there})

    def _setpermission(self, path: Path, options: dict[str, str], body: bytes) -> None:
        self._reply(200)

    _settimes = _setreplication = _setpermission

    def _getserverdefaults(self, path: Path, options: dict[str, str], body: bytes) -> None:
        sizes = {"blockSize": 1 << 27, "bytesPerChecksum": 512, "writePacketSize": 65536, "fileBufferSize": 4096}
        others = {
            "replication": 1,
            "encryptDataTransfer": False,
            "trashInterval": 0,
            "checksumType": 1,
            "keyProviderUri": "",
        }
        self._reply(200, {"FsServerDefaults": {**sizes, **others, "defaultStoragePolicyId": 0}})


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        self.root = root
        #: Operations with the client's name, in order.
        self.operations: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)


@contextmanager
def serve_webhdfs(root: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Serve a directory; yields ``webhdfs://127.0.0.1:PORT``, and the list of operations."""
    with _Server(root) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"webhdfs://127.0.0.1:{server.server_address[1]}", server.operations
        finally:
            server.shutdown()
            thread.join()
