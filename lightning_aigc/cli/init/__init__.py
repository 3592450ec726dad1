"""`lightning init`: a config from a folder of images, a base model and a card."""
