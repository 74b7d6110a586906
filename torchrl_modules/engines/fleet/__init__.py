"""Several engines behind one: who serves, who draws what, and how an engine comes back."""
