"""A stand-in for ssh and sshd whose remote commands are below no process of the client's: they outlive it.

``serve SOCKET``: run what clients ask for. ``SOCKET ... -- HOST COMMAND``: a client, with its stdin, stdout and stderr.
"""

import os
import socket
import subprocess
import sys
import threading


def serve(path: str) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    print("ready", flush=True)
    while True:
        threading.Thread(target=run, args=(listening.accept()[0],), daemon=True).start()


def run(client: socket.socket) -> None:
    data, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
    host, command = data.decode().split("\0")
    stdin, stdout, stderr = descriptors
    environ = {**os.environ, "SSH_CONNECTION": "127.0.0.1 50000 127.0.0.1 22", "REIGEN_HOST_ID": host}
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=stdin, stdout=stdout, stderr=stderr, env=environ, start_new_session=True
    )
    for descriptor in descriptors:
        os.close(descriptor)
    code = process.wait()
    with client:
        client.send(bytes([code & 255]), socket.MSG_NOSIGNAL)


def ask(path: str, arguments: list[str]) -> int:
    host, command = arguments[arguments.index("--") + 1 :]
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    socket.send_fds(server, [f"{host}\0{command}".encode()], [0, 1, 2])
    os.close(0)
    os.close(1)
    return (server.recv(1) or b"\xff")[0]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
