"""Agents that own their loop: programs that ask a model over HTTP, as they ask a hosted one."""
