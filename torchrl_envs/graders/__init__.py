"""Rewards that a program can verify: exact answers, formats, mathematics in killable processes."""
