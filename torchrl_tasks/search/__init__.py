"""Questions whose answer lies some pages away, and a tool that finds pages."""
