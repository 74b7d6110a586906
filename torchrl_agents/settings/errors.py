"""What is wrong with a command line."""


class SettingsError(ValueError):
    """A setting can't work; shown without a traceback."""
