"""Engines that are not there: recorded streams played again, on the real wire or under a fake clock."""
