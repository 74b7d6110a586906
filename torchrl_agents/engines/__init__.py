"""What draws the tokens of a recipe, where that is not the trained model itself."""
