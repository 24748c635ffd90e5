"""The `servingfleet` command: for people who run a fleet, and for their scripts."""
