"""The program ``torchrl-agents``, and what every recipe of ``sota-implementations`` is made of."""
