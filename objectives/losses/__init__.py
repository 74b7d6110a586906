"""Losses: modules that read a batch and call :mod:`objectives.functional`."""
