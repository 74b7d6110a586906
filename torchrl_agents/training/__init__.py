"""The training loop that recipes share, and how one of its steps is made."""
