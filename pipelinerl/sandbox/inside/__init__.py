"""Runs inside the sandbox, with the standard library only; started as scripts, never imported by the framework."""
