"""Tasks of other libraries and of users."""
