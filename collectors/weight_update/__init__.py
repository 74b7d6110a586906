"""Ways in which a trainer's weights reach a policy; one a file."""
