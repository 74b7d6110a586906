"""Tasks of tau2-bench: customer service with tools, rules, and a customer who is simulated."""
