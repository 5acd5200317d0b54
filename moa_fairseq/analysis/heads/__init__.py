"""What a model's experts do on a split of its data, as a page."""
