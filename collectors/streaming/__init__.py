"""Collection beside training, episode by episode."""
