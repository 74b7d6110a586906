"""Sources of tools: functions, environments, MCP servers, Python, a browser."""
