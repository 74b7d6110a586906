"""Everything about vLLM: in process, asynchronous, as a server, and its weights."""
