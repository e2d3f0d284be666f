"""`reigen server`: a server of a job with parameter servers, without the program that its workers run."""

from functools import partial

from reigen.cli.kv_role import serve_role

main = partial(serve_role, "server")
