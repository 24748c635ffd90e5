"""Relays, wire and schedulers in one process, under a simulated network and clock: every run is its seed's alone."""
