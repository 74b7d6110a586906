"""Rules of small games: plain Python, so that an environment server can import them too."""
