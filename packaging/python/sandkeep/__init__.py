"""Sandkeep: persistent sandboxes for AI agents. This package carries the program `keep`."""
