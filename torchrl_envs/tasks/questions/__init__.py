"""Questions of reasoning-gym: as they are, and easy ones that a model made here can learn."""
