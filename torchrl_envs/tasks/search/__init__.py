"""Questions and a search tool: a retriever, pages that are made up, and the task."""
