"""Backend of ranks on several hosts: shared memory inside a host, a network between hosts."""
