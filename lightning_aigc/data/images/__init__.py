"""Reading, checking, cropping and masking of images."""
