# Made by sdk/generate.py. Do not edit. Its source is _async/__init__.py.
"""The synchronous client."""
