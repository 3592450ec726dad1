"""Loading, encoding, sampling, quantizing and saving of a pipeline."""
