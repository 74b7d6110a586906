"""Rewards: functions, answers, divergences."""
