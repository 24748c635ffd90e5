"""The scheduler: relay streams -> index -> route -> outcome -> ledger.

Read `service` first: it is the whole of it without I/O. `intake`, `routing`, `reports` and `http` are its edges.
"""
