"""Is this stream what we think it is? The invariants, what follows when one fails, and how the checks are made.

Pure. Each module is one part: the table (`invariants`), the stream's form (`fingerprint`), what only a run of events
shows (`watches`), whose predictions count (`lag`), what is held against it (`standing`), a prompt that proves it (`canary`).
"""
