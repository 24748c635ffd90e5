"""Replays request traces against the production scheduler: engines, relays' transport and time are simulated."""
