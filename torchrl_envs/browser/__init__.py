"""A headless Chromium that reaches the allowed hosts only."""
